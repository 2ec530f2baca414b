"""A network whose boxes exist in memory: the KV programs of `kvnetwork` without processes, sockets or waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from p2pserve.kvtransport.probing.estimates import BurstSample
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.sims.wan import EmulatedWan, Scenario, WanPair
from p2pserve.sims.wan.kv import orders
from p2pserve.sims.wan.kv.kvbox import FRAME_BYTES
from p2pserve.sims.wan.kv.kvnetwork import KVNetwork

WINDOW_BITS = 2.7e6 * 8


@dataclass
class FakeTransfer:
    """One transfer at its sender: bytes confirmed by path, and when it ended."""

    total: int
    started: float
    share: float
    by_path: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: float | None = None

    def advance(self, rates: dict[str, float], since: float, now: float) -> None:
        """Move on at `rates`, bytes/s by path, until it is complete or `now`."""
        rate = sum(rates.values()) * self.share
        if self.ended is not None or not rate:
            return
        seconds = min((self.total - sum(self.by_path.values())) / rate, now - since)
        for label, each in rates.items():
            self.by_path[label] += each * self.share * seconds
        if sum(self.by_path.values()) >= self.total - 1:
            self.ended = since + seconds


@dataclass
class FakeLink:
    """A link at its sender: paths, transfers, and until when they have been moved on."""

    paths: list[DialPath]
    at: float
    transfers: list[FakeTransfer] = field(default_factory=list)


class FakeWan(EmulatedWan):
    """Boxes that do as they are told at the scenario's rates, in a time that only `sleep` moves.

    `orders`: all that was ordered, each with its box. `refusals`: kind of order -> the error it gets.
    `failure`: what every transfer fails of. `shares`: the parts of a link's rate that its transfers get.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, kind="proxy")
        self.now = 1000.0
        self.orders: list[tuple[str, orders.Order]] = []
        self.refusals: dict[type, str] = {}
        self.failure = ""
        self.shares: Sequence[float] = ()
        self.dead: set[str] = set()
        self.killed: list[str] = []
        self.closed = False
        self._pairs = {(a, b): pair for a, b, pair in scenario.directions()}
        self._links: dict[bytes, FakeLink] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True

    def address(self, box: str) -> str:
        return f"at {box}"

    def route(self, a: str, b: str, port: int) -> tuple[str, int]:
        return f"{a}>{b}", port

    def popen(self, box: str, argv: Sequence[str], **options: Any) -> Any:
        return FakeProgram(self, box)

    def set_pair(self, a: str, b: str, *, both: bool = True, **changes: float | None) -> None:
        for ends in ((a, b), (b, a)):
            self._pairs[ends] = msgspec.structs.replace(self._pairs[ends], **changes)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let the time pass, and bytes move."""
        before, self.now = self.now, self.now + seconds
        for link in self._links.values():
            rates = {path.label: self._rate(path) for path in link.paths}
            for one in link.transfers:
                one.advance(rates, before, self.now)

    def pair(self, host: str) -> tuple[WanPair, float]:
        """What lies behind an address of `route`, and what it carries in Gb/s."""
        a, _, b = host.partition(">")
        pair, boxes = self._pairs[a, b], self.scenario.boxes
        return pair, min(boxes[a].up_gbps, boxes[b].down_gbps, pair.gbps or 400.0)

    def streams_gbps(self, host: str, streams: int) -> float:
        pair, gbps = self.pair(host)
        return min(gbps, streams * WINDOW_BITS / 1e6 / pair.rtt_ms)

    def _rate(self, path: DialPath) -> float:
        hosts = [path.host] if path.relay is None else [path.host, path.relay.next_host]
        return min(self.streams_gbps(host, path.streams) for host in hosts) * 1e9 / 8

    def obey(self, box: str, order: orders.Order) -> orders.OrderReply:
        """Carry out what a box was told."""
        self.orders.append((box, order))
        if type(order) in self.refusals:
            return orders.OrderReply(error=self.refusals[type(order)])
        match order:
            case orders.PingOrder(host, _, count):
                return orders.OrderReply(rtt_s=[self.pair(host)[0].rtt_ms / 1e3] * count)
            case orders.SendBurst(ticket, host, _):
                gbps = self.streams_gbps(host, ticket.streams)
                each = (gbps / ticket.streams,) * ticket.streams
                size = round(gbps * ticket.seconds * 1e9 / 8)
                return orders.OrderReply(
                    burst=BurstSample(
                        bytes=size, seconds=ticket.seconds, streams=ticket.streams, gbps=gbps, per_stream_gbps=each
                    )
                )
            case orders.Connect(ticket, paths):
                self._links[ticket.link] = FakeLink(paths, self.now)
            case orders.SetPathsOrder(link, paths):
                self._links[link].paths = paths
            case orders.Send(link, transfers):
                shares = self.shares or [1 / len(transfers)] * len(transfers)
                self._links[link].transfers += [
                    FakeTransfer(bulk.frames * FRAME_BYTES, self.now, share)
                    for bulk, share in zip(transfers, shares, strict=True)
                ]
            case orders.Watch(link):
                return orders.OrderReply(transfers=[self._state(one) for one in self._links[link].transfers])
            case orders.Relayed():
                moved = [one.by_path for link in self._links.values() for one in link.transfers]
                return orders.OrderReply(relayed=round(sum(by_path.get(f"via {box}", 0.0) for by_path in moved)))
        return orders.OrderReply()

    def _state(self, one: FakeTransfer) -> orders.TransferState:
        done = round(sum(one.by_path.values()))
        name = "failed" if self.failure else "delivered" if one.ended is not None else "open"
        return orders.TransferState(
            state=name,
            reason=self.failure,
            seconds=(self.now if one.ended is None else one.ended) - one.started,
            bytes=one.total,
            acknowledged=done,
            resent=0,
            by_path={label: round(size) for label, size in one.by_path.items()},
        )


class FakeProgram:
    """The KV program of one box, as a process with a pipe to and from it."""

    def __init__(self, wan: FakeWan, box: str) -> None:
        self._wan, self._box = wan, box
        self._answers = [orders.OrderReply(port=7000 + len(box))]
        self.stdin = self.stdout = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def write(self, line: bytes) -> None:
        self._answers.append(self._wan.obey(self._box, msgspec.json.decode(line, type=orders.Order)))

    def flush(self) -> None:
        pass

    def readline(self) -> bytes:
        return b"" if self._box in self._wan.dead else msgspec.json.encode(self._answers.pop(0)) + b"\n"

    def kill(self) -> None:
        self._wan.killed.append(self._box)

    def wait(self) -> int:
        return 9


def kv_network(wan: FakeWan, usd_per_gb: float = 0.0) -> KVNetwork:
    """The real `KVNetwork` over boxes in memory."""
    return KVNetwork(wan, usd_per_gb=usd_per_gb, clock=wan.clock, sleep=wan.sleep)


def ordered(wan: FakeWan, kind: type) -> list[str]:
    """The boxes that had an order of this kind."""
    return [box for box, order in wan.orders if isinstance(order, kind)]
