"""Sums over the engine's steps, and what is read from vLLM's scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pserve.coordinator.profile import StepSample
from p2pserve.node.engine.protocol import Iterations
from p2pserve.node.engine.stats import (
    INTERVAL_S,
    SAMPLES_KEPT,
    SpreadSample,
    StepMeter,
    StepTotals,
    count_computed,
    describe_step,
)
from p2pserve.node.engine.transfers.wait_limits import WaitLimits


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
    thinned: SpreadSample[int] = SpreadSample(4)
    for value in range(count):
        thinned.add(value)
    assert thinned.kept == kept


def test_steps_are_summed_up_and_told_ten_times_a_second() -> None:
    tally = StepTotals()
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
        new={"prompt": (0, 100), "transferred": (255, 1)}, cached={"chunk": (512, 64), "a": (40, 1), "b": (50, 1)}
    )
    held = count_computed(step)
    assert held == {"prompt": 0, "transferred": 255, "chunk": 512, "a": 40, "b": 50}
    counts = step.num_scheduled_tokens.items()
    assert describe_step(((held[name], count) for name, count in counts), 0.5) == StepSample(0.5, 2, 164, 3, 345, 512)


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


def meter_of(scheduler: FakeScheduler, *, concurrent: bool = False) -> StepMeter:
    return StepMeter(scheduler, lambda: scheduler.now, lambda step: None, concurrent=concurrent)


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


def test_of_batches_at_different_stages_each_lasts_from_its_own_beginning() -> None:
    scheduler = FakeScheduler()
    meter = meter_of(scheduler, concurrent=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, "it")
    third = scheduler.schedule()
    scheduler.update_from_output(second, "it")
    scheduler.update_from_output(third, "it")
    assert seconds_of(meter) == [3.0, 4.0, 3.0]


HOST_S, CHUNK_S, DECODE_S = 0.002, 0.160, 0.010


class FakeDevice:
    """Computes one batch after the other, while its engine schedules the next one; scheduling takes `HOST_S`."""

    def __init__(self) -> None:
        self.now = 10.0
        self.limits = WaitLimits()
        self._next = scheduled({}, {})
        self._free_at = 0.0
        self._queue: deque[tuple[Any, float]] = deque()
        self.meter = StepMeter(self, lambda: self.now, self._learn, concurrent=False)

    def _learn(self, step: StepSample) -> None:
        self.limits.on_prefill(step.prefill_tokens, step.seconds)

    def schedule(self) -> Any:
        self.now += HOST_S
        return self._next

    def update_from_output(self, batch: Any, output: Any) -> None:
        """Nothing is done with the output."""

    def launch(self, batch: Any, seconds: float) -> None:
        """Have it computed as soon as the others have been."""
        self._next = batch
        self.schedule()
        self._free_at = max(self._free_at, self.now) + seconds
        self._queue.append((batch, self._free_at))

    def take(self) -> None:
        """Wait for the oldest batch."""
        batch, ended = self._queue.popleft()
        self.now = max(self.now, ended)
        self.update_from_output(batch, "its output")

    def run(self, batches: Sequence[tuple[Any, float]]) -> list[float]:
        """Each is launched before the output of the one before is taken in. Returns how long each was measured."""
        for batch, seconds in batches:
            self.launch(batch, seconds)
            if len(self._queue) == 2:
                self.take()
        while self._queue:
            self.take()
        return seconds_of(self.meter)


def chunk(held: int) -> Any:
    return scheduled({}, {"prompt": (held, 128)})


def test_a_step_scheduled_while_another_computes_begins_when_that_has_ended() -> None:
    """The sum is the time that has passed: nothing counts twice, and no launch is taken for a step."""
    device, begun = FakeDevice(), 10.0
    measured = device.run([(chunk(0), CHUNK_S), (chunk(128), CHUNK_S), (scheduled({}, {"a": (9, 1)}), DECODE_S)])
    assert measured == pytest.approx([HOST_S + CHUNK_S, CHUNK_S, DECODE_S])
    assert sum(measured) == pytest.approx(device.now - begun)


def test_a_host_that_is_slower_than_its_device_is_measured_itself() -> None:
    device = FakeDevice()
    measured = device.run([(scheduled({}, {"a": (held, 1)}), HOST_S / 4) for held in range(4)])
    assert measured == pytest.approx([2 * HOST_S, HOST_S, HOST_S, HOST_S / 4])  # nothing is launched beside the last
    assert sum(measured) == pytest.approx(device.now - 10.0)


def test_a_pause_belongs_to_no_step() -> None:
    device = FakeDevice()
    for _ in range(2):
        assert device.run([(chunk(0), CHUNK_S)]) == pytest.approx([HOST_S + CHUNK_S])
        device.meter.pause()
        device.now += 100.0


def test_waiting_for_kv_belongs_to_no_step() -> None:
    """Steps that compute nothing follow each other until it is there; the last of them is in flight when a request can
    go on, and one more when it has ended."""
    device, nothing = FakeDevice(), (scheduled({}, {}), 0.0)
    device.run([(chunk(0), CHUNK_S), nothing])
    for _ in range(3):
        device.launch(*nothing)
        device.now += 5.0
        device.launch(*nothing)
        device.take()
        device.take()
    device.launch(*nothing)
    device.now += 5.0
    decode = (scheduled({}, {"a": (9, 1)}), DECODE_S)
    assert device.run([decode, decode, nothing]) == pytest.approx([HOST_S + DECODE_S, DECODE_S])


def test_wait_limits_learn_how_long_prefills_take_and_not_how_long_their_launch() -> None:
    device = FakeDevice()
    device.run([(chunk(128 * number), CHUNK_S) for number in range(50)])
    assert f"{1 / (CHUNK_S / 128):.0f} tokens/s" in repr(device.limits)


def test_a_step_that_computes_nothing_is_none() -> None:
    scheduler = FakeScheduler()
    meter = meter_of(scheduler)
    work = scheduler.next
    scheduler.update_from_output(scheduler.schedule(), "it")
    assert seconds_of(meter) == [2.0]
    scheduler.next = scheduled({}, {})
    scheduler.update_from_output(scheduler.schedule(), "it")
    scheduler.now += 0.5
    assert seconds_of(meter) == []
    scheduler.next = work
    scheduler.next.preempted_req_ids = {"b", "c"}
    scheduler.update_from_output(scheduler.schedule(), "it")
    told = meter.tally.take(0.0, at_once=True)
    assert told is not None
    assert (told.steps, told.seconds, told.preemptions) == (1, 2.0, 2)
