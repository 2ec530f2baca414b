"""The agent of a node: joins the network and runs what a box contributes, until it is asked to leave.

One trio program: membership, election and, when elected, the coordinator; the gateway for clients; the engine
process and its work for other nodes; the one TCP port. Decisions are made elsewhere (`coordinator`, `view`,
`coordination`, `request`); this module connects them.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import msgspec
import trio

from ..bootstrap import (
    Address,
    AddressError,
    Bootstrap,
    Identity,
    JoinToken,
    NetworkKey,
    PeerId,
    Refused,
    Role,
    TokenError,
    Unreachable,
    announced_address,
    parse_address,
)
from ..bootstrap.addresses import default_route_address
from ..bootstrap.membership import MemberState
from ..bootstrap.network import Network
from ..kvtransport import HELLO_BYTES, TransferError, read_hello
from . import hardware, messages
from .coordination import Coordinator
from .engine import protocol
from .gateway import Connections, Gateway
from .home import NodeError, leave_node, locked
from .model import Model, open_model
from .supervisor import Supervisor
from .text import TextModel
from .view import NetworkView
from .worker import Worker

__all__ = ["EngineKnobs", "NodeError", "NodeSettings", "Started", "leave_node", "run_node"]

TOKEN_LIFETIME_S = 365 * 86400.0
ADVERT_INTERVAL_S = 1.0
WATCH_INTERVAL_S = 0.05
HELLO_TIMEOUT_S = 5.0
HELLO_POLL_S = 0.02
MAX_PENDING_HELLOS = 256
RTT_NEWS = 0.25  # a round trip is worth telling again when it has moved by this fraction

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKnobs:
    """Settings of a node's engine; see `engine.protocol.EngineConfig` for what they cost."""

    dtype: str = "auto"
    kv_cache_mib: int | None = None
    max_batched_tokens: int = 512
    max_model_len: int | None = None
    threads: int = 0  # 0: all cores but one


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How to run a node. `bootstrap` None makes a new network; `model` None hosts no engine."""

    home: Path
    listen: Address
    announce: str | None = None
    bootstrap: str | None = None
    token: str | None = None
    model: str | None = None
    codec: str = "kv4"
    engine: EngineKnobs = field(default_factory=EngineKnobs)
    drain_s: float = 30.0
    engine_channel: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A node that has been admitted. `tokens` are those a new network hands out, by role."""

    peer: PeerId
    address: Address
    tokens: dict[str, str]


