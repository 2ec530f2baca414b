"""Leases: who leads, who claims, and when."""

import pytest

from p2pserve.bootstrap import NetworkSettings, PeerId
from p2pserve.bootstrap.members.election import (
    MAX_EPOCH,
    MAX_JUMP,
    Claim,
    Election,
    ElectionResult,
    ElectionView,
    Say,
    decode_claim,
    encode_claim,
    order_in,
    select_plausible,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
SETTINGS = NetworkSettings()
LEASE_S, SETTLE_S, STEP_S, REFRESH_S = SETTINGS.lease_s, SETTINGS.settle_s, SETTINGS.claim_step_s, SETTINGS.refresh_s


class Voter:
    """An election, told of claims as they come: each call of `claim` is one more refreshing."""

    def __init__(self, me: PeerId, *, candidates: tuple[PeerId, ...] = (A, B, C), synced: bool = True) -> None:
        self.election = Election(me, SETTINGS)
        self.candidates = frozenset(candidates)
        self.synced = synced
        self.claims: dict[PeerId, Claim] = {}
        self.refused: tuple[tuple[PeerId, int], ...] = ()
        self.witnessed = 0
        self._number = 0

    def claim(self, peer: PeerId, epoch: int, *, yielded: bool = False) -> None:
        self._number += 1
        self.claims[peer] = Claim(epoch, (1, self._number), yielded)

    def at(self, now: float, *, paused_s: float = 0.0) -> ElectionResult:
        view = ElectionView(
            candidates=self.candidates,
            claims=dict(self.claims),
            synced=self.synced,
            witnessed=self.witnessed,
            refused=self.refused,
        )
        return self.election.decide(view, now, paused_s=paused_s)


def first_in(epoch: int, *peers: PeerId) -> PeerId:
    return min(peers, key=lambda peer: order_in(epoch, peer))


def test_who_is_alone_claims_at_once() -> None:
    assert Voter(A, candidates=(A,)).at(0.0).say == (Say.CLAIM, 1)


def test_nobody_claims_before_it_knows_what_there_is() -> None:
    voter = Voter(A, candidates=(A,), synced=False)
    assert voter.at(100.0) == ElectionResult()
    voter.synced = True
    assert voter.at(100.1).say == (Say.CLAIM, 1)


def test_who_may_not_lead_claims_nothing() -> None:
    assert Voter(A, candidates=(B, C)).at(100.0).say is None


def test_a_leader_is_followed_while_it_refreshes_its_claim() -> None:
    voter = Voter(C)
    for tenth in range(0, 100, 5):
        voter.claim(A, 3)
        assert voter.at(tenth / 10).leader == A
    last = 9.5
    assert voter.at(last + LEASE_S - 0.01).leader == A
    assert voter.at(last + LEASE_S).leader is None


def test_pings_and_vouchers_are_no_lease() -> None:
    """It is alive all the while, and hangs: its claim is never said anew."""
    voter = Voter(C)
    voter.claim(A, 3)
    voter.at(0.0)
    found = [voter.at(now / 10) for now in range(1, 40)]
    assert found[-1].leader is None
    assert voter.at(10.0).say == (Say.CLAIM, 4)


def test_candidates_claim_one_after_the_other_in_the_order_of_the_epoch() -> None:
    first = first_in(4, B, C)
    second = C if first == B else B
    said = {}
    for me in (first, second):
        voter = Voter(me)
        voter.claim(A, 3)
        voter.at(0.0)
        voter.candidates = frozenset({B, C})
        assert voter.at(1.0).leader is None, "it is dead"
        moments = [tick / 100 for tick in range(100, 300) if voter.at(tick / 100).say is not None]
        said[me] = moments[0]
    assert said[first] == pytest.approx(1.0 + SETTLE_S, abs=0.011)
    assert said[second] == pytest.approx(1.0 + SETTLE_S + STEP_S, abs=0.011)


def test_nobody_is_first_in_every_epoch() -> None:
    firsts = [first_in(epoch, A, B, C) for epoch in range(1, 200)]
    assert min(firsts.count(peer) for peer in (A, B, C)) > 40


def test_a_living_leader_is_not_displaced_by_an_equal_claim() -> None:
    voter = Voter(C)
    other = first_in(3, A, B)
    leader = B if other == A else A
    voter.claim(leader, 3)
    assert voter.at(0.0).leader == leader
    voter.claim(other, 3)
    assert voter.at(0.1).leader == leader


@pytest.mark.parametrize("epoch", range(3, 9))
def test_of_two_leaders_of_one_epoch_a_newcomer_follows_the_first_in_its_order_and_the_other_yields(epoch: int) -> None:
    first = first_in(epoch, A, B)
    other = B if first == A else A
    for me, said in ((C, None), (other, (Say.YIELD, epoch)), (first, None)):
        voter = Voter(me)
        if me != C:
            voter.claim(me, epoch)
            assert voter.at(0.0).leader == me
        voter.claim(A, epoch)
        voter.claim(B, epoch)
        result = voter.at(0.1)
        assert result.say == said
        assert result.leader == (None if me == other else first)


def test_of_two_leaders_that_meet_the_lower_epoch_yields() -> None:
    voter = Voter(A)
    voter.claim(A, 3)
    assert voter.at(0.0).leader == A
    voter.claim(B, 4)
    result = voter.at(0.1)
    assert result.say == (Say.YIELD, 3)
    voter.claim(A, 3, yielded=True)
    assert voter.at(0.2).leader == B


def test_a_leader_refreshes_twice_a_second() -> None:
    voter, said = Voter(A, candidates=(A,)), []
    for tick in range(500):
        result = voter.at(tick / 100)
        if result.say is not None:
            voter.claim(A, result.say[1])
            said.append((result.say[0], tick / 100))
    assert [what for what, _ in said] == [Say.CLAIM] + [Say.REFRESH] * (len(said) - 1)
    assert len(said) == pytest.approx(5.0 / REFRESH_S, abs=1)


def test_a_claim_is_refreshed_at_its_time_and_the_node_wakes_for_that() -> None:
    voter = Voter(A, candidates=(A,))
    assert voter.at(10.0).say == (Say.CLAIM, 1)
    voter.claim(A, 1)
    result = voter.at(10.0)
    assert (result.say, result.wake_at) == (None, 10.0 + REFRESH_S)
    assert voter.at(10.0 + REFRESH_S).say == (Say.REFRESH, 1)
    assert voter.at(10.0 + REFRESH_S).say is None


def test_who_claims_anew_after_a_partition_refreshes_that_at_its_time() -> None:
    voter = Voter(A, candidates=(A,))
    voter.claim(A, 3)
    voter.at(0.0)
    voter.witnessed = 5
    assert voter.at(1.0).say == (Say.CLAIM, 6)
    voter.claim(A, 6)
    assert voter.at(1.0).wake_at == 1.0 + REFRESH_S


@pytest.mark.parametrize(("yielded", "waits"), [(False, False), (True, True)])
def test_who_has_let_its_claim_run_out_is_not_waited_for(yielded: bool, waits: bool) -> None:
    """A hung leader is first in the order of the next epoch; one that has yielded may well claim it."""
    hung = first_in(4, A, B)
    me = B if hung == A else A
    voter = Voter(me, candidates=(A, B))
    voter.claim(hung, 3)
    assert voter.at(0.0).leader == hung
    voter.claims[hung] = Claim(3, voter.claims[hung].number, yielded)
    assert voter.at(LEASE_S).leader is None
    expected = LEASE_S + SETTLE_S + (STEP_S if waits else 0.0)
    result = voter.at(LEASE_S + 0.01)
    assert result.wake_at == pytest.approx(expected, abs=0.02)
    assert voter.at(result.wake_at).say == (Say.CLAIM, 4)


def test_who_let_its_own_claim_run_out_claims_again() -> None:
    voter = Voter(A, candidates=(A,))
    voter.claim(A, 3)
    assert voter.at(0.0).leader == A
    assert voter.at(LEASE_S).leader is None
    assert voter.at(LEASE_S + SETTLE_S).say == (Say.CLAIM, 4)


def test_a_pause_of_this_node_makes_leases_longer() -> None:
    patient, hasty = Voter(C), Voter(C)
    for voter in (patient, hasty):
        voter.claim(A, 3)
        voter.at(0.0)
    assert patient.at(5.0, paused_s=4.5).leader == A
    assert hasty.at(5.0).leader is None


def test_a_leader_whose_plans_are_refused_is_passed_over_for_a_minute() -> None:
    voter = Voter(C)
    voter.claim(A, 3)
    voter.at(0.0)
    voter.refused = ((A, 3),)
    assert voter.at(0.1).leader is None
    voter.refused = ()
    voter.claim(A, 5)
    assert voter.at(1.0).leader is None, "it claims again, and is not followed"
    voter.claim(A, 5)
    assert voter.at(0.1 + SETTINGS.pass_over_s).leader == A


@pytest.mark.parametrize("refused", [(B, 3), (A, 2), (A, 4)])
def test_only_the_leader_and_for_this_epoch_is_passed_over(refused: tuple[PeerId, int]) -> None:
    voter = Voter(C)
    voter.claim(A, 3)
    voter.at(0.0)
    voter.refused = (refused,)
    assert voter.at(0.1).leader == A
    voter.refused = ()
    voter.candidates = frozenset({B, C})
    voter.at(0.2)
    voter.claim(B, 4)
    assert voter.at(0.3).leader == B


def test_nobody_goes_back_to_an_earlier_epoch() -> None:
    voter = Voter(C)
    voter.claim(A, 5)
    voter.at(0.0)
    voter.candidates = frozenset({B, C})
    voter.claim(B, 3)
    assert voter.at(0.1).leader is None
    voter.claim(B, 6)
    assert voter.at(0.2).leader == B


def test_the_leader_of_another_part_claims_anew_above_what_was_seen_here() -> None:
    voter = Voter(B)
    voter.claim(B, 3)
    voter.at(0.0)
    voter.witnessed = 5
    assert voter.at(0.1).say == (Say.CLAIM, 6)


def test_an_epoch_that_there_was_never_comes_back() -> None:
    voter = Voter(A, candidates=(A,))
    voter.claim(B, 7)  # dead
    assert voter.at(0.0).say == (Say.CLAIM, 8)


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
        ({A: MAX_EPOCH // 2}, 0, "A"),
        ({A: MAX_EPOCH // 2 + 1}, 0, ""),
    ],
)
def test_a_claim_that_jumps_too_far_does_not_count(claims: dict[PeerId, int], seen: int, counting: str) -> None:
    found = select_plausible({peer: Claim(epoch, (1, 1)) for peer, epoch in claims.items()}, seen)
    assert set(found) == {PeerId(name.lower()) for name in counting}


@pytest.mark.parametrize(("witnessed", "next_epoch"), [(3 + MAX_JUMP, 4 + MAX_JUMP), (4 + MAX_JUMP, 4)])
def test_a_proof_of_an_epoch_counts_within_a_jump(witnessed: int, next_epoch: int) -> None:
    voter = Voter(A, candidates=(A,))
    voter.claim(B, 3)
    voter.at(0.0)
    voter.witnessed = witnessed
    assert voter.at(10.0).say == (Say.CLAIM, next_epoch)


@pytest.mark.parametrize(("witnessed", "said"), [(MAX_EPOCH - 1, (Say.CLAIM, MAX_EPOCH)), (MAX_EPOCH, None)])
def test_there_is_a_last_epoch(witnessed: int, said: tuple[Say, int] | None) -> None:
    voter = Voter(A, candidates=(A,))
    voter.witnessed = witnessed
    assert voter.at(0.0).say == said


def test_what_is_heard_before_all_is_known_does_not_raise_the_epoch() -> None:
    voter = Voter(A, candidates=(A,), synced=False)
    voter.claim(B, 10)
    assert voter.at(0.0) == ElectionResult()
    del voter.claims[B]  # it was not allowed to
    voter.synced = True
    assert voter.at(1.0).say == (Say.CLAIM, 1)


def test_whom_a_node_has_followed_is_never_gone_back_behind() -> None:
    voter = Voter(A, synced=False)
    voter.claim(B, 5)
    assert voter.at(0.0).leader == B
    voter.candidates = frozenset({A})
    assert voter.at(1.0).epoch == 5
    voter.synced = True
    assert voter.at(10.0).say == (Say.CLAIM, 6)


def test_a_wild_proof_of_an_epoch_does_not_end_elections() -> None:
    voter = Voter(A)
    voter.claim(A, 3)
    voter.at(0.0)
    voter.witnessed = MAX_EPOCH
    assert voter.at(0.1).leader == A


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x91\x00", b"\x91\xff", b"\x91\xa1x", b"\x91\xcf" + b"\xff" * 8, b"\x91" * 200_000]
)
def test_a_malformed_claim_is_none(payload: bytes) -> None:
    assert decode_claim(payload, (1, 1)) is None


@pytest.mark.parametrize("yielded", [False, True])
@pytest.mark.parametrize("epoch", [1, 7, MAX_EPOCH])
def test_a_claim_travels(epoch: int, yielded: bool) -> None:
    assert decode_claim(encode_claim(epoch, yielded=yielded), (2, 3)) == Claim(epoch, (2, 3), yielded)


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, 0, -1])
def test_no_claim_names_an_epoch_out_of_bounds(epoch: int) -> None:
    assert decode_claim(encode_claim(epoch), (1, 1)) is None
