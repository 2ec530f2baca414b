"""A problem small enough to be thought through: two pairs of equal boxes, and an evaluator whose scores are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.problem import (
    Component,
    Evaluator,
    Group,
    PhaseCounts,
    Problem,
    Proposal,
    Score,
    Slice,
    Solution,
)
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.planning.upper.search_space import SearchSpace

A40 = gpu_table().find("A40-48GB", Specs.DENSE)
TI = gpu_table().find("RTX-3090TI-24GB", Specs.DENSE)


class GivenScores:
    """An `Evaluator`: groups of `least` GPUs and more hold the model, and scores are what a function says. `scored` has
    the solutions that were evaluated, in order; an upper bound is a score and `slack`."""

    def __init__(self, objective: Callable[[Solution], float], slack: float = 0.5, least: int = 2) -> None:
        self._objective, self._slack, self._least = objective, slack, least
        self.scored: list[Solution] = []

    def can_hold(self, slices: tuple[Slice, ...], service: int) -> bool:
        return sum(gpus for _, gpus in slices) >= self._least

    def max_rates(self, group: Group, replicas: int) -> tuple[float, float]:
        rate = float(sum(gpus for _, gpus in group.slices))
        return rate * (group.phase is not Phase.DECODE), rate * (group.phase is not Phase.PREFILL)

    def component_values(
        self, components: Sequence[Component], phase_counts: Sequence[PhaseCounts]
    ) -> NDArray[np.float64]:
        raise NotImplementedError

    def for_subproblem(self, problem: Problem) -> Evaluator:
        return self

    def score(self, solution: Solution) -> Score:
        self.scored.append(solution)
        return Score(self._objective(solution), 0.5, 1.0)

    def upper_bound(self, solution: Solution) -> float:
        return self._objective(solution) + self._slack

    def propose(self, solution: Solution, *, epoch: int, version: int) -> tuple[Proposal, ...]:
        raise NotImplementedError


def four_boxes(**changes: object) -> Problem:
    """`a0` and `a1` are alike, `t0` and `t1` but for their links: t1 is further away."""
    boxes = (
        Box(id="a0", gpu=A40, gpus=4), Box(id="a1", gpu=A40, gpus=4), Box(id="t0", gpu=TI, gpus=2, atomic=True),
        Box(id="t1", gpu=TI, gpus=2, atomic=True),
    )  # fmt: skip
    gbps = np.full((4, 4), 10.0)
    gbps[3, :] = gbps[:, 3] = 1.0
    cluster = Cluster(boxes=boxes, gbps=gbps, rtt_s=np.full((4, 4), 1e-3), usd_per_gb=np.zeros((4, 4)))
    workload = Workload(name="even", prompts=np.full(8, 100), outputs=np.full(8, 10), rate=1.0)
    service = Service(name="s", model=model_shape("llama-7b"), workload=workload)
    fields: dict[str, object] = {"cluster": cluster, "services": (service,), "pinned": {}} | changes
    return Problem(**fields)  # type: ignore[arg-type]


Spaces = Callable[..., tuple[SearchSpace, GivenScores]]


@pytest.fixture
def make_space() -> Spaces:
    """A search space of the four boxes, with an evaluator that scores as it is told."""

    def make(
        objective: Callable[[Solution], float] = lambda solution: 0.0,
        *,
        pinned: Mapping[str, Phase] | None = None,
        excluded: frozenset[str] = frozenset(),
        slack: float = 0.5,
        least: int = 2,
        services: int = 1,
        near: Sequence[tuple[int, int]] = (),
    ) -> tuple[SearchSpace, GivenScores]:
        evaluator = GivenScores(objective, slack, least)
        problem = four_boxes(pinned=dict(pinned or {}), excluded=excluded)
        for one, two in near:  # ten times as fast as other links
            problem.cluster.gbps[one, two] = problem.cluster.gbps[two, one] = 100.0
        (service,) = problem.services
        problem = replace(problem, services=tuple(replace(service, name=f"s{n}") for n in range(services)))
        return SearchSpace.of(problem, evaluator), evaluator

    return make
