"""What holds whatever the order: nobody starves, nobody is lost, memory goes from the last in order."""

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.sharing.baselines import FirstComeFirstServed
from p2pserve.coordinator.sharing.doubling_budget import DoublingBudget
from p2pserve.coordinator.sharing.orders import DOUBLING_BUDGET, DOUBLING_BUDGET_PRINTED, MLFQ, TURN_ORDERS
from p2pserve.coordinator.sharing.turn_queue import WAIT_SHARE, TurnQueue
from p2pserve.coordinator.sharing.values import SharingError, Turn

from .shared_services import Room, keys, profiles_of, step

STEP_S = 0.1


def any_service(service: str) -> bool:
    """May lose KV."""
    return True


def run_at_random(name: str, seed: int) -> tuple[list[object], TurnQueue]:
    """Requests come, decode, lose their KV, are cancelled and end, all by chance; returns the turns."""
    rng = random.Random(seed)
    profiles = profiles_of(chat=(1.0, 0.5), code=(0.3, 0.1), long=(6.0, 4.0))
    queue = TurnQueue(TURN_ORDERS[name](profiles), profiles)
    turns: list[object] = []
    now = 0.0
    for number in range(600):
        if rng.random() < 0.5:
            queue.add(number, rng.choice(("chat", "code", "long")), rng.randrange(1, 400), now)
        if queue.requests and rng.random() < 0.05:
            queue.remove(rng.choice(list(queue.requests.values())))
        turn = queue.choose(now, Room(rng.randrange(1, 6)))
        arrived = number + 1000
        if rng.random() < 0.2:  # while the turn's iteration runs
            queue.add(arrived, "code", 10, now)
        if turn is not None:
            if rng.random() < 0.1:
                queue.remove(rng.choice(turn.requests))
            queue.charge(turn, STEP_S, now + STEP_S, tokens=10)
            for request in turn.requests:
                if not request.is_open:
                    continue
                queue.hold_kv(request)
                if turn.phase is Phase.PREFILL:
                    queue.begin_decode(request)
                elif rng.random() < 0.1:
                    queue.finish(request, 10)
                elif rng.random() < 0.05:
                    queue.lose_kv(request)
        turns.append(keys(turn))
        now += STEP_S
    return turns, queue


