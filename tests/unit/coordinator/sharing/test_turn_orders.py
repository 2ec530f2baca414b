"""Who steps next, by each order: short examples whose turns are worked out by hand."""

from itertools import count

import pytest

from p2pserve.coordinator.dev.turn_cases import turn_rows
from p2pserve.coordinator.sharing.baselines import FirstComeFirstServed, QuotaRoundRobin, SkipJoinMlfq
from p2pserve.coordinator.sharing.doubling_budget import DoublingBudget
from p2pserve.coordinator.sharing.orders import TURN_ORDERS
from p2pserve.coordinator.sharing.turn_queue import TurnQueue
from p2pserve.coordinator.sharing.values import SharingError

from .shared_services import Room, keys, profiles_of, step


def test_the_doubling_budget_by_hand() -> None:
    """`long` has L = 2 and sd = 1: a budget of 3 and O = 6 at first. `short` has L = 1 and sd = 0: 1 and O = 1."""
    profiles = profiles_of(long=(2.0, 1.0), short=(1.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    a = queue.add("a", "long", 100, 0.0)
    assert keys(step(queue, 0.0, 1.0)) == ("long", "prefill", ["a"])
    assert queue.order.score(a) == pytest.approx(4.0)  # (3 - 1) * 2
    b = queue.add("b", "short", 100, 1.0)
    assert keys(step(queue, 1.0, 0.4)) == ("short", "prefill", ["b"])  # 1 < 4
    assert keys(step(queue, 1.4, 0.4)) == ("short", "decode", ["b"])  # 0.6
    assert keys(step(queue, 1.8, 0.4)) == ("short", "decode", ["b"])  # 0.2, and then it is used up
    assert (b.budget, b.rank) == (2.0, 2.0)
    assert keys(step(queue, 2.2, 1.9)) == ("short", "decode", ["b"])  # 2 < 4
    assert keys(step(queue, 4.1, 0.2)) == ("short", "decode", ["b"])  # 0.1, used up again
    assert (b.budget, b.rank) == (4.0, 4.0)
    assert keys(step(queue, 4.3, 0.5)) == ("long", "decode", ["a"])  # 4 and 4: who came first
    assert keys(step(queue, 4.8, 0.5)) == ("long", "decode", ["a"])  # 3 < 4
    queue.finish(a, 10)
    assert keys(step(queue, 5.3, 0.5)) == ("short", "decode", ["b"])


def test_all_of_a_batch_are_charged_the_whole_iteration() -> None:
    profiles = profiles_of(one=(2.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    requests = [queue.add(number, "one", 100, 0.0) for number in range(3)]
    step(queue, 0.0, 0.5)
    assert [request.charged_s for request in requests] == [0.5] * 3
    assert [request.rank for request in requests] == [1.5] * 3


def test_a_new_prompt_waits_for_the_batch_of_its_service_unless_prompts_go_first() -> None:
    for prompts_first, expected in ((False, ("one", "decode", ["a"])), (True, ("one", "prefill", ["b"]))):
        profiles = profiles_of(one=(2.0, 0.0))
        queue = TurnQueue(DoublingBudget(profiles, prompts_first=prompts_first), profiles)
        queue.add("a", "one", 100, 0.0)
        step(queue, 0.0, 0.5)
        queue.add("b", "one", 100, 0.5)
        assert keys(step(queue, 0.5, 0.5)) == expected


def test_first_come_first_served_by_hand() -> None:
    """The oldest open request's service has the turn, its new prompts before its decodes; `c` waits behind `a`."""
    profiles = profiles_of(long=(5.0, 0.0), short=(1.0, 0.0))
    queue = TurnQueue(FirstComeFirstServed(), profiles)
    a = queue.add("a", "long", 100, 0.0)
    assert keys(step(queue, 0.0, 1.0)) == ("long", "prefill", ["a"])
    queue.add("c", "short", 100, 1.0)
    queue.add("d", "long", 100, 1.0)
    assert keys(step(queue, 1.0, 1.0)) == ("long", "prefill", ["d"])
    assert keys(step(queue, 2.0, 1.0)) == ("long", "decode", ["a", "d"])
    queue.finish(a, 10)
    assert keys(step(queue, 3.0, 1.0)) == ("short", "prefill", ["c"])  # c came before d


def test_round_robin_by_hand() -> None:
    """Quotas of 1 and 0.5 s. A turn ends with the step that uses the quota up; nothing is saved for later."""
    profiles = profiles_of(one=(1.0, 0.0), two=(1.0, 0.0))
    queue = TurnQueue(QuotaRoundRobin({"one": 1.0, "two": 0.5}), profiles)
    queue.add("a", "one", 100, 0.0)
    queue.add("b", "two", 100, 0.0)
    turns = [keys(step(queue, 0.4 * number, 0.4)) for number in range(8)]
    services = [turn[0] for turn in turns if turn is not None]
    assert services == ["one", "one", "one", "two", "two", "one", "one", "one"]
    assert turns[0] == ("one", "prefill", ["a"])
    assert turns[3] == ("two", "prefill", ["b"])
    queue.remove(queue.requests["a"])
    services = [step(queue, 4.0, 0.4).service for _ in range(3)]  # type: ignore[union-attr]
    assert services == ["two", "two", "two"]  # nobody else has anything to do


def test_skip_join_mlfq_by_hand() -> None:
    """Quanta of 0.1, 0.2, 0.4 s, ... A prompt of 150 ms skips the first level; who has used a quantum falls."""
    profiles = profiles_of(one=(1.0, 0.0))
    queue = TurnQueue(SkipJoinMlfq(profiles, first_quantum_s=0.1, levels=4), profiles)
    long = queue.add("long", "one", 150, 0.0)
    short = queue.add("short", "one", 50, 0.0)
    assert (long.rank, short.rank) == (1.0, 0.0)
    assert keys(step(queue, 0.0, 0.05, Room(1))) == ("one", "prefill", ["short"])
    assert keys(step(queue, 0.05, 0.05)) == ("one", "decode", ["short"])  # 0.1 s are used: it falls behind
    assert short.rank == 1.0
    assert keys(step(queue, 0.1, 0.15, Room(1))) == ("one", "prefill", ["long"])  # equal levels: who came first
    assert keys(step(queue, 0.25, 0.05)) == ("one", "decode", ["long", "short"])
    assert (long.rank, short.rank) == (2.0, 1.0)  # 0.2 and 0.05 s of 0.2
    assert queue.add("huge", "one", 10_000, 0.3).rank == 3.0  # the last level has no end


@pytest.mark.parametrize("name", TURN_ORDERS)
def test_a_turn_is_of_one_service_and_one_phase(name: str) -> None:
    profiles = profiles_of(one=(1.0, 0.5), two=(3.0, 1.0))
    queue = TurnQueue(TURN_ORDERS[name](profiles), profiles)
    for number in range(40):
        queue.add(number, ("one", "two")[number % 2], 100, 0.1 * number)
        turn = step(queue, 0.1 * number, 0.1, Room(3))
        assert turn is not None
        assert {request.service for request in turn.requests} == {turn.service}
        assert 1 <= len(turn.requests) <= 3
        if number % 5 == 4:
            queue.finish(turn.requests[0], 10)


def test_settings_that_cannot_be_are_refused() -> None:
    profiles = profiles_of(one=(1.0, 0.0))
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(SharingError, match="starved_after is"):
            DoublingBudget(profiles, starved_after=wrong)
    for quotas in ({}, {"one": 0.0}, {"one": float("inf")}):
        with pytest.raises(SharingError, match="quotas must be seconds"):
            QuotaRoundRobin(quotas)
    with pytest.raises(SharingError, match="at least 1 level"):
        SkipJoinMlfq(profiles, levels=0)
    with pytest.raises(SharingError, match="needs a service"):
        TurnQueue(FirstComeFirstServed(), {})


def test_the_bench_times_decisions_and_charges_of_every_order() -> None:
    ticks = count()
    rows = turn_rows(40, lambda: 1e-6 * next(ticks))
    assert [row["order"] for row in rows] == list(TURN_ORDERS)
    assert all((row["choose_us"], row["charge_us"]) == (1.0, 1.0) for row in rows)  # the clock ticks once in each
