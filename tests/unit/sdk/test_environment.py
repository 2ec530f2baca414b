"""Where the address of a network comes from, for the command line and for clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import p2pserve
from p2pserve import AsyncClient, Client, InvalidAddress, InvalidRequest
from p2pserve.sdk import environment
from p2pserve.sdk.environment import network_address

ADDRESS = "203.0.113.7:4001"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (environment.BOOTSTRAP, environment.TOKEN, environment.TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)


def test_what_is_given_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", f" {ADDRESS}\n")
    monkeypatch.setenv("P2PSERVE_TOKEN", "p2p_client_x")
    assert network_address(None, None) == (ADDRESS, "p2p_client_x")
    assert network_address("127.0.0.1:1", None) == ("127.0.0.1:1", "p2p_client_x")
    assert network_address("127.0.0.1:1", "p2p_client_y") == ("127.0.0.1:1", "p2p_client_y")


def test_a_token_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PSERVE_TOKEN", "")
    assert network_address(ADDRESS, None) == (ADDRESS, None)


class TestConfigFile:
    """Its top has what a client needs."""

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("P2PSERVE_CONFIG", str(tmp_path / "p2pserve.toml"))
        return tmp_path / "p2pserve.toml"

    def test_it_counts_where_the_environment_says_nothing(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file.write_text(f"bootstrap = ['{ADDRESS}', 'h:1']\ntoken = 'p2p_client_x'\n[join]\nbootstrap = 'h:2'\n")
        assert network_address(None, None) == (f"{ADDRESS},h:1", "p2p_client_x")
        assert network_address("h:3", None) == ("h:3", None)
        monkeypatch.setenv("P2PSERVE_BOOTSTRAP", "h:4")
        assert network_address(None, None) == ("h:4", None)

    def test_a_token_in_a_file_is_enough(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (file.parent / "client.token").write_text("p2p_client_y\n")
        file.write_text("token-file = 'client.token'\n")
        assert network_address(None, None) == ("p2p_client_y", None)
        file.write_text("")
        monkeypatch.setenv("P2PSERVE_TOKEN_FILE", str(file.parent / "client.token"))
        assert network_address(None, None) == ("p2p_client_y", None)

    def test_a_nearer_token_is_of_another_network(self, file: Path) -> None:
        file.write_text("bootstrap = 'p2p_client_x,h:1'\n")
        assert network_address(None, "p2p_client_y") == ("p2p_client_y", None)
        file.write_text("bootstrap = 'h:1'\n")
        assert network_address(None, "p2p_client_y") == ("h:1", "p2p_client_y")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("bootstrap = 1", r"p2pserve.toml: bootstrap: 1 is no text"),
            ("bootstrap = [", r"p2pserve.toml: .*a line is `key = value`"),
            ("token-file = 'none'", r"p2pserve.toml: token-file: .*/none cannot be read"),
        ],
    )
    def test_mistakes_are_of_the_address(self, text: str, says: str, file: Path) -> None:
        file.write_text(text)
        with pytest.raises(InvalidAddress, match=says):
            Client()


@pytest.mark.parametrize("client", [Client, AsyncClient])
class TestClients:
    def test_they_read_the_environment(self, client: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("P2PSERVE_BOOTSTRAP", ADDRESS)
        assert "not connected" in repr(client())
        monkeypatch.setenv("P2PSERVE_BOOTSTRAP", "nonsense")
        with pytest.raises(InvalidAddress, match="nonsense"):
            client()

    @pytest.mark.parametrize("where", [None, "", "  "])
    def test_no_address_at_all(self, client: Callable[..., object], where: str | None) -> None:
        with pytest.raises(InvalidAddress, match=r"bootstrap: give the token .* or set P2PSERVE_BOOTSTRAP"):
            client(where)

    def test_what_is_no_text(self, client: Callable[..., object]) -> None:
        with pytest.raises(InvalidAddress, match="bootstrap: 4001 is no text"):
            client(4001)
        with pytest.raises(InvalidAddress, match="token: 7 is no text"):
            client(ADDRESS, token=7)

    @pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "10"])
    def test_a_timeout_that_is_none(self, client: Callable[..., object], timeout_s: object) -> None:
        with pytest.raises(InvalidRequest, match=r"timeout_s: .* is not a number of seconds above 0"):
            client(ADDRESS, timeout_s=timeout_s)


def test_all_that_a_program_catches_is_at_the_front_door() -> None:
    """`import p2pserve` is enough: clients, what they return, and every error of theirs."""
    from p2pserve.sdk import errors

    kinds = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    raised = {name for name, value in kinds.items() if issubclass(value, errors.ClientError)}
    assert "DeadlineExceeded" in raised
    assert raised <= set(p2pserve.__all__)
    assert set(p2pserve.__all__) - {"__version__"} == set(p2pserve.sdk.__all__)
    assert p2pserve.RequestFailed is errors.RequestFailed
    assert issubclass(p2pserve.DeadlineExceeded, p2pserve.ClientError)
