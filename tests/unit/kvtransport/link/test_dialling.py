"""What the dialling end of a link dials, when it dials again, and which connections leave."""

from __future__ import annotations

import math
import random

from p2pserve.kvtransport.link.dialling import Dialler
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.sockets import SMALL_SEGMENT_BYTES


def test_the_dialler_dials_what_is_missing_and_waits_longer_each_time() -> None:
    dialler = Dialler(LinkSettings(), random.Random(1))
    path = DialPath("h", 1, streams=2)
    dialler.set_paths([path], 0.0)
    first, second = dialler.take_due(0.0)
    assert dialler.take_due(0.0) == []
    assert dialler.mark_up(first.slot, 7)
    times, now = [], 0.0
    for _ in range(8):
        dialler.mark_down(second.slot, "refused", now)
        assert dialler.failures == {"direct": "refused"}
        times.append(dialler.wake_at() - now)
        now = dialler.wake_at()
        assert [attempt.slot for attempt in dialler.take_due(now)] == [second.slot]
    assert times[0] <= 0.1
    assert 2.5 <= times[-1] <= 5.0
    assert dialler.mark_up(second.slot, 8)
    assert dialler.failures == {}
    assert dialler.paths == (path,)


def test_former_paths_leave_when_a_new_one_is_up() -> None:
    dialler = Dialler(LinkSettings(), random.Random(1))
    old, new = DialPath("a", 1, streams=3), DialPath("b", 1, label="relay")
    dialler.set_paths([old], 0.0)
    for number, attempt in enumerate(dialler.take_due(0.0)):
        dialler.mark_up(attempt.slot, number)
    dialler.set_paths([DialPath("a", 1), new], 1.0)
    assert dialler.take_leaving() == [2], "one that is wanted is up already, and one may be spare"
    dialler.set_paths([new], 2.0)
    assert dialler.take_leaving() == []
    (attempt,) = dialler.take_due(2.0)
    assert dialler.mark_up(attempt.slot, 9)
    assert sorted(dialler.take_leaving()) == [0, 1]
    dialler.set_paths([], 3.0)
    assert dialler.take_leaving() == [9]
    assert not dialler.mark_up(attempt.slot, 10)


def test_what_is_wanted_is_told_by_path_with_its_streams_and_pace() -> None:
    dialler = Dialler(LinkSettings(), random.Random(1))
    assert dialler.paths == ()
    assert dialler.wake_at() == math.inf
    paths = (DialPath("a", 1, streams=2, pace_bytes_s=100), DialPath("b", 1, label="relay", streams=3))
    dialler.set_paths(paths, 5.0)
    assert dialler.paths == paths
    assert dialler.wake_at() == 5.0
    assert dialler.take_due(4.9) == []
    assert len(dialler.take_due(5.0)) == 5
    assert dialler.wake_at() == math.inf, "all are being dialled"


def test_a_connection_that_serves_stays_before_one_that_is_still_dialled() -> None:
    dialler = Dialler(LinkSettings(), random.Random(1))
    dialler.set_paths([DialPath("a", 1, streams=3)], 0.0)
    first, second, third = dialler.take_due(0.0)
    assert dialler.mark_up(second.slot, 2)
    dialler.set_paths([DialPath("a", 1)], 1.0)
    assert dialler.take_due(1.0) == []
    assert dialler.take_leaving() == []
    assert not dialler.mark_up(first.slot, 1)
    assert not dialler.mark_up(third.slot, 3)
    dialler.set_paths([DialPath("a", 1, streams=2)], 2.0)
    assert len(dialler.take_due(2.0)) == 1


def test_connections_of_a_path_that_is_to_have_fewer_stay_until_they_are_twice_as_many() -> None:
    dialler = Dialler(LinkSettings(), random.Random(1))
    dialler.set_paths([DialPath("a", 1, streams=8)], 0.0)
    first, *others = dialler.take_due(0.0)
    for attempt in others:
        assert dialler.mark_up(attempt.slot, attempt.slot)
    dialler.set_paths([DialPath("a", 1, streams=4)], 1.0)
    assert dialler.take_leaving() == []
    assert not dialler.mark_up(first.slot, 99), "it was still being dialled"
    spare = others[-1].slot
    dialler.mark_down(spare, "reset", 2.0)
    assert dialler.wake_at() == math.inf, "a spare one is not dialled again"
    dialler.set_paths([DialPath("a", 1, streams=7)], 3.0)
    assert len(dialler.take_due(3.0)) == 1
    dialler.set_paths([DialPath("a", 1, streams=2)], 4.0)
    assert len(dialler.take_leaving()) == 2
    assert dialler.paths == (DialPath("a", 1, streams=4),)


