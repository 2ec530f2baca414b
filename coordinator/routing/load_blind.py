"""Policies that do not look at loads, for comparison: by the plan's shares (ThunderServe section
3.3), at random, and in turn (figure 12); in turn by weights, and all to one (Xiong et al., section
5.2). All keep to phases and present boxes."""

from __future__ import annotations

from collections import Counter
from typing import final

import numpy as np

from ..plan import Plan
from .interface import NoRoute, ReplicaLoads, RequestFacts, Route, RoutingPolicy, RoutingSettings


class _LoadBlind(RoutingPolicy):
    """What they share: the replicas that can take a side of a request."""

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        self._plan = plan

    def _candidates(self, excluded: frozenset[str]) -> tuple[list[str], list[str]]:
        """Ids of the replicas that may prefill, and of those that may decode. Raises NoRoute."""
        usable = [item for item in self._plan.replicas if excluded.isdisjoint((item.id, *item.peers))]
        prefill, decode = [item.id for item in usable if item.prefills], [item.id for item in usable if item.decodes]
        if not decode:
            raise NoRoute(f"no box can take a request for {self._plan.service}: no replica is left that decodes")
        return prefill or decode, decode


@final
class RandomReplicas(_LoadBlind):
    """Each side by lot; a mixed replica that prefills also decodes."""

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        prefill, decode = self._candidates(request.excluded)
        first = prefill[int(rng.integers(len(prefill)))]
        then = first if first in decode else decode[int(rng.integers(len(decode)))]
        return Route.between(first, then, request.prompt_tokens)


@final
class RoundRobin(_LoadBlind):
    """Each side in turn; a mixed replica that prefills also decodes."""

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        super().__init__(plan, settings)
        self._prefilled: Counter[str] = Counter()
        self._decoded: Counter[str] = Counter()

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        prefill, decode = self._candidates(request.excluded)
        first = min(prefill, key=self._prefilled.__getitem__)
        then = first if first in decode else min(decode, key=self._decoded.__getitem__)
        self._prefilled[first] += 1
        self._decoded[then] += 1
        return Route.between(first, then, request.prompt_tokens)


@final
class WeightedRoundRobin(_LoadBlind):
    """Each side in turn, a replica as often as it has GPUs; a mixed replica that prefills also
    decodes."""

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        super().__init__(plan, settings)
        self._gpus = {item.id: len(item.gpus) for item in plan.replicas}
        self._prefilled: Counter[str] = Counter()
        self._decoded: Counter[str] = Counter()

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        prefill, decode = self._candidates(request.excluded)
        first = min(prefill, key=lambda item: (self._prefilled[item] + 1) / self._gpus[item])
        then = first
        if first not in decode:
            then = min(decode, key=lambda item: (self._decoded[item] + 1) / self._gpus[item])
        self._prefilled[first] += 1
        self._decoded[then] += 1
        return Route.between(first, then, request.prompt_tokens)


@final
class SingleReplica(_LoadBlind):
    """All requests to the first replica that the plan names and that may be used, of each side."""

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        prefill, decode = self._candidates(request.excluded)
        first = prefill[0]
        return Route.between(first, first if first in decode else decode[0], request.prompt_tokens)


@final
class PlanShares(_LoadBlind):
    """The pair of replicas that is furthest behind the share of requests that the plan gives it."""

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        super().__init__(plan, settings)
        self._sent = {pair: 0 for pair in plan.pairings if pair.weight > 0.0}

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`; without a pair, the first replica of each side."""
        prefill, decode = self._candidates(request.excluded)
        pairs = [pair for pair in self._sent if pair.prefill in prefill and pair.decode in decode]
        if not pairs:
            return Route.between(prefill[0], decode[0], request.prompt_tokens)
        chosen = min(pairs, key=lambda pair: (self._sent[pair] + 1) / pair.weight)
        self._sent[chosen] += 1
        return Route.between(chosen.prefill, chosen.decode, request.prompt_tokens)
