"""What a node does about its peers: who is dialled, pinged, hung up on and told what, and who coordinates."""

import itertools
import random

import pytest

from p2pserve.bootstrap import Address, Bootstrap, Identity, MemberState, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.members.liveness import HEARS_KIND, encode_heard
from p2pserve.bootstrap.members.mesh import Dial
from p2pserve.bootstrap.members.neighbours import Contacts
from p2pserve.bootstrap.members.peering import Actions, Peering
from p2pserve.bootstrap.members.states import Compare, Holding, Summary, Tell
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry
from p2pserve.bootstrap.trust.orders import Orders, sign_orders

from ..certificates import KEY, PEOPLE, TOKENS, admission, payload, place, record, word

ANN, ME, BOB, CAT = PEOPLE[:4]
SETTINGS = NetworkSettings()


def bootstraps(*people: Identity) -> tuple[Bootstrap, ...]:
    return tuple(Bootstrap(place(each).host, place(each).port, each.peer_id) for each in people)


def peering(
    role: Role = Role.WORKER,
    *,
    named: tuple[Identity, ...] = (),
    standby: tuple[Identity, ...] = (),
    lead: bool = True,
) -> Peering:
    machine = Peering(
        ME,
        role,
        incarnation=1,
        admission=admission(),
        settings=SETTINGS,
        rng=random.Random(0),
        contacts=Contacts(named=bootstraps(*named), standby=bootstraps(*standby)),
    )
    machine.publish(MEMBER_KIND, payload(ME, role, lead=lead))
    return machine


def tick(machine: Peering, now: float, *heard: Identity) -> Actions:
    return machine.tick(now, {each.peer_id: now for each in heard}, {})


def open_session(machine: Peering, who: Identity, now: float, *, role: Role = Role.WORKER, lead: bool = True) -> None:
    machine.on_opened(who.peer_id, record(who, role, lead=lead), now)


def tell(machine: Peering, sender: Identity, *entries: Entry, now: float = 0.0, complete: bool = False) -> int:
    return machine.on_received(sender.peer_id, Tell(entries, complete=complete), now)


def dialled(actions: Actions) -> set[PeerId]:
    return {dial.peer for dial in actions.dial}


def told(actions: Actions) -> dict[PeerId, set[str]]:
    """The kinds that each peer is told of."""
    found: dict[PeerId, set[str]] = {}
    for peer, message in actions.send:
        if isinstance(message, Tell):
            found.setdefault(peer, set()).update(entry.kind for entry in message.entries)
    return found


def leader(machine: Peering) -> tuple[PeerId, int] | None:
    return machine.coordinator


def state_of(machine: Peering, who: Identity, now: float) -> MemberState:
    return machine.roster.state_of(who.peer_id, now)


# -- leading ---------------------------------------------------------------------------------------------------------


def test_who_starts_a_network_leads_it_at_once() -> None:
    machine = peering()
    assert tick(machine, 0.0).changed
    assert machine.coordinator == (ME.peer_id, 1)
    assert not tick(machine, 0.1).changed


@pytest.mark.parametrize(("role", "lead"), [(Role.CLIENT, False), (Role.WORKER, False)])
def test_who_may_not_lead_does_not(role: Role, lead: bool) -> None:
    machine = peering(role, lead=lead)
    for now in range(10):
        tick(machine, float(now))
    assert machine.coordinator is None


def test_who_was_named_somebody_claims_nothing_before_it_has_heard_all() -> None:
    machine = peering(named=(ANN,))
    open_session(machine, ANN, 0.0, lead=False)
    for now in range(4):
        tick(machine, float(now), ANN)
        assert machine.coordinator is None
    tell(machine, ANN, complete=True, now=4.0)
    tick(machine, 4.0, ANN)
    tick(machine, 4.0 + SETTINGS.settle_s + 0.01, ANN)
    assert machine.coordinator == (ME.peer_id, 1)


def test_who_was_let_in_by_one_that_went_away_leads_after_a_while() -> None:
    machine = peering(named=(ANN,))
    open_session(machine, ANN, 0.0)
    machine.on_closed(ANN.peer_id, 0.1)
    for now in range(12):
        machine.on_dialled(ANN.peer_id, False, float(now))
        tick(machine, float(now))
    assert machine.coordinator == (ME.peer_id, 1)


