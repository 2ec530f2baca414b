"""The transport and the network over real libp2p on loopback."""

import logging
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import cast

import msgspec
import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream

from p2pserve.bootstrap import (
    Address,
    AddressError,
    Bootstrap,
    Identity,
    IdentityInUse,
    MemberState,
    Network,
    NetworkKey,
    NetworkSettings,
    PeerId,
    PeerLost,
    PortInUse,
    Refused,
    RequestTimeout,
    Role,
    TransportSettings,
    Unreachable,
)
from p2pserve.bootstrap.methods import Method, Notice
from p2pserve.bootstrap.streams.framed import FramedConnection
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport
from p2pserve.bootstrap.streams.shared_port import DataSocketHandler
from p2pserve.bootstrap.streams.transport import Connection
from p2pserve.bootstrap.streams.yamux import OneStream

pytestmark = pytest.mark.beside

LOOPBACK = Address("127.0.0.1", 0)
KEY = NetworkKey(b"n" * 32)
DATA_HEAD = b"p2pXY/7\n"  # of a kind and version that only the reader has to know
# Nothing is given up because this machine was busy with something else; a test of giving up says how soon.
UNHURRIED = TransportSettings(dial_s=60.0, upgrade_s=60, stalled_s=60.0)
PATIENT = NetworkSettings(ping_s=0.2, suspect_s=60.0, dead_s=120.0, greeting_s=60.0, settle_s=0.3, join_s=30.0)
BRISK = replace(PATIENT, suspect_s=0.6, dead_s=1.5)


class Echo(msgspec.Struct, frozen=True):
    text: str


def asking(name: str) -> Method[Echo, Echo]:
    return Method(name, Echo, Echo)


def telling(name: str) -> Notice[Echo]:
    return Notice(name, Echo)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(100):
            await main()

    trio.run(bounded)


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110 (a test looks at many things, and none of them tells)
            await trio.sleep(0.01)


async def echo_back(connection: Connection) -> None:
    connection.admit()
    while True:
        try:
            await connection.send(await connection.receive())
        except PeerLost:
            return


@asynccontextmanager
async def echo_server(
    on_data_socket: DataSocketHandler | None = None,
    settings: TransportSettings = UNHURRIED,
) -> AsyncIterator[tuple[Address, Identity, Libp2pTransport]]:
    """An echoing transport, and another that only dials."""
    server, dialler = Identity.generate(), Identity.generate()
    listening = Libp2pTransport(server, LOOPBACK, LOOPBACK, on_data_socket, settings=settings)
    dialling = Libp2pTransport(dialler, None, LOOPBACK, settings=settings)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(listening.serve, echo_back)
        await nursery.start(dialling.serve, echo_back)
        yield address, server, dialling
        nursery.cancel_scope.cancel()


def build(
    bootstrap: Network | Bootstrap | None,
    *,
    key: NetworkKey = KEY,
    token: str | None = None,
    identity: Identity | None = None,
    listen: Address = LOOPBACK,
    role: Role = Role.WORKER,
    transport: type[Libp2pTransport] = Libp2pTransport,
    settings: NetworkSettings = PATIENT,
) -> Network:
    identity = identity or Identity.generate()
    if isinstance(bootstrap, Network):
        bootstrap = Bootstrap(bootstrap.address.host, bootstrap.address.port, bootstrap.peer_id)
    bootstraps = () if bootstrap is None else (bootstrap,)
    network = Network(
        transport=transport(identity, listen, LOOPBACK, settings=UNHURRIED),
        identity=identity,
        token=token or key.issue(bootstraps, role, time.time() + 60),
        network_key_public=key.public,
        role=role,
        announce=LOOPBACK,
        bootstraps=bootstraps,
        rng=random.Random(identity.peer_id),
        settings=settings,
    )

    async def echo(peer: PeerId, role: Role, body: Echo) -> Echo:
        return body

    network.handle(asking("echo"), echo)
    return network


def test_the_peer_id_is_the_one_libp2p_computes() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    identity = Identity.generate()
    assert str(ID.from_pubkey(create_new_key_pair(identity.seed).public_key)) == identity.peer_id


