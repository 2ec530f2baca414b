"""With whom a node keeps sessions, in small and in large networks."""

import random

import pytest

from p2pserve.bootstrap import Address, Bootstrap, Identity, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.members.liveness import Liveness
from p2pserve.bootstrap.members.neighbours import Contacts, Neighbours
from p2pserve.bootstrap.members.overlay import choose_neighbours
from p2pserve.bootstrap.members.roster import Roster
from p2pserve.bootstrap.members.table import Table
from p2pserve.bootstrap.trust.entries import MEMBER_KIND

from ..certificates import PEOPLE, admission, payload, place, record

ME, *OTHERS = PEOPLE
NEVER = float("inf")
SMALL = NetworkSettings(full_mesh=16)
LARGE = NetworkSettings(full_mesh=3, strange_dials_s=1000.0, strange_dials_burst=1000)


def bootstrap(who: Identity) -> Bootstrap:
    return Bootstrap(place(who).host, place(who).port, who.peer_id)


def peers(people: list[Identity]) -> set[PeerId]:
    return {who.peer_id for who in people}


class World:
    """One node that has been told of others, of whom some are alive."""

    def __init__(
        self,
        settings: NetworkSettings,
        known: list[Identity],
        *,
        living: list[Identity] | None = None,
        named: tuple[Bootstrap, ...] = (),
        standby: tuple[Bootstrap, ...] = (),
        keeps_one: bool = False,
        closed: tuple[Identity, ...] = (),
    ) -> None:
        self.table = Table(ME, admission(), incarnation=1, settings=settings)
        role = Role.CLIENT if keeps_one else Role.WORKER
        self.table.publish(MEMBER_KIND, payload(ME, role, closed=ME in closed))
        self.table.merge([record(who, closed=who in closed) for who in known], 0.0)
        self.liveness = Liveness(ME.peer_id, settings)
        for who in known if living is None else living:
            self.liveness.on_opened(who.peer_id, 0.0, counts=True)
        self.liveness.update(0.0, 1000.0)
        roster = Roster(self.table, self.liveness, settings)
        contacts = Contacts(named=named, standby=standby)
        rng = random.Random(0)
        self.neighbours = Neighbours(roster, self.liveness, contacts, settings, rng, keeps_one=keeps_one)
        self.neighbours.choose(0.0)

    def dialled(self, *connected: Identity, now: float = 100.0) -> set[PeerId]:
        """Whom it dials within a moment; none of them answers."""
        found: set[PeerId] = set()
        at_hand = peers(list(connected))
        for moment in (now, now + 2.0):  # the higher peer id waits for some 1.5 s
            for dial in self.neighbours.take_dials(at_hand, moment):
                found.add(dial.peer)
                self.neighbours.on_dialled(dial.peer, False, moment)
        return found


# -- whom it dials ----------------------------------------------------------------------------------------------------


def test_in_a_small_network_everybody_is_dialled_dead_or_alive() -> None:
    world = World(SMALL, OTHERS[:5], living=OTHERS[:2])
    assert world.dialled(OTHERS[0]) == peers(OTHERS[1:5])
    assert world.neighbours.retry_at == NEVER


def test_who_cannot_be_dialled_dials_and_two_of_them_look_for_each_other() -> None:
    closed = (OTHERS[0], OTHERS[1])
    assert World(SMALL, OTHERS[:4], closed=closed).dialled() == peers(OTHERS[2:4])
    assert World(SMALL, OTHERS[:4], closed=(ME, *closed)).dialled() == peers(OTHERS[:4])
    assert World(SMALL, OTHERS[:4], closed=closed, named=(bootstrap(OTHERS[0]),)).dialled() >= {OTHERS[0].peer_id}


def test_in_a_large_network_neighbours_are_dialled() -> None:
    world = World(LARGE, OTHERS)
    expected = choose_neighbours(ME.peer_id, peers(OTHERS), full_mesh=3)
    assert world.dialled() == expected
    assert len(expected) < len(OTHERS)


@pytest.mark.parametrize(("count", "is_full"), [(2, True), (3, False)])
def test_from_so_many_others_on_a_network_is_large(count: int, is_full: bool) -> None:
    world = World(LARGE, OTHERS[:count], living=[])
    assert (world.neighbours.retry_at == NEVER) is is_full


