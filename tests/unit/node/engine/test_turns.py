"""Who steps next among the engines of a process, by what they tell of their requests."""

from __future__ import annotations

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.sharing.values import SharedRequest, SharingError, Turn
from p2pserve.node.engine.sharing.turns import ProcessTurns, ServiceTurns, expect_unseen, ids_of

SHORT, LONG = expect_unseen(0.0001, 0.001), expect_unseen(0.0002, 0.002)  # the same, of a slower model


class Room:
    """For so many requests of a turn."""

    def __init__(self, places: int = 8) -> None:
        self.places = places

    def take(self, request: SharedRequest) -> bool:
        self.places -= 1
        return self.places >= 0


class World:
    """Two engines of a process, and a clock."""

    def __init__(self, order: str = "db") -> None:
        self.now = 0.0
        self.turns = ProcessTurns(order, lambda: self.now)
        self.long: ServiceTurns = self.turns.open_service("long", LONG)
        self.short: ServiceTurns = self.turns.open_service("short", SHORT)

    def choose(self, places: int = 8) -> Turn:
        turn = self.turns.choose(Room(places))
        assert turn is not None
        return turn

    def step(self, seconds: float = 0.01) -> Turn:
        """A turn in which prompts are computed in whole, and nothing ends."""
        turn = self.choose()
        engine = self.short if turn.service == "short" else self.long
        for request in ids_of(turn):
            engine.hold_kv(request)
            engine.begin_decode(request)
        self.now += seconds
        self.turns.charge(turn, seconds, 100)
        return turn


def test_the_service_whose_requests_are_short_steps_first() -> None:
    world = World()
    world.long.add("a", 100)
    world.short.add("b", 100)
    turn = world.step()
    assert (turn.service, turn.phase, ids_of(turn)) == ("short", Phase.PREFILL, ("b",))
    assert world.step() == Turn("short", Phase.DECODE, turn.requests)


def test_by_first_come_first_served_it_does_not() -> None:
    world = World("fcfs")
    world.long.add("a", 100)
    world.short.add("b", 100)
    assert world.step().service == "long"


def test_a_budget_that_is_used_up_lets_others_go_first() -> None:
    """A request of the short service takes far longer than its profile says."""
    world = World()
    world.short.add("odd", 100)
    world.long.add("a", 100)
    served = [world.step(seconds=0.25).service for _ in range(13)]
    assert served[0] == "short"
    assert "long" in served
    assert world.now < 10 * LONG.execution.mean  # before it would have been promoted


def test_what_happens_in_a_turn_counts_when_it_has_been_charged() -> None:
    """Two of three decode from then on, and one has ended; the line of prompts is as it was until then."""
    world = World()
    for name in "abc":
        world.short.add(name, 100)
    turn = world.choose()
    world.short.finish("b", 1)
    world.short.begin_decode("a")
    assert [each.phase for each in turn.requests] == [Phase.PREFILL] * 3
    world.turns.charge(turn, 0.01, 300)
    assert world.turns.profiles["short"].execution.mean < SHORT.execution.mean  # it knows of the one that ended
    assert ids_of(world.choose()) == ("c",)
    assert "b" not in world.short


def test_a_victim_is_another_request_of_the_same_service() -> None:
    world = World()
    world.long.add("far", 100)
    world.long.hold_kv("far")
    for name in "abc":  # the earlier a request has come, the less of its budget is left
        world.short.add(name, 100)
        world.step()
        world.step()
    turn = world.choose(places=1)
    assert ids_of(turn) == ("a",)
    assert world.short.pick_victim("a") == "c"
    world.short.lose_kv("c")
    assert world.short.pick_victim("a") == "b"
    world.short.lose_kv("b")
    assert world.short.pick_victim("a") is None
    world.turns.charge(turn, 0.01, 0)


def test_an_engine_that_leaves_takes_its_requests_along_and_comes_back_without() -> None:
    world = World()
    world.short.add("a", 100)
    world.long.add("b", 100)
    world.short.clear()
    assert world.step().service == "long"
    again = world.turns.open_service("short", SHORT)
    again.add("a", 100)
    assert ids_of(world.choose()) == ("a",)


def test_requests_that_are_not_there_are_passed_over() -> None:
    world = World()
    world.short.remove("nobody")
    world.short.finish("nobody", 1)
    world.short.lose_kv("nobody")
    assert world.turns.choose(Room()) is None


def test_orders_that_do_not_take_services_later_are_refused() -> None:
    with pytest.raises(SharingError, match="'rr' is none of db, fcfs"):
        ProcessTurns("rr", lambda: 0.0)
