"""Finished plans, with what is expected of them and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...costs.rounds import TOKEN_BUDGETS, choose_token_budget
from ...plan import Pairing, Phase, Plan, Replica, Stage
from ..model.cluster import Cluster
from ..model.errors import UnservedError
from ..model.problem import Percentiles, Proposal, ReplicaEstimate, Score
from ..model.slo import deadlines_of
from ..model.workload import Service
from .behaviour import MAX_BATCH
from .flow import solve_exact
from .orchestration import Orchestration
from .replicas import ConfiguredReplica, ReplicaCatalogue

Array = NDArray[np.float64]

HALVINGS: Final = 20
"""Of the interval that a percentile is searched in."""

LEAST_WEIGHT: Final = 1e-4
"""Pairs with a smaller share of the requests are left out of a plan."""


class Proposer:
    """Writes the plans of one solution. GPUs of a box are numbered in the order of the groups, over
    all services."""

    def __init__(
        self, cluster: Cluster, replicas: ReplicaCatalogue, orchestrations: Sequence[Orchestration], score: Score
    ) -> None:
        self._cluster = cluster
        self._catalogue = replicas
        self._orchestrations = orchestrations
        self._score = score
        self._next_gpu = Counter[int]()
        self._heads = Counter(
            replica.holder.spans[0][0] for orchestration in orchestrations for replica in orchestration.replicas
        )
        self._gpus = Counter[int]()
        for orchestration in orchestrations:
            for replica in orchestration.replicas:
                self._gpus.update(dict(replica.group.slices))

    def proposal(self, orchestration: Orchestration, most: float, *, epoch: int, version: int) -> Proposal:
        """Of one service, which up to `most` requests per second would be in time for; call it once
        for each, in their order. Raises UnservedError."""
        service, flow = orchestration.service, orchestration.flow
        if not flow.served > 0.0:
            raise UnservedError(f"service {service.name}: no prefill replica has a link to a decode replica")
        replicas = tuple(self._replica(replica, service) for replica in orchestration.replicas)
        estimates = tuple(self._estimate(orchestration, number, replica.id) for number, replica in enumerate(replicas))
        carried = _at_most(orchestration, in_time=False)
        limits = _explain_limit(orchestration, _at_most(orchestration, in_time=True))
        tokens_s = min(service.workload.rate, carried) * service.workload.mean_output
        usd = self._usd_per_hour(orchestration)
        plan = Plan(
            epoch=epoch, version=version, service=service.name, replicas=replicas,
            pairings=_pairings(orchestration, replicas), codec=service.codec, deadlines=deadlines_of(service.slo),
            why=(
                state_expectation(service, orchestration.attainment, most),
                limits,
                *(f"{replica.id}: {estimate.why}" for replica, estimate in zip(replicas, estimates, strict=True)),
            ),
        )  # fmt: skip
        times, weights = orchestration.times, _weights(orchestration)
        return Proposal(
            plan=plan, score=self._score, attainment=orchestration.attainment,
            ttft_s=_percentiles(times.first_token_within, weights), tpot_s=_percentiles(times.pace_within, weights),
            e2e_s=_percentiles(times.end_within, weights),
            max_rate=most, tokens_s=tokens_s, usd_per_hour=usd,
            usd_per_million_tokens=usd / (tokens_s * 3600.0) * 1e6 if tokens_s else np.inf,
            replicas=estimates, limits=limits,
        )  # fmt: skip

    def _replica(self, replica: ConfiguredReplica, service: Service) -> Replica:
        stages, first = [], 0
        for part, tp, layers in replica.configuration.stages:
            box = replica.group.slices[part].box
            stages.append(
                Stage(
                    peer=self._cluster.boxes[box].id, tp=tp, first_layer=first, last_layer=first + layers,
                    first_gpu=self._next_gpu[box],
                )
            )  # fmt: skip
            self._next_gpu[box] += tp
            first += layers
        head = stages[0]
        alone = self._heads[replica.holder.spans[0][0]] == 1
        name = head.peer if alone else f"{head.peer}/{head.first_gpu}"
        step_tokens = TOKEN_BUDGETS[0]
        if replica.group.phase is not Phase.PREFILL:
            times = replica.configuration.times
            step_tokens = service.step_tokens or choose_token_budget(times, len(stages), service.slo.tpot_s)
        return Replica(id=name, phase=replica.group.phase, stages=tuple(stages), step_tokens=step_tokens)

    def _usd_per_hour(self, orchestration: Orchestration) -> float:
        """The boxes, shared by GPUs between services, and the traffic."""
        boxes = 0.0
        for replica in orchestration.replicas:
            for box, gpus in replica.group.slices:
                boxes += self._cluster.boxes[box].usd_per_hour * gpus / self._gpus[box]
        return boxes + float((orchestration.flow.used_gbps * self._cluster.usd_per_gb).sum()) * 3600.0 / 8.0

    def _estimate(self, orchestration: Orchestration, number: int, name: str) -> ReplicaEstimate:
        replica, flow = orchestration.replicas[number], orchestration.flow
        mine = (orchestration.pairs.prefill == number) | (orchestration.pairs.decode == number)
        load = float(flow.loads[number])
        return ReplicaEstimate(
            id=name, requests_s=float(flow.pair_rates[mine].sum()), utilisation=load,
            batch=replica.behaviour.batch_at(load), why=self._why(orchestration, replica),
        )  # fmt: skip

    def _why(self, orchestration: Orchestration, replica: ConfiguredReplica) -> str:
        """What it is made of, what it does best, and what holds it back."""
        group, behaves = replica.group, replica.behaviour
        cards = " + ".join(f"{gpus} x {self._cluster.boxes[box].gpu.name}" for box, gpus in group.slices)
        widths = ", ".join(f"TP {tp} x {layers} layers" for _, tp, layers in replica.configuration.stages)
        rates = {phase: self._catalogue.replica(group._replace(phase=phase)) for phase in (Phase.PREFILL, Phase.DECODE)}
        parts = [f"{group.phase} on {cards} ({widths})"]
        prefill, decode = rates[Phase.PREFILL], rates[Phase.DECODE]
        if prefill is not None and decode is not None:
            could = prefill.behaviour.prefill_rate, decode.behaviour.decode_rate
            parts.append("could prefill {:.3g} requests/s or decode {:.3g} requests/s".format(*could))
        prompt_s = float(orchestration.classes.share @ behaves.prefill_s)
        if group.phase is not Phase.DECODE:
            parts.append(f"prefill of a prompt takes {prompt_s:.3g} s")
        if group.phase is not Phase.PREFILL:
            held = f"memory for {behaves.max_batch:.0f} requests at once"
            parts.append(held if behaves.max_batch < MAX_BATCH else f"at most {MAX_BATCH} requests at once")
        return "; ".join(parts)


def state_expectation(service: Service, attainment: float, most: float) -> str:
    """The first of a plan's reasons. `most`: requests per second that keep the target in time."""
    expected = f"{attainment:.1%} of {service.workload.rate:g} requests/s are expected to be in time"
    return f"{expected}; up to {most:.3g} requests/s {service.slo.target:.0%} would be"


