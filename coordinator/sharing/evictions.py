"""Whose KV goes so that a request has room, in an engine process that several services share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from .kv_shares import KvShares
from .turn_queue import TurnQueue
from .values import SharedRequest


class RoomWanted(NamedTuple):
    """So many bytes more, for a request of this service. `asker`: that request; None: it is in no turn order, since its
    KV comes from another box, and only others that hold more than their quota make room for it."""

    service: str
    size: int
    asker: SharedRequest | None


def plan_evictions(
    queue: TurnQueue, shares: KvShares, wanted: RoomWanted, held: Callable[[SharedRequest], int]
) -> list[SharedRequest] | None:
    """The last in the order, of services that may lose some, if the order has them behind the asker: as many as it
    takes, or None where that is not enough, and nobody is to lose any. `held`: the bytes that are free without the KV
    of a request; 0: it must stay."""
    asker = wanted.asker
    lost = Counter[str]()
    victims: list[SharedRequest] = []
    passed: list[SharedRequest] = []
    missing = wanted.size

    def may_lose(service: str) -> bool:
        if asker is None:
            return service != wanted.service and shares.may_lose(service, wanted.service, lost=lost[service])
        return shares.may_lose(service, wanted.service, is_starved=asker.is_starved, lost=lost[service])

    while missing > 0:
        victim = queue.pick_victim(asker, may_lose)
        if victim is None:
            break
        queue.set_aside(victim)
        size = held(victim)
        (victims if size else passed).append(victim)
        lost[victim.service] += size
        missing -= size
    for each in passed if missing <= 0 else passed + victims:
        queue.spare(each)
    return victims if missing <= 0 else None
