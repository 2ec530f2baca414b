"""The page of live runs: what stands in it, and that its remarks follow its figures."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from p2pserve.coordinator.plan import Deadlines
from p2pserve.sdk.live import live_page
from p2pserve.sdk.live.comparison import Figure, LiveComparison, LiveTraffic
from p2pserve.sdk.live.comparison_command import check_run, main
from p2pserve.sdk.live.live_page import CALM_PARTS, FAULTY_PART, LiveFigureRow, PagePart, build_page
from p2pserve.sdk.live.network import Say
from p2pserve.sdk.live.nodes import LiveSettings
from p2pserve.sdk.live.shared.comparison import ALL, FIGURES, SharedComparison, SharedFigure, SharedRun


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command switches the log off for its process."""
    yield
    logging.disable(logging.NOTSET)


def figure(
    name: str, live: float, *, counts: bool = True, expected: float | None = None, estimated: float | None = None
) -> Figure:
    """Of which 1.0 was simulated."""
    return Figure(
        name=name, estimated=estimated, expected=expected, steady=1.0, simulated=1.0, spread=0.0, live=live,
        difference=live - 1.0, counts=counts,
        estimate_error=None if expected is None else 1.0 / expected - 1.0, is_estimated=expected is not None,
    )  # fmt: skip


def comparison(*figures: Figure) -> LiveComparison:
    return LiveComparison(
        ok=all(abs(each.difference) <= 0.05 for each in figures), estimate_ok=True, tolerance=0.05,
        estimate_tolerance=0.1, emulated="8 emulated nodes", model="m", lengths="l", arrivals="a", requests=10, lead=2,
        rate=0.7, load=0.7, rate_rule="70% of what fills the running plan", deadlines=Deadlines(),
        phases={"prefill": 3, "decode": 5}, plans=1,
        schedule=("lose 3@20",), figures=figures, failed=0, own_plans_goodput_s=0.9, median_request_ttft_difference=0.0,
        median_request_e2e_difference=0.0, link_gbps=1.0, link_rtt_s=0.004, message_s=0.002,
        cores=1.5, own_cores=1.2, late=0, notes=(),
        elapsed_s=1.0,
    )  # fmt: skip


def shared_run(run: SharedRun | None = None, say: Say | None = None, *, ratio: float = 1.02) -> SharedComparison:
    """Three services of which everything took `ratio` times as long as simulated, and 1.01 times as routed."""
    figures = tuple(
        SharedFigure(
            service=ALL, figure=name, simulated=1.0, spread=0.01, fewest=1.1, as_routed=ratio / 1.01, live=ratio
        )
        for name in FIGURES
    )
    return SharedComparison(
        requests=270, boxes=8, cards="1xA40/4", rate=0.9, message_s=0.02, cores=1.2, own_cores=0.8, late=3, retried=0,
        figures=figures, step_tokens=512,
    )  # fmt: skip


def test_what_was_simulated_as_routed_stands_beside_the_live_figures() -> None:
    calm = comparison(
        msgspec.structs.replace(figure("ttft_p90_s", 1.2), as_routed=1.18),
        msgspec.structs.replace(figure("tpot_p90_s", 1.01), as_routed=1.10),
        figure("attainment", 0.99),
    )
    page = build_page([(CALM_PARTS[0], calm)], (FAULTY_PART, comparison(figure("goodput_requests_s", 0.97))))
    rows = {row.figure: row for row in page.tables[1].rows if isinstance(row, LiveFigureRow)}
    assert rows["TTFT p90"].live_over_as_routed == pytest.approx(1.2 / 1.18)
    assert rows["attainment"].live_over_as_routed is None
    text = " ".join(page.remarks.split())
    assert "on the boxes that served it live, 1 of 2; the furthest is tpot p90 s at 0.918." in text


def test_services_that_share_boxes_are_told_by_their_figures() -> None:
    run = comparison(figure("goodput_requests_s", 1.0))
    for ratio, count in ((1.02, 3), (1.06, 0)):
        page = build_page([(CALM_PARTS[0], run)], (FAULTY_PART, run), shared_run(ratio=ratio))
        text = " ".join(page.remarks.split())
        assert f"TTFT {ratio:.3f}, TPOT {ratio:.3f}; as routed: normalized latency 1.010" in text
        assert f"Within 5% are {count} of 3. 3 emulated engines fell behind" in text


def test_remarks_follow_the_figures() -> None:
    calm = comparison(
        figure("ttft_p50_s", 1.2, expected=0.8), figure("tpot_p50_s", 1.01, expected=1.05), figure("attainment", 0.99)
    )
    page = build_page(
        [(CALM_PARTS[0], calm)], (FAULTY_PART, comparison(figure("goodput_requests_s", 0.97))), shared_run()
    )
    text = " ".join(page.markdown().split())
    assert "within 5% in 2 of 3 figures" in text
    assert "the furthest is ttft p50 s at 1.200" in text
    assert "within 10% in 1 of 2 figures" in text
    assert "goodput live is 0.970 of the simulated" in text
    assert "it is 0.900 requests/s; live 0.970" in text
    assert "lose 3@20" in text
    assert "not within 5%" in text


