"""The command line's errors, as far as they need no network."""

import errno
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

import p2pserve.sdk
from p2pserve.bootstrap import AddressError, PortInUse, Refused, TokenError, Unreachable
from p2pserve.node.box.errors import NodeError, NodeUsageError
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.engine.agent_side.engine_link import EngineRefused, EngineStartError
from p2pserve.node.models import ModelError
from p2pserve.node.models.errors import PromptError
from p2pserve.sdk.actions import network as commands
from p2pserve.sdk.actions import node as node_commands
from p2pserve.sdk.cli import main
from p2pserve.sdk.errors import (
    AccessRefused,
    DemoFailed,
    InvalidRequest,
    NotReady,
    RequestFailed,
    UsageError,
    first_of,
)
from p2pserve.sdk.failures import explain
from p2pserve.sdk.options.catalogue import COMMANDS

from .parsing import parse


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """The command line silences the log for the length of its process, which here goes on."""
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AddressError("x"), 2),
        (TokenError("x"), 2),
        (ModelError("x"), 2),
        (PromptError("x"), 2),
        (InvalidRequest("x"), 2),
        (UsageError("x"), 2),
        (NodeUsageError("x"), 2),
        (EngineRefused("x"), 2),
        (Unreachable("x"), 1),
        (Refused("x"), 4),
        (AccessRefused("x"), 4),
        (NotReady("x"), 3),
        (PortInUse("x"), 1),
        (NodeError("x"), 1),
        (EngineStartError("x"), 1),
        (RequestFailed("x"), 1),
        (DemoFailed("x"), 1),
    ],
)
def test_a_known_error_is_found_at_any_depth(error: Exception, code: int) -> None:
    nested = BaseExceptionGroup("a", [ValueError("y"), ExceptionGroup("b", [ExceptionGroup("c", [error])])])
    assert explain(error) == explain(nested) == (code, "x")


def test_an_error_is_one_line_and_a_bug_is_none() -> None:
    assert explain(NodeError("first\n  second")) == (1, "first second")
    assert explain(NodeError()) == (1, "NodeError")
    assert explain(ExceptionGroup("a", [ValueError("bug")])) is None


def test_first_of_keeps_the_order_of_the_group() -> None:
    group = ExceptionGroup("a", [ExceptionGroup("b", [KeyError("1")]), KeyError("2")])
    assert str(first_of(group, (KeyError,))) == "'1'"
    assert first_of(group, (OSError,)) is None


def error_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return code, err


