"""Requests, notices and pings on one control stream, between two ends in memory on a virtual clock."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Identity, NetworkSettings, PeerLost, RemoteError, RequestTimeout
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.bootstrap.streams.control import ControlStream, encode_notice
from p2pserve.bootstrap.streams.transport import PeerConnection
from p2pserve.bootstrap.testing import MemoryNetwork

NEAR, FAR = Identity(b"a" * 32), Identity(b"b" * 32)
SETTINGS = NetworkSettings(max_offences=3, max_requests=2)
NIL = b"\xc0"
RETRY_S = {b"\x01": 2.5, b"\x02": 1e9}  # by the body of what is refused


@dataclass
class Ends:
    """Both ends of a stream, and what the far one was told."""

    air: MemoryNetwork
    near: ControlStream
    far: ControlStream
    told: list[str] = field(default_factory=list)
    begun: trio.Event = field(default_factory=trio.Event)  # set by the first notice `slow`


@asynccontextmanager
async def two_ends() -> AsyncIterator[Ends]:
    """The far end answers `echo`, refuses `refuse`, never answers `hang`, and finds `nonsense` malformed."""
    air = MemoryNetwork(latency_s=0.1)
    arrived: list[PeerConnection] = []
    told: list[str] = []
    begun = trio.Event()

    async def serve(method: str, body: msgspec.Raw) -> bytes:
        if method == "refuse":
            raise RemoteError("full", "no room", retry_after_s=RETRY_S.get(bytes(body)))
        if method == "nonsense":
            raise ProtocolError("the body is malformed")
        if method == "hang":
            await trio.sleep_forever()
        return bytes(body)

    def notice(method: str, body: msgspec.Raw) -> None:
        if method == "bad":
            raise ProtocolError("no")
        if method == "slow":
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, MockClock)
            clock.jump(0.004)
            begun.set()
        told.append(method)

    async def keep(connection: PeerConnection) -> None:
        arrived.append(connection)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listening = air.transport(FAR, Address("192.0.2.2", 4001))
        dialling = air.transport(NEAR, Address("192.0.2.1", 4001))
        address = await nursery.start(listening.serve, keep)
        await nursery.start(dialling.serve, keep)
        connection = await dialling.dial(address, FAR.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        near = ControlStream(connection, serve=serve, notice=notice, settings=SETTINGS)
        far = ControlStream(arrived[0], serve=serve, notice=notice, settings=SETTINGS)
        nursery.start_soon(near.run)
        nursery.start_soon(far.run)
        yield Ends(air, near, far, told, begun)
        nursery.cancel_scope.cancel()


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def run(main: Callable[[Ends], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with two_ends() as ends:
            await main(ends)

    trio.run(bounded, clock=MockClock(autojump_threshold=0))


def test_a_request_takes_a_round_trip_and_finds_its_own_answer() -> None:
    async def main(ends: Ends) -> None:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            answers: dict[bytes, bytes] = {}

            async def ask(body: bytes) -> None:
                answers[body] = await ends.near.request("echo", body, 5.0)

            for body in (b"\x01", b"\x02"):
                nursery.start_soon(ask, body)
        assert answers == {b"\x01": b"\x01", b"\x02": b"\x02"}
        assert trio.current_time() - began == pytest.approx(0.2)
        assert ends.near.statistics().waiting == 0

    run(main)


def test_what_the_handler_refuses_arrives_with_its_code() -> None:
    async def main(ends: Ends) -> None:
        for method, code in (("refuse", "full"), ("nonsense", "malformed")):
            with pytest.raises(RemoteError) as caught:
                await ends.near.request(method, NIL, 5.0)
            assert caught.value.code == code
        assert ends.far.offences == 1, "a refusal is no offence of the asker; nonsense is"

    run(main)


@pytest.mark.parametrize(("body", "told"), [(b"\x01", 2.5), (b"\x02", 3600.0), (NIL, None)])
def test_the_time_to_try_again_arrives_within_bounds(body: bytes, told: float | None) -> None:
    async def main(ends: Ends) -> None:
        with pytest.raises(RemoteError) as caught:
            await ends.near.request("refuse", body, 5.0)
        assert caught.value.retry_after_s == told
        assert ends.near.offences == 0

    run(main)


def test_a_timeout_costs_its_request_and_nothing_else() -> None:
    async def main(ends: Ends) -> None:
        with pytest.raises(RequestTimeout, match="did not answer 'hang' within 1 s"):
            await ends.near.request("hang", NIL, 1.0)
        assert await ends.near.request("echo", b"\x01", 5.0) == b"\x01"
        assert ends.near.statistics().waiting == 0
        assert ends.far.statistics().serving == 1

    run(main)


def test_more_requests_at_once_than_allowed_are_busy() -> None:
    async def main(ends: Ends) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(SETTINGS.max_requests):
                nursery.start_soon(ends.near.request, "hang", NIL, 100.0)
            await elapse(1.0)
            with pytest.raises(RemoteError) as caught:
                await ends.near.request("echo", NIL, 5.0)
            assert caught.value.code == "busy"
            assert caught.value.retry_after_s == SETTINGS.busy_retry_s
            assert caught.value.message == "busy: 2 requests of this peer are being served; try again in 1 s"
            nursery.cancel_scope.cancel()

    run(main)


def test_a_peer_that_misbehaves_is_cut_off_at_the_limit() -> None:
    async def main(ends: Ends) -> None:
        for number in range(SETTINGS.max_offences - 1):
            ends.near.send_nowait(encode_notice("bad", NIL) if number else b"\xc1")
        await elapse(1.0)
        assert ends.far.offences == SETTINGS.max_offences - 1
        assert await ends.near.request("echo", NIL, 5.0) == NIL
        ends.far.blame()
        ends.near.send_nowait(encode_notice("fine", NIL))
        await elapse(1.0)
        with pytest.raises(PeerLost, match="malformed or forged"):
            ends.far.ping()

    run(main)


def test_pings_measure_the_best_of_the_last_round_trips() -> None:
    async def main(ends: Ends) -> None:
        assert ends.near.rtt_s is None
        for latency_s in (0.3, 0.1, 0.2):
            ends.air.latency_s = latency_s
            ends.near.ping()
            await elapse(1.0)
        assert ends.near.rtts == pytest.approx([0.6, 0.2, 0.4])
        assert ends.near.rtt_s == pytest.approx(0.2)

    run(main)


@pytest.mark.parametrize(("timeout", "expected"), [(0.5, True), (0.15, False)])
def test_whether_a_peer_answers_is_asked_with_a_limit(timeout: float, expected: bool) -> None:
    async def main(ends: Ends) -> None:
        began = trio.current_time()
        assert await ends.near.is_answering(timeout) is expected
        assert trio.current_time() - began == pytest.approx(0.2 if expected else timeout)
        assert ends.near.statistics().waiting == 0

    run(main)


def test_a_silent_peer_does_not_answer_and_neither_does_a_lost_one() -> None:
    async def main(ends: Ends) -> None:
        ends.air.block(NEAR.peer_id, FAR.peer_id)
        assert not await ends.near.is_answering(2.0)
        ends.near.abandon("enough")
        assert not await ends.near.is_answering(2.0)

    run(main)


def test_a_stream_lost_while_it_is_asked_is_no_answer() -> None:
    async def main(ends: Ends) -> None:
        async with trio.open_nursery() as nursery:
            found: list[bool] = []

            async def ask() -> None:
                found.append(await ends.near.is_answering(50.0))

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
            ends.near.abandon("the other side has restarted")
        assert found == [False]
        assert trio.current_time() == began

    run(main)


def test_who_is_abandoned_hears_at_once_and_for_good() -> None:
    async def main(ends: Ends) -> None:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(PeerLost, match="enough"):
                    await ends.near.request("hang", NIL, 100.0)

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            ends.near.abandon("enough")
            ends.near.abandon("said twice")
        with pytest.raises(PeerLost, match="enough"):
            await ends.near.request("echo", NIL, 1.0)
        with pytest.raises(PeerLost, match="enough"):
            ends.near.send_nowait(encode_notice("fine", NIL))
        assert "enough" in repr(ends.near)

    run(main)


def test_a_notice_for_which_there_is_no_room_is_counted() -> None:
    async def main(ends: Ends) -> None:
        ends.air.block(NEAR.peer_id, FAR.peer_id)
        sent = 0
        while ends.near.send_nowait(encode_notice("fine", NIL)):
            sent += 1
        statistics = ends.near.statistics()
        assert (statistics.sent, statistics.shed) == (sent, 1)
        ends.air.heal()
        await elapse(1.0)
        assert await ends.near.request("echo", NIL, 5.0) == NIL
        assert len(ends.told) == sent

    run(main)


def test_one_that_sends_much_leaves_others_their_turn() -> None:
    async def main(ends: Ends) -> None:
        async def other() -> None:
            await ends.begun.wait()
            ends.told.append("other")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(50):
                ends.near.send_nowait(encode_notice("slow", NIL))
            await elapse(5.0)
        # A turn is two such notices. Who is woken in one runs by the end of the next, whatever order trio draws.
        assert ends.told.index("other") <= 4
        assert ends.told.count("slow") == 50

    run(main)
