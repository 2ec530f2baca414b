"""The processes of a run: boxes that are killed, stopped and started again, and gone when it ends.

A box is an agent with what it has started: its engine's fork server, the engine, the planning process. All that was
started for a run has its mark in the environment, so that what outlives its box is found.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import msgspec
import psutil
import trio

from ..demo.box import NodeGreeting, node_environment
from ..errors import DemoFailed
from .links import BoxPlace

LIAR: Final = "p2pserve.sdk.chaos.liar"
MARK: Final = "CHAOS_RUN"
JOIN_S: Final = 90.0  # an agent asks members that do not answer for 60 s
AGAIN_S: Final = 1.0  # between two attempts of an owner to start a box
LEAVE_S: Final = 15.0
GONE_S: Final = 5.0
LOG_LINE: Final = 300

Say = Callable[[str], None]


@final
class ChaosBox:
    """One box of the network. Number 0 is the bootstrap. `starts`: of its agent; `troubles`: what went wrong that no
    fault explains."""

    def __init__(self, number: int, home: Path, command: Sequence[str], mark: str) -> None:
        self.number = number
        self.home = home
        self.greeting: NodeGreeting | None = None
        self.starts = 0
        self.troubles: list[str] = []
        self._command = command
        self._mark = mark
        self._process: trio.Process | None = None
        self._is_meant_to_end = False

    def __repr__(self) -> str:
        return f"<ChaosBox {self.number} pid={self.pid} starts={self.starts}>"

    @property
    def peer(self) -> str:
        """Its peer id, once it has joined for the first time."""
        return self.greeting.peer if self.greeting is not None else ""

    @property
    def pid(self) -> int | None:
        """Of its agent, while that runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self, token: str | None) -> None:
        """Start it, again and again if it ends, until it has joined, as the owner of a box would. Raises DemoFailed
        where that takes too long."""
        with trio.move_on_after(JOIN_S):
            while True:
                status = await self._start(token)
                if status is None:
                    return
                if self._is_meant_to_end:
                    return
                self.troubles.append(f"box {self.number} did not join, status {status}{self.read_last_line()}")
                await trio.sleep(AGAIN_S)
        raise DemoFailed(f"box {self.number} has not joined within {JOIN_S:g} s{self.read_last_line()}")

    async def watch(self) -> None:
        """Until its agent has ended: a trouble, unless it was meant to."""
        process = self._process
        if process is None:
            return
        status = await process.wait()
        if process is self._process and not self._is_meant_to_end:
            self.troubles.append(f"box {self.number} ended by itself, status {status}{self.read_last_line()}")

    async def kill(self) -> None:
        """End all its processes at once, as a power cut does."""
        self._is_meant_to_end = True
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, to the agent first."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def signal_engine(self, number: signal.Signals, pid: int) -> bool:
        """Send a signal to its engine, if that is still its process."""
        for process in self.processes():
            if process.pid == pid:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
                    return True
        return False

    async def leave(self) -> int | None:
        """Let it leave the network; the status it ended with, None where it did not in time."""
        self._is_meant_to_end = True
        if self._process is None or self._process.returncode is not None:
            return self._process.returncode if self._process is not None else None
        self._process.send_signal(signal.SIGTERM)
        with trio.move_on_after(LEAVE_S):
            return await self._process.wait()
        return None

    def processes(self) -> list[psutil.Process]:
        """Its agent and all that this has started."""
        if self.pid is None:
            return []
        try:
            agent = psutil.Process(self.pid)
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def read_last_line(self) -> str:
        """What its agent said last, with a colon before it."""
        log = self.home.with_suffix(".log")
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return f": {lines[-1].removeprefix('p2pserve: error: ')[:LOG_LINE]}" if lines else ""

    async def _start(self, token: str | None) -> int | None:
        """Start its agent; None when it has joined, or the status it ended with before."""
        environment = {**node_environment(), MARK: self._mark, "TMPDIR": os.fspath(self.home.parent / "tmp")}
        if token is not None:
            environment["P2PSERVE_BOOTSTRAP"] = token
        self._is_meant_to_end = False
        # Shielded: a process that was started must be known.
        with trio.CancelScope(shield=True), self.home.with_suffix(".log").open("ab") as errors:
            self._process = process = await trio.lowlevel.open_process(
                list(self._command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which then ends them
            )
            self.starts += 1
        assert process.stdout is not None
        line = b""
        async with process.stdout:  # it says nothing more after its greeting
            while not line.endswith(b"\n"):
                data = await process.stdout.receive_some()
                if not data:
                    return await process.wait()
                line += data
        self.greeting = msgspec.json.decode(line, type=NodeGreeting)
        return None


@final
class ChaosNetwork:
    """The boxes of one network on this machine, under one folder. The first `closed` of them cannot be dialled."""

    def __init__(
        self, home: Path, places: Sequence[BoxPlace], options: Sequence[Sequence[str]], codec: str, closed: int
    ) -> None:
        self.home = home
        self.mark = secrets.token_hex(8)
        (home / "tmp").mkdir()
        self._codec = codec
        self.bootstrap = self._box(0, "bootstrap", places[0], ())
        self.serving = [
            self._box(number, "join", place, (*its, *(place.closed_options() if number <= closed else ())))
            for number, (place, its) in enumerate(zip(places[1 : len(options) + 1], options, strict=True), 1)
        ]
        self._liar_place = places[-1]

    def __repr__(self) -> str:
        return f"<ChaosNetwork {self.home} boxes={len(self.boxes)}>"

    @property
    def boxes(self) -> list[ChaosBox]:
        """All, the bootstrap first."""
        return [self.bootstrap, *self.serving]

    @property
    def tokens(self) -> dict[str, str]:
        """What the bootstrap has issued, by role."""
        assert self.bootstrap.greeting is not None
        return self.bootstrap.greeting.tokens

    def token_of(self, box: ChaosBox) -> str | None:
        """With what a box joins. All may lead: the coordinator is among those that are killed."""
        return None if box is self.bootstrap else self.tokens["leader"]

    async def start(self) -> None:
        """Start all; return when they have joined. Raises DemoFailed."""
        await self.bootstrap.run(None)
        async with trio.open_nursery() as nursery:
            for box in self.serving:
                nursery.start_soon(box.run, self.token_of(box))

    async def run_liar(self, seed: int) -> None:
        """One more box lies until this is cancelled; started again where it ends."""
        place, log = self._liar_place, self.home / "liar.log"
        command = [*place.prefix, sys.executable, "-m", LIAR, "--listen", place.listen, "--seed", str(seed)]
        environment = {**node_environment(), MARK: self.mark, "P2PSERVE_TOKEN": self.tokens["worker"]}
        while True:
            with log.open("ab") as said:
                await trio.run_process(command, check=False, env=environment, stdout=said, stderr=said)
            await trio.sleep(AGAIN_S)

    async def leave(self) -> list[str]:
        """Let all leave, the bootstrap last; what did not end as it should."""
        said: list[str] = []

        async def end(box: ChaosBox) -> None:
            status = await box.leave()
            if status != 0:
                said.append(f"box {box.number} left with status {status}{box.read_last_line()}")

        async with trio.open_nursery() as nursery:
            for box in self.serving:
                nursery.start_soon(end, box)
        await end(self.bootstrap)
        return said

    async def find_leaked(self) -> list[str]:
        """Processes that were started for this run and have not ended, after a moment."""
        left = find_marked(self.mark)
        with trio.move_on_after(GONE_S):
            while left:
                await trio.sleep(0.1)
                left = find_marked(self.mark)
        return [f"process {process.pid} was left: {_describe(process)}" for process in left]

    async def end(self) -> None:
        """Kill whatever still runs."""
        for box in self.boxes:
            await box.kill()
        for process in find_marked(self.mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _box(self, number: int, verb: str, place: BoxPlace, options: Iterable[str]) -> ChaosBox:
        home = self.home / f"box-{number}"
        command = [*place.prefix, sys.executable, "-m", "p2pserve.sdk.cli", verb, *options, "--home", os.fspath(home)]
        command += ["--listen", place.listen, "--format", "json", "--drain-s", "2", "--codec", self._codec]
        return ChaosBox(number, home, command, self.mark)


def find_marked(mark: str) -> list[psutil.Process]:
    """The processes of this machine that have this mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:LOG_LINE]
    except psutil.Error:
        return "it has ended now"
