"""`p2pserve token`: what it prints, and what it says of bad input."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pserve.bootstrap import Bootstrap, Identity, JoinToken, Role
from p2pserve.node.box.home import lock_home
from p2pserve.node.joining import new_network
from p2pserve.node.ownership import Ownership
from p2pserve.sdk.cli import main

HERE = Bootstrap("203.0.113.7", 4001, Identity(b"p" * 32).peer_id)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a network that has run once."""
    new_network(tmp_path / "bootstrap", pytest.fail)
    owner = Ownership.open(tmp_path / "bootstrap")
    owner.take_greetings(HERE, (), 1e9)
    return tmp_path


def run(home: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["token", arguments[0], "--home", str(home), *arguments[1:]]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_token_is_made_shown_revoked_and_no_longer_renewed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(home, capsys, "create", "--uses", "1", "--lead", "--name", "rented one").splitlines()
    assert " for one box that may lead, until 20" in made[0]
    token = JoinToken.parse(made[1].removeprefix("p2pserve join --bootstrap "))
    name = token.grant.certificate
    assert (token.grant.uses, token.grant.lead, token.bootstraps) == (1, True, (HERE,))
    shown = run(home, capsys, "list").splitlines()
    assert shown[0].split() == ["id", "role", "lead", "used", "state", "until", "(UTC)", "name"]
    assert shown[-1].split()[:5] == [name, "worker", "yes", "0/1", "valid"]
    assert shown[-1].endswith("rented one")
    assert not any("this box" in line for line in shown)
    renewed = run(home, capsys, "renew", name[:6], "--expires", "30d")
    assert JoinToken.parse(renewed.split()[-1]).grant.expires_at > token.grant.expires_at
    revoked = run(home, capsys, "revoke", name[:6])
    assert f"token {name} is revoked" in revoked
    assert "does not run" in revoked
    assert run(home, capsys, "list").splitlines()[-1].split()[4] == "revoked"


def test_programs_read_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(run(home, capsys, "create", "--role", "client", "--no-renew", "--format", "json"))
    assert JoinToken.parse(made["token"]).role is Role.CLIENT
    rows = {row["id"]: row for row in json.loads(run(home, capsys, "list", "--format", "json"))["tokens"]}
    row = rows[made["id"]]
    assert (row["role"], row["lead"], row["uses"], row["seen"], row["renews"]) == ("client", False, 256, 0, False)
    assert row["expires_at"] == made["expires_at"] == row["members_until"]
    with lock_home(home / "bootstrap"):
        told = json.loads(run(home, capsys, "revoke", made["id"], "--format", "json"))
    assert told["node_is_running"] is True


def test_an_admins_token_is_for_a_gateway(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(home, capsys, "create", "--role", "admin").splitlines()
    assert ", for 256 admins at a time, until " in said[0]
    assert said[1].startswith("p2pserve gateway --bootstrap p2p_admin_")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["create", "--uses", "0"], "--uses: 0 is less than 1"),
        (["create", "--uses", "5000"], "uses: 5000 boxes; a join token is for 1 to 4096"),
        (["create", "--expires", "soon"], "--expires: 'soon' is no time from now; write a number and its unit: 90s"),
        (["create", "--role", "owner"], "--role"),
        (["create", "--role", "client", "--lead"], "lead: a client"),
        (["create", "--name", "two\nlines"], "name: "),
        (["revoke", "ffffffff"], "id: no token 'ffffffff' was issued here"),
        (["renew", "f"], "id: 'f' is too short"),
        (["revoke"], "ID"),
        ([], "create, list, revoke, renew"),
    ],
)
def test_bad_input_is_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    given = [*arguments[:1], *(["--home", str(home)] if arguments else []), *arguments[1:]]
    assert main(["token", *given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err


def test_elsewhere_it_says_on_which_box_to_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "list", "--home", str(tmp_path)]) == 2
    assert "run this on the box that ran `p2pserve bootstrap`" in capsys.readouterr().err
