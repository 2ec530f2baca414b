"""The processes of the demo: everything it starts, watched while it runs and gone when it ends.

    demo --- fork server --- engine, engine, ...     (one channel for each node, one for the demo itself)
        |--- bootstrap
        |--- join, join, ...
        `--- measurement of bits per byte

Nothing outlives `open_box`: processes are ended by their ids, the folder is removed, also after a
cancellation at any moment.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
import psutil
import trio

from ...coordinator import Phase
from ...node.engine.agent_side.fork_server import fork_server_command
from ..environment import CONFIG
from ..errors import DemoFailed

KV_CACHE_MIB = 64
MEMORY_INTERVAL_S = 1.0
LEAVE_S = 8.0
DRAIN_S = 2.0
GONE_S = 2.0
LOG_LINE = 300  # characters of a log's last line that go into an error
ON_LOOPBACK = "127.0.0.1:0"

Inside = Callable[[list[str]], list[str]]
"""From a command to the one that runs it somewhere, such as in a network namespace, in the same process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGreeting:
    """What a node prints once it has been admitted."""

    peer: str
    address: str
    tokens: dict[str, str]


@final
@dataclass(slots=True)
class _DemoProcess:
    name: str
    process: trio.Process
    log: Path | None
    expected_to_end: bool = False
    peer: str = ""  # of a node that has been admitted


