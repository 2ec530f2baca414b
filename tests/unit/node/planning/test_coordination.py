"""Which service the coordinator plans for, and the numbers of its plans, with nothing but adverts."""

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Plan
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, EngineAdvert
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.planning.coordination import PlanningTask
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.view import NetworkView

OWN = PeerId("a")
SHAPE = ModelShape(
    name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
)


def advert(service: str) -> Advert:
    weights = WeightSizes(layers=(1,) * 4, embeddings=1, head=1)
    return Advert(
        hardware=Hardware(cores=4, memory_gib=8.0, processor="x"),
        draining=False,
        model=ModelInfo(service=service, shape=SHAPE, max_model_len=512, weights=weights),
        engine=EngineAdvert(state="ready", tflops=1.0, memory_gbps=10.0, kv_tokens=1000, starts=1),
        fits=4,
    )


def view_of(*services: str) -> NetworkView:
    """A box for each, called by the letters from `a` on."""
    return NetworkView(adverts={PeerId(chr(ord("a") + number)): advert(each) for number, each in enumerate(services)})


def task_of(coordinator: Coordinator, view: NetworkView, epoch: int, now: float = 0.0) -> PlanningTask:
    task = coordinator.next(view, (OWN, epoch), now)
    assert task is not None
    return task


def settled(coordinator: Coordinator, view: NetworkView, epoch: int) -> Plan:
    task = task_of(coordinator, view, epoch)
    plan = coordinator.settle(task, task.run(lambda: False), view, (OWN, epoch), 0.0)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("offered", "chosen"), [(("x", "y", "y"), "y"), (("y", "x"), "x"), (("z", "y", "z", "y", "x"), "y")]
)
def test_the_service_that_most_boxes_offer_is_planned_for_and_of_equals_the_first(
    offered: tuple[str, ...], chosen: str
) -> None:
    task = task_of(Coordinator(OWN, "raw"), view_of(*offered), 1)
    assert task.service == chosen
    assert [box.peer for box in task.boxes] == [
        chr(97 + number) for number, each in enumerate(offered) if each == chosen
    ]


def test_versions_count_up_within_an_epoch_and_begin_anew_in_the_next() -> None:
    coordinator, view = Coordinator(OWN, "raw"), view_of("x")
    assert settled(coordinator, view, 3).number == (3, 1)
    view.adverts[PeerId("b")] = advert("x")
    assert settled(coordinator, view, 3).number == (3, 2)
    assert task_of(coordinator, view, 4).version == 1


def test_a_version_is_above_what_is_known_of_the_epoch_and_what_was_used_in_it() -> None:
    coordinator, view = Coordinator(OWN, "raw"), view_of("x")
    plan = settled(coordinator, view, 3)
    view.plans["x"] = msgspec.structs.replace(plan, version=7)
    view.adverts[PeerId("b")] = advert("x")
    assert task_of(coordinator, view, 3).version == 8
    behind = Coordinator(OWN, "raw")
    for _ in range(2):
        view.plans["x"] = plan
        view.adverts[PeerId(str(len(view.adverts)))] = advert("x")
        settled(behind, view, 3)
    assert task_of(behind, view_of("x", "x"), 3).version == 4  # 2 and 3 were used, whatever is known


def test_a_plan_of_a_later_epoch_silences_the_coordinator_and_one_of_its_own_does_not() -> None:
    view = view_of("x")
    plan = settled(Coordinator(OWN, "raw"), view, 3)
    for epoch, is_silent in ((4, True), (3, False), (2, False)):
        view.plans["x"] = msgspec.structs.replace(plan, epoch=epoch)
        assert (Coordinator(OWN, "raw").next(view, (OWN, 3), 0.0) is None) is is_silent


def test_a_node_plans_for_the_deadlines_that_it_was_given() -> None:
    view = view_of("x", "x")
    once, thrice, fixed = (
        settled(Coordinator(OWN, "raw", slo=slo), view, 3).deadlines for slo in ("1x", "3x", "ttft=2,tpot=0.5")
    )
    assert thrice.ttft_s == pytest.approx(3 * once.ttft_s)
    assert thrice.tpot_s == pytest.approx(3 * once.tpot_s)
    assert (fixed.ttft_s, fixed.tpot_s, fixed.e2e_s) == (2.0, 0.5, 0.0)
