"""Which service begins with which GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.planning.model.problem import Slice
from p2pserve.coordinator.planning.upper.clustering import GpuSet
from p2pserve.coordinator.planning.upper.search_space import SearchSpace
from p2pserve.coordinator.planning.upper.seed_assignment import assign_gpus


def with_rates(made: tuple[SearchSpace, Any], rates: Sequence[float]) -> SearchSpace:
    """The same space, where the services are asked so many requests per second."""
    space, evaluator = made
    services = tuple(
        replace(service, workload=replace(service.workload, rate=rate))
        for service, rate in zip(space.problem.services, rates, strict=True)
    )
    return SearchSpace.of(replace(space.problem, services=services), evaluator)


def counts(parts: Sequence[GpuSet]) -> list[int]:
    return [sum(gpus for _, gpus in part) for part in parts]


def test_services_with_as_much_work_get_about_as_much_compute(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(services=2)
    parts = assign_gpus(space)
    assert sorted(slice_ for part in parts for slice_ in part) == [Slice(0, 4), Slice(1, 4), Slice(2, 2), Slice(3, 2)]
    powers = [sum(gpus * space.boxes[box].gpu.tflops for box, gpus in part) for part in parts]
    assert min(powers) > 0.5 * max(powers)


@pytest.mark.parametrize(("rates", "more"), [((9.0, 1.0), 0), ((1.0, 9.0), 1)])
def test_more_work_gets_more_gpus(make_space: Callable[..., Any], rates: tuple[float, float], more: int) -> None:
    found = counts(assign_gpus(with_rates(make_space(services=2), rates)))
    assert sum(found) == 12
    assert found[more] >= 8


def test_the_work_of_a_service_goes_by_its_lengths_and_its_model(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(services=2)
    one, two = space.problem.services
    long = replace(two, workload=replace(two.workload, prompts=two.workload.prompts * 20))
    large = replace(two, model=model_shape("llama-30b"))
    for heavy in (long, large):
        found = counts(assign_gpus(SearchSpace.of(replace(space.problem, services=(one, heavy)), evaluator)))
        assert found[1] > found[0]


def test_a_service_with_hardly_any_work_still_holds_its_model(make_space: Callable[..., Any]) -> None:
    found = counts(assign_gpus(with_rates(make_space(services=2), (1000.0, 1.0))))
    assert sum(found) == 12
    assert 2 <= found[1] <= 4


def test_boxes_stay_whole_unless_services_fit_no_other_way(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(services=2, excluded=frozenset({"a1", "t0", "t1"}))
    assert assign_gpus(space) == [(Slice(0, 2),), (Slice(0, 2),)]
    with pytest.raises(NoPlan, match=r"does not hold all services together \(s0, s1\): it has 4 usable GPUs"):
        assign_gpus(space, boxes_whole=True)


def test_an_atomic_box_is_never_cut(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(services=3, excluded=frozenset({"a1", "t1"}))
    parts = assign_gpus(space)
    assert sorted(parts) == [(Slice(0, 2),), (Slice(0, 2),), (Slice(2, 2),)]


def test_a_model_that_all_gpus_do_not_hold_is_named(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(least=13)
    with pytest.raises(NoPlan, match=r"does not hold llama-7b: it has 12\.6 GiB of weights, and the 12 usable GPUs"):
        assign_gpus(space)
    assert counts(assign_gpus(make_space(least=12)[0])) == [12]
