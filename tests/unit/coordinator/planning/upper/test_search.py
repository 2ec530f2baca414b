"""The upper level: against all solutions of small clusters, deterministic, obedient; and rescheduling by flips."""

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster import Cluster
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster, parse_cluster
from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice, Solution
from p2pserve.coordinator.planning.model.slo import parse_slo
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.planning.upper.light_rescheduling import (
    find_surviving_groups,
    keep_loaded_stages,
    reschedule_lightly,
)
from p2pserve.coordinator.planning.upper.moves import random_neighbour
from p2pserve.coordinator.planning.upper.packing import Packing
from p2pserve.coordinator.planning.upper.scorer import Scorer, mean_boxes_per_replica
from p2pserve.coordinator.planning.upper.search import SearchResult, search
from p2pserve.coordinator.planning.upper.search_space import SearchSpace
from p2pserve.coordinator.planning.upper.settings import SearchSettings

from .exhaustive import all_solutions, best_of_all

SMALL = {
    "two kinds": [{"id": "a40", "gpu": "A40", "gpus": 2}, {"id": "ti", "gpu": "RTX 3090 Ti", "gpus": 2}],
    "one box": [{"id": "a5000", "gpu": "A5000", "gpus": 4}],
    "three boxes": [{"id": "l4", "gpu": "L4", "count": 2}, {"id": "a100", "gpu": "A100-SXM4-40GB"}],
}


def problem(cluster: Cluster, model: str, rate: float, *, prompt: int = 1000, output: int = 100) -> Problem:
    rng = np.random.default_rng(0)
    prompts, outputs = (1 + rng.geometric(1.0 / mean, 400) for mean in (prompt, output))
    workload = Workload(name="test", prompts=prompts, outputs=outputs, rate=rate)
    shape = model_shape(model)
    service = Service(name=model, model=shape, workload=workload, slo=parse_slo("5x", shape, workload))
    return Problem(cluster=cluster, services=(service,), pinned={})


def small(name: str, gbps: float) -> Cluster:
    text = msgspec.json.encode({"name": name, "boxes": SMALL[name], "default": {"gbps": gbps}})
    return parse_cluster(text, Specs.MEASURED)


def found(asked: Problem, steps: int = 60) -> SearchResult:
    settings = SearchSettings(steps=steps)
    return search(asked, LowerLevel(asked), rng=np.random.default_rng(0), settings=settings)


@pytest.mark.parametrize(
    ("name", "gbps", "rate"),
    [("two kinds", 20.0, 8.0), ("two kinds", 1.0, 8.0), ("one box", 1.0, 2.0), ("three boxes", 20.0, 8.0)],
)
def test_a_small_cluster_is_planned_as_well_as_by_trying_everything(name: str, gbps: float, rate: float) -> None:
    asked = problem(small(name, gbps), "llama-7b", rate)
    _, best = best_of_all(asked, LowerLevel(asked))
    assert found(asked).score.objective >= best.objective - 0.01 * abs(best.objective)


def test_of_what_is_as_good_that_is_taken_which_stands_the_loss_of_a_box() -> None:
    cluster = small("two kinds", 100.0)
    asked = problem(cluster, "llama-7b", 0.5)  # hardly any work: all solutions are as good
    space = SearchSpace.of(asked, LowerLevel(asked))
    scorer = Scorer(space, limit=1000)
    spanning: Solution = (Group((Slice(0, 2), Slice(1, 2)), Phase.MIXED),)
    apart: Solution = (Group((Slice(0, 2),), Phase.MIXED), Group((Slice(1, 2),), Phase.MIXED))
    assert (mean_boxes_per_replica(spanning), mean_boxes_per_replica(apart)) == (2.0, 1.0)
    lead = scorer.objective(spanning) - scorer.objective(apart)
    assert scorer.pick_most_robust(-1.0, abs(lead) + 1e-6) == apart
    assert scorer.pick_most_robust(-1.0, 0.0) == scorer.best
    assert all(len(group.slices) == 1 for group in found(asked).solution)


