"""Figures beside the public simulator's: how they are compared, chosen and printed."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from p2pserve.sims.records import Outcomes, Trace, TraceError
from p2pserve.sims.splitwise import SetupError, draw_trace, missed_slos, read_trace, slowdowns, summary, write_trace
from p2pserve.sims.splitwise import __main__ as command
from p2pserve.sims.splitwise.__main__ import main
from p2pserve.sims.splitwise.metrics import SLO
from p2pserve.sims.splitwise.reference import (
    BLOOM_LIMITS,
    ReferenceComparison,
    ReferenceRun,
    axis_cases,
    released_cases,
)
from p2pserve.sims.splitwise.setups import MODELS, SETUPS, find_model, find_setup

FIGURES = {"tbt_p50": 0.04, "tbt_p99": 0.08, "e2e_p50": 10.0, "rps": 5.0, "out_tok_s": 1000.0, "n": 600.0}
RUN = ReferenceRun(
    model="llama2-70b", workload="conv", rate=30, setup="HH", machines=None, mode="released",
    figures={"tbt_p50": 0.04, "e2e_p50": 10.0}, meets_slo=True,
)  # fmt: skip


def comparison(
    figures: Mapping[str, float], run: ReferenceRun = RUN, missed: tuple[str, ...] = ()
) -> ReferenceComparison:
    return ReferenceComparison(case=run, figures={**FIGURES, "events": 7.0, **figures}, missed=missed)


@pytest.mark.parametrize(
    ("figures", "worst"),
    [
        ({}, ("tbt_p50", 0.0)),
        ({"e2e_p50": 10.5}, ("e2e_p50", 0.05)),
        ({"e2e_p50": 9.5, "tbt_p50": 0.041}, ("e2e_p50", 0.05)),
        ({"rps": 99.0}, ("tbt_p50", 0.0)),
    ],
)
def test_the_worst_figure_is_the_one_furthest_off_of_those_to_compare_with(
    figures: dict[str, float], worst: tuple[str, float]
) -> None:
    name, off = comparison(figures).worst
    assert name == worst[0]
    assert off == pytest.approx(worst[1])


@pytest.mark.parametrize(
    ("meets", "missed", "e2e", "agrees"),
    [
        (True, (), 10.09, True),
        (True, (), 10.11, False),
        (True, (), 9.89, False),
        (True, ("tbt_p50",), 10.0, False),
        (False, ("tbt_p50",), 10.9, True),
        (False, ("tbt_p50",), 11.1, False),
        (False, (), 10.0, False),
    ],
)
def test_a_run_agrees_within_its_tolerance_and_on_the_slo(
    meets: bool, missed: tuple[str, ...], e2e: float, agrees: bool
) -> None:
    found = comparison({"e2e_p50": e2e}, replace(RUN, meets_slo=meets), missed)
    assert found.agrees is agrees


def test_a_run_is_named_by_what_it_is() -> None:
    assert RUN.name == "conv 30 HH"
    assert replace(RUN, machines=(15, 25)).name == "conv 30 HH 15,25"


def test_the_tables_of_the_public_simulator_are_read_with_their_modes_and_gaps() -> None:
    released, axis = released_cases(), axis_cases()
    assert {case.mode for case in released} == {"released"}
    assert {case.mode for case in axis} == {"axis"}
    assert all(case.machines is None for case in released)
    assert all(case.machines is not None for case in axis)
    assert len({case.name for case in released}) == 48
    assert {case.meets_slo for case in released} == {True, False}
    assert all("model" not in case.figures and "slo_ok" not in case.figures for case in released)
    assert min(len(case.figures) for case in axis) < max(len(case.figures) for case in axis), "some were not kept"


class Runs:
    """Runs that cost nothing: each case's own figures, unless told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, str]] = []
        self.off: Mapping[str, float] = {}
        self.limits: dict[str, int] = {}
        monkeypatch.setattr(command, "compare", self.compare)
        monkeypatch.setattr(command, "meets_slo", self.meets)

    def compare(self, case: ReferenceRun) -> ReferenceComparison:
        self.ran.append((case.name, case.mode))
        missed = () if case.meets_slo else ("tbt_p90", "e2e_p50")
        return ReferenceComparison(
            case=case, figures={**FIGURES, "events": 7.0, **case.figures, **self.off}, missed=missed
        )

    def meets(self, setup: str, rate: int) -> bool:
        return rate <= self.limits.get(setup, BLOOM_LIMITS[setup])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def test_check_runs_the_rows_that_begin_as_asked(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "conv 130 H", "code 30 baseA"]) == 0
    names = [name for name, _ in runs.ran]
    assert names
    assert all(name.startswith(("conv 130 H", "code 30 baseA")) for name in names)
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| row | worst figure | off by | allowed |")
    assert line.startswith("| --- | --- |")
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == names


