"""All neighbours of small solutions: what enough draws find is exactly what can be counted by hand."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.moves import random_neighbour
from p2pserve.coordinator.planning.upper.search_space import SearchSpace, make_solution
from p2pserve.coordinator.planning.upper.settings import SearchSettings

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
A0, A1, T0, T1 = range(4)
NAMES = ("a0", "a1", "t0", "t1")
NO_GATHER = SearchSettings(gathered_boxes=0, whole_moves=1.0)
"""Without the move that cuts boxes anew, and GPUs change groups only with all others of their box."""

MakeSpace = Callable[..., Any]


def mixed(*groups: Mapping[int, int]) -> Solution:
    """Groups of service 0, each as GPUs by box."""
    return served((M, 0, group) for group in groups)


def served(groups: Iterable[tuple[Phase, int, Mapping[int, int]]]) -> Solution:
    return make_solution(
        Group(tuple(Slice(box, gpus) for box, gpus in sorted(group.items())), phase, service)
        for phase, service, group in groups
    )


def some_of(
    make_space: MakeSpace,
    *boxes: int,
    phase: Phase | None = M,
    price_weight: float = 0.0,
    settings: SearchSettings | None = None,
    **more: Any,
) -> SearchSpace:
    """With these boxes only, all pinned to one phase (None: to none)."""
    pinned = {NAMES[box]: phase for box in boxes} if phase is not None else {}
    excluded = frozenset(NAMES) - {NAMES[box] for box in boxes}
    space, _ = make_space(pinned=pinned, excluded=excluded, **more)
    problem = replace(space.problem, price_weight=price_weight)
    return replace(space, problem=problem, settings=settings or SearchSettings())  # type: ignore[no-any-return]


def neighbours(space: SearchSpace, solution: Solution, draws: int = 2000) -> set[Solution]:
    rng = np.random.default_rng(1)
    return {there for _ in range(draws) if (there := random_neighbour(space, solution, rng)) is not None}


@pytest.mark.parametrize("here", [mixed({A0: 4}), mixed({A0: 2}, {A0: 2}), mixed({A0: 2})])
def test_a_box_of_four_whose_groups_have_two_at_least(make_space: MakeSpace, here: Solution) -> None:
    """It is one group or two; where half of it is idle, that half joins the other or is a group."""
    assert neighbours(some_of(make_space, A0), here) == {mixed({A0: 4}), mixed({A0: 2}, {A0: 2})}


@pytest.mark.parametrize("here", [mixed({T0: 2, T1: 2}), mixed({T0: 2}, {T1: 2})])
def test_atomic_boxes_are_never_split(make_space: MakeSpace, here: Solution) -> None:
    found = neighbours(some_of(make_space, T0, T1, least=1), here)
    assert found == {mixed({T0: 2, T1: 2}), mixed({T0: 2}, {T1: 2})}


def test_a_group_is_split_at_a_quarter_a_third_or_a_half(make_space: MakeSpace) -> None:
    """Of four GPUs, a quarter and a third are one. Of two boxes, each at the same ratio, or box by box."""
    one = some_of(make_space, A0, settings=NO_GATHER, least=1)
    assert neighbours(one, mixed({A0: 4})) == {mixed({A0: 1}, {A0: 3}), mixed({A0: 2}, {A0: 2})}
    two = some_of(make_space, A0, A1, settings=NO_GATHER, least=1)
    assert neighbours(two, mixed({A0: 4, A1: 4})) == {
        mixed({A0: 4}, {A1: 4}),
        mixed({A0: 1, A1: 1}, {A0: 3, A1: 3}),
        mixed({A0: 2, A1: 2}, {A0: 2, A1: 2}),
    }
    assert neighbours(replace(two, evaluator=some_of(make_space, A0, least=3).evaluator), mixed({A0: 4, A1: 4})) == {
        mixed({A0: 4}, {A1: 4}),
        mixed({A0: 2, A1: 2}, {A0: 2, A1: 2}),  # a quarter of each is too little
    }


def test_three_boxes_are_split_in_every_way(make_space: MakeSpace) -> None:
    """Halves of the first box alone do not hold the model, and of the atomic ones there are none."""
    space = some_of(make_space, A0, T0, T1, settings=NO_GATHER)
    assert neighbours(space, mixed({A0: 2}, {A0: 2, T0: 2, T1: 2})) >= {
        mixed({A0: 2}, {A0: 2}, {T0: 2, T1: 2}),
        mixed({A0: 2}, {T0: 2}, {A0: 2, T1: 2}),
        mixed({A0: 2}, {T1: 2}, {A0: 2, T0: 2}),
    }


def test_gpus_of_one_box_go_to_another_group(make_space: MakeSpace) -> None:
    """1 and 3: one of three makes two and two; two of three, 3 and 1 again; all of either, one group. The three also
    are split."""
    here = mixed({A0: 1}, {A0: 3})
    all_at_once = some_of(make_space, A0, settings=NO_GATHER, least=1)
    assert neighbours(all_at_once, here) == {mixed({A0: 4}), mixed({A0: 1}, {A0: 1}, {A0: 2})}
    some = some_of(make_space, A0, settings=replace(NO_GATHER, whole_moves=0.0), least=1)
    assert neighbours(some, here) == {mixed({A0: 4}), mixed({A0: 1}, {A0: 1}, {A0: 2}), mixed({A0: 2}, {A0: 2}), here}


def test_a_group_gives_all_of_one_box_or_joins(make_space: MakeSpace) -> None:
    space = some_of(make_space, A0, A1, T0, settings=NO_GATHER)
    assert neighbours(space, mixed({A0: 4, A1: 4}, {T0: 2})) == {
        mixed({A0: 4, A1: 4, T0: 2}),
        mixed({A1: 4}, {A0: 4, T0: 2}),
        mixed({A0: 4}, {A1: 4, T0: 2}),
        mixed({A0: 4}, {A1: 4}, {T0: 2}),
        mixed({A0: 1, A1: 1}, {A0: 3, A1: 3}, {T0: 2}),
        mixed({A0: 2, A1: 2}, {A0: 2, A1: 2}, {T0: 2}),
    }


def test_groups_across_boxes_merge_where_they_are_of_one_service(make_space: MakeSpace) -> None:
    space = some_of(make_space, A0, A1, T0, T1, services=2, settings=NO_GATHER)
    merged = {A0: 4, A1: 4, T0: 2, T1: 2}
    for services in ((0, 0), (0, 1), (1, 1)):
        here = served([(M, services[0], {A0: 4, T0: 2}), (M, services[1], {A1: 4, T1: 2})])
        whole = {there for there in neighbours(space, here) if len(there) == 1}
        assert whole == ({served([(M, services[0], merged)])} if services[0] == services[1] else set())


def test_parts_of_a_group_are_in_any_phase(make_space: MakeSpace) -> None:
    space = some_of(make_space, A0, phase=None, settings=NO_GATHER)
    split = {served((phase, 0, {A0: 2}) for phase in phases) for phases in combinations_with_replacement((P, D, M), 2)}
    flipped = {served([(D, 0, {A0: 4})]), mixed({A0: 4})}
    assert neighbours(space, served([(P, 0, {A0: 4})])) == split | flipped


def test_idle_gpus_become_a_group_in_any_phase_or_join_one_as_it_is(make_space: MakeSpace) -> None:
    """Those that must prefill do not join one that mixes."""
    space = some_of(make_space, A0, A1, phase=None, settings=NO_GATHER)
    taken = {there for there in neighbours(space, mixed({A0: 4})) if any(A1 in dict(group.slices) for group in there)}
    assert taken == {mixed({A0: 4, A1: 4}), *(served([(M, 0, {A0: 4}), (p, 0, {A1: 4})]) for p in (P, D, M))}
    pinned, _ = make_space(pinned={"a0": M, "a1": P}, excluded=frozenset({"t0", "t1"}))
    pinned = replace(pinned, settings=NO_GATHER)
    taken = {there for there in neighbours(pinned, mixed({A0: 4})) if any(A1 in dict(group.slices) for group in there)}
    assert taken == {served([(M, 0, {A0: 4}), (P, 0, {A1: 4})])}


def test_idle_gpus_that_hold_no_model_join_a_group(make_space: MakeSpace) -> None:
    space = some_of(make_space, A0, T0, settings=NO_GATHER, least=3)
    assert neighbours(space, mixed({A0: 4})) == {mixed({A0: 4, T0: 2})}


def test_where_nothing_is_idle_and_money_counts_any_one_group_is_let_go(make_space: MakeSpace) -> None:
    here = mixed({T0: 2}, {T1: 2})
    saved = neighbours(some_of(make_space, T0, T1, price_weight=1.0, settings=NO_GATHER), here)
    assert saved == {mixed({T0: 2, T1: 2}), mixed({T0: 2}), mixed({T1: 2})}
    free = neighbours(some_of(make_space, T0, T1, settings=NO_GATHER), here)
    assert free == {mixed({T0: 2, T1: 2})}


def test_a_group_changes_its_service_and_then_may_change_its_phase(make_space: MakeSpace) -> None:
    space = some_of(make_space, T0, phase=None, services=3, settings=NO_GATHER)
    found = neighbours(space, mixed({T0: 2}))
    others = {served([(phase, service, {T0: 2})]) for phase in (P, D, M) for service in (1, 2)}
    assert found == others | {served([(phase, 0, {T0: 2})]) for phase in (P, D)}


def test_boxes_of_a_group_are_cut_anew_together_or_apart(make_space: MakeSpace) -> None:
    """Together in one to three groups, of which what is left over goes round; apart, each box in one to three."""
    space = some_of(make_space, A0, A1, least=1, settings=SearchSettings(gather_apart=0.9))
    cuts = ((4,), (2, 2), (2, 1, 1))
    apart = {mixed(*({A0: n} for n in one), *({A1: n} for n in two)) for one in cuts for two in cuts}
    together = {
        mixed({A0: 4, A1: 4}),
        mixed({A0: 2, A1: 2}, {A0: 2, A1: 2}),
        mixed({A0: 2, A1: 1}, {A0: 1, A1: 2}, {A0: 1, A1: 1}),
    }
    split = {mixed({A0: 1, A1: 1}, {A0: 3, A1: 3})}
    here = mixed({A0: 4, A1: 4})
    assert neighbours(space, here) == apart | together | split
    never_apart = replace(space, settings=SearchSettings(gather_apart=0.0))
    assert neighbours(never_apart, here) == {mixed({A0: 4}, {A1: 4})} | together | split
    in_one = replace(space, settings=SearchSettings(gather_apart=0.0, gather_groups=1))
    halves = mixed({A0: 2, A1: 2}, {A0: 2, A1: 2})
    assert neighbours(in_one, here) == {mixed({A0: 4}, {A1: 4}), here, halves} | split


@pytest.mark.parametrize(("gathered", "together"), [(1, False), (2, True)])
def test_boxes_of_two_groups_are_cut_anew_where_they_are_not_too_many(
    make_space: MakeSpace, gathered: int, together: bool
) -> None:
    space = some_of(make_space, A0, A1, least=4, settings=SearchSettings(gathered_boxes=gathered))
    found = neighbours(space, mixed({A0: 4}, {A1: 4}))
    across = {mixed({A0: 2, A1: 2}, {A0: 2, A1: 2})} if together else set()
    assert found == {mixed({A0: 4, A1: 4}), mixed({A0: 4}, {A1: 4})} | across


def test_groups_that_touch_the_gathered_boxes_are_cut_anew_with_them(make_space: MakeSpace) -> None:
    """The two groups share the first box, so all three boxes are gathered whichever was drawn; what touches none of
    them stays as it is."""
    space = some_of(make_space, A0, A1, T0, T1, settings=SearchSettings(gathered_boxes=3, gather_groups=1))
    here = mixed({A0: 2, A1: 4}, {A0: 2, T0: 2}, {T1: 2})
    found = neighbours(space, here)
    assert mixed({A0: 4, A1: 4, T0: 2}, {T1: 2}) in found
    assert mixed({A0: 4}, {A1: 4, T0: 2}, {T1: 2}) in found  # in two parts
    assert not any(len(there) == 1 for there in found)


def test_one_group_of_several_may_be_cut_anew_alone(make_space: MakeSpace) -> None:
    """In three at once, which no split does."""
    space = some_of(make_space, A0, A1, least=1, settings=SearchSettings(gathered_boxes=1))
    assert mixed({A0: 2}, {A0: 1}, {A0: 1}, {A1: 4}) in neighbours(space, mixed({A0: 4}, {A1: 4}))


def test_gpus_left_over_in_one_box_go_where_those_of_the_other_did_not(make_space: MakeSpace) -> None:
    """Of five in three groups two are left over, of four the third group's one: all have three."""
    space = some_of(make_space, A0, A1, least=1, settings=SearchSettings(gather_apart=0.0))
    boxes = tuple(replace(box, gpus=5 if box.id == "a0" else box.gpus) for box in space.boxes)
    problem = replace(space.problem, cluster=replace(space.problem.cluster, boxes=boxes))
    found = neighbours(SearchSpace.of(problem, space.evaluator, space.settings), mixed({A0: 5, A1: 4}))
    in_three = {there for there in found if len(there) == 3}
    assert in_three == {mixed({A0: 2, A1: 1}, {A0: 2, A1: 1}, {A0: 1, A1: 2})}
