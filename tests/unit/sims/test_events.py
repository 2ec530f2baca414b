"""The event queue: order, time, and what it refuses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.sims import EventOrderError, EventQueue, RunawayError, Scheduled


@dataclass
class Note:
    """Writes its name down, then lets others follow after the delays given."""

    name: str
    log: list[tuple[float, str]]
    follow: dict[str, float] = field(default_factory=dict)

    def happen(self, now: float) -> Iterable[Scheduled]:
        self.log.append((now, self.name))
        return [Scheduled(now + delay, Note(name, self.log)) for name, delay in self.follow.items()]


@dataclass
class Forever:
    """Follows itself after `delay`."""

    delay: float

    def happen(self, now: float) -> Iterable[Scheduled]:
        return [Scheduled(now + self.delay, self)]


def test_by_time_then_by_sequence() -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    for at, name in [(2.0, "late"), (1.0, "first"), (1.0, "second"), (0.0, "now")]:
        queue.push(at, Note(name, log))
    assert queue.wake_at() == 0.0
    assert queue.run() == 4
    assert log == [(0.0, "now"), (1.0, "first"), (1.0, "second"), (2.0, "late")]
    assert queue.now == 2.0
    assert queue.wake_at() is None


def test_what_follows_at_once_comes_after_what_waited() -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    queue.push(1.0, Note("a", log, {"a2": 0.0, "a3": 0.5}))
    queue.push(1.0, Note("b", log))
    queue.run()
    assert log == [(1.0, "a"), (1.0, "b"), (1.0, "a2"), (1.5, "a3")]


def test_run_stops_after_until_and_goes_on_from_there() -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue(start=10.0)
    for at in (11.0, 12.0, 13.0):
        queue.push(at, Note(f"{at:g}", log))
    assert queue.run(until=12.0) == 2
    assert (queue.now, len(queue)) == (12.0, 1)
    assert queue.run(until=12.5) == 0
    assert queue.now == 12.5
    assert queue.run() == 1
    assert not queue.step()
    assert queue.statistics().happened == 3


def test_repr_and_statistics_tell_the_same() -> None:
    queue = EventQueue()
    queue.push(3.0, Forever(1.0))
    queue.run(until=4.5)
    assert repr(queue) == "<EventQueue at 4.5 s: 2 happened, 1 waiting>"
    figures = queue.statistics()
    assert (figures.now, figures.happened, figures.waiting) == (4.5, 2, 1)


@pytest.mark.parametrize("at", [4.9, math.nan, math.inf, -1.0])
def test_the_past_and_no_time_are_refused(at: float) -> None:
    queue = EventQueue(start=5.0)
    with pytest.raises(EventOrderError, match="due at"):
        queue.push(at, Forever(1.0))
    assert len(queue) == 0


def test_an_event_cannot_put_another_into_the_past() -> None:
    queue = EventQueue()
    queue.push(1.0, Forever(-0.5))
    with pytest.raises(EventOrderError, match="already"):
        queue.run()


@pytest.mark.parametrize("until", [4.0, math.nan])
def test_time_does_not_run_back(until: float) -> None:
    with pytest.raises(EventOrderError, match="cannot run"):
        EventQueue(start=5.0).run(until=until)


def test_a_start_is_a_time() -> None:
    with pytest.raises(EventOrderError, match="cannot start"):
        EventQueue(start=math.nan)


def test_a_chain_without_end_is_stopped() -> None:
    queue = EventQueue()
    queue.push(0.0, Forever(0.0))
    with pytest.raises(RunawayError, match="1000 events"):
        queue.run(until=1.0, max_events=1000)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.0]), max_size=30))
def test_any_schedule_happens_in_stable_order(times: list[float]) -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    for number, at in enumerate(times):
        queue.push(at, Note(str(number), log))
    assert queue.run() == len(times)
    assert log == sorted(((at, str(number)) for number, at in enumerate(times)), key=lambda item: item[0])
