"""Who steps next among the engines of a process, by what they tell of their requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.sharing.service_profile import ServiceProfile
from p2pserve.coordinator.sharing.values import SharedRequest, SharingError, Turn
from p2pserve.node.engine.sharing.turns import ProcessTurns, ServiceTurns, expect_requests, ids_of

SHORT, LONG = expect_requests(0.0001, 0.001), expect_requests(0.0002, 0.002)  # the same, of a slower model


class Room:
    """For so many requests of a turn."""

    def __init__(self, places: int = 8) -> None:
        self.places = places

    def take(self, request: SharedRequest) -> bool:
        self.places -= 1
        return self.places >= 0


class Holder:
    """An engine whose requests hold ten bytes each, or with others a page: nothing of that is free before all are."""

    def __init__(self, world: World, service: str) -> None:
        self.world = world
        self.service = service
        self.evicted: list[str] = []
        self.kept: set[str] = set()
        self.pages: list[set[str]] = []

    def can_lose_kv(self, request: str) -> bool:
        return request not in self.kept

    def freed_bytes(self, requests: Sequence[str], *, for_others: bool) -> int:
        lost = {*requests} - self.kept
        stays = set[str]().union(*(page for page in self.pages if for_others and page - lost))
        return 10 * len(lost - stays)

    def evict(self, request: str) -> None:
        self.evicted.append(request)
        shares = self.world.turns.shares
        assert shares is not None
        shares.release(self.service, 10)
        (self.world.short if self.service == "short" else self.world.long).lose_kv(request)


class World:
    """Two engines of a process, and a clock."""

    def __init__(self, order: str = "db") -> None:
        self.now = 0.0
        self.holders = {service: Holder(self, service) for service in ("long", "short")}
        self.turns = ProcessTurns(order, lambda: self.now, self.holders.__getitem__)
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


def hold(world: World, engine: ServiceTurns, *names: str) -> None:
    """Requests with KV of ten bytes each, of a memory of a hundred."""
    shares = world.turns.open_memory(100)
    for service in ("long", "short"):
        shares.open_service(service, 10)
    for name in names:
        engine.add(name, 100)
        engine.hold_kv(name)
        shares.take(engine.service, 10)


def test_while_a_service_has_no_more_than_its_quota_victims_are_the_askers_own() -> None:
    world = World("fcfs")
    hold(world, world.short, "a", "b", "c")
    hold(world, world.long, "far")
    world.now = 0.001
    turn = world.choose(places=1)
    assert ids_of(turn) == ("a",)
    assert world.short.make_room("a", 15)
    assert world.holders["short"].evicted == ["c", "b"]
    assert not world.short.make_room("a", 1)
    assert world.holders["long"].evicted == []
    world.turns.charge(turn, 0.01, 0)


def test_who_has_more_than_its_quota_makes_room_for_others() -> None:
    """The long requests have eight parts of ten, and half of all is for each: three may go, the last first."""
    world = World()
    hold(world, world.long, *"abcdefgh")
    hold(world, world.short, "x")
    turn = world.choose(places=1)
    assert turn.service == "short"
    assert not world.short.make_room("x", 40), "nobody loses any where that is not enough"
    assert world.holders["long"].evicted == []
    world.holders["long"].kept.add("g")
    assert world.short.make_room("x", 30)
    assert world.holders["long"].evicted == ["h", "f", "e"]
    world.turns.charge(turn, 0.01, 0)
    shares = world.turns.shares
    assert shares is not None
    shares.check()


def test_others_get_whole_pages_and_who_frees_none_keeps_its_kv() -> None:
    """The last two of the long requests share a page with one that stays, and those before them have one together."""
    world = World()
    hold(world, world.long, *"abcdefgh")
    hold(world, world.short, "x")
    world.holders["long"].pages = [{"a", "g", "h"}, {"e", "f"}]
    turn = world.choose(places=1)
    assert world.short.make_room("x", 20)
    assert world.holders["long"].evicted == ["f", "e"]
    assert not world.short.make_room("x", 30)
    assert world.holders["long"].evicted == ["f", "e"]
    world.turns.charge(turn, 0.01, 0)


def test_kv_from_another_box_gets_room_from_others_alone() -> None:
    world = World()
    hold(world, world.long, *"abcdef")
    hold(world, world.short, *"xyz")
    assert not world.long.make_room_for_kv(10)
    assert world.short.make_room_for_kv(10)
    assert (world.holders["long"].evicted, world.holders["short"].evicted) == (["f"], [])


def test_a_request_that_loses_its_kv_while_a_turn_is_chosen_has_no_part_in_it() -> None:
    """The room of this turn is for one, who takes what it needs from those behind it."""
    world = World("fcfs")
    hold(world, world.short, *"abc")
    for name in "abc":
        world.short.begin_decode(name)

    class Room:
        def take(self, request: SharedRequest) -> bool:
            name = ids_of(Turn("short", Phase.DECODE, [request]))[0]
            return name != "a" or world.short.make_room(name, 20)

    turn = world.turns.choose(Room())
    assert turn is not None
    assert ids_of(turn) == ("a",)
    assert world.holders["short"].evicted == ["c", "b"]
    world.turns.charge(turn, 0.01, 0)
    assert ids_of(world.choose()) == ("b", "c"), "they are prompts again"


def test_who_came_last_gives_its_kv_when_nobody_can_step() -> None:
    world = World()
    assert not world.turns.evict_last()
    hold(world, world.long, "a", "b")
    hold(world, world.short, "x")
    world.holders["short"].kept.add("x")
    assert world.turns.evict_last()
    assert world.turns.evict_last()
    assert world.holders["long"].evicted == ["b", "a"]
    assert not world.turns.evict_last()


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
        ProcessTurns("rr", lambda: 0.0, World().holders.__getitem__)


def test_known_lengths_are_what_is_expected_and_a_guess_gives_way_to_the_first_answers() -> None:
    known, guessed = expect_requests(0.001, 0.1, (100, 20)), expect_requests(0.001, 0.1)
    assert known.execution.mean == pytest.approx(100 * 0.001 + 20 * 0.1)
    assert (known.prompt_tokens.mean, known.output_tokens.mean) == (100, 20)
    means = []
    for expected in (known, guessed):
        profile = ServiceProfile(expected)
        for _ in range(3):
            profile.output_tokens.note(20.0)
        means.append(profile.output_tokens.mean)
    assert means[0] == pytest.approx(20.0)
    assert means[1] < 0.4 * guessed.output_tokens.mean


def test_a_service_of_short_answers_goes_first_as_soon_as_a_few_have_ended() -> None:
    """Both are taken for alike at first, on engines that are equally fast."""
    turns = ProcessTurns("db", lambda: 0.0, lambda _: pytest.fail("memory is not short"))
    ends = {"long": 100, "short": 4}
    services = {name: turns.open_service(name, expect_requests(0.0001, 0.001)) for name in ends}
    for number in range(4):
        for name, steps in ends.items():
            services[name].add(f"{name}-{number}", 64)
            for step in range(steps):
                turn = turns.choose(Room())
                assert turn is not None
                assert turn.service == name
                turns.charge(turn, 0.001, 0)
                if step == 0:
                    services[name].begin_decode(f"{name}-{number}")
            services[name].finish(f"{name}-{number}", steps)
    services["long"].add("one", 64)
    services["short"].add("other", 64)
    turn = turns.choose(Room())
    assert turn is not None
    assert turn.service == "short"
