"""The agent's end of the process that plans: starts it when there is something to plan, and ends it when it takes too
long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import final

import msgspec
import trio

from ...coordinator import Plan, PlanError
from ...coordinator.regrouping.steps import RegroupProposal
from ...coordinator.services.replacing import FoundSharing, SharingTask
from ..settings import NodeTuning
from .coordination import PlanningTask
from .worker import HURRY, LENGTH, PlannerAnswer, PlannerTask

_answers = msgspec.msgpack.Decoder(PlannerAnswer)


class PlannerFailed(Exception):
    """Planning went wrong with the figures of a task: an error, no memory, or no end. The text says which."""


@final
class Planner:
    """Plans in a process of its own, one task at a time."""

    def __init__(self, tuning: NodeTuning) -> None:
        self._tuning = tuning
        self._process: trio.Process | None = None
        self._searches = False  # the process has all of a task, and has not answered yet

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    async def start(self) -> None:
        """Start the process, if it does not run: on a busy machine its imports take longer than a plan."""
        if self.pid is None:
            await self.end()  # it had ended for want of tasks, or was killed meanwhile
            command = [sys.executable, "-m", "p2pserve.node.planning.worker", str(self._tuning.planning_memory_mib)]
            self._process = await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )

    async def plan(self, task: PlanningTask) -> Plan | None:
        """As `PlanningTask.run`, within the settings' time and memory. Raises PlanError, or PlannerFailed."""
        search_s = self._tuning.repair_s if task.is_urgent else self._tuning.planning_s
        return (await self._answer(PlannerTask(task=task, search_s=search_s, trials_s=self._tuning.trials_s))).plan

    async def seek_groups(self, task: PlanningTask) -> RegroupProposal | None:
        """As `PlanningTask.propose`, likewise."""
        asked = PlannerTask(task=task, search_s=self._tuning.planning_s, seeks_groups=True)
        return (await self._answer(asked)).proposal

    async def place(self, task: SharingTask) -> FoundSharing | None:
        """As `SharingTask.run`, likewise."""
        tuning = self._tuning
        asked = PlannerTask(sharing=task, search_s=tuning.planning_s, trials_s=tuning.trials_s)
        return (await self._answer(asked)).sharing

    async def _answer(self, task: PlannerTask) -> PlannerAnswer:
        asked = msgspec.msgpack.encode(task)
        limit_s = self._tuning.planning_limit_s
        with trio.move_on_after(limit_s):
            answer = await self._ask(LENGTH.pack(len(asked)) + asked)
            if answer.failed:
                raise PlannerFailed(answer.failed)
            if answer.refused:
                raise PlanError(answer.refused)
            return answer
        raise PlannerFailed(f"it did not end within {limit_s:g} s")

    def hurry(self) -> None:
        """The best plan found by now is enough: the search under way ends soon."""
        process = self._process
        if self._searches and process is not None and isinstance(process.stdin, trio.lowlevel.FdStream):
            # There is room for so few bytes in an empty pipe; and a process that has died is noticed elsewhere.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(process.stdin.fileno(), HURRY)
            self._searches = False

    async def end(self) -> None:
        """End the process, if there is one; the next task starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with trio.CancelScope(shield=True):  # it is dead: this takes no time
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    await pipe.aclose()
                await process.wait()

    async def _ask(self, asked: bytes) -> PlannerAnswer:
        await self.start()
        try:
            return await self._exchange(asked)
        except (trio.BrokenResourceError, EOFError):
            raise PlannerFailed("its process died") from None
        except msgspec.DecodeError as error:
            raise PlannerFailed(f"its answer is no plan: {error}") from error

    async def _exchange(self, asked: bytes) -> PlannerAnswer:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            await process.stdin.send_all(asked)
            self._searches = True
            head = await _receive(process.stdout, LENGTH.size)
            return _answers.decode(await _receive(process.stdout, *LENGTH.unpack(head)))
        except BaseException:
            await self.end()  # half an exchange has happened: what it would say next is not for the next task
            raise
        finally:
            self._searches = False


async def _receive(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    """Exactly so many bytes. Raises EOFError."""
    data = bytearray()
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


@asynccontextmanager
async def open_planner(tuning: NodeTuning) -> AsyncIterator[Planner]:
    """A planner for the body; its process ends with it."""
    planner = Planner(tuning)
    try:
        yield planner
    finally:
        await planner.end()