def test_of_those_gone_one_after_the_other_is_tried_in_a_large_network() -> None:
    gone = OTHERS[6:]
    world = World(LARGE, OTHERS, living=OTHERS[:6])
    neighbours = choose_neighbours(ME.peer_id, peers(OTHERS[:6]), full_mesh=3)
    tried = set()
    for turn in range(30):
        world.neighbours.choose(turn * 10.0)
        assert world.neighbours.retry_at == turn * 10.0 + LARGE.retry_gone_s
        extra = world.dialled(now=turn * 10.0) - neighbours
        assert len(extra) == 1
        tried |= extra
    assert tried == peers(gone)


def test_where_nobody_is_alive_all_are_chosen_from() -> None:
    world = World(LARGE, OTHERS, living=[])
    assert world.dialled() >= choose_neighbours(ME.peer_id, peers(OTHERS), full_mesh=3)


def test_whose_session_has_just_closed_is_dialled_neighbour_or_not() -> None:
    stranger = next(w for w in OTHERS if w.peer_id not in choose_neighbours(ME.peer_id, peers(OTHERS), full_mesh=3))
    world = World(LARGE, OTHERS)
    world.liveness.on_closed(stranger.peer_id, 0.1, redialled=True)
    world.neighbours.choose(0.1)
    assert stranger.peer_id in world.dialled()


def test_remembered_members_are_dialled_while_nobody_is_connected() -> None:
    world = World(SMALL, [], standby=(bootstrap(OTHERS[0]),))
    assert world.neighbours.knows_others
    assert not world.neighbours.is_invited
    assert world.dialled(OTHERS[1]) == set()
    assert world.dialled() == {OTHERS[0].peer_id}


def test_named_members_are_dialled_whoever_is_connected() -> None:
    world = World(SMALL, [], named=(bootstrap(OTHERS[0]), Bootstrap("192.0.2.9", 9, None)))
    assert world.neighbours.knows_others
    assert world.neighbours.is_invited
    assert world.dialled(OTHERS[1]) == {OTHERS[0].peer_id}
    assert not World(SMALL, OTHERS).neighbours.knows_others


def test_a_named_address_wins_over_the_announced_one() -> None:
    named = Bootstrap("198.51.100.7", 7, OTHERS[0].peer_id)
    world = World(SMALL, OTHERS[:1], named=(named,))
    assert [dial.address for dial in world.neighbours.take_dials((), 0.0)] == [Address("198.51.100.7", 7)]
    later = Address("198.51.100.8", 8)
    world.neighbours.on_named(OTHERS[0].peer_id, later)
    world.neighbours.on_dialled(OTHERS[0].peer_id, False, 0.0)
    assert [dial.address for dial in world.neighbours.take_dials((), 100.0)] == [later]


def test_in_a_large_network_a_named_member_is_dialled_only_when_it_is_gone() -> None:
    named = next(w for w in OTHERS if w.peer_id not in choose_neighbours(ME.peer_id, peers(OTHERS), full_mesh=3))
    assert named.peer_id not in World(LARGE, OTHERS, named=(bootstrap(named),)).dialled()
    others = [who for who in OTHERS if who is not named]
    assert named.peer_id in World(LARGE, others, named=(bootstrap(named),)).dialled()
    assert named.peer_id in World(LARGE, OTHERS[:3], living=OTHERS[:2], named=(bootstrap(named),)).dialled()


def test_a_client_keeps_one_session_and_looks_for_another_when_it_has_none() -> None:
    world = World(SMALL, OTHERS[:4], keeps_one=True)
    assert world.dialled(OTHERS[0]) == set()
    assert world.dialled() == peers(OTHERS[:4])


def test_when_the_next_dial_is_due_or_somebody_gone_is_to_be_tried() -> None:
    world = World(LARGE, OTHERS, living=OTHERS[:6])
    assert world.neighbours.wake_at(peers(OTHERS)) == LARGE.retry_gone_s
    small = World(SMALL, OTHERS[:2])
    assert small.neighbours.wake_at(()) == NEVER  # until it is asked for dials, it knows of none
    for dial in small.neighbours.take_dials((), 0.0):
        small.neighbours.on_dialled(dial.peer, False, 0.0)
    assert 0.0 < small.neighbours.wake_at(()) < NEVER
    assert small.neighbours.wake_at(peers(OTHERS[:2])) == NEVER


# -- which sessions it closes -----------------------------------------------------------------------------------------


def parted(world: World, used: dict[PeerId, float], now: float) -> set[PeerId]:
    return set(world.neighbours.choose_parted(peers(OTHERS), used, now))


def spare() -> set[PeerId]:
    """Those of all sessions that neither end needs."""
    everybody = peers(PEOPLE)
    mine = choose_neighbours(ME.peer_id, everybody, full_mesh=3)
    return {p for p in peers(OTHERS) - mine if ME.peer_id not in choose_neighbours(p, everybody, full_mesh=3)}


