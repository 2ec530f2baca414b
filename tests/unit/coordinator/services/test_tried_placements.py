"""Placements of a running network that are tried: phases count, boxes keep their services, and time ends it."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import Demand, LinkView
from p2pserve.coordinator.capacity import KvNetwork
from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.placement.planned import Judge, Placement, judge_running
from p2pserve.coordinator.placement.replay import Judged, PeriodReplay
from p2pserve.coordinator.placement.search import PlacementGoals
from p2pserve.coordinator.placement.values import GpuGroup, PlacementProblem
from p2pserve.coordinator.planning.upper.trials import TrialsOver
from p2pserve.coordinator.services.replacing import MOST_TRIED, BoxToPlace, FoundSharing, ServiceToPlace, SharingTask
from p2pserve.coordinator.services.trying import pose_for_planner

CARD = gpu_table().find("A40")
SHAPE = model_shape("llama-7b")
BOTH = ("chat", "code")


def task_of(hosts: Sequence[tuple[str, ...]], rates: Sequence[float] = (3.0, 3.0), most: int = 2) -> SharingTask:
    """Boxes that host this, and links of 5 Gb/s between them."""
    boxes = tuple(
        BoxToPlace(id=f"box-{number}", card=CARD, most=most, able=BOTH, ready=BOTH, hosts=some)
        for number, some in enumerate(hosts)
    )
    lengths = ((900, 80), (300, 40))
    services = tuple(
        ServiceToPlace(
            name=name, shape=SHAPE, demands=(Demand(requests_s=rate, arrival_cv=1.0, lengths=lengths),) if rate else ()
        )
        for name, rate in zip(BOTH, rates, strict=True)
    )
    links = tuple(
        LinkView(source=one.id, target=two.id, rtt_s=0.01, gbps=5.0) for one in boxes for two in boxes if one != two
    )
    return SharingTask(boxes=boxes, services=services, period_s=60.0, network=KvNetwork(links=links))


Cost = Callable[[PlacementProblem, Placement], float]


def run(
    task: SharingTask, cost: Cost, given_up: Callable[[], bool] = lambda: False
) -> tuple[FoundSharing, list[Placement]]:
    """With a judge for whom requests take so many times as long as alone; and what it has seen."""
    seen: list[Placement] = []

    def make_judge(problem: PlacementProblem) -> Judge:
        def judge(placement: Placement) -> Judged:
            seen.append(placement)
            counts = np.array(problem.counts)
            none = np.zeros(len(counts), dtype=np.int64)
            return Judged(counts, none, none, counts * cost(problem, placement))

        return judge

    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=SharingTask)
    return sent.run(lambda: False, make_judge, given_up), seen


SHARED = task_of([BOTH] * 4)


def test_services_move_apart_where_phases_make_that_better() -> None:
    def cost(problem: PlacementProblem, placement: Placement) -> float:
        return 2.0 if placement.planned is None else 1.0

    found, seen = run(SHARED, cost)
    assert len(seen) > 1
    assert sorted(found.hosts) == [box.id for box in SHARED.boxes]
    assert {hosts for hosts in found.hosts.values() if hosts} == {("chat",), ("code",)}
    assert (found.running, found.running_cost) == (2.0, 2.0)
    assert found.expected == 1.0
    assert found.found_cost > 1.0, "what is loaded is counted"
    for placement in seen:
        if placement.planned is not None:
            for proposal in placement.planned.proposals:
                assert all(len({stage.peer for stage in each.stages}) == 1 for each in proposal.plan.replicas)


def test_services_stay_where_that_is_no_gain() -> None:
    def cost(problem: PlacementProblem, placement: Placement) -> float:
        return 1.0 if placement.planned is None else 0.95

    found, _ = run(SHARED, cost)
    assert found.hosts == {}
    assert found.expected == found.running == 1.0


def test_what_runs_counts_with_its_phases_and_keeps_its_boxes() -> None:
    apart = task_of([("chat",), ("chat",), ("code",), ("code",)])
    found, seen = run(apart, lambda problem, placement: 1.0 if placement.planned is None else 0.5)
    assert found.running == 0.5
    assert found.hosts == {}
    planned = seen[1].planned
    assert planned is not None
    assert {
        (stage.peer, proposal.plan.service)
        for proposal in planned.proposals
        for replica in proposal.plan.replicas
        for stage in replica.stages
    } <= {("box-0", "chat"), ("box-1", "chat"), ("box-2", "code"), ("box-3", "code")}


def test_a_service_without_a_box_is_not_planned_onto_free_ones_as_if_it_ran() -> None:
    problem, running = task_of([("chat",), ()])._pose()
    seen: list[Placement] = []

    def judge(placement: Placement) -> Judged:
        seen.append(placement)
        counts = np.array(problem.counts)
        return Judged(counts, counts * 0, counts * 0, counts * 1.0)

    judge_running(
        pose_for_planner(problem, [3.0, 3.0], KvNetwork()), PeriodReplay(problem), running,
        judge=judge, rng=np.random.default_rng(0), goals=PlacementGoals(),
    )  # fmt: skip
    assert running == (GpuGroup(0, 1, (0,)),)
    for placement in seen:
        assert {(group.box, group.services) for group in placement.engines(problem)} == {(0, (0,))}


def test_when_trials_take_too_long_the_replay_decides() -> None:
    def refuse(problem: PlacementProblem, placement: Placement) -> float:
        raise TrialsOver

    late = task_of([("chat",), ("code",), ("code",)], rates=(12.0, 0.0))
    replayed = late.run(lambda: False)
    assert replayed.hosts
    assert run(late, refuse)[0] == msgspec.structs.replace(replayed, untried="there was no time")
    calm = task_of([("chat",), ("code",), ("code",)], rates=(4.0, 0.0))
    assert calm.run(lambda: False).hosts, "a tenth would be gained"
    found, _ = run(calm, refuse)
    assert found.hosts == {}, "what was tried before is not undone by what knows no phases"
    assert found.untried == "there was no time"


def test_what_was_tried_before_time_was_up_counts() -> None:
    def cost(problem: PlacementProblem, placement: Placement) -> float:
        if placement.planned is not None:
            raise TrialsOver
        return 2.0 if placement.groups == running else 1.0

    task = task_of([("chat", "code"), ("chat", "code"), ("chat", "code")], rates=(6.0, 0.1))
    _, running = task._pose()
    found, _ = run(task, cost)
    assert found.untried == ""
    assert found.expected in (1.0, 2.0)


@pytest.mark.parametrize("error", [ValueError("a cell carries nothing"), ZeroDivisionError()])
def test_figures_that_the_planner_cannot_do_with_leave_it_to_the_replay(error: Exception) -> None:
    def refuse(problem: PlacementProblem, placement: Placement) -> float:
        raise error

    task = task_of([("chat",), ("code",), ("code",)], rates=(12.0, 0.0))
    found, replayed = run(task, refuse)[0], task.run(lambda: False)
    assert found == msgspec.structs.replace(replayed, untried=f"{type(error).__name__}: {error}")


def test_large_networks_are_left_to_the_replay() -> None:
    def never_asked(problem: PlacementProblem) -> Judge:
        raise AssertionError("this would take too long")

    task = task_of([("chat",)] * (MOST_TRIED // 2 + 1), rates=(1.0, 0.0))
    assert "more than 256 boxes" in task.run(lambda: True, never_asked).untried


def test_without_time_nothing_is_tried_and_nothing_is_half_compared() -> None:
    task = task_of([("chat",), ("code",), ("code",)], rates=(12.0, 0.0))

    def never_asked(problem: PlacementProblem, placement: Placement) -> float:
        raise AssertionError("there is no time")

    found, seen = run(task, never_asked, given_up=lambda: True)
    assert seen == []
    assert found.untried == "there was no time"
    problem, running = task._pose()
    posed, replay = pose_for_planner(problem, [4.0, 0.1], KvNetwork()), PeriodReplay(problem)
    rng = np.random.default_rng(0)

    def judge(placement: Placement) -> Judged:
        raise AssertionError(f"there is no time for {placement}")

    with pytest.raises(TrialsOver):
        judge_running(posed, replay, running, judge=judge, rng=rng, goals=PlacementGoals(), spent=lambda: True)


def test_the_planner_has_the_boxes_links_and_deadlines_that_the_placement_has() -> None:
    task = task_of([("chat",), ("code",)])
    problem, _ = task._pose()
    posed = pose_for_planner(problem, [2.0, 0.5], task.network)
    assert [box.id for box in posed.cluster.boxes] == ["box-0", "box-1"]
    assert posed.cluster.gbps[0, 1] == 5.0
    assert [service.workload.rate for service in posed.services] == [2.0, 0.5]
    alone = float(problem.alone_s[problem.period.service == 0].mean())
    assert posed.services[0].slo.e2e_s == pytest.approx(problem.slo_scale * alone, rel=0.1)
    assert posed.within_boxes
