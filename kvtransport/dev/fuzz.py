"""Mutated inputs against both machines of a link and its channels.

    python -m p2pserve.kvtransport.fuzz --inputs 1000000 --seed 1 [--format json]

Two kinds of attacker. *On the path*: records of an honest session are flipped, cut, joined,
replayed, reordered and strewn with noise before a channel reads them; what comes out must be what
was sent, or nothing. *The peer itself*: heads under the right key, mutated by bit or by field,
replayed, out of turn, or made up; a machine may refuse with a ProtocolError, and nothing else.
After each session every invariant is checked: one end state for each transfer, sums that agree,
memory within its bound. Only mutated inputs are counted; the honest ones that bring a session to an
interesting state are counted apart.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import KVProtocolError
from ..link.machine import LinkMachine
from ..link.receiving import MIN_WINDOW_BYTES, ReceiveMachine
from ..link.sending import SendMachine
from ..link.settings import LinkSettings
from ..link.transfers import FrameReady, TransferComplete, TransferEnded
from ..wire.channel import Channel, LinkHello, LinkRole
from ..wire.frames import MAX_PAYLOAD_BYTES, KVFrame
from ..wire.signals import (
    CHUNK_KIND,
    HEAD_BYTES,
    MAX_CHUNK_BYTES,
    Abort,
    Ack,
    Chunk,
    Credit,
    End,
    Goodbye,
    LinkGreeting,
    Ping,
    Pong,
    Result,
    Signal,
    pack,
    payload_bytes,
    unpack,
)
from ..wire.tickets import LinkTicket

_SETTINGS = LinkSettings(chunk_bytes=4096)
_KEYS = tuple(bytes([n]) * 16 for n in (1, 2, 3))
_STRANGE = b"\xfe" * 16
_EDGES = (0, 1, 2, 15, 16, 255, 4095, 4096, 4097, 65535, (1 << 20) - 1, 1 << 20, MAX_PAYLOAD_BYTES, (1 << 32) - 1)
_SCRATCH = memoryview(bytearray(MAX_PAYLOAD_BYTES))
_HELD_PER_TRANSFER = MIN_WINDOW_BYTES + 2 * (MAX_PAYLOAD_BYTES + 1024)
_MUTATED_SHARE = 0.6
_PATH_SHARE = 0.5
_END_SHARE = 0.05
_SESSION_INPUTS = 40


@dataclass(slots=True)
class FuzzReport:
    """What a run has done. `refused`: inputs answered with a ProtocolError."""

    inputs: int = 0
    honest_inputs: int = 0
    sessions: int = 0
    refused: int = 0
    transfers_delivered: int = 0
    transfers_failed: int = 0
    by_mutation: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        by_mutation = dict(sorted(self.by_mutation.items()))
        rate = round(self.inputs / max(self.seconds, 1e-9))
        return counts | {"by_mutation": by_mutation, "seconds": round(self.seconds, 1), "inputs_per_s": rate}


def fuzz(inputs: int, seed: int, progress: Callable[[int], None] | None = None) -> FuzzReport:
    """Read so many mutated inputs. Any exception but ProtocolError, or broken invariant, is raised."""
    rng = random.Random(seed)
    report = FuzzReport()
    began = time.monotonic()
    said = 0
    while report.inputs < inputs:
        if rng.random() < _PATH_SHARE:
            _attack_path(rng, report)
        else:
            _PeerSession(rng, report).run()
        report.sessions += 1
        if progress is not None and report.inputs - said >= 100_000:
            said = report.inputs
            progress(said)
    report.seconds = time.monotonic() - began
    return report


# ---- the peer itself --------------------------------------------------------------------------------------------


class _PeerSession:
    """Both machines, honest to each other but for what is mutated between them."""

    def __init__(self, rng: random.Random, report: FuzzReport) -> None:
        self.rng = rng
        self.report = report
        self.now = 0.0
        self.sender = SendMachine(_SETTINGS, 60.0, 0.0)
        self.receiver = ReceiveMachine(_SETTINGS, 60.0, 0.0, lambda size: _SCRATCH[:size])
        self.ends: Counter[tuple[LinkRole, bytes]] = Counter()
        self.heard: list[tuple[bytes, bytes]] = []
        self.numbers = {role: [self.machine(role).add_connection("direct", 0.0) for _ in range(2)] for role in LinkRole}
        for key in _KEYS[: rng.randint(1, 3)]:
            self.receiver.expect(key, 50.0, 0.0)
            self.receiver.grant(key, MIN_WINDOW_BYTES * rng.randint(1, 2))
            self.sender.open(key, 50.0, 0.0)
            for layer in range(rng.randint(0, 3)):
                self.sender.push(key, KVFrame(layer, 0, 1, 0, 1, 0, 0, 64, _SCRATCH[: rng.randint(1, 20_000)]), 0.0)
            self.sender.finish(key, 1)

    def machine(self, role: LinkRole) -> LinkMachine[Any]:
        return self.sender if role is LinkRole.SENDER else self.receiver

    def run(self) -> None:
        rng = self.rng
        for _ in range(_SESSION_INPUTS):
            self.now += rng.choice((0.0, 0.0, 0.01, 1.2))
            role = LinkRole(rng.random() < 0.5)
            there = LinkRole(1 - role)
            at = rng.randrange(2)
            signal = self.machine(role).next_signal(self.numbers[role][at], self.now)
            honest = signal is not None and rng.random() > _MUTATED_SHARE
            if signal is not None and (honest or rng.random() < 0.5):
                head, text = pack(signal)
            else:
                head, text = self._old()
            if honest:
                self.report.honest_inputs += 1
                self.heard.append((head, text))
            else:
                head, text = self._mutate(head, text)
                self.report.inputs += 1
            if not self._deliver(there, self.numbers[there][at], head, text):
                break
            if rng.random() < 0.05:
                self._mishap()
            self._settle()
        self._settle()
        self._check()

    def _old(self) -> tuple[bytes, bytes]:
        """Something said before, or made up."""
        if self.heard and self.rng.random() < 0.5:
            return self.rng.choice(self.heard)
        return pack(_made_up(self.rng))

    def _mutate(self, head: bytes, text: bytes) -> tuple[bytes, bytes]:
        rng = self.rng
        kind = rng.choice(("replay", "bits", "field", "kind", "noise", "made up", "text"))
        self.report.by_mutation[f"peer: {kind}"] += 1
        changed = bytearray(head)
        if kind == "bits":
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(HEAD_BYTES)] ^= 1 << rng.randrange(8)
        elif kind == "field":
            struct.pack_into("<I", changed, rng.choice((4, 24, 28, 32, 36, 42, 46)), rng.choice(_EDGES))
        elif kind == "kind":
            changed[0] = rng.randrange(12)
        elif kind == "noise":
            changed[:] = rng.randbytes(HEAD_BYTES)
            changed[0] %= 11
        elif kind == "made up":
            return pack(_made_up(rng))
        elif kind == "text":
            text = rng.randbytes(rng.randrange(600))
            struct.pack_into("<I", changed, 4, len(text))
        return bytes(changed), text

    def _deliver(self, role: LinkRole, connection: int, head: bytes, text: bytes) -> bool:
        """As a channel would, once the seals are open. False when the link is over."""
        machine = self.machine(role)
        try:
            length = payload_bytes(head, MAX_CHUNK_BYTES if role is LinkRole.RECEIVER else 512)
            if length and head[0] == CHUNK_KIND:
                signal = unpack(head, b"")
            else:
                signal = unpack(head, text[:length].ljust(length, b"?"))
            if isinstance(signal, LinkGreeting):
                raise KVProtocolError("a greeting comes first, and once")
            if not isinstance(signal, Chunk):
                machine.receive(connection, signal, self.now)
            elif role is LinkRole.SENDER:
                raise KVProtocolError("a chunk does not come from a receiver")
            else:
                self._chunk(connection, signal)
        except KVProtocolError as error:
            self.report.refused += 1
            # A link ends with this. Going on all the same shows that what is refused leaves nothing behind.
            if self.rng.random() < _END_SHARE:
                machine.end_for_violation(error)
        return machine.ended is None

    def _chunk(self, connection: int, chunk: Chunk) -> None:
        placement = self.receiver.place_chunk(connection, chunk, self.now)
        if placement is None:
            self.receiver.skip_chunk(connection)
        elif self.rng.random() < 0.02:
            self.receiver.reject_chunk(placement)
            self.receiver.remove_connection(connection, self.now)
        else:
            self.receiver.finish_chunk(connection, placement, self.now)

    def _mishap(self) -> None:
        rng = self.rng
        role = LinkRole(rng.random() < 0.5)
        machine = self.machine(role)
        machine.tick(self.now)
        if rng.random() < 0.3:
            at = rng.randrange(2)
            for each in LinkRole:
                self.machine(each).remove_connection(self.numbers[each][at], self.now)
                self.numbers[each][at] = self.machine(each).add_connection("relay", self.now)
        elif rng.random() < 0.2:
            (self.sender if role is LinkRole.SENDER else self.receiver).abort(rng.choice(_KEYS), "enough")

    def _settle(self) -> None:
        while events := [(r, event) for r in LinkRole for event in self.machine(r).take_events()]:
            for role, event in events:
                if isinstance(event, TransferEnded):
                    self.ends[role, event.transfer] += 1
                    self.report.transfers_delivered += event.state.name == "delivered"
                    self.report.transfers_failed += event.state.name == "failed"
                elif isinstance(event, FrameReady):
                    if self.rng.random() < 0.8:
                        self.receiver.consume(event.transfer, event.frame)
                elif isinstance(event, TransferComplete):
                    self.receiver.acknowledge(event.transfer)

    def _check(self) -> None:
        self.sender.check_integrity()
        self.receiver.check_integrity()
        if self.receiver.bytes_held > len(_KEYS) * _HELD_PER_TRANSFER:
            raise AssertionError(f"{self.receiver.bytes_held} bytes are held")
        for machine in (self.sender, self.receiver):
            machine.close("over")
        self._settle()
        if self.ends and max(self.ends.values()) > 1:
            raise AssertionError(f"a transfer ended twice: {self.ends}")
        opened = len(self.ends)
        if opened % 2 or self.sender.bytes_held:
            raise AssertionError(f"{opened} ends of transfers, {self.sender.bytes_held} bytes held after the link")


def _made_up(rng: random.Random) -> Signal:
    """Anything that one can say, with numbers at the edges."""
    key = rng.choice((*_KEYS, _STRANGE))
    edge = rng.choice(_EDGES)
    kind = rng.randrange(10)
    if kind == 0:
        grid, total = rng.choice((12, 16, 20)), rng.choice((1, 4096, 5000, 1 << 20, MAX_PAYLOAD_BYTES))
        offset = min(total - 1, edge) >> grid << grid
        header = struct.pack("<HHHIIBBH", rng.randrange(3), 0, 1, 0, 1, 0, 0, 64)
        return Chunk(key, rng.randrange(6), offset, total, grid, header, min(1 << grid, total - offset))
    made: tuple[Signal, ...] = (
        End(key, 1, rng.randrange(4)),
        Abort(key, "x" * rng.randrange(600)),
        Credit(key, edge, rng.randrange(1 << 32)),
        Result(key, rng.random() < 0.5, "no"),
        Ack(rng.randrange(6), edge),
        Ping(edge),
        Pong(rng.randrange(4)),
        LinkGreeting("direct"),
        Goodbye("so long") if rng.random() < 0.1 else Ping(edge),
    )
    return made[kind - 1]


# ---- on the path ------------------------------------------------------------------------------------------------


def _attack_path(rng: random.Random, report: FuzzReport) -> None:
    """The bytes of an honest channel, mutated. One input for each mutation."""
    ticket = LinkTicket(rng.randbytes(16), rng.randbytes(32), 60.0)
    hello = LinkHello(ticket.link, rng.randbytes(16), LinkRole.RECEIVER)
    reader = Channel(ticket, LinkRole.RECEIVER, hello.nonce)
    payload = memoryview(rng.randbytes(200))
    header = struct.pack("<HHHIIBBH", 0, 0, 1, 0, 1, 0, 0, 64)
    said: list[Signal] = [Ping(n) for n in range(rng.randint(1, 3))]
    said.append(Chunk(_KEYS[0], 0, 0, 200, 12, header, 200))
    said += [End(_KEYS[0], 1, 1), Abort(_KEYS[1], "enough")]
    writer = Channel(ticket, LinkRole.SENDER, rng.randbytes(16), hello=hello)
    records = [writer.begin_handshake()]
    records += [bytes(writer.seal(signal, payload if isinstance(signal, Chunk) else None)) for signal in said]
    mutations = rng.randint(1, 3)
    for _ in range(mutations):
        kind = rng.choice(("flip", "cut", "join", "replay", "reorder", "noise", "drop"))
        report.by_mutation[f"path: {kind}"] += 1
        _mutate_records(rng, records, kind)
    report.inputs += mutations
    got: list[Signal] = []
    try:
        _read_all(rng, reader, b"".join(records), got, payload)
    except KVProtocolError:
        report.refused += 1
    expected: list[Signal] = [LinkGreeting(""), *said]
    if got != expected[: len(got)]:
        raise AssertionError(f"read {got} where {expected} was said")


def _mutate_records(rng: random.Random, records: list[bytes], kind: str) -> None:
    at = rng.randrange(len(records))
    record = records[at]
    if kind == "flip" and record:
        where = rng.randrange(len(record))
        records[at] = record[:where] + bytes([record[where] ^ 1 << rng.randrange(8)]) + record[where + 1 :]
    elif kind == "cut":
        records[at] = record[: rng.randrange(len(record) + 1)]
    elif kind == "join":
        records[at] = record + rng.choice(records)[: rng.randrange(200)]
    elif kind == "replay":
        records.insert(rng.randrange(len(records) + 1), record)
    elif kind == "reorder":
        rng.shuffle(records)
    elif kind == "noise":
        records.insert(at, rng.randbytes(rng.randrange(1, 300)))
    elif kind == "drop" and len(records) > 1:
        del records[at]


def _read_all(rng: random.Random, reader: Channel, data: bytes, got: list[Signal], payload: memoryview) -> None:
    into = bytearray(len(payload))
    view = memoryview(data)
    while view:
        space = reader.space()
        count = min(len(space), len(view), rng.choice((1, 40, 5000)))
        space[:count] = view[:count]
        view = view[count:]
        reader.note_received(count)
        while (signal := reader.next_signal()) is not None:
            if isinstance(signal, Chunk):
                reader.open_payload(into)
                if into != payload:
                    raise AssertionError("a payload came out changed")
            got.append(signal)


# ---- the command line -------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """The command line. Anything but a ProtocolError ends the run with its traceback."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.kvtransport.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="mutated inputs to run")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.inputs < 1:
        parser.error(f"--inputs is {options.inputs}; it must be at least 1")

    def progress(done: int) -> None:
        sys.stderr.write(f"\r{done:,} of {options.inputs:,} inputs")
        sys.stderr.flush()

    report = fuzz(options.inputs, options.seed, progress if sys.stderr.isatty() else None)
    if options.format == "json":
        sys.stdout.write(json.dumps({"seed": options.seed, **report.to_dict()}) + "\n")
    else:
        for name, value in report.to_dict().items():
            sys.stdout.write(f"{name:24} {value}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
