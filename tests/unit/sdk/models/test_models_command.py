"""`p2pserve models`: what it prints of a network and its catalogue, whom it asks for a change, and what it says of bad
input."""

import json
from pathlib import Path
from typing import Self

import msgspec
import pytest

from p2pserve.bootstrap import RemoteError
from p2pserve.coordinator.services.catalogue import EMPTY, CatalogueEntry, ServiceCatalogue, add_entry, remove_name
from p2pserve.node.catalogue.refusals import NOT_OWNER
from p2pserve.node.messages import Status
from p2pserve.node.owner.messages import CatalogueChange, CatalogueChanged
from p2pserve.sdk.actions import network as network_commands
from p2pserve.sdk.cli import main
from p2pserve.sdk.errors import RequestFailed

from ..test_reports import BOOT, FIRST, MODEL, SECOND, advert, node, status

TOKEN = ["--bootstrap", "p2p_admin_x"]
CHAT = CatalogueEntry(name="chat", model=MODEL.name, slo="5x", weight=2.0)
CODE = CatalogueEntry(name="code", model="/srv/models/coder")
Said = pytest.CaptureFixture[str]


class World:
    """A network that answers: its status, and the catalogue that the node `owner` keeps."""

    def __init__(self) -> None:
        self.catalogue = EMPTY
        self.nodes = (node(BOOT, "admin"), node(FIRST, advert=advert()), node(SECOND, advert=advert("starting")))
        self.owner = BOOT
        self.refusal: RemoteError | None = None
        self.asked: list[str] = []

    def status(self) -> Status:
        return msgspec.structs.replace(
            status(*self.nodes), catalogue=self.catalogue if self.catalogue.version else None
        )

    def change_catalogue(self, change: CatalogueChange, owner: str) -> CatalogueChanged:
        self.asked.append(owner)
        if self.refusal is not None or owner != self.owner:
            refusal = self.refusal or RemoteError(NOT_OWNER, "this box has not the network's key")
            raise RequestFailed(f"node x: {refusal.message}") from refusal
        if change.add is not None:
            self.catalogue = add_entry(self.catalogue, change.add)
        else:
            self.catalogue = remove_name(self.catalogue, change.remove or "")
        return CatalogueChanged(catalogue=self.catalogue)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Stands in for the client of every command."""
    made = World()

    class Told:
        def __init__(self, bootstrap: str, *, token: str | None, timeout_s: float) -> None:
            self.status, self.change_catalogue = made.status, made.change_catalogue

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

    monkeypatch.setattr(network_commands, "Client", Told)
    for name in ("P2PSERVE_TOKEN", "P2PSERVE_BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)
    return made


def run(capsys: Said, *arguments: str, code: int = 0) -> str:
    assert main(["models", *arguments, *TOKEN]) == code
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == (code != 0), err
    return out if code == 0 else err


def test_a_service_is_added_listed_shown_and_removed(world: World, capsys: Said) -> None:
    added = run(capsys, "add", "chat", "--model", MODEL.name, "--slo", "5x", "--weight", "2")
    assert "chat is in the catalogue" in added
    assert "(version 1)" in added
    assert world.catalogue.entries == (CHAT,)
    assert run(capsys, "list").splitlines()[1].split()[:4] == ["chat", MODEL.name, "2", "1"]
    shown = run(capsys, "show", "chat")
    assert f"chat: model {MODEL.name}, service {MODEL.service}" in shown
    assert "deadlines 5x, weight 2" in shown
    removed = run(capsys, "remove", "chat")
    assert "no new requests" in removed
    assert world.catalogue.removed == (MODEL.name,)
    assert "removed" in run(capsys, "list")
    assert "out of the catalogue" in run(capsys, "show", MODEL.service)


def test_without_a_command_it_lists_also_for_programs(world: World, capsys: Said) -> None:
    world.catalogue = ServiceCatalogue(version=2, entries=(CHAT, CODE))
    assert run(capsys) == run(capsys, "list")
    found = json.loads(run(capsys, "--format", "json"))
    assert [(each["entry"], each["name"], each["boxes"]) for each in found] == [
        ("chat", MODEL.name, 2),
        ("code", "/srv/models/coder", 0),
    ]
    (shown,) = json.loads(run(capsys, "show", "code", "--format", "json"))
    assert (shown["weight"], shown["nodes"]) == (1.0, [])
    assert "no box has it yet" in run(capsys, "show", "code")


def test_who_has_the_key_is_found_among_the_admins(world: World, capsys: Said) -> None:
    world.nodes, world.owner = (node(FIRST, "admin"), node(SECOND, "admin"), node(BOOT, "admin")), BOOT
    run(capsys, "add", "code", "--model", CODE.model)
    assert world.asked == [FIRST, SECOND, BOOT]
    world.owner = "away"
    assert "the box that ran `p2pserve bootstrap` is away" in run(capsys, "remove", "code", code=3)


@pytest.mark.parametrize(
    ("refusal", "code", "said"),
    [
        (RemoteError("forbidden", "clients may not"), 4, "token: only an admin of the network"),
        (RemoteError("invalid", "name: chat is in the catalogue already"), 2, "error: name: chat is in the catalogue"),
        (RemoteError("unknown_method", "this node does not answer"), 1, "does not answer"),
    ],
)
def test_a_refusal_is_a_line_and_a_code(world: World, capsys: Said, refusal: RemoteError, code: int, said: str) -> None:
    world.refusal = refusal
    assert said in run(capsys, "add", "chat", "--model", "a/b", code=code)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "chat"), "--model"),
        (("add", "two\nlines", "--model", "a/b"), r"name: 'two\nlines' is no name"),
        (("add", "", "--model", "a/b"), "name: '' is no name"),
        (("add", "chat", "--model", "../here"), "depends on where it is looked for"),
        (("add", "chat", "--model", "a/b/c"), "neither a whole path nor a Hugging Face id"),
        (("add", "chat", "--model", "a/b", "--weight", "0"), "weight: 0 is none"),
        (("add", "chat", "--model", "a/b", "--weight", "nan"), "--weight"),
        (("add", "chat", "--model", "a/b", "--slo", "soon"), "slo: 'soon' is neither like 5x"),
        (("show", "prose"), "name: this network has no 'prose'; it has chat"),
        (("sell",), "sell"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(
    world: World, capsys: Said, arguments: tuple[str, ...], said: str
) -> None:
    world.catalogue = ServiceCatalogue(version=1, entries=(CHAT,))
    assert said in run(capsys, *arguments, code=2)
    assert world.asked == []


def test_a_folder_of_this_machine_must_hold_a_model(world: World, capsys: Said, tmp_path: Path) -> None:
    told = run(capsys, "add", "chat", "--model", str(tmp_path), code=2)
    assert "is no folder of a model: there is no config.json in it" in told
    (tmp_path / "config.json").write_text("{}")
    run(capsys, "add", "chat", "--model", str(tmp_path))
    run(capsys, "add", "code", "--model", "/nowhere/on/this/machine")
    assert len(world.catalogue.entries) == 2


def test_without_a_network_it_says_how_to_name_one(world: World, capsys: Said) -> None:
    assert main(["models", "add", "chat", "--model", "a/b"]) == 2
    assert "bootstrap" in capsys.readouterr().err
