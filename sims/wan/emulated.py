"""An emulated wide-area network on this machine, for as long as a `with` block lasts.

with EmulatedWan(scenario) as wan:
    server = wan.popen("paris", [sys.executable, "server.py", wan.address("paris")])
    host, port = wan.route("nyc", "paris", 5000)
    client = wan.popen("nyc", [sys.executable, "client.py", host, str(port)])
    wan.set_pair("paris", "nyc", rtt_ms=200)
    wan.outage("paris", "nyc", seconds=5)
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from . import namespaces
from .control import (
    Command,
    EmulatorReady,
    EmulatorReply,
    ReportCommand,
    RouteCommand,
    SetBox,
    SetPair,
    StartOutage,
    WanStatistics,
)
from .errors import WanError, WanUnavailable
from .scenario import Scenario, ScenarioError

Kind = Literal["tun", "proxy"]

START_S = 60.0
REPLY_S = 20.0
STOP_S = 10.0
# Where `p2pserve` lies, for the emulator's own process: it may be a checkout that is not installed.
ROOT = Path(__file__).parents[3]

TUN_CANNOT = (
    "rates beyond what one Python process forwards (`calibrate` measures it); `late_ms_max` says if it fell behind",
    "packets that overtake each other, duplicates, corruption",
    "single packets dropped at a full queue: it drops what a stream sends at a time, up to 64 KB (`loss` is by packet)",
    "links whose capacity is shared with strangers, and policers",
    "more than one address or a mapped port of a box; IPv6",
)
PROXY_CANNOT = (
    "TCP over a long path (it ends at the proxy): no slow start, no congestion control, no real window",
    "one stream's limit, other than modelled: each connection has at most 2.7 MB under way",
    "packet loss: `loss` is ignored; an outage holds bytes back and loses none",
    "the round trip of connecting: a connect succeeds at once, a refusal comes later as a reset",
    "UDP; NAT; addresses: a box is reached through `route`, which differs by the box that dials",
)


def unavailable(kind: Kind) -> str | None:
    """Why that kind of emulation does not run here; None if it does."""
    return namespaces.unavailable() if kind == "tun" else None


def environment() -> dict[str, str]:
    """The environment in which `python -m p2pserve...` works in a box, installed or not."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