async def run_node(
    settings: NodeSettings,
    *,
    say: Say,
    stop: trio.Event,
    task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a node until `stop` is set and its requests have ended (at most `drain_s`).

    Raises NodeError, ModelError, EngineError or NetworkError, each with one line for the user; since several
    tasks run, they may come inside exception groups.
    """
    # What the user may have mistyped is looked at before anything is made or taken.
    invitation = await _invitation(settings) if settings.bootstrap is not None else None
    model = await trio.to_thread.run_sync(open_model, settings.model) if settings.model is not None else None
    text = await trio.to_thread.run_sync(TextModel, model.folder) if model is not None else None
    with locked(settings.home):
        membership = invitation if invitation is not None else _new_network(settings.home)
        await Node(settings, membership, model, text, say).run(stop, task_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    """What lets this node into its network."""

    network: bytes
    token: str
    role: Role
    bootstraps: tuple[Bootstrap, ...]
    key: NetworkKey | None


async def _invitation(settings: NodeSettings) -> _Membership:
    """Membership by a join token. Raises AddressError, TokenError, Unreachable or Refused."""
    assert settings.bootstrap is not None
    text, bootstraps = await join_token(settings.bootstrap, settings.token)
    token = JoinToken.parse(text)
    if token.role is Role.CLIENT:
        raise TokenError("this is a client's token; a node joins with the worker line that the bootstrap printed")
    return _Membership(
        network=token.network, token=text, role=token.role, bootstraps=bootstraps or token.bootstraps, key=None
    )


def _new_network(home: Path) -> _Membership:
    """Membership of the network whose key lies in `home`, made on first use. Raises IdentityError."""
    key = NetworkKey.load_or_create(home)
    token = key.issue((), Role.ADMIN, time.time() + TOKEN_LIFETIME_S)
    return _Membership(network=key.public, token=token, role=Role.ADMIN, bootstraps=(), key=key)


@final
class Node:
    """One node. Constructed by `run_node`; opens no nursery before `run`."""

    def __init__(
        self,
        settings: NodeSettings,
        membership: _Membership,
        model: Model | None,
        text: TextModel | None,
        say: Say,
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._model = model
        self._text = text
        self._say = say
        self._hardware = hardware.probe()
        self._view = NetworkView()
        self._engine: messages.EngineAdvert | None = None
        self._news = trio.Event()  # set when the advert must not wait for its interval
        self._draining = False
        self._pending_hellos = 0
        self._worker: Worker | None = None
        self._gateway: Gateway | None = None
        self._nursery: trio.Nursery | None = None
        self._leader: tuple[PeerId, int] | None = None
        self._known: set[PeerId] = set()

    async def run(self, stop: trio.Event, task_status: trio.TaskStatus[Started]) -> None:
        """Join, serve, drain, leave."""
        from ..bootstrap.libp2p_host import Libp2pTransport  # 0.4 s and 80 MB that only a running node pays

        settings = self._settings
        identity = Identity.load_or_create(settings.home)
        announce = announced_address(settings.announce, os.environ, settings.listen, default_route_address)
        membership = self._membership
        transport = Libp2pTransport(identity, settings.listen, announce, self._on_data_socket)
        network = Network(
            transport=transport,
            identity=identity,
            token=membership.token,
            network_key_public=membership.network,
            role=membership.role,
            announce=announce,
            bootstraps=membership.bootstraps,
            rng=random.Random(),
            clock=time.time,
        )
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            async with network:
                address = network.address
                self._serve(network, address, nursery)
                task_status.started(
                    Started(peer=identity.peer_id, address=address, tokens=_tokens(membership, address, identity))
                )
                nursery.start_soon(self._advertise, network)
                nursery.start_soon(self._watch, network)
                await stop.wait()
                await self._drain(network)
                await network.leave()
            nursery.cancel_scope.cancel()

    # ---- serving ------------------------------------------------------------------------------------------

    def _serve(self, network: Network, address: Address, nursery: trio.Nursery) -> None:
        """Register what other nodes and clients may ask for, and start the engine."""
        network.handle("status", messages.StatusQuery, self._on_status(network), client=True)
        network.on_peer_lost(self._on_peer_lost)
        if self._model is None or self._text is None:
            return
        info = self._model.info

        async def wait_changed() -> None:
            await network.wait_changed(network.revision)

        worker = Worker(service=info.service, announce=address, notify=network.notify)
        gateway = Gateway(
            view=self._view,
            connections=Connections(network.request, network.notify, wait_changed),
            model=info,
            text=self._text,
            nursery=nursery,
        )
        self._worker, self._gateway = worker, gateway
        network.handle("decode.open", messages.DecodeOpen, worker.open_decode)
        network.handle("prefill.open", messages.PrefillOpen, worker.open_prefill)
        network.handle("generate", messages.Generate, gateway.generate, client=True)
        notices: dict[str, tuple[type[messages.Message], Callable[[PeerId, Role, Any], None]]] = {
            "request.stop": (messages.StopRequest, worker.stop_request),
            "transfer.stop": (messages.StopTransfer, worker.stop_transfer),
            "tokens": (messages.Tokens, gateway.on_tokens),
            "prefill.ended": (messages.PrefillEnded, gateway.on_prefill_ended),
            "generate.stop": (messages.StopRequest, gateway.stop),
        }
        for method, (body, handler) in notices.items():
            network.on_notice(method, body, handler, client=method == "generate.stop")
        supervisor = Supervisor(
            self._engine_config(self._model),
            worker=worker,
            log=self._settings.home / "engine.log",
            channel=self._settings.engine_channel,
            on_change=self._on_engine,
        )
        nursery.start_soon(supervisor.run)

    def _engine_config(self, model: Model) -> protocol.EngineConfig:
        knobs = self._settings.engine
        return protocol.EngineConfig(
            model=str(model.folder),
            dtype=knobs.dtype,
            max_model_len=knobs.max_model_len,
            kv_cache_mib=knobs.kv_cache_mib,
            max_batched_tokens=knobs.max_batched_tokens,
            threads=knobs.threads or max(1, self._hardware.cores - 1),
            log_file=str(self._settings.home / "engine.log"),
        )

    def _on_engine(self, engine: messages.EngineAdvert) -> None:
        self._engine = engine
        self._news.set()
        if engine.state == "ready":
            self._say(f"engine ready: {engine.engine} on {engine.device}, {engine.kv_tokens} tokens of KV cache")
        elif engine.detail:
            self._say(f"engine {engine.state}: {engine.detail}")

    def _on_peer_lost(self, peer: PeerId) -> None:
        if self._worker is not None:
            self._worker.gateway_lost(peer)
        if self._gateway is not None:
            self._gateway.peer_lost(peer)

    def _on_status(
        self, network: Network
    ) -> Callable[[PeerId, Role, messages.StatusQuery], Awaitable[messages.Status]]:
        async def status(peer: PeerId, role: Role, body: messages.StatusQuery) -> messages.Status:
            leader = network.coordinator
            return messages.Status(
                answered_by=network.peer_id,
                coordinator=leader[0] if leader else None,
                epoch=leader[1] if leader else 0,
                nodes=tuple(
                    messages.NodeStatus(
                        peer=member.peer_id,
                        role=member.role.value,
                        state=member.state.value,
                        address=str(member.address),
                        rtt_s=member.rtt_s,
                        advert=self._view.adverts.get(member.peer_id),
                    )
                    for member in network.members()
                ),
                plan=self._view.plan,
            )

        return status

    # ---- the data port --------------------------------------------------------------------------------------

    def _on_data_socket(self, connection: socket.socket, peeked: bytes) -> None:
        """A KV connection has arrived at the port, and its hello may take a while: this is the event loop."""
        if self._nursery is None or self._worker is None or self._pending_hellos >= MAX_PENDING_HELLOS:
            connection.close()
            return
        self._pending_hellos += 1
        self._nursery.start_soon(self._hand_over, connection, self._worker)

    async def _hand_over(self, connection: socket.socket, worker: Worker) -> None:
        transfer = b""
        try:
            with trio.move_on_after(HELLO_TIMEOUT_S):
                transfer = await wait_hello(connection)
        except (TransferError, OSError):
            transfer = b""  # whoever it was did not speak the protocol; a real sender reports the failure
        finally:
            self._pending_hellos -= 1
            if not transfer:
                connection.close()
        if transfer:
            worker.attach(transfer, connection)

    # ---- telling and listening --------------------------------------------------------------------------------

    async def _advertise(self, network: Network) -> None:
        """Publish the advert when it has changed: at once for news, else once per interval."""
        published: messages.Advert | None = None
        while True:
            advert = self._advert(network, published)
            if advert != published:
                published = advert
                self._publish(network, messages.ADVERT, msgspec.msgpack.encode(advert))
            with trio.move_on_after(ADVERT_INTERVAL_S):
                await self._news.wait()
            if self._news.is_set():
                self._news = trio.Event()

    def _advert(self, network: Network, before: messages.Advert | None) -> messages.Advert:
        known = before.rtt_s if before is not None else {}
        rtts: dict[str, float] = {}
        for member in network.members():
            if member.role is Role.CLIENT:
                continue
            rtt, old = member.rtt_s, known.get(member.peer_id)
            if rtt is not None:
                rtts[member.peer_id] = rtt if old is None or abs(rtt - old) > RTT_NEWS * old else old
        return messages.Advert(
            hardware=self._hardware,
            draining=self._draining,
            model=self._model.info if self._model is not None else None,
            engine=self._engine,
            stats=self._worker.stats if self._worker is not None else None,
            rtt_s=rtts,
        )

    async def _watch(self, network: Network) -> None:
        """Follow every change of membership, adverts and coordinator; coordinate when elected."""
        coordinator = Coordinator(network.peer_id, self._settings.codec)
        revision = -1
        while True:
            revision = await network.wait_changed(revision)
            self._view.update(network.entries(messages.ADVERT))
            self._note_members(network)
            leader = network.coordinator
            if leader != self._leader:
                self._leader = leader
                if leader is not None:
                    who = "this node" if leader[0] == network.peer_id else leader[0]
                    self._say(f"coordinator: {who} (epoch {leader[1]})")
            if leader is not None:
                payload = network.entries(messages.PLAN).get(leader[0])
                if payload is not None and self._view.consider_plan(leader[0], leader[1], payload):
                    self._say_plan(network.peer_id)
            plan = None if self._draining else coordinator.decide(self._view, leader)
            if plan is not None and leader is not None:
                payload = msgspec.msgpack.encode(plan)
                self._view.consider_plan(leader[0], leader[1], payload)  # our own word counts without its echo
                self._publish(network, messages.PLAN, payload)
                self._say_plan(network.peer_id)
            # Load reports come many times a second from many nodes; nothing here is as urgent as all of them.
            await trio.sleep(WATCH_INTERVAL_S)

    def _publish(self, network: Network, kind: str, payload: bytes) -> None:
        try:
            network.publish(kind, payload)
        except ValueError as error:  # too large to be gossiped: worth a word, not a node
            self._say(f"the {kind} was not published: {error}")

    def _note_members(self, network: Network) -> None:
        alive = {
            m.peer_id
            for m in network.members()
            if m.state is MemberState.ALIVE and m.role is not Role.CLIENT and m.peer_id != network.peer_id
        }
        for peer in sorted(alive - self._known):
            self._say(f"joined: {peer}")
        for peer in sorted(self._known - alive):
            self._say(f"gone: {peer}")
        self._known = alive

    def _say_plan(self, own: PeerId) -> None:
        plan = self._view.plan
        if plan is not None:
            phase = plan.phase_of(own)
            role = f"this node: {phase.value}" if phase is not None else "this node has no part in it"
            self._say(f"plan {plan.epoch}.{plan.version} for {plan.service}: {len(plan.replicas)} replicas; {role}")

    async def _drain(self, network: Network) -> None:
        """Take no new work, tell everyone, and wait for what is running."""
        self._draining = True
        self._news.set()
        for part in (self._worker, self._gateway):
            if part is not None:
                part.drain()
        parts = [part for part in (self._worker, self._gateway) if part is not None]
        if not all(part.idle for part in parts):
            self._say(f"draining: waiting up to {self._settings.drain_s:g} s for running requests")
        with trio.move_on_after(self._settings.drain_s):
            while not all(part.idle for part in parts):  # noqa: ASYNC110 (two rooms' worth of state, seconds at most)
                await trio.sleep(0.05)


async def wait_hello(connection: socket.socket) -> bytes:
    """The transfer id of a KV connection's hello, without a thread: strangers may connect and say nothing.

    Raises TransferError for what is no hello, OSError when the connection fails.
    """
    connection.setblocking(False)
    while True:
        await trio.lowlevel.wait_readable(connection)
        seen = len(connection.recv(HELLO_BYTES, socket.MSG_PEEK))
        if seen in (0, HELLO_BYTES):
            break
        await trio.sleep(HELLO_POLL_S)  # readable, but not all of it yet: the kernel has no word for that
    connection.setblocking(True)
    return read_hello(connection, HELLO_TIMEOUT_S)


def _tokens(membership: _Membership, address: Address, identity: Identity) -> dict[str, str]:
    """Join tokens of a new network, which name this node as the place to start from."""
    if membership.key is None:
        return {}
    here = (Bootstrap(address.host, address.port, identity.peer_id),)
    expires = time.time() + TOKEN_LIFETIME_S
    return {role.value: membership.key.issue(here, role, expires) for role in Role}


async def join_token(bootstrap: str, token: str | None) -> tuple[str, tuple[Bootstrap, ...]]:
    """Make sense of `--bootstrap` and `--token`: the token's text, and where to dial instead of what it names.

    `bootstrap` is a join token, or `host:port` with the token given apart. Raises AddressError, TokenError,
    Unreachable, Refused.
    """
    if bootstrap.startswith("p2p_"):
        JoinToken.parse(bootstrap)
        return bootstrap, ()
    try:
        address = parse_address(bootstrap)
    except AddressError as error:
        raise AddressError(f"bootstrap: {error}") from error
    if token is None:
        await _probe(address)
        raise Refused(
            f"bootstrap {address}: this network wants a token; use the whole line that `p2pserve bootstrap` printed"
        )
    named = JoinToken.parse(token).bootstraps
    if not named:
        raise TokenError("the join token names no bootstrap, so nobody can be authenticated at that address")
    return token, tuple(Bootstrap(address.host, address.port, each.peer_id) for each in named)


async def _probe(address: Address) -> None:
    """Tell an address where nobody listens from one where a token is missing."""
    reason = "no answer within 5 s"
    try:
        with trio.move_on_after(5):
            stream = await trio.open_tcp_stream(address.host, address.port)
            await stream.aclose()
            return
    except OSError as error:
        reason = str(error)
    raise Unreachable(f"bootstrap {address}: cannot be reached ({reason}); check the address and that it is up")