def test_who_remembers_others_looks_for_them_before_it_leads_alone() -> None:
    machine = peering(standby=(ANN,))
    moments = []
    for tenth in range(60):
        tick(machine, tenth / 10)
        if leader(machine) is not None:
            moments.append(tenth / 10)
    assert moments[0] == pytest.approx(SETTINGS.found_s, abs=0.11)


def test_a_claim_without_the_right_to_lead_is_not_followed() -> None:
    machine = peering(lead=False)
    open_session(machine, ANN, 0.0, lead=False)
    open_session(machine, BOB, 0.0)
    tell(machine, ANN, word(ANN, CLAIM_KIND, encode_claim(7)))
    tick(machine, 0.0, ANN, BOB)
    assert machine.coordinator is None
    tell(machine, BOB, word(BOB, CLAIM_KIND, encode_claim(3)))
    tick(machine, 0.1, ANN, BOB)
    assert machine.coordinator == (BOB.peer_id, 3)


def test_a_leader_that_leaves_is_replaced() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tell(machine, ANN, word(ANN, CLAIM_KIND, encode_claim(7)))
    assert tick(machine, 0.0, ANN).changed
    assert leader(machine) == (ANN.peer_id, 7)
    tell(machine, ANN, record(ANN, version=3, left=True), now=1.0)
    tick(machine, 1.0, ANN)
    assert leader(machine) is None
    tick(machine, 1.0 + SETTINGS.settle_s, ANN)
    assert leader(machine) == (ME.peer_id, 8)


def test_a_leader_that_most_refuse_is_passed_over_and_one_that_few_refuse_is_not() -> None:
    machine = peering()
    for who in (ANN, BOB, CAT):
        open_session(machine, who, 0.0)
    tell(machine, ANN, word(ANN, CLAIM_KIND, encode_claim(7)))
    tick(machine, 0.0, ANN, BOB, CAT)
    machine.object_to(ANN.peer_id, 7)
    tick(machine, 0.1, ANN, BOB, CAT)
    assert leader(machine) == (ANN.peer_id, 7), "one of three others"
    other = peering()
    other.object_to(ANN.peer_id, 7)
    objection = next(entry for entry in other.table.own_entries() if entry.kind == "objection").payload
    tell(machine, BOB, word(BOB, "objection", objection, version=4), now=0.2)
    tick(machine, 0.2, ANN, BOB, CAT)
    assert leader(machine) is None


def test_proof_of_a_higher_epoch_is_believed_although_its_author_is_gone() -> None:
    first = peering()
    open_session(first, ANN, 0.0)
    tell(first, ANN, word(ANN, CLAIM_KIND, encode_claim(7)))
    tick(first, 0.0, ANN)
    open_session(first, BOB, 0.0)
    first.on_received(BOB.peer_id, Summary(first.table.summary()), 0.0)
    (proof,) = [m.latest for _, m in tick(first, 0.1, ANN, BOB).send if isinstance(m, Tell) and m.latest is not None]
    second = peering()
    tick(second, 0.0)
    assert leader(second) == (ME.peer_id, 1)
    open_session(second, BOB, 1.0)
    second.on_received(BOB.peer_id, Tell(latest=proof), 1.0)
    tick(second, 1.0, BOB)
    assert leader(second) == (ME.peer_id, 8)


# -- dialling --------------------------------------------------------------------------------------------------------


def test_who_leaves_claims_nothing_and_dials_nobody() -> None:
    machine = peering(named=(BOB,))
    machine.is_leaving = True
    for now in (0.0, 1.0, 50.0):
        assert tick(machine, now).dial == ()
    assert machine.coordinator is None


def test_named_members_are_dialled_at_once_at_the_address_that_was_given() -> None:
    machine = peering(named=(ANN, BOB))
    assert set(tick(machine, 0.0).dial) == {Dial(each.peer_id, place(each)) for each in (ANN, BOB)}
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
    machine.on_closed(ANN.peer_id, 1.0)
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
    tell(machine, ANN, record(BOB))
    assert dialled(tick(machine, 0.0, ANN)) == expected
    machine.on_closed(ANN.peer_id, 1.0)
    assert dialled(tick(machine, 1.0)) == {ANN.peer_id, BOB.peer_id} - expected


