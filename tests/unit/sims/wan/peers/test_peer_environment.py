"""The peers' own environment: what is made, installed and tried, and the reason when that fails."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pserve.sims.wan.peers.environment import (
    PACKAGES,
    PeerEnvironment,
    default_folder,
    last_line,
    run_command,
)


class FakeRun:
    """Answers commands by a word in them, and keeps them."""

    def __init__(self, **reasons: str) -> None:
        self._reasons = reasons
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], seconds: float) -> str:
        self.commands.append(list(command))
        for word, reason in self._reasons.items():
            if word in command or any(part.startswith(word) for part in command):
                return reason
        return ""


class InstallingRun(FakeRun):
    """A peer cannot be imported until pip has run."""

    def __call__(self, command: Sequence[str], seconds: float) -> str:
        super().__call__(command, seconds)
        installed = any("pip" in each for each in self.commands)
        return "" if installed or "venv" in command else "ModuleNotFoundError: No module named 'nixl_cu12'"


def test_what_is_there_is_only_tried(tmp_path: Path) -> None:
    run = FakeRun()
    assert PeerEnvironment(tmp_path / "peers", run=run).prepare("nixl") == ""
    assert run.commands == [[str(tmp_path / "peers" / "bin" / "python"), "-c", "import nixl_cu12._api"]]


def test_what_is_not_there_is_installed_in_a_folder_of_its_own_and_tried_again(tmp_path: Path) -> None:
    run, folder = InstallingRun(), tmp_path / "peers"
    environment = PeerEnvironment(folder, run=run)
    assert environment.prepare("nixl") == ""
    tried, made, installed, again = run.commands
    assert made == [sys.executable, "-m", "venv", str(folder)]
    assert installed[0] == environment.python != sys.executable
    assert installed[-3:] == list(PACKAGES["nixl"].requirements)
    assert tried == again


def test_a_package_that_does_not_install_says_what_pip_said(tmp_path: Path) -> None:
    run = FakeRun(**{"import nixl": "ModuleNotFoundError", "pip": "ERROR: No matching distribution found for nixl"})
    reason = PeerEnvironment(tmp_path, run=run).prepare("nixl")
    assert reason == "pip: ERROR: No matching distribution found for nixl"


def test_a_library_that_is_missing_on_the_system_is_named_with_its_package(tmp_path: Path) -> None:
    run = FakeRun(**{"import mooncake": "ImportError: libibverbs.so.1: cannot open shared object file"})
    reason = PeerEnvironment(tmp_path, run=run).prepare("mooncake")
    assert reason.startswith("ImportError: libibverbs.so.1")
    assert "apt-get install libibverbs1" in reason


def test_nothing_is_installed_where_that_was_not_allowed(tmp_path: Path) -> None:
    run = FakeRun(**{"import nixl": "ModuleNotFoundError"})
    reason = PeerEnvironment(tmp_path / "peers", install=False, run=run).prepare("nixl")
    assert reason == "not installed, and installing was not allowed: ModuleNotFoundError"
    assert len(run.commands) == 1


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("pass", 60.0, ""),
        ("raise SystemExit(3)", 60.0, "ended with exit code 3"),
        ("import sys; sys.exit('first\\n  the   last ')", 60.0, "the last"),
        ("import time; time.sleep(60)", 0.2, "has not ended within 0.2 s"),
    ],
)
def test_a_command_fails_with_one_line(code: str, seconds: float, reason: str) -> None:
    found = run_command([sys.executable, "-c", code], seconds)
    assert found.endswith(reason)
    assert bool(found) == bool(reason)


def test_a_command_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    assert run_command([str(tmp_path / "none")], 1.0) == f"{tmp_path / 'none'}: No such file or directory"


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "p2pserve" / "peers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "p2pserve" / "peers"


def test_the_last_line_is_short_and_not_blank() -> None:
    assert last_line("a\nb  c\n\n  \n") == "b c"
    assert last_line("") == ""
    assert len(last_line("x" * 1000)) == 160
