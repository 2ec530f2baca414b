"""A second engine is loaded beside the one that serves, for the next place of its box, which then goes over to it."""

from __future__ import annotations

import random

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Stage
from p2pserve.node.replica.place import Place

from .supervised import FORK_S, LOAD_S, MODEL, Box, World, elapse, play, stages

PAIR = stages("a", "b")


def alone(name: str) -> Place:
    return Place((Stage(peer=name, tp=1, first_layer=0, last_layer=MODEL.layers),), 0)


async def serve_alone(world: World, *names: str, room: int = MODEL.layers) -> None:
    for name in names:
        world.box(name).supervisor.count_room_beside = lambda serving: room
        world.box(name).supervisor.assign(alone(name))
    await world.until("ready", *names)


def load_pair(world: World) -> None:
    for index, name in enumerate("ab"):
        world.box(name).supervisor.load_beside(Place(PAIR, index))


def is_loaded(box: Box) -> bool:
    told = box.adverts[-1].beside
    return told.stages == PAIR and told.is_loaded


def test_boxes_serve_until_they_go_over_and_are_never_away() -> None:
    async def story(world: World) -> None:
        await serve_alone(world, "a", "b")
        assert world.box("a").adverts[-1].beside.room == MODEL.layers
        before = {name: world.box(name).running[0] for name in "ab"}
        load_pair(world)
        await elapse(FORK_S)
        told = world.box("a").adverts[-1]
        assert (told.state, told.beside.stages, told.beside.is_loaded) == ("ready", PAIR, False)
        assert told.detail.startswith("for its next part: ")
        await elapse(2.0 * (FORK_S + LOAD_S))
        assert is_loaded(world.box("a"))
        assert is_loaded(world.box("b"))
        assert [before[name].running for name in "ab"] == [True, True]
        assert [world.box(name).transfers.place for name in "ab"] == [alone("a"), alone("b")]

        world.assign("a", "b")
        await elapse(0.1)
        for index, name in enumerate("ab"):
            box = world.box(name)
            assert box.running == [box.processes[-1]]
            assert not before[name].running
            assert box.transfers.place == Place(PAIR, index)
            assert world.states(name)[-1] == "ready"
            assert "loading" not in world.states(name)
            assert (box.adverts[-1].stages, box.adverts[-1].beside.stages) == (PAIR, ())

    play("a", "b")(story)


def test_a_box_without_room_says_so_and_serves_on() -> None:
    async def story(world: World) -> None:
        await serve_alone(world, "a", "b", room=0)
        load_pair(world)
        load_pair(world)
        await elapse(10.0)
        told = world.box("a").adverts[-1]
        assert (told.state, told.beside.stages, told.beside.failed) == ("ready", PAIR, "it has no room for it")
        assert len(world.box("a").processes) == 1

    play("a", "b")(story)


def test_a_load_that_fails_is_told_once_and_the_place_is_taken_in_the_usual_way() -> None:
    async def story(world: World) -> None:
        await serve_alone(world, "a", "b")
        world.start_faults[PeerId("a")] = ["no memory left"]
        load_pair(world)
        await elapse(30.0)
        for _ in range(3):
            load_pair(world)  # each plan says it again
            await elapse(3.0)
        told = world.box("a").adverts[-1]
        assert (told.state, told.beside.failed, told.beside.is_loaded) == ("ready", "no memory left", False)
        assert len(world.box("a").processes) == 2
        world.assign("a", "b")
        await world.until("ready", "a", "b")
        await elapse(10.0)
        assert [len(world.box(name).running) for name in "ab"] == [1, 1]
        assert [world.box(name).transfers.place for name in "ab"] == [Place(PAIR, 0), Place(PAIR, 1)]

    play("a", "b")(story)


@pytest.mark.parametrize("after_s", [0.05, FORK_S, 20.0])
def test_what_is_not_wanted_any_more_ends(after_s: float) -> None:
    async def story(world: World) -> None:
        await serve_alone(world, "a", "b")
        load_pair(world)
        await elapse(after_s)
        for name in "ab":
            world.box(name).supervisor.keep_beside(alone(name))
        await elapse(20.0)
        for name in "ab":
            box = world.box(name)
            assert box.running == [box.processes[0]]
            assert (box.adverts[-1].state, box.adverts[-1].beside.stages) == ("ready", ())
            assert box.transfers.place == alone(name)

    play("a", "b")(story)


def test_a_stage_whose_head_asks_anew_is_loaded_anew() -> None:
    async def story(world: World) -> None:
        await serve_alone(world, "a", "b")
        load_pair(world)
        await elapse(20.0)
        world.box("a").supervisor.keep_beside(alone("a"))
        world.box("a").supervisor.load_beside(Place(PAIR, 0))
        await elapse(30.0)
        assert is_loaded(world.box("a"))
        assert is_loaded(world.box("b")) or world.box("b").adverts[-1].beside.failed
        world.assign("a", "b")
        await elapse(30.0)
        assert [len(world.box(name).running) for name in "ab"] == [1, 1]
        assert [world.box(name).state for name in "ab"] == ["ready", "ready"]

    play("a", "b")(story)


def test_what_serves_may_die_meanwhile() -> None:
    async def story(world: World) -> None:
        await serve_alone(world, "a", "b")
        load_pair(world)
        world.box("a").running[0].end("was killed by SIGKILL")
        await elapse(30.0)
        assert world.box("a").state == "ready"
        assert is_loaded(world.box("a"))
        world.assign("a", "b")
        await elapse(0.1)
        assert [len(world.box(name).running) for name in "ab"] == [1, 1]

    play("a", "b")(story)


@pytest.mark.parametrize("seed", range(20))
def test_plans_that_change_all_the_time_leave_no_process_behind(seed: int) -> None:
    rng = random.Random(seed)

    async def story(world: World) -> None:
        await serve_alone(world, "a", "b", "c")
        for _ in range(40):
            replica = tuple(rng.sample("abc", rng.choice((2, 3))))
            for name in "abc":
                supervisor = world.box(name).supervisor
                if name in replica and rng.random() < 0.8:
                    supervisor.load_beside(Place(stages(*replica), replica.index(name)))
                elif rng.random() < 0.5:
                    supervisor.keep_beside(supervisor.place)
            await elapse(rng.choice((0.0, 0.02, 0.4, 1.0, 5.0)))
            if rng.random() < 0.4:
                for name in "abc":
                    in_it = rng.random() < 0.9 and name in replica
                    place = Place(stages(*replica), replica.index(name)) if in_it else alone(name)
                    world.box(name).supervisor.assign(place)
            if rng.random() < 0.2:
                for process in world.box(rng.choice("abc")).running:
                    process.end("was killed by SIGKILL")
        for name in "abc":
            world.box(name).supervisor.keep_beside(None)
            world.box(name).supervisor.assign(alone(name))
        await elapse(300.0)
        assert [world.box(name).state for name in "abc"] == ["ready"] * 3
        assert [world.box(name).transfers.place for name in "abc"] == [alone(name) for name in "abc"]
        assert sum(not process.gone for box in world.boxes.values() for process in box.processes) == 3

    play("a", "b", "c")(story)
