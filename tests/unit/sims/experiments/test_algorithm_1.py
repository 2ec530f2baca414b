"""ThunderServe's Algorithm 1 by hand: where it steps, what it may not go back to, and what neighbours are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.search_space import SearchSpace
from p2pserve.sims.experiments.algorithm_1 import (
    MEMORY,
    NEIGHBOURS,
    PHASES,
    STEPS,
    construct_neighbours,
    make_start,
    merge_groups,
    move_gpus,
    run_algorithm_1,
    split_group,
)
from p2pserve.sims.experiments.setting import PlannedCase

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED

NEXT: Mapping[str, Sequence[str]] = {"a": "bc", "b": "acd", "c": "ab", "d": "be", "e": "df", "f": "e"}
HEIGHTS = {"a": 2.0, "b": 1.0, "c": 3.0, "d": 0.0, "e": 5.0, "f": 4.0}
"""From the hill c to the higher one e the way goes down over b and d."""


def walk(start: str, steps: int, memory: int) -> tuple[str, list[str]]:
    """The best place, and every place whose neighbours were asked for."""
    asked: list[str] = []

    def construct(here: str) -> Sequence[str]:
        asked.append(here)
        return NEXT[here]

    return run_algorithm_1(start, construct, HEIGHTS.__getitem__, steps=steps, memory=memory), asked


def test_each_step_goes_to_the_best_neighbour_even_if_it_is_worse() -> None:
    # a to c (3), from there back to a (2) since only c is remembered, and then to b (1): c is forbidden.
    best, asked = walk("a", steps=4, memory=2)
    assert asked == ["a", "c", "a", "b"]
    assert best == "c", "the best of all that were stepped on, not the last"


def test_the_start_is_not_remembered_and_the_oldest_is_forgotten() -> None:
    # With a memory of one, a and c take turns for ever: each forgets that it was the other before last.
    assert walk("a", steps=6, memory=1)[1] == ["a", "c", "a", "c", "a", "c"]


def test_a_longer_memory_crosses_the_valley() -> None:
    # c, a, b are remembered one after the other: from b only d is left, then e.
    best, asked = walk("a", steps=5, memory=5)
    assert asked == ["a", "c", "a", "b", "d"]
    assert best == "e"
    assert walk("a", steps=4, memory=5)[0] == "c", "a step fewer does not get there"


def test_a_step_without_an_allowed_neighbour_stays_and_draws_again() -> None:
    best, asked = walk("f", steps=3, memory=5)
    # f to e, to f, and then all of f's neighbours are remembered.
    assert asked == ["f", "e", "f"]
    assert best == "e"
    draws = iter(["", "", "b"])
    assert run_algorithm_1("a", lambda here: next(draws), HEIGHTS.__getitem__, steps=3) == "a"


def test_a_new_best_has_to_be_better_than_the_start() -> None:
    assert run_algorithm_1("e", NEXT.__getitem__, HEIGHTS.__getitem__, steps=3) == "e"


def test_the_numbers_are_the_papers() -> None:
    assert (STEPS, NEIGHBOURS, MEMORY, PHASES) == (100, 10, 5, (P, D))


@pytest.mark.parametrize(
    ("ratio", "first", "rest"),
    [
        (0.5, ((0, 2), (1, 1)), ((0, 2), (1, 2))),
        (0.25, ((0, 1),), ((0, 3), (1, 3))),
        (0.99, ((0, 3), (1, 2)), ((0, 1), (1, 1))),
        (0.1, (), ((0, 4), (1, 3))),
    ],
)
def test_a_split_gives_each_kind_of_gpu_rounded_down_and_the_rest(
    ratio: float, first: tuple[tuple[int, int], ...], rest: tuple[tuple[int, int], ...]
) -> None:
    one, two = split_group(Group((Slice(0, 4), Slice(1, 3)), P), ratio, (D, P))
    assert (one.slices, one.phase) == (first, D)
    assert (two.slices, two.phase) == (rest, P)


def test_a_merge_has_all_gpus_of_both_in_the_phase_that_was_drawn() -> None:
    merged = merge_groups(Group((Slice(0, 2), Slice(1, 1)), P), Group((Slice(0, 1), Slice(3, 4)), P), D)
    assert merged == Group((Slice(0, 3), Slice(1, 1), Slice(3, 4)), D)


def test_a_move_keeps_both_phases_and_may_leave_nothing() -> None:
    one, two = Group((Slice(0, 2),), P), Group((Slice(1, 1),), D)
    assert move_gpus(one, two, Slice(0, 1)) == (Group((Slice(0, 1),), P), Group((Slice(0, 1), Slice(1, 1)), D))
    assert move_gpus(one, two, Slice(0, 2))[0].slices == ()


@pytest.fixture
def space() -> SearchSpace:
    problem = PlannedCase(cluster="thunderserve-cloud-16", workload="conversation", rate=4.0).problem()
    return SearchSpace.of(problem, LowerLevel(problem))


def gpus_of(solution: Solution) -> dict[int, int]:
    found: dict[int, int] = {}
    for group in solution:
        for box, gpus in group.slices:
            found[box] = found.get(box, 0) + gpus
    return found


def test_it_starts_with_a_group_for_each_box_in_random_phases(space: SearchSpace) -> None:
    starts = [make_start(space, PHASES, np.random.default_rng(seed)) for seed in range(8)]
    assert {tuple(group.slices for group in start) for start in starts} == {
        tuple((Slice(number, box.gpus),) for number, box in enumerate(space.boxes))
    }
    assert {group.phase for start in starts for group in start} == {P, D}
    assert len(set(starts)) > 2


@pytest.mark.parametrize("phases", [PHASES, (P, D, M)])
def test_neighbours_use_the_same_gpus_and_hold_the_model(space: SearchSpace, phases: tuple[Phase, ...]) -> None:
    rng = np.random.default_rng(0)
    start = make_start(space, phases, rng)
    every = [list(construct_neighbours(space, start, phases, rng)) for _ in range(40)]
    assert max(map(len, every)) <= NEIGHBOURS
    assert min(map(len, every)) < NEIGHBOURS, "the ones that do not hold the model are not drawn again"
    found = [neighbour for drawn in every for neighbour in drawn]
    assert all(gpus_of(one) == gpus_of(start) for one in found)
    assert all(space.can_hold(group.slices, 0) for one in found for group in one)
    assert {group.phase for one in found for group in one} == set(phases)
    assert {len(one) - len(start) for one in found} == {-1, 0, 1}, "merges, flips and moves, splits"
    flips = [one for one in found if [group.slices for group in one] == [group.slices for group in start]]
    assert {sum(a.phase is not b.phase for a, b in zip(one, start, strict=True)) for one in flips} == {1}


def test_a_group_alone_is_neither_merged_nor_moved(make_flat: Callable[[int], Any]) -> None:
    alone = (Group((Slice(0, 4),), P),)
    rng = np.random.default_rng(0)
    found = {one for _ in range(30) for one in construct_neighbours(make_flat(2), alone, PHASES, rng)}
    assert {tuple(group.slices[0].gpus for group in one) for one in found} == {(4,), (2, 2)}
    assert (Group((Slice(0, 4),), D),) in found


@pytest.fixture
def make_flat() -> Callable[[int], Any]:
    """What of a search space neighbours ask: groups of so many GPUs hold the model."""

    class Holds:
        def __init__(self, least: int) -> None:
            self.least = least

        def can_hold(self, slices: Sequence[Slice], service: int) -> bool:
            return sum(gpus for _, gpus in slices) >= self.least

    return Holds
