"""Secrets: read from files, and not shown to others."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from p2pserve.sdk.cli import PROGRAM_GROUP
from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.options.config import walk_commands
from p2pserve.sdk.options.secrets import (
    MASK,
    SECRET_OPTIONS,
    mask_arguments,
    mask_value,
    read_secret_file,
    warn_on_stderr,
)
from p2pserve.sdk.options.sources import read_secrets

JOIN, ASK = "p2p_worker_aGVsbG8-_=", "p2p_client_d29ybGQ"
OPEN, CLOSED = 0o640, 0o600


def write(path: Path, text: str, mode: int = CLOSED) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def given(arguments: Sequence[str]) -> dict[str, object]:
    """What an action is given of a command line, its secrets read."""
    with PROGRAM_GROUP.make_context("p2pserve", [*arguments]) as context:
        found = PROGRAM_GROUP.get_command(context, arguments[0])
        assert isinstance(found, click.Command)
        with found.make_context(arguments[0], [*arguments[1:]], parent=context) as inner:
            return {**inner.params, **read_secrets(inner)}


@pytest.fixture(autouse=True)
def _no_network_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BOOTSTRAP", "TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"P2PSERVE_{name}", raising=False)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["join", "--bootstrap", JOIN], ["join", "--bootstrap", "p2p_worker_..."]),
        (
            ["join", f"--bootstrap={JOIN},203.0.113.8:4001"],
            ["join", "--bootstrap=p2p_worker_...,203.0.113.8:4001"],
        ),
        (["status", "--bootstrap", "203.0.113.8:4001"], ["status", "--bootstrap", "203.0.113.8:4001"]),
        (["status", "--bootstrap", "halfatoken"], ["status", "--bootstrap", MASK]),
        (["serve", "m", "--api-key", "sk-a:b", "--port", "1"], ["serve", "m", "--api-key", MASK, "--port", "1"]),
        (["serve", "m", "--api-key", "--token", "x"], ["serve", "m", "--api-key", MASK, "x"]),
        (["serve", "m", "--admin-token=abc"], ["serve", "m", f"--admin-token={MASK}"]),
        (["generate", f"what is {ASK}?", "--api-key"], ["generate", "what is p2p_client_...?", "--api-key"]),
        (["serve", "--tokenizer-mode", "auto", ""], ["serve", "--tokenizer-mode", "auto", ""]),
    ],
)
def test_a_command_line_as_others_may_see_it(before: list[str], after: list[str]) -> None:
    assert mask_arguments(before) == after


def test_every_option_that_takes_a_secret_is_masked() -> None:
    """A new one is to be added to SECRET_OPTIONS, or to this test."""
    no_secrets = {"--token-file", "--api-key-file", "--admin-token-file", "--no-api-key"} | {
        *("--max-tokens", "--prompt-tokens", "--max-num-batched-tokens", "--batch-tokens"),
    }
    root = click.Context(PROGRAM_GROUP)
    flags = {flag for _, each in walk_commands(root, (), PROGRAM_GROUP) for one in each.params for flag in one.opts}
    assert {
        flag for flag in flags if "token" in flag or "key" in flag or "secret" in flag
    } - no_secrets <= SECRET_OPTIONS
    assert no_secrets <= flags
    assert SECRET_OPTIONS - flags == {"--hf-token"}


def test_a_secret_that_is_no_token_is_hidden_whole() -> None:
    assert mask_value("--token", "a:b") == MASK
    assert mask_value("--token", JOIN) == "p2p_worker_..."


def test_a_token_file_is_all_that_joining_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "worker", f"{JOIN}\n")
    assert given(["join", "--token-file", str(file)])["token"] == JOIN
    assert capsys.readouterr().err == ""


def test_it_counts_before_the_token_of_another_network_in_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "worker", JOIN)
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", f"{ASK},203.0.113.8:4001")
    found = given(["join", "--token-file", str(file)])
    assert (found["bootstrap"], found["token"]) == (None, JOIN)
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", "203.0.113.8:4001")
    found = given(["join", "--token-file", str(file)])
    assert (found["bootstrap"], found["token"]) == ("203.0.113.8:4001", JOIN)


def test_one_in_a_variable_does_not_count_beside_one_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PSERVE_TOKEN_FILE", "/no/such/file")
    assert given(["status", "--token", ASK])["token"] == ASK
    assert given(["status", "--bootstrap", ASK])["token_file"] is None


@pytest.mark.parametrize(
    ("one", "other"),
    [(["--token", ASK], ["--token-file", "f"]), (["--admin-token", "x" * 16], ["--admin-token-file", "f"])],
)
def test_a_secret_and_a_file_of_it(one: list[str], other: list[str]) -> None:
    with pytest.raises(click.UsageError, match=rf"{one[0]}: give either {one[0]} or {other[0]}, and not both"):
        given(["gateway", *one, *other])


def test_stdin_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f" {ASK} \n".encode())))
    assert given(["status", "--token-file", "-"])["token"] == ASK


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff", "is not UTF-8 text"), (b" \n", "is empty"), (b"x" * (1 << 20) + b"y", "is larger than 1 MiB")],
)
def test_a_file_that_holds_no_secret(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(UsageError, match=rf"^token_file: .*/f {says}"):
        read_secret_file(tmp_path / "f", "token_file", lambda text: None)
    with pytest.raises(UsageError, match=r"^token_file: .* cannot be read: No such file or directory$"):
        read_secret_file(tmp_path / "none", "token_file", lambda text: None)


def test_a_file_that_others_may_read_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "f", JOIN, OPEN)
    assert read_secret_file(file, "token_file", warn_on_stderr) == JOIN
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"chmod 600 {file}" in said
    assert JOIN not in said
