"""Turns that come as time passes, without anything else happening."""

from math import inf

import pytest

from .test_fair_queue import Key, fill, queue_of, room_of, take_all


def test_a_turn_comes_once_what_starts_should_be_nearly_done_and_that_moment_is_known_before() -> None:
    """20 tokens, 10 of them at most left, 5 a second: after two seconds. The third one is large, and comes when nothing
    should be left: after 30 tokens more."""
    queue, room = queue_of(), room_of(unstarted=10.0, rate=5.0, replicas=1, most_unstarted=80.0)
    assert queue.take_in_s(room, 0.0) == inf, "nobody waits"
    fill(queue, "a", 3, size=20)
    assert queue.take_in_s(room, 0.0) == 0.0
    assert queue.take(room, 0.0) == Key("a", 0)
    assert queue.take(room, 1.0) is None
    assert queue.take_in_s(room, 1.0) == pytest.approx(1.0)
    assert queue.take(room, 2.0) == Key("a", 1)
    assert queue.take(room, 2.0) is None
    assert queue.take_in_s(room, 2.0) == pytest.approx(6.0)
    queue.start(Key("a", 0), 3.0)
    assert queue.take_in_s(room, 3.0) == pytest.approx(1.0), "it is the second one now"
    assert queue.take(room, 4.0) == Key("a", 2)


def test_short_requests_come_beside_one_that_is_long_while_little_of_all_should_be_left() -> None:
    """They fill its steps. Where engines are slower than they say, there is a bound."""
    queue, room = queue_of(), room_of(unstarted=10.0, rate=1e3, replicas=1, most_unstarted=80.0)
    fill(queue, "a", 1, size=30)
    assert queue.take(room, 0.0) == Key("a", 0)
    for number in range(1, 100):
        queue.add("a", Key("a", number), 2, 0.0)
    taken = [key for at in range(1, 300) for key in take_all(queue, room, at / 10)]
    assert sum(2 for _ in taken) == room.most_unstarted - 30
    assert queue.take_in_s(room, 30.0) == inf
    queue.start(Key("a", 0), 30.0)
    assert take_all(queue, room, 30.1)


def test_no_turn_comes_with_time_where_the_rate_is_unknown_or_there_is_no_place() -> None:
    for room in (room_of(unstarted=10.0), room_of(requests=1, unstarted=10.0, rate=5.0), room_of(size=30.0, rate=5.0)):
        queue = queue_of()
        fill(queue, "a", 2, size=20)
        assert queue.take(room, 0.0) == Key("a", 0)
        assert queue.take_in_s(room, 0.0) == inf
        assert queue.take(room, 1e6) is None


def test_a_turn_that_waits_for_a_pause_comes_when_that_ends() -> None:
    """Beside another client's request, a prompt that took 3 s is followed by as long a pause on the one replica."""
    queue, room = queue_of(), room_of(mixed=1, replicas=1, rate=5.0)
    room = room._replace(unstarted=0.0)
    fill(queue, "a", 2)
    fill(queue, "b", 1)
    assert take_all(queue, room) == [Key("a", 0), Key("b", 0)]
    queue.start(Key("b", 0), 1.0)
    queue.start(Key("a", 0), 3.0)
    assert queue.take_in_s(room, 4.0) == pytest.approx(2.0)
    assert queue.take(room, 5.9) is None
    assert queue.take(room, 6.0) == Key("a", 1)
