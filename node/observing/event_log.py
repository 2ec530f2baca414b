"""What happened at a node, as its log has it: the latest events in memory, for whoever asks.

    log = EventLog(own, time.time)
    log.record(EventKind.ENGINE_STATE, state="ready")
    log.select(EventQuery(kinds=("engine",)))

Whoever wants each event as it comes (the file, metrics, spans) is one of its `followers`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, final

import msgspec

from ..engine.protocol import LayerTimes
from .queries import EventPage, EventQuery
from .values import MAX_FACTS, EventKind, Fact, NodeEvent

_log = logging.getLogger("p2pserve.events")

KEPT: Final = 8192
"""Events in memory: some 400 bytes each. More: more of the past can be asked for over the network."""

MAX_PAGE_BYTES: Final = 256 << 10
_TEXT: Final = 500  # characters of a fact
_WORD: Final = 128
_LARGEST: Final = 1e15
_encode = msgspec.msgpack.Encoder().encode


class Record(Protocol):
    """How a part of a node tells its log that something has happened. Facts that are None are left out."""

    def __call__(
        self,
        kind: EventKind,
        *,
        request: str = "",
        peer: str = "",
        layers: tuple[LayerTimes, ...] = (),
        **facts: Fact | None,
    ) -> None: ...


def ignore(
    kind: EventKind,
    *,
    request: str = "",
    peer: str = "",
    layers: tuple[LayerTimes, ...] = (),
    **facts: Fact | None,
) -> None:
    """For parts that are run without a log."""


@final
class EventLog:
    """One per node. `clock` has unix seconds, `kept` is what an earlier run has logged last."""

    def __init__(self, node: str, clock: Callable[[], float], kept: Iterable[NodeEvent] = ()) -> None:
        self.node = node
        self.followers: list[Callable[[NodeEvent], None]] = []
        self._clock = clock
        self._events: deque[NodeEvent] = deque(kept, maxlen=KEPT)
        self._next = self._events[-1].number + 1 if self._events else 1

    def __repr__(self) -> str:
        return f"<EventLog of {self.node}: {len(self._events)} events, the next is {self._next}>"

    @property
    def events(self) -> tuple[NodeEvent, ...]:
        """All that are in memory, oldest first."""
        return tuple(self._events)

    @property
    def last(self) -> int:
        """The number of the latest event; 0 before the first."""
        return self._next - 1

    def record(
        self,
        kind: EventKind,
        *,
        request: str = "",
        peer: str = "",
        layers: tuple[LayerTimes, ...] = (),
        **facts: Fact | None,
    ) -> None:
        """Something has happened, now."""
        event = NodeEvent(
            number=self._next,
            time=self._clock(),
            node=self.node,
            kind=kind.value,
            request=request[:_WORD],
            peer=peer[:_WORD],
            facts=_bounded(facts),
            layers=layers,
        )
        self._next += 1
        self._events.append(event)
        _log.info("%s", describe(event), extra={"request": event.request, "peer": event.peer})
        for follower in self.followers:
            follower(event)

    def requests_of(self, client: str) -> frozenset[str]:
        """The requests that a client has made here, as far as the log goes back."""
        begun = (event for event in self._events if event.kind == EventKind.REQUEST_BEGUN and event.peer == client)
        return frozenset(event.request for event in begun)

    def select(self, query: EventQuery, *, may_see: Callable[[NodeEvent], bool] = lambda event: True) -> EventPage:
        """Events after `query.after`, oldest first; of more than fit, the first: the page says where to go on. Without
        `after` the latest that fit."""
        found = [event for event in self._events if event.number > query.after and matches(event, query)]
        found = [event for event in found if may_see(event)]
        chosen = found[: query.limit] if query.after else found[-query.limit :]
        events, size = [], 0
        for event in chosen if query.after else reversed(chosen):
            size += len(_encode(event))
            if size > MAX_PAGE_BYTES:
                break
            events.append(event)
        if not query.after:
            events.reverse()
        is_all = len(events) == len(chosen) == len(found) or not query.after
        reached = self.last if is_all else events[-1].number
        return EventPage(node=self.node, now=self._clock(), reached=reached, events=tuple(events))


def matches(event: NodeEvent, query: EventQuery) -> bool:
    """Whether an event is asked for: by kind or group of kinds, and by the request, as network or client call it."""
    if query.kinds and event.kind not in query.kinds and event.kind.partition(".")[0] not in query.kinds:
        return False
    return not query.request or query.request in (event.request, event.facts.get("client_request"))


def describe(event: NodeEvent) -> str:
    """One line for logs: `request.ended request=5f.. peer=12D3.. finish=stop ttft_s=0.41`."""
    parts = [event.kind]
    if event.request:
        parts.append(f"request={event.request}")
    if event.peer:
        parts.append(f"peer={event.peer}")
    return " ".join([*parts, *(f"{name}={_plain(value)}" for name, value in event.facts.items())])


def _plain(value: Fact) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if not text or any(each.isspace() or each in '="' for each in text) else text


def _bounded(facts: dict[str, Fact | None]) -> dict[str, Fact]:
    """What any reader takes: short texts, finite numbers."""
    found: dict[str, Fact] = {}
    for name, value in facts.items():
        if value is None or len(found) == MAX_FACTS:
            continue
        if isinstance(value, str):
            value = value[:_TEXT]
        elif isinstance(value, float) and not math.isfinite(value):
            continue
        elif not isinstance(value, bool):
            value = type(value)(min(_LARGEST, max(-_LARGEST, value)))
        found[name] = value
    return found
