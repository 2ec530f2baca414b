"""Who is a member, in which state, and who is forgotten when."""

import pytest

from p2pserve.bootstrap import Bootstrap, Identity, MemberState, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.members.liveness import Liveness
from p2pserve.bootstrap.members.roster import Roster
from p2pserve.bootstrap.members.table import Table
from p2pserve.bootstrap.trust.entries import MEMBER_KIND

from ..certificates import PEOPLE, admission, payload, place, record, word

ME, ANN, BOB, CAT, DAN = PEOPLE[:5]
SETTINGS = NetworkSettings()
FORGET_S, ORPHAN_S, SUSPECT_S = SETTINGS.forget_s, SETTINGS.orphan_s, SETTINGS.suspect_s


class World:
    """One node's table, sessions and roster."""

    def __init__(self, role: Role = Role.WORKER) -> None:
        self.table = Table(ME, admission(), incarnation=1, settings=SETTINGS)
        self.table.publish(MEMBER_KIND, payload(ME, role))
        self.liveness = Liveness(ME.peer_id, SETTINGS)
        self.roster = Roster(self.table, self.liveness, SETTINGS)

    def told_of(self, *people: Identity, left: bool = False, life: int = 1) -> "World":
        self.table.merge([record(who, left=left, life=life) for who in people], 0.0)
        return self

    def open(self, *people: Identity, role: Role = Role.WORKER, now: float = 0.0) -> "World":
        is_box = role is not Role.CLIENT
        for who in people:
            self.table.admit(record(who, role), now, private=not is_box)
            self.liveness.on_opened(who.peer_id, now, counts=is_box)
        self.roster.look(now)
        return self

    def close(self, who: Identity, now: float) -> None:
        """It was heard until now, and nobody answers at its address."""
        self.liveness.on_heard(who.peer_id, now)
        self.liveness.on_closed(who.peer_id, now, redialled=False)
        self.roster.look(now)

    def forgotten(self, now: float, *, has_changed: bool = False) -> tuple[PeerId, ...]:
        return self.roster.find_forgotten(now, has_changed=has_changed)

    def shown(self, now: float = 0.0) -> dict[PeerId, MemberState]:
        return {each.peer_id: each.state for each in self.roster.members(lambda peer: None, now)}


# -- states -----------------------------------------------------------------------------------------------------------


def test_a_node_itself_is_here_and_shown() -> None:
    world = World()
    assert world.roster.is_here(ME.peer_id)
    assert world.shown() == {ME.peer_id: MemberState.ALIVE}
    assert world.roster.find_boxes() == {ME.peer_id}


def test_states_of_members() -> None:
    world = World().open(ANN, BOB, CAT).told_of(DAN)
    world.liveness.on_heard(ANN.peer_id, SUSPECT_S)
    world.close(CAT, SUSPECT_S - 0.1)
    world.table.merge((record(BOB, version=9, left=True),), 0.0)
    world.roster.look(SUSPECT_S)
    states = {who: world.roster.state_of(who.peer_id, SUSPECT_S) for who in (ANN, BOB, CAT, DAN)}
    assert states == {ANN: MemberState.ALIVE, BOB: MemberState.LEFT, CAT: MemberState.DEAD, DAN: MemberState.DEAD}
    assert world.roster.state_of(PeerId("nobody"), 0.0) is MemberState.DEAD
    world.open(DAN, now=SUSPECT_S)
    assert world.roster.state_of(DAN.peer_id, 2 * SUSPECT_S - 0.01) is MemberState.ALIVE
    assert world.roster.state_of(DAN.peer_id, 2 * SUSPECT_S) is MemberState.SUSPECT


def test_who_is_alive_without_a_record_is_not_here() -> None:
    world = World()
    world.liveness.on_opened(ANN.peer_id, 0.0, counts=True)
    world.roster.look(0.0)
    assert not world.roster.is_here(ANN.peer_id)
    assert world.roster.state_of(ANN.peer_id, 0.0) is MemberState.DEAD


def test_who_has_left_is_not_here_though_it_is_heard() -> None:
    world = World().open(ANN)
    world.table.merge((record(ANN, version=9, left=True),), 0.0)
    assert not world.roster.is_here(ANN.peer_id)
    assert world.roster.find_boxes() == {ME.peer_id}


def test_looking_says_whether_others_live_and_whether_others_are_suspect() -> None:
    world = World()
    world.liveness.on_opened(ANN.peer_id, 0.0, counts=True)
    world.table.merge((record(ANN),), 0.0)
    assert world.roster.look(0.0) == (True, False)
    assert world.roster.look(0.1) == (False, False)
    assert world.roster.look(SUSPECT_S) == (False, True)
    assert world.roster.suspects == {ANN.peer_id}
    assert world.roster.look(SUSPECT_S + 0.1) == (False, False)
    world.liveness.on_heard(ANN.peer_id, SUSPECT_S)
    assert world.roster.look(SUSPECT_S + 0.2) == (False, False)
    assert world.roster.suspects == frozenset()


def test_clients_are_no_boxes_and_cannot_be_dialled() -> None:
    world = World().open(ANN).open(BOB, role=Role.CLIENT)
    assert world.roster.is_here(BOB.peer_id)
    assert world.roster.find_boxes() == {ME.peer_id, ANN.peer_id}
    assert world.roster.address_of(BOB.peer_id) is None
    assert World(Role.CLIENT).roster.find_boxes() == set()


