"""What a node does about its peers: who is dialled, pinged, hung up on, and who coordinates."""

import itertools
import random

import msgspec
import pytest

from p2pserve.bootstrap import Address, Bootstrap, Identity, MemberState, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.members.mesh import Dial
from p2pserve.bootstrap.members.peering import Actions, Peering
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, MemberRecord, sign_entry

# In the order of their peer ids: the lowest claims, and dials first.
ANN, ME, BOB = sorted((Identity(bytes([seed]) * 32) for seed in (1, 2, 3)), key=lambda each: each.peer_id)
SETTINGS = NetworkSettings()
AT = {each.peer_id: Address("192.0.2.1", 4000 + index) for index, each in enumerate((ANN, ME, BOB))}


def record(who: Identity, *, role: Role = Role.WORKER, life: int = 1, version: int = 1, left: bool = False) -> Entry:
    at = AT[who.peer_id]
    payload = msgspec.msgpack.encode(MemberRecord(role, at.host, at.port, None, left))
    return sign_entry(who, MEMBER_KIND, life, version, payload)


def trust_everybody(peer: str, _: MemberRecord) -> None:
    """Nobody is refused."""


def peering(
    role: Role = Role.WORKER, *, named: tuple[Identity, ...] = (), standby: tuple[Identity, ...] = ()
) -> Peering:
    machine = Peering(
        ME,
        role,
        incarnation=1,
        check=trust_everybody,
        settings=SETTINGS,
        rng=random.Random(0),
        named=[Bootstrap(AT[each.peer_id].host, AT[each.peer_id].port, each.peer_id) for each in named],
        standby=[Bootstrap(AT[each.peer_id].host, AT[each.peer_id].port, each.peer_id) for each in standby],
    )
    at = AT[ME.peer_id]
    machine.membership.publish(MEMBER_KIND, msgspec.msgpack.encode(MemberRecord(role, at.host, at.port, None)))
    return machine


def open_session(machine: Peering, who: Identity, now: float, *, role: Role = Role.WORKER) -> None:
    machine.membership.admit(record(who, role=role), now, private=role is Role.CLIENT)
    machine.membership.on_connected(who.peer_id, now)
    machine.on_opened(who.peer_id)


def close_session(machine: Peering, who: Identity, now: float) -> None:
    machine.membership.on_disconnected(who.peer_id)
    machine.on_closed(who.peer_id, now)


def tick(machine: Peering, now: float, *heard: Identity) -> Actions:
    return machine.tick(now, {each.peer_id: now for each in heard})


def dialled(actions: Actions) -> set[PeerId]:
    return {dial.peer for dial in actions.dial}


def leader(machine: Peering) -> tuple[PeerId, int] | None:
    return machine.coordinator


def state_of(machine: Peering, who: Identity) -> MemberState:
    return {member.peer_id: member.state for member in machine.membership.members()}[who.peer_id]


def test_alone_it_claims_once_it_has_settled_and_sleeps_from_then_on() -> None:
    machine = peering()
    assert tick(machine, 0.0).wake_at == 1.0
    assert machine.coordinator is None
    claim = tick(machine, 1.0)
    assert machine.coordinator == (ME.peer_id, 1)
    assert [entry.kind for entry in claim.push] == ["claim"]
    assert claim.changed
    again = tick(machine, 1.0)
    assert (again.push, again.changed, again.wake_at) == ((), False, float("inf"))


def test_a_client_never_claims() -> None:
    machine = peering(Role.CLIENT)
    tick(machine, 0.0)
    assert tick(machine, 100.0).push == ()
    assert machine.coordinator is None


def test_who_leaves_claims_nothing_and_dials_nobody() -> None:
    machine = peering(named=(BOB,))
    machine.is_leaving = True
    for now in (0.0, 1.0, 50.0):
        actions = tick(machine, now)
        assert (actions.push, actions.dial) == ((), ())


def test_named_members_are_dialled_at_once_at_the_address_that_was_given() -> None:
    machine = peering(named=(ANN, BOB))
    assert set(tick(machine, 0.0).dial) == {Dial(each.peer_id, AT[each.peer_id]) for each in (ANN, BOB)}
    machine.on_dialled(ANN.peer_id, False, 0.1)
    machine.on_dialled(BOB.peer_id, True, 0.1)
    open_session(machine, BOB, 0.1)
    assert tick(machine, 0.1, BOB).dial == ()


def test_a_named_member_that_is_away_is_tried_every_two_seconds_or_so_for_ever() -> None:
    machine = peering(named=(BOB,))
    moments = []
    for tenth in range(1200):
        now = tenth / 10
        if dialled(tick(machine, now)):
            machine.on_dialled(BOB.peer_id, False, now)
            moments.append(now)
    waits = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert max(waits) <= SETTINGS.named_backoff_s * 1.25 + 0.1
    assert min(waits[5:]) >= SETTINGS.named_backoff_s * 0.75
    assert moments[-1] > 110.0


