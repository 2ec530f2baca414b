"""The emulated network itself, in virtual time: packets go in at one box and come out at another when due.

A packet passes, in this order:

    sender's up cap -> outage? -> lost? -> the pair's own cap -> half the rtt, with jitter -> receiver's down cap

Everything is told the time and a source of randomness, so the same code runs under a test's clock and in the
process that forwards real packets. It is called once or twice per packet: slots, no allocation but the queue's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush, heapreplace
from math import inf
from random import Random
from typing import Final, Generic, TypeVar

import msgspec

from .scenario import Scenario, ScenarioError, WanBox, WanPair, changed

Packet = TypeVar("Packet")

# An idle cap saves this much of its rate: the forwarding process may sleep that long without losing any of it.
BURST_S: Final = 0.003
# Jitter changes in steps: a route's delay wanders, it is not drawn anew for each packet.
JITTER_STEP_S: Final = 0.01

DROPPED: Final = -1.0


class RateMeter:
    """A token bucket as a clock: `free_at` is when all that was let in will have left.

    `queue_bytes` may wait; what comes on top is refused, as a router drops at the tail of a full
    queue.
    """

    __slots__ = ("free_at", "queue_s", "seconds_per_byte")

    def __init__(self, gbps: float | None, queue_bytes: float) -> None:
        self.free_at = -inf
        self.set_rate(gbps, queue_bytes)

    def set_rate(self, gbps: float | None, queue_bytes: float) -> None:
        """Change the cap for what comes from now on; None is no cap. What waits keeps its time."""
        self.seconds_per_byte = 0.0 if gbps is None else 8e-9 / gbps
        self.queue_s = queue_bytes * self.seconds_per_byte

    def admit(self, now: float, size: int) -> float:
        """When `size` bytes that come at `now` will have left, in s; `DROPPED` if too much waits."""
        free_at = self.free_at
        if free_at - now > self.queue_s:
            return DROPPED
        if free_at < now - BURST_S:
            free_at = now - BURST_S
        self.free_at = free_at = free_at + size * self.seconds_per_byte
        return max(now, free_at)


class LineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a pair so far: what was delivered and what was dropped, and why, in packets
    and bytes.

    `queue_ms_mean`, `queue_ms_max`: time spent waiting at the three caps, beyond the line's delay.
    """

    packets: int
    bytes: int
    lost: int
    dropped: int
    dead: int
    waiting_bytes: int
    queue_ms_mean: float
    queue_ms_max: float


class BoxStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A box so far: bytes that left it and that reached it, and packets refused at its caps."""

    sent_bytes: int
    received_bytes: int
    up_dropped: int
    down_dropped: int


class _Access(Generic[Packet]):
    """A box's two caps, and what waits at the lower one."""

    __slots__ = ("box", "down", "down_dropped", "fifo", "key", "name", "received", "sent", "up", "up_dropped")

    def __init__(self, key: int, name: str, box: WanBox) -> None:
        self.key = key
        self.name = name
        self.box = box
        self.up = RateMeter(None, 0)
        self.down = RateMeter(None, 0)
        self.fifo: deque[tuple[float, float, int, Packet, Line[Packet]]] = deque()
        self.sent = self.received = self.up_dropped = self.down_dropped = 0