def test_the_front_door_loads_neither_libp2p_nor_trio() -> None:
    code = "import sys, p2pserve.bootstrap; print(*sorted({'libp2p', 'trio', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# -- the transport ----------------------------------------------------------------------------------------------------


def test_frames_of_all_sizes_come_back_whole() -> None:
    async def main() -> None:
        async with echo_server() as (address, server, dialling):
            connection = await dialling.dial(address, server.peer_id)
            assert connection.peer == server.peer_id
            for size in (0, 1, 65_536, 1_000_000, 4 * 1024 * 1024):
                frame = random.Random(size).randbytes(size)
                await connection.send(frame)
                assert await connection.receive() == frame

    run(main)


def test_cancelled_calls_leave_the_connection_usable() -> None:
    """A cancelled libp2p call kills its connection; ours only touch queues."""

    async def main() -> None:
        async with echo_server() as (address, server, dialling):
            connection = await dialling.dial(address, server.peer_id)
            rng = random.Random(1)
            for _ in range(200):
                with trio.move_on_after(rng.uniform(0, 0.001)):
                    await connection.send(b"x" * rng.randrange(100_000))
                with trio.move_on_after(rng.uniform(0, 0.001)):
                    await connection.receive()
            await connection.send(b"last")
            while await connection.receive() != b"last":
                pass

    run(main)


def test_more_connections_in_a_life_than_libp2p_allows() -> None:
    async def main() -> None:
        async with echo_server() as (address, server, dialling):

            async def dial_some(count: int) -> None:
                for _ in range(count):
                    connection = await dialling.dial(address, server.peer_id)
                    await connection.aclose()

            async with trio.open_nursery() as nursery:
                for _ in range(15):
                    nursery.start_soon(dial_some, 18)
            connection = await dialling.dial(address, server.peer_id)
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"

    run(main)


def test_the_last_frame_before_a_close_arrives() -> None:
    async def main() -> None:
        server, dialler = Identity.generate(), Identity.generate()

        async def say_and_go(connection: Connection) -> None:
            await connection.send(b"goodbye")

        async with trio.open_nursery() as nursery:
            listening, dialling = (
                Libp2pTransport(server, LOOPBACK, LOOPBACK),
                Libp2pTransport(dialler, None, LOOPBACK),
            )
            address = await nursery.start(listening.serve, say_and_go)
            await nursery.start(dialling.serve, say_and_go)
            for _ in range(20):
                connection = await dialling.dial(address, server.peer_id)
                assert await connection.receive() == b"goodbye"
                with pytest.raises(PeerLost):
                    await connection.receive()
            nursery.cancel_scope.cancel()

    run(main)


def test_why_a_dial_fails() -> None:
    async def main() -> None:
        async with echo_server(settings=TransportSettings(dial_s=2.0)) as (address, server, dialling):
            silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
            deaf = Address("127.0.0.1", silent[0].socket.getsockname()[1])
            for target, peer, reason in (
                (address, Identity.generate().peer_id, "another peer answers there"),
                (Address("127.0.0.1", 1), server.peer_id, "connection refused; check"),
                (Address("no-such-host.invalid", 1), server.peer_id, "cannot resolve host 'no-such-host.invalid'"),
                (deaf, server.peer_id, "no answer within 2 s"),
            ):
                with pytest.raises(Unreachable, match=reason) as caught:
                    await dialling.dial(target, peer)
                assert "\n" not in str(caught.value)
            for listener in silent:
                await listener.aclose()

    run(main)


