"""The event queue: order, time, and what it refuses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.sims.events import EventOrderError, EventQueue, Scheduled


@dataclass
class Note:
    """Writes its name down, then lets others follow after the delays given."""

    name: str
    log: list[tuple[float, str]]
    follow: dict[str, float] = field(default_factory=dict)

    def happen(self, now: float) -> Iterable[Scheduled]:
        self.log.append((now, self.name))
        return [Scheduled(now + delay, Note(name, self.log)) for name, delay in self.follow.items()]


def test_by_time_then_by_sequence() -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    for at, name in [(2.0, "late"), (1.0, "first"), (1.0, "second"), (0.0, "now")]:
        queue.push(at, Note(name, log))
    queue.run()
    assert log == [(0.0, "now"), (1.0, "first"), (1.0, "second"), (2.0, "late")]
    assert (queue.now, queue.happened, len(queue)) == (2.0, 4, 0)


def test_what_follows_at_once_comes_after_what_waited() -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    queue.push(1.0, Note("a", log, {"a2": 0.0, "a3": 0.5}))
    queue.push(1.0, Note("b", log))
    queue.run()
    assert log == [(1.0, "a"), (1.0, "b"), (1.0, "a2"), (1.5, "a3")]


def test_a_queue_goes_on_from_where_it_stands() -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    queue.push(5.0, Note("early", log))
    queue.run()
    queue.push(5.0, Note("at once", log))
    assert repr(queue) == "<EventQueue at 5 s: 1 happened, 1 waiting>"
    queue.run()
    assert (queue.now, queue.happened) == (5.0, 2)


def test_what_is_due_later_waits() -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    for at, name in [(1.0, "early"), (2.0, "last"), (2.5, "late")]:
        queue.push(at, Note(name, log))
    queue.run(2.0)
    assert log == [(1.0, "early"), (2.0, "last")]
    assert (queue.now, len(queue)) == (2.0, 1)


@pytest.mark.parametrize("at", [4.9, math.nan, math.inf, -1.0])
def test_the_past_and_no_time_are_refused(at: float) -> None:
    queue = EventQueue()
    queue.push(5.0, Note("now", []))
    queue.run()
    with pytest.raises(EventOrderError, match="due at"):
        queue.push(at, Note("before", []))
    assert len(queue) == 0


def test_an_event_cannot_put_another_into_the_past() -> None:
    queue = EventQueue()
    queue.push(1.0, Note("now", [], {"before": -0.5}))
    with pytest.raises(EventOrderError, match="already"):
        queue.run()


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.0]), max_size=30))
def test_any_schedule_happens_in_stable_order(times: list[float]) -> None:
    log: list[tuple[float, str]] = []
    queue = EventQueue()
    for number, at in enumerate(times):
        queue.push(at, Note(str(number), log))
    queue.run()
    assert queue.happened == len(times)
    assert log == sorted(((at, str(number)) for number, at in enumerate(times)), key=lambda item: item[0])
