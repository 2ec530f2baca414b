"""Neighbours, flips and ascents, over an evaluator whose scores are given."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.light_rescheduling import find_surviving_groups, reschedule_lightly
from p2pserve.coordinator.planning.upper.moves import flips, random_neighbour
from p2pserve.coordinator.planning.upper.packing import Packing
from p2pserve.coordinator.planning.upper.scorer import Scorer
from p2pserve.coordinator.planning.upper.search_space import SearchSpace, make_solution
from p2pserve.coordinator.planning.upper.tabu import climb, climb_by_flips, tabu_search

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
BY_BOX = make_solution([Group((Slice(0, 4),), M), Group((Slice(1, 4),), M), Group((Slice(2, 2),), M)])


def prefills(solution: Solution) -> float:
    """A tenth for each prefill group, half for a decode group besides."""
    phases = [group.phase for group in solution]
    return 0.1 * phases.count(P) + 0.5 * (D in phases)


def test_flips_change_one_group_to_each_other_phase_and_skip_what_is_alike(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    found = list(flips(space, BY_BOX))
    assert len(found) == 4  # boxes 0 and 1 are alike: two kinds of groups, two other phases each
    for group, solution in found:
        assert group in solution
        assert len(set(solution) - set(BY_BOX)) == 1
        assert group.phase is not M


def test_boxes_are_alike_whatever_lies_between_them_if_it_is_the_same_both_ways(
    make_space: Callable[..., Any],
) -> None:
    alike, _ = make_space(near=[(0, 1)])
    assert len(list(flips(alike, BY_BOX))) == 4
    one_is_nearer, _ = make_space(near=[(0, 2)])
    assert len(list(flips(one_is_nearer, BY_BOX))) == 6
    one_way, _ = make_space()
    one_way.problem.cluster.gbps[0, 1] = 20.0
    other = SearchSpace.of(one_way.problem, one_way.evaluator)
    assert len(list(flips(other, BY_BOX))) == 6


def test_flips_obey_pins(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(pinned={"a0": M, "t0": M})
    assert {group.slices[0].box for group, _ in flips(space, BY_BOX)} == {1}


def test_every_neighbour_uses_each_gpu_once_and_holds_its_model(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(pinned={"a1": P})
    start = make_solution([Group((Slice(0, 4),), M), Group((Slice(1, 4),), P), Group((Slice(2, 2),), M)])
    rng, here, seen = np.random.default_rng(3), start, set()
    for _ in range(500):
        there = random_neighbour(space, here, rng)
        if there is None:
            continue
        assert there == make_solution(there)
        assert all(count >= 0 for count in space.idle_gpus(there).values())
        for group in there:
            assert space.can_hold(group.slices, group.service)
            assert group.phase in space.phases_of(group.slices)
            assert all(gpus % space.gpu_units[box] == 0 and gpus > 0 for box, gpus in group.slices)
        seen.add(there)
        here = there
    assert len(seen) > 50
    assert {len(solution) for solution in seen} >= {2, 3, 4}


@pytest.mark.parametrize("price_weight", [0.0, 1e-3])
def test_gpus_are_let_go_only_where_money_counts_and_never_all(
    make_space: Callable[..., Any], price_weight: float
) -> None:
    space, _ = make_space()
    space = replace(space, problem=replace(space.problem, price_weight=price_weight))
    busy = make_solution([*BY_BOX, Group((Slice(3, 2),), M)])
    rng = np.random.default_rng(3)
    drawn = [there for _ in range(400) if (there := random_neighbour(space, busy, rng)) is not None]
    fewer = [there for there in drawn if set(there) < set(busy)]
    assert bool(fewer) is (price_weight > 0.0)
    alone = make_solution([Group(tuple(Slice(box, gpus) for box, gpus in enumerate((4, 4, 2, 2))), M)])
    drawn = [there for _ in range(400) if (there := random_neighbour(space, alone, rng)) is not None]
    assert drawn
    assert () not in drawn


def test_an_ascent_takes_the_steepest_way_up(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(prefills)
    scorer = Scorer(space, limit=1000)
    top = climb_by_flips(scorer, space, BY_BOX)
    assert prefills(top) == pytest.approx(0.7)
    assert sorted(group.phase for group in top) == [D, P, P]
    assert climb_by_flips(scorer, space, top) == top
    assert climb(scorer, BY_BOX, lambda here: []) == BY_BOX


def test_an_ascent_ends_with_the_budget(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(prefills)
    climb_by_flips(Scorer(space, limit=1), space, BY_BOX)
    assert evaluator.scored == [space.canonical(BY_BOX)]


def test_flips_are_adopted_only_if_they_gain_the_margin(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(prefills)
    found = reschedule_lightly(space.problem, evaluator, BY_BOX, margin=0.7)
    assert len(found.flips) == 3
    assert found.score.objective - found.before.objective == pytest.approx(0.7)
    stays = reschedule_lightly(space.problem, evaluator, BY_BOX, margin=0.71)
    assert (stays.solution, stays.flips, stays.score) == (BY_BOX, (), stays.before)


def test_two_flips_at_once_are_tried_where_one_is_not_enough(make_space: Callable[..., Any]) -> None:
    def both_or_none(solution: Solution) -> float:
        phases = {group.phase for group in solution}
        return 1.0 if {P, D} <= phases else 0.5 if phases == {M} else 0.0

    space, evaluator = make_space(both_or_none)
    two = make_solution([Group((Slice(0, 4),), M), Group((Slice(2, 2),), M)])
    found = reschedule_lightly(space.problem, evaluator, two, steps=50)
    assert found.score.objective == 1.0
    assert {flip.now.phase for flip in found.flips} == {P, D}
    one = reschedule_lightly(space.problem, evaluator, two, steps=1)
    assert one.flips == ()  # no steps are left for pairs


def test_a_flip_says_what_was_short_and_what_it_gives(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(prefills)
    found = reschedule_lightly(
        space.problem, evaluator, make_solution([Group((Slice(0, 4),), D)]), margin=-1.0, steps=1
    )
    assert found.flips == ()
    flipped = reschedule_lightly(space.problem, evaluator, make_solution([Group((Slice(2, 2),), M)]), margin=0.0)
    assert flipped.flips[0].why == (
        "2 GPUs of t0: mixed -> decode; of 1 requests/s asked for, all replicas prefill 2 and decode 2 at most; this "
        "one's share goes from 2 and 2 to 0 and 2"
    )


def test_groups_with_a_lost_box_are_lost_and_the_others_find_their_new_places(make_space: Callable[..., Any]) -> None:
    space, _ = make_space()
    old = space.problem.cluster
    new = old.without(frozenset({"a0"}))
    running = make_solution([Group((Slice(0, 4), Slice(2, 2)), P), Group((Slice(1, 4), Slice(3, 2)), D)])
    assert find_surviving_groups(running, old, new) == (Group((Slice(0, 4), Slice(2, 2)), D),)
    with pytest.raises(NoPlan, match="none of the 1 running replicas"):
        find_surviving_groups(running[:1] if running[0].phase is P else running[1:], old, new)


def test_tabu_search_finds_what_an_ascent_cannot_and_stays_in_its_budget(make_space: Callable[..., Any]) -> None:
    """Two groups in one box must become one in it before anything is better."""
    space, _ = make_space()
    real = LowerLevel(space.problem)
    there = SearchSpace.of(space.problem, real)
    scorer, packing = Scorer(there, limit=150), Packing(there, 2)
    start = make_solution([Group((Slice(0, 2),), M), Group((Slice(0, 2),), M)])
    before = scorer.objective(start)
    tabu_search(scorer, packing, start, np.random.default_rng(0))
    assert scorer.best_score.objective > before
    assert 50 <= scorer.steps <= 152
    again = Scorer(there, limit=150)
    tabu_search(again, packing, start, np.random.default_rng(0))
    assert again.best == scorer.best
