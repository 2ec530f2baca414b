"""Dispatch that follows no queue, for comparison: by the shares of the plan alone (ThunderServe section 3.3) and, as in
its figure 12, without them: at random and in turn. All keep to phases and to boxes that are there.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Protocol, final

import numpy as np

from ...coordinator.plan import Plan
from ...coordinator.router import NoRoute, Route, Router

__all__ = ["Dispatch", "Dispatcher", "InTurn", "Random", "Shares", "dispatcher"]


class Dispatch(StrEnum):
    """How requests find their replicas: by plan and queues (the network's way), by the shares of the plan whatever the
    queues, at random, or in turn."""

    PLAN = "plan"
    SHARES = "shares"
    RANDOM = "random"
    IN_TURN = "round-robin"


class Dispatcher(Protocol):
    """A `Router`, or something to compare it with."""

    def note(self, replica: str, outstanding: int, unread_tokens: int, kv_free_tokens: int) -> None:
        """The latest load of one replica of the plan."""
        ...

    def route(self, prompt_tokens: int, exclude: frozenset[str] = frozenset()) -> Route:
        """Replicas for one request, without the boxes and replicas in `exclude`. Raises NoRoute."""
        ...


class _Blind:
    """The replicas of each side, for those who do not look at loads."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def note(self, replica: str, outstanding: int, unread_tokens: int, kv_free_tokens: int) -> None:
        """Not looked at."""

    def _sides(self, exclude: frozenset[str]) -> tuple[list[str], list[str]]:
        usable = [item for item in self._plan.replicas if exclude.isdisjoint((item.id, *item.peers))]
        prefill, decode = [item.id for item in usable if item.prefills], [item.id for item in usable if item.decodes]
        if not decode:
            raise NoRoute(f"no box can take a request for {self._plan.service}: no replica is left that decodes")
        return prefill or decode, decode


@final
class Random(_Blind):
    """Each side by the throw of a die; a mixed replica that reads a prompt writes the answer as well."""

    def __init__(self, plan: Plan, rng: np.random.Generator) -> None:
        super().__init__(plan)
        self._rng = rng

    def route(self, prompt_tokens: int, exclude: frozenset[str] = frozenset()) -> Route:
        """See `Dispatcher`."""
        prefill, decode = self._sides(exclude)
        reader = prefill[int(self._rng.integers(len(prefill)))]
        writer = reader if reader in decode else decode[int(self._rng.integers(len(decode)))]
        return _route(reader, writer, prompt_tokens)


@final
class InTurn(_Blind):
    """Each side one after the other; a mixed replica that reads a prompt writes the answer as well."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    def route(self, prompt_tokens: int, exclude: frozenset[str] = frozenset()) -> Route:
        """See `Dispatcher`."""
        prefill, decode = self._sides(exclude)
        reader = min(prefill, key=self._read.__getitem__)
        writer = reader if reader in decode else min(decode, key=self._written.__getitem__)
        self._read[reader] += 1
        self._written[writer] += 1
        return _route(reader, writer, prompt_tokens)


@final
class Shares(_Blind):
    """The pair of replicas that is furthest behind the share of requests that the plan gives it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._sent = {pair: 0 for pair in plan.pairings if pair.weight > 0.0}

    def route(self, prompt_tokens: int, exclude: frozenset[str] = frozenset()) -> Route:
        """See `Dispatcher`; where no pair of the plan is left, the first replica of each side."""
        prefill, decode = self._sides(exclude)
        pairs = [pair for pair in self._sent if pair.prefill in prefill and pair.decode in decode]
        if not pairs:
            return _route(prefill[0], decode[0], prompt_tokens)
        next_pair = min(pairs, key=lambda pair: (self._sent[pair] + 1) / pair.weight)
        self._sent[next_pair] += 1
        return _route(next_pair.prefill, next_pair.decode, prompt_tokens)


def _route(prefill: str, decode: str, prompt_tokens: int) -> Route:
    if prefill == decode:
        return Route(prefill=None, decode=decode)
    return Route(prefill=prefill, decode=decode, split=prompt_tokens)


def dispatcher(plan: Plan, kind: Dispatch, rng: np.random.Generator) -> Dispatcher:
    """What `kind` names, for one plan."""
    if kind is Dispatch.RANDOM:
        return Random(plan, rng)
    if kind is Dispatch.SHARES:
        return Shares(plan)
    return InTurn(plan) if kind is Dispatch.IN_TURN else Router(plan)