def test_who_answers_at_an_address_is_found_out_without_knowing_its_id() -> None:
    async def main() -> None:
        async with echo_server(settings=TransportSettings(dial_s=10.0)) as (address, server, dialling):
            assert await dialling.identify(address) == server.peer_id
            for _ in range(70):  # each leaves nothing behind: more than there may be strangers at a time
                await dialling.identify(address)
            connection = await dialling.dial(address, server.peer_id)
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"
            with pytest.raises(Unreachable, match=r"cannot reach a member at 127\.0\.0\.1:1: .*connection refused"):
                await dialling.identify(Address("127.0.0.1", 1))
            garbage = await trio.open_tcp_listeners(0, host="127.0.0.1")
            async with trio.open_nursery() as nursery:

                async def answer(stream: trio.SocketStream) -> None:
                    await stream.send_all(b"HTTP/1.0 400 Bad Request\r\n\r\n")

                nursery.start_soon(trio.serve_listeners, answer, garbage)
                place = Address("127.0.0.1", garbage[0].socket.getsockname()[1])
                with pytest.raises(Unreachable, match="something other than a p2pserve node answers there"):
                    await dialling.identify(place)
                nursery.cancel_scope.cancel()

    run(main)


def test_a_member_is_joined_by_its_address_and_a_clone_is_refused() -> None:
    async def main() -> None:
        async with build(None) as one, build(one) as two:
            await until(two.connected)
            anybody = Bootstrap(two.address.host, two.address.port)
            async with build(anybody, token=KEY.issue((), Role.WORKER, time.time() + 60)) as three:
                await until(lambda: len(one.connected()) == len(three.connected()) == 2)
                clone = build(one, identity=three.identity)
                with pytest.raises(IdentityInUse, match=r"delete identity\.key"):
                    async with clone:
                        pass
                assert three.connected() == {one.peer_id, two.peer_id}

    run(main)


def test_a_handler_that_fails_costs_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server, dialler = Identity.generate(), Identity.generate()

        async def fail_once(connection: Connection) -> None:
            if await connection.receive() == b"fail":
                raise KeyError("a bug")
            await connection.send(b"fine")

        async with trio.open_nursery() as nursery:
            listening, dialling = (
                Libp2pTransport(server, LOOPBACK, LOOPBACK),
                Libp2pTransport(dialler, None, LOOPBACK),
            )
            address = await nursery.start(listening.serve, fail_once)
            await nursery.start(dialling.serve, fail_once)
            first = await dialling.dial(address, server.peer_id)
            await first.send(b"fail")
            with pytest.raises(PeerLost):
                await first.receive()
            second = await dialling.dial(address, server.peer_id)
            await second.send(b"go on")
            assert await second.receive() == b"fine"
            nursery.cancel_scope.cancel()

    run(main)
    assert "KeyError: 'a bug'" in caplog.text


def test_a_port_in_use_is_an_error_and_not_a_silent_twin() -> None:
    async def main() -> None:
        async with echo_server() as (address, _, _), trio.open_nursery() as nursery:
            second = Libp2pTransport(Identity.generate(), address, address)
            with pytest.raises(PortInUse, match=f"port {address.port} on 127.0.0.1 is in use"):
                await nursery.start(second.serve, echo_back)
            elsewhere = Libp2pTransport(Identity.generate(), Address("203.0.113.7", 0), LOOPBACK)
            with pytest.raises(AddressError, match=r"cannot listen on 203\.0\.113\.7:0"):
                await nursery.start(elsewhere.serve, echo_back)

    run(main)


def test_a_port_is_free_again_after_the_end() -> None:
    async def main() -> None:
        async with echo_server() as (address, server, dialling):
            await dialling.dial(address, server.peer_id)
        async with trio.open_nursery() as nursery:
            again = Libp2pTransport(Identity.generate(), address, address)
            assert await nursery.start(again.serve, echo_back) == address
            nursery.cancel_scope.cancel()

    run(main)


# -- one port for both kinds ------------------------------------------------------------------------------------------


@contextmanager
def collected() -> Iterator[tuple[list[socket.socket], DataSocketHandler]]:
    sockets: list[socket.socket] = []

    def take(sock: socket.socket, peeked: bytes) -> None:
        assert peeked == DATA_HEAD
        sockets.append(sock)

    yield sockets, take
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("pieces", [[DATA_HEAD + b"payload"], [DATA_HEAD[:3], DATA_HEAD[3:], b"payload"]])
def test_a_data_socket_is_handed_over_intact(pieces: list[bytes]) -> None:
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
                    await stream.conn._write_frame(rng.randbytes(12) + rng.randbytes(40))
                else:  # a second stream
                    await stream.conn.open_stream()
                with pytest.raises(PeerLost):
                    await rogue.receive()
            good = await dialling.dial(address, listening.peer_id)
            await good.send(b"still here")
            assert await good.receive() == b"still here"

    run(main)


