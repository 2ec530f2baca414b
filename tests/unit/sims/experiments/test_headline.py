"""The page that sums up the others: which of their rows it takes, and what stands beside the paper's figure."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.sims.experiments.ablation import TITLE as ABLATION
from p2pserve.sims.experiments.ablation import AblationRow
from p2pserve.sims.experiments.baselines import TITLE as BASELINES
from p2pserve.sims.experiments.baselines import OverRow
from p2pserve.sims.experiments.convergence import LETTER, OURS, ConvergenceRow
from p2pserve.sims.experiments.convergence import TITLE as CONVERGENCE
from p2pserve.sims.experiments.headline import HeadlineRow, headline
from p2pserve.sims.experiments.links import TITLE as LINKS
from p2pserve.sims.experiments.links import LinkRow
from p2pserve.sims.experiments.page import Page, PageTable, ResultRow, read_rows, write_page
from p2pserve.sims.experiments.phases import PRICES as PHASES
from p2pserve.sims.experiments.phases import PriceRow
from p2pserve.sims.experiments.ratios import TITLE as RATIOS
from p2pserve.sims.experiments.ratios import RatioRow
from p2pserve.sims.experiments.rescheduling import TITLE as RESCHEDULING
from p2pserve.sims.experiments.rescheduling import RescheduleRow

PRINTED, MEASURED = Specs.TABLE1.value, Specs.MEASURED.value


def over(column: str, workload: str, throughput: str, deadline: float) -> OverRow:
    return OverRow(
        column=column, workload=workload, baseline="HexGen-like", throughput=throughput, paper_throughput="1.5",
        deadline_mean=deadline, deadline_best=2 * deadline, deadline_worst=0.0, paper_deadline="1.4 (1.8)",
    )  # fmt: skip


def ratio(column: str, workload: str, shape: str, *, here: bool, paper: bool, gpus: int = 16) -> RatioRow:
    return RatioRow(
        column=column, workload=workload, gpus=gpus, prefill_decode=shape, attainment="1", highest_rate=1.0,
        tokens_per_s=1.0, expected_rate=1.0, best_here=here, best_in_paper=paper,
    )  # fmt: skip


def price(column: str, gpu: str, prefill: float, decode: float) -> PriceRow:
    return PriceRow(
        column=column, gpu=gpu, usd_per_h=1.0, prefill_ms=1.0, decode_ms=1.0, prefill_usd=prefill, decode_usd=decode,
        both_usd=prefill + decode,
    )  # fmt: skip


def link(column: str, gbps: int, bits: str, over_baseline: float, paper: str, deployment: str = "apart") -> LinkRow:
    return LinkRow(
        column=column, link_gbps=gbps, deployment=deployment, KV=bits, replicas="", prefill_ms=0.0, KV_ms=0.0,
        decode_ms=0.0, tokens_per_s=0.0, expected_tokens_per_s=0.0, over_baseline=over_baseline, paper_ms="-",
        paper_tokens_per_s=paper,
    )  # fmt: skip


def without(column: str, workload: str, rate: float, system: str, times: float) -> AblationRow:
    return AblationRow(
        column=column, workload=workload, rate=rate, system=system, attainment="1", mean_e2e_s=1.0, times_all_on=times,
        kv_visible_s=0.0, paper="",
    )  # fmt: skip


def lost(column: str, workload: str, what: str, replicas: str) -> RescheduleRow:
    return RescheduleRow(
        column=column, workload=workload, rescheduling=what, replicas=replicas, flips="-", cpu_s=0.123, rate=1.0,
        attainment="1", mean_e2e_s=1.0, paper=f"{workload}'s, 13 s",
    )  # fmt: skip


BOTH = ("coding", "conversation")
ROWS: dict[tuple[str, str], Sequence[ResultRow]] = {
    ("baselines", BASELINES): [
        over(PRINTED, "coding", "1.02", 1.1), over(MEASURED, "coding", "1.03", 1.25),
        over(MEASURED, "conversation", "1.19", 2.6),
    ],
    ("ratios", RATIOS): [
        row
        for workload, paper in (("coding", "5:3"), ("conversation", "3:5"))
        for row in (
            ratio(PRINTED, workload, "7:1", here=True, paper=False),
            ratio(PRINTED, workload, paper, here=False, paper=True),
            ratio(MEASURED, workload, paper, here=True, paper=True),
            ratio(MEASURED, workload, "4:4", here=False, paper=False),
            ratio(PRINTED, workload, "3:1", here=True, paper=False, gpus=8),
        )
    ],
    ("phases", PHASES): [
        price(PRINTED, "RTX-3090TI-24GB", 4.0, 2.0), price(PRINTED, "A40-48GB", 1.0, 8.0),
        price(PRINTED, "RTX-A5000-24GB", 0.1, 0.1),
        price(MEASURED, "RTX-3090TI-24GB", 1.0, 2.0), price(MEASURED, "A40-48GB", 2.0, 4.0),
    ],
    ("links", LINKS): [
        link(PRINTED, 40, "4 bit", 1.0, "1610", "baseline"), link(PRINTED, 40, "4 bit", 1.4, "3292"),
        link(PRINTED, 40, "16 bit", 0.8, "2450"), link(PRINTED, 5, "4 bit", 0.3, "-"),
        link(MEASURED, 40, "4 bit", 1.7, "3292"), link(MEASURED, 40, "16 bit", 0.9, "2450"),
    ],
    ("ablation", ABLATION): [
        without(column, workload, rate, system, times)
        for workload in BOTH
        for column, times in ((PRINTED, 1.6), (MEASURED, 1.0))
        for rate in (3.0, 0.5)
        for system in ("4 bit, shares of the plan", "16 bit, shares of the plan", "16 bit, at random")
    ],
    ("rescheduling", RESCHEDULING): [
        lost(column, workload, what, f"{what} {column}")
        for workload in BOTH
        for column in (PRINTED, MEASURED)
        for what in ("before", "none", "lightweight", "full")
    ],
    ("convergence", CONVERGENCE): [
        ConvergenceRow(
            gpus=gpus, search=search, objective="1", evaluations=9.0, near="1 of 1", cpu_s_to_1_percent=seconds,
            cpu_s=7.25, paper_s=54, curves=[],
        )
        for gpus in (24, 32)
        for search, seconds in ((OURS, "0.14"), (LETTER, "-"))
    ],
}  # fmt: skip


def write_all(folder: Path, *, but: str = "") -> None:
    """The pages with these rows."""
    for (name, title), rows in ROWS.items():
        if name != but:
            page = Page(name=name, title=name, assumes="nothing", tables=(PageTable(title, rows),), remarks="- none\n")
            write_page(page, folder)


@pytest.fixture
def found(tmp_path: Path) -> dict[str, HeadlineRow]:
    write_all(tmp_path)
    rows = headline(tmp_path).tables[0].rows
    assert all(isinstance(row, HeadlineRow) for row in rows)
    by_name = {row.figure: row for row in rows if isinstance(row, HeadlineRow)}
    assert len(by_name) == len(rows), "each figure once"
    return by_name


def ours(row: HeadlineRow) -> tuple[str, str, str]:
    return row.paper, row.ours_by_table_1, row.ours_measured


def test_throughput_and_deadlines_have_a_row_for_each_baseline_and_workload(found: dict[str, HeadlineRow]) -> None:
    assert ours(found["throughput over HexGen-like, coding"]) == ("1.5", "1.02", "1.03")
    assert ours(found["throughput over HexGen-like, conversation"]) == ("1.5", "-", "1.19"), "a column without a run"
    deadline = found["deadline of HexGen-like over ours, coding: mean (best)"]
    assert ours(deadline) == ("1.4 (1.8)", "1.10 (2.20)", "1.25 (2.50)")
    assert deadline.page == "[baselines](baselines.md)"


def test_the_best_ratio_stands_beside_the_papers(found: dict[str, HeadlineRow]) -> None:
    assert ours(found["best prefill:decode, coding"]) == ("5:3", "7:1", "5:3")
    assert ours(found["best prefill:decode, conversation"]) == ("3:5", "7:1", "3:5")


def test_the_cheaper_card_for_each_phase_is_one_of_the_papers_two(found: dict[str, HeadlineRow]) -> None:
    assert ours(found["cheaper for prefill: A40 or 3090Ti"]) == (
        "A40", "A40, at 0.25 of the other", "3090Ti, at 0.50 of the other"
    )  # fmt: skip
    assert ours(found["cheaper for decode: A40 or 3090Ti"]) == (
        "3090Ti", "3090Ti, at 0.25 of the other", "3090Ti, at 0.50 of the other"
    )  # fmt: skip


def test_links_are_those_that_the_paper_has_a_figure_for(found: dict[str, HeadlineRow]) -> None:
    rows = {name: row for name, row in found.items() if row.page == "[links](links.md)"}
    title = "tokens/s over each box for itself: apart, 40 Gb/s, "
    assert set(rows) == {f"{title}4 bit", f"{title}16 bit"}, "neither the baseline itself nor what was not printed"
    assert ours(rows[f"{title}4 bit"]) == ("2.04", "1.40", "1.70")
    assert ours(rows[f"{title}16 bit"]) == ("1.52", "0.80", "0.90")


def test_what_is_left_out_is_told_by_rate(found: dict[str, HeadlineRow]) -> None:
    rows = [name for name, row in found.items() if row.page == "[ablation](ablation.md)"]
    assert len(rows) == 2 * 2 * 2, "workloads, systems, rates"
    assert rows[0] == "time per request, coding, 0.5 requests/s: 16 bit, shares of the plan"
    assert ours(found[rows[0]]) == ("1.3", "1.60", "1.00")
    assert not any("4 bit" in name for name in rows)


def test_only_lightweight_rescheduling_is_told(found: dict[str, HeadlineRow]) -> None:
    row = found["lightweight rescheduling, coding"]
    assert ours(row) == (
        "coding's, 13 s", f"lightweight {PRINTED} (0.1 CPU s)", f"lightweight {MEASURED} (0.1 CPU s)"
    )  # fmt: skip


def test_searches_are_of_the_papers_column(found: dict[str, HeadlineRow]) -> None:
    assert ours(found["s to plan 32 GPUs"]) == ("54", "0.14 to within 1 %, 7.2 in all", "-")
    assert "s to plan 24 GPUs" in found


@pytest.mark.parametrize("name", sorted({name for name, _ in ROWS}))
def test_a_page_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    write_all(tmp_path, but=name)
    with pytest.raises(OSError, match=rf"{name}\.json"):
        headline(tmp_path)


def test_rows_of_another_form_are_refused(tmp_path: Path) -> None:
    write_all(tmp_path)
    with pytest.raises(ValueError, match="missing required field"):
        read_rows(tmp_path, "convergence", CONVERGENCE, LinkRow)
    assert [row.gpus for row in read_rows(tmp_path, "convergence", CONVERGENCE, ConvergenceRow)] == [24, 24, 32, 32]
