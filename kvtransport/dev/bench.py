"""How fast a link moves KV, beside plain sockets, TLS and libp2p, in one run on loopback between
two processes.

    python -m p2pserve.kvtransport.bench [--repeats 3] [--format json]

Every figure is the median of interleaved repeats, so that what else the machine does meets all
contenders alike; the targets are ratios to raw TCP of the same run. All send the same 4 MiB
buffers, in turn. The link at 1 Gb/s is held there by the kernel (SO_MAX_PACING_RATE on the sender's
sockets). CPU seconds are those of both processes together, for each GiB of payload; for `kv4`, of
16-bit KV.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from .bench_ends import LAYER_BYTES

_MIB = 1 << 20
_GBPS = 125_000_000
_STREAMS = (1, 2, 4)
_LIBP2P = "p2pserve.bootstrap.dev.libp2p_bench"

TARGETS = {
    "encrypted / raw TCP": 0.55,
    "kv4 16-bit / raw TCP": 0.4,
    "kv4 / raw TCP at 1 Gb/s": 3.3,
    "encrypted / libp2p": 5.0,
}
"""What each ratio should reach at least."""


@dataclass(slots=True)
class BenchResults:
    """Measurements by contender: seconds and CPU seconds of each repeat, and the bytes of one."""

    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, size: int, seconds: float, cpu: float) -> None:
        self.sizes[name] = size
        self.seconds.setdefault(name, []).append(seconds)
        self.cpu.setdefault(name, []).append(cpu)

    def mib_s(self, name: str) -> float:
        """Median."""
        return self.sizes[name] / _MIB / statistics.median(self.seconds[name])

    def cpu_s_per_gib(self, name: str) -> float:
        """Median."""
        return statistics.median(self.cpu[name]) / (self.sizes[name] / (1 << 30))


class _BenchProcess:
    """A process of `bench_ends`."""

    def __init__(self, role: str) -> None:
        command = [sys.executable, "-m", "p2pserve.kvtransport.dev.bench_ends", role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.role = role
        ports = self.answer()
        self.ports = {"port": int(ports["port"]), "link_port": int(ports["link_port"])}

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that {self.role}s has ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextmanager
def _children(kv: bool) -> Iterator[tuple[_BenchProcess, _BenchProcess]]:
    with ExitStack() as stack:
        receiver = _BenchProcess("receive")
        stack.callback(receiver.close)
        sender = _BenchProcess("send")
        stack.callback(sender.close)
        for child in (receiver, sender):
            child.tell({"op": "prepare", "kv": kv} | receiver.ports)
        for child in (receiver, sender):
            child.answer()
        yield sender, receiver


@contextmanager
def open_plain_link() -> Iterator[Callable[[int], float]]:
    """A warm link of one connection between two processes that do nothing else. The function sends
    `size` opaque bytes over it, rounded down to whole buffers of 4 MiB but at least one, and
    returns bytes per second."""
    with _children(kv=False) as (sender, receiver):

        def bytes_per_second(size: int) -> float:
            whole = max(1, size // (4 * _MIB)) * 4 * _MIB
            command = {"op": "link", "bytes": whole, "streams": 1, "codec": "raw", "link": 1}
            results = BenchResults()
            _measure(sender, receiver, command, results, "link")
            return results.mib_s("link") * _MIB

        yield bytes_per_second


def run(repeats: int, scale: float = 1.0, *, kv: bool = True, libp2p: bool = True) -> BenchResults:
    """Measure. `scale` multiplies what is sent; without `kv` no process imports torch."""
    big, layer = int(1024 * scale) * _MIB, LAYER_BYTES
    commands: dict[str, dict[str, Any]] = {
        "raw_tcp": {"op": "raw", "bytes": big},
        "tls": {"op": "tls", "bytes": big // 2},
    }
    for streams in _STREAMS:
        commands[f"ours x{streams}"] = {"op": "link", "bytes": big, "streams": streams, "codec": "raw", "link": streams}
    if kv:
        slow = max(1, int(20 * scale)) * layer
        commands["kv4"] = {"op": "kv", "bytes": big // layer * layer, "streams": 1, "codec": "kv4", "link": 10}
        commands["raw_tcp 1 Gb/s"] = {"op": "raw", "bytes": slow // (4 * _MIB) * 4 * _MIB, "pace": _GBPS}
        commands["kv4 1 Gb/s"] = {
            "op": "kv", "bytes": slow, "streams": 1, "codec": "kv4", "link": 11, "pace": _GBPS
        }  # fmt: skip
    results = BenchResults()
    with _children(kv) as (sender, receiver):
        for name, command in commands.items():  # a first round, not counted: connections, pages and caches get warm
            _measure(sender, receiver, command | {"bytes": min(command["bytes"], 16 * layer)}, BenchResults(), name)
        for _ in range(repeats):
            for name, command in commands.items():
                _measure(sender, receiver, command, results, name)
    for _ in range(repeats if libp2p else 0):
        size = int(128 * scale) * _MIB
        found = _run_libp2p(size)
        results.add("libp2p", size, found["seconds"], found["cpu_s"])
    return results


def _measure(
    sender: _BenchProcess, receiver: _BenchProcess, command: dict[str, Any], results: BenchResults, name: str
) -> None:
    receiver.tell(command)
    sender.tell(command)
    sent, received = sender.answer(), receiver.answer()
    results.add(name, command["bytes"], sent["seconds"], sent["cpu_s"] + received["cpu_s"])


def _run_libp2p(size: int) -> dict[str, float]:
    """In processes of their own: this room does not know libp2p."""
    command = [sys.executable, "-m", _LIBP2P, "--bytes", str(size), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{_LIBP2P} failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def report(results: BenchResults) -> dict[str, Any]:
    """The figures as JSON has them."""
    ours = {str(streams): round(results.mib_s(f"ours x{streams}"), 1) for streams in _STREAMS}
    raw = results.mib_s("raw_tcp")
    found: dict[str, Any] = {
        "raw_tcp_mib_s": round(raw, 1),
        "ours_mib_s": ours,
        "tls_mib_s": round(results.mib_s("tls"), 1),
    }
    ratios = {"encrypted / raw TCP": max(ours.values()) / raw}
    if "libp2p" in results.sizes:
        found["libp2p_mib_s"] = round(results.mib_s("libp2p"), 1)
        ratios["encrypted / libp2p"] = max(ours.values()) / results.mib_s("libp2p")
    if "kv4" in results.sizes:
        found["kv4_16bit_mib_s"] = round(results.mib_s("kv4"), 1)
        ratios["kv4 16-bit / raw TCP"] = results.mib_s("kv4") / raw
        speedup = results.mib_s("kv4 1 Gb/s") / results.mib_s("raw_tcp 1 Gb/s")
        found["kv4_speedup_at_1gbps"] = round(speedup, 2)
        found["raw_tcp_at_1gbps_mib_s"] = round(results.mib_s("raw_tcp 1 Gb/s"), 1)
        found["kv4_at_1gbps_16bit_mib_s"] = round(results.mib_s("kv4 1 Gb/s"), 1)
        ratios["kv4 / raw TCP at 1 Gb/s"] = speedup
    found["cpu_s_per_gib"] = {name: round(results.cpu_s_per_gib(name), 3) for name in results.sizes}
    found["ratios"] = {name: round(value, 3) for name, value in ratios.items()}
    found["targets"] = {name: TARGETS[name] for name in ratios}
    found["held_to_1gbps_by"] = "SO_MAX_PACING_RATE on the sender's sockets (kernel)"
    found["repeats"] = len(results.seconds["raw_tcp"])
    return found


def table(results: BenchResults) -> str:
    """The same for people."""
    raw = results.mib_s("raw_tcp")
    lines = [f"{'contender':16}{'MiB/s':>10}{'of raw TCP':>12}{'CPU s/GiB':>11}"]
    for name in results.sizes:
        rate = results.mib_s(name)
        lines.append(f"{name:16}{rate:10.0f}{rate / raw:12.2f}{results.cpu_s_per_gib(name):11.2f}")
    found = report(results)
    for name, value in found["ratios"].items():
        wanted = found["targets"][name]
        lines.append(f"{name:26}{value:8.2f}   target {wanted:g}: {'reached' if value >= wanted else 'not reached'}")
    lines.append("kv4 rows count 16-bit KV; 1 Gb/s: held by the kernel's pacing of the sender's sockets")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.kvtransport.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies what is sent")
    parser.add_argument("--without-kv", action="store_true", help="leave out what needs torch")
    parser.add_argument("--without-libp2p", action="store_true")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or not 0.05 <= options.scale <= 100:
        parser.error("--repeats must be at least 1, and --scale from 0.05 to 100")
    results = run(options.repeats, options.scale, kv=not options.without_kv, libp2p=not options.without_libp2p)
    text = json.dumps(report(results)) if options.format == "json" else table(results)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
