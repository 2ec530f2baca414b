"""The member table: merging is order-free, liveness follows silence, forgeries are counted."""

import random
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.bootstrap import Identity, NetworkSettings, Role, TokenError
from p2pserve.bootstrap.members.membership import Membership
from p2pserve.bootstrap.members.states import MemberState, MergeResult
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, MemberRecord, sign_entry

ME, ANN, BOB = (Identity(bytes([seed]) * 32) for seed in (1, 2, 3))


def record(role: Role = Role.WORKER, *, left: bool = False) -> bytes:
    return msgspec.msgpack.encode(MemberRecord(role, "192.0.2.1", 4001, None, left))


def said(who: Identity, kind: str, version: int, payload: bytes = b"", *, life: int = 1) -> Entry:
    return sign_entry(who, kind, life, version, payload)


def trust(peer: str, record: MemberRecord) -> None:
    """Everybody: no network key is asked."""


def table(who: Identity = ME, incarnation: int = 1) -> Membership:
    membership = Membership(who, Role.WORKER, incarnation=incarnation, check=trust, settings=NetworkSettings())
    membership.publish(MEMBER_KIND, record())
    return membership


def met(*entries: Entry, now: float = 0.0) -> Membership:
    """A table that has heard from Ann at `now`."""
    membership = table()
    membership.merge((said(ANN, MEMBER_KIND, 1, record()), *entries), now)
    membership.on_heard(ANN.peer_id, now)
    membership.tick(now)
    return membership


def state(membership: Membership, who: Identity = ANN) -> MemberState:
    return next(member.state for member in membership.members() if member.peer_id == who.peer_id)


POOL = [
    said(who, kind, version, record() if kind == MEMBER_KIND else f"{life}.{version}".encode(), life=life)
    for who in (ANN, BOB)
    for life in (1, 2)
    for kind, version in ((MEMBER_KIND, 1), ("load", 2), ("load", 3), ("plan", 4))
]


def merged(entries: Iterable[Entry]) -> dict[str, tuple[int, dict[str, int]]]:
    """The digest after the same entries came in this order, twice: what was early is understood the second time."""
    membership = table()
    entries = list(entries)
    for entry in (*entries, *entries):
        membership.merge((entry,), 0.0)
    membership.check_integrity()
    return membership.digest()


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, len(POOL)))
def test_merging_does_not_depend_on_order(rng: random.Random, count: int) -> None:
    chosen = rng.sample(POOL, count)
    shuffled = rng.sample(chosen, count)
    assert merged(chosen) == merged(shuffled)


@settings(max_examples=10, deadline=None)
@given(st.sets(st.sampled_from(range(len(POOL)))), st.sets(st.sampled_from(range(len(POOL)))))
def test_a_swap_of_deltas_makes_two_tables_agree(left: set[int], right: set[int]) -> None:
    one, other = table(), table()
    one.merge([POOL[index] for index in left], 0.0)
    other.merge([POOL[index] for index in right], 0.0)
    for_other = one.delta_for(other.digest())
    one.merge(other.delta_for(one.digest()), 0.0)
    other.merge(for_other, 0.0)
    assert one.digest() == other.digest()
    assert one.delta_for(other.digest()) == []


def test_merging_twice_changes_nothing() -> None:
    membership = table()
    assert len(membership.merge(POOL[:4], 0.0).changed) == 4
    assert membership.merge(POOL[:4], 0.0).changed == ()


def test_a_newer_life_replaces_the_older_one() -> None:
    membership = met(said(ANN, "load", 9, b"old"))
    assert membership.entries("load")[ANN.peer_id] == b"old"
    membership.merge([said(ANN, MEMBER_KIND, 1, record(), life=2)], 1.0)
    membership.on_heard(ANN.peer_id, 1.0)
    membership.tick(1.0)
    assert ANN.peer_id not in membership.entries("load")
    assert membership.merge([said(ANN, "load", 99, b"ghost", life=1)], 1.0).changed == ()


def test_an_older_life_of_our_own_is_outlived() -> None:
    membership = table(incarnation=5)
    membership.publish("load", b"new")
    result = membership.merge([said(ME, "load", 77, b"old", life=9)], 0.0)
    assert membership.incarnation == 10
    assert {entry.incarnation for entry in result.changed} == {10}
    assert membership.entries("load") == {ME.peer_id: b"new"}


