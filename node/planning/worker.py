"""The process that plans: tasks on standard input, answers on standard output, each `u32 length | MessagePack`.

A task of no bytes ends the search under way: what is best by then is the answer.

It is apart from the agent because it computes with what strangers say: it may take only so much
memory and so long, and when it dies the agent goes on. It ends when its input does.
"""

from __future__ import annotations

import os
import resource
import select
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ...coordinator import Plan
from ...coordinator.regrouping.steps import RegroupProposal
from ...coordinator.services.replacing import FoundSharing, SharingTask
from .coordination import PlanningTask

LENGTH: Final = struct.Struct("<I")
HURRY: Final = LENGTH.pack(0)


class PlannerTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to plan, for how many seconds to search, and for how many of a core to try plans. `seeks_groups`: other
    groups of boxes are wanted, and no plan. `sharing`: which services share which boxes is wanted, and nothing else."""

    task: PlanningTask | None = None
    search_s: float
    trials_s: float = 0.0
    seeks_groups: bool = False
    sharing: SharingTask | None = None


class PlannerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`plan`: what was found, None where nobody is ready. `refused`: why there is no plan that could be followed.
    `failed`: what went wrong with these figures. `proposal`: the groups that were wanted; None: none are better.
    `sharing`: what was wanted of it."""

    plan: Plan | None = None
    sharing: FoundSharing | None = None
    proposal: RegroupProposal | None = None
    refused: str = ""
    failed: str = ""


def limit_memory(more_bytes: int) -> None:
    """Let this process map so much more than it does now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer(asked: PlannerTask, is_hurried: Callable[[], bool]) -> PlannerAnswer:
    """Plan, until `is_hurried` at the latest. What goes wrong is an answer, too: a task that fails is no reason to
    end."""
    from ...coordinator import PlanError
    from ...coordinator.placement.values import PlacementError

    began = time.monotonic()

    def is_spent(searches: int = 1) -> bool:
        return time.monotonic() > began + searches * asked.search_s or is_hurried()

    try:
        if asked.sharing is not None:
            if not asked.trials_s:
                return PlannerAnswer(sharing=asked.sharing.run(is_spent))
            from .trying import judges_within  # the simulator with it

            # The planner searches as well, for as long as the search before it.
            judges = judges_within(asked.trials_s)
            return PlannerAnswer(sharing=asked.sharing.run(is_spent, judges, lambda: is_spent(2)))
        assert asked.task is not None, "something is to be planned"
        if asked.seeks_groups:
            return PlannerAnswer(proposal=asked.task.propose(is_spent))
        if not asked.task.tries:
            return PlannerAnswer(plan=asked.task.run(is_spent))
        from .trying import trials_within  # the simulator with it

        return PlannerAnswer(plan=asked.task.run(is_spent, trials_within(asked.trials_s)))
    except (PlanError, PlacementError) as error:
        return PlannerAnswer(refused=str(error))
    except MemoryError:
        return PlannerAnswer(failed="out of memory")
    except Exception as error:
        return PlannerAnswer(failed=f"{type(error).__name__}: {error}"[:200])


def serve(tasks: RawIOBase, answers: BinaryIO) -> None:
    """Answer until the input ends. It has no buffer here: what waits in one would not be seen."""
    decoder = msgspec.msgpack.Decoder(PlannerTask)
    while len(head := _read(tasks, LENGTH.size)) == LENGTH.size:
        (size,) = LENGTH.unpack(head)
        if size == 0:  # it came when the answer was on its way
            continue
        said = msgspec.msgpack.encode(answer(decoder.decode(_read(tasks, size)), lambda: _is_readable(tasks)))
        answers.write(LENGTH.pack(len(said)) + said)
        answers.flush()


def _is_readable(tasks: RawIOBase) -> bool:
    return bool(select.select([tasks], [], [], 0.0)[0])


def _read(tasks: RawIOBase, size: int) -> bytes:
    """So many bytes, or fewer where the input ends."""
    data = bytearray()
    while len(data) < size and (more := tasks.read(size - len(data))):
        data += more
    return bytes(data)


def main() -> None:
    """`python -m p2pserve.node.planning.worker MEMORY_MIB`."""
    import_module("...coordinator.network_plan", __package__)  # what it maps is not the figures' fault
    os.nice(5)  # planning can wait; the agent's heartbeats cannot
    limit_memory(int(sys.argv[1]) << 20)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as tasks:
        serve(tasks, sys.stdout.buffer)


if __name__ == "__main__":
    main()
