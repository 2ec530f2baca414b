"""The control stream over a connection that somebody else has made: one end had it made, the other has dialled it."""

import pytest
import trio

from p2pserve.bootstrap import Address, Identity, PeerId, PeerLost, Unreachable
from p2pserve.bootstrap.streams.dialling import DiallingTransport
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport
from p2pserve.bootstrap.streams.transport import PeerConnection, Transport

from .libp2p_worlds import LOOPBACK, UNHURRIED, run

pytestmark = pytest.mark.beside

ELSEWHERE = Address("192.0.2.9", 4001)  # what the other one announces, where nobody can dial it


async def echo(connection: PeerConnection) -> None:
    await connection.send(b"echo " + await connection.receive())


def clients() -> list[Transport]:
    return [
        Libp2pTransport(Identity.generate(), None, LOOPBACK, settings=UNHURRIED),
        DiallingTransport(Identity.generate(), LOOPBACK, settings=UNHURRIED),
    ]


async def connect() -> tuple[trio.SocketStream, trio.SocketStream]:
    """Both ends of a TCP connection."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        dialled = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        return dialled, await listener.accept()


@pytest.mark.parametrize("index", [0, 1])
def test_both_talk_and_know_each_other(index: int) -> None:
    async def main() -> None:
        client, server = clients()[index], Libp2pTransport(Identity.generate(), LOOPBACK, LOOPBACK, settings=UNHURRIED)
        async with trio.open_nursery() as nursery:
            for each in (client, server):
                await nursery.start(each.serve, echo)
            dialled, accepted = await connect()
            server.adopt(dialled)
            connection = await client.dial_over(accepted, ELSEWHERE, server.peer_id)
            assert connection.peer == server.peer_id
            await connection.send(b"hello")
            assert await connection.receive() == b"echo hello"
            await connection.aclose()
            nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.parametrize("index", [0, 1])
def test_somebody_else_at_the_other_end_or_nobody_is_an_error_and_closes_it(index: int) -> None:
    async def main() -> None:
        client, server = clients()[index], Libp2pTransport(Identity.generate(), LOOPBACK, LOOPBACK, settings=UNHURRIED)
        async with trio.open_nursery() as nursery:
            for each in (client, server):
                await nursery.start(each.serve, echo)
            dialled, accepted = await connect()
            server.adopt(dialled)
            with pytest.raises(Unreachable, match="another peer answers there"):
                await client.dial_over(accepted, ELSEWHERE, PeerId(Identity.generate().peer_id))
            dialled, accepted = await connect()
            await dialled.aclose()
            with pytest.raises(Unreachable, match="over another member"):
                await client.dial_over(accepted, ELSEWHERE, server.peer_id)
            assert accepted.socket.fileno() == -1
            nursery.cancel_scope.cancel()

    run(main)


def test_a_transport_that_listens_nowhere_serves_no_connection_that_it_has_dialled() -> None:
    async def main() -> None:
        dialled, accepted = await connect()
        async with dialled, accepted:
            with pytest.raises(PeerLost, match="listens nowhere"):
                Libp2pTransport(Identity.generate(), None, LOOPBACK).adopt(dialled)

    run(main)
