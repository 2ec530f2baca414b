"""What one member can make all others hold, to the last byte; and what is kept apart: lives, clients and boxes."""

import msgspec
import pytest

from p2pserve.bootstrap import Identity, JoinToken, Role
from p2pserve.bootstrap.members.allowance import Allowance
from p2pserve.bootstrap.members.states import EntryRules, MergeResult
from p2pserve.bootstrap.members.table import BEAT_KIND, BUCKETS, MAX_ORIGIN_BYTES, MAX_ORIGINS, Table
from p2pserve.bootstrap.trust.entries import MAX_PAYLOAD, MEMBER_KIND, Entry, Lie, MemberRecord, sign_entry

from ..certificates import KEY, PEOPLE, admission, payload, record, word
from .test_table import ALL, ANN, BOB, CAT, ME, SETTINGS, said, table


def fill(held: Table, size: int) -> None:
    """Let ANN say so many bytes in all, her record included."""
    left = size - len(payload(ANN))
    held.merge((record(ANN),), 0.0)
    for number in range(3):
        part = min(left, MAX_PAYLOAD)
        assert held.merge((word(ANN, f"kind{number}", bytes(part)),), 0.0).changed
        left -= part
    assert left == 0


def test_a_member_is_held_to_its_bytes_and_may_say_other_ones_instead() -> None:
    held = table()
    fill(held, MAX_ORIGIN_BYTES)
    assert held.merge((word(ANN, "more", b"x"),), 0.0).ignored == 1
    assert held.merge((word(ANN, "kind0", bytes(MAX_PAYLOAD - 1), version=3),), 0.0).changed
    assert held.merge((word(ANN, "kind0", b"\1" * MAX_PAYLOAD, version=4),), 0.0).changed
    assert held.merge((word(ANN, "more", b"x"),), 0.0).ignored == 1
    held.check_integrity()


def test_so_many_members_are_held() -> None:
    """Whoever issued the certificates: anybody who has one can invent as many members as it is for."""
    token = JoinToken.parse(KEY.issue((), Role.WORKER, 2e9, uses=4096))
    other = JoinToken.parse(KEY.issue((), Role.WORKER, 2e9, uses=64))
    held = Table(ME, admission(), incarnation=1, rules=EntryRules(is_sound=lambda entry: True))
    held.publish(MEMBER_KIND, payload(ME, token=other))

    def invented(number: int, shown: JoinToken) -> Entry:
        who = Identity(number.to_bytes(32, "big"))
        record = MemberRecord(Role.WORKER, "192.0.2.1", 4001, shown.credential(who.peer_id))
        return sign_entry(who, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(record))

    results = [held.merge((invented(number, token),), 0.0) for number in range(1, MAX_ORIGINS + 2)]
    assert [bool(result.changed) for result in results[-3:]] == [True, False, False]
    assert len(held) == MAX_ORIGINS


def test_a_member_keeps_what_it_said_when_its_record_changes_and_its_allowance_when_it_starts_again() -> None:
    held = table()
    held.merge((record(ANN), word(ANN, "load", b"a")), 0.0)
    held.merge((record(ANN, version=9),), 0.0)
    assert said(held) == {ANN.peer_id: b"a"}
    taken = [held.merge((record(ANN, life=life),), 0.0).changed for life in range(2, 3 * int(SETTINGS.entries_burst))]
    assert len([each for each in taken if each]) <= SETTINGS.entries_burst


def test_a_box_keeps_its_place_when_it_is_forgotten_and_a_client_gives_it_back() -> None:
    for role, is_let_in in ((Role.WORKER, False), (Role.CLIENT, True)):
        token = JoinToken.parse(KEY.issue((), role, 2e9, uses=1))
        held, is_private = table(), role is Role.CLIENT
        shown = [record(who, role, token=token) for who in (ANN, BOB)]
        assert held.admit(shown[0], 0.0, private=is_private).changed
        held.forget(ANN.peer_id, 1.0)
        assert bool(held.admit(shown[1], 0.0, private=is_private).changed) is is_let_in


@pytest.mark.parametrize("is_back", [True, False])
def test_of_a_token_for_several_a_box_yields_its_place_when_it_is_forgotten_for_good(is_back: bool) -> None:
    token = JoinToken.parse(KEY.issue((), Role.WORKER, 2e9, uses=2))
    held = table()
    for who in (ANN, BOB):
        held.admit(record(who, token=token), 0.0, private=False)
    held.forget(ANN.peer_id, 20.0)
    held.forget_forgotten(19.9)
    assert held.merge((record(CAT, token=token),), 19.9).ignored == 1
    if is_back:
        held.merge((record(ANN, life=2, token=token),), 19.9)
    held.forget_forgotten(20.0)
    assert bool(held.merge((record(CAT, token=token),), 20.0).changed) is not is_back


