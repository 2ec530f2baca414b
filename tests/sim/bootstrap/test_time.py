"""Boxes that stop for long and go on, and clocks that jump: a network takes them back, and nobody else is harmed."""

import itertools
from collections.abc import Callable

import pytest

from p2pserve.bootstrap import Address, Bootstrap, JoinToken, MemberState, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.dev.simulation import EPOCH_S, SimulatedNode, Simulation, identity_of
from p2pserve.bootstrap.members.liveness import Liveness

DAY_S = 86_400.0
COUNT = 5
NAMES = tuple(str(number) for number in range(1, COUNT + 1))


def place(name: str) -> Address:
    return Address("192.0.2.1", 4000 + int(name))


def bootstrap(name: str) -> Bootstrap:
    return Bootstrap(place(name).host, place(name).port, identity_of(int(name)).peer_id)


def start(sim: Simulation, name: str, *, wall_s: float = 0.0, token: JoinToken | None = None) -> SimulatedNode:
    """As after `join`: it asks the others by their addresses."""
    named = [bootstrap(n) for n in NAMES if n != name] if sim.running() else []
    return sim.add(name, identity_of(int(name)), place(name), named=named, wall_s=wall_s, token=token)


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


# -- wall clocks that jump, and certificates that end -----------------------------------------------------------------


def expiring(sim: Simulation, seconds: float, *, uses: int = COUNT) -> JoinToken:
    """One with which boxes may join for so long from now."""
    return JoinToken.parse(sim.key.issue((), Role.WORKER, EPOCH_S + sim.now + seconds, lead=True, uses=uses))


@pytest.mark.parametrize("days", [-1.0, 1.0])
@pytest.mark.parametrize("names", [NAMES[:1], NAMES[2:4], NAMES], ids=len)
def test_wall_clocks_that_jump_change_nothing_in_a_running_network(
    sim: Simulation, names: tuple[str, ...], days: float
) -> None:
    before = leaders(sim)
    for jump_s in (days * DAY_S, -days * DAY_S):
        for name in names:
            sim.nodes[name].wall_s += jump_s
        for _ in range(60):
            sim.run(0.5)
            assert states(sim) == {MemberState.ALIVE}
            assert leaders(sim) == before


@pytest.mark.parametrize("days", [-1.0, 1.0])
def test_a_node_whose_clock_jumped_gets_in_again_after_its_connections_were_lost(sim: Simulation, days: float) -> None:
    sim.nodes["3"].wall_s += days * DAY_S
    sim.split(["3"], [name for name in NAMES if name != "3"])
    sim.run(30.0)
    sim.heal()
    sim.run(8.0)
    check_whole(sim)


def test_a_newcomer_is_let_in_until_its_certificate_ends_and_not_a_moment_longer(sim: Simulation) -> None:
    token = expiring(sim, 10.0)
    sim.run(9.8)
    assert start(sim, "6", token=token).is_running
    sim.run(0.5)
    late = start(sim, "7", token=token)
    sim.run(2.0)
    assert sim.nodes["6"].is_joined
    assert not late.is_running
    check_whole(sim)


@pytest.mark.parametrize(("ahead_s", "is_let_in"), [(-DAY_S, True), (DAY_S, False)])
def test_each_box_judges_a_certificate_by_its_own_clock(sim: Simulation, ahead_s: float, is_let_in: bool) -> None:
    token = expiring(sim, -60.0 if is_let_in else 3600.0)
    sim.nodes["1"].wall_s += ahead_s
    newcomer = sim.add("6", identity_of(6), place("6"), named=(bootstrap("1"),), token=token)
    sim.run(3.0)
    assert newcomer.is_running is is_let_in
    if is_let_in:
        sim.run(10.0)
        assert "6" in {node.name for node in sim.running()}
    else:
        assert start(sim, "6", token=token).is_running  # another box's clock is right
        sim.run(8.0)
        check_whole(sim)


@pytest.mark.parametrize("away_s", [5.0, 60.0, 700.0])
@pytest.mark.parametrize("how", STOPS)
def test_who_joined_in_time_comes_back_although_its_certificate_ended_meanwhile(how: str, away_s: float) -> None:
    sim = Simulation()
    token = expiring(sim, 30.0)
    for name in NAMES:
        start(sim, name, token=token)
        sim.run(1.0)
    sim.run(20.0)
    check_whole(sim)
    STOPS[how](sim, "3", away_s)
    sim.run(away_s + 10.0)
    check_whole(sim)
    sim.run(60.0)
    check_whole(sim)


def test_signs_of_life_that_a_node_has_missed_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody passes on what is not urgent: those without a session hear each other's signs of life by asking alone."""
    gone = 0
    update = Liveness.update

    def watch(self: Liveness, now: float, beat_s: float) -> bool:
        nonlocal gone
        before = self.living
        changed = update(self, now, beat_s)
        gone += len(before - self.living)
        return changed

    monkeypatch.setattr(Liveness, "update", watch)
    sim = Simulation(settings=NetworkSettings(full_mesh=6, rumour_peers=0))
    nodes = sim.found(32)
    sim.run(100.0)
    assert any(len(node.peering.liveness.watched) < len(nodes) - 1 for node in nodes)
    assert gone == 0