class Line(Generic[Packet]):
    """One direction of a pair: outage, loss, cap, delay. Packets stay in order."""

    __slots__ = (
        *("bytes", "dead", "dead_until", "delivered", "dropped", "exit", "fifo", "key", "last", "lossless", "lost"),
        *("meter", "offset", "offset_until", "pair", "queue_max", "queue_sum", "rng", "waiting"),
    )

    def __init__(self, key: int, pair: WanPair, exit_to: _Access[Packet], rng: Random, *, lossless: bool) -> None:
        self.key = key
        self.pair = pair
        self.exit = exit_to
        self.rng = rng
        self.lossless = lossless
        self.meter = RateMeter(None, 0)
        self.fifo: deque[tuple[float, float, int, Packet]] = deque()
        self.dead_until = self.offset_until = self.last = -inf
        self.offset = 0.0
        self.delivered = self.bytes = self.waiting = self.lost = self.dropped = self.dead = 0
        self.queue_sum = self.queue_max = 0.0

    def arrival(self, now: float, left: float, size: int) -> float:
        """When a packet that leaves the sender's cap at `left` reaches the receiver's; `DROPPED` if
        it never does.

        Without losses (`lossless`, for byte streams), an outage delays it until the outage is over.
        """
        pair = self.pair
        if left < self.dead_until:
            if not self.lossless:
                self.dead += 1
                return DROPPED
            left = self.dead_until
        if pair.loss and not self.lossless and self.rng.random() < pair.loss:
            self.lost += 1
            return DROPPED
        left = self.meter.admit(left, size)
        if left < 0:
            self.dropped += 1
            return DROPPED
        if pair.jitter_ms and now >= self.offset_until:
            self.offset = (self.rng.random() - 0.5) * pair.jitter_ms / 1e3
            self.offset_until = now + JITTER_STEP_S
        due = left + pair.rtt_ms / 2e3 + self.offset
        if due < self.last:
            due = self.last
        self.last = due
        return due

    def deliver(self, due: float, entered: float, size: int) -> None:
        """Count a packet that entered at `entered` and reaches its box at `due`."""
        self.delivered += 1
        self.bytes += size
        self.waiting -= size
        queued = due - entered - self.pair.rtt_ms / 2e3
        if queued > 0:
            self.queue_sum += queued
            if queued > self.queue_max:
                self.queue_max = queued

    def statistics(self) -> LineStatistics:
        """The figures so far."""
        return LineStatistics(
            packets=self.delivered,
            bytes=self.bytes,
            lost=self.lost,
            dropped=self.dropped,
            dead=self.dead,
            waiting_bytes=self.waiting,
            queue_ms_mean=1e3 * self.queue_sum / self.delivered if self.delivered else 0.0,
            queue_ms_max=1e3 * self.queue_max,
        )


