"""Which replicas serve one request.

The plan says how requests should be shared in the long run; the queues say how it stands now. As in Splitwise
section IV-A, the prefill and the decode side are both chosen when the request arrives, by the shortest queue: of those
who read, by tokens of prompts, and of those who write, by requests. A queue counts for its length over the share that
the plan gives it, so that twice the share may hold twice the queue, and beside the mean of its side, so that ten more
requests weigh much where one is read after the other, and little where hundreds are written together. A side whose
free KV cannot hold the prompt comes after all others: the request would wait there.

Queues of replicas say nothing of the links between them. Two that are idle may be joined by a thin one, to which the
plan gives a request in a hundred: a pair whose KV leaves its boxes, and that had more than FREELY times its share of
the latest requests, counts for that much more. At 60 % of the load that a plan over thin links carries, 99 instead of
93 % were in time by that (LLaMA-30B, conversations, 10 Gb/s, simulated), and plans carry as much as without.

A `Router` is made once for a plan and asked for every request; `route` is the same for one question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import ceil
from typing import Final, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .plan import Pairing, Phase, Plan, Replica

__all__ = ["Load", "LoadError", "NoRoute", "Route", "Router", "route"]

Indices = NDArray[np.intp]
Floats = NDArray[np.float64]

RECENT: Final = 128
"""About so many of the latest requests that a router remembers the pairs of."""

FREELY: Final = 1.5
"""Times its share that a pair may have of them for nothing."""

_BOUNDLESS = np.iinfo(np.int64).max


class NoRoute(LookupError):
    """No replica may take the request; the text is one line for the client and the log."""


class LoadError(ValueError):
    """A load report that cannot be; the text names the field."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's latest report: requests that it has not finished, tokens of their prompts that it has not read, and
    KV tokens that it still has room for.

    `replica` is its id in the plan. On the running network that is the peer id of its head, the box that schedules
    for all of its stages.
    """

    replica: str
    outstanding: int
    unread_tokens: int
    kv_free_tokens: int

    def __post_init__(self) -> None:
        if not self.replica:
            raise LoadError("load.replica is empty")
        if min(self.outstanding, self.unread_tokens, self.kv_free_tokens) < 0:
            raise LoadError(f"load of {self.replica} has a negative figure")


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica ids for one request; `prefill` None: the decode replica reads the prompt as well.

    `split` is how many tokens of the prompt the prefill replica reads, from its beginning: any number from 1 to all
    of them, or 0 without such a replica.
    """

    prefill: str | None
    decode: str
    split: int = 0


class _Side(NamedTuple):
    """One end of all routes: the column of the replica there and one over its share of the requests, by route, and the
    columns of all replicas that are there, each once."""

    ends: Indices
    rarity: Floats
    everyone: Indices

    def beside_mean(self, queues: Floats) -> Floats:
        """By route: the queue over the share of the requests, 1 for the mean of the side."""
        return np.asarray(queues[self.ends] * self.rarity / queues[self.everyone].sum())


class _Table(NamedTuple):
    """The routes that may be used, in order of their replicas' ids, after leaving out what is excluded; of each, how
    much of the prompt the reading side reads, its place among the plan's pairs (-1: none of them), and one over its
    share, 0 where KV stays in its boxes. `usable` are the columns of the replicas that are not excluded."""

    usable: Indices
    readers: _Side
    writers: _Side
    split_share: list[float]
    pairs: Indices
    rarity: Floats


