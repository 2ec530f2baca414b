"""Which replicas serve one request.

The plan says how requests should be shared in the long run; the queues say how it stands now. As in Splitwise
section IV-A, the prefill and the decode side are both chosen when the request arrives, by the shortest queue;
a queue counts for its length over the share that the plan gives it, so that twice the share may hold twice
the queue. A side whose free KV cannot hold the prompt comes after all others: the request would wait there.

A `Router` is made once for a plan and asked for every request; `route` is the same for one question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .plan import Phase, Plan, Replica

__all__ = ["Load", "LoadError", "NoRoute", "Route", "Router", "route"]

Indices = NDArray[np.intp]
Floats = NDArray[np.float64]

_BOUNDLESS = np.iinfo(np.int64).max


class NoRoute(LookupError):
    """No replica may take the request; the text is one line for the client and the log."""


class LoadError(ValueError):
    """A load report that cannot be; the text names the field."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's latest report: requests running and waiting, and KV tokens it still has room for.

    `replica` is its id in the plan. On the running network that is the peer id of its head, the box that schedules
    for all of its stages.
    """

    replica: str
    running: int
    waiting: int
    kv_free_tokens: int

    def __post_init__(self) -> None:
        if not self.replica:
            raise LoadError("load.replica is empty")
        if min(self.running, self.waiting, self.kv_free_tokens) < 0:
            raise LoadError(f"load of {self.replica} has a negative figure")

    @property
    def outstanding(self) -> int:
        """Requests it has not finished."""
        return self.running + self.waiting


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica ids for one request; `prefill` None: the decode replica reads the prompt as well.

    `split` is how many tokens of the prompt the prefill replica reads, from its beginning: any number from 1 to all
    of them, or 0 without such a replica.
    """

    prefill: str | None
    decode: str
    split: int = 0


class _Pairs(NamedTuple):
    """Pairs of replicas that the plan gives weight, in order of their ids: where their ends are in the router's
    columns, X of the prefill side, Y of the decode side, and how much of the prompt the prefill side reads."""

    prefill: Indices
    decode: Indices
    x: Floats
    y: Floats
    split_share: list[float]


class _Alone(NamedTuple):
    """Replicas that may serve a request by themselves, in order of their ids, and their shares of the requests."""

    replicas: Indices
    share: Floats


class _Table(NamedTuple):
    """The plan without what is excluded."""

    usable: Indices
    pairs: _Pairs | None
    alone: _Alone | None


@final
class Router:
    """Finds the route with the least weighted work outstanding, by the latest load reports. A route takes a few array
    operations over the pairs of the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._ids = [item.id for item in plan.replicas]
        self._column = {name: number for number, name in enumerate(self._ids)}
        self._outstanding = np.zeros(len(self._ids))
        self._free = np.full(len(self._ids), _BOUNDLESS, dtype=np.int64)
        self._silent = np.ones(len(self._ids), dtype=bool)
        self._excluded: frozenset[str] = frozenset()
        self._table = _compile(plan, self._column, self._excluded)

    def report(self, loads: Iterable[Load]) -> None:
        """Take in the latest report of every replica, in place of all earlier ones; one that is not in the plan is
        nobody's business here."""
        self._silent[:] = True
        self._free[:] = _BOUNDLESS
        for load in loads:
            if load.replica in self._column:
                self.note(load.replica, load.outstanding, load.kv_free_tokens)

    def note(self, replica: str, outstanding: int, kv_free_tokens: int) -> None:
        """Take in the latest of one replica of the plan; what the others said still stands."""
        column = self._column[replica]
        self._outstanding[column] = outstanding
        self._free[column] = kv_free_tokens
        self._silent[column] = False

    def route(self, prompt_tokens: int, exclude: frozenset[str] = frozenset()) -> Route:
        """The best route without what is in `exclude`: ids of boxes or replicas. Raises NoRoute where none is left.

        A replica with an excluded box is not used at all. In order of preference: the pairs that the plan gives
        weight; a decode or mixed replica alone; a prefill replica alone. A replica that has reported nothing counts
        as busy as the busiest that has: silence is no sign of leisure. Ties go by replica id.
        """
        if prompt_tokens < 0:
            raise ValueError(f"prompt_tokens is {prompt_tokens}; it must not be negative")
        if exclude != self._excluded:
            self._excluded, self._table = exclude, _compile(self.plan, self._column, exclude)
        pairs, alone = self._table.pairs, self._table.alone
        longer = self._outstanding_or_guess() + 1.0
        unfit = (self._free < prompt_tokens).astype(np.int8)
        if pairs is not None:
            cost = longer[pairs.prefill] / pairs.x + longer[pairs.decode] / pairs.y
            best = _least(unfit[pairs.prefill] + unfit[pairs.decode], cost)
            prefill, decode = self._ids[pairs.prefill[best]], self._ids[pairs.decode[best]]
            if prefill == decode:
                return Route(prefill=None, decode=decode)
            return Route(prefill=prefill, decode=decode, split=_split(prompt_tokens, pairs.split_share[best]))
        if alone is not None:
            best = _least(unfit[alone.replicas], longer[alone.replicas] / alone.share)
            return Route(prefill=None, decode=self._ids[alone.replicas[best]])
        raise NoRoute(
            f"no box can take a request for {self.plan.service}: all {len(self._ids)} replicas of "
            f"plan {self.plan.epoch}.{self.plan.version} are excluded ({', '.join(sorted(exclude))})"
        )

    def _outstanding_or_guess(self) -> Floats:
        if not self._silent.any():
            return self._outstanding
        usable = self._table.usable
        told = usable[~self._silent[usable]]
        busiest = self._outstanding[told].max() if len(told) else 0.0
        return np.where(self._silent, busiest, self._outstanding)