# -- strangers --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def waiting_room(
    settings: TransportSettings = UNHURRIED,
) -> AsyncIterator[tuple[Address, Libp2pTransport, Libp2pTransport, list[Connection]]]:
    """A transport that takes connections and admits nobody by itself, and one that dials."""
    room: list[Connection] = []

    async def wait(connection: Connection) -> None:
        room.append(connection)
        await trio.sleep_forever()

    listening = Libp2pTransport(Identity.generate(), LOOPBACK, LOOPBACK, settings=settings)
    dialling = Libp2pTransport(Identity.generate(), None, LOOPBACK, settings=settings)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(listening.serve, wait)
        await nursery.start(dialling.serve, wait)
        yield address, listening, dialling, room
        nursery.cancel_scope.cancel()


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
            await silent.send_all(b"x")
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


def test_only_so_many_strangers_at_once() -> None:
    async def main() -> None:
        async with waiting_room(replace(UNHURRIED, max_strangers=3)) as (address, listening, dialling, room):
            held = [await dialling.dial(address, listening.peer_id) for _ in range(3)]
            with pytest.raises(Unreachable):
                await dialling.dial(address, listening.peer_id)
            await until(lambda: len(room) == 3)
            room[0].admit()
            held.append(await dialling.dial(address, listening.peer_id))
            await held[1].aclose()  # who goes makes room, too
            await until(lambda: listening.strangers < 3)
            await dialling.dial(address, listening.peer_id)

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


# -- the network ------------------------------------------------------------------------------------------------------


def test_three_join_talk_and_elect() -> None:
    async def main() -> None:
        async with build(None) as one, build(one) as two, build(one) as three:
            everybody = (one, two, three)
            for network in everybody:
                network.publish("load", network.peer_id.encode())
            await until(lambda: all(len(network.entries("load")) == 3 for network in everybody))
            await until(lambda: all(network.coordinator is not None for network in everybody))
            assert len({network.coordinator for network in everybody}) == 1
            assert await two.request(three.peer_id, asking("echo"), Echo("hello"), 30) == Echo("hello")
            heard: list[tuple[PeerId, Role, str]] = []
            three.on_notice(telling("tell"), lambda peer, role, body: heard.append((peer, role, body.text)))
            two.notify(three.peer_id, telling("tell"), Echo("psst"))
            await until(lambda: heard)
            assert heard == [(two.peer_id, Role.WORKER, "psst")]
            await until(lambda: all(m.rtt_s is not None for m in one.members() if m.peer_id != one.peer_id))
            for network in everybody:
                network.check_integrity()
            await three.leave()
            await until(lambda: len(one.entries("load")) == 2)
            assert {m.state for m in one.members() if m.peer_id == three.peer_id} == {MemberState.LEFT}

    run(main)


def test_hundreds_of_timeouts_leave_the_connection_healthy() -> None:
    async def main() -> None:
        async with build(None) as one, build(one) as two:

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep(0.3)
                return body

            one.handle(asking("hang"), hang)

            async def give_up() -> None:
                for _ in range(20):
                    with pytest.raises(RequestTimeout):
                        await two.request(one.peer_id, asking("hang"), Echo("x" * 1000), 0.01)

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(give_up)
            assert await two.request(one.peer_id, asking("echo"), Echo("fine"), 30) == Echo("fine")

    run(main)


class RecordingTransport(Libp2pTransport):
    """One that remembers whom it dialled."""

    dialled: FramedConnection | None = None

    async def dial(self, address: Address, peer_id: PeerId) -> FramedConnection:
        self.dialled = await super().dial(address, peer_id)
        return self.dialled


