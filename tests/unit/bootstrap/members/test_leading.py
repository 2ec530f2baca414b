"""Who may lead, who claims to, and who objects, as the election is told it."""

import pytest

from p2pserve.bootstrap import Identity, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.members.election import CLAIM_KIND, Say, encode_claim
from p2pserve.bootstrap.members.leading import OBJECTION_KIND, Leadership, encode_objection
from p2pserve.bootstrap.members.liveness import Liveness
from p2pserve.bootstrap.members.roster import Roster
from p2pserve.bootstrap.members.states import HeldClaim
from p2pserve.bootstrap.members.table import Table
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, sign_entry

from ..certificates import PEOPLE, TOKENS, admission, payload, record, word

ME, ANN, BOB, CAT, DAN = PEOPLE[:5]
SETTINGS = NetworkSettings()


class World:
    """One node's table, and its leadership, which reads whatever comes."""

    def __init__(self, *, lead: bool = True) -> None:
        let_in = admission()
        self.table = Table(ME, let_in, incarnation=1, settings=SETTINGS)
        self.table.publish(MEMBER_KIND, payload(ME, lead=lead))
        self.liveness = Liveness(ME.peer_id, SETTINGS)
        self.leadership = Leadership(self.table, Roster(self.table, self.liveness, SETTINGS), let_in, SETTINGS)
        self.leadership.read(ME.peer_id)
        self._version = 10

    def here(self, *people: Identity, role: Role = Role.WORKER, lead: bool = True) -> "World":
        """These are alive members."""
        for who in people:
            self.take(record(who, role, lead=lead))
            self.liveness.on_opened(who.peer_id, 0.0, counts=role is not Role.CLIENT)
        self.look()
        return self

    def look(self) -> None:
        self.liveness.update(0.0, 1000.0)
        self.leadership.find_candidates()

    def take(self, *entries: Entry) -> None:
        self.table.merge(entries, 0.0)
        for entry in entries:
            self.leadership.read(PeerId(entry.origin))

    def say(self, who: Identity, kind: str, text: bytes) -> None:
        self._version += 1
        self.take(word(who, kind, text, version=self._version))

    def claims(self, who: Identity, epoch: int, *, yielded: bool = False) -> None:
        self.say(who, CLAIM_KIND, encode_claim(epoch, yielded=yielded))

    def objects(self, who: Identity, leader: Identity, epoch: int) -> None:
        self.say(who, OBJECTION_KIND, encode_objection(leader.peer_id, epoch))

    def leader(self, now: float = 0.0) -> Identity | None:
        found = self.leadership.decide(now, synced=True).leader
        return next((who for who in PEOPLE if who.peer_id == found), None)


def proof(who: Identity, epoch: int, *, lead: bool = True) -> HeldClaim:
    return HeldClaim(record(who, lead=lead), word(who, CLAIM_KIND, encode_claim(epoch)))


# -- claims -----------------------------------------------------------------------------------------------------------


def test_the_claim_of_a_living_member_that_may_lead_counts() -> None:
    world = World().here(ANN, BOB)
    world.claims(ANN, 3)
    assert world.leader() is ANN
    assert world.leadership.epoch == 3


def test_who_may_not_lead_claims_in_vain() -> None:
    world = World().here(ANN, lead=False)
    world.claims(ANN, 3)
    assert world.leader() is None
    assert world.leadership.epoch == 0


def test_a_client_neither_leads_nor_objects() -> None:
    world = World().here(ANN)
    world.table.merge((record(BOB, Role.CLIENT),), 0.0, from_client=BOB.peer_id)
    world.leadership.read(BOB.peer_id)
    world.claims(ANN, 3)
    assert world.leader() is ANN


def test_who_is_gone_does_not_lead_and_what_it_claimed_is_remembered() -> None:
    world = World().here(ANN)
    world.claims(ANN, 3)
    assert world.leader() is ANN
    world.liveness.on_closed(ANN.peer_id, 0.0, redialled=False)
    world.look()
    assert world.leader(100.0) is None
    result = world.leadership.decide(110.0, synced=True)
    assert (result.leader, result.say) == (None, (Say.CLAIM, 4))


def test_who_is_forgotten_claims_nothing_any_more() -> None:
    world = World().here(ANN)
    world.claims(ANN, 3)
    world.objects(ANN, ME, 3)
    world.table.forget(ANN.peer_id, 100.0)
    world.leadership.read(ANN.peer_id)
    world.look()
    assert world.leader() is None
    assert world.leadership.epoch == 3  # of which there is still proof


def test_a_record_without_the_right_takes_it_away() -> None:
    world = World().here(ANN)
    world.claims(ANN, 3)
    world.take(record(ANN, version=50, lead=False))
    world.look()
    assert world.leader() is None


def test_a_malformed_claim_is_none() -> None:
    world = World().here(ANN)
    world.say(ANN, CLAIM_KIND, b"\xc1")
    assert world.leader() is None


@pytest.mark.parametrize(
    ("leader", "yielded", "is_refreshed"),
    [
        ((ANN, 3), False, True),
        ((ANN, 2), False, False),
        ((BOB, 3), False, False),
        (None, False, False),
        ((ANN, 3), True, False),
    ],
)
def test_a_claim_of_the_leader_that_is_followed_is_only_said_anew(
    leader: tuple[Identity, int] | None, yielded: bool, is_refreshed: bool
) -> None:
    world = World().here(ANN)
    world.claims(ANN, 3, yielded=yielded)
    followed = None if leader is None else (leader[0].peer_id, leader[1])
    assert world.leadership.is_refreshed(ANN.peer_id, followed) is is_refreshed
    assert not world.leadership.is_refreshed(CAT.peer_id, followed)


