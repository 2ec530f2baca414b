"""The process that plans: tasks on standard input, answers on standard output, each `u32 length | MessagePack`.

It is apart from the agent because it computes with what strangers say: it may take only so much
memory and so long, and when it dies the agent goes on. It ends when its input does, or when nothing
has been asked of it for a while.
"""

from __future__ import annotations

import os
import resource
import select
import struct
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ...coordinator import Plan
from .coordination import PlanningTask

LENGTH: Final = struct.Struct("<I")
IDLE_S: Final = 30.0  # it takes a second and 60 MB to start again


class PlannerTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to plan, and for how many seconds to search."""

    task: PlanningTask
    search_s: float


class PlannerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`plan`: what was found, None where nobody is ready. `refused`: why there is no plan that could be followed.
    `failed`: what went wrong with these figures."""

    plan: Plan | None = None
    refused: str = ""
    failed: str = ""


def limit_memory(more_bytes: int) -> None:
    """Let this process map so much more than it does now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer(asked: PlannerTask) -> PlannerAnswer:
    """Plan. What goes wrong is an answer, too: a task that fails is no reason to end."""
    from ...coordinator import PlanError

    end = time.monotonic() + asked.search_s
    try:
        return PlannerAnswer(plan=asked.task.run(lambda: time.monotonic() > end))
    except PlanError as error:
        return PlannerAnswer(refused=str(error))
    except MemoryError:
        return PlannerAnswer(failed="out of memory")
    except Exception as error:
        return PlannerAnswer(failed=f"{type(error).__name__}: {error}"[:200])


def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the input ends, or is silent for too long."""
    decoder = msgspec.msgpack.Decoder(PlannerTask)
    while select.select([tasks], [], [], IDLE_S)[0]:
        head = tasks.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        said = msgspec.msgpack.encode(answer(decoder.decode(tasks.read(*LENGTH.unpack(head)))))
        answers.write(LENGTH.pack(len(said)) + said)
        answers.flush()


def main() -> None:
    """`python -m p2pserve.node.planning.worker MEMORY_MIB`."""
    import_module("...coordinator.network_plan", __package__)  # what it maps is not the figures' fault
    os.nice(5)  # planning can wait; the agent's heartbeats cannot
    limit_memory(int(sys.argv[1]) << 20)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
