"""What the owner of an emulated network says to the process that runs it, one JSON document per
line.

The process answers each command with one line, and ends, cleaning up, when its input ends: so
nothing stays behind when the owner is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from heapq import heappop, heappush
from types import FrameType
from typing import Any, Protocol

import msgspec

from .errors import WanUnavailable
from .scenario import Scenario, ScenarioError
from .switch import BoxStatistics, LineStatistics, Switch


class SetPair(msgspec.Struct, frozen=True, tag="set_pair", forbid_unknown_fields=True):
    a: str
    b: str
    changes: dict[str, float | None]
    both: bool


class SetBox(msgspec.Struct, frozen=True, tag="set_box", forbid_unknown_fields=True):
    box: str
    changes: dict[str, float | None]


class StartOutage(msgspec.Struct, frozen=True, tag="outage", forbid_unknown_fields=True):
    a: str
    b: str
    seconds: float


class ReportCommand(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    pass


class RouteCommand(msgspec.Struct, frozen=True, tag="route", forbid_unknown_fields=True):
    a: str
    b: str
    port: int


Command = SetPair | SetBox | StartOutage | ReportCommand | RouteCommand


class LineRow(msgspec.Struct, frozen=True):
    a: str
    b: str
    statistics: LineStatistics


class WanStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything so far. `lines`: each direction of each pair.

    `late_ms_mean`, `late_ms_max`: how late packets were released because the emulator did not get
    the CPU: the error of every delay here. `cpu_s` of `elapsed_s`: near 1 the emulator itself is
    the bottleneck. `strays`: packets for an address that is no box, and what the kernel refused.
    """

    kind: str
    elapsed_s: float
    cpu_s: float
    late_ms_mean: float
    late_ms_max: float
    strays: int
    boxes: dict[str, BoxStatistics]
    rows: list[LineRow]

    @property
    def lines(self) -> dict[tuple[str, str], LineStatistics]:
        """Each direction of each pair."""
        return {(row.a, row.b): row.statistics for row in self.rows}


class EmulatorReady(msgspec.Struct, frozen=True, kw_only=True):
    """The network is up, or `error`; `unavailable`: because of this machine."""

    addresses: dict[str, str] = {}
    namespaces: dict[str, str] = {}
    notes: list[str] = []
    error: str = ""
    unavailable: bool = False


class EmulatorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a command: an error in one line, or what was asked for."""

    error: str = ""
    report: WanStatistics | None = None
    port: int = 0


class Emulator(Protocol):
    """What carries packets: `strays` so far, and local ports that lead to boxes."""

    kind: str
    strays: int

    def route(self, a: str, b: str, port: int) -> int: ...


class Commands:
    """The emulator's end of the control pipe: commands in, replies out, outages timed."""

    def __init__(self, switch: Switch[Any], emulator: Emulator, clock: Callable[[], float]) -> None:
        self._switch = switch
        self._emulator = emulator
        self._clock = clock
        self._start = clock()
        self._buffer = b""
        self._outages: list[tuple[float, int, StartOutage]] = []
        for number, outage in enumerate(switch.scenario.outages):
            command = StartOutage(outage.a, outage.b, outage.seconds)
            heappush(self._outages, (self._start + outage.start_s, number, command))

    def feed(self, data: bytes) -> bytes:
        """Carry out the commands in `data`, maybe cut in the middle; returns the replies."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return b"".join(msgspec.json.encode(self._answer(line)) + b"\n" for line in lines)

    def _answer(self, line: bytes) -> EmulatorReply:
        try:
            return self._apply(msgspec.json.decode(line, type=Command))
        except (ScenarioError, msgspec.MsgspecError, OSError) as error:
            return EmulatorReply(error=str(error))

    def _apply(self, command: Command) -> EmulatorReply:
        match command:
            case SetPair(a, b, changes, both):
                self._switch.set_pair(a, b, changes, both=both)
            case SetBox(box, changes):
                self._switch.set_box(box, changes)
            case StartOutage(a, b, seconds):
                self._switch.outage(a, b, seconds, self._clock())
            case RouteCommand(a, b, port):
                return EmulatorReply(port=self._emulator.route(a, b, port))
            case ReportCommand():
                return EmulatorReply(report=self._report())
        return EmulatorReply()

    def on_timer(self, now: float) -> None:
        """Start the outages that are due."""
        while self._outages and self._outages[0][0] <= now:
            _, _, outage = heappop(self._outages)
            self._switch.outage(outage.a, outage.b, outage.seconds, now)

    def wake_at(self) -> float | None:
        """When the next outage starts."""
        return self._outages[0][0] if self._outages else None

    def _report(self) -> WanStatistics:
        mean, worst = self._switch.lateness_ms()
        return WanStatistics(
            kind=self._emulator.kind,
            elapsed_s=self._clock() - self._start,
            cpu_s=time.process_time(),
            late_ms_mean=mean,
            late_ms_max=worst,
            strays=self._emulator.strays,
            boxes=self._switch.box_statistics(),
            rows=[LineRow(a, b, line) for (a, b), line in self._switch.line_statistics().items()],
        )


def run_emulator(run: Callable[[Scenario], None]) -> int:
    """The life of an emulator's process: read the scenario from its input and `run` it; what is
    wrong goes to its owner. Returns the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's, who then closes the input
    try:
        run(Scenario.from_json(sys.stdin.buffer.readline()))
    except (ScenarioError, WanUnavailable) as error:
        say_ready(EmulatorReady(error=str(error), unavailable=isinstance(error, WanUnavailable)))
        return 1
    except BrokenPipeError:
        return 1
    return 0


def say_ready(ready: EmulatorReady) -> None:
    """Tell the owner that the network is up, or why not."""
    os.write(sys.stdout.fileno(), msgspec.json.encode(ready) + b"\n")


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
