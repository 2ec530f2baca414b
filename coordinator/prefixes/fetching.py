"""Whether the KV of a prompt's beginning comes from another replica that holds it, in place of being computed again.

A request goes to the replica with the best of queue and cache. Where another one holds more of its prompt, that may
send it: it prefills what it has in its cache, which computes a single token, and which engines let go first. The KV
goes over the link as that of any prompt that is split between two replicas (`Route.split`). What does not come, or
comes too late, is computed where it was to go. Compared are, in seconds::

    fetch       OVERHEAD_S  +  round trip
                +  (KV that is missing here, and what is under way from the holder or to here) / rate of the link
    compute     tokens that are missing here x seconds per token of this replica's prefills

What is fetched leaves room for others, too: they wait for less computing. Only replicas of one box each send and
receive so, and only where one replica computes all of the prompt otherwise. No I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from math import inf
from typing import Final, NamedTuple, final

import msgspec

from ..capacity import LinkView
from ..plan import Plan, Replica
from ..routing.interface import ReplicaLoads, Route

OVERHEAD_S: Final = 0.1
"""Of a transfer beside its bytes: messages to two replicas instead of one, and the holder's step that is under way.
Higher: shorter prefixes are computed rather than fetched."""


LEAST_TOKENS: Final = 1024
"""Of a prefix that is fetched: what a shorter one saves is less than is known of times. Lower: more is fetched of short
prompts to slow boxes."""
MAX_SOURCES: Final = 8
"""Replicas among which one that sends is chosen: those that hold most."""


class KvLinks(NamedTuple):
    """What is known of KV on its way: how much a token has on the wire, and the rate from one replica to another, by
    their ids; None: there is no link, or it has not been measured."""

    token_gigabits: float
    between: Callable[[str, str], LinkView | None]


class PrefixFetch(NamedTuple):
    """The first `tokens` of a prompt come from this replica; `missing` of them are not where they are wanted."""

    holder: str
    tokens: int
    missing: int


@final
class OpenFetches:
    """What one gateway has had fetched whose requests have no first token yet. A holder that sends nothing is asked for
    less and less by that."""

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[str, PrefixFetch]] = {}  # with the replica to which it comes
        self._leaving: Counter[str] = Counter()  # tokens, by holder
        self._coming: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<OpenFetches {len(self._open)}>"

    def begin(self, request: Hashable, target: str, fetch: PrefixFetch) -> None:
        """A request waits for this."""
        self.end(request)
        self._open[request] = target, fetch
        self._leaving[fetch.holder] += fetch.missing
        self._coming[target] += fetch.missing

    def end(self, request: Hashable) -> None:
        """It waits no more. Unknown ones: nothing."""
        target, fetch = self._open.pop(request, ("", None))
        if fetch is not None:
            self._leaving[fetch.holder] -= fetch.missing
            self._coming[target] -= fetch.missing

    def tokens_beside(self, holder: str, target: str) -> int:
        """Tokens whose KV leaves this holder, or comes to this target, now: the more of the two."""
        return max(self._leaving[holder], self._coming[target])


def choose_fetch(
    prompt_tokens: int,
    target: str,
    held: Mapping[str, int],
    *,
    token_s: float,
    links: KvLinks,
    under_way: OpenFetches,
    share: float,
) -> PrefixFetch | None:
    """The replica whose KV saves `target` most, where fetching takes at most this share of computing, at `token_s`
    seconds a token. `held`: by replica, tokens of the prompt that it is believed to hold; who may not be asked is not
    among them. None: it is computed."""
    best, most_s = None, -inf
    for holder, tokens in held.items():
        tokens = min(tokens, prompt_tokens - 1)
        missing = tokens - held.get(target, 0)
        link = links.between(holder, target) if missing >= LEAST_TOKENS and token_s > 0.0 else None
        if link is None or not link.gbps > 0.0:
            continue
        on_wire = missing + under_way.tokens_beside(holder, target)
        fetch_s = OVERHEAD_S + link.rtt_s + on_wire * links.token_gigabits / link.gbps
        compute_s = missing * token_s
        if fetch_s <= share * compute_s and compute_s - fetch_s > most_s:
            best, most_s = PrefixFetch(holder, tokens, missing), compute_s - fetch_s
    return best


def route_fetch(route: Route, fetch: PrefixFetch, prompt_tokens: int) -> Route:
    """The route of a prompt whose beginning is fetched: the holder prefills one token more than it has, since an engine
    computes at least one, and never all of the prompt."""
    split = min(fetch.tokens + 1, prompt_tokens - 1)
    return msgspec.structs.replace(route, prefill=fetch.holder, split=split, cached=min(fetch.tokens, split), found=0)


def list_sources(
    plan: Plan,
    route: Route,
    named: Mapping[str, int],
    *,
    excluded: frozenset[str],
    loads: ReplicaLoads,
    prompt_tokens: int,
) -> list[str]:
    """The replicas that name more of the prompt than the one replica of this route, and could send it there, which has
    room for the prompt now; none with `excluded` boxes."""
    here = named.get(route.decode, 0)
    if route.prefill is not None or max(named.values(), default=0) <= here:
        return []
    if loads.kv_free_tokens[loads.index[route.decode]] < prompt_tokens:
        return []
    if not _may_exchange(plan.replica(route.decode), excluded):
        return []
    more = [each for each in plan.replicas if named.get(each.id, 0) > here]
    more.sort(key=lambda each: -named[each.id])
    able = (each.id for each in more if _may_exchange(each, excluded))
    return list(islice(able, MAX_SOURCES))


def _may_exchange(replica: Replica | None, excluded: frozenset[str]) -> bool:
    if replica is None or len(replica.stages) > 1 or not replica.prefills:
        return False
    return excluded.isdisjoint((replica.id, *replica.peers))