# -- who is alive ----------------------------------------------------------------------------------------------------


def test_a_broken_connection_and_nobody_at_the_address_is_a_death() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    machine.on_closed(ANN.peer_id, 1.0)
    assert dialled(tick(machine, 1.0)) == {ANN.peer_id}, "whoever notices dials at once"
    assert state_of(machine, ANN, 1.0) is MemberState.SUSPECT
    machine.on_dialled(ANN.peer_id, False, 1.1)
    assert tick(machine, 1.1).changed
    assert state_of(machine, ANN, 1.1) is MemberState.DEAD


def test_a_failed_dial_to_one_that_others_hear_says_nothing_of_its_life() -> None:
    machine = peering()
    open_session(machine, BOB, 0.0)
    tell(machine, BOB, record(ANN), word(BOB, HEARS_KIND, encode_heard((ANN.peer_id, ME.peer_id))))
    tick(machine, 0.0, BOB)
    machine.on_dialled(ANN.peer_id, False, 0.1)
    tick(machine, 0.1, BOB)
    assert state_of(machine, ANN, 0.1) is MemberState.ALIVE


def test_a_failed_dial_of_one_that_has_dialled_us_meanwhile_is_no_death() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    machine.on_closed(ANN.peer_id, 1.0)
    tick(machine, 1.0)
    open_session(machine, ANN, 1.05)
    machine.on_dialled(ANN.peer_id, False, 1.1)
    tick(machine, 1.1, ANN)
    assert state_of(machine, ANN, 1.1) is MemberState.ALIVE


def test_a_client_whose_connection_closes_is_gone() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0, role=Role.CLIENT)
    tick(machine, 0.0, ANN)
    assert state_of(machine, ANN, 0.0) is MemberState.ALIVE
    machine.on_closed(ANN.peer_id, 1.0)
    assert tick(machine, 1.0).dial == ()
    assert machine.table.record(ANN.peer_id) is None


def test_one_that_says_nothing_is_pinged_and_hung_up_on_after_eight_seconds() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    assert tick(machine, 0.0).ping == (ANN.peer_id,)
    for tenth in range(1, 80):
        assert tick(machine, tenth / 10).drop == ()
    assert tick(machine, 8.0).drop == (ANN.peer_id,)
    machine.on_closed(ANN.peer_id, 8.0)
    tick(machine, 9.1)
    assert state_of(machine, ANN, 9.1) is MemberState.DEAD


def test_a_node_that_got_no_time_hangs_up_on_nobody() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    assert tick(machine, 30.0).drop == ()


def test_members_that_nobody_hears_leave_no_trace() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tell(machine, ANN, record(BOB), record(CAT))
    for second in range(12):
        tick(machine, float(second), ANN)
    assert set(machine.table.origins()) == {ME.peer_id, ANN.peer_id}
    tell(machine, ANN, record(BOB), now=12.0)
    assert BOB.peer_id not in machine.table.origins(), "and are not learned again at once"


# -- telling ---------------------------------------------------------------------------------------------------------


def test_who_comes_is_told_what_this_node_says_and_everybody_that_it_is_heard() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    open_session(machine, BOB, 1.0)
    first, second = tick(machine, 1.0, ANN, BOB), tick(machine, 1.5, ANN, BOB)
    assert MEMBER_KIND in told(first)[BOB.peer_id]
    kinds = [each for actions in (first, second) for each in told(actions).get(ANN.peer_id, ())]
    assert HEARS_KIND in kinds


def test_a_client_tells_its_record_alone() -> None:
    machine = peering(Role.CLIENT)
    open_session(machine, ANN, 0.0)
    machine.publish("load", b"1")
    kinds = [kind for now in range(20) for kinds in told(tick(machine, float(now), ANN)).values() for kind in kinds]
    assert set(kinds) == {MEMBER_KIND}


