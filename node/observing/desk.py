"""Answers what others ask about what happened: a node's own events, and one request across boxes.

Members may ask for everything: they see the prompts that they serve anyway, and no event has any text of a request.
Clients hear what concerns the network as `status` tells it to them, and of requests those that they have made
themselves, or whose id they know: the network's ids cannot be guessed, and are told to who made the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, final

import trio
from msgspec.structs import replace

from ...bootstrap import NetworkError, PeerId, RemoteError, Role
from ...bootstrap.methods import Messenger
from .. import methods
from .event_log import EventLog
from .queries import EventPage, EventQuery, TraceAnswer, TraceQuery
from .traces import assemble_trace, boxes_of, clock_from_round_trip, estimate_clocks, find_request, relative_clocks
from .values import BoxClock, EventKind, NodeEvent

ASK_S: Final = 4.0  # for the events of one box; longer: slow boxes are in the trace; shorter: it is there sooner
ASKED_AT_ONCE: Final = 16
MOST_ASKED: Final = 512  # boxes, where nobody knows which gateway had the request
ROUNDS: Final = 2
TRACES_AT_ONCE: Final = 4
MOST_WAITING: Final = 64  # who waits for events: the others are answered at once


@final
class EventDesk:
    """One per node. `present` lists the other boxes that can be asked."""

    def __init__(
        self,
        log: EventLog,
        messenger: Messenger,
        present: Callable[[], Iterable[PeerId]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._messenger = messenger
        self._present = present
        self._clock = clock
        self._news = trio.Event()
        self._waiting = 0
        self._tracing = trio.CapacityLimiter(TRACES_AT_ONCE)
        log.followers.append(self._on_event)
        messenger.handle(methods.EVENTS, self.on_events)
        messenger.handle(methods.TRACE, self.on_trace)

    def __repr__(self) -> str:
        return f"<EventDesk {self._log}>"

    async def on_events(self, peer: PeerId, role: Role, query: EventQuery) -> EventPage:
        """This node's own events."""
        page = self._select(peer, role, query)
        if page.events or not query.wait_s or self._waiting >= MOST_WAITING:
            return page
        self._waiting += 1
        try:
            with trio.move_on_after(query.wait_s):
                while not page.events:
                    await self._news.wait()
                    page = self._select(peer, role, query)
        finally:
            self._waiting -= 1
        return page

    async def on_trace(self, peer: PeerId, role: Role, query: TraceQuery) -> TraceAnswer:
        """A request across boxes."""
        if self._tracing.available_tokens < 1:
            raise RemoteError("busy", "this node puts other requests together; ask again in some seconds")
        async with self._tracing:
            return await self._trace(peer, role, query.request)

    def _on_event(self, event: NodeEvent) -> None:
        self._news.set()
        self._news = trio.Event()

    def _select(self, peer: PeerId, role: Role, query: EventQuery) -> EventPage:
        if role is not Role.CLIENT:
            return self._log.select(query)
        own = self._log.requests_of(peer)
        return self._log.select(
            query,
            may_see=lambda event: not event.request or event.request in own or event.request == query.request,
        )

    async def _trace(self, peer: PeerId, role: Role, named: str) -> TraceAnswer:
        own, gathered = self._messenger.peer_id, _Gathered()
        gathered.take(self._select(peer, role, EventQuery(request=named)), BoxClock(node=own, error_s=0.0))
        if not gathered.has_gateway:
            if role is Role.CLIENT and not _is_network_id(named):
                return TraceAnswer()  # what a client calls a request is known where it has made it
            await self._ask(list(self._present())[:MOST_ASKED], named, gathered)
            gathered.missing.clear()  # who has not answered may have had no part in it
        request = find_request(gathered.events, named)
        if request is None:
            return TraceAnswer()
        gathered.take(self._log.select(EventQuery(request=request)), BoxClock(node=own, error_s=0.0))
        asked: set[str] = {own}
        for _ in range(ROUNDS):  # the gateway is asked by the network's id, and names the others
            new = [PeerId(box) for box in boxes_of(gathered.events) if box not in asked]
            asked |= set(new)
            await self._ask(new, request, gathered)
        events = [event for event in gathered.events if event.request == request]
        gateway = next((event.node for event in events if event.kind == EventKind.REQUEST_BEGUN), "")
        clocks = {**estimate_clocks(events), **relative_clocks(gathered.clocks, gateway)}
        return TraceAnswer(trace=assemble_trace(events, clocks, gathered.missing))

    async def _ask(self, boxes: Iterable[PeerId], request: str, gathered: _Gathered) -> None:
        """The events of a request at these boxes, and how their clocks go."""
        limiter = trio.CapacityLimiter(ASKED_AT_ONCE)

        async def ask(box: PeerId) -> None:
            async with limiter:
                asked = self._clock()
                try:
                    page = await self._messenger.request(box, methods.EVENTS, EventQuery(request=request), ASK_S)
                except NetworkError as error:
                    gathered.missing[box] = str(error)
                    return
                # A box speaks of itself, whatever it says.
                events = tuple(event for event in page.events if event.node == box)
                page = replace(page, node=box, events=events)
                gathered.take(page, clock_from_round_trip(box, page.now, asked, self._clock()))

        async with trio.open_nursery() as nursery:
            for box in boxes:
                nursery.start_soon(ask, box)


@final
@dataclass(slots=True)
class _Gathered:
    """What boxes have said of a request."""

    pages: dict[str, EventPage] = field(default_factory=dict)
    clocks: dict[str, BoxClock] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # who has not answered, and why

    def take(self, page: EventPage, clock: BoxClock) -> None:
        """A box's answer; it replaces an earlier one."""
        self.pages[page.node], self.clocks[page.node] = page, clock

    @property
    def events(self) -> list[NodeEvent]:
        return [event for page in self.pages.values() for event in page.events]

    @property
    def has_gateway(self) -> bool:
        return any(event.kind == EventKind.REQUEST_BEGUN for event in self.events)


def _is_network_id(named: str) -> bool:
    """Whether it is long and random enough that who names it has been told it."""
    return len(named) == 24 and all(each in "0123456789abcdef" for each in named)