def test_a_start_by_rates_carries_as_much_as_any_solution_of_its_phases() -> None:
    asked = problem(small("two kinds", 1000.0), "llama-7b", 50.0)
    space = SearchSpace.of(asked, LowerLevel(asked))
    phases = (Phase.PREFILL, Phase.DECODE)

    def carried(solution: Solution) -> float:
        rates = [space.evaluator.max_rates(group, 2) for group in solution]
        return min(sum(prefill for prefill, _ in rates), sum(decode for _, decode in rates))

    start = Packing(space, 2).start(np.random.default_rng(0), phases)
    every = [found for found in all_solutions(space) if found and all(group.phase in phases for group in found)]
    assert start in every
    assert carried(start) >= 0.98 * max(map(carried, every))


def test_the_same_seed_gives_the_same_solution_and_colocated_is_never_better() -> None:
    asked = problem(packaged_cluster("thunderserve-cloud-16", Specs.MEASURED), "llama-30b", 2.0)
    first, again = found(asked), found(asked)
    assert first.solution == again.solution
    assert first.score.objective >= first.colocated_score.objective
    assert {group.phase for group in first.colocated} == {Phase.MIXED}


def test_a_search_in_cells_keeps_to_its_steps_and_gives_every_cell_replicas() -> None:
    asked = problem(packaged_cluster("thunderserve-cloud-16", Specs.MEASURED), "llama-7b", 8.0)
    told: list[tuple[int, int]] = []
    result = search(
        asked, LowerLevel(asked), rng=np.random.default_rng(0), settings=SearchSettings(steps=200, cell_gpus=4),
        progress=lambda step, total, _: told.append((step, total)),
    )  # fmt: skip
    assert {part.box for group in result.solution for part in group.slices} == {0, 1, 2, 3}
    assert {total for _, total in told} == {200}
    steps = [step for step, _ in told]
    assert steps == sorted(steps)
    assert 100 <= result.steps <= 220  # cells that have seen everything stop early; the whole is scored besides


def test_pins_and_exclusions_are_kept() -> None:
    asked = problem(packaged_cluster("thunderserve-cloud-16", Specs.MEASURED), "llama-13b", 2.0)
    ids = [box.id for box in asked.cluster.boxes]
    pinned = replace(asked, pinned={"a40": Phase.DECODE}, excluded=frozenset({"3090ti"}))
    solution = found(pinned).solution
    used = {ids[part.box] for group in solution for part in group.slices}
    assert "3090ti" not in used
    for group in solution:
        if any(ids[part.box] == "a40" for part in group.slices):
            assert group.phase is Phase.DECODE


def test_neighbours_are_solutions() -> None:
    """Wherever a walk over them leads: no GPU is used twice or made up, boxes that are one stage stay whole, pins are
    kept, and every group holds its model."""
    cluster = packaged_cluster("thunderserve-cloud-24", Specs.MEASURED)
    boxes = tuple(replace(box, atomic=number == 1) for number, box in enumerate(cluster.boxes))
    one, other = (problem(replace(cluster, boxes=boxes), model, 2.0) for model in ("llama-13b", "llama-30b"))
    asked = replace(one, services=(*one.services, *other.services), pinned={boxes[0].id: Phase.DECODE})
    space = SearchSpace.of(asked, LowerLevel(asked))
    rng = np.random.default_rng(0)
    here, changed = found(asked).solution, 0
    for _ in range(300):
        there = random_neighbour(space, here, rng)
        if there is None:
            continue
        changed += there != here
        used = Counter[int]()
        for group in there:
            used.update(dict(group.slices))
            assert space.can_hold(group.slices, group.service)
            assert group.phase in space.phases_of(group.slices)
        assert all(used[box] <= boxes[box].gpus for box in used)
        assert used[1] in (0, boxes[1].gpus)
        here = there
    assert changed > 100


