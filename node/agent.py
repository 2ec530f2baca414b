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
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

import msgspec
import trio

from ..bootstrap import Address, Identity, PeerId, Role, announced_address
from ..bootstrap.address_book import AddressBook
from ..bootstrap.addresses import default_route_address
from ..bootstrap.members.states import Member, MemberState
from ..bootstrap.network import Network
from ..coordinator import Phase, PlanError, RoutingSettings
from ..kvtransport.link.dialling import DialPath as KvPath
from ..kvtransport.link.relay import Relay
from ..kvtransport.probing.probe import Activity
from . import messages, methods
from .box import hardware
from .box.home import NodeError, leave_node, locked
from .coordination import QUIET_S, Coordinator
from .engine.backend import ServedModel
from .engine.backends import find_backend
from .joining import Invitation, accept, new_network, tokens
from .links.data_port import DataPort, RelayDesk
from .links.kv_ways import KvWays, LinkSettings
from .links.prober import Neighbour, Prober
from .replica.hosting import EngineSettings, Host, describe_length, engine_config
from .requests.gateway import Gateway
from .view import NetworkView

__all__ = ["EngineSettings", "NodeError", "NodeSettings", "Started", "leave_node", "run_node"]

ADVERT_INTERVAL_S = 1.0
WATCH_INTERVAL_S = 0.05
LINKS_INTERVAL_S = 2.0
PLANNING_S = 5.0  # what is best by then is the plan
RTT_NEWS = 0.25  # a round trip is worth telling again when it has moved by this fraction

