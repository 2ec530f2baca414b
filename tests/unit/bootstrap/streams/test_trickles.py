"""Peers that read or send a byte at a time: what waits for them is bounded, and so is for how long."""

import struct

import msgspec
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Identity, NetworkSettings, PeerLost
from p2pserve.bootstrap.streams.control import ControlStream, Request
from p2pserve.bootstrap.streams.yamux import OneStream

PEER = Identity(b"p" * 32).peer_id
STALLED_S = 5.0
WINDOW_UPDATE, ACK = 1, 2


class Trickle:
    """The secure connection to a peer that lets so many bytes more be sent, every so many seconds."""

    is_initiator = True

    def __init__(self, credit: int, every_s: float) -> None:
        self._credit, self._every_s = credit, every_s
        self.sent = 0

    async def read(self) -> bytes:
        with trio.move_on_after(self._every_s):
            await trio.sleep_forever()
        return struct.pack("!BBHII", 0, WINDOW_UPDATE, ACK, 1, self._credit)

    async def write(self, data: bytes) -> None:
        self.sent += len(data)
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    def get_remote_address(self) -> None:
        return None

    get_transport_addresses = get_connection_type = get_remote_address


def write_to(peer: Trickle, size: int) -> tuple[float, str]:
    """How long it takes to write so many bytes to it, and why it failed, if it did."""
    found: list[tuple[float, str]] = []

    async def main() -> None:
        muxed = OneStream(peer, PEER, STALLED_S)

        async def read() -> None:
            while True:
                await muxed.read()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxed.start)
            stream = await muxed.open_stream()
            nursery.start_soon(read)
            began, why = trio.current_time(), ""
            try:
                await stream.write(bytes(size))
            except PeerLost as error:
                why = str(error)
            found.append((trio.current_time() - began, why))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return found[0]


def test_one_that_lets_a_byte_through_now_and_then_is_given_up_in_bounded_time() -> None:
    size = 1 << 20
    took_s, why = write_to(Trickle(credit=1, every_s=STALLED_S - 1), size)
    assert "reads less than 16384 bytes per second" in why
    assert size / 16384 < took_s <= size / 16384 + 2 * STALLED_S
    assert write_to(Trickle(credit=1, every_s=STALLED_S + 1), size)[1] == "the peer has read nothing for 5 s"


def test_a_slow_link_is_none() -> None:
    peer = Trickle(credit=64 << 10, every_s=2.0)  # 32 KiB a second
    assert write_to(peer, 1 << 20)[1] == ""
    assert peer.sent > 1 << 20


class Deaf:
    """A connection over which requests come and no answer goes."""

    peer = PEER
    remote = Address("192.0.2.1", 4001)

    def __init__(self, requests: int) -> None:
        self._frames = [msgspec.msgpack.encode(Request(n, "status", msgspec.Raw(b"\xc0"))) for n in range(requests)]
        self.kept = 0

    async def send(self, frame: bytes) -> None:
        self.kept += 1
        await trio.sleep_forever()

    def send_nowait(self, frame: bytes) -> None:
        raise trio.WouldBlock

    async def receive(self) -> bytes:
        if not self._frames:
            await trio.sleep_forever()
        return self._frames.pop()

    def admit(self) -> None:
        """It is a member."""

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def test_one_that_asks_and_reads_nothing_has_few_answers_waiting() -> None:
    settings, connection = NetworkSettings(max_requests=8), Deaf(1000)

    async def serve(method: str, body: msgspec.Raw) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(body)

    async def main() -> None:
        stream = ControlStream(connection, serve=serve, notice=lambda method, body: None, settings=settings)
        with trio.move_on_after(60.0):
            await stream.run()
        found = stream.statistics()
        assert (found.received, connection.kept, found.shed) == (1000, 8, 992)

    trio.run(main, clock=MockClock(autojump_threshold=0))
