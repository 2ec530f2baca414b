"""Flips of running replicas: how many are looked at, which are reported, and when nothing changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.light_rescheduling import (
    MARGIN,
    STEPS,
    find_surviving_groups,
    reschedule_lightly,
)
from p2pserve.coordinator.planning.upper.search_space import make_solution

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
HALVES = make_solution([Group((Slice(0, 2),), M), Group((Slice(0, 2),), M), Group((Slice(2, 2),), M)])

FIVE = make_solution([*HALVES, Group((Slice(1, 4),), M), Group((Slice(3, 2),), M)])


def counted(solution: Solution) -> float:
    """A prefill replica is worth 0.2, one; a decode replica 0.1, one."""
    phases = {group.phase for group in solution}
    return 0.2 * (P in phases) + 0.1 * (D in phases)


def test_every_flip_names_the_replica_as_it_was_and_as_it_becomes(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(counted)
    found = reschedule_lightly(space.problem, evaluator, HALVES)
    assert found.score.objective == pytest.approx(0.3)
    assert found.before.objective == 0.0
    assert len(found.flips) == 2
    assert {flip.now.phase for flip in found.flips} == {P, D}
    for flip in found.flips:
        assert flip.was in HALVES
        assert flip.now in found.solution
        assert flip.was.slices == flip.now.slices
        assert flip.now.phase is not flip.was.phase
    # the third replica is as it was, though one on the same GPUs of its box has changed
    assert sorted(group.slices for group in found.solution) == sorted(group.slices for group in HALVES)


@pytest.mark.parametrize(("gain", "is_adopted"), [(MARGIN * 0.99, False), (MARGIN * 1.01, True)])
def test_flips_have_to_pay(make_space: Callable[..., Any], gain: float, is_adopted: bool) -> None:
    space, evaluator = make_space(lambda solution: gain * (P in {group.phase for group in solution}))
    found = reschedule_lightly(space.problem, evaluator, HALVES)
    assert bool(found.flips) is is_adopted
    assert (found.solution == HALVES) is not is_adopted


def test_no_more_is_scored_than_steps_allow(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(lambda solution: -float(len({group.phase for group in solution})), slack=10.0)
    reschedule_lightly(space.problem, evaluator, FIVE)
    assert len(evaluator.scored) == STEPS
    other, few = make_space(counted, slack=10.0)
    reschedule_lightly(other.problem, few, FIVE, steps=4)
    assert len(few.scored) == 4


def test_time_that_is_up_leaves_what_runs(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(counted)
    found = reschedule_lightly(space.problem, evaluator, HALVES, spent=lambda: True)
    assert (found.solution, found.flips) == (HALVES, ())
    assert len(evaluator.scored) == 1


def test_time_that_runs_out_adopts_what_was_found_by_then(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(counted)

    def answers() -> Iterator[bool]:
        while True:
            yield len(evaluator.scored) >= 2

    asked = answers()
    found = reschedule_lightly(space.problem, evaluator, HALVES, spent=lambda: next(asked))
    assert len(evaluator.scored) == 2
    assert len(found.flips) == 1
    assert found.score.objective == pytest.approx(0.2)


def test_pins_are_kept_while_rescheduling(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(counted, pinned={"a0": M})
    found = reschedule_lightly(space.problem, evaluator, HALVES)
    assert [flip.now for flip in found.flips] == [Group((Slice(2, 2),), P)]


def test_survivors_are_counted_by_the_boxes_of_the_new_cluster(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    old = space.problem.cluster
    running = make_solution([
        Group((Slice(0, 4),), P), Group((Slice(1, 2), Slice(3, 2)), D), Group((Slice(1, 2),), M),
        Group((Slice(2, 2),), D),
    ])  # fmt: skip
    assert find_surviving_groups(running, old, old) == running
    left = find_surviving_groups(running, old, old.without(frozenset({"a0", "t0"})))
    assert left == make_solution([Group((Slice(0, 2), Slice(1, 2)), D), Group((Slice(0, 2),), M)])
