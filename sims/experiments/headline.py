"""All experiments on one page, each figure beside the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...coordinator.costs.gpus import Specs
from .ablation import RATES, ablation_rows
from .ablation import SYSTEMS as ABLATED
from .baselines import contests
from .convergence import convergence_rows
from .links import link_rows
from .page import Page, Row, Table
from .ratios import ratio_rows
from .rescheduling import reschedule_rows
from .setting import WORKLOADS, Scope

__all__ = ["HeadlineRow", "headline"]


class HeadlineRow(Row, frozen=True):
    """One claim, under both GPU columns."""

    figure: str
    paper: str
    ours_by_table_1: str
    ours_measured: str
    page: str


def headline(scope: Scope) -> Page:
    """The page; runs every experiment that has not run yet."""
    return Page(
        name="headline",
        title="The evaluation of ThunderServe, again",
        assumes=(
            "Each figure is from the page that is named, which says what went in and why it differs. All of it is "
            "simulated: no GPU of these was at hand. `By table 1` takes the paper's own GPU figures, `measured` "
            "datasheet figures times the share of them that was measured on that card."
        ),
        tables=(Table("Beside the paper", list(_rows(scope))),),
        remarks=REMARKS,
    )


def _rows(scope: Scope) -> Iterator[HeadlineRow]:
    yield from _contests(scope)
    for workload in WORKLOADS:
        rows = [row for row in ratio_rows(scope) if row.workload == workload]
        paper = next(row.prefill_decode for row in rows if row.best_in_paper)
        best = {row.column: row.prefill_decode for row in rows if row.best_here}
        yield _row(f"best prefill:decode, {workload}", paper, best, "ratios")
    for bits, gbps, deployment, paper in (
        ("4 bit", 40, "A40 read, 3090Ti write", "2.0"),
        ("16 bit", 40, "A40 read, 3090Ti write", "1.5"),
        ("4 bit", 5, "2 A40 + 2 3090Ti each", "1.4"),
    ):
        over = {
            row.column: f"{row.over_baseline:.2f}"
            for row in link_rows(scope)
            if (row.KV, row.link_gbps, row.deployment) == (bits, gbps, deployment)
        }
        yield _row(f"tokens/s over each box for itself: {deployment}, {gbps} Gb/s, {bits}", paper, over, "links")
    for system in ABLATED[1:3]:
        for workload in WORKLOADS:
            times = {
                row.column: f"{row.times_all_on:.2f}"
                for row in ablation_rows(scope)
                if (row.workload, row.system, row.rate) == (workload, system.name, min(RATES))
            }
            yield _row(
                f"time per request, {workload}, {min(RATES):g} requests/s: {system.name}",
                system.paper,
                times,
                "ablation",
            )
    for workload in WORKLOADS:
        flips = {
            row.column: f"{row.replicas} ({row.cpu_s:.1f} CPU s)"
            for row in reschedule_rows(scope)
            if (row.workload, row.rescheduling) == (workload, "light")
        }
        paper = next(
            row.paper for row in reschedule_rows(scope) if (row.workload, row.rescheduling) == (workload, "light")
        )
        yield _row(f"light rescheduling, {workload}", paper, flips, "rescheduling")
    for search in convergence_rows(scope):
        yield _row(
            f"s to plan {search.gpus} GPUs", str(search.paper_s),
            {Specs.TABLE1.value: f"{search.cpu_s_to_1_percent:.1f} to within 1 %, {search.cpu_s:.1f} in all"},
            "convergence",
        )  # fmt: skip


def _contests(scope: Scope) -> Iterator[HeadlineRow]:
    """Throughput and deadlines against each baseline."""
    ratios = [row for one in contests(scope) for row in one.ratios]
    for workload, baseline in sorted({(row.workload, row.baseline) for row in ratios}):
        rows = {row.column: row for row in ratios if (row.workload, row.baseline) == (workload, baseline)}
        first = next(iter(rows.values()))
        yield _row(
            f"throughput over {baseline}, {workload}", first.paper_throughput,
            {name: row.throughput for name, row in rows.items()}, "baselines",
        )  # fmt: skip
        yield _row(
            f"deadline of {baseline} over ours, {workload}: mean (best)", first.paper_deadline,
            {name: f"{row.deadline_mean:.2f} ({row.deadline_best:.2f})" for name, row in rows.items()}, "baselines",
        )  # fmt: skip


def _row(figure: str, paper: str, ours: dict[str, str], page: str) -> HeadlineRow:
    return HeadlineRow(
        figure=figure,
        paper=paper,
        ours_by_table_1=ours.get(Specs.TABLE1.value, "-"),
        ours_measured=ours.get(Specs.MEASURED.value, "-"),
        page=f"[{page}]({page}.md)",
    )


REMARKS: Final = """\
- -
"""
