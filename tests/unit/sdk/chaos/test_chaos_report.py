"""The table of a run of chaos, what makes it fail, and its command's input."""

import msgspec
import pytest

from p2pserve.sdk.chaos import command
from p2pserve.sdk.chaos.records import TimeSpread
from p2pserve.sdk.chaos.report import WIDTH, AgentFigures, ChaosReport, table_lines
from p2pserve.sdk.chaos.schedule import ChaosSettings
from p2pserve.sdk.errors import DemoFailed

SPREAD = TimeSpread(count=9, p50_s=0.5, p90_s=1.0, p99_s=2.0, worst_s=3.0)
GOOD = ChaosReport(
    seed=3,
    seconds=60.0,
    faults={"kill: gateway": 2, "stop: both ends": 1, "stop engine: decode": 1},
    requests=200,
    completed=199,
    lied=0,
    liar=False,
    moved=20,
    failed={"no gateway is left: " + "x" * 100: 1},
    wrong=(),
    lost=(),
    left_over=(),
    troubles=(),
    recovery=SPREAD,
    gap=SPREAD,
    ttft=SPREAD,
    away=SPREAD,
    starts=9,
    agent=AgentFigures(memory_before_mib=100.0, memory_after_mib=101.0, files_before=20, files_after=20),
)


def changed(**fields: object) -> ChaosReport:
    return msgspec.structs.replace(GOOD, **fields)


def test_a_good_run_has_no_problems() -> None:
    assert GOOD.problems == ()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"wrong": ("request 5: token 1 is 9, should be 8",)}, "request 5: token 1 is 9, should be 8"),
        ({"lost": ("request 5 did not end",)}, "request 5 did not end"),
        ({"left_over": ("process 7 was left",)}, "process 7 was left"),
        ({"troubles": ("box 1 ended by itself",)}, "box 1 ended by itself"),
        ({"completed": 198}, "198 of 200 requests were completed, less than 99.5%"),
        ({"gap": msgspec.structs.replace(SPREAD, p99_s=5.5)}, "P99 of the longest gap in a stream is 5.5 s"),
    ],
)
def test_each_thing_that_must_not_be_is_a_problem(fields: dict[str, object], problem: str) -> None:
    (found,) = changed(**fields).problems
    assert found.startswith(problem)


def test_memory_that_grew_and_files_that_stayed_open_are_problems() -> None:
    grown = AgentFigures(memory_before_mib=100.0, memory_after_mib=150.0, files_before=20, files_after=20)
    assert changed(agent=grown).problems == ("an agent's memory grew from 100 to 150 MiB",)
    opened = AgentFigures(memory_before_mib=100.0, memory_after_mib=100.0, files_before=20, files_after=90)
    assert changed(agent=opened).problems == ("an agent had 20 files open before, and 90 after",)


def test_the_table_fits_a_terminal_and_names_every_fault_and_failure() -> None:
    lines = list(table_lines(GOOD))
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    for what in ("4 faults in 60 s", "2 kill: gateway", "1 stop: both ends", "1 x no gateway is left", "99.50%"):
        assert what in text
    assert "PROBLEM" not in text
    assert "PROBLEM: request 5" in "\n".join(table_lines(changed(lost=("request 5 did not end",))))


def test_answers_of_the_liar_are_counted_by_themselves() -> None:
    assert changed(completed=150, lied=40, liar=True).problems == ()
    assert any("answered by the liar" in line and "49" in line for line in table_lines(changed(lied=49)))


def test_the_report_is_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(settings: ChaosSettings, say: object) -> ChaosReport:
        assert settings == ChaosSettings(seed=3, faults=4, links="wan")
        return GOOD

    monkeypatch.setattr(command, "run_chaos", run)
    assert command.main(["--seed", "3", "--faults", "4", "--links", "wan", "--format", "json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=ChaosReport) == GOOD


def test_a_run_with_a_problem_says_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(settings: ChaosSettings, say: object) -> ChaosReport:
        return changed(wrong=("request 5: wrong",))

    monkeypatch.setattr(command, "run_chaos", run)
    assert command.main(["--seed", "3", "--boxes", "5"]) == 1
    error = capsys.readouterr().err
    assert "python -m p2pserve.sdk.chaos --seed 3" in error
    assert "--boxes 5" in error


def test_a_run_that_failed_says_its_seed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(settings: ChaosSettings, say: object) -> ChaosReport:
        raise DemoFailed("the network was not whole")

    monkeypatch.setattr(command, "run_chaos", run)
    assert command.main(["--seed", "3"]) == 1
    assert capsys.readouterr().err == "error: seed 3: the network was not whole\n"


def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--boxes", "2"]) == 2
    assert "boxes: 2 is less than 4" in capsys.readouterr().err
