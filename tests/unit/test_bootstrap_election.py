"""The election's rule."""

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.election import Election, Step, View, decide, decode_claim, encode_claim

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def step(me: PeerId, candidates: str, claims: dict[PeerId, int], *, stable_for: float = 10.0) -> Step:
    view = View(me=me, candidates=frozenset(map(PeerId, candidates)), claims=claims, stable_since=100.0 - stable_for)
    return decide(view, 100.0, settle_s=1.0)


@pytest.mark.parametrize(
    ("me", "candidates", "claims", "expected"),
    [
        (A, "abc", {}, Step(claim=1)),
        (B, "abc", {}, Step()),
        (B, "bc", {}, Step(claim=1)),
        (A, "abc", {B: 1}, Step(coordinator=B, epoch=1)),
        (A, "abc", {A: 1, B: 1}, Step(coordinator=A, epoch=1)),
        (B, "abc", {A: 1, B: 1}, Step(coordinator=A, epoch=1)),
        (A, "abc", {A: 1, B: 2}, Step(coordinator=B, epoch=2)),
        (A, "ac", {A: 1, B: 2}, Step(epoch=2, claim=3)),  # the dead claimer's epoch never comes back
        (C, "ac", {A: 1, B: 2}, Step(epoch=2)),
        (C, "", {A: 1}, Step(epoch=1)),
        (A, "bc", {}, Step()),  # a client, or a node that leaves, is no candidate
        (A, "a", {A: 0}, Step(claim=1)),
    ],
)
def test_the_rule(me: PeerId, candidates: str, claims: dict[PeerId, int], expected: Step) -> None:
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
    assert election.decide(frozenset({A, B, C}), {A: 1}, 11.5) == Step(coordinator=A, epoch=1)
    assert election.wake_at() is None


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91\x00", b"\x91\xff", b"\x91\xa1x", b"\x91\xcf" + b"\xff" * 8])
def test_a_malformed_claim_never_leads(payload: bytes) -> None:
    assert decode_claim(payload) == 0


def test_a_claim_travels() -> None:
    assert decode_claim(encode_claim(7)) == 7
