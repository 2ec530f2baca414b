"""The election's rule."""

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.members.election import (
    MAX_EPOCH,
    MAX_JUMP,
    Election,
    ElectionResult,
    ElectionView,
    decide,
    decode_claim,
    encode_claim,
    select_plausible,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def step(me: PeerId, candidates: str, claims: dict[PeerId, int], *, stable_for: float = 10.0) -> ElectionResult:
    view = ElectionView(
        me=me, candidates=frozenset(map(PeerId, candidates)), claims=claims, stable_since=100.0 - stable_for
    )
    return decide(view, 100.0, settle_s=1.0)


@pytest.mark.parametrize(
    ("me", "candidates", "claims", "expected"),
    [
        (A, "abc", {}, ElectionResult(claim=1)),
        (B, "abc", {}, ElectionResult()),
        (B, "bc", {}, ElectionResult(claim=1)),
        (A, "abc", {B: 1}, ElectionResult(coordinator=B, epoch=1)),
        (A, "abc", {A: 1, B: 1}, ElectionResult(coordinator=A, epoch=1)),
        (B, "abc", {A: 1, B: 1}, ElectionResult(coordinator=A, epoch=1)),
        (A, "abc", {A: 1, B: 2}, ElectionResult(coordinator=B, epoch=2)),
        (A, "ac", {A: 1, B: 2}, ElectionResult(epoch=2, claim=3)),  # the dead claimer's epoch never comes back
        (C, "ac", {A: 1, B: 2}, ElectionResult(epoch=2)),
        (C, "", {A: 1}, ElectionResult(epoch=1)),
        (A, "bc", {}, ElectionResult()),  # a client, or a node that leaves, is no candidate
        (A, "a", {A: 0}, ElectionResult(claim=1)),
    ],
)
def test_the_rule(me: PeerId, candidates: str, claims: dict[PeerId, int], expected: ElectionResult) -> None:
    assert step(me, candidates, claims) == expected


def test_no_claim_before_the_candidates_are_stable() -> None:
    assert step(A, "abc", {}, stable_for=0.9).claim is None
    assert step(A, "abc", {}, stable_for=1.0).claim == 1


def test_the_election_remembers_since_when() -> None:
    election = Election(A, settle_s=1.0)
    assert election.wake_at() is None
    assert election.decide(frozenset({A, B}), {}, 10.0).claim is None
    assert election.wake_at() == 11.0
    assert election.decide(frozenset({A, B, C}), {}, 10.5).claim is None
    assert election.decide(frozenset({A, B, C}), {}, 11.4).claim is None
    assert election.decide(frozenset({A, B, C}), {}, 11.5).claim == 1
    assert election.decide(frozenset({A, B, C}), {A: 1}, 11.5) == ElectionResult(coordinator=A, epoch=1)
    assert election.wake_at() is None


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x91\x00", b"\x91\xff", b"\x91\xa1x", b"\x91\xcf" + b"\xff" * 8, b"\x91" * 200_000]
)
def test_a_malformed_claim_never_leads(payload: bytes) -> None:
    assert decode_claim(payload) == 0


@pytest.mark.parametrize(
    ("claims", "seen", "counting"),
    [
        ({A: 3, B: 4}, 0, "AB"),
        ({A: 3, B: 3 + MAX_JUMP}, 3, "AB"),
        ({A: 3, B: 4 + MAX_JUMP}, 3, "A"),
        ({A: 3, B: 4 + MAX_JUMP}, 0, "A"),
        ({A: 3, B: MAX_EPOCH}, 3, "A"),
        ({A: 10 * MAX_JUMP, B: 10 * MAX_JUMP + 1}, 0, "AB"),  # who joins late takes the network as it is
        ({B: MAX_EPOCH}, 0, ""),
        ({A: 2, B: 10 * MAX_JUMP}, 10 * MAX_JUMP, "AB"),  # what was believed once stays
        ({A: 0}, 0, "A"),
    ],
)
def test_a_claim_that_jumps_too_far_does_not_count(claims: dict[PeerId, int], seen: int, counting: str) -> None:
    assert set(select_plausible(claims, seen)) == {PeerId(name.lower()) for name in counting}


def test_one_wild_claim_does_not_end_elections() -> None:
    election, both = Election(A, settle_s=1.0), frozenset({A, B})
    election.decide(both, {A: 3}, 0.0)
    assert election.decide(both, {A: 3, B: MAX_EPOCH}, 2.0) == ElectionResult(coordinator=A, epoch=3)
    fresh = Election(C, settle_s=1.0)  # it joins, and hears the wild one first
    fresh.decide(both, {B: MAX_EPOCH // 2}, 0.0)
    assert fresh.decide(both, {A: 3, B: MAX_EPOCH // 2}, 0.5) == ElectionResult(coordinator=A, epoch=3)
    assert fresh.decide(both, {A: 3, B: MAX_EPOCH // 2}, 5.0) == ElectionResult(coordinator=A, epoch=3)
    jumped = {A: 3, B: 3 + MAX_JUMP}
    assert election.decide(both, jumped, 2.5) == ElectionResult(coordinator=B, epoch=3 + MAX_JUMP)
    alone = frozenset({A})
    election.decide(alone, jumped, 3.0)
    assert election.decide(alone, jumped, 4.0).claim == 4 + MAX_JUMP
    after = {A: 4 + MAX_JUMP}  # the one that jumped is forgotten
    assert election.decide(alone, after, 5.0) == ElectionResult(coordinator=A, epoch=4 + MAX_JUMP)


@pytest.mark.parametrize(
    ("epoch", "read"), [(1, 1), (7, 7), (MAX_EPOCH, MAX_EPOCH), (MAX_EPOCH + 1, 0), (0, 0), (-1, 0)]
)
def test_a_claim_travels_if_it_can_lead(epoch: int, read: int) -> None:
    assert decode_claim(encode_claim(epoch)) == read


def test_who_has_seen_nothing_takes_an_old_network_as_it_is() -> None:
    old = {A: 10 * MAX_JUMP}
    assert Election(B, settle_s=1.0).decide(frozenset({A, B}), old, 0.0).coordinator == A


def test_who_joins_believes_the_first_claim_only_when_the_candidates_are_settled() -> None:
    both, wild = frozenset({A, B}), {B: MAX_EPOCH // 2}
    early, late = Election(C, settle_s=1.0), Election(C, settle_s=1.0)
    for election, asked_at in ((early, 100.9), (late, 101.0)):
        election.decide(both, wild, 100.0)
        election.decide(both, wild, asked_at)
    claims = {A: 3, **wild}
    assert early.decide(both, claims, 102.0).coordinator == A
    assert late.decide(both, claims, 102.0).coordinator == B


def test_only_who_would_claim_has_to_wake() -> None:
    election = Election(B, settle_s=1.0)
    election.decide(frozenset({A, B}), {}, 5.0)
    assert election.wake_at() is None
    election.decide(frozenset({B, C}), {}, 6.0)
    assert election.wake_at() == 7.0
