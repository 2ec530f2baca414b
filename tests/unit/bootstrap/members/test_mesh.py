"""Whom to dial when, and which of two connections stays."""

import random

import pytest

from p2pserve.bootstrap import Address, NetworkSettings, PeerId
from p2pserve.bootstrap.members.mesh import Dial, DialBook, should_replace

LOW, ME, HIGH = PeerId("a"), PeerId("b"), PeerId("c")
AT = Address("192.0.2.1", 1)
SETTINGS = NetworkSettings()


def test_the_lower_peer_dials_at_once_and_the_higher_waits() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    wanted = {LOW: AT, HIGH: AT, ME: AT}
    assert book.take_due(wanted, (), 0.0) == (Dial(HIGH, AT),)
    wake = book.wake_at(())
    assert 1.0 < wake < 2.0
    assert book.take_due(wanted, (), wake) == (Dial(LOW, AT),)


def test_nobody_is_dialled_who_is_connected_or_being_dialled() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    assert book.take_due({HIGH: AT}, {HIGH}, 0.0) == ()
    assert len(book.take_due({HIGH: AT}, (), 0.0)) == 1
    assert book.take_due({HIGH: AT}, (), 100.0) == ()
    assert book.wake_at(()) == float("inf")


def test_the_backoff_doubles_to_thirty_seconds_with_jitter() -> None:
    book, now, waits = DialBook(ME, random.Random(0), SETTINGS), 0.0, []
    for _ in range(12):
        assert book.take_due({HIGH: AT}, (), now)
        book.on_result(HIGH, False, now)
        wake = book.wake_at(())
        waits.append(wake - now)
        assert book.take_due({HIGH: AT}, (), wake - 0.01) == ()
        now = wake
    for wait, middle in zip(waits, [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30], strict=True):
        assert 0.75 * middle <= wait <= 1.25 * middle
    assert len({round(wait, 6) for wait in waits[-4:]}) == 4


def test_a_broken_connection_is_redialled_at_once_by_both() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    book.on_disconnected(LOW, 5.0)
    assert book.take_due({LOW: AT}, (), 5.0) == (Dial(LOW, AT),)


def test_a_peer_that_moved_is_tried_at_its_new_address_at_once() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    for now in (0.0, 1.0, 3.0, 8.0):
        book.take_due({HIGH: AT}, (), now)
        book.on_result(HIGH, False, now)
    assert book.take_due({HIGH: Address("192.0.2.2", 2)}, (), 8.1) == (Dial(HIGH, Address("192.0.2.2", 2)),)


def test_a_peer_that_moves_on_and_on_has_nobody_dial_its_addresses() -> None:
    """Whoever it likes to be dialled: at first at once, then as seldom as a peer that is not there."""
    book, dials = DialBook(ME, random.Random(0), SETTINGS, {HIGH}), 0
    for tenth in range(600):
        now = tenth / 10
        for _ in book.take_due({HIGH: Address("192.0.2.9", tenth + 1)}, (), now):
            dials += 1
            book.on_result(HIGH, False, now)
    assert dials < 60.0 / SETTINGS.named_backoff_s + 15


def test_a_peer_without_a_port_is_never_dialled() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    assert book.take_due({HIGH: Address("192.0.2.1", 0)}, (), 0.0) == ()
    assert book.wake_at(()) == float("inf")


@pytest.mark.parametrize(
    ("dialled_by_low", "dialled_by_high_held", "age", "expected"),
    [
        (True, True, 0.1, True),
        (False, False, 0.1, False),
        (False, False, 5.0, False),
        (False, False, 5.01, True),
        (False, False, 60.0, True),
    ],
)
def test_both_ends_keep_the_same_connection(
    dialled_by_low: bool, dialled_by_high_held: bool, age: float, expected: bool
) -> None:
    at_low = should_replace(
        me=LOW,
        peer=HIGH,
        new_dialled_by_me=dialled_by_low,
        held_dialled_by_me=not dialled_by_high_held,
        held_age_s=age,
        crossing_s=5.0,
    )
    at_high = should_replace(
        me=HIGH,
        peer=LOW,
        new_dialled_by_me=not dialled_by_low,
        held_dialled_by_me=dialled_by_high_held,
        held_age_s=age,
        crossing_s=5.0,
    )
    assert at_low == at_high == expected


