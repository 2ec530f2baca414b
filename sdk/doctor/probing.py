"""What the checks of a box look at: files, sockets and memory here, the addresses of members, and the network."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

import trio

from ...bootstrap import (
    Address,
    AddressError,
    Identity,
    JoinToken,
    NetworkError,
    PeerId,
    PeerLost,
    RequestTimeout,
    Role,
    TokenError,
    TransportSettings,
    Unreachable,
    parse_join_target,
)
from ...bootstrap.addresses import FoundAddress, default_route_address, find_announced, plain_ip
from ...bootstrap.network import Network
from ...bootstrap.streams.hosts import resolve_host
from ...bootstrap.streams.transport import Transport
from ...bootstrap.trust.tokens import Bootstrap
from ...node.box.errors import NodeError
from ...node.box.hardware import Hardware
from ...node.box.home import running_pid
from ...node.box.shares import Share, share_of
from ...node.box.start_checks import SHARED_MEMORY
from ...node.links.bandwidth import Carried, measure_bandwidth
from ...node.links.messages import CARRIED_BYTES, CarryBytes, DialBack, DialledBack, PlacesLeft, PlacesQuery
from ...node.messages import Status
from ...node.methods import BANDWIDTH, DIAL_BACK, EVENTS, TOKEN_PLACES
from ...node.models import ModelError, open_model
from ...node.observing.queries import EventQuery
from ...node.observing.traces import clock_from_round_trip
from ...node.observing.values import BoxClock
from ...node.requests.gateway_choice import STATUS_TIMEOUT_S, GatewayCandidate, GatewayFinder
from ...node.settings import BoxEngineSettings
from ..errors import ClientError
from ..session import Session, enter, enter_network, find_network
from .checks import MemberFound, ModelFound

ASKED: Final = 4  # members whose clocks are compared
ASKED_BACK: Final = 2  # members that dial: two may see a box come from two addresses
DIAL_BACK_S: Final = 12.0
_CGROUP: Final = Path("/sys/fs/cgroup")


def find_model(name: str, hardware: Hardware) -> ModelFound | str:
    """The model as `join` would take it; a text says why it would not."""
    try:
        model = open_model(name)
    except ModelError as error:
        return str(error)
    share: Share | str
    try:
        share = share_of(model.info, hardware, BoxEngineSettings())
    except NodeError as error:
        return ModelFound(model.info, str(error), model.count_missing(model.info.layers))
    return ModelFound(model.info, share, model.count_missing(share.layers))


def free_shared_memory() -> int | None:
    """Bytes; None where there is none."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that programs may still take, within the limit of a container."""
    import psutil  # clients have it not

    free: int = psutil.virtual_memory().available
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no such file system, or "max"
        return free


def find_home(home: Path) -> tuple[int | None, str | None]:
    """The pid of the node that runs there, and why no node could. Makes nothing."""
    there = nearest_folder(home)
    if not there.is_dir():
        return None, f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return None, f"{there} cannot be written"
    try:
        return running_pid(home), None
    except NodeError as error:
        return None, str(error)


def nearest_folder(path: Path) -> Path:
    """The path, or what there is of it."""
    return next(each for each in (path, *path.parents) if each.exists())


async def find_port_problem(listen: Address) -> str | None:
    """Why a node could not listen there: its own way of listening, for a moment."""
    from ...bootstrap import TransportSettings
    from ...bootstrap.streams.shared_port import SharedPort

    try:
        port = await SharedPort.open(listen, None, TransportSettings())
    except NetworkError as error:
        return str(error)
    port.close()
    return None


def find_address(flag: str | None, environ: Mapping[str, str], listen: Address) -> FoundAddress | str:
    """The address that a node would tell others; a text says why there is none."""
    try:
        return find_announced(flag, environ, listen)
    except AddressError as error:
        return f"announce: {error}"


def read_token(where: str, token: str | None) -> tuple[JoinToken | str, tuple[Bootstrap, ...]]:
    """The join token, or why there is none, and the members to ask."""
    try:
        target = parse_join_target(where, token)
        if target.token is None:
            return "only addresses were given; give the join token beside them: --bootstrap TOKEN,ADDR", target.members
        return JoinToken.parse(target.token), target.members
    except (AddressError, TokenError) as error:
        return str(error), ()


async def ask_members(members: Sequence[Bootstrap], timeout_s: float) -> list[MemberFound]:
    """Dial each address, and have whoever is there prove who it is; nobody is told a token."""
    from ...bootstrap.streams.dialling import DiallingTransport

    found: dict[Bootstrap, MemberFound] = {}
    transport = DiallingTransport(Identity.generate(), Address("0.0.0.0", 0))

    async def ask(member: Bootstrap) -> None:
        found[member] = MemberFound(member, problem=f"no answer within {timeout_s:g} s")
        address = Address(member.host, member.port)
        with trio.move_on_after(timeout_s):
            try:
                rtt_s = await _measure_round_trip(address)
                peer = await transport.identify(address)
            except NetworkError as error:
                found[member] = MemberFound(member, problem=str(error))
                return
            wrong = f"{peer} answers and not {member.peer_id}; ask the owner for a new token"
            problem = wrong if member.peer_id not in (None, peer) else ""
            found[member] = MemberFound(member, rtt_s, peer, problem)

    async with trio.open_nursery() as nursery:
        await nursery.start(transport.serve, _drop)
        async with trio.open_nursery() as asking:
            for member in members:
                asking.start_soon(ask, member)
        nursery.cancel_scope.cancel()
    return [found[member] for member in members]