@pytest.mark.parametrize(("role", "is_told"), [(Role.CLIENT, False), (Role.WORKER, True)])
def test_a_client_passes_nothing_on(role: Role, is_told: bool) -> None:
    machine = peering(role)
    for who in (ANN, BOB):
        open_session(machine, who, 0.0)
    tick(machine, 0.0, ANN, BOB)
    tell(machine, ANN, record(CAT), word(CAT, "advert", b"x"))  # BOB does not say that it hears CAT
    assert ("advert" in told(tick(machine, 1.0, ANN, BOB)).get(BOB.peer_id, set())) is is_told


def test_forgeries_are_counted_for_whoever_sent_them() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0, role=Role.CLIENT)
    assert tell(machine, ANN, word(ANN, "load", b"a"), record(BOB)) == 2
    assert machine.forged == 2


def test_what_a_client_asks_is_answered_and_nothing_is_asked_of_it() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0, role=Role.CLIENT)
    assert [type(m) for _, m in tick(machine, 0.0, ANN).send if isinstance(m, Summary)] == []
    machine.on_received(ANN.peer_id, Summary(bytes(512)), 0.1)
    (answer,) = [m for _, m in tick(machine, 0.1, ANN).send if isinstance(m, Compare)]
    machine.on_received(ANN.peer_id, Compare({}, answer.buckets), 0.2)
    assert MEMBER_KIND in told(tick(machine, 0.2, ANN))[ANN.peer_id]


def test_whoever_asks_too_often_is_not_answered() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    for _ in range(50):
        machine.on_received(ANN.peer_id, Summary(bytes(512)), 0.1)
    answers = [m for _, m in tick(machine, 0.1, ANN).send if isinstance(m, Compare)]
    assert len(answers) == SETTINGS.answers_burst


def test_the_same_is_answered_by_nothing_but_that_it_is_complete() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0)
    tick(machine, 0.0, ANN)
    tick(machine, 0.05, ANN)
    machine.on_received(ANN.peer_id, Summary(machine.table.summary(), Holding(epoch=1)), 0.1)
    assert [m for _, m in tick(machine, 0.1, ANN).send if isinstance(m, Tell) and m.complete] == [Tell(complete=True)]


def test_a_liar_is_hung_up_on_and_the_others_are_told() -> None:
    machine = peering()
    for who in (ANN, BOB):
        open_session(machine, who, 0.0)
    tell(machine, ANN, word(ANN, "load", b"a"))
    tick(machine, 0.0, ANN, BOB)
    tell(machine, BOB, word(ANN, "load", b"b"), now=0.1)
    actions = tick(machine, 0.1, ANN, BOB)
    assert actions.drop == (ANN.peer_id,)
    assert machine.table.record(ANN.peer_id) is None


def test_who_was_revoked_is_hung_up_on_and_the_order_passed_on() -> None:
    machine = peering()
    open_session(machine, ANN, 0.0, lead=False)
    open_session(machine, BOB, 0.0)
    tick(machine, 0.0, ANN, BOB)
    orders = sign_orders(KEY, Orders(5, (TOKENS[Role.WORKER, False].grant.certificate,)))
    machine.on_received(BOB.peer_id, Tell(orders=orders), 0.1)
    actions = tick(machine, 0.1, ANN, BOB)
    assert actions.drop == (ANN.peer_id,)
    assert [peer for peer, m in actions.send if isinstance(m, Tell) and m.orders == orders] == [
        ANN.peer_id,
        BOB.peer_id,
    ]


def test_what_is_kept_is_taken_up_by_the_next_run() -> None:
    before = peering()
    open_session(before, ANN, 0.0)
    tell(before, ANN, word(ANN, CLAIM_KIND, encode_claim(7)))
    tick(before, 0.0, ANN)
    after = peering()
    after.restore(before.state(), 0.0)
    assert dialled(tick(after, 0.0)) == {ANN.peer_id}
    assert after.coordinator is None, "it looks for the others first"
    after.on_dialled(ANN.peer_id, False, 0.1)
    tick(after, SETTINGS.found_s + 0.1)
    assert after.coordinator == (ME.peer_id, 8)


def test_it_shows_itself() -> None:
    assert "connected=0, coordinator=None" in repr(peering())