# -- clients and boxes ------------------------------------------------------------------------------------------------


def test_one_life_is_a_client_or_a_box() -> None:
    held = table()
    held.merge((record(ANN, Role.CLIENT),), 0.0, from_client=ANN.peer_id)
    assert held.merge((record(ANN, version=5),), 0.0).ignored == 1
    assert not held.is_shared(ANN.peer_id)
    held.merge((record(BOB),), 0.0)
    assert held.merge((record(BOB, Role.CLIENT, version=5),), 0.0, from_client=BOB.peer_id).ignored == 1
    assert held.is_shared(BOB.peer_id)
    assert held.merge((record(BOB, version=5),), 0.0).changed
    assert held.merge((record(ANN, life=2),), 0.0).changed
    assert held.is_shared(ANN.peer_id)


def test_clients_are_not_in_the_summary() -> None:
    one, other = table(), table()
    one.merge((record(ANN, Role.CLIENT),), 0.0, from_client=ANN.peer_id)
    one.check_integrity()
    assert one.find_differing(other.summary()) == frozenset()
    one.forget(ANN.peer_id, 1.0)
    one.check_integrity()
    assert one.find_differing(other.summary()) == frozenset()


def test_lives_are_told_and_nobody_has_none() -> None:
    held = table()
    held.merge((record(ANN, life=7),), 0.0)
    assert (held.life(ANN.peer_id), held.life(BOB.peer_id)) == (7, 0)


def test_what_is_kept_for_the_next_run_has_no_beats() -> None:
    held = table()
    held.merge((record(ANN), word(ANN, BEAT_KIND, b""), word(ANN, "load", b"a", version=3)), 0.0)
    assert [entry.kind for entry in held.shared_entries()] == [MEMBER_KIND, MEMBER_KIND, "load"]


def test_members_are_spread_over_all_buckets() -> None:
    held = table()
    held.merge([record(who) for who in PEOPLE[1:]], 0.0)
    used = {bucket for bucket in ALL if held.digest((bucket,))}
    assert min(used) < BUCKETS // 2 <= max(used)


# -- lies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (word(CAT, "plan", b"2:y"), word(CAT, "plan", b"2:z", life=2, version=3)),
        (word(CAT, "plan", b"2:y"), word(CAT, "plan", b"2:y", version=3)),
        (word(CAT, "plan", b"2:y"), word(CAT, "plan", b"3:z", version=3)),
        (word(CAT, "plan", b"2:y"), word(CAT, "other", b"2:z", version=3)),
        (word(CAT, "plan", b"none"), word(CAT, "plan", b"neither", version=3)),
    ],
    ids=["another life", "said again", "another number", "another kind", "no number"],
)
def test_what_is_no_lie_expels_nobody(one: Entry, other: Entry) -> None:
    held = table()
    assert held.take_lies((Lie(one, other), Lie(other, one))) == MergeResult()
    assert held.take_lies((Lie(one, word(CAT, "plan", b"2:other", version=9)),)).lies or one.payload == b"none"


# -- so much per second, and a burst -----------------------------------------------------------------------------------


def test_a_burst_can_be_had_at_once_and_no_more() -> None:
    allowance = Allowance(rate=2.0, burst=3.0, at=10.0)
    assert [allowance.take(10.0) for _ in range(5)] == [True, True, True, False, False]


def test_it_fills_at_its_rate() -> None:
    allowance = Allowance(rate=2.0, burst=3.0, left=0.0, at=10.0)
    assert not allowance.take(10.4)
    assert allowance.take(10.5)
    assert not allowance.take(10.9)
    assert allowance.take(11.0)


def test_it_holds_no_more_than_the_burst() -> None:
    allowance = Allowance(rate=2.0, burst=3.0, left=0.0)
    assert [allowance.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_an_earlier_time_neither_fills_nor_empties_it() -> None:
    allowance = Allowance(rate=1.0, burst=2.0, at=10.0)
    assert allowance.take(5.0)
    assert allowance.take(5.0)
    assert not allowance.take(5.0)


def test_an_empty_one_begins_empty() -> None:
    assert not Allowance(rate=1.0, burst=5.0, left=0.0).take(0.0)


@pytest.mark.parametrize(("left", "after_s"), [(0.0, 0.5), (0.5, 0.25), (1.0, 0.0), (2.5, 0.0)])
def test_when_there_is_one_again(left: float, after_s: float) -> None:
    assert Allowance(rate=2.0, burst=3.0, left=left, at=10.0).next_at() == 10.0 + after_s