TOKENLESS = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["join", "--port", "-3", "--bootstrap", TOKENLESS], "--port"),
        (["join", "--port", "4001", "--listen", "0.0.0.0:1"], "--listen"),
        (["join"], "bootstrap"),
        (["join", "--bootstrap", TOKENLESS, "--listen", "nowhere"], "nowhere"),
        (["join", "--bootstrap", TOKENLESS, "--kv-cache-mib", "0"], "--kv-cache-mib"),
        (["join", "--bootstrap", TOKENLESS, "--drain-s", "nan"], "--drain-s"),
        (["join", "--bootstrap", TOKENLESS, "--ends-at", "2001-01-01T00:00"], "--ends-at"),
        (["bootstrap", "--codec", "zip"], "--codec"),
        (["join", "--slo", "soon"], "--slo"),
        (["generate", "--bootstrap", TOKENLESS], "prompt"),
        (["generate", "--bootstrap", TOKENLESS, ""], "prompt"),
        (["generate", "--bootstrap", TOKENLESS, "bad \udcff"], "prompt"),
        (["generate", "--bootstrap", TOKENLESS, "a", "--max-tokens", "-5"], "max_tokens"),
        (["generate", "--bootstrap", TOKENLESS, "a", "--max-tokens", "x"], "--max-tokens"),
        (["generate", "--bootstrap", TOKENLESS, "a", "--temperature", "nan"], "temperature"),
        (["generate", "--bootstrap", TOKENLESS, "a", "--messages", "x.json"], "prompt"),
        (["generate", "--bootstrap", TOKENLESS, "--messages", "/no/such/file"], "messages"),
        (["generate", "a"], "bootstrap"),
        (["generate", "--bootstrap", "nonsense", "a"], "bootstrap"),
        (["generate", "--bootstrap", "host:0", "a"], "port 0"),
        (["generate", "--bootstrap", "p2p_client_abc", "a"], "token"),
        (["generate", "--bootstrap", "h:1", "--token", "abc", "a"], "token"),
        (["status", "--bootstrap", "1.2.3.4:99999"], "99999"),
        (["status", "--bootstrap", "1.2.3.4:5", "--timeout-s", "0"], "--timeout-s"),
        (["serve", "bundled", "--port", "99999"], "--port: 99999 is no port; take one from 1 to 65535"),
        (["join", "--bootstrap", "h:1", "--port", "99999"], "--port: 99999 is no port; take one from 1 to 65535"),
        (["demo", "--nodes", "0"], "nodes"),
        (["demo", "--nodes", "17"], "nodes"),
        (["demo", "--max-tokens", "0"], "--max-tokens"),
        (["demo", "--model", "/no/such/model"], "/no/such/model"),
        (["demo", "--wan", "--nodes", "3"], "--nodes"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("P2PSERVE_BOOTSTRAP", raising=False)
    code, line = error_line(arguments, capsys)
    assert code == 2
    assert line.startswith("p2pserve: error: ")
    assert named in line


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"\xff\xfe", "UTF-8"), (b"[", "not JSON"), (b"{}", "no list"), (b'["x"]', "messages"), (b"[]", "messages")],
)
def test_a_messages_file_that_is_none(
    content: bytes, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.json").write_bytes(content)
    arguments = ["generate", "--bootstrap", TOKENLESS, "--messages", str(tmp_path / "m.json")]
    code, line = error_line(arguments, capsys)
    assert code == 2
    assert named in line


def test_stdin_that_is_not_utf8(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait")))
    code, line = error_line(["generate", "--bootstrap", TOKENLESS, "-"], capsys)
    assert code == 2
    assert "stdin is not UTF-8 text (byte 3)" in line


def test_leave_without_a_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, line = error_line(["leave", "--home", str(tmp_path)], capsys)
    assert code == 1
    assert "no node is running there" in line


def test_interruption_and_closed_pipes_are_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arguments: object) -> int:
        raise BaseExceptionGroup("a", [BaseExceptionGroup("b", [KeyboardInterrupt()])])

    monkeypatch.setattr(commands, "status", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(arguments: object) -> int:
        raise ValueError("bug")

    monkeypatch.setattr(commands, "status", buggy)
    with pytest.raises(ValueError, match="bug"):
        main(["status"])


def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(UsageError):
        main(["generate", "--debug", "--bootstrap", TOKENLESS])


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("bootstrap", "join", "leave", "generate", "status", "demo", "Exit codes", "130"):
        assert word in text
    for command in ("bootstrap", "join", "leave", "generate", "status", "demo"):
        assert main([command, "--help"]) == 0
        assert "Example" in capsys.readouterr().out
    assert "engine-channel" not in text


def test_the_environment_stands_for_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("P2PSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", "h:1")
    arguments = parse(["join"])
    assert arguments.home == tmp_path
    assert arguments.bootstrap == "h:1"
    assert parse(["join", "--bootstrap", "h:2"]).bootstrap == "h:2"


def test_every_option_has_a_variable_and_flags_count_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PSERVE_JOIN_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("P2PSERVE_JOIN_PORT", "7")
    assert parse(["join"]).max_model_len == 512
    assert parse(["join", "--max-model-len", "9"]).max_model_len == 9
    assert parse(["join"]).port == 7
    assert parse(["join", "--listen", "127.0.0.1:1"]).port is None
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", " a:1, b:2\n")
    assert parse(["status"]).bootstrap == " a:1, b:2\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["generate", "--max_tokens", "3"], "--max-tokens"),
        (["jion"], "join"),
        (["token", "creat"], "create"),
        (["join", "--phase", "prefil"], "prefill"),
    ],
)
def test_what_was_mistyped_is_suggested(arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = error_line(arguments, capsys)
    assert code == 2
    assert f"'{meant}'" in line


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("token", "create"), ("token", "renew")])
def test_help_fits_80_columns(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "show this help" in text


def test_an_emulated_engine_is_chosen_by_its_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["join"]).backend == "vllm"
    assert parse(["join", "--emulate", "4xA40"]).backend == "emulated"
    assert (
        "leave --engine or --emulate out" in error_line(["join", "--engine", "vllm", "--emulate", "4xA40"], capsys)[1]
    )


