"""Ours over the best colocated plan, each planned for deadlines of 3, 5 and 10 times a lone
request's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import nan
from typing import Final

from ..policies import PLAN
from ..replanning import describe_phases
from .deployments import RATES
from .page import Page, PageTable, ResultRow
from .setting import CLOUD, COLUMNS, TARGET, WORKLOADS, PlannedCase, Scope, highest_rate, spread
from .systems import best_colocated, chosen

TITLE: Final = "Over colocated serving, by deadline"
SCALES: Final = (3.0, 5.0, 10.0)


class StrictnessRow(ResultRow, frozen=True):
    """Both plans' requests/s with 90 % in time, expected and simulated; mean (least-most over
    seeds). The last column is the ratio by seed."""

    column: str
    workload: str
    deadline: str
    colocated: str
    colocated_expected: float
    colocated_simulated: str
    ours: str
    ours_expected: float
    ours_simulated: str
    ours_over_colocated: str


@cache
def strictness_rows(scope: Scope) -> tuple[StrictnessRow, ...]:
    """Both workloads under both columns at each of SCALES."""
    cases = [
        PlannedCase(specs=specs, workload=workload, rate=RATES[workload], scale=scale, gbps=10.0)
        for specs in COLUMNS
        for workload in WORKLOADS
        for scale in SCALES
    ]
    return tuple(compare_with_colocated(case, scope) for case in cases)


def compare_with_colocated(case: PlannedCase, scope: Scope) -> StrictnessRow:
    """One case's row."""
    plans = best_colocated(case, scope), chosen(case, scope)
    others, own = ([highest_rate(plan, scope, seed, PLAN) for seed in scope.seeds] for plan in plans)
    colocated, ours = (plan.at() for plan in plans)
    return StrictnessRow(
        column=case.specs.value, workload=case.workload, deadline=f"{case.scale:g} x",
        colocated=describe_phases(colocated.plan), colocated_expected=colocated.max_rate,
        colocated_simulated=spread(others), ours=describe_phases(ours.plan), ours_expected=ours.max_rate,
        ours_simulated=spread(own),
        ours_over_colocated=spread([a / b if b else nan for a, b in zip(own, others, strict=True)]),
    )  # fmt: skip


def strictness(scope: Scope) -> Page:
    """The page."""
    return page_of(strictness_rows(scope), scope)


def page_of(rows: Sequence[StrictnessRow], scope: Scope) -> Page:
    """The page with these rows."""
    return Page(
        name="strictness",
        title="Against colocated serving, by deadline",
        assumes=(
            f"LLaMA-30B on {CLOUD}, 10 Gb/s between boxes (not printed in the paper). Azure's lengths, Poisson "
            f"arrivals for {scope.seconds:g} s, {len(scope.seeds)} seeds; both plans meet the same requests. Deadlines "
            "to the first token, from token to token and end to end, as multiples of what a lone request takes on an "
            f"A100; a rate counts with {TARGET:.0%} of the requests in time.\n\nBoth plans are searched for and tried "
            "alike, each for the deadlines of its row, as [the page beside](baselines.md) says: with token budgets by "
            "deadline, of any GPUs, and chosen by trials with requests of other seeds. Requests are routed by the "
            "network's router."
        ),
        tables=(PageTable(TITLE, rows),),
        remarks=REMARKS,
    )


REMARKS: Final = """\
- The stricter the deadlines, the more is gained by splitting: a prompt that is prefilled beside
  answers holds them up by a round, which at 10 times a lone request's pace fits and at 3 times
  hardly does. By measured figures at 3 times ours carries 2.2 times (coding) and 2.0 times
  (conversations) what the best colocated plan does; the paper has 1.5 and 1.3, at deadlines that it
  does not print.
- At 3 times, coding, more than six of a hundred answers are too long for their deadline even where
  little comes, so that the tenth that may be late is nearly used up: a percent more or less in time
  is a quarter of the rate, of the colocated plan too (see its spread).
- Plans that split carry up to a third more at 3 times than is expected of them: the router sends
  requests where nobody waits, and shares are made as if it did that by halves.
"""
