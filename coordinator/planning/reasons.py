"""Why a plan is as it is: what slows each replica, and what other choices would have given.

Asked for when a plan is made; a search does none of it, but what it has evaluated is looked through. What limits a
replica is what would make its steps shorter if it were twice as fast: compute, memory bandwidth, or the links between
its GPUs. Besides, its memory may be full, and the links that its KV takes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, product
from math import ceil
from typing import Final

import msgspec
import numpy as np

from ..costs.model_shape import ModelShape
from ..costs.replica import GIB, Hop, StageHardware, replica_times
from ..costs.step_times import StepTimes
from ..plan import Phase, Replica, Stage
from .lower.behaviour import MAX_BATCH
from .lower.evaluator import LowerLevel
from .lower.parallel import LOCAL_RTT_S, MEMORY_SHARE
from .model.cluster import Cluster
from .model.kv_cost import kv_gigabits
from .model.length_classes import Classes, classify_lengths
from .model.link_share import LinkShares
from .model.problem import Group, Problem, Proposal, ReplicaEstimate, Score, Slice, Solution
from .model.workload import Service

FULL: Final = 0.9
"""Of what there is at most, from which on memory or a link counts as full."""

MOST_ALTERNATIVES: Final = 32
"""Replicas whose other phases are evaluated, the busiest: the larger a plan, the longer each evaluation takes, too."""


class Resource(StrEnum):
    """What a step takes its time for."""

    COMPUTE = "compute"
    BANDWIDTH = "memory bandwidth"
    LINK = "links between its GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another choice, and what it would give: `attainment`, and `capacity` in multiples of the rate that is asked for.
    `gain`: by how much the objective would be higher."""

    choice: str
    attainment: float
    capacity: float
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLink:
    """The link of a replica whose KV fills it most: Gb/s that are used, and those that plans may count on."""

    source: str
    target: str
    used_gbps: float
    planned_gbps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReasons:
    """Of one replica. `cards`: by box; `weights_gib` of the model; `room_gib`: what weights and KV may take of its
    memory; `least_cards`: of its smallest kind that hold one copy with its longest request.

    `could_prefill`, `could_decode`: requests/s in time if it did nothing else. `halved`: the time of its steps, of what
    it is, were a resource twice as fast. `full_batch`: requests that its memory holds at once, None where more than any
    batch. `alternatives`: other phases, best first; `other_groups`: the best solution found in which these GPUs are
    no such replica.
    """

    id: str
    cards: tuple[tuple[str, str, int], ...]
    weights_gib: float
    room_gib: float
    least_cards: int
    is_pinned: bool
    could_prefill: float
    could_decode: float
    halved: Mapping[Resource, float]
    limit: str
    full_batch: float | None
    kv_link: KVLink | None
    alternatives: tuple[Alternative, ...]
    other_groups: Alternative | None


def pipeline_times(
    model: ModelShape, stages: Sequence[Stage], cluster: Cluster, faster: Resource | None = None
) -> StepTimes:
    """Of a replica of these stages; with one resource of all its boxes twice as fast."""
    at = [cluster.index(stage.peer) for stage in stages]
    link = 2.0 if faster is Resource.LINK else 1.0
    hardware = []
    for box, stage in zip(at, stages, strict=True):
        gpu = cluster.boxes[box].gpu
        if faster is Resource.COMPUTE:
            gpu = msgspec.structs.replace(gpu, tflops=2.0 * gpu.tflops)
        elif faster is Resource.BANDWIDTH:
            gpu = msgspec.structs.replace(gpu, memory_gbps=2.0 * gpu.memory_gbps)
        hardware.append(StageHardware(gpu, stage.tp, stage.layers, link * cluster.boxes[box].gpu_link_gbps))
    ends = pairwise([*at, at[0]]) if len(at) > 1 else ()
    return replica_times(model, hardware, [_hop(cluster, one, two, link) for one, two in ends])


def _hop(cluster: Cluster, one: int, two: int, faster: float) -> Hop:
    if one == two:
        return Hop(LOCAL_RTT_S / faster, faster * cluster.boxes[one].gpu_link_gbps)
    return Hop(float(cluster.rtt_s[one, two]) / faster, faster * float(cluster.gbps[one, two]))


def explain_replicas(
    problem: Problem,
    evaluator: LowerLevel,
    solution: Solution,
    proposals: Sequence[Proposal],
    evaluated: Mapping[Solution, Score],
) -> tuple[tuple[ReplicaReasons, ...], ...]:
    """Of each service's proposal, in the order of its replicas. `evaluated`: what the search has looked at, from which
    come other groups of GPUs."""
    level = evaluator.score(solution)
    ranked = sorted(evaluated.items(), key=lambda item: -item[1].objective)
    return tuple(
        _ServiceReasons(problem, evaluator, solution, number, proposal, level, ranked).explain()
        for number, proposal in enumerate(proposals)
    )


