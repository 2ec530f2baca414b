"""What a node makes of news: of orders, liars and epochs that others have not heard of, and of what clients say."""

import logging

import msgspec
import pytest

from p2pserve.bootstrap import Identity, MemberState, Role
from p2pserve.bootstrap.members.election import CLAIM_KIND, MAX_CLAIM, encode_claim
from p2pserve.bootstrap.members.peering import Peering
from p2pserve.bootstrap.members.states import Compare, Holding, NetworkState, Part, Summary, Tell
from p2pserve.bootstrap.members.table import MAX_LIES, MAX_ORIGINS
from p2pserve.bootstrap.trust.entries import MAX_PAYLOAD, MAX_RECORD, Lie
from p2pserve.bootstrap.trust.kept_file import MAX_BYTES
from p2pserve.bootstrap.trust.orders import MAX_ORDERS_BYTES, Orders, sign_orders

from ..certificates import KEY, TOKENS, record, word
from .test_peering import ANN, BOB, CAT, ME, SETTINGS, open_session, peering, state_of, tell, tick

ORDERS = sign_orders(KEY, Orders(5, (TOKENS[Role.WORKER, False].grant.certificate,)))
LIE = Lie(word(CAT, "load", b"a"), word(CAT, "load", b"b"))
SOON = float("-inf")


def settled(role: Role = Role.WORKER) -> Peering:
    """A node with a session, that has nothing to do just now."""
    machine = peering(role)
    open_session(machine, ANN, 0.0)
    tell(machine, ANN, complete=True)
    for tenth in range(15):
        tick(machine, tenth / 10, ANN)
    return machine


def answers(machine: Peering, theirs: Holding, now: float = 2.0) -> list[Tell]:
    """What it tells a peer that holds the same, and is so far."""
    machine.on_received(ANN.peer_id, Summary(machine.table.summary(), theirs), now)
    return [message for _, message in tick(machine, now, ANN).send if isinstance(message, Tell)]


# -- what a peer lacks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "is_told"), [(0, True), (4, True), (5, False), (6, False)])
def test_a_peer_is_told_of_orders_that_are_news_to_it(number: int, is_told: bool) -> None:
    machine = settled()
    machine.order(ORDERS)
    tick(machine, 1.5, ANN)
    told = answers(machine, Holding(orders=number, epoch=1))
    assert (ORDERS in [message.orders for message in told]) is is_told


def test_where_there_are_no_orders_none_are_told() -> None:
    assert all(message.orders is None for message in answers(settled(), Holding(epoch=1)))


@pytest.mark.parametrize(("count", "told"), [(0, (LIE,)), (1, ())])
def test_a_peer_is_told_of_liars_of_which_it_knows_fewer(count: int, told: tuple[Lie, ...]) -> None:
    machine = settled()
    machine.on_received(ANN.peer_id, Tell(lies=(LIE,)), 1.5)
    tick(machine, 1.5, ANN)
    found = answers(machine, Holding(lies=count, epoch=1))
    assert [message.lies for message in found] == [told]


@pytest.mark.parametrize(("epoch", "is_told"), [(0, True), (6, True), (7, False)])
def test_a_peer_is_told_of_a_higher_epoch(epoch: int, is_told: bool) -> None:
    machine = settled()
    tell(machine, ANN, word(ANN, CLAIM_KIND, encode_claim(7)), now=1.5)
    tick(machine, 1.5, ANN)
    found = answers(machine, Holding(epoch=epoch))
    assert [message.latest is not None for message in found] == [is_told]


def test_only_those_that_are_connected_are_answered_and_asking_is_no_offence() -> None:
    machine = settled()
    for message in (Summary(bytes(512)), Compare({}, b""), Part(), Tell((word(BOB, "load", b"a"),))):
        assert machine.on_received(BOB.peer_id, message, 1.5) == 0
    assert all(peer != BOB.peer_id for peer, _ in tick(machine, 1.5, ANN).send)
    for message in (Summary(bytes(512)), Compare({}, b""), Part()):
        assert machine.on_received(ANN.peer_id, message, 1.5) == 0


def test_of_many_liars_a_few_are_told_at_a_time_and_all_in_the_end() -> None:
    machine = settled()
    people = [Identity(bytes([number]) * 32) for number in range(100, 120)]
    lies = {Lie(word(who, "load", b"a"), word(who, "load", b"b")) for who in people}
    machine.on_received(ANN.peer_id, Tell(lies=tuple(lies)), 1.5)
    tick(machine, 1.5, ANN)
    told = [[lie for each in answers(machine, Holding(epoch=1), 2.0 + at) for lie in each.lies] for at in range(30)]
    assert {len(each) for each in told} == {8}
    assert {lie for each in told for lie in each} == lies


