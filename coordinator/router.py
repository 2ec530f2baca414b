"""Which replicas serve one request.

The plan says how requests should be shared in the long run; the queues say how it stands now. As in Splitwise
section IV-A, the prefill and the decode side are both chosen when the request arrives, by the shortest queue;
a queue counts for its length over the share that the plan gives it, so that twice the share may hold twice
the queue. A side whose free KV cannot hold the prompt comes after all others: the request would wait there.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import ceil
from typing import NamedTuple

import msgspec

from .plan import Phase, Plan, Replica


class NoRoute(LookupError):
    """No replica may take the request; the text is one line for the client and the log."""


class LoadError(ValueError):
    """A load report that cannot be; the text names the field."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box's latest report: requests running and waiting, and KV tokens it still has room for."""

    peer: str
    running: int
    waiting: int
    kv_free_tokens: int

    def __post_init__(self) -> None:
        if not self.peer:
            raise LoadError("load.peer is empty")
        if min(self.running, self.waiting, self.kv_free_tokens) < 0:
            raise LoadError(f"load of {self.peer} has a negative figure")

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


class _Queue(NamedTuple):
    """What the router knows of a replica: its length, and 1 where the prompt does not fit."""

    outstanding: int
    unfit: int


def route(
    plan: Plan,
    loads: Iterable[Load],
    *,
    prompt_tokens: int,
    exclude: frozenset[str] = frozenset(),
) -> Route:
    """The route with the least weighted work outstanding, over boxes that are not in `exclude` (peer ids).

    A replica with an excluded box is not used at all. In order of preference: the pairs that the plan gives
    weight; a decode or mixed replica alone; a prefill replica alone. A box that has reported nothing counts
    as busy as the busiest that has: silence is no sign of leisure. Ties go by replica id.
    """
    if prompt_tokens < 0:
        raise ValueError(f"prompt_tokens is {prompt_tokens}; it must not be negative")
    usable = {item.id: item for item in plan.replicas if exclude.isdisjoint(item.peers)}
    queues = _queues(usable, loads, prompt_tokens)
    found = (
        _best_pair(plan, queues, prompt_tokens)
        or _best_alone(plan, queues, [item for item in usable.values() if item.decodes])
        or _best_alone(plan, queues, [item for item in usable.values() if item.phase is Phase.PREFILL])
    )
    if found is None:
        raise NoRoute(
            f"no box can take a request for {plan.service}: all {len(plan.replicas)} replicas of "
            f"plan {plan.epoch}.{plan.version} are excluded ({', '.join(sorted(exclude))})"
        )
    return found


def _queues(usable: Mapping[str, Replica], loads: Iterable[Load], prompt_tokens: int) -> dict[str, _Queue]:
    """Each replica's queue, as its head reports it: the box that schedules for all stages."""
    by_peer = {load.peer: load for load in loads}
    reports = {item.id: by_peer.get(item.head) for item in usable.values()}
    busiest = max((load.outstanding for load in reports.values() if load is not None), default=0)
    return {
        name: _Queue(busiest, 0) if load is None else _Queue(load.outstanding, int(load.kv_free_tokens < prompt_tokens))
        for name, load in reports.items()
    }


def _best_pair(plan: Plan, queues: Mapping[str, _Queue], prompt_tokens: int) -> Route | None:
    """Among usable pairs with weight: fits first, then prefill queue over X plus decode queue over Y."""
    pairs = [pair for pair in plan.pairings if pair.weight > 0.0 and pair.prefill in queues and pair.decode in queues]
    total = sum(pair.weight for pair in pairs)
    from_prefill: defaultdict[str, float] = defaultdict(float)
    for pair in pairs:
        from_prefill[pair.prefill] += pair.weight
    ranked: list[tuple[int, float, str, str, float]] = []
    for pair in pairs:
        prefill, decode = queues[pair.prefill], queues[pair.decode]
        x = from_prefill[pair.prefill] / total
        y = pair.weight / from_prefill[pair.prefill]
        cost = (prefill.outstanding + 1) / x + (decode.outstanding + 1) / y
        ranked.append((prefill.unfit + decode.unfit, cost, pair.prefill, pair.decode, pair.prefill_share))
    if not ranked:
        return None
    _, _, prefill_id, decode_id, share = min(ranked)
    if prefill_id == decode_id:
        return Route(prefill=None, decode=decode_id)
    return Route(prefill=prefill_id, decode=decode_id, split=_split(prompt_tokens, share))


def _split(prompt_tokens: int, share: float) -> int:
    """The share in whole tokens: at least one, and never more than there are."""
    return min(prompt_tokens, max(1, ceil(prompt_tokens * share)))


def _best_alone(plan: Plan, queues: Mapping[str, _Queue], replicas: list[Replica]) -> Route | None:
    """One replica for both halves: fits first, then its queue over its share of requests in the plan."""
    shares: defaultdict[str, float] = defaultdict(float)
    for pair in plan.pairings:
        for end in {pair.prefill, pair.decode}:
            shares[end] += pair.weight
    smallest = min((share for share in shares.values() if share > 0.0), default=1.0)
    ranked = [
        (queues[item.id].unfit, (queues[item.id].outstanding + 1) / (shares[item.id] or smallest), item.id)
        for item in replicas
    ]
    return Route(prefill=None, decode=min(ranked)[2]) if ranked else None