class _ServiceReasons:
    """What the reasons of one service's replicas are made of."""

    def __init__(
        self,
        problem: Problem,
        evaluator: LowerLevel,
        solution: Solution,
        number: int,
        proposal: Proposal,
        level: Score,
        ranked: Sequence[tuple[Solution, Score]],
    ) -> None:
        self.problem, self.evaluator, self.solution = problem, evaluator, solution
        self.number, self.proposal, self.level, self.ranked = number, proposal, level, ranked
        self.service: Service = problem.services[number]
        self.classes = classify_lengths(self.service.workload)
        self.kinds = Counter(self._kind(group) for group in solution)
        self.links = _fill_links(problem.cluster, self.service, self.classes, proposal)

    def explain(self) -> tuple[ReplicaReasons, ...]:
        """In the order of the plan's replicas."""
        busiest = sorted(self.proposal.replicas, key=lambda item: -item.requests_s)[:MOST_ALTERNATIVES]
        looked_at = {item.id for item in busiest}
        return tuple(
            self._reasons(replica, estimate, with_phases=estimate.id in looked_at)
            for replica, estimate in zip(self.proposal.plan.replicas, self.proposal.replicas, strict=True)
        )

    def _reasons(self, replica: Replica, estimate: ReplicaEstimate, *, with_phases: bool) -> ReplicaReasons:
        cluster, model = self.problem.cluster, self.service.model
        group = self._group(replica)
        cards = [(cluster.boxes[box], gpus) for box, gpus in group.slices]
        longest = int((self.service.workload.prompts + self.service.workload.outputs).max())
        needed_gib = (model.weight_bytes + longest * model.kv_bytes_per_token) / GIB
        smallest = min(box.gpu.memory_gib for box, _ in cards) * MEMORY_SHARE
        same = sum(other.phase is replica.phase for other in self.proposal.plan.replicas)
        halved = _halve_resources(model, replica, cluster, self.classes, estimate)
        full = self._full_batch(group)
        own = [link for link, users in self.links if replica.id in users]
        link = max(own, key=lambda each: each.used_gbps / max(each.planned_gbps, 1e-9), default=None)
        return ReplicaReasons(
            id=replica.id,
            cards=tuple((box.id, box.gpu.name, gpus) for box, gpus in cards),
            weights_gib=model.weight_bytes / GIB,
            room_gib=sum(gpus * box.gpu.memory_gib for box, gpus in cards) * MEMORY_SHARE,
            least_cards=ceil(needed_gib / smallest),
            is_pinned=any(box.id in self.problem.pinned for box, _ in cards),
            could_prefill=self.evaluator.max_rates(group._replace(phase=Phase.PREFILL), same)[0],
            could_decode=self.evaluator.max_rates(group._replace(phase=Phase.DECODE), same)[1],
            halved=halved,
            limit=_limit(halved, full, estimate, link),
            full_batch=full,
            kv_link=link,
            alternatives=self._other_phases(group) if with_phases else (),
            other_groups=self._other_groups(group),
        )

    def _group(self, replica: Replica) -> Group:
        """The solution's group that became this replica."""
        gpus: defaultdict[int, int] = defaultdict(int)
        for stage in replica.stages:
            gpus[self.problem.cluster.index(stage.peer)] += stage.tp
        return Group(tuple(Slice(box, many) for box, many in sorted(gpus.items())), replica.phase, self.number)

    def _full_batch(self, group: Group) -> float | None:
        most = self.evaluator.largest_batch(group)
        return most if group.phase is not Phase.PREFILL and most < MAX_BATCH else None

    def _other_phases(self, group: Group) -> tuple[Alternative, ...]:
        if group not in self.solution:
            return ()
        pins = {self.problem.pinned.get(self.problem.cluster.boxes[box].id) for box, _ in group.slices} - {None}
        others = [phase for phase in Phase if phase is not group.phase and pins <= {phase}]
        rest = [other for other in self.solution if other != group]
        same = [group] * (len(self.solution) - len(rest) - 1)
        found = []
        for phase in others:
            changed = tuple(sorted([*rest, *same, group._replace(phase=phase)]))
            found.append(self._alternative(phase.value, self.evaluator.score(changed)))
        return tuple(sorted(found, key=lambda each: -each.gain))

    def _other_groups(self, group: Group) -> Alternative | None:
        """Of solutions with fewer groups of this kind; equal boxes count as exchangeable."""
        kind = self._kind(group)
        for other, score in self.ranked:
            if sum(self._kind(each) == kind for each in other) < self.kinds[kind]:
                boxes = {box for box, _ in group.slices}
                touching = [each for each in other if boxes & {box for box, _ in each.slices}]
                return self._alternative("; ".join(map(self._describe, touching)) or "left idle", score)
        return None

    def _alternative(self, choice: str, score: Score) -> Alternative:
        return Alternative(
            choice=choice, attainment=score.attainment, capacity=score.capacity,
            gain=score.objective - self.level.objective,
        )  # fmt: skip

    def _kind(self, group: Group) -> tuple[tuple[str, int], ...]:
        """What a group is made of, whichever boxes that are."""
        boxes = self.problem.cluster.boxes
        return tuple(sorted((boxes[box].gpu.name, gpus) for box, gpus in group.slices))

    def _describe(self, group: Group) -> str:
        boxes, services = self.problem.cluster.boxes, self.problem.services
        of = f"{services[group.service].name}: " if len(services) > 1 else ""
        return f"{of}{group.phase} on " + " + ".join(f"{gpus} of {boxes[box].id}" for box, gpus in group.slices)


