"""Who is told what: a node's events, and a request put together from several boxes, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
import trio.testing

from p2pserve.bootstrap import PeerId, RemoteError, RequestTimeout, Role
from p2pserve.node import methods
from p2pserve.node.observing.desk import MOST_WAITING, EventDesk
from p2pserve.node.observing.event_log import EventLog
from p2pserve.node.observing.queries import EventPage, EventQuery, TraceQuery
from p2pserve.node.observing.values import EventKind, RequestTrace
from p2pserve.node.testing import MemoryExchange, Sent

GATEWAY, PREFILL, DECODE, OTHER = (PeerId(name) for name in ("gateway", "prefill", "decode", "other"))
CLIENT, STRANGER = PeerId("client"), PeerId("stranger")
REQUEST, NAMED = "5f" * 12, "ab" * 12
SKEW = {GATEWAY: 0.0, PREFILL: 100.0, DECODE: -7.0, OTHER: 3.0}


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def others(box: PeerId) -> set[PeerId]:
    return set(SKEW) - {box}


class Boxes:
    """Four boxes, one of which had nothing to do with the request; each has a clock of its own."""

    def __init__(self) -> None:
        self.exchange = MemoryExchange(latency_s=0.01)
        self.logs = {box: EventLog(box, self.clock_of(box)) for box in SKEW}
        self.desks = {
            box: EventDesk(log, self.exchange.join(box), partial(others, box), self.clock_of(box))
            for box, log in self.logs.items()
        }

    def clock_of(self, box: PeerId) -> Callable[[], float]:
        return lambda: 1e9 + trio.current_time() + SKEW[box]

    async def serve(self) -> None:
        gateway, prefill, decode = (self.logs[box].record for box in (GATEWAY, PREFILL, DECODE))
        kinds = EventKind
        gateway(kinds.REQUEST_BEGUN, request=REQUEST, peer=CLIENT, client_request=NAMED, prompt_tokens=5)
        gateway(kinds.REQUEST_ROUTED, request=REQUEST, attempt=1, prefill=PREFILL, decode=DECODE)
        decode(kinds.DECODE_BEGUN, request=REQUEST, attempt=1)
        await pass_time(0.1)
        gateway(kinds.REQUEST_OPENED, request=REQUEST, attempt=1, part="decode")
        prefill(kinds.PREFILL_BEGUN, request=REQUEST, attempt=1)
        await pass_time(0.2)
        prefill(kinds.PREFILL_DONE, request=REQUEST, attempt=1)
        decode(kinds.DECODE_FIRST_TOKEN, request=REQUEST, attempt=1)
        await pass_time(0.3)
        decode(kinds.DECODE_ENDED, request=REQUEST, attempt=1)
        gateway(kinds.REQUEST_ENDED, request=REQUEST, finish="length")

    async def events(self, box: PeerId, query: EventQuery, who: PeerId = OTHER, role: Role = Role.WORKER) -> EventPage:
        return await self.exchange.join(who, role).request(box, methods.EVENTS, query, 60.0)

    async def trace(
        self, box: PeerId, named: str, who: PeerId = CLIENT, role: Role = Role.CLIENT
    ) -> RequestTrace | None:
        answer = await self.exchange.join(who, role).request(box, methods.TRACE, TraceQuery(request=named), 60.0)
        return answer.trace


def run(test: Callable[[Boxes], Awaitable[None]]) -> None:
    async def main() -> None:
        boxes = Boxes()
        await boxes.serve()
        await test(boxes)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_members_see_all_events_and_clients_only_their_own_requests() -> None:
    async def test(boxes: Boxes) -> None:
        boxes.logs[GATEWAY].record(EventKind.ENGINE_STATE, state="ready")

        async def seen(who: PeerId, role: Role, request: str = "") -> int:
            page = await boxes.events(GATEWAY, EventQuery(request=request), who, role)
            return len(page.events)

        assert await seen(OTHER, Role.WORKER) == 5
        assert await seen(OTHER, Role.ADMIN) == 5
        assert await seen(CLIENT, Role.CLIENT) == 5
        assert await seen(STRANGER, Role.CLIENT) == 1
        assert await seen(STRANGER, Role.CLIENT, REQUEST) == 4  # who knows the network's id has been told it
        assert await seen(STRANGER, Role.CLIENT, NAMED) == 0  # what another client calls it is no secret

    run(test)


@pytest.mark.parametrize("asked", [GATEWAY, PREFILL, OTHER])
@pytest.mark.parametrize("named", [REQUEST, NAMED])
def test_any_box_puts_a_request_together_by_the_gateways_clock(asked: PeerId, named: str) -> None:
    async def test(boxes: Boxes) -> None:
        trace = await boxes.trace(asked, named)
        assert trace is not None
        assert (trace.id, trace.gateway, trace.outcome, trace.missing) == (REQUEST, GATEWAY, "length", {})
        spans = {(span.name, span.node): [span.begin - 1e9, (span.end or 0.0) - 1e9] for span in trace.spans}
        assert spans["prefill", PREFILL] == pytest.approx([0.1, 0.3], abs=0.02)
        assert spans["decode", DECODE] == pytest.approx([0.3, 0.6], abs=0.02)
        clocks = {clock.node: clock for clock in trace.boxes}
        assert clocks[PREFILL].offset_s == pytest.approx(100.0, abs=0.02)
        assert clocks[DECODE].offset_s == pytest.approx(-7.0, abs=0.02)

    run(test)


def test_a_request_that_nobody_knows_or_that_is_anothers_is_none() -> None:
    async def test(boxes: Boxes) -> None:
        assert await boxes.trace(OTHER, "00" * 12) is None
        boxes.exchange.asked.clear()
        assert await boxes.trace(OTHER, "test", STRANGER) is None
        assert [sent.method for sent in boxes.exchange.asked] == ["request.trace"]  # no box was asked for a guess

    run(test)


def test_a_box_that_does_not_answer_is_named_and_the_rest_is_shown() -> None:
    async def test(boxes: Boxes) -> None:
        def fail(sent: Sent) -> None:
            if sent.target == PREFILL:
                raise RequestTimeout("it does not answer")

        boxes.exchange.before = fail
        trace = await boxes.trace(GATEWAY, REQUEST)
        assert trace is not None
        assert trace.missing == {PREFILL: "it does not answer"}
        assert {span.node for span in trace.spans} == {GATEWAY, DECODE}

    run(test)


def test_a_box_cannot_speak_for_another() -> None:
    async def test(boxes: Boxes) -> None:
        liar = EventLog(GATEWAY, lambda: 1e9)  # it is not
        liar.record(EventKind.REQUEST_ENDED, request=REQUEST, finish="stop", error="a lie")
        boxes.logs[DECODE]._events.extend(liar.events)
        trace = await boxes.trace(GATEWAY, REQUEST)
        assert trace is not None
        assert (trace.outcome, trace.error) == ("length", "")

    run(test)


def test_events_are_waited_for() -> None:
    async def test(boxes: Boxes) -> None:
        log = boxes.logs[OTHER]

        async def later() -> None:
            await pass_time(5.0)
            log.record(EventKind.ENGINE_STATE, state="starting")
            await pass_time(1.0)
            log.record(EventKind.PLAN_MADE, plan="1.1")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            began = trio.current_time()
            page = await boxes.events(OTHER, EventQuery(kinds=("plan",), wait_s=20.0))
        assert [event.kind for event in page.events] == ["plan.made"]
        assert trio.current_time() - began == pytest.approx(6.0, abs=0.1)
        began = trio.current_time()
        assert (await boxes.events(OTHER, EventQuery(after=page.reached, wait_s=3.0))).events == ()
        assert trio.current_time() - began == pytest.approx(3.0, abs=0.1)

    run(test)


def test_only_so_many_may_wait() -> None:
    async def test(boxes: Boxes) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(MOST_WAITING):
                nursery.start_soon(boxes.events, OTHER, EventQuery(after=99, wait_s=10.0))
            await pass_time(1.0)
            began = trio.current_time()
            await boxes.events(OTHER, EventQuery(after=99, wait_s=10.0))
            assert trio.current_time() - began < 0.1

    run(test)


def test_who_asks_for_too_many_traces_is_told_to_come_again() -> None:
    async def test(boxes: Boxes) -> None:
        refused: list[str] = []

        async def ask() -> None:
            try:
                await boxes.trace(OTHER, REQUEST)
            except RemoteError as error:
                refused.append(error.code)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask)
        assert refused == ["busy"] * 6

    run(test)
