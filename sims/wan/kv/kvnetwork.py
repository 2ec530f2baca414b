"""KV transfers between the boxes of an emulated network: one program in each box, told what to do
from here.

What is decided here is what a coordinator would decide from figures that were measured over the
emulated links; what is moved are real bytes through `kvtransport`, between processes that share
nothing but the network.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from ....kvtransport.probing.burst_ticket import issue_burst
from ....kvtransport.probing.estimates import LinkEstimator
from ....kvtransport.probing.figures import BoxFigures, LinkFigures, prior, streams_for
from ....kvtransport.probing.probe import ProbeSettings
from ....kvtransport.routing.paths import KVPath, PathNetwork
from ....kvtransport.wire.dial_path import DialPath
from ....kvtransport.wire.permits import Permit
from ....kvtransport.wire.tickets import LinkTicket, issue_link, issue_transfer
from ..emulated import EmulatedWan, environment
from ..errors import WanError
from . import orders
from .orders import Bulk, Order, OrderReply, TransferState

PINGS: Final = 3
PROBING: Final = ProbeSettings.wan()
"""Bursts are as long as those of nodes, and have as many streams at least."""

BURST_BYTES: Final = 400_000_000
DEADLINE_S: Final = 30.0
POLL_S: Final = 0.05
LEASE_S: Final = 600.0
# A guess before anything is measured: it only says how many streams the first burst has.
GUESS: Final = prior(50.0, 0.4, 1.0, reason="guess")


@dataclass(frozen=True, slots=True)
class Moved:
    """The state of each transfer of one link, in the order they were started."""

    transfers: tuple[TransferState, ...]

    @property
    def seconds(self) -> float:
        """From the start to the acknowledgement of the last."""
        return max(one.seconds for one in self.transfers)

    @property
    def bytes(self) -> int:
        """Payload of all."""
        return sum(one.bytes for one in self.transfers)

    @property
    def gbps(self) -> float:
        """Payload per time, all transfers together."""
        return 8e-9 * self.bytes / self.seconds

    @property
    def by_path(self) -> dict[str, int]:
        """Label of a path -> bytes confirmed over it."""
        total: dict[str, int] = {}
        for one in self.transfers:
            for label, size in one.by_path.items():
                total[label] = total.get(label, 0) + size
        return total

    @property
    def delivered(self) -> bool:
        """Whether all of them were."""
        return all(one.state == "delivered" for one in self.transfers)


class KVNetwork:
    """An emulated network with the KV program in each box; a context manager. `usd_per_gb`: each
    box's price, either way. `clock`, `sleep`: seconds."""

    def __init__(
        self,
        wan: EmulatedWan,
        *,
        usd_per_gb: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.wan = wan
        self.clock = clock
        self.sleep = sleep
        self._usd_per_gb = usd_per_gb
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._locks = {box: threading.Lock() for box in wan.scenario.boxes}
        self._ports: dict[str, int] = {}
        self._estimators: dict[tuple[str, str], LinkEstimator] = {}
        self._stack = ExitStack()

    def __repr__(self) -> str:
        return f"<KVNetwork over {self.wan!r}: {len(self._estimators)} links measured>"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.wan)
            for box in self.wan.scenario.boxes:
                command = [sys.executable, "-m", f"{__package__}.kvbox", self.wan.address(box)]
                pipe = subprocess.PIPE
                program = self.wan.popen(box, command, stdin=pipe, stdout=pipe, env=environment())
                self._programs[box] = stack.enter_context(program)
                stack.callback(program.kill)
            for box in self._programs:
                self._ports[box] = self._answer(box).port
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._programs.clear()

    def ask(self, box: str, order: Order) -> OrderReply:
        """Have a box's program carry out an order. Raises `WanError` if it does not."""
        with self._locks[box]:
            stdin = self._programs[box].stdin
            assert stdin is not None
            stdin.write(msgspec.json.encode(order) + b"\n")
            stdin.flush()
            answer = self._answer(box)
        if answer.error:
            raise WanError(f"{box}: {answer.error}")
        return answer

    def _answer(self, box: str) -> OrderReply:
        stdout = self._programs[box].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise WanError(f"the KV program in {box} has ended with exit code {self._programs[box].wait()}")
        return msgspec.json.decode(line, type=OrderReply)

    # ---- measuring ------------------------------------------------------------------------------------------

    def measure(self, a: str, b: str) -> LinkFigures:
        """Ping the link from `a` to `b`, send a burst over it, and return its figures."""
        estimator = self._estimators.setdefault((a, b), LinkEstimator(GUESS))
        host, port = self.wan.route(a, b, self._ports[b])
        for rtt_s in self.ask(a, orders.PingOrder(host, port, PINGS)).rtt_s:
            estimator.on_ping(rtt_s, now=self.clock())
        rtt_s = estimator.figures(self.clock()).rtt_s
        streams = max(streams_for(self.wan.scenario.fastest_gbps, rtt_s), PROBING.least_streams)
        seconds = PROBING.burst_seconds(rtt_s)
        ticket = issue_burst(
            streams=streams, seconds=seconds, max_bytes=BURST_BYTES, rtt_s=rtt_s, random=secrets.token_bytes
        )
        self.ask(b, orders.ExpectBurst(ticket))
        sample = self.ask(a, orders.SendBurst(ticket, host, port)).burst
        assert sample is not None
        estimator.on_burst(sample, now=self.clock())
        return estimator.figures(self.clock())

    def known(self) -> PathNetwork:
        """Figures of all measured links, and the caps that each box's owner states."""
        now = self.clock()
        boxes = {
            name: BoxFigures(
                up_gbps=box.up_gbps,
                down_gbps=box.down_gbps,
                up_usd_per_gb=self._usd_per_gb,
                down_usd_per_gb=self._usd_per_gb,
            )
            for name, box in self.wan.scenario.boxes.items()
        }
        return PathNetwork({ends: one.figures(now) for ends, one in self._estimators.items()}, boxes)

    # ---- moving ---------------------------------------------------------------------------------------------

    def connect(self, source: str, target: str, paths: Iterable[KVPath]) -> BulkTransfers:
        """Open a link over these paths and wait for its connections."""
        ticket = issue_link(LEASE_S, secrets.token_bytes)
        self.ask(target, orders.Listen(ticket))
        self.ask(source, orders.Connect(ticket, self.dialled(paths)))
        return BulkTransfers(self, source, target, ticket)

    def dialled(self, paths: Iterable[KVPath]) -> list[DialPath]:
        """The addresses of paths as their source sees them; relays are told to expect it."""
        found = []
        for path in paths:
            if path.via is None:
                host, port = self.wan.route(path.source, path.target, self._ports[path.target])
                found.append(DialPath(host, port, label=path.label, streams=path.streams))
                continue
            next_host, next_port = self.wan.route(path.via, path.target, self._ports[path.target])
            permit = Permit(
                permit=secrets.token_bytes(16),
                secret=secrets.token_bytes(32),
                next_host=next_host,
                next_port=next_port,
                byte_budget=1 << 40,
                bytes_per_s=1e12,
                expires_at=time.monotonic() + LEASE_S,
            )
            self.ask(path.via, orders.Admit(permit))
            host, port = self.wan.route(path.source, path.via, self._ports[path.via])
            found.append(DialPath(host, port, label=path.label, streams=path.streams, relay=permit))
        return found

    def relayed(self, box: str) -> int:
        """Bytes that a box has forwarded so far."""
        return self.ask(box, orders.Relayed()).relayed