def test_who_passes_on_forged_proofs_is_blamed() -> None:
    machine = settled()
    forged = Lie(LIE.one, msgspec.structs.replace(LIE.other, payload=b"c"))
    assert machine.on_received(ANN.peer_id, Tell(lies=(forged,)), 1.5) == 1
    assert machine.forged == 1
    assert machine.on_received(ANN.peer_id, Tell(lies=(LIE,)), 1.5) == 0


def test_orders_and_epochs_that_come_over_and_over_are_looked_at_now_and_then() -> None:
    machine = settled()
    forged = msgspec.structs.replace(ORDERS, signature=bytes(64))
    for _ in range(SETTINGS.answers_burst):
        assert machine.on_received(ANN.peer_id, Tell(orders=forged), 1.5) == 0
    machine.on_received(ANN.peer_id, Tell(orders=ORDERS), 1.5)
    assert machine.state().orders is None
    machine.on_received(ANN.peer_id, Tell(orders=ORDERS), 1.5 + 1 / SETTINGS.answers_s)
    assert machine.state().orders == ORDERS


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_kept_fits_its_file_whatever_members_say() -> None:
    machine = settled()
    tell(machine, ANN, word(ANN, CLAIM_KIND, encode_claim(7)))
    assert {entry.kind for entry in machine.state().entries if entry.origin == ANN.peer_id} == {"member", CLAIM_KIND}
    tell(machine, ANN, word(ANN, CLAIM_KIND, encode_claim(8) + bytes(MAX_CLAIM), version=3))
    assert {entry.kind for entry in machine.state().entries if entry.origin == ANN.peer_id} == {"member"}
    signed = 256  # bytes of an entry beside its payload
    of_members = MAX_ORIGINS * (MAX_RECORD + MAX_CLAIM + 2 * signed)
    assert of_members + MAX_LIES * 2 * (MAX_PAYLOAD + signed) + MAX_ORDERS_BYTES < MAX_BYTES


# -- clients ----------------------------------------------------------------------------------------------------------


def test_what_a_client_passes_on_does_not_count() -> None:
    machine = peering(named=(ANN,))
    open_session(machine, BOB, 0.0, role=Role.CLIENT)
    machine.on_received(BOB.peer_id, Tell(lies=(LIE,), orders=ORDERS, complete=True), 0.0)
    tick(machine, 0.0, BOB)
    assert machine.state().orders is None
    assert machine.table.lies == {}
    assert not machine.is_synced


def test_a_client_asks_every_member_and_tells_nothing_of_others() -> None:
    machine = peering(Role.CLIENT)
    for who in (ANN, BOB):  # of a lower, and of a higher peer id than its own
        open_session(machine, who, 0.0)
    sent = tick(machine, 0.0, ANN, BOB).send
    assert {peer for peer, message in sent if isinstance(message, Summary)} == {ANN.peer_id, BOB.peer_id}
    tell(machine, ANN, record(CAT))
    machine.on_received(BOB.peer_id, Compare({}, bytes(range(64)), asks_back=True), 0.1)
    sent = tick(machine, 0.1, ANN, BOB).send
    assert [entry for _, message in sent if isinstance(message, Tell) for entry in message.entries] == []
    assert [peer for peer, message in sent if isinstance(message, Compare)] == [BOB.peer_id]


def test_of_two_boxes_the_lower_peer_id_asks() -> None:
    machine = peering()
    for who in (ANN, BOB):
        open_session(machine, who, 0.0)
    sent = machine.tick(0.0, {}, {}).send
    asked = [peer for peer, message in sent if isinstance(message, Summary)]
    assert ANN.peer_id < ME.peer_id < BOB.peer_id
    assert asked.count(BOB.peer_id) >= 1


# -- joining ----------------------------------------------------------------------------------------------------------


def leads_at(machine: Peering, until: float) -> float | None:
    for tenth in range(int(until * 10)):
        tick(machine, tenth / 10, ANN, BOB)
        if machine.coordinator is not None:
            return tenth / 10
    return None


def test_how_long_a_node_waits_to_hear_all_counts_from_the_first_that_lets_it_in() -> None:
    machine = peering(named=(ANN,))
    open_session(machine, ANN, 0.0, lead=False)
    for tenth in range(10):
        tick(machine, tenth / 10, ANN)
    open_session(machine, BOB, 1.0, lead=False)
    found = leads_at(machine, 20.0)
    assert found is not None
    assert found == pytest.approx(SETTINGS.sync_s + SETTINGS.settle_s, abs=0.5)