def test_a_peer_that_stops_reading_is_disconnected_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        hurried = replace(PATIENT, crossing_s=0.3)
        async with (
            build(None, settings=hurried) as one,
            build(one, settings=hurried, transport=RecordingTransport) as two,
        ):
            heard: list[int] = []
            lost: list[PeerId] = []
            two.on_notice(telling("tell"), lambda peer, role, body: heard.append(len(body.text)))
            one.on_peer_lost(lost.append)
            two.on_peer_lost(lost.append)
            await until(lambda: one.connected() and two.connected())
            await trio.sleep(0.5)

            async def stuck() -> bytes:
                await trio.sleep_forever()
                raise AssertionError

            assert isinstance(two.transport, RecordingTransport)
            monkeypatch.setattr(two.transport.dialled, "receive", stuck)

            def tell(count: int) -> None:
                for _ in range(count):
                    one.notify(two.peer_id, telling("tell"), Echo("x" * 60_000))

            with pytest.raises(PeerLost, match="does not read its messages"):
                tell(5000)
            await until(lambda: sorted(lost) == sorted([one.peer_id, two.peer_id]))
            heard.clear()
            await until(lambda: one.connected() and two.connected())
            await trio.sleep(0.2)
            one.notify(two.peer_id, telling("tell"), Echo("again"))
            await until(lambda: heard == [5])

    run(main)


def test_a_wrong_token_is_refused_by_the_other_side() -> None:
    async def main() -> None:
        async with build(None) as one:
            here = Bootstrap(one.address.host, one.address.port, one.peer_id)
            other_key = NetworkKey.generate()
            stranger = build(here, key=other_key)  # one that believes in its own network
            with pytest.raises(Refused, match="belongs to another network"):
                async with stranger:
                    pass
            assert one.statistics().strangers_refused == 1
            assert one.statistics().members == 1

    run(main)


def test_nobody_answers_at_the_bootstrap() -> None:
    async def main() -> None:
        nobody = Bootstrap("127.0.0.1", 1, Identity.generate().peer_id)
        with pytest.raises(Unreachable, match=r"at 127\.0\.0\.1:1: .*connection refused; check"):
            async with build(nobody, settings=replace(PATIENT, join_s=1.0)):
                pass

    run(main)


NODE = """
import random, sys, time, trio
from p2pserve.bootstrap import *
from p2pserve.bootstrap import Libp2pTransport, Network
key, here, token = sys.argv[1], Address("127.0.0.1", 0), sys.argv[2]
async def main():
    identity = Identity.generate()
    network = Network(transport=Libp2pTransport(identity, here, here), identity=identity, token=token,
        network_key_public=bytes.fromhex(key), role=Role.WORKER, announce=here,
        bootstraps=JoinToken.parse(token).bootstraps, rng=random.Random())
    async with network:
        network.publish("load", b"x")
        print(identity.peer_id, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@contextmanager
def node_process(bootstrap: Network) -> Iterator[subprocess.Popen[str]]:
    here = Bootstrap(bootstrap.address.host, bootstrap.address.port, bootstrap.peer_id)
    token = KEY.issue((here,), Role.WORKER, time.time() + 60)
    arguments = [sys.executable, "-c", NODE, KEY.public.hex(), token]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(("how", "settings"), [(signal.SIGKILL, PATIENT), (signal.SIGSTOP, BRISK)])
def test_the_death_of_a_process_is_noticed(how: signal.Signals, settings: NetworkSettings) -> None:
    """Of one that is killed its connections tell; of one that hangs, its silence."""

    async def main() -> None:
        async with build(None, settings=settings) as one, build(one, settings=settings) as two:
            with node_process(one) as process:
                await until(lambda: len(one.entries("load")) == len(two.entries("load")) == 1)
                await until(lambda: len(one.connected()) == len(two.connected()) == 2)
                (victim,) = one.entries("load")
                lost: list[PeerId] = []
                two.on_peer_lost(lost.append)
                process.send_signal(how)
                await until(lambda: not one.entries("load") and not two.entries("load"))
                assert victim in lost
                assert settings is BRISK or lost == [victim]

    run(main)
