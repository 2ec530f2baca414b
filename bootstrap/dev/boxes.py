"""Nodes with emulated engines as processes of this machine, and what they say of their network."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

BASE_PORT: Final = 21_000
_COMMAND: Final = (sys.executable, "-m", "p2pserve.sdk.cli")  # by its name: this room knows nothing of nodes
_ENGINE: Final = ("--engine", "emulated", "--emulate", "1xA40", "--model", "llama-7b")


@dataclass(eq=False)
class BoxProcess:
    """One node's process and what it has said so far."""

    number: int
    home: Path
    process: subprocess.Popen[str]
    started_at: float
    peer: str = ""  # its name, as the others say it
    tokens: dict[str, str] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)  # other nodes, in its view
    leader: tuple[str, int] | None = None
    plan: str = ""
    plans: list[tuple[float, str]] = field(default_factory=list)
    engine_ended_at: list[float] = field(default_factory=list)
    gone: list[tuple[float, str]] = field(default_factory=list)
    leaders: list[tuple[float, tuple[str, int]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None

    def hear(self, line: str, now: float) -> None:
        """Take in a line that the node has said."""
        self.log.append(line)
        word, _, rest = line.partition(": ")
        if word == "joined":
            self.alive.add(rest)
        elif word == "gone":
            self.alive.discard(rest)
            self.gone.append((now, rest))
        elif word == "coordinator":
            who, _, epoch = rest.partition(" (epoch ")
            self.leader = (self.peer if who == "this node" else who, int(epoch.rstrip(")")))
            self.leaders.append((now, self.leader))
        elif line.startswith("plan "):
            self.plan = line.split(" ", 2)[1]
            self.plans.append((now, self.plan))
        elif word == "engine restarting":
            self.engine_ended_at.append(now)


class BoxNetwork:
    """The nodes of one network. Use as a context: nothing that was started outlives it."""

    def __init__(self) -> None:
        self.all: list[BoxProcess] = []
        self._attackers: list[subprocess.Popen[str]] = []
        self._home = Path(tempfile.mkdtemp(prefix="p2pserve-bench-"))
        self._changed = threading.Condition()
        # Modules are compiled once, as where the package was installed, whatever this shell says of it.
        self._environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environment["P2PSERVE_CONFIG"] = os.devnull  # the user's own says nothing of these boxes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for attacker in self._attackers:
            attacker.kill()
            attacker.wait()
        for box in self.all:
            self.kill(box)
        shutil.rmtree(self._home, ignore_errors=True)

    def running(self) -> list[BoxProcess]:
        """The boxes whose processes have not ended."""
        return [box for box in self.all if box.is_running]

    def start_first(self) -> BoxProcess:
        """Start the network, and wait until it is there."""
        first = self._start(0, ("bootstrap",))
        self.wait(lambda: bool(first.peer), 60.0, "the bootstrap to start")
        return first

    def join(self, numbers: Iterable[int]) -> list[BoxProcess]:
        """Start boxes that join it, all at once."""
        first = self.all[0]
        token = first.tokens["leader"]
        return [self._start(number, ("join", "--bootstrap", token, *_ENGINE)) for number in numbers]

    def attack(self, sockets: int, entries: int) -> subprocess.Popen[str]:
        """Let an attacker with a worker's token begin (`attacker.py`); it ends with this context."""
        first = self.all[0]
        command = [
            *(sys.executable, "-m", "p2pserve.bootstrap.dev.attacker"),
            *(f"127.0.0.1:{BASE_PORT}", "--sockets", str(sockets), "--entries", str(entries)),
        ]
        attacker = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**self._environment, "P2PSERVE_TOKEN": first.tokens["worker"]},
        )
        self._attackers.append(attacker)
        assert attacker.stdout is not None
        if not attacker.stdout.readline():
            raise RuntimeError(f"the attacker ended at once: {attacker.wait()}")
        return attacker

    def restart(self, lost: BoxProcess) -> BoxProcess:
        """Start a box that was killed again, with its home."""
        if lost.number:
            return self.join((lost.number,))[0]
        return self.start_first()

    def kill(self, box: BoxProcess) -> None:
        """End a box as a power cut would end its processes."""
        self.signal(box, signal.SIGKILL)
        box.process.wait()

    def end_engine(self, box: BoxProcess) -> None:
        """Kill what a box's fork server has forked: its engine, which its node starts again."""
        agent = psutil.Process(box.process.pid)
        for process in agent.children(recursive=True):
            if process.ppid() != agent.pid:
                process.kill()

    def signal(self, box: BoxProcess, number: int) -> None:
        """Send a signal to all processes of a box."""
        try:
            os.killpg(box.process.pid, number)
        except ProcessLookupError:
            return

    def wait(self, holds: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until something holds; how long it took. Raises TimeoutError."""
        began = time.monotonic()
        with self._changed:
            while not holds():
                if time.monotonic() - began > seconds:
                    raise TimeoutError(f"after {seconds:g} s still waiting for {what}")
                self._changed.wait(0.5)
        return time.monotonic() - began

    def are_whole(self, boxes: Iterable[BoxProcess]) -> bool:
        """Whether these see each other and nobody else, follow one leader among them, and have one plan."""
        boxes = list(boxes)
        peers = {box.peer for box in boxes}
        return (
            "" not in peers
            and all(box.alive == peers - {box.peer} for box in boxes)
            and len({box.leader for box in boxes}) == 1
            and all(box.leader is not None and box.leader[0] in peers for box in boxes)
            and len({box.plan for box in boxes}) == 1
            and all(box.plan for box in boxes)
        )

    def _start(self, number: int, command: tuple[str, ...]) -> BoxProcess:
        home = self._home / str(number)
        home.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [
                *_COMMAND,
                *command,
                "--home",
                str(home),
                "--listen",
                f"127.0.0.1:{BASE_PORT + number}",
                "--announce",
                f"127.0.0.1:{BASE_PORT + number}",
                "--format",
                "json",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=self._environment,
        )
        box = BoxProcess(number, home, process, time.monotonic())
        self.all = [each for each in self.all if each.number != number or each.is_running] + [box]
        self.all.sort(key=lambda each: each.number)
        for stream, take in ((process.stdout, self._greet), (process.stderr, self._hear)):
            threading.Thread(target=self._read, args=(box, stream, take), daemon=True).start()
        return box

    def _read(self, box: BoxProcess, stream: Iterable[str], take: Callable[[BoxProcess, str, float], None]) -> None:
        for line in stream:
            now = time.monotonic()
            with self._changed:
                take(box, line.rstrip("\n"), now)
                self._changed.notify_all()

    def _greet(self, box: BoxProcess, line: str, now: float) -> None:
        greeting = json.loads(line)
        box.peer, box.tokens = greeting["name"], greeting["tokens"]
        if box.leader is not None and not box.leader[0]:  # it has said that it leads before it said who it is
            box.leader = (box.peer, box.leader[1])

    def _hear(self, box: BoxProcess, line: str, now: float) -> None:
        box.hear(line, now)