class BulkTransfers:
    """A connected link from one box to another, and its transfers; a context manager."""

    def __init__(self, network: KVNetwork, source: str, target: str, ticket: LinkTicket) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._ticket = ticket
        self._past = 0

    def __repr__(self) -> str:
        return f"<BulkTransfers {self._source} -> {self._target}, link {self._ticket.link.hex()[:8]}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for box in (self._source, self._target):
            self._network.ask(box, orders.Forget(self._ticket.link))

    def start(self, frames: Sequence[int]) -> None:
        """Start a transfer of so many frames of 1 MiB for each number, all at once."""
        bulk = [
            Bulk(issue_transfer(self._ticket.link, "raw", DEADLINE_S, secrets.token_bytes), count) for count in frames
        ]
        self._network.ask(self._target, orders.Expect(self._ticket.link, bulk))
        self._network.ask(self._source, orders.Send(self._ticket.link, bulk))

    def look(self) -> Moved:
        """How far they are."""
        states = self._network.ask(self._source, orders.Watch(self._ticket.link)).transfers
        return Moved(tuple(states[self._past :]))

    def forget(self) -> None:
        """Speak no more of the transfers there were until now."""
        self._past += len(self.look().transfers)

    def set_paths(self, paths: Iterable[KVPath]) -> None:
        """Move them to these paths."""
        self._network.ask(self._source, orders.SetPathsOrder(self._ticket.link, self._network.dialled(paths)))

    def wait(self, each: Callable[[Moved], None] | None = None) -> Moved:
        """Until every transfer has ended; `each(moved)` is called 20 times a second. Raises
        `WanError` on failure."""
        while True:
            moved = self.look()
            failed = [one.reason for one in moved.transfers if one.state == "failed"]
            if failed:
                raise WanError(f"{len(failed)} of {len(moved.transfers)} transfers failed: {failed[0]}")
            if moved.delivered:
                return moved
            if each is not None:
                each(moved)
            self._network.sleep(POLL_S)

    def move(self, frames: Sequence[int]) -> Moved:
        """Start and wait."""
        self.start(frames)
        return self.wait()