class Switch(Generic[Packet]):
    """All boxes and lines of a scenario.

    `lossless`: for byte streams, which may be late but not lost: no loss, no full queues; the
    caller has to bound what waits. Times are seconds on any one clock; they must not go backwards.
    """

    def __init__(self, scenario: Scenario, *, lossless: bool = False) -> None:
        self.scenario = scenario
        self._lossless = lossless
        self._heap: list[tuple[float, int, Line[Packet] | _Access[Packet]]] = []
        self._late_sum = self._late_max = 0.0
        self._wakes = self._released = 0
        self._access: dict[str, _Access[Packet]] = {
            name: _Access(number, name, box) for number, (name, box) in enumerate(scenario.boxes.items())
        }
        self._lines: dict[tuple[str, str], Line[Packet]] = {}
        for number, (a, b, pair) in enumerate(scenario.directions(), len(self._access)):
            rng = Random(f"{scenario.seed}/{a}/{b}")
            self._lines[a, b] = Line(number, pair, self._access[b], rng, lossless=lossless)
        self._set_meters()

    def __repr__(self) -> str:
        waiting = sum(line.waiting for line in self._lines.values())
        return f"<Switch of {len(self._access)} boxes: {self._released} packets released, {waiting} B under way>"

    def _set_meters(self) -> None:
        """Rates and queues of every cap, after any of them or a round trip has changed."""
        for name, access in self._access.items():
            out = max((line.pair.rtt_ms for (a, _), line in self._lines.items() if a == name), default=0.0)
            into = max((line.pair.rtt_ms for (_, b), line in self._lines.items() if b == name), default=0.0)
            access.up.set_rate(access.box.up_gbps, self._room(access.box.up_gbps, out))
            access.down.set_rate(access.box.down_gbps, self._room(access.box.down_gbps, into))
        for line in self._lines.values():
            line.meter.set_rate(line.pair.gbps, self._room(line.pair.gbps or 0.0, line.pair.rtt_ms))

    def _room(self, gbps: float, rtt_ms: float) -> float:
        return inf if self._lossless else self.scenario.queue_bytes(gbps, rtt_ms)

    def enter(self, a: str, b: str, size: int, packet: Packet, now: float) -> bool:
        """A packet of `size` bytes comes from `a` for `b`; False if it was dropped at once."""
        access = self._access[a]
        left = access.up.admit(now, size)
        if left < 0:
            access.up_dropped += 1
            return False
        access.sent += size
        line = self._lines[a, b]
        due = line.arrival(now, left, size)
        if due < 0:
            return False
        line.waiting += size
        if not line.fifo:
            heappush(self._heap, (due, line.key, line))
        line.fifo.append((due, now, size, packet))
        return True

    def release(self, now: float) -> list[tuple[str, Packet]]:
        """What reaches its box by `now`, each with the box's name, in order."""
        out: list[tuple[str, Packet]] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            self._late(now - heap[0][0])
            queue = heap[0][2]
            if isinstance(queue, Line):
                self._land(queue, now, out)
            else:
                waiting = queue.fifo
                while waiting and waiting[0][0] <= now:
                    due, entered, size, packet, line = waiting.popleft()
                    line.deliver(due, entered, size)
                    queue.received += size
                    out.append((queue.name, packet))
            if queue.fifo:
                heapreplace(heap, (queue.fifo[0][0], queue.key, queue))
            else:
                heappop(heap)
        self._released += len(out)
        return out

    def _land(self, line: Line[Packet], now: float, out: list[tuple[str, Packet]]) -> None:
        """Let what has crossed the line through the receiver's cap, or into the queue before it."""
        access = line.exit
        fifo, waiting, admit = line.fifo, access.fifo, access.down.admit
        while fifo and fifo[0][0] <= now:
            due, entered, size, packet = fifo.popleft()
            through = admit(due, size)
            if through < 0:
                access.down_dropped += 1
                line.waiting -= size
            elif through <= now and not waiting:
                line.deliver(through, entered, size)
                access.received += size
                out.append((access.name, packet))
            else:
                if not waiting:
                    heappush(self._heap, (through, access.key, access))
                waiting.append((through, entered, size, packet, line))

    def _late(self, seconds: float) -> None:
        self._late_sum += seconds
        self._wakes += 1
        if seconds > self._late_max:
            self._late_max = seconds

    def wake_at(self) -> float | None:
        """When something is due next; None while nothing is under way."""
        return self._heap[0][0] if self._heap else None

    def waiting(self, a: str, b: str) -> int:
        """Bytes under way from `a` to `b`."""
        return self._line(a, b).waiting

    @property
    def lossy(self) -> bool:
        """Whether any line loses packets by chance."""
        return any(line.pair.loss for line in self._lines.values())

    def rtt_ms(self, a: str, b: str) -> float:
        """The round trip from `a` to `b` as it is set now."""
        return self._line(a, b).pair.rtt_ms

    def set_pair(self, a: str, b: str, changes: Mapping[str, float | None], *, both: bool = True) -> None:
        """Change fields of a `WanPair`, for what enters from now on. Raises `ScenarioError`."""
        ends = [(a, b), (b, a)] if both else [(a, b)]
        pairs = [changed(self._line(*end).pair, changes) for end in ends]
        for end, pair in zip(ends, pairs, strict=True):
            self._lines[end].pair = pair
        self._set_meters()

    def set_box(self, name: str, changes: Mapping[str, float | None]) -> None:
        """Change fields of a `WanBox`, for what enters from now on. Raises `ScenarioError`."""
        access = self._box(name)
        access.box = changed(access.box, changes)
        self._set_meters()

    def outage(self, a: str, b: str, seconds: float, now: float) -> None:
        """Drop what enters between `a` and `b`, in both directions, for `seconds`."""
        if not 0 <= seconds <= 1e9:
            raise ScenarioError(f"seconds: an outage of {seconds!r} s: 0 to 1e9 s, 0 ends one")
        for line in (self._line(a, b), self._line(b, a)):
            line.dead_until = now + seconds

    def line_statistics(self) -> dict[tuple[str, str], LineStatistics]:
        """Each direction of each pair so far."""
        return {ends: line.statistics() for ends, line in self._lines.items()}

    def box_statistics(self) -> dict[str, BoxStatistics]:
        """Each box so far."""
        return {
            name: BoxStatistics(
                sent_bytes=access.sent,
                received_bytes=access.received,
                up_dropped=access.up_dropped,
                down_dropped=access.down_dropped,
            )
            for name, access in self._access.items()
        }

    def lateness_ms(self) -> tuple[float, float]:
        """Mean and maximum of how late the caller came to release what was due, in ms."""
        return 1e3 * self._late_sum / max(self._wakes, 1), 1e3 * self._late_max

    def _box(self, name: str) -> _Access[Packet]:
        if name not in self._access:
            raise ScenarioError(f"there is no box {name!r}; boxes: {', '.join(self._access)}")
        return self._access[name]

    def _line(self, a: str, b: str) -> Line[Packet]:
        self._box(a), self._box(b)
        if a == b:
            raise ScenarioError(f"{a!r} twice: a pair joins two boxes")
        return self._lines[a, b]
