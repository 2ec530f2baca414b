"""Both ends of a link, their machines and channels, over connections that exist only in virtual
time: what tests of the protocol and of schedules run on. No socket, no clock, no thread.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from p2pserve.kvtransport.errors import KVProtocolError
from p2pserve.kvtransport.link.receiving import ReceiveMachine
from p2pserve.kvtransport.link.sending import SendMachine
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.transfers import (
    CloseConnection,
    EndState,
    FrameReady,
    LinkEvent,
    Released,
    TransferComplete,
    TransferEnded,
)
from p2pserve.kvtransport.wire.channel import Channel, LinkHello, LinkRole
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.signals import Chunk, LinkGreeting, Signal, frame_of
from p2pserve.kvtransport.wire.tickets import LinkTicket

_STEP_S = 0.001


@dataclass(slots=True)
class SimulatedWire:
    """One connection: `rate` bytes per second in each direction, `delay` seconds one direction.
    While `stalled` nothing moves."""

    label: str
    rate: float
    delay: float
    channels: dict[LinkRole, Channel]
    numbers: dict[LinkRole, int] = field(default_factory=dict)
    flying: dict[LinkRole, deque[tuple[float, bytes]]] = field(default_factory=dict)  # by who sent it
    allowance: dict[LinkRole, float] = field(default_factory=dict)
    alive: bool = True
    stalled: bool = False


class SimulatedLink:
    """A `SendMachine` and a `ReceiveMachine`. `run` moves time on; what comes out is collected by
    transfer."""

    def __init__(self, seed: int = 0, settings: LinkSettings | None = None, lease_s: float = 60.0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.ticket = LinkTicket(self.random.randbytes(16), self.random.randbytes(32), lease_s)
        settings = LinkSettings(chunk_bytes=4096) if settings is None else settings
        self.sender = SendMachine(settings, lease_s, self.now)
        self.receiver = ReceiveMachine(settings, lease_s, self.now)
        self.wires: list[SimulatedWire] = []
        self.arrived: dict[bytes, list[tuple[KVFrame, bytes]]] = {}
        self.complete: set[bytes] = set()
        self.ends: dict[tuple[LinkRole, bytes], list[EndState]] = {}
        self.released = 0
        self.acknowledge = True
        self.consume = True

    # ---- connections ----------------------------------------------------------------------------------------

    def connect(self, label: str = "direct", *, rate: float = 1e7, delay: float = 0.002) -> SimulatedWire:
        """A new connection, its handshake behind it. The end that dials is drawn."""
        dials = self.random.choice(list(LinkRole))
        accepts = LinkRole(1 - dials)
        hello = LinkHello(self.ticket.link, self.random.randbytes(16), dials)
        first = Channel(self.ticket, dials, hello.nonce, label=label)
        second = Channel(self.ticket, accepts, self.random.randbytes(16), hello=hello)
        _pour(first, second.begin_handshake())
        first.next_signal()
        _pour(second, bytes(first.seal(LinkGreeting(label))))
        second.next_signal()
        wire = SimulatedWire(label, rate, delay, {dials: first, accepts: second})
        for role in LinkRole:
            wire.numbers[role] = self.machine(role).add_connection(label, self.now)
            wire.flying[role] = deque()
            wire.allowance[role] = 0.0
        self.wires.append(wire)
        return wire

    def kill(self, wire: SimulatedWire) -> None:
        """The connection breaks; both ends notice at once, and what was in flight is gone."""
        if wire.alive:
            wire.alive = False
            self.wires.remove(wire)
            for role in LinkRole:
                self.machine(role).remove_connection(wire.numbers[role], self.now)

    def machine(self, role: LinkRole) -> SendMachine | ReceiveMachine:
        """That end's machine."""
        return self.sender if role is LinkRole.SENDER else self.receiver

    # ---- time -----------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        until = self.now + seconds
        while self.now < until:
            self.step()

    def run_until_ended(self, transfers: int, limit_s: float = 120.0) -> None:
        """Until so many transfers have ended at both ends."""
        until = self.now + limit_s
        while self.now < until and len(self.ends) < 2 * transfers:
            self.step()

    def step(self) -> None:
        """One millisecond."""
        self.now += _STEP_S
        for machine in (self.sender, self.receiver):
            machine.tick(self.now)
        self.settle()
        for wire in self.random.sample(self.wires, len(self.wires)):
            for role in LinkRole:
                if wire.alive and not wire.stalled:
                    self._transmit(wire, role)
                    self._deliver(wire, role)
        self.settle()

    def settle(self) -> None:
        """Act on the events of both machines as a rim would."""
        while events := [*self._tagged(LinkRole.SENDER), *self._tagged(LinkRole.RECEIVER)]:
            for role, event in events:
                self._handle(role, event)

    def check(self) -> None:
        """Invariants of both machines; one end for each transfer, frames as they were sent."""
        self.sender.check_integrity()
        self.receiver.check_integrity()
        for key, states in self.ends.items():
            if len(states) != 1:
                raise AssertionError(f"{key} ended {len(states)} times: {states}")
        for (role, transfer), states in self.ends.items():
            there = self.ends.get((LinkRole.RECEIVER, transfer))
            if (
                role is LinkRole.SENDER
                and states[0].name == "delivered"
                and (not there or there[0].name != "delivered")
            ):
                raise AssertionError(f"{transfer.hex()} is delivered at its sender and {there} at its receiver")

    # ---- inside ---------------------------------------------------------------------------------------------

    def _tagged(self, role: LinkRole) -> list[tuple[LinkRole, LinkEvent]]:
        return [(role, event) for event in self.machine(role).take_events()]

    def _handle(self, role: LinkRole, event: LinkEvent) -> None:
        match event:
            case TransferEnded(transfer, state):
                self.ends.setdefault((role, transfer), []).append(state)
            case FrameReady(transfer, index, header, payload):
                frame = frame_of(header, payload)
                self.arrived.setdefault(transfer, []).append((frame, bytes(payload)))
                if self.consume:
                    self.receiver.consume(transfer, index)
            case TransferComplete(transfer):
                self.complete.add(transfer)
                if self.acknowledge:
                    self.receiver.acknowledge(transfer)
            case Released():
                self.released += 1
            case CloseConnection(number):
                for wire in [wire for wire in self.wires if wire.numbers[role] == number]:
                    self.kill(wire)

    def _transmit(self, wire: SimulatedWire, role: LinkRole) -> None:
        """Seal as many records as the rate allows in one step, at least one when idle."""
        wire.allowance[role] = min(wire.allowance[role] + wire.rate * _STEP_S, max(wire.rate * _STEP_S, 1.0))
        machine, channel = self.machine(role), wire.channels[role]
        while wire.allowance[role] > 0:
            signal = machine.next_signal(wire.numbers[role], self.now)
            if signal is None:
                return
            payload = self.sender.payload(wire.numbers[role]) if isinstance(signal, Chunk) else None
            data = bytes(channel.seal(signal, payload))
            wire.allowance[role] -= len(data)
            wire.flying[role].append((self.now + wire.delay + len(data) / wire.rate, data))

    def _deliver(self, wire: SimulatedWire, role: LinkRole) -> None:
        """What `role` has sent and is due arrives at the other end, in pieces."""
        there = LinkRole(1 - role)
        while wire.alive and wire.flying[role] and wire.flying[role][0][0] <= self.now:
            data = memoryview(wire.flying[role].popleft()[1])
            while data and wire.alive:
                data_read = data[: self.random.randint(1, 8192)]
                data_read = data_read[: len(wire.channels[there].space())]
                data = data[len(data_read) :]
                self._arrive(wire, there, data_read)

    def _arrive(self, wire: SimulatedWire, role: LinkRole, data_read: memoryview) -> None:
        channel, machine = wire.channels[role], self.machine(role)
        wire.channels[role].space()[: len(data_read)] = data_read
        channel.note_received(len(data_read))
        machine.note_heard(wire.numbers[role], len(data_read), self.now)
        try:
            while (signal := channel.next_signal()) is not None:
                self._signal(wire, role, signal)
        except KVProtocolError as error:
            if not channel.is_damaged:
                machine.end_for_violation(error)
            self.kill(wire)

    def _signal(self, wire: SimulatedWire, role: LinkRole, signal: Signal) -> None:
        if not isinstance(signal, Chunk):
            self.machine(role).receive(wire.numbers[role], signal, self.now)
            return
        if role is LinkRole.SENDER:
            raise KVProtocolError("a chunk does not come from a receiver")
        placement = self.receiver.place_chunk(wire.numbers[role], signal, self.now)
        if placement is None:
            wire.channels[role].open_payload(bytearray(signal.length))
            self.receiver.skip_chunk(wire.numbers[role])
            return
        try:
            wire.channels[role].open_payload(placement.into)
        except KVProtocolError:
            self.receiver.reject_chunk(placement)
            raise
        self.receiver.finish_chunk(wire.numbers[role], placement, self.now)


def _pour(channel: Channel, data: bytes) -> None:
    while data:
        space = channel.space()
        count = min(len(space), len(data))
        space[:count] = data[:count]
        channel.note_received(count)
        data = data[count:]
        if data:
            channel.next_signal()