@pytest.mark.parametrize("name", TURN_ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_no_request_is_lost_and_lines_stay_sorted(name: str, seed: int) -> None:
    _, queue = run_at_random(name, seed)
    in_lines = [request for line in queue._lines.values() for request in line.requests]
    assert sorted(map(id, in_lines)) == sorted(map(id, queue.requests.values()))
    for (service, phase), line in queue._lines.items():
        assert all((each.service, each.phase) == (service, phase) for each in line.requests)
        assert line.requests == sorted(line.requests, key=lambda each: (each.rank, each.number))
        assert set(line.promoted) == {each.number for each in line.requests if each.is_starved}
        if phase is Phase.PREFILL:
            assert set(line.holders) == {each.number for each in line.requests if each.holds_kv}


@pytest.mark.parametrize("name", TURN_ORDERS)
def test_the_same_happens_again(name: str) -> None:
    assert run_at_random(name, 7)[0] == run_at_random(name, 7)[0]


def test_budgets_double_and_nothing_else_raises_a_rank() -> None:
    profiles = profiles_of(one=(0.35, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    request = queue.add("a", "one", 10, 0.0)
    budgets = []
    for number in range(60):
        before = request.rank
        step(queue, STEP_S * number, STEP_S)
        if request.rank > before:
            budgets.append(request.budget)
            assert before <= STEP_S
            assert request.rank == request.budget
    assert budgets == pytest.approx([0.7, 1.4, 2.8, 5.6])


@pytest.mark.parametrize("name", [DOUBLING_BUDGET, DOUBLING_BUDGET_PRINTED, MLFQ])
def test_nobody_waits_for_longer_than_the_threshold_and_a_turn_of_each_line(name: str) -> None:
    """Short requests come as fast as they can be served, for ever: what is long is promoted all the same."""
    profiles = profiles_of(short=(0.2, 0.0), long=(4.0, 2.0))
    queue = TurnQueue(TURN_ORDERS[name](profiles), profiles)
    long = queue.add("long", "long", 300, 0.0)
    threshold, served = queue.order.starvation_s("long"), [0.0]
    for number in range(1500):
        now = STEP_S * number
        queue.add(number, "short", 10, now)
        turn = step(queue, now, STEP_S, Room(2))
        assert turn is not None
        if long in turn.requests:
            served.append(now)
        elif turn.phase is Phase.DECODE:
            for request in turn.requests:
                queue.finish(request, 2)
    waits = [later - earlier for earlier, later in pairwise(served)]
    assert len(served) > 3
    assert max(waits) <= threshold + 5 * STEP_S
    assert max(waits) > 1.0  # it did have to wait


def test_a_starved_request_goes_first_until_its_budget_is_used_up() -> None:
    profiles = profiles_of(short=(0.9, 0.0), long=(1.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles, starved_after=3.0), profiles)
    long = queue.add("long", "long", 10, 0.0)
    queue.add("s1", "short", 10, 3.0)
    assert keys(step(queue, 3.0, 0.6)) == ("long", "prefill", ["long"])
    assert long.promoted_at == 3.0
    assert keys(step(queue, 3.6, 0.3)) == ("long", "decode", ["long"])
    assert keys(step(queue, 3.9, 0.3)) == ("long", "decode", ["long"])  # 1.2 s: the budget is doubled
    assert long.promoted_at == inf
    assert keys(step(queue, 4.2, 0.1)) == ("short", "prefill", ["s1"])


@pytest.mark.parametrize("name", [DOUBLING_BUDGET, DOUBLING_BUDGET_PRINTED])
def test_a_threshold_that_is_longer_than_a_deadline_starves_nobody(name: str) -> None:
    """A guess of 20 s for what takes two turns, beside requests of one turn as fast as they can be served."""
    profiles = profiles_of(short=(0.2, 0.0), guessed=(20.0, 10.0))
    queue = TurnQueue(TURN_ORDERS[name](profiles), profiles)
    assert queue.order.starvation_s("guessed") > 60.0
    late = queue.add("late", "guessed", 9, 0.0, deadline=60.0)
    patient = queue.add("patient", "guessed", 9, 0.0)
    served: dict[object, list[float]] = {"late": [], "patient": []}
    for number in range(590):
        now = STEP_S * number
        queue.add(number, "short", 10, now)
        turn = step(queue, now, STEP_S, Room(1))
        assert turn is not None
        for request in turn.requests:
            if request.key in served:
                served[request.key].append(now)
            else:
                queue.finish(request, 1)
        if len(served["late"]) == 2 and late.is_open:
            queue.finish(late, 2)
    assert served["late"] == pytest.approx([WAIT_SHARE * 60.0, WAIT_SHARE * 60.0 + STEP_S])
    assert served["patient"] == []
    assert patient.promoted_at == inf


def test_a_wait_is_limited_to_a_part_of_what_is_left_until_the_deadline() -> None:
    profiles = profiles_of(short=(0.2, 0.0), guessed=(20.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles, starved_after=1000.0), profiles)
    late = queue.add("late", "guessed", 9, 0.0, deadline=100.0)
    queue.add("s", "short", 10, 0.0)
    assert keys(queue.choose(24.9, Room())) == ("short", "prefill", ["s"])
    assert keys(step(queue, 25.0, 25.0)) == ("guessed", "prefill", ["late"])
    assert late.promoted_at == inf  # its budget is used up
    assert keys(queue.choose(62.4, Room())) == ("short", "prefill", ["s"])
    assert keys(queue.choose(62.5, Room())) == ("guessed", "decode", ["late"])


def test_in_order_of_arrival_deadlines_change_nothing() -> None:
    profiles = profiles_of(one=(1.0, 0.0), two=(1.0, 0.0))
    queue = TurnQueue(FirstComeFirstServed(), profiles)
    queue.add("a", "one", 10, 0.0)
    late = queue.add("b", "two", 10, 0.0, deadline=10.0)
    assert keys(queue.choose(9.0, Room())) == ("one", "prefill", ["a"])
    assert late.promoted_at == inf


def test_starved_services_take_turns() -> None:
    profiles = profiles_of(one=(1.0, 9.0), two=(1.0, 9.0))
    queue = TurnQueue(DoublingBudget(profiles, starved_after=1.0), profiles)
    queue.add("a", "one", 10, 0.0)
    queue.add("b", "two", 10, 0.0)
    services = [step(queue, 2.0 + 0.1 * number, 0.1).service for number in range(6)]  # type: ignore[union-attr]
    assert services == ["one", "two"] * 3


def test_a_line_without_room_is_passed_over() -> None:
    profiles = profiles_of(one=(1.0, 0.0), two=(5.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    queue.add("a", "one", 10, 0.0)
    queue.add("b", "two", 10, 0.0)
    assert keys(queue.choose(0.0, Room(full=frozenset({"a"})))) == ("two", "prefill", ["b"])
    assert queue.choose(0.0, Room(0)) is None


def test_who_comes_last_in_order_loses_its_kv() -> None:
    profiles = profiles_of(one=(1.0, 0.0), two=(5.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    for key, service in (("a", "one"), ("b", "two"), ("c", "two")):
        queue.add(key, service, 10, 0.0)
    step(queue, 0.0, 0.1)
    step(queue, 0.1, 0.1, Room(full=frozenset({"a"})))
    new = queue.add("d", "one", 10, 0.2)
    victim = queue.pick_victim(new, any_service)
    assert victim is queue.requests["c"]
    assert queue.pick_victim(new, lambda service: service == "one") is None  # `a` goes before `d`
    queue.lose_kv(victim)
    assert (victim.phase, victim.holds_kv) == (Phase.PREFILL, False)
    assert queue.pick_victim(new, any_service) is queue.requests["b"]


def test_a_prompt_takes_no_kv_from_its_own_service() -> None:
    profiles = profiles_of(one=(1.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    queue.add("a", "one", 10, 0.0)
    step(queue, 0.0, 1.5)  # its budget is doubled
    new = queue.add("b", "one", 10, 1.5)
    assert queue.order.score(new) < queue.order.score(queue.requests["a"])
    assert queue.pick_victim(new, any_service) is None
    queue.hold_kv(new)  # and now it needs more
    assert queue.pick_victim(new, any_service) is queue.requests["a"]


def test_in_order_of_arrival_prompts_wait_for_room_and_decodes_take_it_from_the_last() -> None:
    profiles = profiles_of(one=(1.0, 0.0), two=(1.0, 0.0))
    queue = TurnQueue(FirstComeFirstServed(), profiles)
    for key in "abc":
        queue.add(key, "one", 10, 0.0)
    step(queue, 0.0, 0.1)
    prompt = queue.add("d", "two", 10, 0.1)
    assert queue.pick_victim(prompt, any_service) is None
    assert queue.pick_victim(queue.requests["a"], any_service) is queue.requests["c"]
    assert queue.pick_victim(queue.requests["c"], any_service) is None
    assert queue.find_last_holder() is queue.requests["c"]


def test_what_cannot_be_added_is_refused() -> None:
    profiles = profiles_of(one=(1.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    queue.add("a", "one", 10, 0.0)
    with pytest.raises(SharingError, match="'a' is here already"):
        queue.add("a", "one", 10, 0.0)
    with pytest.raises(SharingError, match="'other' is none of one"):
        queue.add("b", "other", 10, 0.0)


def test_a_sole_decoder_has_all_requests_and_no_prompts() -> None:
    profiles = profiles_of(chat=(1.0, 0.5), code=(0.3, 0.1))
    queue = TurnQueue(FirstComeFirstServed(), profiles)
    assert queue.sole_decoder is None
    first, second = (queue.add(number, "chat", 10, 0.0) for number in range(2))
    queue.begin_decode(first)
    assert queue.sole_decoder is None
    queue.begin_decode(second)
    assert queue.sole_decoder == "chat"
    queue.begin_decode(queue.add(2, "code", 10, 0.0))
    assert queue.sole_decoder is None


def test_a_turn_of_all_that_decode_is_the_next_one_as_well_until_something_changes() -> None:
    profiles = profiles_of(chat=(1.0, 0.5), code=(0.3, 0.1))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    first, second = (queue.add(number, "chat", 10, 0.0) for number in range(2))
    changes: list[tuple[str, Callable[[], object]]] = [
        ("one decodes", partial(queue.begin_decode, first)),
        ("both decode", partial(queue.begin_decode, second)),
        ("another service", partial(queue.add, 2, "code", 10, 0.0)),
        ("is gone", lambda: queue.remove(queue.requests[2])),
        ("lost its KV", partial(queue.lose_kv, second)),
        ("computed it again", partial(queue.begin_decode, second)),
        ("ended", partial(queue.finish, first, 3)),
    ]
    found = {}
    for now, (name, change) in enumerate(changes):
        change()
        assert queue.sole_turn is None, name
        turn = choose(queue, float(now))
        found[name] = queue.sole_turn is turn
        queue.charge(turn, 0.01, float(now))
        assert (queue.sole_turn is turn) == found[name]
    assert [name for name, is_sole in found.items() if is_sole] == [
        "both decode",
        "is gone",
        "computed it again",
        "ended",
    ]


def test_a_turn_that_had_no_room_for_one_is_not_the_next_one_as_well() -> None:
    profiles = profiles_of(chat=(1.0, 0.5))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    for number in range(2):
        queue.begin_decode(queue.add(number, "chat", 10, 0.0))
    assert len(choose(queue, 0.0, requests=1).requests) == 1
    assert queue.sole_turn is None


def test_a_turn_that_is_chosen_again_is_charged_as_if_it_had_been_chosen() -> None:
    """And nobody in it can lose its KV."""
    profiles = profiles_of(chat=(1.0, 0.5), code=(0.3, 0.1))
    again, anew = (TurnQueue(DoublingBudget(profiles), profiles) for _ in range(2))
    for queue in (again, anew):
        for number in range(3):
            request = queue.add(number, "chat", 10, number / 10)
            queue.begin_decode(request)
            queue.hold_kv(request)
        queue.charge(choose(queue, 1.0), 0.3, 1.0)
    for now in range(2, 12):
        turn = again.sole_turn
        assert turn is not None
        again.choose_again(turn)
        assert again.pick_victim(None, any_service) is None
        again.charge(turn, 0.3, float(now))
        anew.charge(choose(anew, float(now)), 0.3, float(now))
    assert ranks_of(again) == ranks_of(anew)
    assert again.pick_victim(None, any_service) is not None


def choose(queue: TurnQueue, now: float, *, requests: int = 9) -> Turn:
    """With room for so many."""
    turn = queue.choose(now, Room(requests))
    assert turn is not None
    return turn


def ranks_of(queue: TurnQueue) -> dict[object, tuple[float, float, float]]:
    """Of each request: its rank, what it has been charged, and since when it waits."""
    return {key: (each.rank, each.charged_s, each.waits_since) for key, each in queue.requests.items()}


def test_what_is_only_expected_is_charged_and_not_learned() -> None:
    profiles = profiles_of(chat=(1.0, 0.5))
    queue = TurnQueue(FirstComeFirstServed(), profiles)
    request = queue.add(0, "chat", 10, 0.0)
    queue.begin_decode(request)
    before = profiles["chat"].decode_step.mean
    for is_expected in (True, False):
        turn = queue.choose(0.0, Room(1))
        assert turn is not None
        queue.charge(turn, 100.0, 100.0, is_expected=is_expected)
        assert (profiles["chat"].decode_step.mean == before) is is_expected
    assert request.charged_s == 200.0
