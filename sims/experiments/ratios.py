"""How many replicas should prefill, and how many decode: figures 6 and 14."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Final

import numpy as np

from ...coordinator.costs.gpus import Specs
from ...coordinator.plan import Phase
from ...coordinator.planning.model.problem import Problem, Solution
from ..results.outcomes import attainment
from .page import Curves, Page, PageTable, Picture, ResultRow
from .setting import COLUMNS, TARGET, WORKLOADS, Deployed, PlannedCase, Scope, group, highest_rate, outcome, spread

TITLE: Final = "Figures 6 and 14"
BOX_GPUS: Final = 4
BOXES: Final = (2, 3, 4)
"""8, 12 and 16 GPUs."""
SCALES: Final = {Specs.TABLE1: 20.0, Specs.MEASURED: 10.0}
"""Multiples of a lone request on an A100; by Table 1 an A5000 misses 10 often."""
RATE_PER_GPU: Final = 0.25
PAPER: Final = {("coding", 16): "5:3", ("conversation", 16): "3:5"}
"""Of the smaller clusters the paper has a figure, and no numbers."""


class RatioRow(ResultRow, frozen=True):
    """One ratio. `attainment`: where the ratio that carries most is at its highest rate; mean over
    seeds (least-most). `tokens_per_s`: of output, at the highest rate of this one."""

    column: str
    workload: str
    gpus: int
    prefill_decode: str
    attainment: str
    highest_rate: float
    tokens_per_s: float
    expected_rate: float
    best_here: bool
    best_in_paper: bool


@cache
def ratio_rows(scope: Scope) -> tuple[RatioRow, ...]:
    """Both workloads under both GPU columns, on 8, 12 and 16 GPUs."""
    rows: list[RatioRow] = []
    for specs, workload, boxes in product(COLUMNS, WORKLOADS, BOXES):
        case = PlannedCase(
            cluster="thunderserve-16xa5000",
            boxes=boxes,
            specs=specs,
            model="llama-13b",
            workload=workload,
            rate=RATE_PER_GPU * boxes * BOX_GPUS,
            scale=SCALES[specs],
        )
        rows += _rows(case, scope)
    return tuple(rows)


def ratios(scope: Scope) -> Page:
    """The page."""
    rows = ratio_rows(scope)
    return Page(
        name="ratios",
        title="Prefill to decode",
        assumes=(
            f"LLaMA-13B on 8, 12 and 16 A5000, two for each replica. Azure's lengths, Poisson arrivals for "
            f"{scope.seconds:g} s, deadlines of {SCALES[Specs.MEASURED]:g} (Table 1: {SCALES[Specs.TABLE1]:g}) times "
            "a lone request on an A100, shares of the requests by the planner's lower level. Links of 40 Gb/s "
            f"between boxes of four (not printed in the paper). Rate: the highest at which {TARGET:.0%} of the "
            "requests meet all deadlines (TTFT, TPOT, end to end)."
        ),
        tables=(PageTable(TITLE, rows),),
        remarks=REMARKS,
        pictures=(_picture(rows),),
    )


def _picture(rows: Sequence[RatioRow]) -> Picture:
    """A panel for each size of cluster."""
    panels = []
    for gpus in sorted({row.gpus for row in rows}):
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for row in rows:
            if row.gpus == gpus:
                places, tokens = lines.setdefault(f"{row.workload}, {row.column}", ([], []))
                places.append(float(len(places) + 1))
                tokens.append(row.tokens_per_s)
        x = f"prefill replicas of {gpus // 2}, on {gpus} GPUs"
        panels.append(Curves(x, f"output tokens/s at {TARGET:.0%} in time", lines, log_y=True))
    return Picture("ratios", "output tokens/s over prefill replicas, on 8, 12 and 16 GPUs", (tuple(panels),))


def _rows(case: PlannedCase, scope: Scope) -> list[RatioRow]:
    problem = case.problem()
    gpus = sum(box.gpus for box in problem.cluster.boxes)
    replicas = gpus // 2
    deployed = [Deployed(problem, _solution(problem, prefill)) for prefill in range(1, replicas)]
    highest = [highest_rate(one, scope, scope.seeds[0]) for one in deployed]
    shares = [_attainments(one, max(highest), scope) for one in deployed]
    best = int(np.argmax(np.mean(shares, axis=1)))
    names = [f"{prefill}:{replicas - prefill}" for prefill in range(1, replicas)]
    return [
        RatioRow(
            column=case.specs.value,
            workload=case.workload,
            gpus=gpus,
            prefill_decode=name,
            attainment=spread(shares[place]),
            highest_rate=highest[place],
            tokens_per_s=highest[place] * problem.services[0].workload.mean_output,
            expected_rate=one.at().max_rate,
            best_here=place == best,
            best_in_paper=name == PAPER.get((case.workload, gpus)),
        )
        for place, (name, one) in enumerate(zip(names, deployed, strict=True))
    ]


def _attainments(deployed: Deployed, rate: float, scope: Scope) -> list[float]:
    problem, plan = deployed.problem, deployed.at(rate).plan
    runs = [outcome(problem, plan, scope, seed, rate=rate) for seed in scope.seeds]
    return [attainment(one.outcomes, problem.services[0].slo) for one in runs]


def _solution(problem: Problem, prefill: int) -> Solution:
    """Pairs of GPUs, box by box; phases alternate, so that every box has both."""
    boxes = [box.id for box in problem.cluster.boxes for _ in range(box.gpus // 2)]
    order = [*boxes[0::2], *boxes[1::2]]
    return tuple(
        group(problem.cluster, Phase.PREFILL if place < prefill else Phase.DECODE, {box: 2})
        for place, box in enumerate(order)
    )


REMARKS: Final = """\
- Agrees by measured figures: of 16 GPUs 3:5 for conversation is best, as in the paper, and
  attainment falls off to both sides. For coding 6:2 carries most, and the paper's 5:3 0.89 of that.
- Agrees in kind: the best ratio moves with the size of the cluster. By measured figures it is 3:1,
  4:2 and 6:2 for coding, 2:2, 2:4 and 3:5 for conversation. The paper prints numbers for 16 GPUs
  only.
- For each GPU the best ratio of 8, 12 and 16 carries 18, 20 and 19 output tokens/s (coding) and 97,
  108 and 121 (conversation): four replicas are divided less finely than eight.
- By Table 1 the best of 16 GPUs are 7:1 and 6:2. There an A5000 has 27.8 TFLOPS, which is its shader
  rate; prompts take four times as long as its tensor cores need, and more replicas have to prefill.
  The paper's own ratios speak for tensor rates.
- The planner's estimate is right about which side limits, but supposes the router that goes by
  queues. Here requests are sent by the plan's shares alone, and prefill replicas carry up to 1.35
  times less by measured figures. By Table 1, where long prompts come near the deadline even alone,
  the best ratios carry 0.6 to 1.1 of what is expected: a few that are sent to a busy replica push
  more than a tenth of the requests over it.
"""
