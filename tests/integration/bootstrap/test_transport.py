"""The transport over real libp2p on loopback."""

import random
import socket
import subprocess
import sys

import pytest
import trio

from p2pserve.bootstrap import Address, AddressError, Identity, PeerLost, PortInUse, TransportSettings, Unreachable
from p2pserve.bootstrap.streams.hosts import open_connection
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport
from p2pserve.bootstrap.streams.transport import PeerConnection

from .libp2p_worlds import LOOPBACK, echo_back, echo_server, run

pytestmark = pytest.mark.beside

BOTH = pytest.mark.parametrize("is_lean", [False, True], ids=["node", "client"])


def test_the_peer_id_is_the_one_libp2p_computes() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    identity = Identity.generate()
    assert str(ID.from_pubkey(create_new_key_pair(identity.seed).public_key)) == identity.peer_id


def test_the_front_door_loads_neither_libp2p_nor_trio() -> None:
    code = "import sys, p2pserve.bootstrap; print(*sorted({'libp2p', 'trio', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@BOTH
def test_frames_of_all_sizes_come_back_whole(is_lean: bool) -> None:
    async def main() -> None:
        async with echo_server(is_lean=is_lean) as (address, server, dialling):
            connection = await dialling.dial(address, server.peer_id)
            assert connection.peer == server.peer_id
            for size in (0, 1, 65_536, 1_000_000, 4 * 1024 * 1024):
                frame = random.Random(size).randbytes(size)
                await connection.send(frame)
                assert await connection.receive() == frame

    run(main)


@BOTH
def test_cancelled_calls_leave_the_connection_usable(is_lean: bool) -> None:
    """A cancelled libp2p call kills its connection; ours only touch queues."""

    async def main() -> None:
        async with echo_server(is_lean=is_lean) as (address, server, dialling):
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

        async def say_and_go(connection: PeerConnection) -> None:
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


@BOTH
def test_why_a_dial_fails(is_lean: bool) -> None:
    async def main() -> None:
        async with echo_server(is_lean=is_lean, settings=TransportSettings(dial_s=2.0)) as (address, server, dialling):
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


@BOTH
def test_who_answers_at_an_address_is_found_out_without_knowing_its_id(is_lean: bool) -> None:
    async def main() -> None:
        async with echo_server(is_lean=is_lean, settings=TransportSettings(dial_s=10.0)) as (address, server, dialling):
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


def test_a_handler_that_fails_costs_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server, dialler = Identity.generate(), Identity.generate()

        async def fail_once(connection: PeerConnection) -> None:
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


@pytest.mark.parametrize("most", [1220, 0])
def test_segments_are_as_small_as_every_path_carries_at_both_ends(most: int) -> None:
    """Unless they are to be as large as the devices allow: that of loopback, 64 KiB."""

    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        address = Address("127.0.0.1", listener.socket.getsockname()[1])
        async with listener, await open_connection(address, most) as near, await listener.accept() as far:
            sizes = [end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) for end in (near, far)]
            assert all(size <= most if most else size > 1460 for size in sizes)
        with pytest.raises(OSError, match="refused"):
            await open_connection(address)

    run(main)
