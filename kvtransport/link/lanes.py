"""What both ends of a link do for each of its connections: confirm, keep alive, measure, and bury.

A *lane* is an authenticated connection as the machines see it: a number, the label of its path, what is on the way
on it and when it was last heard. `LinkMachine` is the half of a link's end that does not depend on who sends KV.
Pure: bytes never, `now` always a parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ..errors import KVProtocolError
from ..wire.signals import Ack, Goodbye, Ping, Pong, Signal

__all__ = [
    "CloseConnection",
    "Connection",
    "ConnectionStatistics",
    "EndState",
    "Event",
    "FrameReady",
    "LinkEnded",
    "LinkMachine",
    "LinkSettings",
    "PathStatistics",
    "Released",
    "TransferComplete",
    "TransferEnded",
]

Item = TypeVar("Item")

_WINDOW_S = 2.0
_SAMPLE_S = 0.05
_MAX_OWED_PONGS = 16
_MAX_LABELS = 64  # a peer names paths as it likes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """The knobs of a link's end; seconds and bytes. The two ends need not agree.

    `chunk_bytes` (a power of two, 4 KiB to 1 MiB) is what a connection takes at a time. Smaller balances unequal
    streams better and wastes less when one dies; each chunk costs 50 to 100 us of interpreter on each side, since the
    caches have seen nothing but its payload since the last one. `silence_s`:
    a connection that has something unconfirmed and is not heard for so long is dead. `grace_s`: transfers fail when
    no connection has been alive for so long. `hedge_s`: a chunk unconfirmed for so long is sent again by a
    connection that has nothing else to do; whichever copy comes first counts.
    """

    chunk_bytes: int = 1024 * 1024
    limit_bytes: int = 256 * 1024 * 1024
    silence_s: float = 5.0
    grace_s: float = 10.0
    ping_s: float = 1.0
    hedge_s: float = 1.0
    authenticate_s: float = 5.0
    max_connections: int = 64

    def __post_init__(self) -> None:
        if self.chunk_bytes.bit_count() != 1 or not 1 << 12 <= self.chunk_bytes <= 1 << 20:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}; it must be a power of two from 4096 to 1048576")
        for name in ("limit_bytes", "silence_s", "grace_s", "ping_s", "hedge_s", "authenticate_s", "max_connections"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive and finite")


@dataclass(frozen=True, slots=True)
class EndState:
    """`open`, then exactly one of `delivered` and `failed`, for ever."""

    name: Literal["open", "delivered", "failed"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.reason})" if self.reason else self.name


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer has reached its end state. Comes once for each transfer."""

    transfer: bytes
    state: EndState


@dataclass(frozen=True, slots=True)
class TransferComplete:
    """Every frame of a transfer has arrived: `frames` of them, covering `tokens` positions."""

    transfer: bytes
    tokens: int
    frames: int


@dataclass(frozen=True, slots=True)
class FrameReady:
    """A frame has arrived whole. Its payload stays put until the machine is told that it has been consumed."""

    transfer: bytes
    frame: int
    header: bytes
    payload: memoryview


@dataclass(frozen=True, slots=True)
class TransferGranted:
    """The receiver has said for the first time that KV may come; it has the positions before `first` already."""

    transfer: bytes
    first: int


