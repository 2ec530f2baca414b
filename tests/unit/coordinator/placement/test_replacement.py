"""When services are placed anew, and the way from one placement to the next."""

import pytest

from p2pserve.coordinator.placement.replacement import (
    LONGEST_S,
    SHORTEST_S,
    PlacedEngine,
    ReplacementPace,
    is_worth_it,
    plan_switches,
    running_after,
)
from p2pserve.coordinator.placement.values import GpuGroup, Groups, PlacementError, PlacementProblem

from .placed_services import box, problem


@pytest.mark.parametrize(("real", "factor"), [(1.05, 1.1), (1.5, 0.9), (0.5, 0.9), (None, 1.0)])
def test_intervals_follow_equation_8(real: float | None, factor: float) -> None:
    pace = ReplacementPace(now=10.0, interval_s=100.0)
    assert pace.next_at == 110.0
    pace.expect(1.0)
    pace.note(real, 110.0)
    assert pace.interval_s == pytest.approx(100.0 * factor)
    assert pace.next_at == pytest.approx(110.0 + pace.interval_s)


def test_intervals_have_bounds_and_need_an_estimate() -> None:
    pace = ReplacementPace(now=0.0, interval_s=100.0)
    pace.note(5.0, 100.0)
    assert pace.interval_s == 100.0
    for _ in range(100):
        pace.expect(1.0)
        pace.note(5.0, 0.0)
    assert pace.interval_s == SHORTEST_S
    for _ in range(100):
        pace.expect(1.0)
        pace.note(1.0, 0.0)
    assert pace.interval_s == LONGEST_S
    with pytest.raises(PlacementError, match="adapts by 1"):
        ReplacementPace(now=0.0, beta=1.0)


def test_services_move_for_a_gain_alone() -> None:
    assert is_worth_it(1.0, 0.8)
    assert not is_worth_it(1.0, 0.95)


def _run(some: PlacementProblem, groups: Groups) -> tuple[PlacedEngine, ...]:
    return running_after((), plan_switches(some, (), groups, 0))


def test_what_is_in_both_stays() -> None:
    some = problem()
    running = _run(some, (GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,)), GpuGroup(0, 2, (1,))))
    switches = plan_switches(some, running, (GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,)), GpuGroup(0, 2, (0, 1))), 10)
    assert len(switches) == 1
    (switch,) = switches
    (before,) = (engine for engine in running if engine.id in switch.ends)
    (after,) = switch.begins
    assert (before.group.tp, after.gpus, after.id) == (2, before.gpus, 10)
    assert len(running_after(running, switches)) == 3


def test_every_gpu_is_used_once() -> None:
    some = problem(boxes=[box(gpus=8)])
    running = _run(some, (GpuGroup(0, 4, (0,)), GpuGroup(0, 2, (1,)), GpuGroup(0, 2, (1,))))
    after = running_after(
        running,
        plan_switches(some, running, (GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (1,)), GpuGroup(0, 4, (0, 1))), 10),
    )
    assert sorted(gpu for engine in after for gpu in engine.gpus) == list(range(8))


def test_weights_are_loaded_beside_where_there_is_memory() -> None:
    some = problem(boxes=[box(on_disk=frozenset({0, 1}))])
    running = _run(some, (GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,))))
    (switch,) = plan_switches(some, running, (GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,)), GpuGroup(0, 1, (1,))), 10)
    assert switch.is_beside
    assert switch.ends_s == switch.ready_s == pytest.approx(20.0 + some.services[1].model.weight_bytes / 1e9)


def test_where_there_is_no_memory_the_old_engine_ends_when_the_weights_are_fetched() -> None:
    large = problem(["llama2-70b", "llama2-70b"], [1.0, 1.0], boxes=[box(gpus=6)])
    running = _run(large, (GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (1,))))
    (switch,) = plan_switches(large, running, (GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (1,)), GpuGroup(0, 2, (1,))), 10)
    size = large.services[1].model.weight_bytes
    assert not switch.is_beside
    assert switch.ends_s == pytest.approx(8.0 * size / 1e9)
    assert switch.ready_s == pytest.approx(switch.ends_s + 20.0 + size / 1e9)


def test_a_service_keeps_an_engine_while_another_can_go_first() -> None:
    """Two that change places: the second one waits until the first service is ready where it is to be."""
    swapped = problem(["llama2-70b", "llama2-70b"], [1.0, 1.0], boxes=[box(gpus=6)])
    running = _run(swapped, (GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (1,))))
    groups = (GpuGroup(0, 2, (0,)), GpuGroup(0, 4, (1,)))
    switches = plan_switches(swapped, running, groups, 10)
    alive: list[set[int]] = []
    moments = sorted({time for each in switches for time in (each.ends_s, each.ready_s)})
    for now in moments:
        ended = {id_ for each in switches if each.ends_s <= now for id_ in each.ends}
        here = [engine for engine in running if engine.id not in ended]
        here += [engine for each in switches if each.ready_s <= now for engine in each.begins]
        alive.append({service for engine in here for service in engine.group.services})
    assert all(0 in services for services in alive)
    assert alive[-1] == {0, 1}
