"""What comes out: figures, tables, request by request, pictures, and a Chrome trace."""

import csv
import io
import json
from dataclasses import replace
from math import isnan
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.sims.engine.values import EngineCounts, StepRecord
from p2pserve.sims.records import Outcomes, Trace
from p2pserve.sims.results.chrome_trace import write_chrome_trace
from p2pserve.sims.results.outcomes import (
    ReplicaOutcome,
    ServiceOutcome,
    SimResult,
    StepLog,
    TransferRecord,
    attainment,
    summarise,
)
from p2pserve.sims.results.plots import Timeline, attainment_curve, plot_attainment, plot_timeline
from p2pserve.sims.results.report import ReportError, report_of, tables, write_requests
from p2pserve.sims.scenario import SimSettings


def result_of(*, steps: bool = True) -> SimResult:
    """Four requests: two in time, one late, one that never ended."""
    trace = Trace(
        ids=np.arange(4),
        arrival_s=np.array([0.0, 1.0, 2.0, 3.0]),
        prompt=np.array([100, 200, 300, 400]),
        output=np.array([11, 1, 11, 5]),
        lengths="made up",
        arrivals="one a second",
    )
    outcomes = Outcomes(trace=trace, ttft_s=np.array([0.5, 0.5, 0.5, np.nan]), e2e_s=np.array([1.5, 0.5, 7.5, np.nan]))
    workload = Workload(name="made up", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    slo = Slo(ttft_s=1.0, tpot_s=0.2, target=0.5)
    service = Service(name="chat", model=model_shape("llama-7b"), workload=workload, slo=slo)
    outcome = ServiceOutcome(
        service=service,
        outcomes=outcomes,
        kv_s=np.array([0.1, 0.0, 0.3, 0.0]),
        prefill=np.array([0, 0, 0, -1]),
        decode=np.array([1, 0, 1, -1]),
        replays=np.array([0, 0, 1, 0]),
        refused=1,
    )
    replicas = tuple(
        ReplicaOutcome(
            id=name,
            service="chat",
            phase=phase,
            boxes=(name,),
            times="by hand",
            counts=EngineCounts(prefill_s=2.0, decode_s=1.0, steps=7, peak_blocks=5),
            blocks=10,
        )
        for name, phase in (("prefiller", Phase.PREFILL), ("decoder", Phase.DECODE))
    )
    return SimResult(
        services=(outcome,),
        replicas=replicas,
        boxes=("prefiller", "decoder"),
        settings=SimSettings(),
        events=42,
        end_s=10.0,
        sent_bytes={(0, 1): 3e9, (0, 0): 5e9},
        traffic_usd=0.25,
        steps=(StepLog(0, StepRecord(0.0, 0.5, "prefill", 100, 0, 1)),) if steps else (),
        transfers=(TransferRecord(0, 0, 1, 0.25, 0.6, 100),) if steps else (),
    )


RESULT = result_of()


def test_the_figures_of_a_service() -> None:
    summary = summarise(RESULT.services[0], RESULT)
    assert (summary.requests, summary.completed, summary.refused, summary.replayed) == (4, 3, 1, 1)
    assert summary.attainment == 0.5  # of all four
    assert summary.span_s == 9.5
    assert summary.goodput_s == pytest.approx(2 / 9.5)
    assert summary.output_tokens_s == pytest.approx(23 / 9.5)
    assert summary.offered_s == 1.0
    assert summary.tpot_s.mean == pytest.approx(0.4)  # of two
    assert summary.kv_visible_s.mean == pytest.approx(0.2)  # of those that were transferred
    assert (summary.lengths, summary.arrivals, summary.times) == ("made up", "one a second", ("by hand",))


def test_attainment_over_deadlines_of_any_length() -> None:
    outcomes, slo = RESULT.services[0].outcomes, RESULT.services[0].service.slo
    assert [attainment(outcomes, slo, scale) for scale in (0.4, 0.5, 1.0, 3.5)] == [0.0, 0.5, 0.5, 0.75]
    assert attainment_curve(RESULT.services[0], np.array([0.5, 3.5])).tolist() == [0.5, 0.75]


def test_deadlines_may_change_with_the_traffic() -> None:
    outcome = RESULT.services[0]
    assert outcome.met().tolist() == [True, True, False, False]
    lenient = replace(outcome, later_slos=((2.0, Slo()),))
    assert lenient.met().tolist() == [True, True, True, False], "the last one never ended"
    strict = replace(outcome, later_slos=((0.0, Slo(ttft_s=1e-9)), (2.0, Slo())))
    assert strict.met().tolist() == [False, False, True, False]
    assert summarise(strict, RESULT).attainment == 0.25


def test_a_report_for_people_and_for_programs() -> None:
    report = report_of(RESULT)
    assert (report.kv_gb, report.traffic_usd, report.events) == (3.0, 0.25, 42)  # what stays in a box is not traffic
    assert report.replicas[0].busy == pytest.approx(0.3)
    assert report.replicas[0].kv_peak == 0.5
    screen = Console(file=io.StringIO(), width=160)
    screen.print(tables(report))
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    for said in (
        "lengths: made up; arrivals: one a second; step times: by hand",
        "3 of 4 requests, 1 refused",
        "50.0%",
    ):
        assert said in text
    decoded = json.loads(msgspec.json.encode(report))
    assert decoded["services"][0]["slo"]["tpot_s"] == 0.2


def test_request_by_request(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    write_requests(RESULT.services[0], RESULT, path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["in_time"] for row in rows] == ["1", "1", "0", "0"]
    assert (rows[0]["prefill"], rows[0]["decode"], rows[3]["decode"]) == ("prefiller", "decoder", "")
    assert float(rows[2]["tpot"]) == pytest.approx(0.7)
    assert isnan(float(rows[3]["e2e"]))
    with pytest.raises(ReportError, match="No such file"):
        write_requests(RESULT.services[0], RESULT, tmp_path / "no" / "where.csv")


def test_request_by_request_as_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "requests.parquet"
    write_requests(RESULT.services[0], RESULT, path)
    table = parquet.read_table(path).to_pydict()
    assert table["prompt"] == [100, 200, 300, 400]
    assert table["decode"] == ["decoder", "prefiller", "decoder", ""]


def test_what_went_on_over_time() -> None:
    line = Timeline(RESULT.services[0].outcomes, bins=19)  # of half a second each
    assert line.arrived_s.sum() * 0.5 == 4.0
    assert line.finished_s.sum() * 0.5 == 3.0
    assert line.tokens_s.sum() * 0.5 == 23.0
    assert line.present[-1] == 1.0  # the one that never ended
    assert line.ttft_s[0] == 0.5
    assert isnan(line.ttft_s[1])


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = {"ours": RESULT.services[0]}
    for number, plot in enumerate((plot_attainment, plot_timeline)):
        path = tmp_path / f"{number}.png"
        plot(curves, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ReportError):
        plot_attainment(curves, tmp_path / "no" / "where.png")


def test_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(RESULT, path)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["prefiller (prefill, prefiller)", "decoder (decode, decoder)", "KV transfers"]
    (step,) = [event for event in events if event["ph"] == "X"]
    assert (step["name"], step["ts"], step["dur"]) == ("prefill", 0.0, 500_000.0)
    begin, end = (event for event in events if event["ph"] in "be")
    assert (begin["name"], begin["ts"], end["ts"]) == ("prefiller -> decoder", 250_000.0, 600_000.0)
    with pytest.raises(ReportError, match="record=True"):
        write_chrome_trace(result_of(steps=False), path)
