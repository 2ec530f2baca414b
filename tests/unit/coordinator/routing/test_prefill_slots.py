"""Slots of a partial-prefill replica: how many, for whom, and until when."""

from math import inf

from p2pserve.coordinator.routing.prefill_slots import MOST_WAITING, PrefillSlots

LEASE_S = 10.0


def slots_with(*waiting: str) -> PrefillSlots[str]:
    found: PrefillSlots[str] = PrefillSlots(LEASE_S)
    for request in waiting:
        found.ask(request, 0.0)
    return found


def test_two_requests_have_slots_and_the_others_wait_in_order() -> None:
    slots = slots_with("a", "b", "c", "d")
    assert [slots.take(request, 0.0) for request in "abcd"] == [True, True, False, False]
    slots.leave("a")
    assert not slots.take("d", 0.0)  # it is c's turn
    assert slots.take("c", 0.0)
    assert slots.used == 2


def test_who_has_a_slot_has_it_still() -> None:
    slots = slots_with("a", "b")
    assert slots.take("a", 0.0)
    assert slots.take("a", 1.0)
    slots.enter("a")
    slots.ask("a", 2.0)
    assert slots.take("a", 2.0)
    assert slots.used == 1


def test_a_slot_is_used_from_when_it_is_taken_until_the_prefill_is_over() -> None:
    slots = slots_with("a", "b", "c")
    slots.take("a", 0.0)
    slots.enter("a")
    slots.take("b", 0.0)
    assert not slots.take("c", LEASE_S * 5)  # and has not asked again
    slots.ask("c", LEASE_S * 5)
    assert slots.take("c", LEASE_S * 5)  # b has not come; a is here for however long it takes
    assert slots.leave("a")
    assert slots.used == 1


def test_who_does_not_ask_again_loses_its_turn() -> None:
    slots = slots_with("a", "b")
    slots.ask("b", LEASE_S / 2)
    assert not slots.take("b", LEASE_S - 1.0)
    assert slots.take("b", LEASE_S)
    assert not slots.take("a", LEASE_S)


def test_asking_again_keeps_the_turn() -> None:
    slots = slots_with("a", "b", "c", "d")
    slots.take("a", 0.0)
    slots.take("b", 0.0)
    slots.ask("c", 5.0)
    slots.ask("d", 4.0)
    slots.leave("b")
    assert not slots.take("d", 6.0)
    assert slots.take("c", 6.0)


def test_a_request_that_enters_without_a_slot_is_counted() -> None:
    slots = slots_with("a", "b")
    slots.enter("x")
    assert slots.take("a", 0.0)
    assert not slots.take("b", 0.0)
    slots.leave("x")
    assert slots.take("b", 0.0)


def test_more_may_enter_than_there_are_slots() -> None:
    slots = slots_with("a")
    for request in "xyz":
        slots.enter(request)
    assert slots.used == 3
    slots.leave("x")
    assert not slots.take("a", 0.0)
    slots.leave("y")
    assert slots.take("a", 0.0)


def test_an_engine_that_is_gone_has_nobody_and_those_who_wait_go_on() -> None:
    slots = slots_with("a", "b", "c")
    slots.take("a", 0.0)
    slots.enter("a")
    slots.take("b", 0.0)
    slots.clear()
    assert slots.used == 0
    assert slots.take("c", 0.0)


def test_leaving_says_whether_it_was_known() -> None:
    slots = slots_with("a")
    assert slots.leave("a")
    assert not slots.leave("a")


def test_it_says_when_the_next_is_forgotten() -> None:
    slots: PrefillSlots[str] = PrefillSlots(LEASE_S)
    assert slots.wake_at() == inf
    slots.ask("a", 1.0)
    slots.take("a", 2.0)
    assert slots.wake_at() == 2.0 + LEASE_S
    slots.ask("b", 1.5)
    assert slots.wake_at() == 1.5 + LEASE_S
    assert not slots.take("b", 1.5 + LEASE_S)  # it waits no more at that moment
    slots.enter("a")
    assert slots.wake_at() == inf


def test_a_crowd_does_not_grow_without_bound_and_nobody_loses_a_turn_to_it() -> None:
    slots = slots_with("a", "b", "c")
    for number in range(2 * MOST_WAITING):
        slots.ask(f"invented {number}", 1.0)
    slots.ask("late", 1.0)
    assert [slots.take(request, 1.0) for request in "ab"] == [True, True]
    slots.leave("a")
    assert slots.take("c", 1.0)
    slots.leave("c")
    assert not slots.take("late", 1.0)
    slots.ask("late", 1.0 + LEASE_S)  # those that do not ask again are forgotten
    assert slots.take("late", 1.0 + LEASE_S)
