"""One port for two kinds of connections, and whatever else knocks at it."""

import logging
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest
import trio

from p2pserve.bootstrap import Address, PeerLost, Unreachable
from p2pserve.bootstrap.streams.framed import FramedConnection
from p2pserve.bootstrap.streams.shared_port import DataSocketHandler, wake_for
from p2pserve.bootstrap.streams.strangers import Origin, StrangerLimits
from p2pserve.bootstrap.streams.yamux import OneStream

from .libp2p_worlds import DATA_HEAD, UNHURRIED, echo_server, run, until, waiting_room

pytestmark = pytest.mark.beside


@contextmanager
def collected() -> Iterator[tuple[list[socket.socket], DataSocketHandler]]:
    sockets: list[socket.socket] = []

    def take(sock: socket.socket, peeked: bytes, origin: Origin) -> None:
        assert (peeked, origin.source) == (DATA_HEAD, "127.0.0.1")
        sockets.append(sock)

    yield sockets, take
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("pieces", [[DATA_HEAD + b"payload"], [DATA_HEAD[:3], DATA_HEAD[3:], b"payload"]])
def test_a_data_socket_is_passed_on_intact(pieces: list[bytes]) -> None:
    async def main() -> None:
        with collected() as (sockets, take):
            async with echo_server(take) as (address, server, dialling):
                connection = await dialling.dial(address, server.peer_id)
                stream = await trio.open_tcp_stream(address.host, address.port)
                for piece in pieces:
                    await stream.send_all(piece)
                    await connection.send(b"meanwhile")
                    assert await connection.receive() == b"meanwhile"
                await until(lambda: sockets)
                (data,) = sockets
                assert data.gettimeout() is None, "the socket blocks"
                data.settimeout(30)
                received = b""
                while len(received) < len(DATA_HEAD) + 7:
                    received += await trio.to_thread.run_sync(data.recv, 100)
                assert received == DATA_HEAD + b"payload"
                await trio.to_thread.run_sync(data.sendall, b"answer")
                assert await stream.receive_some(100) == b"answer"
                await stream.aclose()

    run(main)


def test_whoever_waits_for_a_head_is_not_woken_for_each_of_its_bytes() -> None:
    async def main() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as far,
            listener.accept()[0] as near,
        ):
            near.setblocking(False)

            def send_by_byte() -> None:
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(40):
                    far.sendall(b"x")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, send_by_byte)
                with wake_for(near, 40):
                    await trio.lowlevel.wait_readable(near)
                    assert len(near.recv(100)) == 40
            assert near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
            with wake_for(near, 40):
                far.sendall(b"x")
                far.close()
                await trio.lowlevel.wait_readable(near)  # the end wakes, too

    run(main)


def test_garbage_scanners_and_hang_ups_do_not_disturb() -> None:
    async def main() -> None:
        rng = random.Random(0)
        async with echo_server() as (address, server, dialling):
            connection = await dialling.dial(address, server.peer_id)
            open_ones = []
            for index in range(60):
                stream = await trio.open_tcp_stream(address.host, address.port)
                if index % 3 == 0:
                    await stream.send_all(rng.randbytes(rng.randrange(1, 300)))
                elif index % 3 == 1:
                    await stream.send_all(b"\x13/multistream/1.0.0\n\x07/noise\n" + rng.randbytes(200))
                open_ones.append(stream)  # every third one says nothing at all
                if index % 2:
                    await open_ones.pop(0).aclose()
            magic = await trio.open_tcp_stream(address.host, address.port)
            await magic.send_all(DATA_HEAD)  # nobody takes data sockets here: it is closed
            with pytest.raises(trio.BrokenResourceError):  # a reset, since it never read the magic
                await magic.receive_some(1)
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"
            other = await dialling.dial(address, server.peer_id)
            await other.send(b"and open to all")
            assert await other.receive() == b"and open to all"
            for stream in [*open_ones, magic]:
                await stream.aclose()

    run(main)


