"""The default placement: never worse than what it begins with, sharing where that pays, disks, prices, loading."""

import numpy as np
import pytest

from p2pserve.coordinator.placement.replay import PeriodReplay
from p2pserve.coordinator.placement.search import (
    PlacementGoals,
    load_s,
    lost_share,
    placement_cost,
    search_placement,
    start_placements,
)
from p2pserve.coordinator.placement.values import GpuGroup, PlacementError, find_fault

from .placed_services import A6000, box, problem


@pytest.mark.parametrize("seed", range(4))
def test_it_is_never_worse_than_dedicated_gpus_seallm_and_sharing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [str(each) for each in rng.choice(["llama2-7b", "opt-6.7b", "llama2-13b"], 4)]
    some = problem(models, [float(each) for each in rng.gamma(0.5, 10.0, 4) + 0.2], boxes=[box(0, 4), box(1, 2, A6000)])
    replay, goals = PeriodReplay(some), PlacementGoals()
    found = search_placement(replay, rng=rng, goals=goals, rounds=60)
    assert find_fault(some, found.groups) == ""
    starts = start_placements(replay, goals)
    assert {"dedicated", "shared", "seallm"} <= starts.keys()
    for name, groups in starts.items():
        assert found.tried[name] == placement_cost(replay, groups, goals)
        assert found.cost <= found.tried[name]
    assert found.cost == placement_cost(replay, found.groups, goals)
    assert replay.judge(found.groups).is_complete


def test_what_the_trial_says_decides() -> None:
    some = problem()
    replay = PeriodReplay(some)
    wanted = start_placements(replay, PlacementGoals())["shared"]
    found = search_placement(
        replay, rng=np.random.default_rng(0), rounds=20, trial=lambda groups: float(groups != wanted)
    )
    assert (found.groups, found.cost) == (wanted, 0.0)


def test_a_busy_service_gets_gpus_of_a_quiet_one() -> None:
    uneven = problem(["llama2-13b", "llama2-13b"], [50.0, 0.2])
    found = search_placement(PeriodReplay(uneven), rng=np.random.default_rng(0))
    gpus = [sum(group.tp for group in found.groups if each in group.services) for each in (0, 1)]
    assert gpus[0] > gpus[1]


def test_services_share_where_there_is_no_gpu_for_each() -> None:
    crowded = problem(["llama2-7b"] * 3, [1.0] * 3, boxes=[box(gpus=2)])
    found = search_placement(PeriodReplay(crowded), rng=np.random.default_rng(0))
    assert "dedicated" not in found.tried
    assert max(len(group.services) for group in found.groups) == 2
    with pytest.raises(PlacementError, match="s0 fits on none of the boxes alone"):
        search_placement(
            PeriodReplay(problem(["llama2-70b"], [0.1], boxes=[box(gpus=1)])),
            rng=np.random.default_rng(0),
        )


def test_prices_keep_boxes_empty_that_are_not_needed() -> None:
    quiet = problem(boxes=[box(0, 2, usd_per_hour=1.0), box(1, 2, usd_per_hour=30.0)], rates=[0.5, 0.5])
    found = search_placement(PeriodReplay(quiet), rng=np.random.default_rng(0), goals=PlacementGoals(usd_hour=1.0))
    assert {group.box for group in found.groups} == {0}


def test_loading_counts_what_is_not_there() -> None:
    some = problem(boxes=[box(on_disk=frozenset({0}))])
    size = some.services[0].model.weight_bytes
    here, away = load_s(some, GpuGroup(0, 1, (0,))), load_s(some, GpuGroup(0, 1, (1,)))
    assert here == pytest.approx(20.0 + size / 1e9)
    assert away == pytest.approx(here + 8.0 * size / 1e9)
    before = (GpuGroup(0, 1, (1,)),)
    assert load_s(some, GpuGroup(0, 1, (1,)), before) == here
    assert lost_share(some, before, before, 100.0) == 0.0
    assert lost_share(some, before, (GpuGroup(0, 2, (0,)),), 100.0) == pytest.approx(2 * here / (4 * 100.0))


def test_what_is_there_stays_where_others_are_hardly_better() -> None:
    some = problem()
    before = (GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (1,)))
    found = search_placement(
        PeriodReplay(some), rng=np.random.default_rng(0), before=before, goals=PlacementGoals(serves_s=30.0)
    )
    assert found.groups == before
