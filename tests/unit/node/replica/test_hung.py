"""Whether a replica gets on with its work, and who hears of it."""

from typing import Any

from p2pserve.bootstrap import NetworkSettings, PeerId, Role
from p2pserve.coordinator import Stage
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.replica.hung import ReplicaWatch
from p2pserve.node.replica.place import Place

from .worker_world import OWN, A, B, World, tokens

OTHER = PeerId("other-stage")
SPANNING = (
    Stage(peer=OWN, tp=1, first_layer=0, last_layer=2),
    Stage(peer=OTHER, tp=1, first_layer=2, last_layer=4),
)
HUNG, WORKS = messages.ReplicaHung(hung=True), messages.ReplicaHung(hung=False)
SETTINGS = NetworkSettings(watch_ping_s=0.5, hung_s=1.5)


def look(world: World, *times: float) -> list[Any]:
    """The engine is looked at; what it was asked, each time."""
    asked = []
    for now in times:
        world.worker.look_at_engine(now)
        asked += world.asked()
    return asked


def test_an_engine_with_work_that_is_silent_is_asked_and_then_its_gateways_are_told() -> None:
    world = World()
    world.decode("r", A, receive_tokens=0)
    world.asked()
    assert look(world, 0.0, 0.25, 0.5, 1.0, 1.9) == [protocol.AskBeat()]
    assert world.news() == []
    look(world, 2.0)
    assert world.news() == [(A, "replica.hung", HUNG)]
    world.decode("s", B, receive_tokens=0)
    assert world.news() == [(B, "replica.hung", HUNG)]  # who comes now hears it at once
    world.step(protocol.NewTokens("decode:r", (7,)))
    look(world, 2.1)
    told = world.news()
    assert told[0] == (A, "tokens", tokens("r", 7))
    assert sorted(told[1:], key=str) == sorted([(A, "replica.hung", WORKS), (B, "replica.hung", WORKS)], key=str)


def test_a_sign_of_life_is_enough() -> None:
    world = World()
    world.decode("r", A, receive_tokens=0)
    look(world, 0.0, 0.5)
    world.worker.on_engine_message(protocol.Beat())
    look(world, 1.0, 1.5, 2.5)
    assert world.news() == []


def test_an_engine_without_work_is_left_alone() -> None:
    world = World()
    assert look(world, 0.0, 1.0, 2.0, 10.0) == []
    assert world.news() == []


def test_a_new_engine_begins_without_suspicion() -> None:
    world = World()
    world.decode("r", A, receive_tokens=0)
    look(world, 0.0, 0.5, 2.0)
    world.news()
    world.worker.engine_lost("was killed")
    assert (A, "replica.hung", WORKS) in world.news()


def test_a_head_says_that_another_stage_hangs() -> None:
    world = World()
    world.worker.use(world.engine, Place(SPANNING, 0))
    assert world.worker.awaited == ()
    world.decode("r", A, receive_tokens=0)
    assert world.worker.awaited == (OTHER,)
    world.worker.peer_hung(OTHER, True)
    world.worker.peer_hung(PeerId("stranger"), True)
    assert world.news() == [(A, "replica.hung", HUNG)]
    world.worker.peer_hung(OTHER, False)
    assert world.news() == [(A, "replica.hung", WORKS)]
    for hung in (True, False):
        world.worker.stage_hung(OTHER, Role.WORKER, messages.ReplicaHung(hung=hung))
        assert world.news() == [(A, "replica.hung", messages.ReplicaHung(hung=hung))]
    world.worker.stage_hung(B, Role.WORKER, HUNG)  # it is none of this replica
    assert world.news() == []


def test_a_stage_tells_its_head_of_its_engine() -> None:
    world = World()
    world.exchange.join(OTHER)
    world.worker.use(world.engine, Place((SPANNING[1], SPANNING[0]), 1))
    world.asked()
    look(world, 0.0, 0.5, 2.0)
    assert world.news() == [(OTHER, "stage.hung", HUNG)]
    world.worker.on_engine_message(protocol.Beat())
    look(world, 2.5)
    assert world.news() == [(OTHER, "stage.hung", WORKS)]


def test_each_listener_is_told_once() -> None:
    watch = ReplicaWatch(OWN, SETTINGS)
    watch.note(OTHER, True)
    assert watch.take_news({A}) == ((A, True),)
    assert watch.take_news({A, B}) == ((B, True),)
    watch.note(OWN, True)
    watch.note(OTHER, False)
    assert watch.take_news({A}) == ()
    assert watch.is_engine_hung
    watch.note(OWN, False)
    assert watch.take_news({A}) == ((A, False), (B, False))
    assert watch.take_news({A}) == ()
