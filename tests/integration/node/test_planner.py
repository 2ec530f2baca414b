"""Planning in a process of its own: the same plans, and what goes wrong there costs the agent nothing."""

import os
import signal
from dataclasses import replace

import msgspec
import pytest
import trio

from p2pserve.coordinator import BoxView, PlanError
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node.planning.coordination import PlanningTask
from p2pserve.node.planning.planner import Planner, PlannerFailed, open_planner
from p2pserve.node.settings import WAN, NodeTuning

pytestmark = pytest.mark.beside

MODEL = ModelShape(
    name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
)


def box(peer: str) -> BoxView:
    return BoxView(
        peer=peer, service="tiny", model=MODEL, fits=4, ready=True, draining=False, compute_tflops=1.0,
        memory_gbps=10.0, memory_gib=8.0, kv_tokens=1000,
    )  # fmt: skip


def task(*boxes: BoxView, version: int = 1) -> PlanningTask:
    return PlanningTask(
        boxes=boxes, links=(), demands=(), service="tiny", epoch=1, version=version, previous=None, codec="kv4"
    )


TASK = task(box("a"), box("b"))


async def plan(planner: Planner, asked: PlanningTask = TASK) -> bool:
    """Whether the process finds what is found here."""
    return await planner.plan(asked) == asked.run(lambda: False)


def test_the_same_plan_is_found_and_one_process_serves_for_many_tasks() -> None:
    async def main() -> None:
        async with open_planner(WAN) as planner:
            assert await plan(planner)
            first = planner.pid
            assert await plan(planner, task(box("a"), version=2))
            assert await planner.plan(task()) is None
            assert planner.pid == first is not None
        assert planner.pid is None

    trio.run(main)


def test_what_cannot_be_followed_is_refused_in_the_planners_words() -> None:
    async def main() -> None:
        async with open_planner(WAN) as planner:
            newer = TASK.run(lambda: False)
            with pytest.raises(PlanError, match="would not be newer than"):
                await planner.plan(msgspec.structs.replace(TASK, previous=newer, boxes=(box("c"),)))
            assert await plan(planner)

    trio.run(main)


@pytest.mark.parametrize(
    ("tuning", "says"),
    [
        (replace(WAN, planning_memory_mib=1), "out of memory"),
        (replace(WAN, planning_limit_s=0.01), "it did not end within 0.01 s"),
    ],
)
def test_planning_that_takes_too_much_fails_and_the_next_begins_anew(tuning: NodeTuning, says: str) -> None:
    async def main() -> None:
        async with open_planner(tuning) as planner:
            for _ in range(2):
                with pytest.raises(PlannerFailed, match=says):
                    await planner.plan(task(*(box(f"box-{number}") for number in range(200))))

    trio.run(main)


def test_a_process_that_is_killed_is_started_again() -> None:
    async def main() -> None:
        async with open_planner(WAN) as planner:
            assert await plan(planner)
            first = planner.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            while planner.pid == first:  # noqa: ASYNC110 (another process has no event)
                await trio.sleep(0.01)
            assert await plan(planner)

    trio.run(main)


def test_one_that_dies_at_its_task_has_failed_with_it() -> None:
    async def kill(pid: int) -> None:
        await trio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)

    async def main() -> None:
        async with open_planner(WAN) as planner, trio.open_nursery() as nursery:
            assert await plan(planner)
            assert planner.pid is not None
            os.kill(planner.pid, signal.SIGSTOP)
            nursery.start_soon(kill, planner.pid)
            with pytest.raises(PlannerFailed, match="its process died"):
                await planner.plan(TASK)
        async with open_planner(WAN) as planner:
            assert await plan(planner)

    trio.run(main)
