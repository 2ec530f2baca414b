"""Steps and rounds of the search one by one: neighbours, scores and chance are given."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.scorer import Scorer
from p2pserve.coordinator.planning.upper.search_space import SearchSpace, make_solution
from p2pserve.coordinator.planning.upper.settings import SearchSettings
from p2pserve.coordinator.planning.upper.tabu import tabu_search

from .exhaustive import all_solutions

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
MakeSpace = Callable[..., Any]


def solution(*groups: tuple[int, int, Phase]) -> Solution:
    """Each as box, GPUs and phase."""
    return make_solution(Group((Slice(box, gpus),), phase) for box, gpus, phase in groups)


START = solution((0, 2, M), (2, 2, M))
SCRIPTED = SearchSettings(
    recut_share=1.0, fresh_share=0.0, warm=1e-9, cold=1e-9, barren_rounds=1, fruitless_draws=3, stale_steps=1000
)
"""All neighbours come from the packing, and none that is worse is taken."""


class Half:
    """Chance that is always one half."""

    def random(self) -> float:
        return 0.5

    def normal(self, mean: float, spread: float, many: int) -> Any:
        return np.full(many, mean)


class Neighbours:
    """A packing that gives these one after the other, and then none. `asked`: the solutions whose neighbour it was
    asked for; `rounds`: for each time that it was asked for a start, how many those were."""

    columns = 0

    def __init__(self, given: Iterable[Solution | None], starts: Iterable[Solution] = ()) -> None:
        self._given, self._starts = iter(given), iter(starts)
        self.asked: list[Solution] = []
        self._begins: list[int] = []

    def recut(self, here: Solution, rng: object) -> Solution | None:
        self.asked.append(here)
        return next(self._given, None)

    def start(self, rng: object, **_: Any) -> Solution:
        self._begins.append(len(self.asked))
        return next(self._starts, ())

    @property
    def rounds(self) -> list[int]:
        """Neighbours asked for in each round, where each ends with a start."""
        return [after - before for before, after in zip([0, *self._begins], self._begins, strict=False)]


def run(space: SearchSpace, packing: Neighbours, *, limit: int = 1000, known: bool = True, **settings: Any) -> Scorer:
    scorer = Scorer(replace(space, settings=replace(SCRIPTED, **settings)), limit=limit)
    if known:
        scorer.score(START)
    tabu_search(scorer, packing, START, Half())  # type: ignore[arg-type]
    return scorer


def others(space: SearchSpace) -> Iterator[Solution]:
    """Different ones, no two of which are the same but for the names of boxes."""
    seen = {space.canonical(START), ()}
    for found in all_solutions(space):
        if (key := space.canonical(found)) not in seen:
            seen.add(key)
            yield key


def only_start(found: Solution) -> float:
    return float(found == START)


def test_a_search_ends_after_so_many_rounds_of_so_many_draws_without_anything_new(make_space: MakeSpace) -> None:
    space, _ = make_space(only_start)
    packing = Neighbours([])
    run(space, packing, fruitless_draws=7, barren_rounds=3)
    assert len(packing.asked) == 3 * 7
    unknown = Neighbours([])
    run(space, unknown, known=False, fruitless_draws=7, barren_rounds=3)
    assert len(unknown.asked) == 4 * 7  # the start itself was new


def test_what_is_new_begins_the_counts_anew(make_space: MakeSpace) -> None:
    """A barren round; in the second the first draw is new, and three more are not; then two barren rounds."""
    space, _ = make_space(only_start)
    packing = Neighbours([None, None, None, next(others(space))])
    run(space, packing, barren_rounds=2)
    assert len(packing.asked) == 3 + (1 + 3) + 3 + 3


@pytest.mark.parametrize(
    ("stale", "rounds"),
    [
        # 10 and 10 steps of which the start is the first, and then all 15 that are left, since two rounds would be 20
        (1000, [9, 10, 15]),
        (5, [5, 5, 5, 5, 5, 5, 4]),  # or so many steps that lead nowhere
    ],
)
def test_rounds_have_so_many_steps_and_the_last_takes_what_is_left(
    make_space: MakeSpace, stale: int, rounds: list[int]
) -> None:
    """A neighbour whose upper bound is too low is one step."""
    space, _ = make_space(only_start, slack=0.1)
    packing = Neighbours(others(space))
    run(space, packing, limit=35, known=False, round_steps=10, stale_steps=stale, fresh_share=1.0)
    assert packing.rounds == rounds


def test_a_step_that_leads_somewhere_puts_off_the_end_of_a_round(make_space: MakeSpace) -> None:
    *worse, better = islice(others(make_space(only_start)[0]), 8)
    space, _ = make_space(lambda found: 2.0 if found == better else only_start(found), slack=0.1)
    packing = Neighbours([*worse[:3], better, *worse[3:]])
    run(space, packing, stale_steps=4, fresh_share=1.0, fruitless_draws=1000, limit=10)
    # three steps, two for the better one, which is bounded and scored, and four more that lead nowhere
    assert packing.rounds[0] == 3 + 1 + 4
    assert packing.asked[3:5] == [START, better]


@pytest.mark.parametrize(
    ("steps", "lowest"),
    # at an even chance as much worse as ln 2 times the temperature: 0.4 at first, 0.2 halfway to 0.1
    [(0, 1.0 - 0.6931 * 0.4), (10, 1.0 - 0.6931 * 0.2), (16, 1.0 - 0.6931 * 0.4 * 0.25**0.8)],
)
def test_a_step_may_be_worse_by_the_temperature_which_falls(make_space: MakeSpace, steps: int, lowest: float) -> None:
    """Of 20 steps after the start."""
    *before, drawn = islice(others(make_space(only_start)[0]), steps + 1)
    for value, taken in ((lowest - 0.001, False), (lowest + 0.001, True)):
        scores = {START: 1.0, drawn: value}
        space, _ = make_space(lambda found, scores=scores: scores.get(found, 0.0), slack=0.0)
        packing = Neighbours([*before, drawn])
        run(space, packing, limit=21, warm=0.4, cold=0.1, fruitless_draws=1)
        assert packing.asked[: steps + 2] == [START] * (steps + 1) + [drawn if taken else START]


A, B = solution((0, 2, P), (2, 2, P)), solution((0, 2, D), (2, 2, P))
C, BACK = solution((0, 2, D), (2, 2, D)), solution((0, 2, P), (2, 2, D))
"""From A to B box 0 changes its phase, from B to C box 2, and then BACK would change box 0 as it was."""


@pytest.mark.parametrize(
    ("remembered", "value", "taken"),
    [(2, 0.0, False), (1, 0.0, True), (2, 5.0, True), (2, 1.0, False)],
    ids=["undoes a move", "which was longer ago", "but is the best of all", "no better than the best"],
)
def test_the_last_moves_are_not_undone_unless_that_is_best_of_all(
    make_space: MakeSpace, remembered: int, value: float, taken: bool
) -> None:
    space, _ = make_space(lambda found: value if found == BACK else only_start(found))
    packing = Neighbours([A, B, C, BACK])
    run(space, packing, warm=1e6, cold=1e6, tabu_moves=remembered)
    assert packing.asked[:5] == [START, A, B, C, BACK if taken else C]


def test_what_stays_as_it_is_and_what_is_not_there_is_no_step(make_space: MakeSpace) -> None:
    space, evaluator = make_space(only_start)
    packing = Neighbours([START, None])
    assert run(space, packing).steps == 1
    assert (evaluator.scored, packing.asked) == ([START], [START] * 3)


def test_rounds_begin_at_the_best_or_at_a_packing_whose_phases_are_set(make_space: MakeSpace) -> None:
    """Decoding boxes are better; a round goes on from a packing after its flips, and from the best where there is
    none."""

    def by_decodes(found: Solution) -> float:
        return 5.0 if found == START else float(sum(group.phase is D for group in found))

    space, _ = make_space(by_decodes)
    packing = Neighbours([], [solution((0, 4, P), (2, 2, P)), ()])
    run(space, packing, fresh_share=1.0, fruitless_draws=2)
    flipped = solution((0, 4, D), (2, 2, D))
    assert packing.asked[:2] == [START] * 2
    never = Neighbours([], [solution((0, 4, P), (2, 2, P))])
    run(space, never, fresh_share=0.0, fruitless_draws=2, barren_rounds=2)
    assert never.asked == [START] * 4
    again = Neighbours([], [solution((0, 4, P), (2, 2, P)), ()])
    run(space, again, fresh_share=1.0, fruitless_draws=2, barren_rounds=2)
    assert again.asked == [START] * 2 + [flipped] * 2 + [START] * 2
