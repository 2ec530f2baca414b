"""A coordinator with the real planning process, and a box that says what it should not: planning goes on without it."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Demand, Plan
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.names import name_of
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, EngineAdvert
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.planning.planner import Planner, PlannerFailed, open_planner
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.settings import WAN
from p2pserve.node.view import NetworkView

pytestmark = pytest.mark.beside

OWN, HONEST, LIAR = PeerId("own-box"), PeerId("honest"), PeerId("the-liar")
SHAPE = ModelShape(
    name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
)
ATTEMPTS = 12


def advert() -> Advert:
    weights = WeightSizes(layers=(1,) * 4, embeddings=1, head=1)
    return Advert(
        hardware=Hardware(cores=4, memory_gib=8.0, processor="x"),
        draining=False,
        model=ModelInfo(service="tiny", shape=SHAPE, max_model_len=512, weights=weights),
        engine=EngineAdvert(state="ready", tflops=1.0, memory_gbps=10.0, kv_tokens=1000, starts=1),
        fits=4,
        demand=Demand(requests_s=1.0, arrival_cv=1.0, lengths=((10, 10),)),
    )


def with_tp(said: dict[str, Any]) -> None:
    said["tp"] = 2**40


def with_requests(said: dict[str, Any]) -> None:
    said["demand"]["requests_s"] = 5e-324


def view_with(liars: bytes) -> NetworkView:
    view, honest = NetworkView(), msgspec.msgpack.encode(advert())
    view.update({OWN: honest, HONEST: honest, LIAR: liars})
    return view


async def coordinate(coordinator: Coordinator, planner: Planner, view: NetworkView, now: float) -> Plan | None:
    """As an agent does, until there is a plan."""
    for _ in range(ATTEMPTS):
        task = coordinator.next(view, (OWN, 1), now)
        if task is None:
            return None
        try:
            found = await planner.plan(task)
        except PlannerFailed as error:
            coordinator.on_failed(task, str(error), now)
            continue
        plan = coordinator.settle(task, found, view, (OWN, 1), now)
        if plan is not None:
            return plan
    return None


@pytest.mark.parametrize(("lie", "field"), [(with_tp, "tp"), (with_requests, "requests_s")])
def test_what_no_box_is_is_left_out_by_name_and_planning_goes_on(lie: Any, field: str) -> None:
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(advert()))
    lie(said)
    view = view_with(msgspec.msgpack.encode(said))

    async def main() -> None:
        async with open_planner(WAN) as planner:
            plan = await coordinate(Coordinator(OWN, "raw"), planner, view, 0.0)
            assert plan is not None
            assert set(plan.peers) == {OWN, HONEST}
            (line,) = [line for line in plan.why if "left out" in line]
            assert name_of(LIAR) in line
            assert field in line

    trio.run(main)


def test_a_box_that_planning_does_not_end_with_is_set_aside_and_the_rest_is_planned() -> None:
    """The process and its limit are real; it is short for tasks with the liar only."""
    view = view_with(msgspec.msgpack.encode(advert()))

    async def main() -> None:
        coordinator, plan = Coordinator(OWN, "raw"), None
        async with open_planner(WAN) as able, open_planner(replace(WAN, planning_limit_s=0.001)) as limited:
            for _ in range(ATTEMPTS):
                task = coordinator.next(view, (OWN, 1), 0.0)
                assert task is not None
                has_liar = LIAR in {box.peer for box in task.boxes}
                try:
                    found = await (limited if has_liar else able).plan(task)
                except PlannerFailed as error:
                    coordinator.on_failed(task, str(error), 0.0)
                    continue
                plan = coordinator.settle(task, found, view, (OWN, 1), 0.0)
                break
        assert plan is not None
        assert set(plan.peers) == {OWN, HONEST}
        (line,) = [line for line in plan.why if "set aside" in line]
        assert name_of(LIAR) in line
        assert "did not end within 0.001 s" in line

    trio.run(main)


def test_heartbeats_go_on_while_the_process_starts_and_plans() -> None:
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(trio.current_time())
            await trio.sleep(0.02)

    async def main() -> None:
        async with open_planner(WAN) as planner, trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            began = trio.current_time()
            view = view_with(msgspec.msgpack.encode(advert()))
            assert await coordinate(Coordinator(OWN, "raw"), planner, view, 0.0) is not None
            took = trio.current_time() - began
            nursery.cancel_scope.cancel()
        gaps = [later - sooner for sooner, later in pairwise(beats)]
        assert max(gaps) < 0.5 * took, "most of the time passed in the other process, not here"

    trio.run(main)
