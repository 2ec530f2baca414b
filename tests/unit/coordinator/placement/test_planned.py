"""Which placements are made beside engines within boxes, which is taken, and what of it is said."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from p2pserve.coordinator.placement.planned import (
    ALL_PLANNED,
    SURER,
    WITHIN_BOXES,
    ChosenPlacement,
    Placement,
    PlannedServices,
    choose_placement,
    describe_placement,
)
from p2pserve.coordinator.placement.replay import Judged, PeriodReplay
from p2pserve.coordinator.placement.values import GpuGroup, Groups, PlacementError, PlacementProblem
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload

from .placed_services import A6000, box, problem


def planner_problem(placed: PlacementProblem, gbps: float = 20.0) -> Problem:
    """The same boxes, with links, and the same services."""
    size, period = len(placed.boxes), placed.period
    rows = [np.flatnonzero(period.service == number) for number in range(len(placed.services))]
    return Problem(
        cluster=Cluster(
            boxes=tuple(
                Box(id=each.id, gpu=each.gpu, gpus=each.gpus, gpu_link_gbps=each.link_gbps, usd_per_hour=1.0)
                for each in placed.boxes
            ),
            gbps=np.full((size, size), gbps), rtt_s=np.full((size, size), 1e-3), usd_per_gb=np.zeros((size, size)),
        ),
        services=tuple(
            Service(
                name=each.name, model=each.model, slo=Slo(ttft_s=2.0, tpot_s=0.2),
                workload=Workload(
                    name="period", prompts=period.prompt[some], outputs=period.output[some], rate=len(some) / 30.0
                ),
            )
            for each, some in zip(placed.services, rows, strict=True)
        ),
        pinned={},
    )  # fmt: skip


def judged_as(placed: PlacementProblem, normalized: float) -> Judged:
    """Every request is in time, and takes so many times as long as alone."""
    counts = np.array(placed.counts)
    none = np.zeros(len(counts), dtype=np.int64)
    return Judged(counts, none, none, counts * normalized)


def chosen_by(
    placed: PlacementProblem,
    cost: Callable[[Placement], float],
    before: Groups = (),
    spent: Callable[[], bool] = lambda: False,
) -> tuple[ChosenPlacement, list[Placement]]:
    """And all that was judged."""
    seen: list[Placement] = []

    def judge(placement: Placement) -> Judged:
        seen.append(placement)
        return judged_as(placed, cost(placement))

    found = choose_placement(
        planner_problem(placed), PeriodReplay(placed), judge=judge, rng=np.random.default_rng(0),
        before=before, spent=spent,
    )  # fmt: skip
    return found, seen


def gpus_used(placed: PlacementProblem, placement: Placement) -> list[int]:
    return [
        sum(group.tp for group in placement.engines(placed) if group.box == number)
        for number in range(len(placed.boxes))
    ]


TWO = ("llama2-7b", "llama2-13b")


@pytest.mark.parametrize(("planned_cost", "wins"), [(1.0 / SURER + 1e-3, False), (1.0 / SURER - 1e-3, True)])
def test_planned_services_are_taken_where_they_cost_clearly_less(planned_cost: float, wins: bool) -> None:
    placed = problem(TWO, boxes=[box(0), box(1, card=A6000)])
    found, seen = chosen_by(placed, lambda each: 1.0 if each.planned is None else planned_cost)
    assert (found.placement.planned is not None) is wins
    assert found.tried[WITHIN_BOXES] == 1.0
    assert found.tried[ALL_PLANNED] == pytest.approx(planned_cost)
    assert found.judged.normalized == pytest.approx(planned_cost if wins else 1.0)
    for placement in seen:
        assert all(used <= each.gpus for used, each in zip(gpus_used(placed, placement), placed.boxes, strict=True))
        served = {service for group in placement.engines(placed) for service in group.services}
        assert served == {0, 1}


def test_a_service_that_no_box_holds_is_planned_over_several_beside_the_others() -> None:
    placed = problem(("llama2-70b", "llama2-7b"), (0.2, 2.0), boxes=[box(0, 2), box(1, 2, A6000), box(2, 2, A6000)])
    assert placed.fits_nowhere(0) is False
    small = problem(("llama2-70b", "llama2-7b"), (0.2, 2.0), boxes=[box(number, 2, A6000) for number in range(3)])
    assert small.fits_nowhere(0)
    found, _ = chosen_by(small, lambda each: 1.0 if each.groups else 2.0)
    assert found.tried == {ALL_PLANNED: 2.0, "s0 planned": 1.0}
    planned = found.placement.planned
    assert planned is not None
    assert planned.services == (0,)
    (proposal,) = planned.proposals
    assert len({stage.peer for replica in proposal.plan.replicas for stage in replica.stages}) == 2
    assert {service for group in found.placement.groups for service in group.services} == {1}
    assert {group.box for group in found.placement.groups}.isdisjoint(group.box for group in planned.engines(small))
    lines = describe_placement(small, found.placement)
    assert len(lines) == 3
    assert sum("s0 (layers 1 to" in line for line in lines) == 1
    assert sum("x s1" in line for line in lines) == 1


def test_services_that_share_nothing_may_be_planned_on_their_boxes() -> None:
    boxes = [box(0, 1), *(box(number, 4) for number in (1, 2))]
    crowded = problem(("llama2-7b", "llama2-7b", "llama2-13b"), (0.5, 0.5, 8.0), boxes=boxes)
    wanted = (GpuGroup(0, 1, (0, 1)), GpuGroup(1, 4, (2,)), GpuGroup(2, 4, (2,)))

    found, seen = chosen_by(crowded, lambda each: 1.0 if each.groups == wanted else 2.0, wanted)
    assert found.tried[WITHIN_BOXES] == 1.0
    assert found.placement == Placement(wanted)
    beside = [each for each in seen if each.groups == wanted[:1]]
    assert len(beside) == 1
    assert beside[0].planned is not None
    assert beside[0].planned.services == (2,)
    assert {group.box for group in beside[0].planned.engines(crowded)} <= {1, 2}


def test_what_a_box_keeps_is_in_every_placement() -> None:
    held = (0, 1)
    placed = problem(
        ("llama2-7b", "llama2-7b", "llama2-13b"), (1.0, 1.0, 1.0), boxes=[box(0, 4, held=held), box(1), box(2)]
    )
    _, seen = chosen_by(placed, lambda _: 1.0)
    assert any(each.planned is not None for each in seen)
    for placement in seen:
        assert GpuGroup(0, 4, held) in placement.groups
        if placement.planned is not None:
            assert placement.planned.services == (2,)
            assert 0 not in {group.box for group in placement.planned.engines(placed)}


def test_plans_keep_to_what_boxes_take_and_have_disk_for() -> None:
    size = problem(TWO).services[1].model.weight_bytes
    small = problem(TWO, boxes=[box(0, disk_bytes=0.9 * size), box(1, able=frozenset({1}))])
    found, seen = chosen_by(small, lambda each: 1.0 if each.planned is None else 0.1)
    for placement in seen:
        for group in placement.engines(small):
            assert small.boxes[group.box].takes(group.services)
            assert small.fits_disk(group.box, group.services)
    assert WITHIN_BOXES in found.tried
    _, free = chosen_by(problem(TWO, boxes=[box(0), box(1)]), lambda each: 1.0 if each.planned is None else 0.1)
    assert any(each.planned is not None for each in free)
    nobody = problem(TWO, boxes=[box(0), box(1, able=frozenset())])
    assert {WITHIN_BOXES} == chosen_by(nobody, lambda _: 1.0)[0].tried.keys(), "the planner would use both"


def test_one_placement_is_enough_when_time_is_up() -> None:
    placed = problem(TWO)
    found, _ = chosen_by(placed, lambda _: 1.0, spent=lambda: True)
    assert list(found.tried) == [WITHIN_BOXES]


def test_what_nobody_can_place_is_said() -> None:
    placed = problem(("llama2-70b", "llama2-7b"), (0.5, 0.5), boxes=[box(0, 1), box(1, 1)])
    with pytest.raises(PlacementError, match="s0 fits on none of the boxes alone"):
        chosen_by(placed, lambda _: 1.0)


def test_a_part_of_a_problem_has_numbers_of_its_own() -> None:
    boxes = [box(0, on_disk=frozenset({0, 2}), able=frozenset({2})), box(1, held=(1, 2))]
    some = problem(("llama2-7b", "opt-6.7b", "llama2-13b"), (1.0, 1.0, 1.0), boxes=boxes)
    part = some.part([1, 0], [2, 1])
    assert [each.id for each in part.boxes] == ["box-1", "box-0"]
    assert part.boxes[0].held == (0, 1)
    assert (part.boxes[1].on_disk, part.boxes[1].able) == (frozenset({0}), frozenset({0}))
    assert [each.name for each in part.services] == ["s2", "s1"]
    assert part.counts == (some.counts[2], some.counts[1])
    with pytest.raises(PlacementError, match="without requests"):
        problem(("llama2-7b", "opt-6.7b"), (1.0, 1e-9)).part([0], [1])


def test_phases_and_layers_stand_in_what_is_said_of_a_placement() -> None:
    placed = problem(("llama2-7b", "llama2-7b"), boxes=[box(number, 2, A6000) for number in range(3)])
    planner = replace(planner_problem(placed), services=planner_problem(placed).services[1:])
    solution = (
        Group((Slice(0, 1), Slice(1, 1)), Phase.PREFILL),
        Group((Slice(1, 1),), Phase.DECODE),
        Group((Slice(0, 1),), Phase.MIXED),
    )
    proposals = LowerLevel(planner).propose(tuple(sorted(solution)), epoch=0, version=0)
    planned = PlannedServices(services=(1,), problem=planner, proposals=proposals)
    first, second, third = describe_placement(placed, Placement((GpuGroup(2, 2, (0, 1)),), planned))
    assert first == "box-0: 1 x s1, 1 x s1 prefill (layers 1 to 16)"
    assert second == "box-1: 1 x s1 prefill (layers 17 to 32), 1 x s1 decode"
    assert third == "box-2: 2 x s0+s1"
    assert gpus_used(placed, Placement((GpuGroup(2, 2, (0, 1)),), planned)) == [2, 2, 2]
