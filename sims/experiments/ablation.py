"""What the 4-bit KV cache and the shares of the plan are worth: figure 12."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from ...coordinator.plan import Plan
from ...coordinator.planning.model.problem import Problem
from ..policies import PLAN, RANDOM, SHARES
from ..results.outcomes import attainment
from .page import Page, PageTable, ResultRow
from .setting import CLOUD, COLUMNS, WORKLOADS, Deployed, PlannedCase, Scope, at_rate, outcome, planned, spread

TITLE: Final = "Figure 12"
RATES: Final = (0.5, 3.0)
"""Requests per second: when requests are nearly alone, and when the links have something to do."""


class AblationRow(ResultRow, frozen=True):
    """One system: seconds a request takes, and how many times as long as with everything on."""

    column: str
    workload: str
    rate: float
    system: str
    attainment: str
    mean_e2e_s: float
    times_all_on: float
    kv_visible_s: float
    paper: str


@dataclass(frozen=True, slots=True)
class _System:
    name: str
    kv_bits: float
    dispatch: str
    paper: str = "-"


SYSTEMS: Final = (
    _System("4 bit, shares of the plan", 4.5, SHARES, "1"),
    _System("16 bit, shares of the plan", 16.0, SHARES, "1.3"),
    _System("16 bit, at random", 16.0, RANDOM, "1.3 x 4"),
    _System("4 bit, at random", 4.5, RANDOM),
    _System("4 bit, by plan and queues", 4.5, PLAN),
)


@cache
def ablation_rows(scope: Scope) -> tuple[AblationRow, ...]:
    """Both workloads under both columns at 10 Gb/s, and with slower links."""
    rows: list[AblationRow] = []
    for specs in COLUMNS:
        for workload in WORKLOADS:
            deployed = planned(PlannedCase(specs=specs, workload=workload, rate=max(RATES)), scope.steps)
            for rate in RATES:
                rows += _rows(deployed, rate, scope)
    return tuple(rows)


def ablation(scope: Scope) -> Page:
    """The page."""
    return Page(
        name="ablation",
        title="Without compression, without orchestration",
        assumes=(
            f"LLaMA-30B on {CLOUD}, 10 Gb/s between boxes (not printed in the paper), our plan for {RATES[1]:g} "
            f"requests/s. Azure's lengths, Poisson arrivals for {scope.seconds:g} s at {RATES[0]:g} and {RATES[1]:g} "
            f"requests/s, {len(scope.seeds)} seeds. Replicas and shares stay as made for 4 bit; only the codec and "
            "the dispatch change. `By plan and queues` is the running network's router."
        ),
        tables=(PageTable(TITLE, ablation_rows(scope)),),
        remarks=REMARKS,
    )


def _rows(deployed: Deployed, rate: float, scope: Scope) -> list[AblationRow]:
    rows: list[AblationRow] = []
    for system in SYSTEMS:
        service = replace(deployed.problem.services[0], kv_bits=system.kv_bits)
        problem = replace(deployed.problem, services=(service,))
        e2e_s, visible_s, shares = _run(at_rate(problem, rate), deployed.at(rate).plan, system.dispatch, scope)
        rows.append(
            AblationRow(
                column=problem.cluster.boxes[0].gpu.specs.value,
                workload=service.name,
                rate=rate,
                system=system.name,
                attainment=spread(shares),
                mean_e2e_s=e2e_s,
                times_all_on=e2e_s / (rows[0].mean_e2e_s if rows else e2e_s),
                kv_visible_s=visible_s,
                paper=system.paper,
            )
        )
    return rows


def _run(problem: Problem, plan: Plan, dispatch: str, scope: Scope) -> tuple[float, float, list[float]]:
    """Mean end-to-end time, mean wait for KV of those that wait, attainment by seed."""
    found = [outcome(problem, plan, scope, seed, dispatch=dispatch) for seed in scope.seeds]
    slo = problem.services[0].slo
    e2e_s = float(np.mean([np.nanmean(one.outcomes.e2e_s) for one in found]))
    visible = np.concatenate([one.kv_s[one.prefill != one.decode] for one in found])
    return e2e_s, float(visible.mean()) if len(visible) else 0.0, [attainment(one.outcomes, slo) for one in found]


REMARKS: Final = """\
- Agrees in kind: without compression requests take longer wherever KV crosses links, and without
  orchestration nearly everywhere. At 3 requests/s with 16 bit links are full (a coding prompt's KV
  is 3.3 GB, 2.6 s of 10 Gb/s), so that requests queue: 1.7 to 2.0 times as long, where the paper
  has 1.3.
- Coding by measured figures has replicas that do both only: the codec is nothing to it.
- At 0.5 requests/s 16 bit costs 1.06 to 1.08 times. The paper's 1.3 for a single request needs links
  that are slower than prefill, and no relay around them.
- Random dispatch by itself costs 1.0 to 1.1 times at 0.5 requests/s and 1.1 to 2.7 times at 3; the
  paper has 4. With 16 bit besides, links decide: 1.0 to 2.1 times, and 1.1 to 25.
- `By plan and queues` takes 0.68 to 1.01 times as long as the shares alone, and as many are in time
  or more.
"""