@dataclass(frozen=True, slots=True)
class Released:
    """Source memory is no longer needed: confirmed, or its transfer is over."""

    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close this connection."""

    lane: int
    reason: str


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """Nothing more happens on this link: close all its connections, once what is being sent has gone."""

    reason: str


Event = TransferEnded | TransferGranted | TransferComplete | FrameReady | Released | CloseConnection | LinkEnded


@dataclass(frozen=True, slots=True)
class ConnectionStatistics:
    """One connection. `rate_bytes_s`: of KV confirmed in the last two seconds. `rtt_s`: None before the first pong."""

    lane: int
    label: str
    retired: bool
    bytes_acknowledged: int
    bytes_in_flight: int
    rate_bytes_s: float
    rtt_s: float | None
    rtt_min_s: float | None


@dataclass(frozen=True, slots=True)
class PathStatistics:
    """All connections of one path, dead ones included in `bytes_acknowledged`. `rtt_s`: the smallest recent one."""

    label: str
    connections: int
    bytes_acknowledged: int
    bytes_in_flight: int
    rate_bytes_s: float
    rtt_s: float | None


class Connection(Generic[Item]):
    """The bookkeeping of one connection. `Item`: what a reliable record carried."""

    def __init__(self, number: int, label: str, now: float) -> None:
        self.number = number
        self.label = label
        self.retired = False
        self.heard_at = self.opened_at = now
        self.flight: deque[tuple[Item, int, float]] = deque()
        self.flight_bytes = 0
        self.sent = self.confirmed = 0
        self.handled = self.told = 0
        self.bytes_in = self.bytes_told = 0
        self.told_at = now
        self.bytes_acknowledged = 0
        self.rtt: float | None = None
        self.rtt_min: float | None = None
        self.goodbye_said = False
        self._peer_bytes = 0
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])
        self._pings: dict[int, float] = {}
        self._next_ping = 0
        self.pinged_at = now
        self.owed: deque[int] = deque()

    def carries(self, item: Item, size: int, now: float) -> None:
        """A reliable record has been handed to this connection."""
        if not self.flight:
            self.heard_at = max(self.heard_at, now)  # silence counts from when there is something to answer
        self.flight.append((item, size, now))
        self.flight_bytes += size
        self.sent += 1

    def confirm(self, progress: Ack, now: float) -> list[tuple[Item, int]]:
        """What the peer has newly dealt with, and its bytes. Raises ProtocolError for what it cannot have."""
        if progress.records > self.sent:
            raise KVProtocolError(f"{progress.records} records confirmed of {self.sent} sent")
        done: list[tuple[Item, int]] = []
        while self.confirmed < progress.records:
            item, size, _ = self.flight.popleft()
            self.confirmed += 1
            self.flight_bytes -= size
            self.bytes_acknowledged += size
            done.append((item, size))
        self._sample(max(progress.bytes, self._peer_bytes), now)
        return done

    def drop(self) -> list[Item]:
        """The connection is dead: what it had not confirmed."""
        items = [item for item, _, _ in self.flight]
        self.flight.clear()
        self.flight_bytes = 0
        return items

    def ping(self, now: float) -> Ping:
        self._next_ping += 1
        self._pings[self._next_ping] = self.pinged_at = now
        if len(self._pings) > 8:
            del self._pings[next(iter(self._pings))]
        return Ping(self._next_ping)

    def pong(self, token: int, now: float) -> None:
        asked = self._pings.pop(token, None)
        if asked is None:
            return
        self.rtt = now - asked
        self.rtt_min = self.rtt if self.rtt_min is None else min(self.rtt_min, self.rtt)

    @property
    def waits(self) -> bool:
        """Whether the peer has something to answer."""
        return bool(self.flight) or bool(self._pings)

    def rate(self, now: float) -> float:
        """Bytes per second that the peer has read from this connection over the last two seconds."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW_S:
            self._samples.popleft()
        began, base = self._samples[0]
        seconds = min(_WINDOW_S, max(now - began, _SAMPLE_S))
        return (self._peer_bytes - base) / seconds

    def statistics(self, now: float) -> ConnectionStatistics:
        return ConnectionStatistics(
            lane=self.number,
            label=self.label,
            retired=self.retired,
            bytes_acknowledged=self.bytes_acknowledged,
            bytes_in_flight=self.flight_bytes,
            rate_bytes_s=self.rate(now),
            rtt_s=self.rtt,
            rtt_min_s=self.rtt_min,
        )

    def _sample(self, count: int, now: float) -> None:
        self._peer_bytes = count
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, count))
            while self._samples[1][0] <= now - _WINDOW_S:
                self._samples.popleft()


