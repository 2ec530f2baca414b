"""The node's side of `asking`: answers what admin API and dashboard, in another process, ask it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

import msgspec

from ...bootstrap import NetworkError, Role
from ..joined import Joined
from ..observing.queries import EventQuery, TraceQuery
from ..showing import Showing
from .asking import LINKS, METRICS, SNAPSHOT, TRACE, MetricsAsked, TraceTold
from .source import MAX_REQUESTS, NetworkSnapshot

_queries = msgspec.msgpack.Decoder(TraceQuery)
_metrics = msgspec.msgpack.Decoder(MetricsAsked)


@final
class NodeAnswers:
    """The node's side. What it answers is for its owner, but for metrics: who asks is looked at before it is asked."""

    def __init__(self, joined: Joined, showing: Showing) -> None:
        self._joined = joined
        self._showing = showing

    def by_name(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """What answers each question."""
        return {SNAPSHOT: self.snapshot, LINKS: self.links, TRACE: self.trace, METRICS: self.metrics}

    async def snapshot(self, body: bytes) -> bytes:
        """As AskedNode.snapshot."""
        status, page = self._joined.status(), self._showing.events(EventQuery())
        snapshot = NetworkSnapshot(
            time=page.now,
            answered_by=status.answered_by,
            coordinator=status.coordinator or "",
            epoch=status.epoch,
            nodes=self._showing.nodes(),
            plan=status.plan,
            other_plans=status.other_plans,
            requests=self._showing.requests()[-MAX_REQUESTS:],
            events=page.events,
        )
        return msgspec.msgpack.encode(snapshot)

    async def links(self, body: bytes) -> bytes:
        """As AskedNode.links."""
        return msgspec.msgpack.encode(self._showing.links())

    async def metrics(self, body: bytes) -> bytes:
        """As AskedNode.metrics."""
        return self._showing.metrics(_metrics.decode(body).keys).encode()

    async def trace(self, body: bytes) -> bytes:
        """As AskedNode.trace."""
        try:
            answer = await self._showing.desk.on_trace(self._joined.own, Role.ADMIN, _queries.decode(body))
        except NetworkError as error:
            return msgspec.msgpack.encode(TraceTold(error=str(error)))
        return msgspec.msgpack.encode(TraceTold(trace=answer.trace))