def test_shells_complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "_P2PSERVE_COMPLETE" in capsys.readouterr().out
    monkeypatch.setenv("_P2PSERVE_COMPLETE", "zsh_complete")
    for words, expected in (
        ("p2pserve jo", "join"),
        ("p2pserve join --pha", "--phase"),
        ("p2pserve token re", "revoke"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert main([]) == 0
        assert expected in capsys.readouterr().out.splitlines()


def test_public_names_are_there() -> None:
    for name in p2pserve.sdk.__all__:
        assert getattr(p2pserve.sdk, name).__name__ == name
    assert set(p2pserve.sdk.__all__) <= set(dir(p2pserve.sdk))
    with pytest.raises(AttributeError):
        _ = p2pserve.sdk.nonsense


class _Full(io.StringIO):
    """A file on a disk without room."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fileno(self) -> int:
        return self.spare.fileno()

    def __init__(self, spare: IO[bytes]) -> None:
        super().__init__()
        self.spare = spare


def test_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out").open("wb") as spare:
        monkeypatch.setattr(sys, "stdout", _Full(spare))
        assert main(["--version"]) == 1
    monkeypatch.undo()
    assert capsys.readouterr().err == "p2pserve: error: output: it cannot be written: No space left on device\n"


def test_a_closed_output_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--help"]) == 1
    monkeypatch.undo()
    assert "output: standard output is closed" in capsys.readouterr().err


def test_a_closed_input_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert error_line(["generate", "-"], capsys) == (2, "p2pserve: error: prompt: standard input is closed\n")


@pytest.mark.parametrize(("option", "says"), [("--threads=0", "0 is less than 1"), ("--tp=0", "0 is less than 1")])
def test_options_of_an_engine_that_cannot_be(option: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = error_line(["join", option], capsys)
    assert code == 2
    assert option.partition("=")[0] in line
    assert says in line


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(node_commands, "probe", lambda: Hardware(processor="x", cores=8, memory_gib=32.0))
    code, line = error_line(["bootstrap", "--model", "bundled", "--threads", "9"], capsys)
    assert (code, line) == (2, "p2pserve: error: threads: 9 are more than the 8 cores of this box\n")


@pytest.mark.parametrize(("gpus", "says"), [(0, "this box has none"), (1, "this box has 1")])
def test_more_gpus_than_there_are(
    gpus: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu(uuid="GPU-0", name="NVIDIA A40", memory_gib=45.0)
    found = Hardware(processor="x", cores=8, memory_gib=32.0, gpus=(gpu,) * gpus)
    monkeypatch.setattr(node_commands, "probe", lambda: found)
    code, line = error_line(["bootstrap", "--model", "bundled", "--tp", "2"], capsys)
    assert code == 2
    assert line.startswith("p2pserve: error: tp: 2 GPUs are to share each layer")
    assert says in line


def test_a_simulation_has_no_running_network_to_offer(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_line(["sim"], capsys) == (2, "p2pserve: error: cluster: give --cluster FILE\n")
    assert "--live for the running network" in error_line(["plan"], capsys)[1]
