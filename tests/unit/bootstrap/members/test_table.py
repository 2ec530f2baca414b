"""What all members say: merging, bounds, lies, and what two nodes tell each other to hold the same."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.bootstrap import Identity, JoinToken, NetworkSettings, Role
from p2pserve.bootstrap.members.states import EntryRules, MergeResult
from p2pserve.bootstrap.members.table import (
    BEAT_KIND,
    BUCKETS,
    MAX_LIES,
    MAX_ORIGIN_BYTES,
    Table,
)
from p2pserve.bootstrap.trust.entries import (
    MAX_COUNTER,
    MAX_KINDS,
    MAX_PAYLOAD,
    MAX_RECORD,
    MEMBER_KIND,
    Entry,
    Lie,
    sign_entry,
)
from p2pserve.bootstrap.trust.orders import Orders, sign_orders

from ..certificates import KEY, PEOPLE, admission, payload, record, word

ME, ANN, BOB, CAT, DAN = PEOPLE[:5]
SETTINGS = NetworkSettings()
ALL = frozenset(range(BUCKETS))


def read_number(text: bytes) -> int | None:
    return int(text.split(b":")[0]) if b":" in text else None


def table(who: Identity = ME, role: Role = Role.WORKER) -> Table:
    made = Table(who, admission(), incarnation=1, settings=SETTINGS, rules=EntryRules(numbered={"plan": read_number}))
    made.publish(MEMBER_KIND, payload(who, role))
    return made


def said(held: Table, kind: str = "load") -> dict[str, bytes]:
    return {peer: entry.payload for peer, entry in held.entries(kind).items()}


def said_by_three() -> list[Entry]:
    """What three members say in two lives, in several versions."""
    entries = []
    for who in (ANN, BOB, CAT):
        for life in (1, 2):
            entries.append(record(who, life=life))
            entries += [word(who, kind, b"%d" % v, life=life, version=v) for kind in ("load", "links") for v in (2, 3)]
    return entries


POOL = said_by_three()


def state(held: Table) -> dict[str, object]:
    return dict(held.digest(ALL))


# -- merging ---------------------------------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False))
def test_merging_ends_the_same_in_whatever_order_and_however_often(rng: random.Random) -> None:
    one, other = table(), table()
    one.merge(POOL, 0.0)
    for _ in range(8):
        batch = rng.sample(POOL, rng.randint(1, 15))
        other.merge(batch, 0.0)
    for _ in range(3):  # what came before its member record comes again
        other.merge(POOL, 0.0)
    one.merge(POOL, 0.0)
    assert state(one) == state(other)
    assert one.summary() == other.summary()
    one.check_integrity()
    other.check_integrity()


def test_a_newer_version_replaces_and_a_newer_life_replaces_all() -> None:
    held = table()
    held.merge((record(ANN), word(ANN, "load", b"a"), word(ANN, "load", b"b", version=5)), 0.0)
    held.merge((word(ANN, "load", b"old", version=4),), 0.0)
    assert said(held) == {ANN.peer_id: b"b"}
    held.merge((record(ANN, life=2),), 0.0)
    assert said(held) == {}
    held.merge((word(ANN, "load", b"ghost", version=9),), 0.0)
    assert said(held) == {}


def test_nothing_counts_without_the_record_of_its_origin() -> None:
    held = table()
    assert held.merge((word(ANN, "load", b"a"),), 0.0).ignored == 1
    assert held.merge((record(ANN), word(ANN, "load", b"a")), 0.0).changed
    assert said(held) == {ANN.peer_id: b"a"}


def test_what_is_merged_again_is_no_news() -> None:
    held = table()
    held.merge((record(ANN), word(ANN, "load", b"a")), 0.0)
    assert held.merge((record(ANN), word(ANN, "load", b"a")), 0.0).changed == ()


def test_an_older_life_with_a_higher_number_is_outlived() -> None:
    held = table()
    result = held.merge((record(ME, life=7),), 0.0)
    assert held.incarnation == 8
    assert {entry.incarnation for entry in result.changed} == {8}
    held.check_integrity()


def test_records_come_first_whatever_the_order() -> None:
    held = table()
    assert len(held.merge((word(ANN, "load", b"a"), record(ANN)), 0.0).changed) == 2


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_a_forged_entry_is_blamed_and_not_held() -> None:
    held = table()
    good = word(ANN, "load", b"a")
    bad = msgspec.structs.replace(good, payload=b"b")
    held.merge((record(ANN),), 0.0)
    assert held.merge((bad,), 0.0).forged == 1
    assert said(held) == {}


def test_checking_stops_after_enough_forgeries_to_hang_up() -> None:
    held = table()
    held.merge((record(ANN),), 0.0)
    bad = [msgspec.structs.replace(word(ANN, f"kind{n}", b"a"), payload=b"b") for n in range(100)]
    assert held.merge(bad, 0.0).forged == SETTINGS.max_offences


@pytest.mark.parametrize(
    "wrong",
    [
        {"incarnation": 2**60},
        {"version": 0},
        {"kind": "k" * 65},
        {"kind": ""},
        {"payload": bytes(MAX_PAYLOAD + 1)},
        {"signature": bytes(63)},
        {"origin": "p" * 65},
    ],
)
def test_what_is_out_of_bounds_does_not_decode(wrong: dict[str, object]) -> None:
    raw = msgspec.msgpack.encode(msgspec.structs.replace(word(ANN, "load", b"a"), **wrong))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Entry)


def test_a_client_gives_only_its_own_record_which_is_told_to_nobody() -> None:
    held = table()
    mine = record(ANN, Role.CLIENT)
    assert held.merge((mine, record(BOB), word(ANN, "load", b"a")), 0.0, from_client=ANN.peer_id).forged == 2
    assert held.record(ANN.peer_id) is not None
    assert held.digest(ALL).keys() == {ME.peer_id}
    assert not held.is_shared(ANN.peer_id)
    assert held.merge((record(BOB, Role.CLIENT),), 0.0).forged == 1, "nobody else passes a client on"


def test_a_member_says_so_many_bytes_and_kinds_at_most() -> None:
    held = table()
    held.merge((record(ANN),), 0.0)
    big = [word(ANN, f"kind{n}", bytes(MAX_PAYLOAD)) for n in range(4)]
    assert held.merge(big, 0.0).ignored == 2
    other = table()
    other.merge((record(BOB), *(word(BOB, f"kind{n}", b"a") for n in range(2 * MAX_KINDS))), 0.0)
    assert len(other.digest(ALL)[BOB.peer_id][1]) == MAX_KINDS
    held.publish("kind0", bytes(MAX_PAYLOAD))
    held.publish("kind1", bytes(MAX_PAYLOAD))
    with pytest.raises(ValueError, match=f"at most {MAX_ORIGIN_BYTES} are gossiped"):
        held.publish("kind2", bytes(MAX_PAYLOAD))


def test_a_member_is_heard_so_often_per_second_and_its_latest_word_comes_later() -> None:
    held = table()
    held.merge((record(ANN),), 0.0)
    flood = [word(ANN, "load", b"%d" % version, version=version) for version in range(2, 1000)]
    assert len([entry for entry in flood if held.merge((entry,), 0.0).changed]) <= SETTINGS.entries_burst
    assert held.merge((word(BOB, "load", b"a"),), 0.0).ignored == 1
    assert held.merge((flood[-1],), 10.0).changed == (flood[-1],)


def test_publishing_refuses_what_others_would_not_take() -> None:
    held = table()
    for kind, text, reason in (
        ("", b"", "1 to 64 characters"),
        ("k" * 65, b"", "1 to 64 characters"),
        ("load", bytes(MAX_PAYLOAD + 1), "at most 65536 are gossiped"),
        (MEMBER_KIND, b"x", "belongs to the member record"),
    ):
        with pytest.raises(ValueError, match=reason):
            held.publish(kind, text)
    for number in range(MAX_KINDS - 1):
        held.publish(f"kind{number}", b"")
    with pytest.raises(ValueError, match="at most 16"):
        held.publish("more", b"")


@pytest.mark.parametrize("life", [0, -1, MAX_COUNTER + 1])
def test_a_life_has_a_number_within_its_bounds(life: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and {MAX_COUNTER}"):
        Table(ME, admission(), incarnation=life)
    for good in (1, MAX_COUNTER):
        assert Table(ME, admission(), incarnation=good).incarnation == good


def test_what_a_node_says_is_counted_from_one() -> None:
    held = Table(ME, admission(), incarnation=1)
    assert [held.publish("x", b"").version for _ in range(3)] == [1, 2, 3]


def test_a_node_may_say_as_many_bytes_as_others_take() -> None:
    held = Table(ME, admission(), incarnation=1)
    for number in range(MAX_ORIGIN_BYTES // MAX_PAYLOAD):
        held.publish(f"kind{number}", bytes(MAX_PAYLOAD))
    held.publish("kind0", bytes(MAX_PAYLOAD))  # in place of what it said before
    with pytest.raises(ValueError, match=f"at most {MAX_ORIGIN_BYTES} are gossiped"):
        held.publish("more", b"x")


# -- lies ------------------------------------------------------------------------------------------------------------


def test_who_says_two_things_under_one_version_is_expelled() -> None:
    held = table()
    held.merge((record(ANN), word(ANN, "load", b"a")), 0.0)
    result = held.merge((word(ANN, "load", b"b"),), 0.0)
    assert [lie.one.origin for lie in result.lies] == [ANN.peer_id]
    assert held.record(ANN.peer_id) is None
    assert held.merge((record(ANN, life=2),), 0.0).ignored == 1
    held.check_integrity()


def test_a_proof_is_checked_and_convinces_others() -> None:
    held = table()
    held.merge((record(ANN),), 0.0)
    one, other = word(ANN, "load", b"a"), word(ANN, "load", b"b")
    forged = msgspec.structs.replace(one, payload=b"c")
    nothing = MergeResult()
    assert held.take_lies((Lie(one, one), Lie(one, word(BOB, "load", b"b")))) == nothing
    assert held.take_lies((Lie(one, word(ANN, "load", b"b", version=3)),)) == nothing, "another version is no lie"
    assert held.take_lies((Lie(one, forged), Lie(forged, one))) == MergeResult(forged=2)
    assert held.take_lies((Lie(one, other),)) == MergeResult(lies=(Lie(one, other),))
    assert held.take_lies((Lie(one, other), Lie(one, forged))) == nothing, "known"


def test_forged_proofs_are_not_checked_without_end() -> None:
    checked: list[Entry] = []

    def is_sound(entry: Entry) -> bool:
        checked.append(entry)
        return False

    held = Table(ME, admission(), incarnation=1, rules=EntryRules(is_sound=is_sound))
    lies = [Lie(word(who, "load", b"a"), word(who, "load", b"b")) for who in PEOPLE[1:]]
    offences = NetworkSettings().max_offences
    assert held.take_lies(lies * 10) == MergeResult(forged=offences)
    assert len(checked) == offences


def test_a_forged_entry_that_contradicts_another_is_one() -> None:
    held = table()
    one = word(ANN, "load", b"a")
    held.merge((record(ANN), one), 0.0)
    assert held.merge((msgspec.structs.replace(one, payload=b"c"),), 0.0).forged == 1
    assert held.record(ANN.peer_id) is not None


def test_a_record_that_is_too_large_to_be_kept_is_nobodys_fault() -> None:
    held, padded = table(), [*msgspec.msgpack.decode(payload(ANN)), bytes(MAX_RECORD)]
    result = held.merge((sign_entry(ANN, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(padded)),), 0.0)
    assert (result.ignored, result.forged) == (1, 0)
    assert held.record(ANN.peer_id) is None
    padded[-1] = bytes(1024)
    assert held.merge((sign_entry(ANN, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(padded)),), 0.0).changed


def test_whether_others_sign_with_this_nodes_key_is_counted() -> None:
    held = table()
    own = held.incarnation
    assert held.outlived == 0
    held.merge((record(ME, life=own + 5),), 0.0)
    held.merge((record(ME, life=own + 5),), 0.0)
    assert (held.outlived, held.incarnation) == (1, own + 6), "the same again proves nothing more"
    held.merge((record(ME, life=own + 7),), 0.0)
    assert held.outlived == 2


def test_two_plans_under_one_number_are_a_lie_within_one_life() -> None:
    held = table()
    held.merge((record(ANN), word(ANN, "plan", b"1:x")), 0.0)
    assert held.merge((word(ANN, "plan", b"2:y", version=3),), 0.0).lies == ()
    assert held.merge((word(ANN, "plan", b"2:y", version=4),), 0.0).lies == (), "said again"
    assert held.merge((record(ANN, life=2), word(ANN, "plan", b"2:z", life=2)), 0.0).lies == (), (
        "it has lost everything"
    )
    assert held.merge((word(ANN, "plan", b"2:w", life=2, version=3),), 0.0).lies
    assert ANN.peer_id in held.lies


def test_this_node_is_never_expelled_by_itself() -> None:
    held = table()
    own = held.publish("load", b"a")
    lie = Lie(own, sign_entry(ME, "load", own.incarnation, own.version, b"b"))
    assert held.take_lies((lie,)) == MergeResult()
    assert said(held) == {ME.peer_id: b"a"}


def test_so_many_proofs_are_kept() -> None:
    held = table()
    people = [Identity(number.to_bytes(32, "big")) for number in range(1, MAX_LIES + 9)]
    lies = [Lie(word(who, "load", b"a"), word(who, "load", b"b")) for who in people]
    assert len(held.take_lies(lies).lies) == MAX_LIES


# -- certificates ----------------------------------------------------------------------------------------------------


def test_one_certificate_lets_in_so_many_boxes() -> None:
    held = table()
    token = JoinToken.parse(KEY.issue((), Role.WORKER, 2e9, uses=3))
    people = PEOPLE[1:6]
    result = held.merge([record(who, token=token) for who in people], 0.0)
    assert (len(result.changed), result.ignored, result.forged) == (3, 2, 0)


def test_who_was_revoked_is_dropped_and_stays_out() -> None:
    rights = admission()
    held = Table(ME, rights, incarnation=1, settings=SETTINGS)
    token = JoinToken.parse(KEY.issue((), Role.WORKER, 2e9))
    held.merge((record(ANN, token=token), record(BOB)), 0.0)
    assert rights.take_orders(sign_orders(KEY, Orders(1, (token.grant.certificate,))))
    assert held.recheck() == (ANN.peer_id,)
    assert held.record(BOB.peer_id) is not None
    assert held.merge((record(ANN, life=2, token=token),), 0.0).ignored == 1


# -- holding the same ------------------------------------------------------------------------------------------------


def test_what_differs_is_found_and_told() -> None:
    one, other = table(ME), table(ANN)
    one.merge((record(ANN, version=1), record(BOB), word(BOB, "load", b"1")), 0.0)
    other.merge((record(ME), record(BOB), word(BOB, "load", b"2", version=3), record(CAT)), 0.0)
    differing = one.find_differing(other.summary())
    told = other.delta_for(one.digest(differing), differing)
    assert {(entry.origin, entry.kind, entry.version) for entry in told} >= {
        (BOB.peer_id, "load", 3),
        (CAT.peer_id, MEMBER_KIND, 1),
    }
    one.merge(told, 0.0)
    other.merge(one.delta_for(other.digest(ALL), ALL), 0.0)
    assert one.find_differing(other.summary()) == frozenset()


def test_of_other_buckets_newer_signs_of_life_are_told_alone() -> None:
    one, other = table(ME), table(ANN)
    one.merge((record(BOB), word(BOB, BEAT_KIND, b"", version=2), record(CAT)), 0.0)
    other.merge((record(BOB, version=2), word(BOB, BEAT_KIND, b"", version=3), word(BOB, "load", b"1")), 0.0)
    asked = one.digest_beats((BOB.peer_id, CAT.peer_id, DAN.peer_id))
    assert asked.keys() == {BOB.peer_id, CAT.peer_id}
    (told,) = other.delta_for(asked, b"")
    assert (told.origin, told.kind, told.version) == (BOB.peer_id, BEAT_KIND, 3)
    one.merge((told,), 0.0)
    assert other.delta_for(one.digest_beats((BOB.peer_id,)), b"") == []
    assert other.delta_for({"nobody": (1, {})}, b"") == []


def test_only_the_buckets_that_were_named_differ_and_are_told() -> None:
    one, other = table(), table()
    other.merge([record(who) for who in (ANN, BOB, CAT)], 0.0)
    other.merge((record(DAN, Role.CLIENT),), 0.0, from_client=DAN.peer_id)
    by_bucket = {bucket: set(other.digest((bucket,))) - {ME.peer_id} for bucket in ALL}
    assert one.find_differing(other.summary()) == {bucket for bucket, origins in by_bucket.items() if origins}
    for bucket, origins in by_bucket.items():
        told = other.delta_for({}, (bucket,))
        assert {entry.origin for entry in told} - {ME.peer_id} == origins
    assert DAN.peer_id not in {entry.origin for entry in other.delta_for({}, ALL)}


def test_a_client_that_is_forgotten_may_come_back_by_hearsay_as_a_box() -> None:
    held = table()
    held.merge((record(ANN, Role.CLIENT),), 0.0, from_client=ANN.peer_id)
    held.forget(ANN.peer_id, 10.0)
    assert held.merge((record(ANN),), 1.0).changed


def test_a_lost_beat_is_not_worth_a_repair() -> None:
    one, other = table(ME), table(ME)
    for held in (one, other):
        held.merge((record(ANN),), 0.0)
    one.merge((word(ANN, BEAT_KIND, b""),), 0.0)
    assert one.find_differing(other.summary()) == frozenset()


def test_two_that_hold_other_things_under_one_version_show_them_to_each_other() -> None:
    one, other = table(ME), table(ME)
    for held, said in ((one, b"this"), (other, b"that")):
        held.merge((record(ANN), word(ANN, "kind", said)), 0.0)
    (bucket,) = one.find_differing(other.summary())
    told = other.delta_for(one.digest((bucket,)), (bucket,))
    (lie,) = one.merge(told, 0.0).lies
    assert lie.one.origin == ANN.peer_id


def test_a_summary_of_another_size_differs_everywhere() -> None:
    assert table().find_differing(b"short") == ALL


def test_what_was_forgotten_is_not_learned_again_at_once() -> None:
    held = table()
    held.merge((record(ANN),), 0.0)
    held.forget(ANN.peer_id, 10.0)
    assert held.merge((record(ANN),), 5.0).ignored == 1
    assert held.merge((record(ANN, life=2),), 5.0).changed, "it was started anew"
    held.forget(ANN.peer_id, 20.0)
    held.forget_forgotten(20.0)
    assert held.merge((record(ANN),), 20.0).changed
    held.forget(ME.peer_id, 99.0)
    assert held.record(ME.peer_id) is not None


def test_who_is_let_in_itself_counts_although_it_was_forgotten() -> None:
    held = table()
    held.merge((record(ANN),), 0.0)
    held.forget(ANN.peer_id, 1000.0)
    assert held.admit(record(ANN), 1.0, private=False).changed
