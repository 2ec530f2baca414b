"""A node's own log: what is kept, with which fields, and how much of it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from p2pserve.node.observing import node_log
from p2pserve.node.observing.event_log import EventLog
from p2pserve.node.observing.node_log import NAME, keep_log
from p2pserve.node.observing.values import EventKind

_log = logging.getLogger("p2pserve.bootstrap.sessions")


@pytest.fixture(autouse=True)
def _log_as_in_a_node() -> None:
    logging.disable(logging.NOTSET)


def lines(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / NAME).read_text("utf-8").splitlines()]


def test_what_the_owner_is_told_and_what_happened_are_kept_with_their_fields(tmp_path: Path) -> None:
    said: list[str] = []
    with keep_log(tmp_path, said.append) as say:
        say("joined: somebody")
        say("warning: this network serves another model")
        EventLog("node", lambda: 7.0).record(EventKind.REQUEST_ENDED, request="5f3a", peer="client", finish="stop")
        _log.debug("nobody wants to read this")
        logging.getLogger("a.library").info("nor this")
    assert said == ["joined: somebody", "warning: this network serves another model"]
    found = [{name: value for name, value in line.items() if name != "time"} for line in lines(tmp_path)]
    assert found == [
        {"level": "info", "part": "node", "text": said[0]},
        {"level": "warning", "part": "node", "text": said[1]},
        {
            "level": "info", "part": "events", "request": "5f3a", "peer": "client",
            "text": "request.ended request=5f3a peer=client finish=stop",
        },
    ]  # fmt: skip
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_an_error_has_its_traceback_and_the_end_of_the_node_is_told(tmp_path: Path) -> None:
    def run() -> None:
        try:
            raise KeyError("inner")
        except KeyError:
            _log.exception("a handler failed")
        raise ExceptionGroup("a", [ValueError("this is why")])

    with pytest.raises(ExceptionGroup), keep_log(tmp_path, lambda text: None):
        run()
    failed, ended = lines(tmp_path)
    assert "KeyError: 'inner'" in failed["traceback"]
    assert (failed["level"], failed["text"]) == ("error", "a handler failed")
    assert ended["text"] == "the node ends: ValueError: this is why"


def test_the_log_is_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "MAX_BYTES", 4000)
    (tmp_path / "engine.log").write_text("x" * 5000)
    with keep_log(tmp_path, lambda text: None) as say:
        for number in range(400):
            say(f"line {number} " + "y" * (10_000 if number == 200 else 10))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {NAME, f"{NAME}.1", "engine.log.1"}
    assert sizes[NAME] + sizes[f"{NAME}.1"] < 2 * 4000 + 4096
    assert lines(tmp_path)[-1]["text"].startswith("line 399 ")


def test_a_log_that_cannot_be_written_is_said_and_the_node_runs(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    said: list[str] = []
    with keep_log(tmp_path, said.append) as say:
        say("joined")
    assert "the log cannot be written: Is a directory" in said[0]
    assert said[1:] == ["joined"]
