"""The two-level problem of ThunderServe section 3: which GPUs form replicas and what those do
(upper level), and what that is worth (lower level).

GPUs of one box are equal, so a group is so many GPUs of each of some boxes; which of them, only the
finished plan says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase, Plan
from .cluster import Cluster
from .workload import Service


class Slice(NamedTuple):
    """So many GPUs of a box (its index in the cluster)."""

    box: int
    gpus: int


class Group(NamedTuple):
    """GPUs that will hold one copy of a model, and its phase. `slices`: by box, none empty;
    `service`: index into the problem's."""

    slices: tuple[Slice, ...]
    phase: Phase
    service: int = 0


Solution = tuple[Group, ...]
"""Sorted groups that use no GPU twice; GPUs in no group stay idle."""

Component = tuple[Group, ...]
"""Sorted groups that share boxes with each other and with no other group: KV between them takes no
link to other boxes."""

PhaseCounts = tuple[int, int]
"""How many replicas share a service's prompts, and its outputs."""


def connected_boxes(solution: Iterable[Group], boxes: Iterable[int]) -> set[int]:
    """These boxes, those that share a replica with one of them, and so on."""
    inside, left = set(boxes), list(solution)
    while touching := [group for group in left if any(box in inside for box, _ in group.slices)]:
        left = [group for group in left if group not in touching]
        inside.update(box for group in touching for box, _ in group.slices)
    return inside


def split_components(groups: Iterable[Group]) -> list[Component]:
    """The smallest that these are made of."""
    found: list[tuple[set[int], list[Group]]] = []
    for group in groups:
        boxes, together = {box for box, _ in group.slices}, [group]
        components = []
        for component in found:
            if component[0].isdisjoint(boxes):
                components.append(component)
            else:
                boxes |= component[0]
                together += component[1]
        found = [*components, (boxes, together)]
    return sorted(tuple(sorted(together)) for _, together in found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What to plan. `pinned`: boxes only for groups of that phase; `excluded`: not used;
    `price_weight`: objective lost per dollar per hour, 0 ignores money. `within_boxes`: no group has
    GPUs of two boxes."""

    cluster: Cluster
    services: tuple[Service, ...]
    pinned: dict[str, Phase]
    excluded: frozenset[str] = frozenset()
    price_weight: float = 0.0
    within_boxes: bool = False


class Score(NamedTuple):
    """What a solution is worth: `objective` orders solutions, higher is better.

    `attainment`: the share of all requests expected to meet every deadline. `capacity`: the highest
    rate that the replicas and links carry with the target share in time, over the rate that is
    asked for (`evaluator` has the formula).
    """

    objective: float
    attainment: float
    capacity: float


class Percentiles(NamedTuple):
    """Seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEstimate:
    """What is expected of one replica under its share of the traffic."""

    id: str
    requests_s: float
    utilisation: float
    batch: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan of one service, and what is expected of it.

    `score` is that of all services together, `attainment` the share of this one's requests that
    meet every deadline. `limits` says what would have to grow for more traffic. `max_rate`:
    requests per second that keep the target share in time; beyond it, queues grow. `tokens_s`:
    output tokens per second at the rate asked for, in time or not. `simulated_requests`: how many
    attainment, times and the highest rate are by; 0: these are the planner's estimate.
    """

    plan: Plan
    score: Score
    attainment: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    max_rate: float
    tokens_s: float
    usd_per_hour: float
    usd_per_million_tokens: float
    replicas: tuple[ReplicaEstimate, ...]
    limits: str
    simulated_requests: int = 0


class Evaluator(Protocol):
    """The lower level. All calls are pure and remember what they computed for a group or a pair of
    groups."""

    def can_hold(self, slices: tuple[Slice, ...], service: int) -> bool:
        """Whether these GPUs have the memory for the model and some KV, in a shape that can be run.
        Cheap."""
        ...

    def max_rates(self, group: Group, replicas: int) -> tuple[float, float]:
        """Requests/s that a group alone prefills and decodes in time, as one of `replicas` alike; 0
        where its phase leaves one out or it lacks the model."""
        ...

    def component_values(
        self, components: Sequence[Component], phase_counts: Sequence[PhaseCounts]
    ) -> NDArray[np.float64]:
        """Upper bounds (`upper_bound`), requests/s by [component, service, total price, prefill
        share]. `phase_counts`: replicas sharing prompts, outputs."""
        ...

    def for_subproblem(self, problem: Problem) -> Evaluator:
        """An evaluator for some of the boxes and services, at other rates; it may use what this one
        remembers."""
        ...

    def score(self, solution: Solution) -> Score:
        """Parallel configurations, orchestration (linear programme) and the expected attainment."""
        ...

    def upper_bound(self, solution: Solution) -> float:
        """About the most that `score(solution).objective` can be, and much cheaper: to leave out
        what will not win."""
        ...

    def propose(self, solution: Solution, *, epoch: int, version: int) -> tuple[Proposal, ...]:
        """The finished plan of each service, with what is expected of it and why."""
        ...