# -- proofs -----------------------------------------------------------------------------------------------------------


def test_the_highest_claim_is_kept_as_proof() -> None:
    world = World().here(ANN, BOB)
    world.claims(ANN, 5)
    first = world.leadership.latest
    world.claims(BOB, 5)
    world.claims(BOB, 4)
    assert world.leadership.latest is first
    assert first is not None
    assert first.claim.origin == ANN.peer_id
    world.claims(BOB, 6)
    assert world.leadership.epoch == 6


def test_a_proof_counts_once_and_a_higher_one_after_it() -> None:
    world = World()
    assert world.leadership.take_latest(proof(ANN, 5))
    assert not world.leadership.take_latest(proof(BOB, 5))
    assert not world.leadership.take_latest(proof(BOB, 4))
    assert world.leadership.take_latest(proof(BOB, 6))
    assert world.leadership.epoch == 6


def forged(entry: Entry) -> Entry:
    return Entry(entry.origin, entry.kind, entry.incarnation, entry.version, entry.payload, bytes(64))


GOOD = proof(ANN, 5)
WITH_BOBS_TOKEN = payload(ANN, token=TOKENS[Role.WORKER, True], peer=BOB.peer_id)


@pytest.mark.parametrize(
    "latest",
    [
        proof(ANN, 5, lead=False),
        HeldClaim(forged(GOOD.record), GOOD.claim),
        HeldClaim(GOOD.record, forged(GOOD.claim)),
        HeldClaim(record(BOB), GOOD.claim),
        HeldClaim(GOOD.record, word(ANN, "other", encode_claim(5))),
        HeldClaim(sign_entry(ANN, "other", 1, 1, payload(ANN)), GOOD.claim),
        HeldClaim(sign_entry(ANN, MEMBER_KIND, 1, 1, b"\xc1"), GOOD.claim),
        HeldClaim(GOOD.record, word(ANN, CLAIM_KIND, b"\xc1")),
        HeldClaim(sign_entry(ANN, MEMBER_KIND, 1, 1, WITH_BOBS_TOKEN), GOOD.claim),
    ],
    ids=["no right", "record", "claim", "another's", "kind", "kind of record", "no record", "no claim", "not its own"],
)  # fmt: skip
def test_what_proves_nothing_does_not_count(latest: HeldClaim) -> None:
    leadership = World().leadership
    assert not leadership.take_latest(latest)
    assert (leadership.epoch, leadership.latest) == (0, None)


# -- objections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objecting", "follows"),
    [((), True), ((BOB,), True), ((BOB, CAT), True), ((BOB, CAT, DAN), False), ((ANN, BOB, CAT), True)],
)
def test_a_leader_is_passed_over_when_more_than_half_of_the_other_boxes_object(
    objecting: tuple[Identity, ...], follows: bool
) -> None:
    world = World().here(ANN, BOB, CAT, DAN)
    world.claims(ANN, 3)
    assert world.leader() is ANN
    for who in objecting:
        world.objects(who, ANN, 3)
    assert (world.leader() is ANN) is follows


def test_of_three_boxes_two_pass_a_leader_over() -> None:
    world = World().here(ANN, BOB)
    world.claims(ANN, 3)
    assert world.leader() is ANN
    world.objects(BOB, ANN, 3)
    assert world.leader() is ANN
    world.table.publish(OBJECTION_KIND, encode_objection(ANN.peer_id, 3))
    world.leadership.read(ME.peer_id)
    assert world.leader() is None


def test_of_two_boxes_neither_passes_the_other_over() -> None:
    world = World().here(ANN)
    world.claims(ANN, 3)
    assert world.leader() is ANN
    world.table.publish(OBJECTION_KIND, encode_objection(ANN.peer_id, 3))
    world.leadership.read(ME.peer_id)
    assert world.leader() is ANN


def test_objections_of_those_that_are_gone_and_to_other_epochs_do_not_count() -> None:
    world = World().here(ANN, BOB, CAT, DAN)
    world.claims(ANN, 3)
    world.leader()
    for who in (BOB, CAT):
        world.objects(who, ANN, 3)
    world.objects(DAN, ANN, 2)
    assert world.leader() is ANN
    world.say(DAN, OBJECTION_KIND, b"\xc1")
    assert world.leader() is ANN
    world.objects(DAN, ANN, 3)
    world.liveness.on_closed(CAT.peer_id, 0.0, redialled=False)
    world.liveness.on_closed(BOB.peer_id, 0.0, redialled=False)
    world.look()
    assert world.leader() is ANN  # one of the two others that are here


def test_who_takes_an_objection_back_has_none() -> None:
    world = World().here(ANN, BOB)
    world.claims(ANN, 3)
    world.leader()
    world.objects(BOB, ANN, 3)
    world.objects(BOB, ANN, 1)
    world.table.publish(OBJECTION_KIND, encode_objection(ANN.peer_id, 3))
    world.leadership.read(ME.peer_id)
    assert world.leader() is ANN
