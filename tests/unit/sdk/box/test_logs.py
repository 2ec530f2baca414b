"""`p2pserve logs`: which lines are shown, and how."""

import json
import time
from pathlib import Path

import pytest

from p2pserve.node.observing.node_log import NAME, LogLine
from p2pserve.sdk.box.logs import LogFilter, LogReader, OpenLog, describe
from p2pserve.sdk.cli import main

PEER = "12D3KooWHdEDTFPH5jtJbpX9g6AEWVssmoYh3WZAUkqw7EEiUbRi"
NOW = 1_795_600_000.0
LINES = (
    LogLine(time=NOW, level="info", part="node", text=f"joined: {PEER}"),
    LogLine(time=NOW + 1, level="warning", part="bootstrap", text="careful"),
    LogLine(time=NOW + 2, level="error", part="events", text="failed", request="5f3a9c", traceback="Traceback\n  x\n"),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path) -> Path:
    """A home whose node has logged into two files, the last line still being written."""
    folder = tmp_path / "node"
    folder.mkdir()
    text = [json.dumps({name: getattr(line, name) for name in LogLine.__struct_fields__}) for line in LINES]
    (folder / f"{NAME}.1").write_text(f"{text[0]}\nno line of ours\n")
    (folder / NAME).write_text(f"{text[1]}\n{text[2]}\n" + '{"time": 1.0, "lev')
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], home: Path, *options: str) -> list[str]:
    assert main(["logs", "--home", str(home), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_both_files_are_read_and_boxes_have_their_names(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert shown(capsys, home) == [
        "11-25 09:46:40.000  info     joined: silver-nightjar",
        "11-25 09:46:41.000  warning  careful",
        "11-25 09:46:42.000  error    failed",
        "Traceback",
        "  x",
    ]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["--lines", "1"], ["failed"]),
        (["--level", "warning"], ["careful", "failed"]),
        (["--level", "error"], ["failed"]),
        (["--request", "5f3a..."], ["failed"]),
        (["--request", "5f3b"], []),
        (["--since", "1m"], []),
    ],
)
def test_lines_are_chosen(capsys: pytest.CaptureFixture[str], home: Path, options: list[str], texts: list[str]) -> None:
    found = [json.loads(line) for line in shown(capsys, home, "--format", "json", *options)]
    assert [line["text"] for line in found] == texts


def test_since_is_an_age() -> None:
    wanted = LogFilter(since=NOW + 1)
    assert [line.text for line in LINES if wanted.wants(line)] == ["careful", "failed"]


def test_what_vllm_prints_has_a_level_and_what_follows_belongs_to_it() -> None:
    reader = LogReader("engine", time.time)
    at = time.strftime("%m-%d %H:%M:%S", time.localtime(time.time() - 60))
    printed = [b"before", f"WARNING {at} [loader.py:7] slow".encode(), b"  more of it", b"", b"\xff"]
    found = [line for each in printed if (line := reader.read(each)) is not None]
    assert [(line.level, line.text) for line in found] == [
        ("info", "before"),
        ("warning", "[loader.py:7] slow"),
        ("warning", "  more of it"),
        ("warning", "\N{REPLACEMENT CHARACTER}"),
    ]
    assert found[0].time == 0.0
    assert describe(found[0]) == f"{'':18}  info     before"
    assert 0 <= time.time() - found[1].time - 60 < 5


def test_a_home_without_a_log_is_named(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(["logs", "bootstrap", "--home", str(home)]) == 1
    assert f"{home}/bootstrap/node.log: there is no such log" in capsys.readouterr().err


def test_following_goes_on_in_the_next_file(home: Path) -> None:
    path = home / "node" / NAME
    text = '{{"time": 1.0, "level": "info", "part": "node", "text": "{}"}}\n'
    path.write_text(text.format("first"))
    log = OpenLog("", path, LogReader("node", time.time), LogFilter())
    found = [line.text for line in log.read_new()]
    for coming in ("second", "third", "fourth"):
        if coming == "third":  # the file is full
            path.rename(path.with_suffix(".old"))
        with path.open("a") as file:
            file.write(text.format(coming))
        found += [line.text for line in log.read_new()]
    log.close()
    assert found == ["first", "second", "third", "fourth"]


def test_a_line_is_followed_when_it_is_whole(home: Path) -> None:
    path = home / "node" / NAME
    path.write_text('{"time": 1.0, "level": "info", ')
    log = OpenLog("", path, LogReader("node", time.time), LogFilter())
    assert list(log.read_new()) == []
    with path.open("a") as file:
        file.write('"part": "node", "text": "whole"}\n')
    assert [line.text for line in log.read_new()] == ["whole"]
    log.close()


def test_lines_of_several_nodes_are_merged_and_say_whose_they_are(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    (home / "node-2").mkdir()
    (home / "node-3").mkdir()  # which has not logged yet
    line = {"time": NOW + 1.5, "level": "info", "part": "node", "text": "between"}
    (home / "node-2" / NAME).write_text(json.dumps(line) + "\n")
    assert shown(capsys, home)[1:3] == [
        "node  11-25 09:46:41.000  warning  careful",
        "node-2  11-25 09:46:41.500  info     between",
    ]
    assert json.loads(shown(capsys, home, "--format", "json", "node-2")[0])["text"] == "between"
    found = [json.loads(each) for each in shown(capsys, home, "--format", "json")]
    assert [each["node"] for each in found] == ["node", "node", "node-2", "node"]
