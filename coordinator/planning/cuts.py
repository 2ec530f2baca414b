"""Among how many replicas the GPUs of one box are best divided, by the cost model that plans are made with.

Every cut is looked at as colocated serving: each replica prefills and decodes what it takes. Which replicas only
prefill or decode is decided when all boxes and links are known, and is no reason to cut a box.

Importing this takes a solver with it: import it where a cut is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from ..plan import Phase
from .lower.evaluator import LowerLevel
from .model.cluster import Box, Cluster
from .model.problem import Group, Problem, Slice
from .model.workload import Service
from .upper.search_space import make_solution

NEARLY: Final = 0.95
"""Of the highest rate: fewer replicas that carry so much are taken. Each one more costs memory for its processes, a
port and a place of the join token; and estimates are off by some percent."""


class BoxCut(NamedTuple):
    """So many equal replicas, in each of which `tp` GPUs share each layer."""

    replicas: int
    tp: int


class RatedCut(NamedTuple):
    """`rate`: requests per second of which the service's target share is in time; 0 where the replicas do not hold the
    model, or are never in time."""

    cut: BoxCut
    rate: float


def rate_cuts(box: Box, service: Service, cuts: Sequence[BoxCut]) -> tuple[RatedCut, ...]:
    """What a box would carry in each of these cuts, of which none takes more GPUs than it has."""
    nowhere = np.zeros((1, 1))
    cluster = Cluster(boxes=(replace(box, atomic=False),), gbps=nowhere, rtt_s=nowhere, usd_per_gb=nowhere)
    problem = Problem(cluster=cluster, services=(service,), pinned={})
    return tuple(RatedCut(cut, _rate(problem, cut)) for cut in cuts)


def choose_cut(rated: Sequence[RatedCut]) -> RatedCut:
    """The fewest replicas that carry nearly as much as any."""
    enough = NEARLY * max(each.rate for each in rated)
    return min((each for each in rated if each.rate >= enough), key=lambda each: each.cut.replicas)


def _rate(problem: Problem, cut: BoxCut) -> float:
    slices = (Slice(0, cut.tp),)
    service = problem.services[0]
    evaluator = LowerLevel(problem, {slices: (((0, cut.tp, service.model.layers),),)})
    if not evaluator.can_hold(slices, 0):
        return 0.0
    solution = make_solution(Group(slices, Phase.MIXED) for _ in range(cut.replicas))
    return evaluator.score(solution).capacity * service.workload.rate
