"""Measure an emulated network from outside, with plain programs in two boxes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

from .emulated import EmulatedWan, environment
from .errors import WanError

_ports = itertools.count(20_001)


def bulk(wan: EmulatedWan, a: str, b: str, *, streams: int, seconds: float) -> float:
    """Gb/s of payload over `streams` plain TCP connections, in their steady state."""
    figures = _pair(wan, a, b, ("receive", str(streams), str(seconds)), ("send", str(streams), str(seconds + 60)))
    return float(figures["gbps"])


def rtt(wan: EmulatedWan, a: str, b: str, *, count: int) -> list[float]:
    """Round trips in ms of `count` small messages, one after the other, on one TCP connection."""
    return [float(value) for value in _pair(wan, a, b, ("echo",), ("ping", str(count)))["rtt_ms"]]


def loss(wan: EmulatedWan, a: str, b: str, *, count: int) -> float:
    """The part of `count` datagrams of 1000 bytes that does not arrive."""
    received = _pair(wan, a, b, ("count",), ("datagrams", str(count)))["received"]
    return 1 - float(received) / count


def _pair(wan: EmulatedWan, a: str, b: str, listen: tuple[str, ...], dial: tuple[str, ...]) -> dict[str, Any]:
    """Listen in `b` and dial from `a`, until the measuring one has reported."""
    port = next(_ports)
    listener = _start(wan, b, listen[0], wan.address(b), port, listen[1:])
    dialler = None
    try:
        assert listener.stdout is not None
        if listener.stdout.readline() != "ready\n":
            raise WanError(f"the measuring program in {b} did not start")
        dialler = _start(wan, a, dial[0], *wan.route(a, b, port), dial[1:])
        reporter = dialler if dial[0] == "ping" else listener
        assert reporter.stdout is not None
        line = reporter.stdout.readline()
        if not line:
            raise WanError(f"the measuring programs between {a} and {b} ended without a figure")
        figures: dict[str, Any] = json.loads(line)
        return figures
    finally:
        for child in (listener, dialler):
            if child is not None:
                child.kill()
                child.communicate()


def _start(
    wan: EmulatedWan, box: str, role: str, host: str, port: int, arguments: tuple[str, ...]
) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", f"{__package__}.traffic", role, host, str(port), *arguments]
    return wan.popen(box, argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment())