def test_a_client_that_comes_lets_nobody_in() -> None:
    machine = peering(named=(ANN,))
    open_session(machine, BOB, 0.0, role=Role.CLIENT)
    assert leads_at(machine, 3 * SETTINGS.sync_s) is None


def test_an_epoch_that_was_kept_counts_and_nothing_kept_is_nothing() -> None:
    before = settled()
    tell(before, ANN, word(ANN, CLAIM_KIND, encode_claim(7)), now=1.5)
    after = peering()
    after.restore(NetworkState(latest=before.state().latest), 0.0)
    tick(after, 0.0)
    assert after.coordinator == (ME.peer_id, 8)
    fresh = peering()
    assert (fresh.epoch, fresh.coordinator) == (0, None)
    fresh.restore(NetworkState(), 0.0)
    tick(fresh, 0.0)
    assert fresh.coordinator == (ME.peer_id, 1)


# -- when it looks ----------------------------------------------------------------------------------------------------


def test_it_looks_at_once_at_what_others_read() -> None:
    machine = settled()
    assert 1.4 < machine.next_at() < 10.0
    machine.publish("load", b"1")
    assert machine.next_at() == SOON
    assert tick(machine, 1.5, ANN).changed
    assert machine.next_at() > 1.5
    machine.order(ORDERS)
    assert machine.next_at() == SOON
    assert tick(machine, 1.6, ANN).changed
    machine.order(ORDERS)  # which are no news any more
    assert machine.next_at() > 1.6
    machine.on_closed(ANN.peer_id, 1.7)
    assert machine.next_at() == SOON
    assert tick(machine, 1.7).changed


def test_a_session_that_both_ends_have_given_up_ends_without_a_death() -> None:
    machine = settled()
    machine.on_received(ANN.peer_id, Part(), 1.5)
    machine.on_closed(ANN.peer_id, 1.6)
    assert machine.next_at() == SOON
    assert tick(machine, 1.6).changed
    assert machine.liveness.redialled == frozenset()


def test_a_dial_that_succeeded_leaves_the_chance_to_be_heard() -> None:
    machine = settled()
    machine.on_closed(ANN.peer_id, 1.5)
    tick(machine, 1.5)
    machine.on_dialled(ANN.peer_id, True, 1.6)
    tick(machine, 1.6)
    assert state_of(machine, ANN, 1.6) is MemberState.SUSPECT


def test_that_it_got_no_time_is_said_only_when_that_is_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="p2pserve"):
        machine = settled()
        assert "got no time" not in caplog.text
        tick(machine, 60.0, ANN)
    assert "got no time for" in caplog.text


# -- what is passed on, and said --------------------------------------------------------------------------------------


def test_a_proof_goes_to_all_but_who_brought_it() -> None:
    machine = peering()
    for who in (ANN, BOB):
        open_session(machine, who, 0.0)
    tick(machine, 0.0, ANN, BOB)
    machine.on_received(BOB.peer_id, Tell(lies=(LIE,)), 0.1)
    sent = tick(machine, 0.1, ANN, BOB).send
    assert [peer for peer, message in sent if isinstance(message, Tell) and message.lies] == [ANN.peer_id]


def test_of_a_client_nobody_is_told() -> None:
    machine = settled()
    open_session(machine, BOB, 1.5, role=Role.CLIENT)
    told = [m for now in (1.5, 2.0, 3.0) for _, m in tick(machine, now, ANN, BOB).send if isinstance(m, Tell)]
    assert BOB.peer_id not in {entry.origin for message in told for entry in message.entries}


def test_who_leaves_says_nothing_more_of_itself() -> None:
    machine = settled()
    machine.is_leaving = True
    tick(machine, 1.5, ANN)
    told = [m for now in range(2, 60) for _, m in tick(machine, float(now), ANN).send if isinstance(m, Tell)]
    assert [entry for message in told for entry in message.entries] == []


def test_a_node_has_waited_long_enough_at_that_moment() -> None:
    for early_s, is_synced in ((0.001, False), (0.0, True)):
        machine = peering(named=(ANN,))
        open_session(machine, ANN, 0.0)
        tick(machine, 0.0, ANN)
        tick(machine, SETTINGS.sync_s - early_s, ANN)
        assert machine.is_synced is is_synced


def test_who_leads_is_said_when_that_changes_and_claims_but_not_refreshings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="p2pserve"):
        settled()
    said = [record.getMessage() for record in caplog.records]
    assert said.count(f"coordinator is now ({ME.peer_id!r}, 1)") == 1
    assert len([line for line in said if line.startswith("coordinator")]) == 1
    assert [line for line in said if "of epoch" in line] == ["claim of epoch 1"]
