"""One node asked once, however many look: what API processes show of the network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar, final

from ...kvtransport.probing.figures import gbps_of
from ..observing.rates import CounterRates
from ..observing.values import LinkSummary, RequestTrace
from .source import NetworkSnapshot, NetworkSource, SourceError

SNAPSHOT_S: Final = 1.0
LINKS_S: Final = 5.0  # of 60 boxes there are 3,540, and none changes from one second to the next
ANSWER_S: Final = 5.0

T = TypeVar("T")


@final
class Shared(Generic[T]):
    """An answer that is asked for when somebody wants it and the last one is older than `keep_s`: by whoever comes
    first, for all who come meanwhile. One that failed is not kept."""

    def __init__(self, ask: Callable[[], Awaitable[T]], keep_s: float, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._keep_s = keep_s
        self._clock = clock
        self._answer: asyncio.Task[T] | None = None
        self._asked_at = 0.0

    async def get(self) -> T:
        """The answer. Raises SourceError."""
        if self._answer is None or self._is_stale(self._answer):
            self._asked_at = self._clock()
            self._answer = asyncio.create_task(self._ask_in_time())
            self._answer.add_done_callback(_look_at)
        return await asyncio.shield(self._answer)  # who leaves does not take the others' answer away

    def _is_stale(self, answer: asyncio.Task[T]) -> bool:
        if not answer.done():
            return False
        return answer.cancelled() or answer.exception() is not None or self._clock() - self._asked_at >= self._keep_s

    async def _ask_in_time(self) -> T:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ask()
        except TimeoutError:
            raise SourceError(f"the node has not answered for {ANSWER_S:.0f} s") from None


def _look_at(answer: asyncio.Task[T]) -> None:
    """Everybody who waited may have left: asyncio would complain of an error that nobody has seen."""
    if not answer.cancelled():
        answer.exception()


@final
class Feed:
    """A source for many: one snapshot a second for all together, links every five, and nothing while nobody asks."""

    def __init__(self, source: NetworkSource, clock: Callable[[], float]) -> None:
        self._snapshot = Shared(self._ask_snapshot, SNAPSHOT_S, clock)
        self._links = Shared(self._ask_links, LINKS_S, clock)
        self._source = source
        self._clock = clock
        self._tokens: CounterRates[str] = CounterRates()
        self._bytes: CounterRates[tuple[str, str]] = CounterRates()

    async def snapshot(self) -> NetworkSnapshot:
        """At most a second old. Raises SourceError."""
        return await self._snapshot.get()

    async def links(self) -> tuple[LinkSummary, ...]:
        """At most five seconds old. Raises SourceError."""
        return await self._links.get()

    @property
    def tokens_s(self) -> float | None:
        """What all boxes decode, tokens per second; None until that is known."""
        rates = self._tokens.rates()
        return sum(rates.values()) if rates else None

    @property
    def flows(self) -> dict[tuple[str, str], float] | None:
        """KV that goes from one box to another, Gb/s, where some does; None until that is known."""
        rates = self._bytes.rates()
        return {pair: gbps_of(rate, 1.0) for pair, rate in rates.items() if rate} if rates else None

    async def _ask_snapshot(self) -> NetworkSnapshot:
        snapshot = await self._source.snapshot()
        self._tokens.learn({node.id: node.decoded_tokens for node in snapshot.nodes}, self._clock())
        return snapshot

    async def _ask_links(self) -> tuple[LinkSummary, ...]:
        links = await self._source.links()
        self._bytes.learn({(link.source, link.target): link.kv_bytes for link in links}, self._clock())
        return links

    async def trace(self, request: str) -> RequestTrace | None:
        """As the source's, each time anew: few look at one request."""
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                return await self._source.trace(request)
        except TimeoutError:
            raise SourceError(f"request: the boxes have not answered for {2 * ANSWER_S:.0f} s") from None
