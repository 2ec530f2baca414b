"""Finished plans, with what is expected of them and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...costs.rounds import CHUNKS, chunk_tokens
from ...plan import Pairing, Phase, Plan, Replica, Stage
from ..lower.behaviour import MAX_BATCH
from ..lower.flow import solve
from ..lower.members import Member, Members
from ..lower.orchestration import Orchestration
from ..model.cluster import Cluster
from ..model.errors import UnservedError
from ..model.problem import Percentiles, Proposal, ReplicaEstimate, Score
from ..model.workload import Slo

__all__ = ["Proposer"]

Array = NDArray[np.float64]

HALVINGS: Final = 20
"""Of the interval that a percentile is searched in."""

LEAST_WEIGHT: Final = 1e-4
"""Pairs with a smaller share of the requests are left out of a plan."""


class Proposer:
    """Writes the plans of one solution. GPUs of a box are numbered in the order of the groups, over all services."""

    def __init__(
        self, cluster: Cluster, members: Members, orchestrations: Sequence[Orchestration], score: Score
    ) -> None:
        self._cluster = cluster
        self._members = members
        self._orchestrations = orchestrations
        self._score = score
        self._taken: Counter[int] = Counter()
        self._heads = Counter(
            member.holder.spans[0][0] for orchestration in orchestrations for member in orchestration.members
        )
        self._gpus = Counter[int]()
        for orchestration in orchestrations:
            for member in orchestration.members:
                self._gpus.update(dict(member.group.slices))

    def proposal(self, orchestration: Orchestration, most: float, *, epoch: int, version: int) -> Proposal:
        """Of one service, which up to `most` requests per second would be in time for; call it once for each, in their
        order. Raises UnservedError."""
        service, flow = orchestration.service, orchestration.flow
        if not flow.served > 0.0:
            raise UnservedError(f"service {service.name}: no replicas of the solution can hand over to each other")
        replicas = tuple(self._replica(member, service.slo) for member in orchestration.members)
        estimates = tuple(self._estimate(orchestration, number, replica.id) for number, replica in enumerate(replicas))
        carried = _at_most(orchestration, in_time=False)
        limits = _limits(orchestration, _at_most(orchestration, in_time=True))
        tokens_s = min(service.workload.rate, carried) * service.workload.mean_output
        usd = self._usd_per_hour(orchestration)
        plan = Plan(
            epoch=epoch, version=version, service=service.name, replicas=replicas,
            pairings=_pairings(orchestration, replicas), codec=service.codec,
            why=(
                _expectation(orchestration, most),
                limits,
                *(f"{replica.id}: {estimate.why}" for replica, estimate in zip(replicas, estimates, strict=True)),
            ),
        )  # fmt: skip
        fates, weights = orchestration.fates, _weights(orchestration)
        return Proposal(
            plan=plan, score=self._score, attainment=orchestration.attainment,
            ttft_s=_percentiles(fates.first_within, weights), tpot_s=_percentiles(fates.paced_within, weights),
            e2e_s=_percentiles(fates.ended_within, weights),
            max_rate=most, tokens_s=tokens_s, usd_per_hour=usd,
            usd_per_million_tokens=usd / (tokens_s * 3600.0) * 1e6 if tokens_s else np.inf,
            replicas=estimates, limits=limits,
        )  # fmt: skip

    def _replica(self, member: Member, slo: Slo) -> Replica:
        stages, first = [], 0
        for part, tp, layers in member.configuration.stages:
            box = member.group.slices[part].box
            stages.append(
                Stage(
                    peer=self._cluster.boxes[box].id, tp=tp, first_layer=first, last_layer=first + layers,
                    first_gpu=self._taken[box],
                )
            )  # fmt: skip
            self._taken[box] += tp
            first += layers
        head = stages[0]
        alone = self._heads[member.holder.spans[0][0]] == 1
        name = head.peer if alone else f"{head.peer}/{head.first_gpu}"
        step_tokens = CHUNKS[0]
        if member.group.phase is not Phase.PREFILL:
            step_tokens = chunk_tokens(member.configuration.times, len(stages), slo.tpot_s)
        return Replica(id=name, phase=member.group.phase, stages=tuple(stages), step_tokens=step_tokens)

    def _usd_per_hour(self, orchestration: Orchestration) -> float:
        """The boxes, shared by GPUs between services, and the traffic."""
        boxes = 0.0
        for member in orchestration.members:
            for box, gpus in member.group.slices:
                boxes += self._cluster.boxes[box].usd_per_hour * gpus / self._gpus[box]
        return boxes + float((orchestration.flow.used * self._cluster.usd_per_gb).sum()) * 3600.0 / 8.0

    def _estimate(self, orchestration: Orchestration, number: int, name: str) -> ReplicaEstimate:
        member, flow = orchestration.members[number], orchestration.flow
        mine = (orchestration.handover.reader == number) | (orchestration.handover.writer == number)
        load = float(flow.loads[number])
        return ReplicaEstimate(
            id=name, requests_s=float(flow.pairs[mine].sum()), utilisation=load,
            batch=member.behaviour.batch_at(load), why=self._why(orchestration, member),
        )  # fmt: skip

    def _why(self, orchestration: Orchestration, member: Member) -> str:
        """What it is made of, what it does best, and what holds it back."""
        group, behaves = member.group, member.behaviour
        cards = " + ".join(f"{gpus} x {self._cluster.boxes[box].gpu.name}" for box, gpus in group.slices)
        widths = ", ".join(f"TP {tp} x {layers} layers" for _, tp, layers in member.configuration.stages)
        rates = {phase: self._members.member(group._replace(phase=phase)) for phase in (Phase.PREFILL, Phase.DECODE)}
        parts = [f"{group.phase} on {cards} ({widths})"]
        reader, writer = rates[Phase.PREFILL], rates[Phase.DECODE]
        if reader is not None and writer is not None:
            could = reader.behaviour.read, writer.behaviour.write
            parts.append("can read {:.3g} prompts/s or write {:.3g} answers/s".format(*could))
        prompt_s = float(orchestration.classes.share @ behaves.lone_s)
        if group.phase is not Phase.DECODE:
            parts.append(f"a prompt takes {prompt_s:.3g} s")
        if group.phase is not Phase.PREFILL:
            held = f"memory for {behaves.max_batch:.0f} requests at once"
            parts.append(held if behaves.max_batch < MAX_BATCH else f"at most {MAX_BATCH} requests at once")
        return "; ".join(parts)


def _expectation(orchestration: Orchestration, most: float) -> str:
    rate, target = orchestration.service.workload.rate, orchestration.service.slo.target
    expected = f"{orchestration.attainment:.1%} of {rate:g} requests/s are expected to be in time"
    return f"{expected}; up to {most:.3g} requests/s {target:.0%} would be"


def _pairings(orchestration: Orchestration, replicas: Sequence[Replica]) -> tuple[Pairing, ...]:
    """The shares of all requests that are served, without the smallest."""
    handover, pairs = orchestration.handover, orchestration.flow.pairs
    kept = np.where(pairs >= LEAST_WEIGHT * pairs.sum(), pairs, 0.0)
    return tuple(
        Pairing(
            prefill=replicas[int(handover.reader[pair])].id, decode=replicas[int(handover.writer[pair])].id,
            weight=float(kept[pair] / kept.sum()),
        )
        for pair in np.flatnonzero(kept).tolist()
    )  # fmt: skip


def _weights(orchestration: Orchestration) -> Array:
    """[pair, class]: shares of the requests that are served."""
    pairs = orchestration.flow.pairs[orchestration.active]
    return np.asarray(np.outer(pairs / pairs.sum(), orchestration.classes.share))


def _percentiles(within: Callable[[float], Array], weights: Array) -> Percentiles:
    """Where so many of a hundred are, by halving the interval."""
    found = []
    for quantile in (0.5, 0.9, 0.99):
        low, high = 0.0, 1e-3
        while float((within(high) * weights).sum()) < quantile and high < 1e9:
            low, high = high, 2.0 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if float((within(middle) * weights).sum()) < quantile:
                low = middle
            else:
                high = middle
        found.append(high)
    return Percentiles(*found)


def _at_most(orchestration: Orchestration, *, in_time: bool) -> float:
    """Requests per second that replicas and links carry together; `in_time`: at loads that keep the target share."""
    network = orchestration.network
    tops = [curve.usable if in_time else 1.0 for curve in orchestration.curves]
    rate = np.inf if in_time else network.rate
    return solve(network.unlimited(rate, tops)).served


def _limits(orchestration: Orchestration, most: float) -> str:
    """What would have to grow for more requests in time."""
    reading = writing = both = 0.0
    for member, curve in zip(orchestration.members, orchestration.curves, strict=True):
        if member.group.phase is Phase.PREFILL:
            reading += curve.usable * member.behaviour.read
        elif member.group.phase is Phase.DECODE:
            writing += curve.usable * member.behaviour.write
        else:
            both += curve.usable * member.behaviour.rate
    sides = f"reading carries {reading:.3g} requests/s in time, writing {writing:.3g}, replicas that do both {both:.3g}"
    if most == 0.0:
        slow = "not even an idle replica meets the deadlines for the target share"
        return f"limit: the deadlines ({slow})"
    if not (reading or writing):
        return f"limit: the replicas, which all do both ({sides})"
    if most < 0.95 * (min(reading, writing) + both):
        return f"limit: the links ({sides}, the links between them {most:.3g})"
    return f"limit: {'reading' if reading < writing else 'writing'} ({sides})"