def _halve_resources(
    model: ModelShape, replica: Replica, cluster: Cluster, classes: Classes, estimate: ReplicaEstimate
) -> dict[Resource, float]:
    """The time of its steps with each resource twice as fast, of the time as it is."""
    now = _work_s(pipeline_times(model, replica.stages, cluster), replica.phase, classes, estimate.batch)
    return {
        each: _work_s(pipeline_times(model, replica.stages, cluster, each), replica.phase, classes, estimate.batch)
        / now
        for each in Resource
    }


def _work_s(times: StepTimes, phase: Phase, classes: Classes, batch: float) -> float:
    """What an average request takes of the replica's time: of prefill, of decode in a batch of so many, or both."""
    together = max(1, round(batch))
    prefill_s = times.prefill_interval_s(max(1, round(classes.mean_prompt)), classes.mean_pairs)
    step_s = times.decode_line(together).step_s(together * classes.held)
    decode_s = classes.mean_output * step_s / together
    return prefill_s * (phase is not Phase.DECODE) + decode_s * (phase is not Phase.PREFILL)


def _limit(
    halved: Mapping[Resource, float], full_batch: float | None, estimate: ReplicaEstimate, link: KVLink | None
) -> str:
    """In one word: what has to grow first."""
    if link is not None and link.used_gbps >= FULL * link.planned_gbps:
        return "link"
    if full_batch is not None and estimate.batch >= FULL * full_batch:
        return "memory"
    return min(halved, key=lambda each: halved[each]).value


def _fill_links(
    cluster: Cluster, service: Service, classes: Classes, proposal: Proposal
) -> list[tuple[KVLink, frozenset[str]]]:
    """What KV takes of the links between boxes, by the plan's shares of the mean request, and the replicas whose it
    is."""
    plan, model = proposal.plan, service.model
    weights: defaultdict[str, float] = defaultdict(float)
    for pair in plan.pairings:
        for end in {pair.prefill, pair.decode}:
            weights[end] += pair.weight
    rates = [item.requests_s / weights[item.id] for item in proposal.replicas if weights[item.id] > 0.0]
    gigabits = float(classes.share @ kv_gigabits(model, classes.prompt, service.kv_bits)) * max(rates, default=0.0)
    used: defaultdict[tuple[str, str], float] = defaultdict(float)
    users: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for pair in plan.pairings:
        one, two = plan.replica(pair.prefill), plan.replica(pair.decode)
        assert one is not None, "plans name the replicas of their pairings"
        assert two is not None, "plans name the replicas of their pairings"
        for source, target in product(one.stages, two.stages):
            shared = min(source.last_layer, target.last_layer) - max(source.first_layer, target.first_layer)
            if shared > 0 and source.peer != target.peer:
                used[source.peer, target.peer] += pair.weight * gigabits * shared / model.layers
                users[source.peer, target.peer] |= {one.id, two.id}
    planned = np.asarray(LinkShares([(service, classes)]).of(cluster.gbps) * cluster.gbps)

    def link(source: str, target: str) -> KVLink:
        there = float(planned[cluster.index(source), cluster.index(target)])
        return KVLink(source=source, target=target, used_gbps=used[source, target], planned_gbps=there)

    return [(link(*ends), frozenset(those)) for ends, those in users.items()]