def _pairings(orchestration: Orchestration, replicas: Sequence[Replica]) -> tuple[Pairing, ...]:
    """The shares of all requests that are served, without the smallest."""
    pairs, rates = orchestration.pairs, orchestration.flow.pair_rates
    kept = np.where(rates >= LEAST_WEIGHT * rates.sum(), rates, 0.0)
    return tuple(
        Pairing(
            prefill=replicas[int(pairs.prefill[pair])].id, decode=replicas[int(pairs.decode[pair])].id,
            weight=float(kept[pair] / kept.sum()),
        )
        for pair in np.flatnonzero(kept).tolist()
    )  # fmt: skip


def _weights(orchestration: Orchestration) -> Array:
    """[pair, class]: shares of the requests that are served."""
    pairs = orchestration.flow.pair_rates[orchestration.active]
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
    """Requests per second that replicas and links carry together; `in_time`: at loads that keep the
    target share."""
    network = orchestration.network
    tops = [curve.usable_load if in_time else 1.0 for curve in orchestration.curves]
    rate = np.inf if in_time else network.rate
    return solve_exact(network.without_losses(rate, tops)).served


def _explain_limit(orchestration: Orchestration, most: float) -> str:
    """What would have to grow for more requests in time, of which there can be `most` per
    second."""
    rates = dict.fromkeys(Phase, 0.0)
    for replica, curve in zip(orchestration.replicas, orchestration.curves, strict=True):
        rates[replica.group.phase] += curve.usable_load * replica.behaviour.rate
    prefill, decode, mixed = rates[Phase.PREFILL], rates[Phase.DECODE], rates[Phase.MIXED]
    sides = (
        f"prefill replicas carry {prefill:.3g} requests/s in time, decode replicas {decode:.3g}, mixed replicas "
        f"{mixed:.3g}"
    )
    if most == 0.0:
        return "limit: the deadlines (not even an idle replica meets them for the target share)"
    if not (prefill or decode):
        return f"limit: the replicas, all of them mixed ({sides})"
    # what the programme loses besides to whole pairs is less than this
    if most < 0.95 * (min(prefill, decode) + mixed):
        return f"limit: the links ({sides}, the links between them {most:.3g})"
    return f"limit: {'prefill' if prefill < decode else 'decode'} ({sides})"