FORGED = [
    msgspec.structs.replace(said(ANN, "load", 5, b"x"), payload=b"y"),
    msgspec.structs.replace(said(ANN, "load", 5, b"x"), version=6),
    msgspec.structs.replace(said(ANN, "load", 5, b"x"), kind="plan"),
    msgspec.structs.replace(said(ANN, "load", 5, b"x"), incarnation=2),
    msgspec.structs.replace(said(BOB, "load", 5, b"x"), origin=ANN.peer_id),
    msgspec.structs.replace(said(ANN, "load", 5, b"x"), signature=b""),
    said(ANN, "load", 5, b"x" * (64 * 1024 + 1)),
    said(ANN, "k" * 65, 5),
    said(ANN, "", 5),
    said(ANN, "load", 2**53 + 1),
    said(ANN, MEMBER_KIND, 5, b"no record"),
    said(ANN, MEMBER_KIND, 5, record(Role.CLIENT)),  # clients are not gossiped
]


@pytest.mark.parametrize("entry", FORGED)
def test_a_forgery_is_refused_and_counted(entry: Entry) -> None:
    membership = met()
    before = membership.digest()
    assert membership.merge([entry], 0.0) == MergeResult(forged=1)
    assert membership.digest() == before


def test_without_a_member_record_nothing_counts() -> None:
    membership = table()
    assert membership.merge([said(ANN, "load", 2, b"x")], 0.0) == MergeResult(ignored=1)
    assert membership.entries("load") == {}


def test_the_check_decides_about_records() -> None:
    def nobody(peer: str, _: MemberRecord) -> None:
        raise TokenError(f"{peer} has no token")

    membership = Membership(ME, Role.WORKER, incarnation=1, check=nobody)
    assert membership.merge([said(ANN, MEMBER_KIND, 1, record())], 0.0).forged == 1


