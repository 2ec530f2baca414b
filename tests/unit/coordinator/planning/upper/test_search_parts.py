"""A search in cells and as a whole: who is asked for which share of the traffic in how many steps, and what becomes of
the parts. What a cell carries is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.upper_bound import PREFILL_SHARES, TOTAL_PRICES
from p2pserve.coordinator.planning.model.problem import (
    Component,
    Evaluator,
    Group,
    PhaseCounts,
    Problem,
    Score,
    Slice,
    Solution,
)
from p2pserve.coordinator.planning.upper.search import SearchResult, search
from p2pserve.coordinator.planning.upper.settings import SearchSettings

from .conftest import GivenScores

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
MakeSpace = Callable[..., Any]
CAPACITY = {"a0": 1.0, "a1": 2.0, "t0": 5.0}
"""What the cell with this box is found to carry, over what it is asked for."""


class ByCell(GivenScores):
    """Remembers each subproblem with what was scored of it; packings are worth nothing."""

    def __init__(self, objective: Callable[[Solution], float], problem: Problem) -> None:
        super().__init__(objective, slack=0.0, least=1)
        self.problem, self.parts = problem, list[ByCell]()

    def component_values(
        self, components: Sequence[Component], phase_counts: Sequence[PhaseCounts]
    ) -> NDArray[np.float64]:
        return np.zeros((len(components), len(phase_counts), len(TOTAL_PRICES), len(PREFILL_SHARES)))

    def for_subproblem(self, problem: Problem) -> Evaluator:
        self.parts.append(ByCell(self._objective, problem))
        return self.parts[-1]

    def score(self, solution: Solution) -> Score:
        self.scored.append(solution)
        return Score(self._objective(solution), 0.5, CAPACITY[self.problem.cluster.boxes[0].id])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(box.id for box in self.problem.cluster.boxes)

    @property
    def rate(self) -> float:
        return self.problem.services[0].workload.rate


def decoding(solution: Solution) -> float:
    """The more GPUs decode the better."""
    return 0.01 * sum(gpus for group in solution for _, gpus in group.slices if group.phase is D)


def search_with(
    make_space: MakeSpace, objective: Callable[[Solution], float] = decoding, *, rate: float = 1.0, **more: Any
) -> tuple[ByCell, SearchResult]:
    """In cells of four GPUs: either box of four, and the two boxes of two together."""
    space, _ = make_space()
    (service,) = space.problem.services
    service = replace(service, workload=replace(service.workload, rate=rate))
    evaluator = ByCell(objective, replace(space.problem, services=(service,)))
    settings = SearchSettings(
        **{"steps": 300, "cell_gpus": 4, "first_pass": 0.25, "fruitless_draws": 60, "barren_rounds": 2}
        | more.pop("settings", {})
    )
    found = search(evaluator.problem, evaluator, rng=np.random.default_rng(0), settings=settings, **more)
    return evaluator, found


def test_shares_go_by_the_cards_and_then_by_what_was_found_to_be_carried(make_space: MakeSpace) -> None:
    evaluator, _ = search_with(make_space, rate=8.0)
    cells = {"a0": ("a0",), "a1": ("a1",), "t0": ("t0", "t1")}
    assert sorted(part.names for part in evaluator.parts) == sorted(2 * list(cells.values()))
    first, second = ({part.names[0]: part.rate for part in half} for half in (evaluator.parts[:3], evaluator.parts[3:]))
    fast, slow = (evaluator.problem.cluster.boxes[box].gpu for box in (0, 2))
    paper = {"a0": 4 * sqrt(fast.tflops * fast.memory_gbps), "t0": 4 * sqrt(slow.tflops * slow.memory_gbps)}
    paper["a1"] = paper["a0"]
    assert first == pytest.approx({name: 8.0 * value / sum(paper.values()) for name, value in paper.items()})
    carried = {name: CAPACITY[name] * value for name, value in paper.items()}
    assert second == pytest.approx({name: 8.0 * value / sum(carried.values()) for name, value in carried.items()})


def test_cells_share_the_steps_by_their_gpus_and_a_first_look_takes_a_part_of_them(make_space: MakeSpace) -> None:
    """A third of 300 each, of which a quarter is for the first look: no more than one or two above that."""
    told: list[tuple[int, int]] = []
    evaluator, result = search_with(make_space, progress=lambda step, total, _: told.append((step, total)))
    assert all(len(part.scored) <= 27 for part in evaluator.parts[:3])
    assert all(len(part.scored) <= 77 for part in evaluator.parts[3:])
    assert {total for _, total in told} == {300}
    assert told[0] == (1, 300)
    assert result.steps == told[-1][0] + 2  # the colocated solution and the one found, of the whole
    steps = [step for step, _ in told]
    assert steps == sorted(steps)


def test_solutions_of_cells_are_one_of_the_whole(make_space: MakeSpace) -> None:
    evaluator, result = search_with(make_space)
    assert {box for group in result.solution for box, _ in group.slices} == {0, 1, 2, 3}
    assert {group.phase for group in result.solution} == {D}
    assert {group.phase for group in result.colocated} == {M}
    assert decoding(result.solution) == result.score.objective == pytest.approx(0.12)
    assert result.colocated_score.objective == 0.0
    assert len(evaluator.scored) == 2  # the whole is scored for those two alone
    assert [round(one.objective, 6) for one in result.history] == [0.0, 0.12]


@pytest.mark.parametrize(("worth", "kept"), [(1.0, True), (-1.0, False)])
def test_what_runs_is_kept_where_nothing_that_was_found_is_better(
    make_space: MakeSpace, worth: float, kept: bool
) -> None:
    """A replica over all boxes, of which no cell knows."""
    running: Solution = (Group(tuple(Slice(box, gpus) for box, gpus in enumerate((4, 4, 2, 2))), P),)
    _, result = search_with(
        make_space, lambda found: worth if found == running else decoding(found), start=running, settings={"steps": 60}
    )
    assert (result.solution == running) is kept


def test_a_cell_begins_at_what_runs_in_it(make_space: MakeSpace) -> None:
    """With hardly any steps it would not be found."""
    running: Solution = (Group((Slice(0, 3),), P), Group((Slice(1, 4),), P))
    evaluator, _ = search_with(make_space, start=running, settings={"steps": 12})
    (cell, *_) = (part for part in evaluator.parts if part.names == ("a0",))
    assert (Group((Slice(0, 3),), P),) in cell.scored


@pytest.mark.parametrize(("cell_gpus", "cells"), [(6, 0), (5, 3)])
def test_a_cluster_of_up_to_two_cells_is_searched_as_a_whole(make_space: MakeSpace, cell_gpus: int, cells: int) -> None:
    evaluator, result = search_with(make_space, settings={"cell_gpus": cell_gpus, "steps": 40})
    assert len(evaluator.parts) == 2 * cells
    if not cells:
        assert 40 <= result.steps <= 42
        assert len(evaluator.scored) <= 42


def test_only_the_whole_is_searched_for_as_long_as_there_is_time(make_space: MakeSpace) -> None:
    calls = 0

    def is_spent() -> bool:
        nonlocal calls
        calls += 1
        return calls > 400

    _, anytime = search_with(make_space, anytime=True, spent=is_spent, settings={"cell_gpus": 6, "steps": 10})
    assert anytime.steps > 60
    _, short = search_with(make_space, spent=lambda: False, settings={"cell_gpus": 6, "steps": 10})
    assert short.steps < 30


def test_the_best_of_what_is_nearly_as_good_stands_the_loss_of_a_box(make_space: MakeSpace) -> None:
    """A replica over two boxes is gone with either: at one percent of the time, that weighs more than 0.001."""
    apart = {0, 1, 2, 3}

    def joined(found: Solution) -> float:
        whole = {box for group in found for box, _ in group.slices} == apart
        return (0.5 + 0.001 * any(len(group.slices) > 1 for group in found)) if whole else 0.0

    _, result = search_with(make_space, joined, settings={"cell_gpus": 6, "steps": 60, "box_away": 0.01})
    assert all(len(group.slices) == 1 for group in result.solution)
    _, bold = search_with(make_space, joined, settings={"cell_gpus": 6, "steps": 300, "box_away": 0.0})
    assert any(len(group.slices) > 1 for group in bold.solution)