def test_who_opens_no_control_stream_is_dropped() -> None:
    async def main() -> None:
        from libp2p.peer.id import ID
        from multiaddr import Multiaddr

        async with waiting_room(replace(UNHURRIED, upgrade_s=1)) as (address, listening, dialling, _):
            good = await dialling.dial(address, listening.peer_id)
            assert dialling.swarm is not None
            swarm = listening.swarm
            assert swarm is not None
            place = Multiaddr(f"/ip4/{address.host}/tcp/{address.port}")
            idle = await dialling.swarm.dial_addr(place, ID.from_base58(listening.peer_id))
            silent = await trio.open_tcp_stream(address.host, address.port)
            await silent.send_all(b"x" * len(DATA_HEAD))
            with pytest.raises(PeerLost):
                await cast(OneStream, idle.muxed_conn).read()
            await until(lambda: idle.is_closed)
            await until(lambda: len(swarm.get_connections()) == 1)
            with trio.fail_after(30):
                while await silent.receive_some(1000):  # its half of a handshake, and then the end
                    pass
            await silent.aclose()
            await idle.close()
            await until(lambda: listening.strangers == 1)
            await good.send(b"still here")

    run(main)


def test_little_is_taken_before_admission_and_all_after_it() -> None:
    async def main() -> None:
        async with waiting_room() as (address, listening, dialling, room):
            for size, kept in ((128 * 1024, True), (128 * 1024 + 1, False)):
                near = await dialling.dial(address, listening.peer_id)
                await near.send(bytes(size))
                await until(lambda: room)
                far = room.pop()
                if kept:
                    assert len(await far.receive()) == size
                else:
                    with pytest.raises(PeerLost, match="the limit is 131072"):
                        await far.receive()
            near = await dialling.dial(address, listening.peer_id)
            for _ in range(100):
                await near.send(bytes(100_000))
            await until(lambda: room)
            far = room.pop()
            assert isinstance(far, FramedConnection)
            await until(lambda: far.waiting == 4)
            await trio.sleep(0.2)
            assert far.waiting == 4, "the rest waits at its sender"
            far.admit()
            await near.send(bytes(1_000_000))
            assert [len(await far.receive()) for _ in range(101)] == [100_000] * 100 + [1_000_000]

    run(main)


def test_of_too_many_strangers_the_one_that_waited_longest_goes() -> None:
    async def main() -> None:
        few = replace(UNHURRIED, strangers=StrangerLimits(total=3, each=3, for_members=0))
        async with waiting_room(few) as (address, listening, dialling, room):
            held = []
            for _ in range(3):
                held.append(await dialling.dial(address, listening.peer_id))
                await until(lambda: len(room) == len(held))
            room[0].admit()
            held.append(await dialling.dial(address, listening.peer_id))
            await until(lambda: len(room) == 4)
            held.append(await dialling.dial(address, listening.peer_id))
            with pytest.raises(PeerLost):
                await held[1].receive()
            await until(lambda: len(room) == 5)
            assert listening.strangers == 3
            for near, far in zip(held[2:], room[2:], strict=True):
                await near.send(b"still here")
                assert await far.receive() == b"still here"

    run(main)


def test_libp2p_keeps_quiet(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with echo_server() as (address, server, dialling):
            await dialling.dial(address, server.peer_id)
            with pytest.raises(Unreachable):
                await dialling.dial(Address("127.0.0.1", 1), server.peer_id)
            scan = await trio.open_tcp_stream(address.host, address.port)
            await scan.send_all(b"GET / HTTP/1.0\r\n\r\n")
            await scan.aclose()

    before = list(logging.getLogger().handlers)
    with caplog.at_level(logging.INFO):
        run(main)
    assert logging.getLogger().handlers == before
    assert [record for record in caplog.records if not record.name.startswith("p2pserve")] == []
    assert capfd.readouterr() == ("", "")
