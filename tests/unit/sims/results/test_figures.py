"""Figures, tables and pictures of made-up results: what counts, what is drawn, what is left out."""

import builtins
import io
import json
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.sims.engine.values import EngineCounts, StepRecord
from p2pserve.sims.records import Outcomes, Trace, TraceError
from p2pserve.sims.results import plots
from p2pserve.sims.results.chrome_trace import chrome_events
from p2pserve.sims.results.outcomes import (
    ReplicaOutcome,
    ServiceLog,
    ServiceOutcome,
    SimResult,
    StepLog,
    TransferRecord,
    meets,
    summarise,
)
from p2pserve.sims.results.report import ReportError, report_of, request_columns, tables, write_requests
from p2pserve.sims.scenario import ServiceRun, SimSettings

SLO = Slo(ttft_s=1.0, tpot_s=0.1, target=0.9)


def outcomes_of(*rows: tuple[float, int, float, float]) -> Outcomes:
    """Rows of arrival, output tokens, TTFT and end to end."""
    arrival, output, ttft, e2e = (np.array(column) for column in zip(*rows, strict=True))
    trace = Trace(
        ids=np.arange(len(rows)) + 70, arrival_s=arrival.astype(float), prompt=np.full(len(rows), 100), output=output,
        lengths="made up", arrivals="by hand",
    )  # fmt: skip
    return Outcomes(trace=trace, ttft_s=ttft.astype(float), e2e_s=e2e.astype(float))


def service_of(outcomes: Outcomes, name: str = "chat", **more: Any) -> ServiceOutcome:
    count = len(outcomes.trace)
    workload = Workload(name="made up", prompts=outcomes.trace.prompt, outputs=outcomes.trace.output, rate=1.0)
    fields = {
        "kv_s": np.zeros(count), "prefill": np.zeros(count, np.int64), "decode": np.zeros(count, np.int64),
        "replays": np.zeros(count, np.int64), "refused": 0,
    }  # fmt: skip
    service = Service(name=name, model=model_shape("llama-7b"), workload=workload, slo=SLO)
    return ServiceOutcome(service=service, outcomes=outcomes, **{**fields, **more})


def result_of(*services: ServiceOutcome, **more: Any) -> SimResult:
    replicas = tuple(
        ReplicaOutcome(
            id=name, service=service, phase=Phase.MIXED, boxes=("x", "y"), times=times, blocks=40,
            counts=EngineCounts(prefill_s=1.0, decode_s=2.0, steps=7, peak_blocks=30),
        )
        for name, service, times in (("r0", "chat", "table"), ("r1", "chat", "line"), ("r2", "code", "roofline"))
    )  # fmt: skip
    fields: dict[str, Any] = {
        "services": services, "replicas": replicas, "boxes": ("x", "y"), "settings": SimSettings(), "events": 9,
        "end_s": 20.0, "sent_bytes": {}, "traffic_usd": 0.0, "steps": (), "transfers": (),
    }  # fmt: skip
    return SimResult(**{**fields, **more})


NEVER = (3.0, 5, nan, nan)


@pytest.mark.parametrize(
    ("row", "met"),
    [
        ((0.0, 11, 1.0, 2.0), True),
        ((0.0, 11, 1.01, 2.0), False),
        ((0.0, 11, 1.0, 2.01), False),
        ((0.0, 1, 1.0, 1.0), True),
        ((0.0, 1, 0.5, 1.1), False),
        (NEVER, False),
    ],
)
def test_a_request_is_in_time_up_to_its_very_deadlines(row: tuple[float, int, float, float], met: bool) -> None:
    assert meets(outcomes_of(row), SLO).tolist() == [met]


def test_an_end_to_end_deadline_counts_beside_the_others() -> None:
    row = (0.0, 11, 0.1, 1.0)
    slo = Slo(ttft_s=1.0, tpot_s=1.0, e2e_s=0.9, target=0.9)
    assert not meets(outcomes_of(row), slo)[0]
    assert meets(outcomes_of(row), slo, 1.2)[0]


def test_what_nobody_got_has_no_figures_and_no_rates() -> None:
    figures = summarise(service := service_of(outcomes_of(NEVER)), result_of(service))
    assert (figures.requests, figures.completed, figures.attainment) == (1, 0, 0.0)
    assert all(isnan(value) for value in (figures.span_s, figures.offered_s, figures.completed_s, figures.goodput_s))
    assert isnan(figures.ttft_s.p99)