def test_at_most_sixteen_kinds() -> None:
    membership = met(*(said(ANN, f"kind{index}", 2 + index) for index in range(20)))
    assert len(membership.digest()[ANN.peer_id][1]) == 16
    for index in range(15):
        membership.publish(f"kind{index}", b"")
    with pytest.raises(ValueError, match="at most 16"):
        membership.publish("one more", b"")


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        ("", b"", "1 to 64"),
        ("k" * 65, b"", "1 to 64"),
        ("load", bytes(65537), "at most 65536"),
        ("member", b"x", "belongs"),
    ],
)
def test_bad_publications_are_our_own_mistake(kind: str, payload: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        table().publish(kind, payload)


def test_silence_makes_suspect_then_dead_and_a_word_brings_back() -> None:
    membership = met(said(ANN, "load", 2, b"x"))
    for now, expected in ((2.9, MemberState.ALIVE), (3.0, MemberState.SUSPECT), (7.9, MemberState.SUSPECT)):
        membership.tick(now)
        assert state(membership) is expected
        assert ANN.peer_id in membership.entries("load")
    assert membership.tick(8.0).changed
    assert state(membership) is MemberState.DEAD
    assert ANN.peer_id not in membership.entries("load")
    assert ANN.peer_id in membership.highest("load"), "a tombstone is kept"
    membership.on_heard(ANN.peer_id, 9.0)
    membership.tick(9.0)
    assert state(membership) is MemberState.ALIVE


def test_a_closed_connection_and_a_failed_redial_is_death_at_once() -> None:
    membership = met()
    membership.on_connected(ANN.peer_id, 1.0)
    membership.on_disconnected(ANN.peer_id)
    membership.tick(1.1)
    assert state(membership) is MemberState.ALIVE
    membership.on_lost(ANN.peer_id, 1.2)
    membership.tick(1.2)
    assert state(membership) is MemberState.DEAD
    membership.on_vouched({ANN.peer_id: 0.5}, 1.3)  # heard at 0.8: that was before
    membership.tick(1.3)
    assert state(membership) is MemberState.DEAD
    membership.on_vouched({ANN.peer_id: 0.25}, 1.45)  # at 1.2: when it was lost
    membership.tick(1.45)
    assert state(membership) is MemberState.DEAD
    membership.on_vouched({ANN.peer_id: 0.05}, 1.5)
    membership.tick(1.5)
    assert state(membership) is MemberState.ALIVE


def test_hearsay_is_no_member_until_somebody_vouches() -> None:
    membership = table()
    membership.merge([said(ANN, MEMBER_KIND, 1, record()), said(ANN, "load", 2, b"x")], 0.0)
    membership.tick(0.0)
    assert [member.peer_id for member in membership.members()] == [ME.peer_id]
    assert membership.entries("load") == {}
    assert set(membership.dial_targets()) == {ANN.peer_id}
    membership.on_vouched({ANN.peer_id: 1.0}, 5.0)
    membership.tick(5.0)
    assert state(membership) is MemberState.ALIVE
    assert membership.vouchers(5.0) == {}, "we vouch only for whom we hear ourselves"


def test_an_age_that_is_no_number_does_not_keep_anybody_alive() -> None:
    membership = table()
    membership.merge([said(ANN, MEMBER_KIND, 1, record())], 0.0)
    membership.on_vouched({ANN.peer_id: float("nan")}, 5.0)
    membership.tick(5.0)
    membership.tick(13.0)
    assert state(membership) is MemberState.DEAD


def test_a_leave_is_signed_and_final_for_that_life() -> None:
    membership = met(said(ANN, "load", 2, b"x"), now=0.0)
    membership.merge([said(ANN, MEMBER_KIND, 3, record(left=True))], 1.0)
    membership.on_heard(ANN.peer_id, 1.0)
    membership.tick(1.0)
    assert state(membership) is MemberState.LEFT
    assert membership.entries("load") == {}
    assert membership.dial_targets() == {}


def test_pings_and_drops_and_when_to_wake() -> None:
    membership = met()
    assert membership.wake_at(0.0) == 3.0
    membership.on_connected(ANN.peer_id, 0.0)
    assert membership.wake_at(0.0) == 0.0
    assert membership.tick(0.0).ping == (ANN.peer_id,)
    assert membership.wake_at(0.0) == 1.5
    assert membership.tick(1.4).ping == ()
    assert membership.tick(1.5).ping == (ANN.peer_id,)
    step = membership.tick(8.0)
    assert (step.drop, step.ping) == ((ANN.peer_id,), ())


def test_a_peer_that_speaks_is_pinged_for_the_round_trip_only() -> None:
    near, far = sorted((ME, ANN), key=lambda each: each.peer_id)
    pinged: dict[str, list[float]] = {}
    for who, other in ((near, far), (far, near)):
        membership = table(who)
        membership.merge((said(other, MEMBER_KIND, 1, record()),), 0.0)
        membership.on_connected(other.peer_id, 0.0)
        moments = pinged[who.peer_id] = []
        for tenth in range(101):
            now = tenth / 10
            moments += [now] if membership.tick(now).ping else []
            if tenth >= 50 and tenth % 5 == 0:
                membership.on_heard(other.peer_id, now)
    assert pinged == {
        near.peer_id: [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0],
        far.peer_id: [0.0, 1.5, 3.0, 4.5, 7.0, 9.5],
    }


def test_the_dead_are_forgotten_and_not_learned_again() -> None:
    membership = met()
    membership.tick(8.0)
    assert membership.wake_at(8.0) == 608.0
    membership.tick(607.9)
    assert membership.record(ANN.peer_id) is not None
    assert membership.tick(608.0).changed
    assert membership.record(ANN.peer_id) is None
    old = said(ANN, MEMBER_KIND, 1, record())
    assert membership.merge([old], 609.0) == MergeResult(ignored=1)
    membership.admit(old, 610.0, private=False)  # but it may come back itself
    assert membership.record(ANN.peer_id) is not None


def test_a_client_is_known_only_here() -> None:
    membership = table()
    own = said(ANN, MEMBER_KIND, 1, record(Role.CLIENT))
    assert membership.merge([own, said(BOB, MEMBER_KIND, 1, record())], 0.0, from_origin=ANN.peer_id).forged == 1
    membership.on_connected(ANN.peer_id, 0.0)
    membership.tick(0.0)
    assert state(membership) is MemberState.ALIVE
    assert ANN.peer_id not in membership.digest()
    assert [entry.origin for entry in membership.delta_for({})] == [ME.peer_id]
    assert membership.dial_targets() == {}
    membership.on_disconnected(ANN.peer_id)
    assert membership.tick(8.0).changed
    assert membership.record(ANN.peer_id) is None


@pytest.mark.parametrize("kind", ["claim", "advert", "load"])
def test_a_client_says_nothing_but_its_record(kind: str) -> None:
    membership = table()
    own = said(ANN, MEMBER_KIND, 1, record(Role.CLIENT))
    assert membership.merge([own], 0.0, from_origin=ANN.peer_id).changed
    word = said(ANN, kind, 2, b"\x91\x07")
    assert membership.merge([word], 0.0, from_origin=ANN.peer_id) == MergeResult(forged=1)
    assert membership.merge([word], 0.0) == MergeResult(ignored=1), "who passes it on may have met Ann as a worker"
    membership.on_heard(ANN.peer_id, 0.0)
    membership.tick(0.0)
    assert membership.entries(kind) == membership.highest(kind) == {}


def test_one_life_is_a_client_or_a_box_and_never_both() -> None:
    client, box = said(ANN, MEMBER_KIND, 5, record(Role.CLIENT)), said(ANN, MEMBER_KIND, 6, record())
    was_client = table()
    was_client.merge([client], 0.0, from_origin=ANN.peer_id)
    assert was_client.merge([box], 0.0, from_origin=ANN.peer_id) == MergeResult(forged=1)
    assert was_client.merge([box, said(ANN, "claim", 7, b"")], 0.0) == MergeResult(ignored=2)
    was_box = met(said(ANN, "claim", 2, b"x"))
    assert was_box.merge([client], 0.0, from_origin=ANN.peer_id) == MergeResult(ignored=1)
    assert was_box.dial_targets(), "still a box"
    assert was_client.merge([said(ANN, MEMBER_KIND, 1, record(), life=2)], 0.0).changed, "the next life may be another"


def test_a_large_delta_comes_in_parts_that_make_progress() -> None:
    one, other = table(ANN), table()
    for index in range(10):
        one.publish(f"kind{index}", bytes(60_000))
    rounds = 0
    while delta := one.delta_for(other.digest(), max_bytes=200_000):
        rounds += 1
        assert rounds < 10
        assert other.merge(delta, 0.0).changed
    assert other.digest()[ANN.peer_id] == one.digest()[ANN.peer_id]


def test_a_forgotten_member_is_learned_again_by_its_next_life_or_after_as_long_again() -> None:
    for entry, now, is_learned in (
        (said(ANN, MEMBER_KIND, 1, record()), 1207.9, False),
        (said(ANN, MEMBER_KIND, 1, record()), 1208.0, True),
        (said(ANN, MEMBER_KIND, 1, record(), life=2), 609.0, True),
    ):
        membership = met()
        membership.tick(8.0)
        membership.tick(608.0)
        assert membership.record(ANN.peer_id) is None
        assert bool(membership.merge([entry], now).changed) is is_learned


@pytest.mark.parametrize("incarnation", [0, -1, 2**53 + 1])
def test_a_life_has_a_number_that_others_take(incarnation: int) -> None:
    with pytest.raises(ValueError, match=f"incarnation {incarnation} is not between"):
        table(incarnation=incarnation)
    assert table(incarnation=1).incarnation == 1
    assert table(incarnation=2**53).incarnation == 2**53


def test_an_older_moment_does_not_make_a_member_older() -> None:
    membership = met(now=5.0)
    membership.on_heard(ANN.peer_id, 2.0)
    membership.on_vouched({ANN.peer_id: 3.5}, 5.5)
    membership.tick(7.9)
    assert state(membership) is MemberState.ALIVE
    membership.tick(8.0)
    assert state(membership) is MemberState.SUSPECT


def test_nobody_can_make_this_node_dead_or_hear_itself() -> None:
    membership = table()
    for act in (membership.on_lost, membership.on_heard):
        act(ME.peer_id, 1.0)
    membership.on_vouched({ME.peer_id: 0.0, BOB.peer_id: 0.0}, 1.0)
    membership.on_heard(BOB.peer_id, 1.0)
    membership.on_lost(BOB.peer_id, 1.0)
    membership.tick(100.0)
    assert [(each.peer_id, each.state) for each in membership.members()] == [(ME.peer_id, MemberState.ALIVE)]
    membership.check_integrity()


def test_addresses_are_told_last_heard_first_and_without_those_who_cannot_be_dialled() -> None:
    membership = met(now=1.0)
    membership.merge((said(BOB, MEMBER_KIND, 1, record()),), 2.0)
    assert [each.peer_id for each in membership.addresses()] == [ANN.peer_id], "of Bob there is only hearsay"
    membership.on_vouched({BOB.peer_id: 0.0}, 2.0)
    assert [each.peer_id for each in membership.addresses()] == [BOB.peer_id, ANN.peer_id]
    membership.merge((said(BOB, MEMBER_KIND, 2, record(left=True)),), 3.0)
    assert [each.peer_id for each in membership.addresses()] == [ANN.peer_id]
    portless = msgspec.msgpack.encode(MemberRecord(Role.WORKER, "192.0.2.1", 0, None))
    membership.merge((said(ANN, MEMBER_KIND, 2, portless),), 3.0)
    assert membership.addresses() == ()


def test_a_table_shows_how_many_are_in_which_state() -> None:
    assert repr(met()).endswith("alive=2)")
