"""A bound on bytes held together: who gets in, who waits, and who gives up."""

import threading

from p2pserve.kvtransport.link.budget import ByteBudget


def wanted() -> bool:
    return True


def test_what_fits_gets_in_at_once_and_is_given_back() -> None:
    budget = ByteBudget(100)
    assert (budget.held, budget.limit_bytes) == (0, 100)
    assert budget.take(60, 0.0, wanted)
    assert budget.take(40, 0.0, wanted)  # up to the limit
    assert budget.held == 100
    assert not budget.take(1, 0.0, wanted)
    budget.give(40)
    assert budget.held == 60
    assert not budget.take(41, 0.0, wanted)
    assert budget.take(40, 0.0, wanted)


def test_what_is_larger_than_the_bound_gets_in_alone() -> None:
    budget = ByteBudget(10)
    assert budget.take(50, 0.0, wanted)
    assert not budget.take(1, 0.0, wanted)
    budget.give(50)
    assert budget.take(1, 0.0, wanted)
    assert not budget.take(50, 0.0, wanted)


def test_who_is_not_wanted_any_more_does_not_wait() -> None:
    budget = ByteBudget(10)
    assert budget.take(10, 0.0, wanted)
    assert not budget.take(1, 1e9, lambda: False)
    assert budget.held == 10


def test_room_that_is_made_lets_a_waiting_thread_in() -> None:
    budget = ByteBudget(10)
    assert budget.take(10, 0.0, wanted)
    asked = threading.Event()

    def is_waiting() -> bool:
        asked.set()
        return True

    got: list[bool] = []
    waiter = threading.Thread(target=lambda: got.append(budget.take(4, 30.0, is_waiting)))
    waiter.start()
    assert asked.wait(30.0)
    budget.give(10)
    waiter.join(30.0)
    assert got == [True]
    assert budget.held == 4
