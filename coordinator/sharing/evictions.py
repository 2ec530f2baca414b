"""Whose KV goes so that a request has room, in an engine process that several services share. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
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


FreedBytes = Callable[[str, list[SharedRequest]], int]
"""Bytes that a service can have when these requests, all of one service, have lost their KV. One more may free more
than its own: the rest of a page, or a prefix that it shares. One whose KV must stay frees none."""


def plan_evictions(
    queue: TurnQueue, shares: KvShares, wanted: RoomWanted, freed: FreedBytes
) -> list[SharedRequest] | None:
    """The last in the order, of services that may lose some, if the order has them behind the asker: as many as it
    takes, or None where that is not enough, and nobody is to lose any."""
    asker = wanted.asker
    lost = Counter[str]()
    asked: list[SharedRequest] = []
    victims: defaultdict[str, list[SharedRequest]] = defaultdict(list)

    def may_lose(service: str) -> bool:
        if asker is None:
            return service != wanted.service and shares.may_lose(service, wanted.service, lost=lost[service])
        return shares.may_lose(service, wanted.service, is_starved=asker.is_starved, lost=lost[service])

    while lost.total() < wanted.size and (victim := queue.pick_victim(asker, may_lose)) is not None:
        queue.set_aside(victim)
        asked.append(victim)
        victims[victim.service].append(victim)
        lost[victim.service] = freed(wanted.service, victims[victim.service])
    is_enough = lost.total() >= wanted.size
    for each in reversed(asked):
        others = [other for other in victims[each.service] if other is not each]
        left = freed(wanted.service, others) if is_enough and others else 0
        if not is_enough or lost.total() - lost[each.service] + left >= wanted.size:
            queue.spare(each)
            victims[each.service], lost[each.service] = others, left
    return [each for each in asked if each in victims[each.service]] if is_enough else None