def test_a_success_ends_the_backoff() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    now = 0.0
    for succeeded in (False, False, False, True):
        wake = book.wake_at(())
        now = wake if wake != float("inf") else now
        assert book.take_due({HIGH: AT}, (), now)
        book.on_result(HIGH, succeeded, now)
    assert book.take_due({HIGH: AT}, (), now), "it was lost again at once"
    book.on_result(HIGH, False, now)
    wake = book.wake_at(())
    assert wake - now <= 1.25 * SETTINGS.first_backoff_s


def test_who_is_wanted_no_more_is_forgotten_unless_it_is_being_dialled() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    assert book.take_due({HIGH: AT}, (), 0.0)
    assert book.take_due({}, (), 0.1) == ()
    assert book.take_due({HIGH: AT}, (), 0.2) == (), "one dial at a time, whatever was wanted meanwhile"
    book.on_result(HIGH, False, 0.3)
    assert book.take_due({}, (), 0.4) == ()
    assert book.wake_at(()) == float("inf")
    assert book.take_due({HIGH: AT}, (), 0.5), "its back-off was forgotten with it"


def test_named_members_are_not_waited_for_and_their_backoff_stays_short() -> None:
    book, now = DialBook(ME, random.Random(0), SETTINGS, {LOW}), 0.0
    for _ in range(8):
        assert book.take_due({LOW: AT}, (), now) == (Dial(LOW, AT),)
        book.on_result(LOW, False, now)
        wake = book.wake_at(())
        assert wake - now <= 1.25 * SETTINGS.named_backoff_s
        now = wake
    later = DialBook(ME, random.Random(0), SETTINGS)
    later.prefer(LOW)
    assert later.take_due({LOW: AT}, (), 0.0) == (Dial(LOW, AT),)


def test_the_result_of_a_dial_that_nobody_asked_for_changes_nothing() -> None:
    book = DialBook(ME, random.Random(0), SETTINGS)
    book.on_result(HIGH, False, 0.0)
    assert book.wake_at(()) == float("inf")
    assert repr(book) == "DialBook(targets=0, in_flight=0)"


def test_so_many_that_one_has_only_been_told_of_are_dialled_per_second() -> None:
    """Any address may be among them: of a third party, who did not ask for it."""
    book = DialBook(ME, random.Random(0), SETTINGS)
    wanted = {PeerId(f"z{number}"): Address("192.0.2.9", number + 1) for number in range(200)}
    burst = book.take_due(wanted, (), 0.0)
    assert len(burst) == SETTINGS.strange_dials_burst
    later = [dial for tenth in range(1, 101) for dial in book.take_due(wanted, (), tenth / 10)]
    assert len(later) == pytest.approx(10 * SETTINGS.strange_dials_s, abs=2)
    book.prefer(PeerId("z199"))
    assert Dial(PeerId("z199"), wanted[PeerId("z199")]) in book.take_due(wanted, (), 60.0)


class Least(random.Random):
    """Gives the least of what it is asked for."""

    def uniform(self, a: float, b: float) -> float:
        return a


def test_the_higher_waits_and_backs_off_for_no_less_than_its_jitter_allows() -> None:
    book = DialBook(ME, Least(), SETTINGS)
    assert book.take_due({LOW: AT, HIGH: AT}, (), 0.0) == (Dial(HIGH, AT),)
    assert book.wake_at(()) == pytest.approx(0.8 * SETTINGS.higher_waits_s)
    book.on_result(HIGH, False, 0.25)
    assert book.wake_at(()) == pytest.approx(0.25 + 0.75 * SETTINGS.first_backoff_s), "the sooner of the two"
    assert book.wake_at({HIGH}) == pytest.approx(0.8 * SETTINGS.higher_waits_s)


def test_a_connection_that_broke_ends_the_backoff_of_what_failed_before() -> None:
    book = DialBook(ME, Least(), SETTINGS)
    for now in (0.0, 10.0, 20.0):
        assert book.take_due({HIGH: AT}, (), now)
        book.on_result(HIGH, False, now)
    book.on_disconnected(HIGH, 21.0)
    assert book.take_due({HIGH: AT}, (), 21.0) == (Dial(HIGH, AT),)
    book.on_result(HIGH, False, 21.0)
    assert book.wake_at(()) == pytest.approx(21.0 + 0.75 * SETTINGS.first_backoff_s)


def test_one_whose_address_is_not_known_is_not_waited_for() -> None:
    book = DialBook(ME, Least(), SETTINGS)
    book.on_disconnected(HIGH, 5.0)
    assert book.wake_at(()) == float("inf")