class LinkMachine(ABC, Generic[Item]):
    """One end of a link. Feed it connections, signals and time; `next` gives each connection what to send, `events`
    what else there is to do. A ProtocolError that a call raises is the peer's fault: hand it to `violated`.
    """

    def __init__(self, settings: LinkSettings, lease_s: float, now: float) -> None:
        self.settings = settings
        self.lanes: dict[int, Connection[Item]] = {}
        self.ended: str | None = None
        self._lease_s = lease_s
        self._used_at = now
        self._alone_since = now
        self._events: list[Event] = []
        self._next_lane = 0
        self._past: dict[str, int] = {}  # label -> bytes that dead connections have confirmed

    # ---- for the rim ----------------------------------------------------------------------------------------

    def connected(self, label: str, now: float) -> int:
        """A connection has authenticated. Its number, for all other calls."""
        self._next_lane += 1
        self.lanes[self._next_lane] = Connection(self._next_lane, label, now)
        return self._next_lane

    def lost(self, number: int, now: float) -> None:
        """A connection is gone. What it had not confirmed goes to others. Unknown numbers are no matter."""
        lane = self.lanes.pop(number, None)
        if lane is None:
            return
        label = lane.label if lane.label in self._past or len(self._past) < _MAX_LABELS else ""
        self._past[label] = self._past.get(label, 0) + lane.bytes_acknowledged
        if not self.lanes:
            self._alone_since = now
        for item in lane.drop():
            self._say_again(item)

    def retire(self, number: int, reason: str, now: float) -> None:
        """Take a connection out of use: it is closed and what it had not confirmed goes to the others."""
        if number in self.lanes:
            self._events.append(CloseConnection(number, reason))
            self.lost(number, now)

    def heard(self, number: int, count: int, now: float) -> None:
        """`count` bytes have been read from a connection."""
        lane = self.lanes.get(number)
        if lane is not None:
            lane.heard_at = now
            lane.bytes_in += count

    def received(self, number: int, signal: Signal, now: float) -> None:
        """Anything but a chunk has come in on a connection."""
        lane = self.lanes.get(number)
        if lane is None or self.ended is not None:
            return
        match signal:
            case Ack():
                for item, size in lane.confirm(signal, now):
                    self._confirmed(lane, item, size, now)
            case Ping(token):
                if len(lane.owed) >= _MAX_OWED_PONGS:
                    raise KVProtocolError("pings come faster than they can be answered")
                lane.owed.append(token)
            case Pong(token):
                lane.pong(token, now)
            case Goodbye(reason):
                self._end(f"the other side closed the link: {reason}" if reason else "the other side closed the link")
            case _:
                self._take(signal, now)
                lane.handled += 1

    def next(self, number: int, now: float) -> Signal | None:
        """What this connection sends next, None if there is nothing. It counts as sent."""
        lane = self.lanes.get(number)
        if lane is None:
            return None
        if self.ended is not None:
            return self._goodbye(lane)
        if lane.owed:
            return Pong(lane.owed.popleft())
        if self.progress_due(lane, now):
            lane.told, lane.bytes_told, lane.told_at = lane.handled, lane.bytes_in, now
            return Ack(lane.handled, lane.bytes_in)
        if now - lane.pinged_at >= self.settings.ping_s:
            return lane.ping(now)
        return self._next_item(lane, now)

    def tick(self, now: float) -> None:
        """Time has passed: bury silent connections, end what is overdue."""
        if self.ended is not None:
            return
        for lane in list(self.lanes.values()):
            if lane.waits and now - lane.heard_at >= self.settings.silence_s:
                self.retire(lane.number, f"nothing heard for {self.settings.silence_s:g} s", now)
        for lane in self.lanes.values():
            for item, _, sent_at in lane.flight:
                if sent_at > now - self.settings.hedge_s:
                    break
                self._overdue(item)
        self._expire(now)
        if self._busy():
            self._used_at = now
        elif now - self._used_at >= self._lease_s:
            self.close(f"the link's lease of {self._lease_s:g} s without a transfer is over")

    def wake_at(self, now: float) -> float:
        """When `tick` is next worth calling; at the latest in a ping's time."""
        times = [now + self.settings.ping_s, self._next_deadline()]
        times += [lane.heard_at + self.settings.silence_s for lane in self.lanes.values() if lane.waits]
        return max(min(times), now)

    def close(self, reason: str = "") -> None:
        """End the link from this side: open transfers fail, each connection says goodbye."""
        self._end(reason or "closed by this side")

    def violated(self, error: KVProtocolError) -> None:
        """The peer, under its own key, has said what it must not: the link is over."""
        self._end(f"protocol violation by the other side: {error}")

    def events(self) -> list[Event]:
        """What has come up since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def progress_due(self, lane: Connection[Item], now: float) -> bool:
        """Whether to say what has been dealt with: at once when it is much or the last for now, else soon."""
        if lane.handled == lane.told:
            return lane.bytes_in - lane.bytes_told >= 1 << 17 and now - lane.told_at >= _SAMPLE_S
        return True

    def lane_statistics(self, now: float) -> tuple[ConnectionStatistics, ...]:
        return tuple(lane.statistics(now) for lane in self.lanes.values())

    def path_statistics(self, now: float) -> dict[str, PathStatistics]:
        """By label: live connections and the bytes of dead ones."""
        found: dict[str, PathStatistics] = {}
        labels = {lane.label for lane in self.lanes.values()} | self._past.keys()
        for label in sorted(labels):
            lanes = [lane for lane in self.lanes.values() if lane.label == label]
            rtts = [lane.rtt for lane in lanes if lane.rtt is not None]
            found[label] = PathStatistics(
                label=label,
                connections=len(lanes),
                bytes_acknowledged=self._past.get(label, 0) + sum(lane.bytes_acknowledged for lane in lanes),
                bytes_in_flight=sum(lane.flight_bytes for lane in lanes),
                rate_bytes_s=sum(lane.rate(now) for lane in lanes),
                rtt_s=min(rtts) if rtts else None,
            )
        return found

    # ---- what depends on who sends --------------------------------------------------------------------------

    @abstractmethod
    def _next_item(self, lane: Connection[Item], now: float) -> Signal | None:
        """The next reliable record for a connection."""

    @abstractmethod
    def _take(self, signal: Signal, now: float) -> None:
        """A reliable signal has arrived. Raises ProtocolError for one that this end must not get."""

    @abstractmethod
    def _confirmed(self, lane: Connection[Item], item: Item, size: int, now: float) -> None:
        """The peer has dealt with an item."""

    @abstractmethod
    def _say_again(self, item: Item) -> None:
        """The connection that carried an item died before the peer confirmed it."""

    @abstractmethod
    def _overdue(self, item: Item) -> None:
        """An item has not been confirmed for `hedge_s`; it may be said once more on another connection."""

    def _prompt(self, lane: Connection[Item], now: float) -> bool:
        """Whether a connection is to be trusted with a word: not when it is late while another is not."""
        late = now - self.settings.hedge_s
        if not lane.flight or lane.flight[0][2] > late:
            return True
        return all(other.flight and other.flight[0][2] <= late for other in self.lanes.values())

    @abstractmethod
    def _busy(self) -> bool:
        """Whether any transfer is open."""

    @abstractmethod
    def _next_deadline(self) -> float:
        """When the next transfer is overdue; infinite without any."""

    @abstractmethod
    def _fail(self, transfer: bytes, reason: str) -> None:
        """End a transfer as failed, unless it has ended."""

    @abstractmethod
    def _open_transfers(self) -> list[tuple[bytes, float]]:
        """Open transfers and their deadlines."""

    def _expire(self, now: float) -> None:
        alone = not self.lanes and now - self._alone_since >= self.settings.grace_s
        for transfer, deadline in self._open_transfers():
            if now >= deadline:
                self._fail(transfer, "the deadline of the ticket has passed")
            elif alone and now - self._since(transfer) >= self.settings.grace_s:
                self._fail(transfer, f"no connection for {self.settings.grace_s:g} s")

    @abstractmethod
    def _since(self, transfer: bytes) -> float:
        """When a transfer was opened."""

    def _end(self, reason: str) -> None:
        if self.ended is not None:
            return
        for transfer, _ in self._open_transfers():
            self._fail(transfer, reason)
        self.ended = reason
        self._events.append(LinkEnded(reason))

    def _goodbye(self, lane: Connection[Item]) -> Signal | None:
        if lane.goodbye_said:
            return None
        lane.goodbye_said = True
        return Goodbye(self.ended or "")
