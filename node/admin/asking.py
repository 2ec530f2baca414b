"""What admin API and dashboard show, from a node in another process: questions by name, answers as MessagePack.

`answering` is the node's side, which the process that asks does not load.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, final

import msgspec

from ..observing.queries import TraceQuery
from ..observing.values import LinkSummary, RequestTrace
from .source import NetworkSnapshot, SourceError

SNAPSHOT: Final = "admin.snapshot"
LINKS: Final = "admin.links"
TRACE: Final = "admin.trace"
METRICS: Final = "admin.metrics"


class TraceTold(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as boxes remember it; or why nobody can say now."""

    trace: RequestTrace | None = None
    error: str = ""


class MetricsAsked(msgspec.Struct, frozen=True):
    """The metrics, for somebody who may see what these API keys have cost; None: all of them."""

    keys: tuple[str, ...] | None


_snapshots = msgspec.msgpack.Decoder(NetworkSnapshot)
_links = msgspec.msgpack.Decoder(tuple[LinkSummary, ...])
_traces = msgspec.msgpack.Decoder(TraceTold)


@final
class AskedNode:
    """A node behind `ask`, which raises `refused` where it does not answer."""

    def __init__(self, ask: Callable[[str, bytes], Awaitable[bytes]], refused: type[Exception]) -> None:
        self._ask = ask
        self._refused = refused

    async def snapshot(self) -> NetworkSnapshot:
        """Everything but links. Raises SourceError."""
        return _snapshots.decode(await self._get(SNAPSHOT))

    async def links(self) -> tuple[LinkSummary, ...]:
        """Every directed link that anybody has told of. Raises SourceError."""
        return _links.decode(await self._get(LINKS))

    async def trace(self, request: str) -> RequestTrace | None:
        """One request across boxes. Raises SourceError."""
        told = _traces.decode(await self._get(TRACE, msgspec.msgpack.encode(TraceQuery(request=request))))
        if told.error:
            raise SourceError(told.error)
        return told.trace

    async def metrics(self, keys: tuple[str, ...] | None) -> str:
        """The node's metrics in Prometheus's text format, with what these API keys have cost; None: all of them. Raises
        SourceError."""
        return (await self._get(METRICS, msgspec.msgpack.encode(MetricsAsked(keys)))).decode("utf-8", "replace")

    async def _get(self, what: str, body: bytes = b"") -> bytes:
        try:
            return await self._ask(what, body)
        except self._refused as error:
            raise SourceError(str(error)) from error
