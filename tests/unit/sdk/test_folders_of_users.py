"""Where things are kept: the XDG folders, and the folder of earlier releases where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pserve.sdk import environment
from p2pserve.sdk.environment import config_path, describe_home, find_home
from p2pserve.sdk.session import client_folder

from .commands.parsing import parse


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user who has nothing yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("P2PSERVE_HOME", "P2PSERVE_CONFIG", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_new_user_has_xdg_folders(user: Path) -> None:
    assert config_path() == user / ".config/p2pserve/p2pserve.toml"
    assert find_home() == user / ".local/share/p2pserve"
    assert client_folder() == find_home() / "client"
    assert describe_home() is None


def test_xdg_variables_count_where_they_are_absolute(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert find_home() == Path("/data/p2pserve")
    assert config_path() == user / ".config/p2pserve/p2pserve.toml"


def test_the_variable_counts_before_both(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (user / ".p2pserve").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv(environment.HOME, "~/own")
    assert client_folder() == user / "own/client"
    assert parse(["join"]).home == user / "own"


def test_a_box_of_an_earlier_release_keeps_its_identity(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is used as it is, and one line says how to move it."""
    (user / ".p2pserve/node").mkdir(parents=True)
    (user / ".p2pserve/node/identity.key").write_text("key")
    assert parse(["join"]).home == find_home() == user / ".p2pserve"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"mv {user}/.p2pserve {user}/.local/share/p2pserve" in line
    parse(["leave"])
    assert capsys.readouterr().err == ""
    (user / ".local/share").mkdir(parents=True)
    (user / ".p2pserve").rename(user / ".local/share/p2pserve")  # as the line says
    assert (parse(["join"]).home / "node/identity.key").read_text() == "key"
    assert capsys.readouterr().err == ""


def test_of_two_folders_the_new_one_is_used_and_the_other_named(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (user / ".p2pserve").mkdir()
    (user / ".local/share/p2pserve").mkdir(parents=True)
    assert parse(["join"]).home == user / ".local/share/p2pserve"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"and not {user}/.p2pserve" in line
