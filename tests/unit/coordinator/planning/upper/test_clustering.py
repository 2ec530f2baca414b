"""Groups along the fast links: joined until they hold the model, and cells of a large cluster."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.cells import Cell, split_into_cells
from p2pserve.coordinator.planning.upper.clustering import (
    all_gpus,
    colocated_starts,
    dendrogram,
    fits_somewhere,
    smallest_gpu_count,
)
from p2pserve.coordinator.planning.upper.search_space import SearchSpace

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def starts_of(space: SearchSpace) -> list[Solution]:
    return list(colocated_starts(space, [all_gpus(space, space.usable)]))


def shapes(start: Solution) -> list[dict[int, int]]:
    return [dict(group.slices) for group in start]


def test_merges_are_numbered_after_the_boxes(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(near=[(1, 2)])
    first, second, third = dendrogram(space, (3, 1, 0, 2))
    assert set(first) == {1, 3}  # the boxes 1 and 2, by their places
    assert set(second) == {2, 4}  # box 0, and the merge of those
    assert set(third) == {0, 5}
    assert dendrogram(space, (0, 3)) == [(0, 1)]


def test_slow_links_are_told_apart_too(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    near = np.full((4, 4), 0.01)
    near[0, 2] = near[2, 0] = 0.02
    near[1, 3] = near[3, 1] = 0.04
    first, second, _ = dendrogram(replace(space, near_gbps=near), (0, 1, 2, 3))
    assert (set(first), set(second)) == ({1, 3}, {0, 2})
    near[1, 3] = near[3, 1] = 0.0  # no link at all is the farthest
    first, *_ = dendrogram(replace(space, near_gbps=near), (0, 1, 2, 3))
    assert set(first) == {0, 2}


def test_all_gpus_are_those_of_the_boxes_named(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    assert all_gpus(space, (2, 0)) == (Slice(2, 2), Slice(0, 4))


def test_a_model_may_fit_the_second_box_or_a_run_of_boxes(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(least=4)
    assert fits_somewhere(space, (Slice(2, 2), Slice(0, 4)), 0)
    assert fits_somewhere(space, (Slice(3, 2), Slice(2, 2)), 0)
    assert not fits_somewhere(space, (Slice(2, 2), Slice(3, 1)), 0)
    assert not fits_somewhere(space, (), 0)


@pytest.mark.parametrize(("least", "found"), [(1, 1), (3, 3), (4, 4), (5, 0)])
def test_the_fewest_gpus_of_a_box(make_space: Callable[..., Any], least: int, found: int) -> None:
    space, _ = make_space(least=least)
    assert smallest_gpu_count(space, Slice(0, 4), 0) == found
    assert smallest_gpu_count(space, Slice(2, 2), 0) == (2 if least == 1 else 0)  # all of its GPUs or none


def test_starts_have_replicas_of_one_size_after_the_other(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    small, whole = starts_of(space)
    assert shapes(small) == [{0: 2}, {0: 2}, {1: 2}, {1: 2}, {2: 2}, {3: 2}]
    assert shapes(whole) == [{0: 4}, {1: 4}, {2: 2}, {3: 2}]
    assert {group.phase for group in (*small, *whole)} == {M}


def test_boxes_too_small_alone_are_joined_with_the_nearest(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(least=6, near=[(0, 2)])
    (start,) = starts_of(space)
    assert shapes(start) == [{0: 4, 2: 2}, {1: 4, 3: 2}]


def test_boxes_go_on_joining_until_they_hold_the_model(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(least=7, near=[(0, 2)])
    (start,) = starts_of(space)
    assert shapes(start) == [{0: 4, 1: 4}]  # of 0, 1 and 2 that have met, as few as hold it; 2 and 3 stay idle
    (larger,) = starts_of(make_space(least=9, near=[(0, 2)])[0])
    assert shapes(larger) == [{0: 4, 1: 4, 2: 2}]
    too_large, _ = make_space(least=13)
    assert starts_of(too_large) == []


def test_small_boxes_are_joined_beside_large_ones_that_are_not_cut(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(least=3)
    for start in starts_of(space):
        assert shapes(start) == [{0: 4}, {1: 4}, {2: 2, 3: 2}]


def test_a_pinned_box_keeps_its_phase_and_is_joined_with_no_other_pin(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(least=4, pinned={"t0": P, "t1": D})
    (start,) = starts_of(space)
    assert shapes(start) == [{0: 4}, {1: 4}]
    together, _ = make_space(least=4, pinned={"t0": P, "t1": P})
    assert (Group((Slice(2, 2), Slice(3, 2)), P)) in starts_of(together)[0]


@pytest.mark.parametrize(
    ("size", "cells"),
    [
        (12, [(0, 1, 2, 3)]),
        (11, [(0, 1, 2), (3,)]),
        (9, [(0, 1), (2, 3)]),
        (8, [(0, 1), (2, 3)]),
        (4, [(0,), (1,), (2, 3)]),
    ],
)
def test_cells_grow_along_the_fast_links_while_they_fit(
    make_space: Callable[..., Any], size: int, cells: list[tuple[int, ...]]
) -> None:
    space, _ = make_space(near=[(0, 1)])
    assert sorted(cell.boxes for cell in split_into_cells(space, [all_gpus(space, space.usable)], size)) == cells


def test_a_cell_that_holds_no_model_joins_what_is_next_to_it(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(least=4, near=[(0, 1)])
    found = split_into_cells(space, [all_gpus(space, space.usable)], 2)
    assert sorted(cell.boxes for cell in found) == [(0, 2), (1, 3)]
    large, _ = make_space(least=12, near=[(0, 1)])
    (cell,) = split_into_cells(large, [all_gpus(large, large.usable)], 2)
    assert cell.boxes == (0, 1, 2, 3)


def test_every_service_has_cells_of_its_own(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(services=2)
    found = split_into_cells(space, [all_gpus(space, (0, 2)), all_gpus(space, (1, 3))], 100)
    assert [(cell.service, cell.boxes) for cell in found] == [(0, (0, 2)), (1, (1, 3))]
    assert [cell.problem(1.0).services[0].name for cell in found] == ["s0", "s1"]


def test_the_power_of_a_cell_counts_compute_and_bandwidth(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    fast, slow = space.boxes[0].gpu, space.boxes[2].gpu
    expected = 4 * sqrt(fast.tflops * fast.memory_gbps) + 2 * sqrt(slow.tflops * slow.memory_gbps)
    assert Cell(space.problem, (2, 0), 0).power == pytest.approx(expected)


def test_groups_that_leave_the_cell_or_serve_another_model_are_not_the_cells(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(services=2)
    cell = Cell(space.problem, (1, 2), 1)
    inside, other, across = (
        Group((Slice(1, 4), Slice(2, 2)), D, 1), Group((Slice(1, 4),), D, 0), Group((Slice(0, 4), Slice(1, 4)), D, 1),
    )  # fmt: skip
    assert cell.to_cell((inside,)) == (Group((Slice(0, 4), Slice(1, 2)), D, 0),)
    assert cell.to_cell((other,)) == cell.to_cell((across,)) == ()
    assert cell.to_cluster(cell.to_cell((inside,))) == [inside]


def test_a_cell_forgets_pins_and_exclusions_of_other_boxes(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(pinned={"a0": P, "t0": D}, excluded=frozenset({"t1"}))
    problem = Cell(replace(space.problem, price_weight=0.5), (1, 2), 0).problem(0.5)
    assert (problem.pinned, problem.excluded, problem.price_weight) == ({"t0": D}, frozenset(), 0.5)
    assert problem.services[0].workload.rate == 0.5