@final
class Router:
    """Finds the route with the least weighted work outstanding, by the latest load reports. A route takes a few array
    operations over the pairs of the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._ids = [item.id for item in plan.replicas]
        self._column = {name: number for number, name in enumerate(self._ids)}
        self._outstanding = np.zeros(len(self._ids))
        self._unread = np.zeros(len(self._ids))
        self._free = np.full(len(self._ids), _BOUNDLESS, dtype=np.int64)
        self._silent = np.ones(len(self._ids), dtype=bool)
        self._sent = np.zeros(len(plan.pairings) + 1)  # by pair, and those by no pair
        self._excluded: frozenset[str] = frozenset()
        self._table = _compile(plan, self._column, self._excluded)

    def report(self, loads: Iterable[Load]) -> None:
        """Take in the latest report of every replica, in place of all earlier ones; one that is not in the plan is
        nobody's business here."""
        self._silent[:] = True
        self._free[:] = _BOUNDLESS
        for load in loads:
            if load.replica in self._column:
                self.note(load.replica, load.outstanding, load.unread_tokens, load.kv_free_tokens)

    def note(self, replica: str, outstanding: int, unread_tokens: int, kv_free_tokens: int) -> None:
        """Take in the latest of one replica of the plan; what the others said still stands."""
        column = self._column[replica]
        self._outstanding[column] = outstanding
        self._unread[column] = unread_tokens
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
        table = self._table
        if not table.split_share:
            raise NoRoute(
                f"no box can take a request for {self.plan.service}: all {len(self._ids)} replicas of "
                f"plan {self.plan.epoch}.{self.plan.version} are excluded ({', '.join(sorted(exclude))})"
            )
        to_read = self._told(self._unread) + max(1, prompt_tokens)
        to_write = self._told(self._outstanding) + 1.0
        readers, writers = table.readers.ends, table.writers.ends
        unfit = (self._free < prompt_tokens).astype(np.int8)
        cost = table.readers.beside_mean(to_read) + table.writers.beside_mean(to_write) + self._beyond_share()
        best = _least(unfit[readers] + unfit[writers], cost)
        self._sent *= 1.0 - 1.0 / RECENT
        self._sent[table.pairs[best]] += 1.0
        reader, writer = self._ids[readers[best]], self._ids[writers[best]]
        if reader == writer:
            return Route(prefill=None, decode=writer)
        return Route(prefill=reader, decode=writer, split=_split(prompt_tokens, table.split_share[best]))

    def _beyond_share(self) -> Floats:
        """By route: what it had of the latest requests over its share of them, as far as that is more than FREELY."""
        sent = self._sent[self._table.pairs]
        share = sent * self._table.rarity / max(float(sent.sum()), RECENT / 4)
        return np.asarray(np.maximum(share - FREELY, 0.0))

    def _told(self, queues: Floats) -> Floats:
        """With a guess for those that are silent."""
        if not self._silent.any():
            return queues
        usable = self._table.usable
        told = usable[~self._silent[usable]]
        return np.where(self._silent, queues[told].max() if len(told) else 0.0, queues)


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
    pairs = _pairs(plan, usable)
    weights = np.array([pair.weight for pair in pairs])
    place = {(pair.prefill, pair.decode): number for number, pair in enumerate(plan.pairings)}
    leaves = [set(usable[pair.prefill].peers) != set(usable[pair.decode].peers) for pair in pairs]
    return _Table(
        usable=np.array([column[name] for name in usable], dtype=np.intp),
        readers=_side([column[pair.prefill] for pair in pairs], weights),
        writers=_side([column[pair.decode] for pair in pairs], weights),
        split_share=[pair.prefill_share for pair in pairs],
        pairs=np.array([place.get((pair.prefill, pair.decode), -1) for pair in pairs], dtype=np.intp),
        rarity=np.where(leaves, weights.sum() / weights, 0.0),
    )


def _side(columns: list[int], weights: Floats) -> _Side:
    ends = np.array(columns, dtype=np.intp)
    everyone, which = np.unique(ends, return_inverse=True)
    shares = np.bincount(which, weights, minlength=len(everyone)) / weights.sum()
    return _Side(ends=ends, rarity=1.0 / shares[which], everyone=everyone)


def _pairs(plan: Plan, usable: dict[str, Replica]) -> list[Pairing]:
    """Those of the plan among usable replicas, or if there are none, replicas by themselves."""
    pairs = [pair for pair in plan.pairings if pair.weight > 0.0 and pair.prefill in usable and pair.decode in usable]
    if not pairs:
        pairs = _alone(plan, [item for item in usable.values() if item.decodes]) or _alone(
            plan, [item for item in usable.values() if item.phase is Phase.PREFILL]
        )
    return sorted(pairs, key=lambda pair: (pair.prefill, pair.decode))


def _alone(plan: Plan, replicas: list[Replica]) -> list[Pairing]:
    """Each paired with itself. A replica that the plan gives no requests counts for as much as the one that it gives
    the fewest."""
    shares: defaultdict[str, float] = defaultdict(float)
    for pair in plan.pairings:
        for end in {pair.prefill, pair.decode}:
            shares[end] += pair.weight
    smallest = min((share for share in shares.values() if share > 0.0), default=1.0)
    return [Pairing(prefill=item.id, decode=item.id, weight=shares[item.id] or smallest) for item in replicas]