def test_services_that_do_not_fit_in_whole_boxes_share_one() -> None:
    one, other = (problem(small("one box", 1.0), model, 0.5) for model in ("llama-7b", "llama-13b"))
    asked = replace(one, services=(*one.services, *other.services))
    result = found(asked)
    assert {group.service for group in result.solution} == {0, 1}
    _, best = best_of_all(asked, LowerLevel(asked))
    assert result.score.objective >= best.objective - 0.01
    crowded = replace(asked, services=tuple(replace(one.services[0], name=f"service-{n}") for n in range(5)))
    with pytest.raises(NoPlan, match=r"does not hold all services together \(.*\): it has 4"):
        found(crowded)


@pytest.mark.parametrize("split", [{"gpus": 3}, {"count": 3}])
def test_three_a6000_and_a_3090_ti_that_hold_llama3_70b_as_one_replica_alone_get_a_plan(split: dict[str, int]) -> None:
    """No packing of them begins with a replica, and a round that began there picked a group out of none."""
    boxes = [{"id": "a", "gpu": "RTX A6000", **split}, {"id": "t", "gpu": "RTX 3090 Ti"}]
    text = msgspec.json.encode({"name": "one replica", "boxes": boxes, "default": {"gbps": 10.0}})
    asked = problem(parse_cluster(text, Specs.MEASURED), "llama3-70b", 0.2)
    (group,) = found(asked).solution
    assert (group.phase, sum(gpus for _, gpus in group.slices)) == (Phase.MIXED, 4)


def test_groups_stay_within_boxes_where_they_have_to() -> None:
    asked = problem(packaged_cluster("thunderserve-cloud-16", Specs.MEASURED), "llama-30b", 2.0)
    assert any(len(group.slices) > 1 for solution in found(asked).evaluated for group in solution)
    result = found(replace(asked, within_boxes=True))
    assert all(len(group.slices) == 1 for solution in result.evaluated for group in solution)
    with pytest.raises(NoPlan, match="does not hold opt-66b"):
        found(replace(problem(small("two kinds", 20.0), "opt-66b", 1.0), within_boxes=True))


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(NoPlan, match="the cluster does not hold llama2-70b"):
        found(problem(small("two kinds", 1.0), "llama2-70b", 1.0))


def test_time_that_is_up_ends_the_search_with_a_solution() -> None:
    asked = problem(packaged_cluster("thunderserve-cloud-16", Specs.MEASURED), "llama-30b", 2.0)
    assert search(asked, LowerLevel(asked), rng=np.random.default_rng(0), spent=lambda: True).solution


def test_rescheduling_changes_phases_and_nothing_else() -> None:
    asked = problem(packaged_cluster("thunderserve-cloud-32", Specs.MEASURED), "llama-30b", 3.0)
    before = LowerLevel(asked)
    running: Solution = search(asked, before, rng=np.random.default_rng(0), settings=SearchSettings(steps=60)).solution
    ids = [box.id for box in asked.cluster.boxes]
    lost = "a6000-0" if any(ids[part.box] == "a6000-0" for group in running for part in group.slices) else "a40"
    smaller = replace(asked, cluster=asked.cluster.without(frozenset({lost})))
    left = find_surviving_groups(running, asked.cluster, smaller.cluster)
    evaluator = keep_loaded_stages(smaller, left, before)
    adjusted = reschedule_lightly(smaller, evaluator, left)
    assert adjusted.score.objective >= adjusted.before.objective
    assert [group.slices for group in adjusted.solution] == [group.slices for group in left]
    changed = {group.slices for group, old in zip(adjusted.solution, left, strict=True) if group.phase != old.phase}
    assert changed == {flip.was.slices for flip in adjusted.flips}
    assert all(flip.why for flip in adjusted.flips)
