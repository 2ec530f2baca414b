"""Sums over the engine's steps, and what is read from vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pserve.coordinator.profile import StepSample
from p2pserve.node.engine.protocol import Iterations
from p2pserve.node.engine.stats import INTERVAL_S, SAMPLES_KEPT, StepMeter, Tally, Thinned, sample_of


def decode(seconds: float = 0.002, requests: int = 32, context: int = 3200) -> StepSample:
    return StepSample(seconds, 0, 0, requests, context)


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (0, ()),
        (4, (0, 1, 2, 3)),
        (5, (0, 2, 4)),
        (8, (0, 2, 4, 6)),
        (9, (0, 4, 8)),
        (100, (0, 32, 64, 96)),
    ],
)
def test_what_is_kept_is_spread_evenly(count: int, kept: tuple[int, ...]) -> None:
    thinned: Thinned[int] = Thinned(4)
    for value in range(count):
        thinned.add(value)
    assert thinned.kept == kept


def test_steps_are_summed_up_and_told_ten_times_a_second() -> None:
    tally = Tally()
    assert tally.take(5.0, at_once=True) is None
    for _ in range(50):
        tally.add(decode(), preempted=0)
    tally.add(StepSample(0.09, 2, 500, 30, 3000), preempted=3)
    told = tally.take(5.0, at_once=False)
    assert told is not None
    assert (told.steps, told.prefill_tokens, told.decode_tokens, told.preemptions) == (51, 500, 1630, 3)
    assert told.decode_context == 50 * 3200 + 3000
    assert told.seconds == pytest.approx(0.19)
    assert told.longest_s == 0.09
    assert len(told.samples) <= 2 * SAMPLES_KEPT
    assert [sample.prefill_requests for sample in told.samples].count(2) == 1
    tally.add(decode(), preempted=0)
    assert tally.take(5.0 + INTERVAL_S / 2, at_once=False) is None
    again = tally.take(5.0 + 2 * INTERVAL_S, at_once=False)
    assert again is not None
    assert (again.steps, again.preemptions) == (1, 0)
    tally.add(decode(), preempted=0)
    last = tally.take(5.0 + 2 * INTERVAL_S, at_once=True)
    assert last is not None
    assert last.steps == 1
    assert len(msgspec.msgpack.encode(told)) < 400
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Iterations) == told


def scheduled(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """A `SchedulerOutput`: request -> (positions held, positions to compute)."""
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (_, count) in {**new, **cached}.items()},
        total_num_scheduled_tokens=sum(count for _, count in {**new, **cached}.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=held) for name, (held, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[held for held, _ in cached.values()]
        ),
        preempted_req_ids=None,
    )


def test_a_step_is_told_by_what_it_costs() -> None:
    """The last position of a prompt whose KV came from elsewhere is computed as a decode is."""
    step = scheduled(
        new={"prompt": (0, 100), "handed over": (255, 1)}, cached={"chunk": (512, 64), "a": (40, 1), "b": (50, 1)}
    )
    assert sample_of(step, 0.5) == StepSample(0.5, 2, 164, 3, 345)


class FakeScheduler:
    """A scheduler whose batches take one second each to schedule and one to take in."""

    def __init__(self) -> None:
        self.now = 10.0
        self.next: Any = scheduled({}, {"a": (7, 1)})

    def schedule(self, throttle: bool = False) -> Any:
        self.now += 1.0
        return self.next

    def update_from_output(self, output: Any, model: Any) -> str:
        self.now += 1.0
        return f"took in {model}"


def meter_of(scheduler: FakeScheduler) -> StepMeter:
    return StepMeter(scheduler, lambda: scheduler.now)


def seconds_of(meter: StepMeter) -> list[float]:
    told = meter.tally.take(0.0, at_once=True)
    return [] if told is None else [sample.seconds for sample in told.samples]


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    scheduler = FakeScheduler()
    meter = meter_of(scheduler)
    for _ in range(2):
        assert scheduler.update_from_output(scheduler.schedule(False), "it") == "took in it"
        scheduler.now += 0.25  # the loop around the engine
    assert seconds_of(meter) == [2.0, 2.25]
    meter.pause()
    scheduler.now += 100.0
    scheduler.update_from_output(scheduler.schedule(), "it")
    assert seconds_of(meter) == [2.0]


def test_with_batches_in_flight_each_lasts_from_its_own_beginning() -> None:
    scheduler = FakeScheduler()
    meter = meter_of(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, "it")
    third = scheduler.schedule()
    scheduler.update_from_output(second, "it")
    scheduler.update_from_output(third, "it")
    assert seconds_of(meter) == [3.0, 4.0, 3.0]


def test_a_step_that_computes_nothing_is_none() -> None:
    scheduler = FakeScheduler()
    meter = meter_of(scheduler)
    work, scheduler.next = scheduler.next, scheduled({}, {})
    scheduler.update_from_output(scheduler.schedule(), "it")
    scheduler.now += 0.5
    assert seconds_of(meter) == []
    scheduler.next = work
    scheduler.next.preempted_req_ids = {"b", "c"}
    scheduler.update_from_output(scheduler.schedule(), "it")
    told = meter.tally.take(0.0, at_once=True)
    assert told is not None
    assert (told.steps, told.seconds, told.preemptions) == (1, 2.0, 2)