def test_remarks_say_what_is_not_explained() -> None:
    tail = [
        figure("tpot_p50_s", 1.01),
        figure("tpot_p90_s", 1.5),
        figure("attainment", 0.9, estimated=0.5, expected=0.99),
    ]
    calm = msgspec.structs.replace(comparison(*tail), plans=20)
    faulty = comparison(figure("goodput_requests_s", 0.97))
    text = " ".join(build_page([(CALM_PARTS[0], calm)], (FAULTY_PART, faulty), shared_run()).markdown().split())
    assert "Formulas estimate attainment at 0.50; 1.00 is simulated" in text
    assert "1.01 times the simulated at the 50th percentile and 1.50 at the 90th, attainment 0.90" in text
    assert "changed its plan 19 to 19 times a run" in text
    assert "messages take 2.0 to 2.0 ms more" in text


def test_remarks_explain_nothing_that_did_not_happen() -> None:
    run = msgspec.structs.replace(comparison(figure("tpot_p90_s", 1.0), figure("attainment", 1.0)), message_s=0.0)
    faulty = msgspec.structs.replace(comparison(figure("goodput_requests_s", 1.0)), message_s=0.0)
    text = build_page([(CALM_PARTS[0], run)], (FAULTY_PART, faulty), shared_run()).remarks
    assert "not explained" not in text
    assert "not known" not in text
    assert "Simulated messages" not in text


def test_the_page_says_how_much_each_run_was_asked() -> None:
    run = comparison(figure("goodput_requests_s", 1.0))
    page = build_page([(CALM_PARTS[0], run)], (FAULTY_PART, run), shared_run())
    assert [row["requests_s"] for row in page.records()["tables"]["Runs"]] == [run.rate, run.rate]
    assert all(part.traffic().rate == part.rate and part.traffic().load is None for part in CALM_PARTS)


@pytest.mark.parametrize("part", [*CALM_PARTS, FAULTY_PART])
def test_every_run_can_be_started(part: PagePart) -> None:
    check_run(part.settings(), part.traffic())


@pytest.mark.parametrize("is_ok", [True, False])
def test_the_command_runs_all_parts_and_writes_the_page(
    is_ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    def run(settings: LiveSettings, traffic: LiveTraffic, tolerance: float, say: Say) -> LiveComparison:
        asked.append((settings.slo, len(settings.schedule)))
        return msgspec.structs.replace(comparison(figure("goodput_requests_s", 1.0)), ok=is_ok)

    monkeypatch.setattr(live_page, "run_comparison", run)
    monkeypatch.setattr(live_page, "run_shared_comparison", shared_run)
    assert main(["--page", str(tmp_path)]) == (0 if is_ok else 1)
    assert capsys.readouterr().out.strip() == str(tmp_path / "live.md")
    assert asked == [("3x", 0), ("5x", 0), ("3x", 0), ("5x", 0), ("2x", 4)]
    assert (tmp_path / "live.md").read_text(encoding="utf-8").startswith("# Expected, simulated and live")
    rows = json.loads((tmp_path / "live.json").read_text(encoding="utf-8"))["tables"]
    assert len(rows["Runs"]) == 5
    assert "live.md" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_one_part_is_run_again_and_the_others_are_those_of_the_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(settings: LiveSettings, traffic: LiveTraffic, tolerance: float, say: Say) -> LiveComparison:
        return msgspec.structs.replace(comparison(figure("goodput_requests_s", 1.0)), requests=next(numbers))

    monkeypatch.setattr(live_page, "run_comparison", run)
    monkeypatch.setattr(live_page, "run_shared_comparison", shared_run)
    numbers = iter(range(1, 100))
    assert main(["--page", str(tmp_path), "--only", "faults"]) == 2
    assert "live-runs.json cannot be read" in capsys.readouterr().err
    assert main(["--page", str(tmp_path)]) == 0
    assert main(["--page", str(tmp_path), "--only", "coding-3x", "faults"]) == 0
    rows = json.loads((tmp_path / "live.json").read_text(encoding="utf-8"))["tables"]["Runs"]
    assert [row["requests"] for row in rows] == [1, 2, 6, 4, 7]
    runs = json.loads((tmp_path / "live-runs.json").read_text(encoding="utf-8"))
    del runs["conversation-3x"]
    (tmp_path / "live-runs.json").write_text(json.dumps(runs), encoding="utf-8")
    assert main(["--page", str(tmp_path), "--only", "faults"]) == 2
    assert "has no conversation-3x; run that part too" in capsys.readouterr().err


def test_parts_without_a_page_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "faults"]) == 2
    assert "only: it is for --page alone" in capsys.readouterr().err