@final
class DemoBox:
    """What the demo has started. Use `open_box`."""

    def __init__(self, home: Path, nursery: trio.Nursery) -> None:
        self.home = home
        self.peak_memory_mib = 0.0
        self._nursery = nursery
        self._children: list[_DemoProcess] = []
        self._channels: list[socket.socket] = []

    def __repr__(self) -> str:
        return f"<DemoBox {self.home} processes={len(self._children)}>"

    async def start_fork_server(self, channels: int, *, backend: str = "vllm") -> None:
        """Start the fork server of all engines, with this many channels for `take_channel` and this
        backend preloaded. It keeps one more channel, to outlive the last engine."""
        theirs = []
        for _ in range(channels + 1):
            ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channels.append(ours)
            theirs.append(other)
        log = self.home / "fork-server.log"
        command, environment = fork_server_command(theirs, log=log, threads=1, backend=backend)
        # vLLM leaves a temporary file behind for each engine.
        environment["TMPDIR"] = str(self.home)
        descriptors = tuple(other.fileno() for other in theirs)
        try:
            await self._start("the fork server", command, environment, log, descriptors)
        finally:
            for other in theirs:
                other.close()

    def take_channel(self) -> socket.socket:
        """A channel of the fork server; the caller closes it."""
        return self._channels.pop()

    async def start_bootstrap(self, codec: str) -> NodeGreeting:
        """Start a network."""
        child = await self._start_node("bootstrap", ["bootstrap", "--codec", codec], {}, ())
        return await self._greeting(child)

    async def join_all(self, nodes: int, token: str, options: list[str], phases: Sequence[Phase]) -> dict[int, str]:
        """Start so many nodes with these `p2pserve join` options at once, pinned to the phases in turn (none: as the
        planner wants); returns their ids, by numbers from 1 on, when all have joined."""
        peers: dict[int, str] = {}

        async def join(number: int) -> None:
            pin = ["--phase", phases[number % len(phases)].value] if phases else []
            peers[number] = (await self.join(number, token, [*options, *pin])).peer

        async with trio.open_nursery() as nursery:
            for number in range(1, nodes + 1):
                nursery.start_soon(join, number)
        return peers

    async def join(self, number: int, token: str, options: list[str], *, drain_s: float = DRAIN_S) -> NodeGreeting:
        """Start a node with these `p2pserve join` options; no other has this number. `drain_s`: for its requests to
        finish when it leaves."""
        with self.take_channel() as channel:
            descriptor = channel.fileno()
            arguments = ["join", *options, "--engine-channel", str(descriptor)]
            environment = {"P2PSERVE_BOOTSTRAP": token}
            child = await self._start_node(f"node {number}", arguments, environment, (descriptor,), drain_s=drain_s)
        return await self._greeting(child)

    async def start_elsewhere(
        self, name: str, arguments: list[str], *, listen: str, token: str = "", inside: Inside
    ) -> NodeGreeting:
        """Start a node by `p2pserve` with these arguments where `inside` runs it, with an engine of its own."""
        environment = {"P2PSERVE_BOOTSTRAP": token} if token else {}
        child = await self._start_node(f"node {name}", arguments, environment, (), listen=listen, inside=inside)
        return await self._greeting(child)

    async def start_client(self, module: str, *options: str, token: str, inside: Inside) -> trio.Process:
        """Run a module of ours where `inside` runs it, as a client of the network; it is told what to do on its
        input."""
        environment = {**node_environment(), "P2PSERVE_BOOTSTRAP": token}
        command = inside([sys.executable, "-m", module, *options])
        child = await self._start("the client", command, environment, self.home / "client.log", (), has_input=True)
        return child.process

    def node_pid(self, peer: str) -> int:
        """The process of a node that has joined; it may end from now on."""
        child = next(child for child in reversed(self._children) if child.peer == peer)  # it may have started again
        child.expected_to_end = True
        return child.process.pid

    def kill_node(self, peer: str) -> None:
        """Kill a node that has joined, and all that it has started; nothing if it has ended."""
        _kill(self._node_tree(peer))

    def stop_node(self, peer: str) -> None:
        """Stop a node that has joined, and all that it has started: it does nothing more, and its connections stay."""
        for process in self._node_tree(peer):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def _node_tree(self, peer: str) -> list[psutil.Process]:
        try:
            process = psutil.Process(self.node_pid(peer))
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def is_running(self, pid: int) -> bool:
        """Whether a process runs because of us."""
        return pid in {process.pid for process in self._tree()}

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process that runs because of us. Raises DemoFailed where it does not."""
        ended = f"process {pid} is none of this run, or has ended"
        if not self.is_running(pid):
            raise DemoFailed(ended)
        try:
            os.kill(pid, number)
        except ProcessLookupError as error:
            raise DemoFailed(ended) from error

    async def start_measurement(self, module: str, *options: str) -> trio.Process:
        """Run a module of ours at the lowest priority; it prints its result, and may fail."""
        environment = {**node_environment(), "OMP_NUM_THREADS": "1"}
        log = self.home / "measurement.log"
        child = await self._start("the measurement", [sys.executable, "-m", module, *options], environment, log, ())
        child.expected_to_end = True
        try:
            psutil.Process(child.process.pid).nice(19)
        except psutil.NoSuchProcess:
            pass  # it has ended already, and its output says why
        return child.process

    def cpu_seconds(self) -> dict[int, float]:
        """Processor seconds of this process and of each that it started so far, by id."""
        found = {}
        for process in (psutil.Process(), *self._tree()):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            found[process.pid] = times.user + times.system
        return found

    def node_memory_mib(self) -> float:
        """The most resident memory that any node has had so far, without its engine."""
        nodes = [child.process.pid for child in self._children if child.name.startswith("node")]
        return max((resident_peak_mib(pid) for pid in nodes), default=0.0)

    def engine_logs(self) -> str:
        """What the engines of all nodes have had to say."""
        return "".join(path.read_text("utf-8", "replace") for path in sorted(self.home.glob("*/engine.log")))

    async def leave(self) -> bool:
        """Let the nodes leave, the bootstrap last. Whether all did, in time and with status 0."""
        for child in self._children:
            child.expected_to_end = True
        nodes = [child for child in self._children if child.name.startswith("node")]
        rest = [child for child in self._children if child.name == "bootstrap"]
        for group in (nodes, rest):
            for child in group:
                if child.process.returncode is None:
                    child.process.send_signal(signal.SIGTERM)
            with trio.move_on_after(LEAVE_S):
                for child in group:
                    await child.process.wait()
        return all(child.process.returncode == 0 for child in (*nodes, *rest))

    async def _start_node(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        descriptors: tuple[int, ...],
        *,
        listen: str = ON_LOOPBACK,
        inside: Inside = list,
        drain_s: float = DRAIN_S,
    ) -> _DemoProcess:
        home = self.home / name.replace(" ", "-")
        command = [sys.executable, "-m", "p2pserve.sdk.cli", *arguments, "--home", str(home)]
        command += ["--listen", listen, "--format", "json", "--drain-s", f"{drain_s:g}"]
        environment = {**node_environment(), **environment}
        return await self._start(name, inside(command), environment, home.with_suffix(".log"), descriptors)

    async def _start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        descriptors: tuple[int, ...],
        *,
        has_input: bool = False,
    ) -> _DemoProcess:
        # Shielded: a process that was started must be in the list.
        with trio.CancelScope(shield=True), log.open("wb") as errors:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends them in order
            )
            child = _DemoProcess(name, process, log)
            self._add(child)
        return child

    def _add(self, child: _DemoProcess) -> None:
        self._children.append(child)
        self._nursery.start_soon(self._watch, child)

    async def _watch(self, child: _DemoProcess) -> None:
        status = await child.process.wait()
        if not child.expected_to_end:
            raise DemoFailed(f"{child.name} ended with status {status}{_last_line(child.log)}")

    async def _greeting(self, child: _DemoProcess) -> NodeGreeting:
        assert child.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            data = await child.process.stdout.receive_some()
            if not data:
                await trio.sleep_forever()  # its watcher says why it has ended
            line += data
        greeting = msgspec.json.decode(line, type=NodeGreeting)
        child.peer = greeting.peer
        return greeting

    # ---- memory -------------------------------------------------------------------------------------------------

    async def watch_memory(self) -> None:
        """Note the highest memory use of the demo and all its processes, shared pages counted once."""
        while True:
            pids = [os.getpid(), *(process.pid for process in self._tree())]
            used = await trio.to_thread.run_sync(proportional_mib, pids)
            self.peak_memory_mib = max(self.peak_memory_mib, used)
            await trio.sleep(MEMORY_INTERVAL_S)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _tree(self) -> list[psutil.Process]:
        """All processes that run because of us. An engine is a child of the fork server."""
        found: list[psutil.Process] = []
        for child in self._children:
            if child.process.returncode is not None:
                continue
            try:
                process = psutil.Process(child.process.pid)
                found += [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        return found

    async def end(self) -> None:
        """Kill what still runs and wait for it: engines first, their fork server last."""
        for child in self._children:
            child.expected_to_end = True
        tree = self._tree()
        servers = {child.process.pid for child in self._children if child.name == "the fork server"}
        rest = [process for process in tree if process.pid not in servers]
        _kill(rest)
        await self._wait({child.process.pid for child in self._children} - servers)
        await _wait_gone(rest)
        for channel in self._channels:
            channel.close()  # the fork server ends with its last channel
        with trio.move_on_after(1.0):
            await self._wait(servers)
        _kill(tree)
        await self._wait(servers)
        for child in self._children:
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    await pipe.aclose()

    async def _wait(self, pids: set[int]) -> None:
        for child in self._children:
            if child.process.pid in pids:
                await child.process.wait()


@asynccontextmanager
async def open_box(*, watch_memory: bool = True) -> AsyncIterator[DemoBox]:
    """A folder and the processes started in it, for the body. Watching memory costs ~10 ms per s."""
    home = Path(tempfile.mkdtemp(prefix="p2pserve-demo-"))
    try:
        async with trio.open_nursery() as nursery:
            box = DemoBox(home, nursery)
            if watch_memory:
                nursery.start_soon(box.watch_memory)
            try:
                yield box
            finally:
                with trio.CancelScope(shield=True):
                    await box.end()
            nursery.cancel_scope.cancel()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def node_environment() -> dict[str, str]:
    """Ours, without what would tell a node otherwise than its arguments do: no variables, no config file. Engines are
    not measured before they serve: those of one machine would measure each other."""
    found = {key: value for key, value in os.environ.items() if not key.startswith("P2PSERVE_")}
    return found | {CONFIG: os.devnull, "P2PSERVE_JOIN_SWEEP_S": "0"}


def proportional_mib(pids: Iterable[int]) -> float:
    """Sum of the processes' proportional set sizes: a page shared by n of them counts 1/n for each."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            continue  # it has ended in between
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def resident_peak_mib(pid: int) -> float:
    """The most resident memory that a process has had; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()  # psutil compares start times, so a new owner of the pid is safe
        except psutil.NoSuchProcess:
            continue


async def _wait_gone(processes: list[psutil.Process]) -> None:
    """Wait until their parents, which are not we, have taken note of their ends."""
    with trio.move_on_after(GONE_S):
        while any(process.is_running() for process in processes):  # noqa: ASYNC110 (others' children)
            await trio.sleep(0.02)


def _last_line(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return f": {lines[-1].removeprefix('p2pserve: error: ')[:LOG_LINE]}" if lines else ""