def test_sessions_that_neither_end_needs_are_closed_when_they_are_not_used() -> None:
    assert spare()
    part_s = LARGE.part_s
    world = World(LARGE, OTHERS)
    used = dict.fromkeys(peers(OTHERS), 0.0)
    assert parted(world, used, part_s - 0.1) == set()
    world = World(LARGE, OTHERS)
    assert parted(world, used, part_s) == spare()


def test_a_session_that_was_used_lately_or_never_stays() -> None:
    world, part_s = World(LARGE, OTHERS), LARGE.part_s
    busy, unknown, *rest = sorted(spare())
    used = dict.fromkeys(rest, 0.0) | {busy: 1.0}
    assert parted(world, used, part_s) == set(rest)
    assert unknown not in parted(world, used, 3 * part_s)


def test_it_looks_four_times_in_that_while() -> None:
    world, part_s = World(LARGE, OTHERS), LARGE.part_s
    used = dict.fromkeys(peers(OTHERS), 0.0)
    now = 10 * part_s
    assert parted(world, used, now) == spare()
    assert parted(world, used, now + part_s / 4 - 0.1) == set()
    assert parted(world, used, now + part_s / 4) == spare()


@pytest.mark.parametrize(("living", "closes"), [(2, False), (3, True)])
def test_in_a_small_network_no_session_is_closed(living: int, closes: bool) -> None:
    world = World(LARGE, OTHERS, living=OTHERS[:living])
    found = parted(world, dict.fromkeys(peers(OTHERS), 0.0), 10 * LARGE.part_s)
    assert bool(found) is closes


def test_a_client_closes_none() -> None:
    world = World(LARGE, OTHERS, keeps_one=True)
    assert parted(world, dict.fromkeys(peers(OTHERS), 0.0), 10 * LARGE.part_s) == set()


# -- who is whose neighbour --------------------------------------------------------------------------------------------

FULL = 16


def network(size: int, seed: int = 0) -> list[PeerId]:
    rng = random.Random(seed)
    return [PeerId(f"12D3KooW{rng.getrandbits(128):032x}") for _ in range(size)]


def sessions(members: list[PeerId]) -> dict[PeerId, set[PeerId]]:
    """Who is connected with whom when everybody has dialled."""
    graph: dict[PeerId, set[PeerId]] = {peer: set() for peer in members}
    for peer in members:
        for other in choose_neighbours(peer, members, full_mesh=FULL):
            graph[peer].add(other)
            graph[other].add(peer)
    return graph


def hops(graph: dict[PeerId, set[PeerId]], start: PeerId) -> dict[PeerId, int]:
    found, edge = {start: 0}, [start]
    for peer in edge:
        for other in graph[peer] - found.keys():
            found[other] = found[peer] + 1
            edge.append(other)
    return found


@pytest.mark.parametrize("size", [1, 2, 15, 16])
def test_a_small_network_is_a_full_mesh(size: int) -> None:
    members = network(size)
    for peer in members:
        assert choose_neighbours(peer, members, full_mesh=FULL) == set(members) - {peer}
    assert choose_neighbours(PeerId("new"), members[: FULL - 1], full_mesh=FULL) == set(members[: FULL - 1])


@pytest.mark.parametrize(("size", "dialled", "far"), [(17, 6, 2), (30, 7, 3), (200, 10, 4), (1000, 12, 5)])
def test_a_large_one_has_few_sessions_and_short_ways(size: int, dialled: int, far: int) -> None:
    members = network(size)
    graph = sessions(members)
    assert max(len(choose_neighbours(peer, members, full_mesh=FULL)) for peer in members) <= dialled
    for start in members[:5]:
        distances = hops(graph, start)
        assert len(distances) == size
        assert max(distances.values()) <= far


@pytest.mark.parametrize("size", [30, 300])
def test_it_holds_together_when_a_third_of_the_members_die_at_once(size: int) -> None:
    members = network(size)
    graph = sessions(members)
    for seed in range(20):
        living = set(random.Random(seed).sample(members, size * 2 // 3))
        left = {peer: graph[peer] & living for peer in living}
        assert len(hops(left, next(iter(living)))) == len(living)


def test_a_member_that_comes_changes_few_neighbours_of_others() -> None:
    members = network(300)
    before = {peer: choose_neighbours(peer, members, full_mesh=FULL) for peer in members}
    after = {peer: choose_neighbours(peer, [*members, PeerId("new")], full_mesh=FULL) for peer in members}
    assert sum(before[peer] != after[peer] for peer in members) <= 40
