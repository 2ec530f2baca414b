"""What the checks of a box look at: files, sockets and memory here, the addresses of members, and the network."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
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
    Role,
    TokenError,
    Unreachable,
    parse_join_target,
)
from ...bootstrap.addresses import FoundAddress, find_announced
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
from ...node.links.messages import DialBack, DialledBack
from ...node.messages import Status
from ...node.methods import DIAL_BACK
from ...node.models import ModelError, open_model
from ...node.observing.queries import EventQuery
from ...node.observing.traces import clock_from_round_trip
from ...node.observing.values import BoxClock
from ...node.requests.gateway_choice import GatewayFinder
from ...node.settings import BoxEngineSettings
from ..client import Client
from ..errors import ClientError
from ..session import enter_network, find_network
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


def ask_network(where: str, token: str | None, timeout_s: float) -> tuple[Status, list[BoxClock]] | str:
    """What the nearest member knows, and the clocks of some; a text says why there is no answer. Asks as a client."""
    try:
        with closing(Client(where, token=token, timeout_s=timeout_s)) as client:
            status = client.status()
            return status, list(_compare_clocks(client, status))
    except ClientError as error:
        return str(error)


def _compare_clocks(client: Client, status: Status) -> Iterator[BoxClock]:
    alive = [node.peer for node in status.nodes if node.state == "alive" and node.role != Role.CLIENT.value]
    for peer in alive[:ASKED]:
        asked = time.time()
        try:
            page = client.events(EventQuery(limit=1), peer)
        except ClientError:  # an earlier release, or it went
            continue
        yield clock_from_round_trip(peer, page.now, asked, time.time())


class Neighbourhood(NamedTuple):
    """What members say of being asked to dial this box, and what a connection to one of them carries; a text says why
    that is not known."""

    answers: list[DialledBack]
    bandwidth: tuple[str, Carried] | str


async def look_around(
    where: str, token: str | None, timeout_s: float, listen: Address, announced: Address | None
) -> Neighbourhood | str:
    """Join as a client that listens where a node would, and have members dial it; without `announced`, only measure. A
    text says why there is no answer."""
    from ...bootstrap.streams.libp2p_host import Libp2pTransport

    def listening(identity: Identity) -> Transport:
        return Libp2pTransport(identity, listen, announced or listen)

    try:
        network = await find_network(
            where, token, timeout_s, listening=None if announced is None else (listening, announced)
        )
        async with enter_network(network):
            return await _ask_neighbours(network, announced)
    except ClientError as error:
        return str(error)


async def _ask_neighbours(network: Network, announced: Address | None) -> Neighbourhood:
    asked = GatewayFinder(network).candidates()
    peers = [each.peer for each in sorted(asked, key=lambda each: each.rtt_s if each.rtt_s is not None else inf)]
    answers: list[DialledBack] = []
    if announced is not None:
        body = DialBack(host=announced.host, port=announced.port)
        for peer in peers[:ASKED_BACK]:
            try:
                answers.append(await network.request(peer, DIAL_BACK, body, DIAL_BACK_S))
            except NetworkError:  # an earlier release, or it went
                continue
    if not peers:
        return Neighbourhood(answers, "no member is alive")
    try:
        return Neighbourhood(answers, (peers[0], await measure_bandwidth(network, peers[0])))
    except NetworkError as error:
        return Neighbourhood(answers, str(error))


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
