"""When a search has converged, and what is told of several seeds, by searches that are made up."""

from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.sims.experiments import algorithm_1, convergence
from p2pserve.sims.experiments.setting import PlannedCase, Scope

SCRIPTS: dict[str, dict[int, tuple[float, ...]]] = {
    "fast": {0: (0.5, 0.98, 0.97, 0.99, 1.0), 1: (0.995,)},
    "slow": {0: (0.1, 0.2, 0.3, 0.98, 0.99), 1: (0.9, 0.9)},
    "never": {0: (0.1, 0.2), 1: (0.1, 0.3)},
}
"""The best objective of each seed after each step."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> tuple[convergence.ConvergenceRow, ...]:
    """Of two seeds; every look at the clock takes a second."""
    spent = iter(range(10_000))
    monkeypatch.setattr(convergence, "process_time", lambda: float(next(spent)))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seed)

    def script(name: str) -> Any:
        def run(problem: Any, seed: int, scope: Scope, progress: Any) -> int:
            for step, objective in enumerate(SCRIPTS[name][seed]):
                progress(step, scope.long_steps, objective)
            return len(SCRIPTS[name][seed])

        return run

    monkeypatch.setattr(convergence, "SEARCHES", {name: script(name) for name in SCRIPTS})
    return convergence.convergence_rows(Scope(seeds=(0, 1), long_steps=7))


def test_every_size_has_every_search(rows: tuple[convergence.ConvergenceRow, ...]) -> None:
    assert [(row.gpus, row.paper_s, row.search) for row in rows] == [
        (gpus, seconds, name) for gpus, seconds in ((16, 21), (24, 36), (32, 54)) for name in SCRIPTS
    ]


def test_a_search_has_converged_when_it_is_within_a_percent_of_the_best_of_all(
    rows: tuple[convergence.ConvergenceRow, ...],
) -> None:
    fast, slow, never = rows[:3]
    assert fast.curves == [
        [(1.0, 0.5), (2.0, 0.98), (3.0, 0.99), (4.0, 1.0), (5.0, 1.0)], [(1.0, 0.995), (2.0, 0.995)],
    ], "only what is better, and the end"  # fmt: skip
    assert (fast.near, fast.cpu_s_to_1_percent) == ("2 of 2", "2"), "3 s and 1 s"
    assert (slow.near, slow.cpu_s_to_1_percent) == ("1 of 2", "5"), "the best is another search's"
    assert (never.near, never.cpu_s_to_1_percent) == ("0 of 2", "-")
    assert (fast.evaluations, fast.cpu_s, fast.objective) == (3.0, 3.5, "0.998 (0.995-1)")


def test_a_line_is_the_mean_of_what_the_seeds_have_so_far() -> None:
    curves = [[(1.0, 0.5), (3.0, 1.0)], [(2.0, 0.1)]]
    line = convergence.mean_curve(curves, [0.5, 1.5, 2.0, 2.5, 3.0, 9.0])
    assert np.isnan(line[:2]).all(), "one of them has none yet"
    assert line[2:] == pytest.approx([0.3, 0.3, 0.55, 0.55])


def test_the_picture_has_a_panel_for_each_size_with_every_search(
    rows: tuple[convergence.ConvergenceRow, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "convergence_rows", lambda scope: rows)
    (panels,) = convergence.convergence(Scope()).pictures[0].panels
    assert [curves.x for curves in panels] == [f"CPU seconds, {gpus} GPUs" for gpus in (16, 24, 32)]
    for curves in panels:
        assert list(curves.lines) == list(SCRIPTS)
        assert curves.log_x
        ends = {name: at_s[-1] for name, (at_s, _) in curves.lines.items()}
        assert ends["fast"] <= 5.0 < ends["slow"] <= 6.0, "each until its last seed has ended"


@pytest.mark.parametrize(("name", "phases"), [(convergence.LETTER, 2), (convergence.MIXED, 3)])
def test_algorithm_1_is_watched_with_the_planners_own_lower_level(
    name: str, phases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    make_start = algorithm_1.make_start

    def start(space: Any, chosen: Any, rng: Any) -> Any:
        used.append(chosen)
        return make_start(space, chosen, rng)

    monkeypatch.setattr(algorithm_1, "make_start", start)
    problem = PlannedCase(cluster="thunderserve-cloud-16", workload="conversation", rate=4.0).problem()
    told: list[float] = []
    evaluations = convergence.SEARCHES[name](
        problem, np.random.default_rng(0), Scope(long_steps=2), lambda step, limit, best: told.append(best)
    )
    assert told == sorted(told)
    assert 2 <= evaluations == len(told) <= 1 + 2 * algorithm_1.NEIGHBOURS
    assert [len(chosen) for chosen in used] == [phases]
    assert (Phase.MIXED in used[0]) == (phases == 3)