class EmulatedWan:
    """The boxes of `scenario` and what lies between them, carried by a process of its own.

    `kind`: "tun" (namespaces and TUN devices; needs root on Linux) or "proxy" (loopback ports, no
    root); None takes the first that runs here. `cannot_show` says what the chosen one leaves out:
    read it before you trust a figure.

    A context manager. Raises `WanUnavailable` when entered where that kind cannot run. When the
    block ends, or this process does, however that happens, the boxes, what runs in them and the
    network are gone. Thread-safe.
    """

    def __init__(self, scenario: Scenario, *, kind: Kind | None = None) -> None:
        self.scenario = scenario
        self._wish = kind
        self.kind: Kind = kind or "proxy"
        self.cannot_show: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._emulator: subprocess.Popen[bytes] | None = None
        self._ready = EmulatorReady()
        self._children: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        state = "up" if self._emulator is not None else "down"
        return f"<EmulatedWan {self.kind} of {', '.join(self.scenario.boxes)}: {state}>"

    def __enter__(self) -> Self:
        reason = None if self._wish == "proxy" else namespaces.unavailable()
        if self._wish == "tun" and reason is not None:
            raise WanUnavailable(f"a `tun` network: {reason}; or take kind='proxy'")
        self.kind = self._wish or ("tun" if reason is None else "proxy")
        self._emulator = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{self.kind}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,  # Ctrl-C in a terminal ends the owner; the emulator then tidies up
        )
        try:
            self._write(self.scenario.to_json().encode() + b"\n")
            self._ready = msgspec.json.decode(self._read_line(START_S), type=EmulatorReady)
            if self._ready.error:
                raise (WanUnavailable if self._ready.unavailable else ScenarioError)(self._ready.error)
        except BaseException:
            self.close()
            raise
        self.cannot_show = self._limits(reason)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _limits(self, reason: str | None) -> tuple[str, ...]:
        if self.kind == "proxy":
            why = () if reason is None else (f"what a `tun` network shows, since it {reason}",)
            return (*PROXY_CANNOT, *why)
        return (*TUN_CANNOT, *self._ready.notes)

    def address(self, box: str) -> str:
        """The address at which servers in `box` listen; of one behind NAT, that of its router."""
        if box not in self.scenario.boxes:
            raise ScenarioError(f"there is no box {box!r}; boxes: {', '.join(self.scenario.boxes)}")
        if box not in self._ready.addresses:
            raise WanError("the network is not up: use it in its `with` block")
        return self._ready.addresses[box]

    def route(self, a: str, b: str, port: int) -> tuple[str, int]:
        """The address that a process in `a` dials to reach `port` of `b`."""
        return self.address(b), self._ask(RouteCommand(a, b, port)).port

    def command(self, box: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in `box`."""
        self.address(box)
        return namespaces.command(self._ready.namespaces[box], argv) if self.kind == "tun" else list(argv)

    def namespace(self, box: str) -> str:
        """The network namespace that `box` is. Raises `WanError` where boxes are none."""
        self.address(box)
        if self.kind != "tun":
            raise WanError("a box is a network namespace in a `tun` network alone")
        return self._ready.namespaces[box]

    def popen(self, box: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in `box`; the process is killed when the network goes."""
        child: subprocess.Popen[Any] = subprocess.Popen(self.command(box, argv), **options)
        self._children.append(child)
        return child

    def set_pair(self, a: str, b: str, *, both: bool = True, **changes: float | None) -> None:
        """Change the pair's fields from now on, in both directions or from `a` to `b`."""
        self._ask(SetPair(a, b, changes, both))

    def set_box(self, box: str, **changes: float) -> None:
        """Change caps of a `Box`, from now on."""
        self._ask(SetBox(box, dict(changes)))

    def outage(self, a: str, b: str, seconds: float) -> None:
        """Let nothing pass between two boxes from now on; 0 ends an outage."""
        self._ask(StartOutage(a, b, seconds))

    def statistics(self) -> WanStatistics:
        """What passed and what was dropped so far, and how well the emulator kept up."""
        report = self._ask(ReportCommand()).report
        assert report is not None
        return report

    def close(self) -> None:
        """Take everything down; safe to call twice."""
        emulator, self._emulator = self._emulator, None
        for child in self._children:
            with suppress(ProcessLookupError):
                child.kill()
            child.wait()
        self._children.clear()
        if emulator is None:
            return
        assert emulator.stdin is not None
        assert emulator.stdout is not None
        with suppress(BrokenPipeError):
            emulator.stdin.close()
        try:
            emulator.wait(STOP_S)
        except subprocess.TimeoutExpired:
            emulator.kill()
            emulator.wait()
        emulator.stdout.close()
        if self.kind == "tun" and any(pid == emulator.pid for pid, _ in namespaces.running().values()):
            namespaces.sweep(of=emulator.pid)
        self._ready = EmulatorReady()

    def _ask(self, command: Command) -> EmulatorReply:
        with self._lock:
            if self._emulator is None:
                raise WanError("the network is not up: use it in its `with` block")
            self._write(msgspec.json.encode(command) + b"\n")
            reply = msgspec.json.decode(self._read_line(REPLY_S), type=EmulatorReply)
        if reply.error:
            raise ScenarioError(reply.error)
        return reply

    def _write(self, data: bytes) -> None:
        assert self._emulator is not None
        assert self._emulator.stdin is not None
        try:
            self._emulator.stdin.write(data)
            self._emulator.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read_line(self, timeout: float) -> bytes:
        assert self._emulator is not None
        assert self._emulator.stdout is not None
        if not select.select([self._emulator.stdout], [], [], timeout)[0]:
            raise WanError(f"the emulator has not answered for {timeout:g} s: is the machine overloaded?")
        line = self._emulator.stdout.readline()
        if not line:
            raise self._ended()
        return line

    def _ended(self) -> WanError:
        assert self._emulator is not None
        return WanError(f"the emulator has ended with exit code {self._emulator.wait()}; its errors are on stderr")
