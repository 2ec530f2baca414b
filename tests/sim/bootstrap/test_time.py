"""Boxes that stop for long and go on, and clocks that jump: a network takes them back, and nobody else is harmed."""

import itertools
from collections.abc import Callable

import pytest

from p2pserve.bootstrap import Address, Bootstrap, MemberState, PeerId
from p2pserve.bootstrap.dev.simulation import SimulatedNode, Simulation, identity_of

DAY_S = 86_400.0
COUNT = 5
NAMES = tuple(str(number) for number in range(1, COUNT + 1))


def place(name: str) -> Address:
    return Address("192.0.2.1", 4000 + int(name))


def start(sim: Simulation, name: str, *, wall_s: float = 0.0) -> SimulatedNode:
    """As after `join`: it asks the others by their addresses."""
    named = [Bootstrap(place(n).host, place(n).port, identity_of(int(n)).peer_id) for n in NAMES if n != name]
    first = not sim.running()
    return sim.add(name, identity_of(int(name)), place(name), named=() if first else named, wall_s=wall_s)


@pytest.fixture
def sim() -> Simulation:
    """Five nodes that have been one network for a while."""
    found = Simulation()
    for name in NAMES:
        start(found, name)
        found.run(1.0)
    found.run(20.0)
    check_whole(found)
    return found


def leaders(sim: Simulation, *without: str) -> set[tuple[PeerId, int] | None]:
    return {node.peering.coordinator for node in sim.running() if node.name not in without}


def states(sim: Simulation, *without: str) -> set[MemberState]:
    """How those that are left see each other."""
    nodes = [node for node in sim.running() if node.name not in without]
    return {
        one.peering.roster.state_of(other.peer, sim.time_of(one)) for one, other in itertools.permutations(nodes, 2)
    }


def check_whole(sim: Simulation) -> None:
    assert states(sim) == {MemberState.ALIVE}
    assert len(leaders(sim)) == 1
    assert None not in leaders(sim)


def named_leader(sim: Simulation) -> str:
    (leader,) = leaders(sim)
    assert leader is not None
    return next(node.name for node in sim.running() if node.peer == leader[0])


STOPS: dict[str, Callable[[Simulation, str, float], None]] = {
    "stopped": lambda sim, name, seconds: sim.pause(name, seconds),
    "suspended": lambda sim, name, seconds: sim.suspend(name, seconds),
}


@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "other"])
@pytest.mark.parametrize("seconds", [2.0, 300.0, 700.0])
@pytest.mark.parametrize("how", STOPS)
def test_a_node_that_stood_still_is_taken_back_and_harms_nobody(
    sim: Simulation, how: str, seconds: float, is_leader: bool
) -> None:
    leader = named_leader(sim)
    away = leader if is_leader else next(name for name in NAMES if name != leader)
    STOPS[how](sim, away, seconds)
    sim.run(seconds - 0.01)
    if seconds > 60.0:
        assert states(sim, away) == {MemberState.ALIVE}
        assert len(leaders(sim, away)) == 1
    (leading,) = leaders(sim, away)
    assert leading is not None
    seen: set[MemberState] = set()
    for _ in range(100):
        sim.run(0.05)
        seen |= states(sim, away)
        assert leaders(sim, away) == {leading}  # nobody who comes back displaces who leads meanwhile
    assert seen == {MemberState.ALIVE}
    check_whole(sim)
    sim.run(60.0)
    check_whole(sim)
    assert leaders(sim) == {leading}


@pytest.mark.parametrize("how", STOPS)
def test_when_all_stand_still_at_once_they_go_on_as_before(sim: Simulation, how: str) -> None:
    """As when the machine is suspended that they all run on."""
    before = leaders(sim)
    for name in NAMES:
        STOPS[how](sim, name, 3600.0)
    sim.run(3600.0 + 5.0)
    check_whole(sim)
    assert leaders(sim) == before


@pytest.mark.parametrize("days", [-1.0, 1.0])
def test_a_node_that_starts_again_with_a_wrong_clock_comes_in_and_counts(sim: Simulation, days: float) -> None:
    for wall_s in (days * DAY_S, 0.0):  # and once more when somebody has set it right
        sim.kill("3")
        sim.run(5.0)
        assert states(sim) == {MemberState.ALIVE}
        node = start(sim, "3", wall_s=wall_s)
        sim.run(5.0)
        check_whole(sim)
        node.peering.publish("advert", b"%d" % node.born)
        sim.run(10.0)
        for other in sim.running():
            entry = other.peering.table.entry(node.peer, "advert")
            assert entry is not None
            assert entry.payload == b"%d" % node.born  # what it says now counts, not what it said with the later clock


@pytest.mark.parametrize("days", [-1.0, 1.0])
def test_a_network_whose_clocks_are_days_apart_is_one(days: float) -> None:
    sim = Simulation()
    for name in NAMES:
        start(sim, name, wall_s=days * DAY_S * int(name))
        sim.run(1.0)
    sim.run(20.0)
    check_whole(sim)
