"""Transports and networks over real libp2p on loopback."""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import trio

from p2pserve.bootstrap import (
    Address,
    Bootstrap,
    Identity,
    Network,
    NetworkKey,
    NetworkSettings,
    PeerId,
    PeerLost,
    Role,
    TransportSettings,
)
from p2pserve.bootstrap.methods import Method, Notice
from p2pserve.bootstrap.streams.dialling import DiallingTransport
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport
from p2pserve.bootstrap.streams.shared_port import DataSocketHandler
from p2pserve.bootstrap.streams.transport import PeerConnection, Transport

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


async def echo_back(connection: PeerConnection) -> None:
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
    *,
    is_lean: bool = False,
) -> AsyncIterator[tuple[Address, Identity, Transport]]:
    """An echoing transport, and another that only dials: a node's, or (`is_lean`) a client's."""
    server, dialler = Identity.generate(), Identity.generate()
    listening = Libp2pTransport(server, LOOPBACK, LOOPBACK, on_data_socket, settings=settings)
    dialling: Transport = Libp2pTransport(dialler, None, LOOPBACK, settings=settings)
    if is_lean:
        dialling = DiallingTransport(dialler, LOOPBACK, settings=settings)
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
    transport_settings: TransportSettings = UNHURRIED,
) -> Network:
    identity = identity or Identity.generate()
    if isinstance(bootstrap, Network):
        bootstrap = Bootstrap(bootstrap.address.host, bootstrap.address.port, bootstrap.peer_id)
    bootstraps = () if bootstrap is None else (bootstrap,)
    network = Network(
        transport=transport(identity, listen, LOOPBACK, settings=transport_settings),
        identity=identity,
        token=token or key.issue(bootstraps, role, time.time() + 60, lead=role is not Role.CLIENT),
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


@asynccontextmanager
async def waiting_room(
    settings: TransportSettings = UNHURRIED,
) -> AsyncIterator[tuple[Address, Libp2pTransport, Libp2pTransport, list[PeerConnection]]]:
    """A transport that takes connections and admits nobody by itself, and one that dials."""
    room: list[PeerConnection] = []

    async def wait(connection: PeerConnection) -> None:
        room.append(connection)
        await trio.sleep_forever()

    listening = Libp2pTransport(Identity.generate(), LOOPBACK, LOOPBACK, settings=settings)
    dialling = Libp2pTransport(Identity.generate(), None, LOOPBACK, settings=settings)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(listening.serve, wait)
        await nursery.start(dialling.serve, wait)
        yield address, listening, dialling, room
        nursery.cancel_scope.cancel()