def test_check_ends_with_1_where_a_figure_is_off(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.off = {"rps": 1e6}
    assert main(["check", "conv 30 baseA", "--format", "json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["worst figure"], record["agrees"]) == ("rps", False)
    assert main(["check", "conv 30 baseA"]) == 1
    assert "| NO |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["check", "measured", "limits"])
def test_a_row_that_is_not_there_names_those_that_are(
    name: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "no such"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("splitwise: error: no row 'no such'; there are ")
    assert err.count("\n") == 1
    assert runs.ran == []


def test_measured_runs_each_row_again_with_real_caches(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    row = axis_cases()[0]
    assert main(["measured", row.name, "--format", "json"]) == 0
    assert runs.ran == [(row.name, "axis"), (row.name, "measured")]
    record = json.loads(capsys.readouterr().out)
    public = row.figures["e2e_p50"]
    assert record["E2E p50 s"] == f"{public:.2f} ({public:.2f})", "the public figure in brackets"
    assert record["real KV, E2E p50 s"] == f"{public:.2f}"
    assert record["real KV, SLO missed"] == ("none" if row.meets_slo else "tbt_p90 e2e_p50")


@pytest.mark.parametrize(("limit", "code"), [(120, 0), (110, 1), (130, 1)])
def test_a_limit_agrees_where_the_slo_is_met_there_and_not_beyond(
    limit: int, code: int, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.limits["HH"] = limit
    assert main(["limits", "HH", "--format", "json"]) == code
    first, *_ = capsys.readouterr().out.splitlines()
    record = json.loads(first)
    assert record["public limit, req/s"] == 120
    assert record["SLO there"] == ("met" if limit >= 120 else "missed")
    assert record["SLO at 10 more"] == ("met" if limit >= 130 else "missed")


def test_ctrl_c_ends_it(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(case: ReferenceRun) -> ReferenceComparison:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "compare", interrupt)
    assert main(["check", "conv 30 HH"]) == 130


# ---- what the figures are ------------------------------------------------------------------------------------------


def test_figures_count_completed_requests_only() -> None:
    trace = Trace(
        ids=np.arange(3), arrival_s=np.array([1.0, 2.0, 3.0]), prompt=np.array([10, 10, 10]),
        output=np.array([10, 40, 99]), lengths="made up", arrivals="made up",
    )  # fmt: skip
    found = summary(Outcomes(trace=trace, ttft_s=np.array([1, 3, 1.0]), e2e_s=np.array([2, 9, np.nan])))
    assert found["rps"] == pytest.approx(2 / 10), "from the first arrival to the last end"
    assert found["out_tok_s"] == pytest.approx(50 / 10)
    assert found["ttft_p50"] == 2.0
    assert found["tbt_p50"] == pytest.approx((0.1 + 0.15) / 2), "over all output tokens"
    assert found["e2e_p99"] == pytest.approx(2 + 0.99 * 7)
    assert len(found) == 11


def test_a_request_of_one_token_is_slowed_down_in_its_end_as_in_its_first_token() -> None:
    one = np.array([1])
    trace = Trace(ids=one, arrival_s=one - 1.0, prompt=1000 * one, output=one, lengths="", arrivals="")
    found = slowdowns(Outcomes(trace=trace, ttft_s=one * 2.0, e2e_s=one * 2.0), "llama2-70b")
    assert found["e2e_p50"] == found["ttft_p50"] > 1.0


def limits() -> dict[str, float]:
    return {f"{name}_p{at}": limit for name, row in SLO.items() for at, limit in zip((50, 90, 99), row, strict=True)}


@pytest.mark.parametrize("missed", sorted(limits()))
def test_a_slowdown_at_its_limit_is_missed_and_below_it_is_not(missed: str) -> None:
    below = {name: limit * 0.999 for name, limit in limits().items()}
    assert missed_slos(below) == []
    assert missed_slos({**below, missed: limits()[missed]}) == [missed]
    assert missed_slos({**below, missed: float("nan")}) == [missed]


def test_setups_and_models_by_their_names() -> None:
    llama, bloom = find_model("llama2-70b"), find_model("bloom-176b")
    assert llama.kv_bytes(real=False) == 8 * llama.kv_bytes(real=True) == 2 * 2 * 8192 * 80
    assert bloom.kv_bytes(real=True) == bloom.kv_bytes(real=False), "it has keys for all of its heads"
    for setup in SETUPS.values():
        assert (setup.decode_gpu is None) is setup.name.startswith("base")
        assert sum(setup.machines("conv")) == sum(setup.conv)
        assert setup.machines("code") == setup.code
    with pytest.raises(SetupError, match="no workload chat; there are conv, code"):
        find_setup("HH").machines("chat")
    assert set(MODELS) == {"llama2-70b", "bloom-176b"}


# ---- traces --------------------------------------------------------------------------------------------------------


def test_drawn_requests_mix_prompts_and_outputs_of_the_trace() -> None:
    lengths = [(100, 1), (200, 2), (300, 3)]
    trace = draw_trace(lengths, source="three", rate=50.0, seconds=20.0, seed=4)
    assert len(trace) == pytest.approx(1000, rel=0.15)
    pairs = set(zip(trace.prompt.tolist(), trace.output.tolist(), strict=True))
    assert pairs == {(prompt, output) for prompt, _ in lengths for _, output in lengths}, "independently"
    assert 19 < trace.arrival_s[-1] < 20.0
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert trace.arrivals == "Poisson, 50 requests/s for 20 s, seed 4"
    assert "three" in trace.lengths


def test_drawn_requests_are_those_of_the_seed_and_of_the_rate() -> None:
    def drawn(rate: float, seed: int) -> Trace:
        return draw_trace([(1, 1), (2, 2)], source="", rate=rate, seconds=30.0, seed=seed)

    one, again, fast = drawn(2.0, 5), drawn(2.0, 5), drawn(4.0, 5)
    assert one.arrival_s.tolist() == again.arrival_s.tolist()
    assert fast.arrival_s[0] == pytest.approx(one.arrival_s[0] / 2)
    assert one.arrival_s[0] == round(-np.log(1.0 - Random(5).random()) / 2.0, 9)
    assert drawn(2.0, 6).arrival_s[0] != one.arrival_s[0]


def test_a_trace_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("token_size,request_id,prompt_size,arrival_timestamp\n5,7,100,0.25\n6,8,200,0.5\n")
    trace = read_trace(path)
    assert trace.ids.tolist() == [7, 8]
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([100, 200], [5, 6])
    write_trace(trace, path)
    assert path.read_text().splitlines()[1] == "7,2,0,0.250000000,1,100,5"
    with pytest.raises(TraceError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")