def test_a_service_is_told_by_its_own_replicas_and_requests() -> None:
    outcomes = outcomes_of((2.0, 11, 0.5, 1.5), (4.0, 1, 0.25, 0.25), (6.0, 21, 0.75, 6.75), (6.5, 5, nan, nan))
    service = service_of(
        outcomes, kv_s=np.array([0.2, 9.0, 0.4, 9.0]), prefill=np.array([0, 0, 0, 0]), decode=np.array([1, 0, 1, 1]),
        replays=np.array([0, 2, 1, 0]), refused=1,
    )  # fmt: skip
    figures = summarise(service, result_of(service))
    assert figures.times == ("line", "table")
    assert figures.span_s == pytest.approx(10.75), "from 2.0 to 12.75"
    assert figures.offered_s == pytest.approx(3 / 4.5)
    assert figures.completed_s == pytest.approx(3 / 10.75)
    assert figures.output_tokens_s == pytest.approx(33 / 10.75)
    assert figures.prompt_tokens_s == pytest.approx(300 / 10.75)
    assert figures.replayed == 2, "requests, not replays"
    assert figures.kv_visible_s.mean == pytest.approx(0.3), "of those that two replicas served to the end"
    assert figures.tpot_s.mean == pytest.approx((0.1 + 0.3) / 2), "of more than one token"
    assert figures.attainment == 0.5
    assert figures.goodput_s == pytest.approx(2 / 10.75)


def test_a_log_begins_with_nothing_and_ends_as_values() -> None:
    outcomes = outcomes_of((0.0, 5, 0.1, 0.2), NEVER)
    plan: Any = None
    log = ServiceLog(ServiceRun(service=service_of(outcomes).service, plan=plan, trace=outcomes.trace))
    log.ttft_s[0], log.e2e_s[0], log.decode[0], log.refused = 0.1, 0.2, 4, 3
    found = log.outcome()
    assert found.outcomes.completed.tolist() == [True, False]
    assert (found.decode.tolist(), found.prefill.tolist()) == ([4, -1], [-1, -1])
    assert (found.kv_s.tolist(), found.replays.tolist(), found.refused) == ([0.0, 0.0], [0, 0], 3)


@pytest.mark.parametrize(
    ("sent", "kv_gb"), [({(0, 0): 9e9}, 0.0), ({(0, 1): 1e9, (1, 0): 2e9, (1, 1): 4e9}, 3.0), ({}, 0.0)]
)
def test_only_what_leaves_a_box_is_traffic(sent: dict[tuple[int, int], float], kv_gb: float) -> None:
    assert report_of(result_of(sent_bytes=sent)).kv_gb == pytest.approx(kv_gb)


def test_shares_are_of_the_simulated_time_and_of_the_memory() -> None:
    row = report_of(result_of()).replicas[0]
    assert [row.prefill, row.decode, row.busy, row.mixed] == pytest.approx([0.05, 0.1, 0.15, 0.0])
    assert row.kv_peak == 0.75
    assert report_of(result_of(end_s=0.0)).simulated_s == 0.0, "no division by nothing"


def shown(service: ServiceOutcome) -> str:
    screen = io.StringIO()
    Console(file=screen, width=170).print(tables(report_of(result_of(service))))
    return screen.getvalue()


def test_the_table_gives_long_times_in_seconds_short_ones_in_ms_and_none_as_a_dash() -> None:
    text = shown(service_of(outcomes_of((0.0, 11, 0.5, 1.5), (1.0, 11, 0.5, 1.5))))
    line = {row.split()[1]: row for row in text.splitlines() if row.startswith("│") and len(row.split()) > 3}
    assert "500.0 ms" in line["TTFT"]
    assert "1.50 s" in line["E2E"]
    assert line["KV"].count(" - ") == 4, "no KV was transferred"
    assert "refused" not in text
    assert "replayed" not in text


def test_what_was_refused_or_replayed_is_said() -> None:
    text = shown(service_of(outcomes_of((0.0, 11, 0.5, 1.5), NEVER), refused=1, replays=np.array([3, 0])))
    assert "1 of 2 requests, 1 refused, 1 replayed;" in text


def test_columns_name_replicas_and_leave_empty_what_had_none() -> None:
    service = service_of(outcomes_of((0.0, 11, 0.5, 1.5), NEVER), prefill=np.array([2, -1]), decode=np.array([0, 1]))
    columns = request_columns(service, result_of(service))
    assert columns["prefill"] == ["r2", ""]
    assert columns["decode"] == ["r0", "r1"]
    assert list(columns["id"]) == [70, 71]
    assert list(columns["in_time"]) == [1, 0]


def test_pictures_and_parquet_name_what_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith(("matplotlib", "pyarrow")):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    service = service_of(outcomes_of((0.0, 11, 0.5, 1.5)))
    with pytest.raises(ReportError, match=r"pip install 'p2pserve\[plots\]'"):
        plots.plot_timeline({"a": service}, tmp_path / "a.png")
    with pytest.raises(ReportError, match="or write CSV"):
        write_requests(service, result_of(service), tmp_path / "a.parquet")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that were saved; nothing is written."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: saved.append(figure))
    return saved


