"""Where replicas, ordered by what their cards are good at, change from prefill to decode."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.search import phase_cuts
from p2pserve.coordinator.planning.upper.search_space import SearchSpace, make_solution
from p2pserve.coordinator.planning.upper.settings import SearchSettings

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
EACH = ({0: 4}, {1: 4}, {2: 2}, {3: 2})
"""One group per box: two of A40, which have more compute for their bandwidth, and two of 3090 Ti."""


def mixed(*groups: dict[int, int], phases: tuple[Phase, ...] = ()) -> Solution:
    return make_solution(
        Group(tuple(Slice(box, gpus) for box, gpus in group.items()), phase)
        for group, phase in zip(groups, phases or (M,) * len(groups), strict=True)
    )


def with_cuts(make_space: Callable[..., Any], cuts: int, **more: Any) -> SearchSpace:
    space, _ = make_space(**more)
    return replace(space, settings=SearchSettings(phase_cuts=cuts))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("cuts", "prefilling"),
    # of four groups: the middle; a third and two thirds, 1.33 and 2.67; each; and with five, 0.67 to 3.33
    [(1, [2]), (2, [1, 3]), (3, [1, 2, 3]), (5, [1, 2, 3]), (8, [0, 1, 2, 3, 4])],
)
def test_as_many_places_are_tried_as_there_are(
    make_space: Callable[..., Any], cuts: int, prefilling: list[int]
) -> None:
    found = list(phase_cuts(with_cuts(make_space, cuts), mixed(*EACH)))
    assert found == [mixed(*EACH, phases=(P,) * many + (D,) * (4 - many)) for many in prefilling]


def test_groups_that_may_not_change_stay_as_they_are(make_space: Callable[..., Any]) -> None:
    space = with_cuts(make_space, 1, pinned={"a1": M, "t1": P})
    start = mixed(*EACH, phases=(M, M, M, P))
    assert list(phase_cuts(space, start)) == [mixed(*EACH, phases=(P, M, D, P))]


def test_a_group_across_boxes_leans_like_most_of_its_cards(make_space: Callable[..., Any]) -> None:
    """Four A40 beside two 3090 Ti lean more to compute than one beside two; and a pair of 3090 Ti least of all."""
    space = with_cuts(make_space, 2)
    many, few = {0: 4, 2: 2}, {1: 1, 3: 2}
    assert list(phase_cuts(space, mixed(few, many))) == [mixed(many, few, phases=(P, D))]
    assert list(phase_cuts(space, mixed({2: 2}, {1: 1, 3: 2}))) == [mixed({1: 1, 3: 2}, {2: 2}, phases=(P, D))]
    assert list(phase_cuts(space, mixed({0: 4}, {1: 4, 3: 2}))) == [mixed({0: 4}, {1: 4, 3: 2}, phases=(P, D))]