def test_a_paced_path_has_no_spare_connections() -> None:
    """Each sends its part of what all together may."""
    dialler = Dialler(LinkSettings(), random.Random(1))
    dialler.set_paths([DialPath("a", 1, streams=4, pace_bytes_s=400)], 0.0)
    for attempt in dialler.take_due(0.0):
        assert dialler.mark_up(attempt.slot, attempt.slot)
    dialler.set_paths([DialPath("a", 1, streams=2, pace_bytes_s=200)], 1.0)
    assert len(dialler.take_leaving()) == 2


def test_a_connection_that_is_lost_is_no_failed_attempt_and_is_dialled_again_soon() -> None:
    settings = LinkSettings()
    dialler = Dialler(settings, random.Random(1))
    dialler.set_paths([DialPath("a", 1), DialPath("b", 1, label="relay")], 0.0)
    one, two = dialler.take_due(0.0)
    assert dialler.mark_up(one.slot, 1)
    dialler.mark_down(one.slot, "reset", 10.0)
    assert dialler.failures == {}
    assert 10.0 + settings.redial_first_s / 2 <= dialler.wake_at() <= 10.0 + settings.redial_first_s
    soonest = dialler.wake_at()
    dialler.mark_down(two.slot, "refused", 20.0)
    assert dialler.failures == {"relay": "refused"}
    assert dialler.wake_at() == soonest
    dialler.mark_down(99, "never wanted", 10.0)
    dialler.set_paths([DialPath("a", 1)], 11.0)
    assert dialler.failures == {}, "of paths that are wanted"


def test_a_path_on_which_a_connection_was_stuck_is_dialled_with_small_segments() -> None:
    dialler = Dialler(LinkSettings(), random.Random(1))
    relayed = DialPath("b", 1, label="relay")
    dialler.set_paths([DialPath("a", 1, streams=2), relayed], 0.0)
    one, two, three = dialler.take_due(0.0)
    assert {each.path.segment_bytes for each in (one, two, three)} == {0}
    for attempt, number in ((one, 1), (two, 2), (three, 3)):
        assert dialler.mark_up(attempt.slot, number)
    dialler.note_stuck(99)  # of none of them
    dialler.note_stuck(1)
    for attempt in (one, two, three):
        dialler.mark_down(attempt.slot, "lost", 10.0)
    again = dialler.take_due(20.0)
    assert [each.path.segment_bytes for each in again] == [SMALL_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, 0]
    # It is the same path: what was dialled so stays when paths are chosen again.
    assert dialler.mark_up(again[0].slot, 4)
    dialler.set_paths([DialPath("a", 1)], 21.0)
    assert (dialler.take_due(21.0), dialler.take_leaving()) == ([], [])


class Half(random.Random):
    """Gives the least of what it is asked for: half of each wait."""

    def uniform(self, a: float, b: float) -> float:
        assert (a, b) == (0.5, 1.0)
        return a


def test_each_wait_is_twice_the_one_before_up_to_the_limit() -> None:
    dialler, now, waits = Dialler(LinkSettings(redial_first_s=1.0, redial_limit_s=6.0), Half()), 0.0, []
    dialler.set_paths([DialPath("a", 1)], now)
    for _ in range(5):
        (attempt,) = dialler.take_due(now)
        dialler.mark_down(attempt.slot, "refused", now)
        waits.append(dialler.wake_at() - now)
        now = dialler.wake_at()
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    (attempt,) = dialler.take_due(now)
    assert dialler.mark_up(attempt.slot, 1)
    assert dialler.wake_at() == math.inf
    dialler.mark_down(attempt.slot, "reset", now)
    assert dialler.wake_at() == now + 0.5, "what was up begins anew"


def test_the_soonest_of_all_is_woken_for() -> None:
    dialler = Dialler(LinkSettings(redial_first_s=1.0), Half())
    dialler.set_paths([DialPath("a", 1, streams=2)], 0.0)
    one, two = dialler.take_due(0.0)
    dialler.mark_down(one.slot, "refused", 3.0)
    dialler.mark_down(two.slot, "refused", 1.0)
    assert dialler.wake_at() == 1.5
    assert [attempt.slot for attempt in dialler.take_due(1.5)] == [two.slot]
    assert repr(dialler) == "<Dialler 0/2 up, 0 leaving>"


def test_paths_to_one_place_under_other_labels_are_told_apart() -> None:
    dialler = Dialler(LinkSettings(), Half())
    paths = (DialPath("a", 1, label="one"), DialPath("a", 1, label="two", streams=2))
    dialler.set_paths(paths, 0.0)
    assert dialler.paths == paths