def test_where_others_can_be_dialled() -> None:
    world = World().open(ANN).told_of(BOB).told_of(CAT, left=True)
    assert world.roster.find_addresses() == {ANN.peer_id: place(ANN), BOB.peer_id: place(BOB)}
    assert world.roster.address_of(CAT.peer_id) is None
    assert world.roster.address_of(DAN.peer_id) is None
    assert world.roster.address_of(ME.peer_id) == place(ME)


def test_members_are_told_more_seldom_in_a_large_network() -> None:
    settings = NetworkSettings(beat_s=1.0, beat_each_s=0.5)
    table = Table(ME, admission(), incarnation=1, settings=settings)
    table.publish(MEMBER_KIND, payload(ME))
    roster = Roster(table, Liveness(ME.peer_id, settings), settings)
    table.merge([record(ANN)], 0.0)
    assert roster.beat_s() == 1.0
    table.merge([record(who) for who in PEOPLE[1:5]], 0.0)
    assert roster.beat_s() == 2.5


# -- who is shown -----------------------------------------------------------------------------------------------------


def test_who_was_never_alive_is_not_shown_unless_it_says_that_it_left() -> None:
    world = World().open(ANN).told_of(BOB).told_of(CAT, left=True)
    world.forgotten(0.0)
    shown = world.shown()
    assert shown == {ME.peer_id: MemberState.ALIVE, ANN.peer_id: MemberState.ALIVE, CAT.peer_id: MemberState.LEFT}


def test_what_is_shown_of_a_member() -> None:
    world = World()
    world.table.merge((record(ANN, life=7, lead=False),), 0.0)
    world.roster.note_lived((ANN.peer_id,))
    assert world.roster.has_lived(ANN.peer_id)
    assert not world.roster.has_lived(BOB.peer_id)
    found = {each.peer_id: each for each in world.roster.members({ANN.peer_id: 0.5}.get, 0.0)}
    ann = found[ANN.peer_id]
    assert (ann.role, ann.state, ann.address, ann.incarnation) == (Role.WORKER, MemberState.DEAD, place(ANN), 7)
    assert (ann.may_lead, ann.rtt_s) == (False, 0.5)
    assert (found[ME.peer_id].may_lead, found[ME.peer_id].rtt_s) == (True, None)
    assert list(found) == sorted(found)


def test_what_the_living_say() -> None:
    world = World().open(ANN).told_of(BOB)
    world.table.merge((word(ANN, "load", b"a"), word(BOB, "load", b"b")), 0.0)
    world.table.publish("load", b"me")
    assert world.roster.entries("load") == {ANN.peer_id: b"a", ME.peer_id: b"me"}
    assert world.roster.entries("other") == {}


def test_addresses_to_remember_are_of_those_that_lived_the_last_heard_first() -> None:
    world = World().open(ANN).open(BOB, now=5.0).open(CAT, role=Role.CLIENT, now=6.0).told_of(DAN)
    world.forgotten(6.0)
    expected = [Bootstrap(place(who).host, place(who).port, who.peer_id) for who in (BOB, ANN)]
    assert list(world.roster.addresses()) == expected


# -- forgetting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_lived", "kept_s"), [(True, FORGET_S), (False, ORPHAN_S)])
def test_who_is_gone_is_forgotten_after_a_while_and_who_never_was_soon(has_lived: bool, kept_s: float) -> None:
    world = World().told_of(ANN)
    if has_lived:
        world.roster.note_lived((ANN.peer_id,))
    assert world.forgotten(10.0) == ()
    assert world.forgotten(10.0 + kept_s - 0.1, has_changed=True) == ()
    assert world.forgotten(10.0 + kept_s, has_changed=True) == (ANN.peer_id,)


def test_who_comes_back_is_gone_anew_when_it_goes_again() -> None:
    world = World().open(ANN)
    world.close(ANN, 10.0)
    assert world.forgotten(10.0, has_changed=True) == ()
    world.open(ANN, now=300.0)
    assert world.forgotten(300.0, has_changed=True) == ()
    world.close(ANN, 500.0)
    assert world.forgotten(500.0, has_changed=True) == ()
    assert world.forgotten(499.9 + FORGET_S, has_changed=True) == ()
    assert world.forgotten(500.0 + FORGET_S, has_changed=True) == (ANN.peer_id,)


def test_it_looks_once_a_second_or_when_somebody_has_come_or_gone() -> None:
    world = World().told_of(ANN)
    world.forgotten(0.0)
    world.forgotten(ORPHAN_S - 0.5)
    assert world.forgotten(ORPHAN_S + 0.4) == ()
    assert world.forgotten(ORPHAN_S + 0.5) == (ANN.peer_id,)
    assert world.forgotten(ORPHAN_S + 0.6, has_changed=True) == (ANN.peer_id,)  # until `forget` is said


@pytest.mark.parametrize(("has_lived", "kept_s"), [(True, FORGET_S), (False, ORPHAN_S)])
def test_nothing_is_left_of_who_is_forgotten_and_its_life_is_not_learned_again_for_a_while(
    has_lived: bool, kept_s: float
) -> None:
    world = World().told_of(ANN)
    if has_lived:
        world.roster.note_lived((ANN.peer_id,))
    world.roster.forget(ANN.peer_id, 10.0)
    assert not world.roster.has_lived(ANN.peer_id)
    assert len(world.table) == 1
    world.table.merge((record(ANN),), 9.9 + kept_s)
    assert len(world.table) == 1
    world.table.merge((record(ANN),), 10.0 + kept_s)
    assert len(world.table) == 2


def test_a_new_life_is_learned_at_once() -> None:
    world = World().told_of(ANN)
    world.roster.forget(ANN.peer_id, 10.0)
    world.told_of(ANN, life=2)
    assert len(world.table) == 2