class Neighbourhood(NamedTuple):
    """What the network tells a box that looks around: what the nearest member knows, the clocks of some, how many
    places the worker's token still has, what members say of being asked to dial this box, and what a connection to one
    of them carries; a text says why that is not known."""

    status: Status
    clocks: list[BoxClock]
    places: PlacesLeft | None
    answers: list[DialledBack]
    bandwidth: tuple[str, Carried] | str


class Lookout(NamedTuple):
    """Where a node would listen, what it would announce (None: nobody is asked to dial it), and the key in its home, if
    any."""

    listen: Address
    announced: Address | None
    peer: PeerId | None


async def look_around(where: str, token: str | None, timeout_s: float, lookout: Lookout) -> Neighbourhood | str:
    """Enter the network as a client, which takes no place of a worker's token, and listen where a node would, so that
    members can dial it. A text says why there is no answer."""
    from ...bootstrap.streams.libp2p_host import Libp2pTransport

    announced = lookout.announced

    def listening(identity: Identity) -> Transport:
        return Libp2pTransport(identity, lookout.listen, announced or lookout.listen)

    try:
        network = await find_network(
            where, token, timeout_s, listening=None if announced is None else (listening, announced), may_visit=True
        )
        async with enter(network, timeout_s) as session:
            status = await session.status()
            clocks = await _compare_clocks(session, status)
            places = await _count_places(session, lookout.peer)
            return Neighbourhood(status, clocks, places, *await _ask_neighbours(network, announced))
    except ClientError as error:
        return str(error)


async def _compare_clocks(session: Session, status: Status) -> list[BoxClock]:
    alive = [node.peer for node in status.nodes if node.state == "alive" and node.role != Role.CLIENT.value]
    found = []
    for peer in alive[:ASKED]:
        asked = time.time()
        try:
            page = await session.ask(EVENTS, EventQuery(limit=1), STATUS_TIMEOUT_S, PeerId(peer))
        except ClientError:  # an earlier release, or it went
            continue
        found.append(clock_from_round_trip(peer, page.now, asked, time.time()))
    return found


async def _count_places(session: Session, peer: PeerId | None) -> PlacesLeft | None:
    """None with the token of a client or an admin, or where members are of an earlier release."""
    try:
        return await session.ask(TOKEN_PLACES, PlacesQuery(peer=peer or ""), STATUS_TIMEOUT_S)
    except ClientError:
        return None


def find_own_peer(home: Path) -> PeerId | None:
    """Whom a node with this home would be; None where it has not run yet. Makes nothing."""
    try:
        return Identity.load_or_create(home).peer_id if (home / Identity.FILE).is_file() else None
    except NetworkError:
        return None


async def _ask_neighbours(
    network: Network, announced: Address | None
) -> tuple[list[DialledBack], tuple[str, Carried] | str]:
    own = {default_route_address(), default_route_address("::"), *([] if announced is None else [announced.host])}
    hosts = {member.peer_id: member.address.host for member in network.members()}
    peers = choose_neighbours(GatewayFinder(network).candidates(), hosts, own)
    answers: list[DialledBack] = []
    if announced is not None:
        body = DialBack(host=announced.host, port=announced.port)
        for peer in peers[:ASKED_BACK]:
            try:
                answers.append(await network.request(peer, DIAL_BACK, body, DIAL_BACK_S))
            except NetworkError:  # an earlier release, or it went
                continue
    if not peers:
        return answers, "no member is alive"
    try:
        return answers, (peers[0], await measure_bandwidth(network, peers[0]))
    except NetworkError as error:
        return answers, str(error)


def choose_neighbours(
    members: Iterable[GatewayCandidate], hosts: Mapping[PeerId, str], own: Iterable[str]
) -> list[PeerId]:
    """Whom to ask about the way to this box, the nearest first; `hosts`: what members announce, `own`: this box's.
    Those on this box, or behind the same router, are asked only where there are no others: they do not come by the way
    that others have to take."""
    here = {plain_ip(host) for host in own} - {None}
    ranked = sorted(members, key=lambda each: each.rtt_s if each.rtt_s is not None else inf)
    elsewhere = [each.peer for each in ranked if plain_ip(hosts[each.peer]) not in here]
    return elsewhere or [each.peer for each in ranked]


async def find_black_hole(where: str, token: str | None, timeout_s: float, member: PeerId) -> bool:
    """Whether packets as large as the devices allow get lost between here and a member that smaller ones reach: the
    same as before, over a connection that takes segments of any size."""
    from ...bootstrap.streams.dialling import DiallingTransport

    nowhere = Address("0.0.0.0", 0)

    def widely(identity: Identity) -> Transport:
        return DiallingTransport(identity, nowhere, settings=TransportSettings(segment_bytes=0))

    try:
        network = await find_network(where, token, timeout_s, listening=(widely, nowhere), may_visit=True)
        async with enter_network(network):
            for piece in (CarryBytes(payload=bytes(CARRIED_BYTES)), CarryBytes(wanted=CARRIED_BYTES)):
                await network.request(member, BANDWIDTH, piece, timeout_s)
    except (ClientError, PeerLost, RequestTimeout):
        return True
    return False


async def _measure_round_trip(address: Address) -> float:
    """Seconds until a connection is there. Raises Unreachable."""
    host = (await resolve_host(address))[0]
    began = trio.current_time()
    try:
        stream = await trio.open_tcp_stream(host, address.port)
    except OSError as error:
        raise Unreachable(f"nobody listens there ({error.strerror or error})") from error
    took_s = trio.current_time() - began
    await stream.aclose()
    return took_s


async def _drop(connection: object) -> None:
    """Nobody dials a box that only looks."""
