"""Measures this node's links: round trips as the control streams see them, bursts when `kvtransport.probe` says so."""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import trio

from ...bootstrap import NetworkError, PeerId, Role
from ...bootstrap.methods import Messenger
from ...kvtransport.errors import TicketError, TransferError
from ...kvtransport.probing.burst import BurstGate, dial_burst, receive_burst, send_burst
from ...kvtransport.probing.burst_ticket import BurstTicket, issue_burst, parse_hello
from ...kvtransport.probing.estimates import BurstSample
from ...kvtransport.probing.probe import Activity, BurstRequest, PeerLink, ProbeScheduler, ProbeStatistics
from .. import messages
from ..methods import PROBE_OPEN
from ..observing.event_log import Record, ignore
from ..observing.values import EventKind
from ..settings import WAN, NodeTuning
from .link_knowledge import LinkKnowledge
from .reach import PathTo


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another node as membership knows it now. `rtt_s`: of its control stream, None where there is none."""

    peer: PeerId
    rtt_s: float | None


class BurstCarrier:
    """Carries bursts over real connections, on threads; `path_to` says how a member is dialled, `on_stuck` hears of one
    to whom connections were made and no burst got through. A node that stops does not wait for bytes that nobody wants
    any more."""

    def __init__(self, path_to: PathTo, on_stuck: Callable[[PeerId], None] = lambda peer: None) -> None:
        self._path_to = path_to
        self._on_stuck = on_stuck

    async def send(self, ticket: BurstTicket, target: PeerId, dial_s: float) -> BurstSample:
        """Dial a member and send it a burst; returns what it has measured. Raises TransferError or NetworkError."""
        path = await self._path_to(target)

        is_dialled = False

        def run() -> BurstSample:
            nonlocal is_dialled
            with dial_burst(ticket, path, dial_s) as ends:
                is_dialled = True
                return send_burst(ends)

        try:
            return await trio.to_thread.run_sync(run, abandon_on_cancel=True)
        except TransferError:
            if is_dialled:
                self._on_stuck(target)
            raise

    async def receive(self, gate: BurstGate) -> BurstSample:
        """Wait for a burst and take it. Raises TransferError."""

        def run() -> BurstSample:
            with gate.wait(gate.ticket.lease_s) as ends:
                return receive_burst(ends)

        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


@final
class Prober:
    """One per node. `neighbours` lists the other nodes, `activity` says what a burst would disturb."""

    def __init__(
        self,
        knowledge: LinkKnowledge,
        *,
        messenger: Messenger,
        carrier: BurstCarrier,
        neighbours: Callable[[], list[Neighbour]],
        activity: Callable[[], Activity],
        nursery: trio.Nursery,
        rng: random.Random,
        tuning: NodeTuning = WAN,
    ) -> None:
        self._carrier = carrier
        self._knowledge = knowledge
        self._messenger = messenger
        self._neighbours = neighbours
        self._activity = activity
        self._nursery = nursery
        self._rng = rng
        self._tuning = tuning
        self._scheduler = ProbeScheduler(knowledge.own, knowledge.settings.site, rng, now=trio.current_time())
        self._gates: dict[bytes, BurstGate] = {}
        self.record: Record = ignore
        """Tells the node's log."""
        messenger.handle(PROBE_OPEN, self.on_open)

    def __repr__(self) -> str:
        return f"<Prober {self._scheduler}>"

    def statistics(self) -> ProbeStatistics:
        """Counts since the start."""
        return self._scheduler.statistics()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._step()
            # Nodes in step would all ask at once, each reserved for its own burst, and refuse each other for ever.
            await trio.sleep(self._tuning.probe_interval_s * self._rng.uniform(0.5, 1.5))

    async def on_open(self, peer: PeerId, role: Role, body: messages.ProbeOpen) -> messages.ProbeOpened:
        """A node wants to send a burst here."""
        now = trio.current_time()
        price = self._knowledge.settings.box.down_usd_per_gb
        refusal = self._scheduler.on_asked(body.burst, peer, self._activity(), usd_per_gb=price, now=now)
        if refusal is not None:
            return messages.ProbeOpened(refused=refusal.reason.value, retry_s=refusal.retry_s)
        burst = body.burst
        rtt = self._knowledge.estimator(peer).figures(now).rtt_s
        ticket = issue_burst(
            streams=burst.streams,
            seconds=burst.seconds,
            max_bytes=burst.max_bytes,
            rtt_s=rtt,
            random=secrets.token_bytes,
        )
        gate = self._gates[ticket.burst] = BurstGate(ticket)
        self._nursery.start_soon(self._receive, peer, gate)
        return messages.ProbeOpened(ticket=ticket)

    def attach(self, hello: bytes, connection: socket.socket) -> bool:
        """Take an accepted connection over, if it belongs to a burst that is expected. Raises TransferError."""
        burst = parse_hello(hello)
        gate = self._gates.get(burst.burst)
        if gate is not None:
            gate.attach(connection, burst)
        return gate is not None

    def _step(self) -> None:
        now = trio.current_time()
        found = {neighbour.peer: neighbour for neighbour in self._neighbours()}
        price = self._knowledge.settings.box.up_usd_per_gb
        self._knowledge.fill_in(found, now)
        links = [
            PeerLink(peer, self._knowledge.site_of(peer), self._knowledge.estimator(peer).stable_figures(now), price)
            for peer in found
        ]
        self._scheduler.set_peers(links, now=now)
        for peer in self._knowledge.take_measured():
            self._scheduler.on_measured(peer, now=now)
        step = self._scheduler.step(self._activity(), now=now)
        for name in step.pings:
            # In a large network there is no session with most members, so silence says nothing of the link.
            rtt = found[PeerId(name)].rtt_s
            if rtt is not None:
                self._knowledge.estimator(PeerId(name)).on_ping(rtt, now=now)
                self._scheduler.on_ping(name, True, now=now)
        if step.burst is not None:
            self._nursery.start_soon(self._send, found[PeerId(step.burst.peer)], step.burst)

    async def _send(self, target: Neighbour, burst: BurstRequest) -> None:
        try:
            opened = await self._messenger.request(
                target.peer, PROBE_OPEN, messages.ProbeOpen(burst=burst), self._tuning.ask_s
            )
            if opened.ticket is None:
                self._scheduler.on_refused(target.peer, opened.retry_s, now=trio.current_time())
                return
            _check_ticket(opened.ticket, burst)
            sample = await self._carrier.send(opened.ticket, target.peer, self._tuning.ask_s)
        except NetworkError:
            self._scheduler.on_burst_done(target.peer, 0, succeeded=False, now=trio.current_time())
            return
        except TransferError as error:
            now = trio.current_time()
            self.record(EventKind.LINK_FAILED, peer=target.peer, why=str(error))
            self._knowledge.estimator(target.peer).on_unreachable(now=now)
            self._scheduler.on_burst_done(target.peer, 0, succeeded=False, now=now)
            return
        now = trio.current_time()
        estimator = self._knowledge.estimator(target.peer)
        estimator.on_burst(sample, now=now)
        rtt_s = estimator.figures(now).rtt_s
        self.record(EventKind.LINK_MEASURED, peer=target.peer, gbps=sample.gbps, streams=sample.streams, rtt_s=rtt_s)
        self._scheduler.on_burst_done(target.peer, sample.bytes, succeeded=sample.gbps > 0.0, now=now)

    async def _receive(self, peer: PeerId, gate: BurstGate) -> None:
        size, has_rate = 0, False
        try:
            sample = await self._carrier.receive(gate)
            size, has_rate = sample.bytes, sample.gbps > 0.0
        except TransferError:
            pass  # the sender has gone; it reports the failure to its own scheduler
        finally:
            del self._gates[gate.ticket.burst]
            gate.close()
            self._scheduler.on_burst_done(peer, size, succeeded=has_rate, now=trio.current_time())


def _check_ticket(ticket: BurstTicket, burst: BurstRequest) -> None:
    """A burst is paid for by its sender too: it is never larger than what was asked for. Raises TicketError."""
    if ticket.max_bytes > burst.max_bytes or ticket.streams > burst.streams or ticket.seconds > burst.seconds:
        raise TicketError(f"asked for {burst}, and was given {ticket}")
