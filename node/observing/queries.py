"""What nodes and clients ask a node about what happened, as messages: its events, one request across boxes, metrics."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...coordinator.bounds import Counter, Name
from ..messages import Message
from .values import MAX_EVENTS, NodeEvent, RequestTrace, UnixTime, Word

MAX_KINDS: Final = 32
MAX_WAIT_S: Final = 20.0
MAX_METRICS: Final = 1 << 20  # characters


class EventQuery(Message, frozen=True, kw_only=True):
    """Ask a node for events of its own log: after a number, of some kinds or groups of kinds, of one request. Where
    there are none, it waits up to `wait_s` for the first."""

    after: Counter = 0
    kinds: Annotated[tuple[Word, ...], msgspec.Meta(max_length=MAX_KINDS)] = ()
    request: Word = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_EVENTS)] = MAX_EVENTS
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)] = 0.0


class EventPage(Message, frozen=True, kw_only=True):
    """Events, oldest first, and the node's clock now. Go on after `reached`; smaller than what was asked for: the log
    has begun anew."""

    node: Name
    now: UnixTime
    reached: Counter
    events: Annotated[tuple[NodeEvent, ...], msgspec.Meta(max_length=MAX_EVENTS)] = ()


class TraceQuery(Message, frozen=True, kw_only=True):
    """Ask a node to put together what happened to a request, from the logs of all boxes that had a part in it."""

    request: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class TraceAnswer(Message, frozen=True, kw_only=True):
    """What is known of it; None where no box knows it, or the asker may not."""

    trace: RequestTrace | None = None


class MetricsQuery(Message, frozen=True, kw_only=True):
    """Ask a node for its metrics."""


class MetricsPage(Message, frozen=True, kw_only=True):
    """In Prometheus's text format."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_METRICS)]