def test_somebody_who_turns_out_to_be_named_counts_as_named() -> None:
    machine = peering()
    machine.on_named(ANN.peer_id, Address("198.51.100.1", 9))
    assert tick(machine, 0.0).dial == (Dial(ANN.peer_id, Address("198.51.100.1", 9)),)
    open_session(machine, ANN, 0.0)
    close_session(machine, ANN, 1.0)
    machine.on_dialled(ANN.peer_id, True, 1.0)
    # It announces another address; the one that is known to work from here stays.
    assert tick(machine, 1.0).dial == (Dial(ANN.peer_id, Address("198.51.100.1", 9)),)


def test_remembered_members_are_dialled_while_nobody_is_connected() -> None:
    machine = peering(standby=(ANN, BOB))
    assert dialled(tick(machine, 0.0)) == {ANN.peer_id, BOB.peer_id}
    open_session(machine, BOB, 0.1)
    machine.on_dialled(BOB.peer_id, True, 0.1)
    machine.on_dialled(ANN.peer_id, False, 0.1)
    assert tick(machine, 60.0, BOB).dial == ()


@pytest.mark.parametrize(("role", "expected"), [(Role.WORKER, {BOB.peer_id}), (Role.CLIENT, set())])
def test_a_member_reaches_for_everybody_and_a_client_for_one(role: Role, expected: set[PeerId]) -> None:
    machine = peering(role)
    open_session(machine, ANN, 0.0)
    machine.membership.merge((record(BOB),), 0.0)
    assert dialled(tick(machine, 0.0, ANN)) == expected
    close_session(machine, ANN, 1.0)
    assert dialled(tick(machine, 1.0)) == {ANN.peer_id, BOB.peer_id} - expected


def test_a_broken_connection_and_nobody_at_the_address_is_a_death() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    close_session(machine, ANN, 1.0)
    assert dialled(tick(machine, 1.0)) == {ANN.peer_id}, "whoever notices dials at once"
    assert state_of(machine, ANN) is MemberState.ALIVE
    machine.on_dialled(ANN.peer_id, False, 1.1)
    assert tick(machine, 1.1).changed
    assert state_of(machine, ANN) is MemberState.DEAD


def test_a_failed_dial_to_one_that_was_never_connected_says_nothing_of_its_life() -> None:
    machine = peering()
    open_session(machine, BOB, 0.0)
    machine.membership.merge((record(ANN),), 0.0)
    machine.membership.on_vouched({ANN.peer_id: 0.0}, 0.0)
    tick(machine, 0.0, BOB)
    machine.on_dialled(ANN.peer_id, False, 0.1)
    tick(machine, 0.1, BOB)
    assert state_of(machine, ANN) is MemberState.ALIVE


def test_a_failed_dial_of_one_that_has_dialled_us_meanwhile_is_no_death() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    close_session(machine, ANN, 1.0)
    tick(machine, 1.0)
    open_session(machine, ANN, 1.05)
    machine.on_dialled(ANN.peer_id, False, 1.1)
    tick(machine, 1.1, ANN)
    assert state_of(machine, ANN) is MemberState.ALIVE


def test_a_client_whose_connection_closes_is_gone() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0, role=Role.CLIENT)
    tick(machine, 0.0, ANN)
    assert state_of(machine, ANN) is MemberState.ALIVE
    close_session(machine, ANN, 1.0)
    actions = tick(machine, 1.0)
    assert actions.dial == ()
    assert ANN.peer_id not in {member.peer_id for member in machine.membership.members()}


def test_one_that_says_nothing_is_pinged_and_hung_up_on_after_eight_seconds() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    assert tick(machine, 0.0).ping == (ANN.peer_id,)
    assert tick(machine, 7.9).drop == ()
    actions = tick(machine, 8.0)
    assert actions.drop == (ANN.peer_id,)
    assert state_of(machine, ANN) is MemberState.DEAD


def test_what_was_heard_keeps_a_peer_alive() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    for now in range(0, 60, 2):
        assert tick(machine, float(now), ANN).drop == ()
    assert state_of(machine, ANN) is MemberState.ALIVE


def test_a_leader_that_leaves_is_replaced_by_the_lowest_that_stays() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    machine.membership.merge((sign_entry(ANN, "claim", 1, 2, msgspec.msgpack.encode([7])),), 0.0)
    assert tick(machine, 0.0, ANN).changed
    assert leader(machine) == (ANN.peer_id, 7)
    machine.membership.merge((record(ANN, version=3, left=True),), 2.0)
    assert tick(machine, 2.0, ANN).wake_at <= 3.0
    assert leader(machine) is None
    tick(machine, 3.0, ANN)
    assert leader(machine) == (ME.peer_id, 8)
    assert machine.epoch == 8


def test_it_shows_itself() -> None:
    assert "connected=0, coordinator=None" in repr(peering())