Say = Callable[[str], None]


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
    ways: LinkSettings = field(default_factory=LinkSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    drain_s: float = 30.0
    phase: Phase | None = None  # what the box is to do, whatever would be best
    usd_per_hour: float = 0.0
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

    Raises NodeError, ModelError, GpuError, EngineError or NetworkError, each with one line for the user; since several
    tasks run, they may come inside exception groups.
    """
    # What the user may have mistyped is looked at before anything is made or taken.
    invitation = await accept(settings.bootstrap, settings.token) if settings.bootstrap is not None else None
    backend = find_backend(settings.engine.backend)
    found = backend.hardware(hardware.probe(), settings.engine)
    served: ServedModel | None = None
    if settings.model is not None:
        served = await trio.to_thread.run_sync(backend.inspect, settings.model, found, settings.engine)
    with locked(settings.home):
        membership = invitation if invitation is not None else new_network(settings.home)
        await Node(settings, membership, found, served, say).run(stop, task_status)


@final
class Node:
    """One node. Constructed by `run_node`; opens no nursery before `run`."""

    def __init__(
        self,
        settings: NodeSettings,
        membership: Invitation,
        found: hardware.Hardware,
        served: ServedModel | None,
        say: Say,
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._hardware = found
        self._say = say
        self._served = served
        self._view = NetworkView()
        self._engine: messages.EngineAdvert | None = None
        self._news = trio.Event()  # set when the advert must not wait for its interval
        self._looked = trio.Event()  # set when the view of the network is another
        self._draining = False
        self._port: DataPort | None = None
        self._ways: KvWays | None = None
        self._desk: RelayDesk | None = None
        self._host: Host | None = None
        self._gateway: Gateway | None = None
        self._leader: tuple[PeerId, int] | None = None
        self._known: set[PeerId] = set()

    async def run(self, stop: trio.Event, task_status: trio.TaskStatus[Started]) -> None:
        """Join, serve, drain, leave."""
        from ..bootstrap.streams.libp2p_host import Libp2pTransport  # 0.4 s and 80 MB that only a running node pays

        settings = self._settings
        identity = Identity.load_or_create(settings.home)
        book = AddressBook(settings.home, self._membership.network)
        remembered = await trio.to_thread.run_sync(book.load)
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
            remembered=remembered,
            book=book,
            rng=random.Random(),
            clock=time.time,
        )
        async with trio.open_nursery() as nursery:
            async with network:
                address = network.address
                self._serve(network, address, nursery)
                task_status.started(
                    Started(
                        peer=identity.peer_id, address=address, tokens=tokens(membership, address, identity, remembered)
                    )
                )
                nursery.start_soon(self._advertise, network)
                nursery.start_soon(self._tell_links, network)
                nursery.start_soon(self._watch, network)
                nursery.start_soon(self._coordinate, network)
                await stop.wait()
                await self._drain(network)
                await network.leave()
            nursery.cancel_scope.cancel()

    # ---- serving ------------------------------------------------------------------------------------------

    def _serve(self, network: Network, address: Address, nursery: trio.Nursery) -> None:
        """Register what other nodes and clients may ask for, and start the engine."""
        network.handle(methods.STATUS, self._on_status(network))
        network.on_peer_lost(self._on_peer_lost)
        ways = self._ways = self._measure(network, nursery)
        served = self._served
        if served is None:
            return
        ways.serve(served.model.info)

        assert self._desk is not None  # made with the ways
        log = self._settings.home / "engine.log"
        config = engine_config(served, self._hardware, self._settings.engine, log)
        if (shortened := describe_length(served, self._settings.engine)) is not None:
            self._say(shortened)
        host = self._host = Host(served, config, network=network, ways=ways, where=self._desk.address_of)
        gateway = self._gateway = Gateway(
            view=self._view,
            messenger=network,
            model=served.model.info,
            text=served.text,
            nursery=nursery,
            routing=self._settings.routing,
        )
        network.handle(methods.GENERATE, gateway.generate)
        network.handle(methods.GENERATE_CONTINUE, gateway.continue_answer)
        network.on_notice(methods.GENERATE_STOP, gateway.stop)
        network.on_notice(methods.TOKENS, gateway.on_tokens)
        network.on_notice(methods.PREFILL_ENDED, gateway.on_prefill_ended)

        nursery.start_soon(partial(host.run, log, self._settings.engine_channel, self._on_engine))

    def _measure(self, network: Network, nursery: trio.Nursery) -> KvWays:
        """What every node does for the others' KV, with an engine or without: measure links, forward, sort sockets."""
        settings = self._settings.ways
        relay = Relay()
        nursery.start_soon(_close_in_the_end, relay)
        desk = self._desk = RelayDesk(relay, settings.box, network)

        def set_paths(link: bytes, paths: tuple[KvPath, ...]) -> None:
            if self._host is not None:
                self._host.worker.set_paths(link, paths)

        ways = KvWays(
            messenger=network,
            settings=settings,
            where=desk.address_of,
            set_paths=set_paths,
            nursery=nursery,
        )
        prober = Prober(
            ways,
            messenger=network,
            neighbours=lambda: [
                Neighbour(member.peer_id, member.address, member.rtt_s)
                for member in _others(network.peer_id, network.members(), MemberState.ALIVE)
            ],
            activity=lambda: Activity(
                transfers=ways.transfers, engine_busy=self._host is not None and not self._host.worker.idle
            ),
            nursery=nursery,
            rng=random.Random(),
        )
        self._port = DataPort(
            nursery, relay=relay, prober=prober, worker=lambda: self._host.worker if self._host else None
        )
        nursery.start_soon(prober.run)
        return ways

    def _on_engine(self, engine: messages.EngineAdvert) -> None:
        before, self._engine = self._engine, engine
        self._news.set()
        if engine.state == "ready" and not engine.kv_tokens:  # a stage: its head has the scheduler
            self._say("stage ready: the head of its replica serves requests")
        elif engine.state == "ready":
            self._say(f"engine ready: {engine.engine} on {engine.device}, {engine.kv_tokens} tokens of KV cache")
        elif engine.detail and (engine.state != "loading" or before is None or before.state != "loading"):
            self._say(f"engine {engine.state}: {engine.detail}")

    def _on_peer_lost(self, peer: PeerId) -> None:
        if self._host is not None:
            self._host.worker.peer_lost(peer)
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
                        links=self._view.links_told.get(member.peer_id),
                    )
                    for member in network.members()
                ),
                plan=self._view.plan,
            )

        return status

    # ---- the data port --------------------------------------------------------------------------------------

    def _on_data_socket(self, connection: socket.socket, head: bytes) -> None:
        """A bulk connection has arrived at the port: this is the event loop."""
        if self._port is None:
            connection.close()
        else:
            self._port.accept(connection, head)

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
            model=self._served.model.info if self._served is not None else None,
            engine=self._engine,
            stats=self._host.worker.stats if self._host is not None else None,
            rtt_s=rtts,
            fits=self._host.share.layers if self._host is not None else 0,
            tp=self._host.share.tp if self._host is not None else 1,
            profile=self._host.worker.learner.profile if self._host is not None else None,
            demand=self._gateway.demand if self._gateway is not None else None,
            phase=self._settings.phase,
            usd_per_hour=self._settings.usd_per_hour,
        )

    async def _tell_links(self, network: Network) -> None:
        """Publish what this node knows of its links, when it has changed and not often: it is for choosing paths."""
        published: messages.LinkTable | None = None
        while True:
            await trio.sleep(LINKS_INTERVAL_S)
            if self._ways is None:
                continue
            table = self._ways.table(published)
            if table != published:
                published = table
                self._publish(network, messages.LINKS, msgspec.msgpack.encode(table))

    async def _watch(self, network: Network) -> None:
        """Follow every change of membership, adverts, plan and coordinator."""
        revision = -1
        considered: tuple[tuple[PeerId, int], bytes] | None = None
        while True:
            revision = await network.wait_changed(revision)
            members = network.members()
            self._view.update(network.entries(messages.ADVERT))
            self._view.update_links(network.entries(messages.LINKS))
            self._note_addresses(network.peer_id, members)
            self._note_members(network.peer_id, members)
            leader = network.coordinator
            if leader != self._leader:
                self._leader = leader
                if leader is not None:
                    who = "this node" if leader[0] == network.peer_id else leader[0]
                    self._say(f"coordinator: {who} (epoch {leader[1]})")
            if leader is not None:
                payload = network.entries(messages.PLAN).get(leader[0])
                if payload is not None and (leader, payload) != considered:
                    considered = leader, payload
                    if self._view.consider_plan(leader[0], leader[1], payload):
                        self._say_plan(network.peer_id)
            self._looked.set()
            if self._gateway is not None:
                self._gateway.network_changed()
            if self._host is not None and not self._draining:
                self._host.follow(self._view.plan)
            # Load reports come many times a second from many nodes; nothing here is as urgent as all of them.
            await trio.sleep(WATCH_INTERVAL_S)

    async def _coordinate(self, network: Network) -> None:
        """Plan while this node is the elected coordinator, beside everything else: a plan may take a second."""
        coordinator = Coordinator(network.peer_id, self._settings.codec)
        while True:
            task = coordinator.next(self._view, self._leader, trio.current_time()) if not self._draining else None
            if task is None:
                self._looked = trio.Event()
                with trio.move_on_after(QUIET_S):
                    await self._looked.wait()
                continue
            end = time.monotonic() + PLANNING_S
            try:
                found = await trio.to_thread.run_sync(
                    task.run, lambda end=end: time.monotonic() > end, abandon_on_cancel=True
                )
            except PlanError as error:
                self._say(f"no new plan for {task.service}: {error}")
                continue
            plan = coordinator.settle(task, found, self._view, self._leader)
            if plan is not None:
                payload = msgspec.msgpack.encode(plan)
                self._view.consider_plan(network.peer_id, plan.epoch, payload)  # our own word counts without its echo
                self._publish(network, messages.PLAN, payload)
                self._say_plan(network.peer_id)
                if self._gateway is not None:
                    self._gateway.network_changed()
                if self._host is not None and not self._draining:
                    self._host.follow(plan)

    def _publish(self, network: Network, kind: str, payload: bytes) -> None:
        try:
            network.publish(kind, payload)
        except ValueError as error:  # too large to be gossiped: worth a word, not a node
            self._say(f"the {kind} was not published: {error}")

    def _note_addresses(self, own: PeerId, members: tuple[Member, ...]) -> None:
        """Whatever concerns KV finds members' addresses and engines as of now."""
        # One that is merely suspected still takes KV: the plan says who is used, and a transfer shows whether it works.
        present = _others(own, members, MemberState.ALIVE, MemberState.SUSPECT)
        others = {member.peer_id: member.address for member in present}
        if self._desk is not None:
            self._desk.know(others)
        if self._ways is not None:
            self._ways.learn(self._view.links_told, {peer: self._view.starts(peer) for peer in others})

    def _note_members(self, own: PeerId, members: tuple[Member, ...]) -> None:
        alive = {
            m.peer_id
            for m in members
            if m.state is MemberState.ALIVE and m.role is not Role.CLIENT and m.peer_id != own
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
        worker = self._host.worker if self._host is not None else None
        parts = [part for part in (worker, self._gateway) if part is not None]
        for part in parts:
            part.drain()
        if not all(part.idle for part in parts):
            self._say(f"draining: waiting up to {self._settings.drain_s:g} s for running requests")
        with trio.move_on_after(self._settings.drain_s):
            while not all(part.idle for part in parts):  # noqa: ASYNC110 (two rooms' worth of state, seconds at most)
                await trio.sleep(0.05)


def _others(own: PeerId, members: Iterable[Member], *states: MemberState) -> list[Member]:
    """The other nodes in these states that have an address."""
    return [
        member
        for member in members
        if member.peer_id != own and member.role is not Role.CLIENT and member.state in states and member.address.port
    ]


async def _close_in_the_end(relay: Relay) -> None:
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(relay.close)
