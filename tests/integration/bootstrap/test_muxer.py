"""Our yamux against that of libp2p."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream

from p2pserve.bootstrap import Address, Identity, PeerLost
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport

from .libp2p_worlds import LOOPBACK, UNHURRIED, echo_back, run, until, waiting_room

pytestmark = pytest.mark.beside


class OtherMuxerTransport(Libp2pTransport):
    """One with libp2p's own yamux."""

    def new_muxer(self) -> MuxerMultistream:
        return MuxerMultistream({TProtocol(YAMUX_PROTOCOL_ID): Yamux})


@asynccontextmanager
async def one_with_libp2ps_own_muxer(
    *, dialler: bool
) -> AsyncIterator[tuple[Address, Libp2pTransport, Libp2pTransport]]:
    """An echoing transport, and another that dials it: one of the two with libp2p's own yamux."""
    ours, other = (Libp2pTransport, OtherMuxerTransport) if dialler else (OtherMuxerTransport, Libp2pTransport)
    listening = ours(Identity.generate(), LOOPBACK, LOOPBACK, settings=UNHURRIED)
    dialling = other(Identity.generate(), None, LOOPBACK, settings=UNHURRIED)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(listening.serve, echo_back)
        await nursery.start(dialling.serve, echo_back)
        yield address, listening, dialling
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("dialler", [True, False])
def test_other_peers_may_use_another_yamux(dialler: bool) -> None:
    async def main() -> None:
        async with one_with_libp2ps_own_muxer(dialler=dialler) as (address, listening, dialling):
            connection = await dialling.dial(address, listening.peer_id)
            for size in (0, 1, 65_536, 1_000_000, 4 * 1024 * 1024):
                frame = random.Random(size).randbytes(size)
                await connection.send(frame)
                assert await connection.receive() == frame
            for _ in range(20):  # more than any window, so that both sides have to make room
                await connection.send(bytes(1_000_000))
                assert len(await connection.receive()) == 1_000_000
            await connection.aclose()
            again = await dialling.dial(address, listening.peer_id)
            await again.send(b"again")
            assert await again.receive() == b"again"

    run(main)


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    async def main() -> None:
        async with waiting_room(replace(UNHURRIED, stalled_s=0.5)) as (address, listening, dialling, room):
            near = await dialling.dial(address, listening.peer_id)
            await until(lambda: room)

            async def send_for_ever() -> None:
                while True:
                    await near.send(bytes(100_000))

            with pytest.raises(PeerLost):
                await send_for_ever()

    run(main)


def test_garbage_behind_the_handshake_does_not_disturb() -> None:
    """A peer that speaks Noise and yamux correctly, and nonsense from there on."""

    async def main() -> None:
        rng = random.Random(0)
        async with one_with_libp2ps_own_muxer(dialler=True) as (address, listening, dialling):
            for attempt in range(24):
                rogue = await dialling.dial(address, listening.peer_id)
                stream = rogue.stream
                assert isinstance(stream, YamuxStream)
                if attempt % 3 == 0:  # a control stream with an absurd length
                    await stream.write(b"\xff\xff\xff\xff" + rng.randbytes(50))
                elif attempt % 3 == 1:  # yamux frames of unknown types and streams
                    await stream.conn.secured_conn.write(rng.randbytes(12) + rng.randbytes(40))
                else:  # a second stream
                    await stream.conn.open_stream()
                with pytest.raises(PeerLost):
                    await rogue.receive()
            good = await dialling.dial(address, listening.peer_id)
            await good.send(b"still here")
            assert await good.receive() == b"still here"

    run(main)
