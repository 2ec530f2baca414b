"""The nodes of a box as processes: started, heard, started again when one fails, and told to leave.

    join --replicas 4 --- node, node-2, node-3, node-4     (each in a session of its own, with what it starts)

The first one starts alone: what is wrong with the input or the token is then said once. What a node prints is shown
with its folder's name before each line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, final

import trio

from ...node.owner.dividing import READY, WANTS
from ...node.settings import NodeTuning
from .dividing import NodePart
from .ends import AfterEnd, NodeEnd, combine_codes, decide_after
from .node_process import write_options

ERROR: Final = "p2pserve: error: "
MAX_LINE: Final = 1 << 16
_TOLD: Final = tuple(f'{{"{word}"' for word in ("peer", WANTS, READY))
FLUSH_S: Final = 1.0  # for what a process that has ended has printed; a child of it may hold its output open

Tell = Callable[[str, str], None]
"""A line of a node, by its folder."""

Greet = Callable[[NodePart, dict[str, Any]], None]
"""A node has been admitted; with what it says of itself then."""


class Parent:
    """What may become of nodes whose box the network may divide anew; here: nothing."""

    def on_told(self, part: NodePart, told: Mapping[str, Any]) -> None:
        """A node has told its parent something: see `node/owner/dividing.py`."""

    def on_failed(self, part: NodePart, why: str) -> bool:
        """A node has ended that was not to; whether all are to leave for that."""
        return False


@final
class NodeProcess:
    """One node, over as many processes as it takes."""

    def __init__(self, part: NodePart, options: Mapping[str, Any], *, was_member: bool) -> None:
        self.part = part
        self.was_member = was_member
        self.process: trio.Process | None = None
        self.reason = ""  # the error that its process has ended with
        self.failures = 0
        self._line = write_options({**options, **part.options, "folder": part.folder, "format": "json"})

    def __repr__(self) -> str:
        return f"<NodeProcess {self.part.folder} {self.process!r}>"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.process is not None:
            try:
                self.process.send_signal(number)
            except ProcessLookupError:  # it has just ended
                return

    async def start(self) -> trio.Process:
        """Start a process, and tell it its options. In a session of its own: Ctrl-C is for the parent, which passes it
        on."""
        self.reason = ""
        self.process = process = await trio.lowlevel.open_process(
            [sys.executable, "-m", f"{__package__}.node_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.part.variables},
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            await process.stdin.send_all(self._line + b"\n")
        except trio.BrokenResourceError:
            pass  # it has ended already, and its output says why
        return process


@final
class BoxNodes:
    """All nodes of a box, in one cut. `tell` has lines for people, `greet` hears of each node that has been admitted,
    `parent` of what they want and of failures. `were_members`: the box has been admitted in another cut."""

    def __init__(
        self,
        parts: Sequence[NodePart],
        options: Mapping[str, Any],
        *,
        tell: Tell,
        greet: Greet,
        tuning: NodeTuning,
        parent: Parent | None = None,
        were_members: bool = False,
    ) -> None:
        self._nodes = [NodeProcess(part, options, was_member=were_members) for part in parts]
        self._parent = parent or Parent()
        self._tell = tell
        self._greet = greet
        self._tuning = tuning
        self._leaves = trio.Event()
        self._first_joined = trio.Event()
        self._codes: list[int] = []

    def __repr__(self) -> str:
        return f"<BoxNodes {self._nodes!r}>"

    def leave(self) -> None:
        """Let all nodes finish their requests and leave; a second time, let them end at once."""
        self._leaves.set()
        for node in self._nodes:
            node.send(signal.SIGTERM)

    def end(self) -> None:
        """End what has not left."""
        for node in self._nodes:
            node.send(signal.SIGKILL)

    async def run(self) -> int:
        """Run them until all have ended; the exit code. Whatever ends this ends them."""
        first, *others = self._nodes
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep, first)
                await self._first_joined.wait()
                if not self._leaves.is_set():
                    for node in others:
                        nursery.start_soon(self._keep, node)
        finally:
            self.end()
        return combine_codes(self._codes)

    async def _keep(self, node: NodeProcess) -> None:
        """Start a node, and again for as long as that may help."""
        while not self._leaves.is_set():
            began = trio.current_time()
            code = await self._run_once(node)
            if trio.current_time() - began >= self._tuning.healthy_after_s:
                node.failures = 0
            node.failures += 1
            end = NodeEnd(
                code=code, was_member=node.was_member, failures=node.failures, leaves=self._leaves.is_set()
            )  # fmt: skip
            after = decide_after(end, self._tuning)
            why = _describe_end(code, node.reason)
            if after is not AfterEnd.LEFT and self._parent.on_failed(node.part, why):
                self._tell(node.part.folder, why)
                after = AfterEnd.LEFT
                self.leave()
            if after is not AfterEnd.AGAIN:
                self._codes.append(code)
                self._end(node, after, why)
                return
            pause_s = self._tuning.backoff_s(node.failures)
            self._tell(node.part.folder, f"{why}; starts again in {pause_s:g} s")
            with trio.move_on_after(pause_s):
                await self._leaves.wait()

    def _end(self, node: NodeProcess, after: AfterEnd, why: str) -> None:
        """A node that is not started again."""
        if after is AfterEnd.GIVEN_UP:
            times = f"{node.failures} times in a row"
            self._tell(node.part.folder, f"{why}, {times}: it is not started again, and the others go on")
        elif after is AfterEnd.ALL:
            print(f"{ERROR}{node.part.folder}: {why}", file=sys.stderr, flush=True)
        if after is AfterEnd.ALL or not node.was_member:
            self.leave()
        self._first_joined.set()

    async def _run_once(self, node: NodeProcess) -> int:
        """One process of a node, from its start to its end; its exit code."""
        process = await node.start()
        if self._leaves.is_set():  # who was told to leave before it was there has not heard it
            node.send(signal.SIGTERM)
        async with trio.open_nursery() as nursery:
            for stream in (process.stdout, process.stderr):
                assert stream is not None, "they are pipes"
                nursery.start_soon(self._hear, node, stream)
            try:
                code = await process.wait()
            finally:
                node.process = None
                if process.returncode is None:
                    process.kill()
            nursery.cancel_scope.deadline = trio.current_time() + FLUSH_S
        assert process.stdin is not None
        await process.stdin.aclose()
        return code

    async def _hear(self, node: NodeProcess, stream: trio.abc.ReceiveStream) -> None:
        async for line in _read_lines(stream):
            told = _read_told(line)
            if told is None:
                self._take_line(node, line)
            elif "peer" in told:
                node.was_member = True
                self._greet(node.part, told)
                self._first_joined.set()
            else:
                self._parent.on_told(node.part, told)

    def _take_line(self, node: NodeProcess, line: str) -> None:
        if line.startswith(ERROR):
            node.reason = line.removeprefix(ERROR)
        elif line:
            self._tell(node.part.folder, line)


def _read_told(line: str) -> dict[str, Any] | None:
    """What a node prints for programs, when it has been admitted and afterwards; None for any other line."""
    if not line.startswith(_TOLD):
        return None
    found: dict[str, Any] = json.loads(line)
    return found


def _describe_end(code: int, reason: str) -> str:
    """Why a node has ended: its error, else how."""
    if reason:
        return reason
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


async def _read_lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    """Lines without their ends; a longer one than anybody writes is cut."""
    rest = b""
    async for more in stream:
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
        if len(rest) > MAX_LINE:
            yield rest.decode("utf-8", "replace")
            rest = b""
    if rest:
        yield rest.decode("utf-8", "replace")
