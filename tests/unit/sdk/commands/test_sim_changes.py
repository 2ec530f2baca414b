"""`p2pserve sim` with what changes meanwhile: what it prints, and what it says of wrong input."""

import json
import logging
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from p2pserve.bootstrap.settings import NetworkSettings
from p2pserve.node.settings import WAN
from p2pserve.sdk.cli import main

CLUSTER = ["--cluster", "thunderserve-h-40gbps"]
SERVICE = ["--model", "llama-30b", "--workload", "coding", "--rate", "0.7"]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan as JSON, made once."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    with path.open("w", encoding="utf-8") as file, redirect_stdout(file):
        assert main(["plan", *CLUSTER, *SERVICE, "--format", "json"]) == 0
    return path


def sim(planned: Path, *options: str) -> int:
    return main(["sim", *CLUSTER, *SERVICE, "--plan", str(planned), "--seconds", "120", *options])


def test_a_lost_box_is_answered_by_the_network_s_own_times(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(planned, "--lose", "3090ti@40", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    network = NetworkSettings.wan()
    assert found["replan"] == "light"
    assert found["changes"]["events"] == [{"at_s": 40.0, "what": "3090ti is lost"}]
    assert found["changes"]["detect_s"] == network.watch_ping_s + network.hung_s
    assert found["changes"]["dead_s"] == network.dead_s
    assert found["changes"]["quiet_s"] == WAN.quiet_s
    assert [(span["span"], span["start_s"]) for span in found["spans"]][:2] == [("before", 0.0), ("during", 40.0)]
    assert sum(span["requests"] for span in found["spans"]) == found["services"][0]["requests"]
    (record,) = [each for each in found["replans"] if "3090ti is lost" in each["why"]]
    assert record["asked_s"] == 40.0 + network.dead_s
    assert record["planning_s"] > 0.0


def test_a_box_whose_processes_end_is_missed_at_once(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(planned, "--lose", "3090ti@40", "--loss", "killed", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"]["detect_s"] == found["changes"]["dead_s"] < 1.0


def test_policies_are_compared_over_the_same_spans(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--lose", "a40@40", "--replan", "all", "--reload", "20"]
    assert sim(planned, *options, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["replan"] for run in found["runs"]] == ["none", "light", "full", "best"]
    spans = [[(span["start_s"], span["end_s"]) for span in run["spans"]] for run in found["runs"]]
    assert all(each == spans[0] for each in spans)
    assert found["runs"][0]["replans"] == []
    assert sim(planned, *options) == 0
    text = capsys.readouterr().out
    for part in ("at 40 s a40 is lost", "its requests go on elsewhere after 2 s", "light: at 48.0 s (a40 is lost)",
                 "on this machine", "before", "during", "goodput/s"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("command", ["sim", "plan"])
def test_a_terminal_of_80_columns_is_enough(
    command: str, planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "80"), ("LINES", "50")):
        monkeypatch.setenv(name, value)
    options = ["--plan", str(planned), "--seconds", "120", "--lose", "3090ti@40"] if command == "sim" else []
    assert main([command, *CLUSTER, *SERVICE, *options]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert ("TTFT p99" in said) == (command == "sim")
    assert "\N{HORIZONTAL ELLIPSIS}" not in said


def test_traffic_links_and_boxes_change_in_one_run(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shift", "conversation,rate=1@30", "--degrade", "a40:3090ti=0.5@60", "--degrade", "a40=0.4@80"]
    assert sim(planned, *options, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [event["at_s"] for event in found["changes"]["events"]] == [30.0, 60.0, 80.0]
    words = [event["what"] for event in found["changes"]["events"]]
    assert words[0].startswith("1 requests/s of Azure 2023 conversation come, ")
    assert words[1:] == [
        "links between a40 and 3090ti carry 0.5 Gb/s",
        "links between a40 and all others carry 0.4 Gb/s",
    ]
    (service,) = found["services"]
    assert service["lengths"] == "from 0 s on Azure 2023 coding; from 30 s on Azure 2023 conversation"
    assert service["completed"] == service["requests"]


def test_a_box_that_joins_is_not_there_before_and_loads_first(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", *CLUSTER, *SERVICE, "--seconds", "120", "--join", "3090ti@40", "--reload", "15"]
    assert main([*arguments, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"]["events"][0]["what"] == "3090ti joins, and has loaded the model 15 s later"
    (record,) = [each for each in found["replans"] if "3090ti has joined" in each["why"]]
    assert record["asked_s"] == 55.0
    first = [row["id"] for row in found["replicas"] if "3090ti" in row["boxes"]]
    assert first
    assert all(set(row["boxes"]) == {"a40"} for row in found["replicas"] if row["id"].startswith("a40"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--lose", "x@3"], "lose: 'x@3' is not like BOX@60 with a box of the cluster"),
        (["--lose", "a40@nan"], "lose: 'nan' in 'a40@nan' is not a number of seconds"),
        (["--join", "a40@-1"], "join: '-1' in 'a40@-1' is not a number of seconds"),
        (["--join", "x@1"], "join: 'x@1' is not like BOX@60"),
        (["--lose", "a40@9", "--lose", "a40@5"], "lose: a40 is lost at 5 s and again at 9 s"),
        (["--join", "a40@9", "--join", "a40@5"], "join: a40 joins at 5 s and again at 9 s"),
        (["--lose", "a40@500"], "before a40 is lost (500 s)"),
        (["--degrade", "a40@5"], "degrade: 'a40@5' is not like BOX=0.5@60 or BOX:BOX=0.5@60"),
        (["--degrade", "a40:x=1@5"], "degrade: 'a40:x=1@5' is not like BOX=0.5@60"),
        (["--degrade", "a40:a40=1@5"], "degrade: 'a40:a40=1@5' is not like BOX=0.5@60"),
        (["--degrade", "a40=0@5"], "degrade: '0' in 'a40=0@5' is not a number of Gb/s above 0"),
        (["--degrade", "a40=fast@5"], "degrade: 'fast' in 'a40=fast@5' is not a number of Gb/s"),
        (["--degrade", "a40=1@x"], "degrade: 'x' in 'a40=1@x' is not a number of seconds"),
        (["--shift", "poetry@5"], "shift: workload: 'poetry' is neither a file nor one of coding, conversation"),
        (["--shift", "rate=0@5"], "shift: 'rate=0' in 'rate=0' is not like coding or rate=5"),
        (["--shift", "coding,speed=3@5"], "shift: 'speed=3' in 'coding,speed=3' is not like coding or rate=5"),
        (["--shift", "@5"], "shift: say what traffic shifts to"),
        (["--shift", "coding@x"], "shift: 'x' in 'coding@x' is not a number of seconds"),
        (["--shift", "rate=2@5", "--shift", "coding@5"], "shift: there are two at 5 s"),
        (["--shift", "rate=2@500"], "shift: 500 s is not between 0 and the end of the requests, 120 s"),
        (["--shift", "coding@5", "--arrivals", "replay"], "shift: --arrivals replay says already when requests come"),
        (["--lose", "a40@5", "--replan", "all", "--requests", "x.csv"], "requests: it is written of one run"),
    ],
)
def test_what_cannot_change_is_said_in_one_line(
    options: list[str], line: str, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim(planned, *options) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (["--replan", "soon"], "'soon' is not one of"),
        (["--loss", "loud"], "'loud' is not one of"),
        (["--reload", "-1"], "-1 is not a number from 0"),
        (["--disk", "0"], "0 is not a number above 0"),
        (["--download", "x"], "'x' is not a number"),
        (["--payback", "nan"], "nan is not a number above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(
    option: list[str], line: str, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim(planned, "--lose", "a40@5", *option) == 2
    assert line in capsys.readouterr().err


def test_a_shift_needs_one_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "services.json"
    entry = {"model": "llama-7b", "workload": "coding", "rate": 1}
    file.write_text(json.dumps([{"name": "a", **entry}, {"name": "b", **entry}]))
    assert main(["sim", *CLUSTER, "--services", str(file), "--shift", "rate=2@5"]) == 2
    assert "shift: it takes one service" in capsys.readouterr().err


def test_gateways_that_are_far_cost_round_trips(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for gateways in ("none", "all", "3090ti"):
        assert sim(planned, "--gateways", gateways, "--format", "json") == 0
        found.append(json.loads(capsys.readouterr().out)["services"][0]["ttft_s"]["p50"])
    assert found[0] < found[1]
    assert found[0] < found[2]


def test_a_gateway_that_is_no_box_is_refused(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(planned, "--gateways", "a40,oslo") == 2
    assert "gateways: there is no box 'oslo'; the cluster has a40, 3090ti" in capsys.readouterr().err


def test_an_answer_to_nothing_is_refused(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(planned, "--replan", "full") == 2
    assert "replan: give --lose, --join, --degrade or --shift with it" in capsys.readouterr().err
