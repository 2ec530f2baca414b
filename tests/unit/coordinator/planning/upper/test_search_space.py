"""What a search may touch: usable boxes, whole boxes, pins, and which boxes can stand for each other."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.cells import split_into_cells
from p2pserve.coordinator.planning.upper.clustering import (
    all_gpus,
    colocated_starts,
    deal_evenly,
    dendrogram,
    fits_somewhere,
    smallest_gpu_count,
)
from p2pserve.coordinator.planning.upper.search_space import PHASES, make_group, make_solution
from p2pserve.coordinator.planning.upper.seed_assignment import assign_gpus
from p2pserve.coordinator.planning.upper.settings import SearchSettings

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


@pytest.mark.parametrize(
    ("pinned", "excluded", "text"),
    [
        ({"x": P}, [], "box x is pinned, but not in the cluster"),
        ({}, ["x"], "box x is excluded, but not in the cluster"),
        ({"a0": P}, ["a0"], "box a0 is pinned to prefill and excluded"),
        ({}, ["a0", "a1", "t0", "t1"], "every box of the cluster is excluded"),
        (dict.fromkeys(("a0", "a1", "t0", "t1"), P), [], "pinned to prefill: nobody decodes"),
        (dict.fromkeys(("a0", "a1", "t0", "t1"), D), [], "pinned to decode: nobody prefills"),
        ({"a0": P, "a1": P}, ["t0", "t1"], "pinned to prefill: nobody decodes"),
    ],
)
def test_pins_and_exclusions_that_cannot_be(
    make_space: Callable[..., Any], pinned: Mapping[str, Phase], excluded: list[str], text: str
) -> None:
    with pytest.raises(NoPlan, match=text):
        make_space(pinned=pinned, excluded=frozenset(excluded))


def test_all_boxes_pinned_to_both_phases_or_to_mixed_is_a_plan(make_space: Callable[..., Any]) -> None:
    make_space(pinned={"a0": P, "a1": D, "t0": P, "t1": P})
    make_space(pinned=dict.fromkeys(("a0", "a1", "t0", "t1"), M))


def test_pins_leave_the_phases_that_all_boxes_of_a_group_may_do(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(pinned={"a0": P, "t0": D})
    assert space.phases_of((Slice(0, 1),)) == (P,)
    assert space.phases_of((Slice(1, 1),)) == PHASES
    assert space.phases_of((Slice(0, 1), Slice(1, 1))) == (P,)
    assert space.phases_of((Slice(0, 1), Slice(2, 2))) == ()
    assert space.can_hold((Slice(1, 2),), 0)
    assert not space.can_hold((), 0)
    assert not space.can_hold((Slice(1, 1),), 0)  # one GPU does not hold the model
    assert not space.can_hold((Slice(0, 2), Slice(2, 2)), 0)  # nobody could say what it does


def test_gpus_of_an_atomic_box_come_and_go_together(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(excluded=frozenset({"a1"}))
    assert space.gpu_units == (1, 1, 2, 2)
    assert space.usable == (0, 2, 3)
    assert space.gpus == 8


def test_idle_gpus_are_those_of_usable_boxes_in_no_group(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(excluded=frozenset({"a1"}))
    assert space.idle_gpus(()) == {0: 4, 2: 2, 3: 2}
    assert space.idle_gpus((Group((Slice(0, 3), Slice(2, 2)), M),)) == {0: 1, 3: 2}


def test_boxes_are_alike_when_exchanging_them_changes_no_figure(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    assert space.box_class[0] == space.box_class[1]
    assert space.box_class[2] != space.box_class[3]  # the links of the last are slower
    pinned, _ = make_space(pinned={"a0": P})
    assert pinned.box_class[0] != pinned.box_class[1]
    left, _ = make_space(excluded=frozenset({"a1"}))
    assert left.box_class[0] != left.box_class[1]


def test_solutions_that_differ_by_alike_boxes_are_one(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    one = make_solution([Group((Slice(0, 4),), P), Group((Slice(1, 4),), D)])
    two = make_solution([Group((Slice(1, 4),), P), Group((Slice(0, 4),), D)])
    assert space.canonical(one) == space.canonical(two)
    across = make_solution([Group((Slice(0, 2), Slice(2, 2)), P), Group((Slice(1, 4),), D)])
    assert space.canonical(across) != space.canonical(one)
    assert space.signature(one[0]) == space.signature(one[0]._replace(slices=(Slice(1, 4),)))
    assert space.signature(one[0]) != space.signature(one[0]._replace(phase=M))


def test_groups_are_sorted_and_without_empty_slices() -> None:
    group = make_group([Slice(2, 1), Slice(0, 3), Slice(2, 1), Slice(1, 2), Slice(1, -2)], P, 1)
    assert group == Group((Slice(0, 3), Slice(2, 2)), P, 1)


@pytest.mark.parametrize(
    ("gpus", "unit", "share", "dealt"),
    [
        (8, 1, 3, [4, 4]),
        (7, 1, 3, [4, 3]),
        (8, 1, 9, [8]),
        (8, 2, 3, [4, 4]),
        (6, 2, 2, [2, 2, 2]),
        (9, 1, 2, [3, 2, 2, 2]),
    ],
)
def test_gpus_are_dealt_in_near_equal_parts(gpus: int, unit: int, share: int, dealt: list[int]) -> None:
    assert deal_evenly(gpus, unit, share) == dealt
    assert sum(dealt) == gpus


def test_the_dendrogram_joins_near_boxes_first(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    merges = dendrogram(space, (0, 1, 2, 3))
    assert len(merges) == 3
    assert 3 in merges[-1]  # the box behind slow links comes last
    assert dendrogram(space, (2,)) == []


def test_the_fewest_gpus_that_hold_a_model(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    assert smallest_gpu_count(space, Slice(0, 4), 0) == 2
    assert smallest_gpu_count(space, Slice(0, 1), 0) == 0
    assert smallest_gpu_count(space, Slice(2, 2), 0) == 2  # an atomic box: all or nothing
    assert fits_somewhere(space, (Slice(0, 1), Slice(1, 1)), 0)  # together
    assert not fits_somewhere(space, (Slice(0, 1),), 0)


def test_colocated_starts_use_all_gpus_and_obey_pins(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(pinned={"t0": D})
    starts = list(colocated_starts(space, [all_gpus(space, space.usable)]))
    assert len(starts) == len(set(starts)) >= 2
    for start in starts:
        assert space.idle_gpus(start) == {}
        for group in start:
            assert group.phase is (D if group.slices[0].box == 2 else M)
            assert space.can_hold(group.slices, 0)


def test_one_service_is_given_everything(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(excluded=frozenset({"a1"}))
    (part,) = assign_gpus(space)
    assert sorted(part) == [Slice(0, 4), Slice(2, 2), Slice(3, 2)]


def test_cells_are_near_boxes_of_up_to_a_size_and_solutions_go_in_and_out(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(pinned={"t0": D})
    cells = split_into_cells(space, [all_gpus(space, space.usable)], 8)
    assert sorted(box for cell in cells for box in cell.boxes) == [0, 1, 2, 3]
    sizes = [sum(space.boxes[box].gpus for box in cell.boxes) for cell in cells]
    assert max(sizes) <= 8
    for cell in cells:
        problem = cell.problem(0.25)
        assert problem.services[0].workload.rate == 0.25
        assert problem.pinned == ({"t0": D} if 2 in cell.boxes else {})
        assert [box.id for box in problem.cluster.boxes] == [space.boxes[box].id for box in cell.boxes]
        inner: Solution = (Group((Slice(0, 2),), M),)
        outer = cell.to_cluster(inner)
        assert outer == [Group((Slice(cell.boxes[0], 2),), M, 0)]
        assert cell.to_cell(tuple(outer)) == inner
        elsewhere = next(box for box in range(4) if box not in cell.boxes)
        assert cell.to_cell((Group((Slice(elsewhere, 2),), M),)) == ()


def test_a_cell_that_does_not_hold_the_model_joins_another(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    assert all(sum(space.boxes[box].gpus for box in cell.boxes) >= 2
               for cell in split_into_cells(space, [all_gpus(space, space.usable)], 1))  # fmt: skip


def test_steps_go_by_the_size_of_the_cluster_unless_they_are_said() -> None:
    assert SearchSettings().steps_for(8) == 700
    assert SearchSettings().steps_for(100) == 1200
    assert SearchSettings(steps=7).steps_for(100) == 7