def test_attainment_is_a_line_for_each_outcome_and_one_for_each_target(drawn: list[Any], tmp_path: Path) -> None:
    fast, slow = (service_of(outcomes_of((0.0, 11, ttft, ttft + 0.5))) for ttft in (0.5, 5.0))
    plots.plot_attainment({"fast": fast, "slow": slow}, tmp_path / "a.png")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert len(lines) == 3
    assert axes.get_legend() is None, "it would hide a line"
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["fast", "slow"]
    assert lines["fast"].get_linestyle() != lines["slow"].get_linestyle()
    assert lines["fast"].get_linewidth() > lines["slow"].get_linewidth(), "so that both show where they are one"
    for name, least in (("fast", 0.5), ("slow", 5.0)):
        x, y = lines[name].get_data()
        assert min(x[y == 1.0]) == pytest.approx(least, rel=0.07), "in time from its own TTFT on"
        assert set(y) == {0.0, 1.0}
    assert axes.get_xscale() == "log"


def test_a_timeline_has_arrivals_beside_what_was_served(drawn: list[Any], tmp_path: Path) -> None:
    service = service_of(outcomes_of((0.0, 11, 0.5, 6.0), (6.0, 11, 1.5, 6.0)))
    plots.plot_timeline({"ours": service}, tmp_path / "t.png")
    rates, present, waits = drawn[0].axes
    arrived, served = rates.lines
    assert (served.get_label(), arrived.get_label()) == ("ours: served", "ours: arrived")
    assert served.get_color() == arrived.get_color()
    assert sum(served.get_ydata()) == sum(arrived.get_ydata()) == pytest.approx(2 / 0.1)
    assert max(present.lines[0].get_ydata()) == 1.0
    assert present.lines[0].get_ydata()[-1] == 0.0
    waited = waits.lines[0].get_ydata()
    assert waited[~np.isnan(waited)].tolist() == [0.5, 1.5]
    assert waits.get_yscale() == "linear"


def test_waits_of_more_than_a_decade_have_a_logarithmic_axis(drawn: list[Any], tmp_path: Path) -> None:
    service = service_of(outcomes_of((0.0, 11, 0.1, 6.0), (6.0, 11, 1.5, 6.0)))
    plots.plot_timeline({"ours": service}, tmp_path / "t.png")
    assert drawn[0].axes[2].get_yscale() == "log"


def test_a_timeline_of_requests_that_never_end_reaches_to_the_last_arrival() -> None:
    line = plots.Timeline(outcomes_of((0.0, 5, nan, nan), (8.0, 5, nan, nan)), bins=4)
    assert line.start_s.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert line.present.tolist() == [1, 1, 1, 2]
    assert line.finished_s.sum() == line.tokens_s.sum() == 0.0


def test_steps_and_transfers_are_on_tracks_of_their_own() -> None:
    found = result_of(
        steps=(StepLog(1, StepRecord(0.25, 0.75, "decode", 0, 3, 4)),),
        transfers=(TransferRecord(0, 0, 1, 1.0, 2.0, 100), TransferRecord(1, 1, 0, 1.5, 2.5, 50)),
    )
    events = list(chrome_events(found))
    (step,) = [event for event in events if event["ph"] == "X"]
    assert (step["tid"], step["ts"], step["dur"]) == (1, 250_000.0, 500_000.0)
    begun = [event for event in events if event["ph"] == "b"]
    assert [event["name"] for event in begun] == ["r0 -> r1", "r1 -> r0"]
    assert len({event["id"] for event in begun}) == 2, "a begin meets its own end"
    assert {event["tid"] for event in begun}.isdisjoint({0, 1, 2})
    json.dumps(events)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": np.array([1])}, "different lengths"),
        ({"arrival_s": np.array([1.0, 0.5])}, "not in order"),
        ({"arrival_s": np.array([-1.0, 0.5])}, r"request 8 \(row 1\): arrival_s is -1"),
        ({"output": np.array([1, 0])}, r"request 9 \(row 2\): output is 0"),
        ({"prompt": np.array([0, 0])}, r"request 8 \(row 1\): prompt is 0"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_with_its_row(change: dict[str, Any], says: str) -> None:
    fields = {
        "ids": np.array([8, 9]), "arrival_s": np.array([0.0, 0.0]), "prompt": np.array([1, 1]),
        "output": np.array([1, 1]), "lengths": "", "arrivals": "",
    }  # fmt: skip
    assert len(Trace(**fields)) == 2  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=says):
        Trace(**{**fields, **change})


def test_time_per_token_is_over_the_tokens_after_the_first() -> None:
    found = outcomes_of((0.0, 11, 1.0, 3.0), (0.0, 1, 1.0, 1.0), NEVER)
    assert found.tpot_s[:2].tolist() == [pytest.approx(0.2), 0.0]
    assert isnan(found.tpot_s[2])
    assert found.completed.tolist() == [True, True, False]