def route(
    plan: Plan,
    loads: Iterable[Load],
    *,
    prompt_tokens: int,
    exclude: frozenset[str] = frozenset(),
) -> Route:
    """One question to a router that has heard `loads`; see `Router.route`."""
    router = Router(plan)
    router.report(loads)
    return router.route(prompt_tokens, exclude)


def _least(unfit: NDArray[np.int8], cost: Floats) -> int:
    """The first of the least cost among those where the prompt fits best."""
    if unfit.any():
        cost = np.where(unfit == unfit.min(), cost, np.inf)
    return int(cost.argmin())


def _split(prompt_tokens: int, share: float) -> int:
    """The share in whole tokens: at least one, and never more than there are."""
    return min(prompt_tokens, max(1, ceil(prompt_tokens * share)))


def _compile(plan: Plan, column: dict[str, int], exclude: frozenset[str]) -> _Table:
    usable = {item.id: item for item in plan.replicas if exclude.isdisjoint((item.id, *item.peers))}
    return _Table(
        usable=np.array([column[name] for name in usable], dtype=np.intp),
        pairs=_pairs(plan, column, usable),
        alone=_alone(plan, column, [item for item in usable.values() if item.decodes])
        or _alone(plan, column, [item for item in usable.values() if item.phase is Phase.PREFILL]),
    )


def _pairs(plan: Plan, column: dict[str, int], usable: dict[str, Replica]) -> _Pairs | None:
    """X and Y among the usable pairs alone."""
    pairs = [pair for pair in plan.pairings if pair.weight > 0.0 and pair.prefill in usable and pair.decode in usable]
    if not pairs:
        return None
    total = sum(pair.weight for pair in pairs)
    from_prefill: defaultdict[str, float] = defaultdict(float)
    for pair in pairs:
        from_prefill[pair.prefill] += pair.weight
    pairs.sort(key=lambda pair: (pair.prefill, pair.decode))
    return _Pairs(
        prefill=np.array([column[pair.prefill] for pair in pairs], dtype=np.intp),
        decode=np.array([column[pair.decode] for pair in pairs], dtype=np.intp),
        x=np.array([from_prefill[pair.prefill] / total for pair in pairs]),
        y=np.array([pair.weight / from_prefill[pair.prefill] for pair in pairs]),
        split_share=[pair.prefill_share for pair in pairs],
    )


def _alone(plan: Plan, column: dict[str, int], replicas: list[Replica]) -> _Alone | None:
    """A replica that the plan gives no requests counts for as much as the one that it gives the fewest."""
    if not replicas:
        return None
    shares: defaultdict[str, float] = defaultdict(float)
    for pair in plan.pairings:
        for end in {pair.prefill, pair.decode}:
            shares[end] += pair.weight
    smallest = min((share for share in shares.values() if share > 0.0), default=1.0)
    replicas = sorted(replicas, key=lambda item: item.id)
    return _Alone(
        replicas=np.array([column[item.id] for item in replicas], dtype=np.intp),
        share=np.array([shares[item.id] or smallest for item in replicas]),
    )
