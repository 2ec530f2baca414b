"""Replays of a period: a request alone, sharing, what is not served, and what is remembered."""

import numpy as np
import pytest

from p2pserve.coordinator.placement.replay import PeriodReplay
from p2pserve.coordinator.placement.values import GpuGroup, Period, PlacementError, describe_groups, find_fault
from p2pserve.coordinator.sharing.service_profile import lone_execution_s

from .placed_services import box, problem


def test_a_lone_request_takes_what_it_takes_alone() -> None:
    one = problem(["llama2-7b"], [0.1])
    times = one.times(one.boxes[0].kind, 2, 0)
    judged = PeriodReplay(one).judge([GpuGroup(0, 2, (0,))])
    assert judged.requests.tolist() == [len(one.period)]
    assert judged.normalized == pytest.approx(lone_execution_s(times, 200, 50) / one.usual_s[0], rel=0.02)
    assert judged.attainment == 1.0


@pytest.mark.parametrize("services", [(0,), (0, 1)])
def test_every_request_is_served_once(services: tuple[int, ...]) -> None:
    both = problem(rates=[20.0, 20.0])
    judged = PeriodReplay(both).judge([GpuGroup(0, 1, services)])
    assert [bool(missing) for missing in judged.unserved] == [each not in services for each in range(2)]
    assert judged.is_complete is (len(services) == 2)
    assert judged.late[0] + round(judged.by_service[0] * judged.requests[0]) == judged.requests[0]


def test_two_services_on_one_gpu_are_slower_than_each_on_its_own() -> None:
    both = problem(rates=[6.0, 6.0])
    replay = PeriodReplay(both)
    apart = replay.judge([GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,))])
    together = replay.judge([GpuGroup(0, 1, (0, 1))])
    assert together.normalized > 1.3 * apart.normalized


def test_a_second_engine_takes_half_of_a_service() -> None:
    busy = problem(["llama2-13b"], [40.0])
    replay = PeriodReplay(busy)
    one, two = (replay.judge([GpuGroup(0, 1, (0,))] * engines) for engines in (1, 2))
    assert two.normalized < 0.8 * one.normalized


def test_short_services_go_first_where_two_share() -> None:
    """The doubling budget: the service whose requests take a tenth waits for nobody."""
    rng = np.random.default_rng(0)
    service = np.array([0, 1] * 150)
    crowd = Period(
        service=service,
        arrival_s=np.sort(rng.uniform(0.0, 20.0, 300)),
        prompt=np.full(300, 100),
        output=np.where(service == 0, 400, 40),
    )
    both = problem()
    shared = type(both)(boxes=both.boxes, services=both.services, period=crowd)
    judged = PeriodReplay(shared).judge([GpuGroup(0, 1, (0, 1))])
    means = judged.normalized_sum / judged.requests
    assert means[1] < 0.8 * means[0]


def test_requests_that_fit_nowhere_are_not_served() -> None:
    long = problem(["llama2-70b"], [0.2], boxes=[box(gpus=4)], prompt=100_000)
    judged = PeriodReplay(long).judge([GpuGroup(0, 2, (0,))])
    assert judged.unserved.tolist() == judged.requests.tolist() == judged.late.tolist()
    assert judged.normalized == float("inf")


def test_what_is_known_is_not_replayed() -> None:
    both = problem()
    replay = PeriodReplay(both)
    first = replay.judge([GpuGroup(0, 1, (0,)), GpuGroup(0, 2, (1,))])
    again = replay.judge([GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,))])
    assert replay.replays == 3  # service 0 under one engine of one GPU is known
    assert first.normalized_sum[0] == again.normalized_sum[0]


def test_services_without_an_engine_in_common_do_not_change_each_other() -> None:
    few, many = (PeriodReplay(problem(rates=rates)) for rates in ([3.0, 0.5], [3.0, 30.0]))
    groups = [GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,))]
    assert few.judge(groups).normalized_sum[0] == pytest.approx(many.judge(groups).normalized_sum[0], rel=0.2)


def test_faults_name_the_box() -> None:
    both = problem(["llama2-70b", "llama2-7b"], [1.0, 1.0])
    assert "have no room on 1 GPUs of box-0" in find_fault(both, (GpuGroup(0, 1, (0,)),))
    assert "box-0 has 4 GPUs, not 6" in find_fault(both, (GpuGroup(0, 4, (0,)), GpuGroup(0, 2, (1,))))
    small = problem(boxes=[box(disk_bytes=20e9)])
    assert "disk of box-0" in find_fault(small, (GpuGroup(0, 1, (0,)), GpuGroup(0, 1, (1,))))
    assert find_fault(both, (GpuGroup(0, 4, (0, 1)),)) == ""
    assert describe_groups(both, (GpuGroup(0, 2, (0,)), GpuGroup(0, 1), GpuGroup(0, 1, (1,)))) == [
        "box-0: 1 x idle, 1 x s1, 2 x s0"
    ]


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [("prompt", 0, "of no tokens"), ("arrival_s", -1.0, "order of arrival")],
)
def test_a_period_that_cannot_be_is_refused(column: str, value: float, fault: str) -> None:
    good = problem().period
    columns = {name: getattr(good, name).copy() for name in ("service", "arrival_s", "prompt", "output")}
    columns[column][-1] = value
    with pytest.raises(PlacementError, match=fault):
        Period(**columns)


def test_parts_of_a_period() -> None:
    whole = problem().period
    part = whole.between(10.0, 20.0)
    assert part is not None
    assert 10.0 <= part.arrival_s[0] <= part.arrival_s[-1] < 20.0
    assert whole.between(40.0, 50.0) is None


def test_a_sample_keeps_rate_and_order() -> None:
    whole = problem(rates=[20.0, 5.0]).period
    sample = whole.sampled(len(whole) // 3)
    assert len(whole) / 4 < len(sample) < len(whole) / 2
    rates = [len(each) / (each.arrival_s[-1] - each.arrival_s[0]) for each in (whole, sample)]
    assert rates[1] == pytest.approx(rates[0], rel=0.2)
    assert whole.sampled(len(whole)) is whole
