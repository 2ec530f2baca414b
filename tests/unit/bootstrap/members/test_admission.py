"""Who is let in: by version, network, record and credential of a peer, and by what the network's owner has ordered."""

import msgspec
import pytest

from p2pserve.bootstrap import Identity, JoinToken, NetworkKey, PeerId, Role, TokenError
from p2pserve.bootstrap.errors import OtherProtocol, ProtocolError, TokenSpent
from p2pserve.bootstrap.members.admission import MAX_VISITORS, Admission
from p2pserve.bootstrap.streams.control import PROTOCOL_VERSION, Hello, Welcome
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, MemberRecord, sign_entry
from p2pserve.bootstrap.trust.orders import Orders, Renewal, sign_orders

KEY, OTHER_KEY = NetworkKey(b"n" * 32), NetworkKey(b"x" * 32)
ANN, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
ADMISSION = Admission(KEY.public)
NOW = 1000.0


def record(
    who: Identity = ANN,
    role: Role = Role.WORKER,
    *,
    token_role: Role | None = None,
    key: NetworkKey = KEY,
    expires_at: float = 2000.0,
    bare: bool = False,
) -> MemberRecord:
    token = JoinToken.parse(key.issue((), token_role or role, expires_at))
    return MemberRecord(role, "192.0.2.1", 4001, None if bare else token.credential(who.peer_id))


def entry(shown: MemberRecord, who: Identity = ANN, kind: str = MEMBER_KIND) -> Entry:
    return sign_entry(who, kind, 1, 1, msgspec.msgpack.encode(shown))


def hello(shown: MemberRecord, *, version: int = PROTOCOL_VERSION, network: bytes = KEY.public) -> Hello:
    return Hello(version, network, entry(shown))


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("kind", [Hello, Welcome])
def test_a_member_with_a_token_of_its_role_is_let_in(role: Role, kind: type[Hello] | type[Welcome]) -> None:
    shown = record(role=role)
    greeting = kind(PROTOCOL_VERSION, KEY.public, entry(shown))
    assert ADMISSION.check_greeting(greeting, ANN.peer_id, NOW) == shown


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (record(bare=True), "no join token was shown; ask"),
        (record(key=OTHER_KEY), "for another network"),
        (record(expires_at=NOW), "expired 0 s ago"),
        (record(expires_at=NOW - 60), "expired 1 min ago"),
        (record(token_role=Role.CLIENT), "for the role 'client', not 'worker'; use one for 'worker'"),
        (record(role=Role.ADMIN, token_role=Role.WORKER), "for the role 'worker', not 'admin'"),
        (record(role=Role.ADMIN, token_role=Role.CLIENT), "for the role 'client', not 'admin'"),
        (record(role=Role.WORKER, token_role=Role.ADMIN), "for the role 'admin', not 'worker'"),
        (record(BOB), "made for another peer"),
    ],
)
def test_a_bad_credential_is_told(shown: MemberRecord, reason: str) -> None:
    with pytest.raises(TokenError, match=reason):
        ADMISSION.check_greeting(hello(shown), ANN.peer_id, NOW)


def test_an_admin_may_come_as_a_client() -> None:
    shown = record(role=Role.CLIENT, token_role=Role.ADMIN)
    assert ADMISSION.check_greeting(hello(shown), ANN.peer_id, NOW) == shown
    assert ADMISSION.read_grant(ANN.peer_id, shown).role is Role.ADMIN


def visit(who: Identity, token: JoinToken) -> tuple[Hello, PeerId]:
    """A box that looks around with a worker's token: its greeting, and who it is."""
    shown = MemberRecord(Role.CLIENT, "192.0.2.1", 4001, token.credential(who.peer_id))
    return hello_of(shown, who), who.peer_id


def hello_of(shown: MemberRecord, who: Identity) -> Hello:
    return Hello(PROTOCOL_VERSION, KEY.public, entry(shown, who))


def test_a_worker_that_looks_around_takes_no_place_and_asks_as_a_client() -> None:
    token, admission = JoinToken.parse(KEY.issue((), Role.WORKER, NOW + 60, uses=1)), Admission(KEY.public)
    greeting, ann = visit(ANN, token)
    shown = admission.check_greeting(greeting, ann, NOW)
    assert admission.read_grant(ann, shown).asks_as(shown.role) is Role.CLIENT
    assert admission.count_places(ann, "") == (1, 0, False)
    joining = MemberRecord(Role.WORKER, "192.0.2.1", 4001, token.credential(BOB.peer_id))
    assert admission.check_greeting(hello_of(joining, BOB), BOB.peer_id, NOW) == joining
    assert admission.count_places(ann, BOB.peer_id) == (1, 1, True)
    assert admission.count_places(BOB.peer_id, BOB.peer_id) is None  # only who looks around is told
    admission.vacate(BOB.peer_id)
    assert admission.count_places(ann, "") == (1, 1, False)  # bound to that box for good
    assert admission.check_greeting(*visit(ANN, token), NOW + 1.0) == shown  # though the token is used up


def test_a_place_that_others_may_have_counts_as_left() -> None:
    token, admission = JoinToken.parse(KEY.issue((), Role.WORKER, NOW + 60, uses=2)), Admission(KEY.public)
    for who in (ANN, BOB):
        joining = MemberRecord(Role.WORKER, "192.0.2.1", 4001, token.credential(who.peer_id))
        admission.check_greeting(hello_of(joining, who), who.peer_id, NOW)
    eve = Identity(b"e" * 32)
    admission.check_greeting(*visit(eve, token), NOW)
    assert admission.count_places(eve.peer_id, "") == (2, 2, False)
    admission.vacate(BOB.peer_id)
    assert admission.count_places(eve.peer_id, BOB.peer_id) == (2, 1, True)
    admission.release(eve.peer_id)
    assert admission.count_places(eve.peer_id, "") is None


def test_few_look_around_with_one_token_at_once() -> None:
    token, admission = JoinToken.parse(KEY.issue((), Role.WORKER, NOW + 60)), Admission(KEY.public)
    boxes = [Identity(bytes([number]) * 32) for number in range(1, MAX_VISITORS + 2)]
    for each in boxes[:-1]:
        admission.check_greeting(*visit(each, token), NOW)
    with pytest.raises(TokenError, match=f"{MAX_VISITORS} boxes look around .* try again in a minute"):
        admission.check_greeting(*visit(boxes[-1], token), NOW)
    admission.check_greeting(*visit(boxes[0], token), NOW)  # it is counted already
    admission.release(boxes[0].peer_id)
    admission.check_greeting(*visit(boxes[-1], token), NOW)


def test_a_revoked_or_ended_token_lets_nobody_look_around() -> None:
    token, admission = JoinToken.parse(KEY.issue((), Role.WORKER, NOW + 60)), Admission(KEY.public)
    with pytest.raises(TokenError, match="expired"):
        admission.check_greeting(*visit(ANN, token), NOW + 60)
    admission.take_orders(sign_orders(KEY, Orders(number=1, revoked=(token.grant.certificate,))))
    with pytest.raises(TokenSpent, match="revoked"):
        admission.check_greeting(*visit(ANN, token), NOW)


def test_a_token_is_good_until_the_second_it_expires() -> None:
    shown = record(expires_at=NOW + 1)
    assert ADMISSION.check_greeting(hello(shown), ANN.peer_id, NOW + 0.9) == shown
    with pytest.raises(TokenError, match="expired"):
        Admission(KEY.public).check_greeting(hello(shown), ANN.peer_id, NOW + 1.0)


def test_expiry_bounds_joining_and_not_coming_back() -> None:
    shown, admission = record(expires_at=NOW + 1), Admission(KEY.public)
    admission.check_greeting(hello(shown), ANN.peer_id, NOW)
    assert admission.check_greeting(hello(shown), ANN.peer_id, NOW + 60.0) == shown
    admission.vacate(ANN.peer_id)
    assert admission.check_greeting(hello(shown), ANN.peer_id, NOW + 60.0) == shown  # though its record is forgotten


def test_who_was_only_told_of_has_not_joined_until_somebody_has_seen_it() -> None:
    shown, admission = record(expires_at=NOW - 60), Admission(KEY.public)
    admission.check_record(ANN.peer_id, shown)  # members that joined in time are gossiped of for as long as they stay
    with pytest.raises(TokenError, match="expired"):
        admission.check_greeting(hello(shown), ANN.peer_id, NOW)
    admission.note_seen(ANN.peer_id)
    assert admission.check_greeting(hello(shown), ANN.peer_id, NOW) == shown


def test_who_has_used_a_certificate_may_come_back_with_it_after_a_restart_of_those_it_asks() -> None:
    shown = record(expires_at=NOW + 1)
    before, after = Admission(KEY.public), Admission(KEY.public)
    before.check_greeting(hello(shown), ANN.peer_id, NOW)
    after.restore_holders(before.holders)
    assert after.check_greeting(hello(shown), ANN.peer_id, NOW + 60.0) == shown
    before.release(ANN.peer_id)
    with pytest.raises(TokenError, match="expired"):
        before.check_greeting(hello(shown), ANN.peer_id, NOW + 60.0)


@pytest.mark.parametrize(
    "before",
    [
        record(expires_at=NOW + 1),  # another token
        record(role=Role.ADMIN, expires_at=NOW + 1),
    ],
)
def test_another_credential_or_role_than_before_is_joining(before: MemberRecord) -> None:
    shown, admission = record(expires_at=NOW - 60), Admission(KEY.public)
    admission.check_greeting(hello(before), ANN.peer_id, NOW)
    with pytest.raises(TokenError, match="expired"):
        admission.check_greeting(hello(shown), ANN.peer_id, NOW)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_told_before_anything_else(version: int) -> None:
    expected = (
        f"protocol versions {version}.* and {PROTOCOL_VERSION} .*; upgrade the box that speaks version "
        f"{min(version, PROTOCOL_VERSION)}$"
    )
    with pytest.raises(OtherProtocol, match=expected):
        ADMISSION.check_greeting(hello(record(bare=True), version=version), ANN.peer_id, NOW)


def test_another_network_is_told_by_its_first_letters() -> None:
    with pytest.raises(TokenError, match=f"another network \\({OTHER_KEY.public.hex()[:8]}, this one is"):
        ADMISSION.check_greeting(hello(record(), network=OTHER_KEY.public), ANN.peer_id, NOW)


FORGED = [
    entry(record(BOB), BOB),  # somebody else's record
    entry(record(), kind="advert"),
    sign_entry(ANN, MEMBER_KIND, 1, 1, b"no record"),
    msgspec.structs.replace(entry(record()), version=2),
    msgspec.structs.replace(entry(record()), signature=b""),
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_record_that_is_not_the_peers_own_is_refused(forged: Entry) -> None:
    with pytest.raises(ProtocolError, match="malformed or not its own"):
        ADMISSION.check_greeting(Hello(PROTOCOL_VERSION, KEY.public, forged), ANN.peer_id, NOW)


# -- what the owner orders --------------------------------------------------------------------------------------------


TOKEN = JoinToken.parse(KEY.issue((), Role.WORKER, 1000.0, uses=2))
NAME = TOKEN.grant.certificate
LATER = JoinToken.parse(KEY.issue((), Role.WORKER, 2000.0, uses=2, secret=TOKEN.secret))


def shown_by(who: Identity, token: JoinToken = TOKEN) -> MemberRecord:
    return MemberRecord(Role.WORKER, "192.0.2.1", 4001, token.credential(who.peer_id))


@pytest.mark.parametrize(("number", "counts"), [(4, False), (5, False), (6, True)])
def test_orders_are_followed_when_they_are_the_owners_and_newer(number: int, counts: bool) -> None:
    admission = Admission(KEY.public)
    assert admission.take_orders(sign_orders(KEY, Orders(5)))
    later = sign_orders(KEY, Orders(number, ("a" * 16,)))
    assert admission.take_orders(later) is counts
    assert admission.orders.revoked == (("a" * 16,) if counts else ())
    assert (admission.signed_orders == later) is counts
    assert not admission.take_orders(sign_orders(OTHER_KEY, Orders(100)))


def token_for(uses: int, expires_at: float = 2000.0) -> JoinToken:
    return JoinToken.parse(KEY.issue((), Role.WORKER, expires_at, uses=uses))


def test_a_certificate_is_for_so_many_boxes_and_for_each_as_often_as_it_likes() -> None:
    admission, token = Admission(KEY.public), token_for(2)
    people = [Identity(bytes([number]) * 32) for number in range(1, 4)]
    for who in (*people[:2], *people[:2]):
        admission.check_record(who.peer_id, shown_by(who, token), NOW)
    with pytest.raises(TokenSpent, match="for 2 boxes and has been used by as many"):
        admission.check_record(people[2].peer_id, shown_by(people[2], token), NOW)
    admission.release(people[0].peer_id)
    admission.check_record(people[2].peer_id, shown_by(people[2], token), NOW)


def test_whether_there_is_a_place_is_known_without_a_signature() -> None:
    admission, token = Admission(KEY.public), token_for(1)
    forged = msgspec.structs.replace(shown_by(BOB, token), credential=None)
    assert admission.has_place(BOB.peer_id, shown_by(BOB, token))
    admission.check_record(ANN.peer_id, shown_by(ANN, token), NOW)
    assert not admission.has_place(BOB.peer_id, shown_by(BOB, token))
    assert admission.has_place(ANN.peer_id, shown_by(ANN, token))
    assert admission.has_place(BOB.peer_id, forged), "what is no record is for the checks that follow"
    admission.release(ANN.peer_id)
    assert admission.has_place(BOB.peer_id, shown_by(BOB, token))


CROWD = [Identity(bytes([number]) * 32) for number in range(1, 5)]


def is_let_in(admission: Admission, who: Identity, token: JoinToken, *, is_here: bool = True) -> bool:
    try:
        admission.check_record(who.peer_id, shown_by(who, token), NOW if is_here else None)
    except TokenSpent:
        return False
    return True


def test_one_holder_of_a_token_for_several_cannot_use_it_up_with_identities_that_are_gone() -> None:
    """All places are taken by boxes that were here. One that is forgotten yields its place, and to one only."""
    admission, token = Admission(KEY.public), token_for(2)
    first, second, third, fourth = CROWD
    assert is_let_in(admission, first, token)
    assert is_let_in(admission, second, token)
    assert not is_let_in(admission, third, token)
    admission.vacate(first.peer_id)
    assert admission.has_place(third.peer_id, shown_by(third, token))
    assert is_let_in(admission, third, token)
    assert not is_let_in(admission, fourth, token)
    assert not is_let_in(admission, first, token), "its place is another's now"
    assert admission.holders[token.grant.certificate] == {second.peer_id, third.peer_id}


@pytest.mark.parametrize("is_back_itself", [True, False])
def test_who_comes_back_in_time_keeps_its_place(is_back_itself: bool) -> None:
    admission, token = Admission(KEY.public), token_for(2)
    for who in CROWD[:2]:
        assert is_let_in(admission, who, token)
    admission.vacate(CROWD[0].peer_id)
    assert is_let_in(admission, CROWD[0], token, is_here=is_back_itself)
    admission.note_seen(CROWD[0].peer_id)
    assert not is_let_in(admission, CROWD[2], token)


@pytest.mark.parametrize(("role", "is_free"), [(Role.WORKER, False), (Role.CLIENT, True)])
def test_a_token_for_one_box_stays_bound_to_it_and_one_for_a_client_does_not(role: Role, is_free: bool) -> None:
    admission, token = Admission(KEY.public), JoinToken.parse(KEY.issue((), role, 2000.0, uses=1))
    first, second = (MemberRecord(role, "192.0.2.1", 4001, token.credential(who.peer_id)) for who in CROWD[:2])
    admission.check_record(CROWD[0].peer_id, first, NOW)
    admission.vacate(CROWD[0].peer_id)
    assert admission.has_place(CROWD[1].peer_id, second) is is_free


def test_who_is_at_the_door_gets_the_place_of_one_that_was_only_told_of() -> None:
    admission, token = Admission(KEY.public), token_for(2)
    told, seen, third, fourth = CROWD
    assert is_let_in(admission, told, token, is_here=False)
    assert is_let_in(admission, seen, token, is_here=False)
    admission.note_seen(seen.peer_id)
    assert not is_let_in(admission, third, token, is_here=False), "or an inventor of members made others check them all"
    assert is_let_in(admission, third, token)
    assert not is_let_in(admission, fourth, token)
    assert admission.holders[token.grant.certificate] == {seen.peer_id, third.peer_id}


def test_only_who_was_never_seen_has_used_no_place() -> None:
    admission, token = Admission(KEY.public), token_for(2)
    assert is_let_in(admission, CROWD[0], token, is_here=False)
    assert is_let_in(admission, CROWD[1], token)
    for who in CROWD[:2]:
        admission.release_unseen(who.peer_id)
    assert admission.holders[token.grant.certificate] == {CROWD[1].peer_id}


def test_who_was_expelled_is_not_greeted() -> None:
    admission, token = Admission(KEY.public), token_for(2)
    entry = sign_entry(ANN, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(shown_by(ANN, token)))
    hello = Hello(PROTOCOL_VERSION, KEY.public, entry)
    admission.check_greeting(hello, ANN.peer_id, NOW)
    admission.expel(ANN.peer_id)
    with pytest.raises(TokenError, match="proves that it lies"):
        admission.check_greeting(hello, ANN.peer_id, NOW)


def test_who_shows_a_revoked_certificate_is_told() -> None:
    admission, token = Admission(KEY.public), token_for(1)
    admission.take_orders(sign_orders(KEY, Orders(1, ("a" * 16,))))
    admission.check_record(ANN.peer_id, shown_by(ANN, token), NOW)
    admission.take_orders(sign_orders(KEY, Orders(2, (token.grant.certificate,))))
    with pytest.raises(TokenSpent, match="revoked"):
        admission.check_record(ANN.peer_id, shown_by(ANN, token), NOW)


@pytest.mark.parametrize(("until", "is_let_in"), [(NOW + 1, True), (NOW, False), (None, False)])
def test_whose_certificate_was_renewed_is_let_in_with_the_old_one_until_the_new_one_ends(
    until: float | None, is_let_in: bool
) -> None:
    admission, token = Admission(KEY.public), token_for(1, NOW - 60)
    version, network, role, _, *rest = msgspec.msgpack.decode(token.certificate)
    later = b"\xc1" if until is None else msgspec.msgpack.encode([version, network, role, int(until), *rest])
    renewal = Renewal(later, KEY.sign(later))
    admission.take_orders(sign_orders(KEY, Orders(1, renewed={token.grant.certificate: renewal})))
    if is_let_in:
        admission.check_record(ANN.peer_id, shown_by(ANN, token), NOW)
    else:
        with pytest.raises(TokenError, match="expired"):
            admission.check_record(ANN.peer_id, shown_by(ANN, token), NOW)
    with pytest.raises(TokenError, match="expired"):
        admission.check_record(BOB.peer_id, shown_by(BOB, token_for(1, NOW - 60)), NOW)


def ordered(orders: Orders) -> Admission:
    found = Admission(KEY.public)
    assert found.take_orders(sign_orders(KEY, orders))
    return found


def test_a_token_for_one_box_is_bound_to_the_first_that_shows_it() -> None:
    admission = Admission(KEY.public)
    token = JoinToken.parse(KEY.issue((), Role.WORKER, 2000.0, uses=1))
    admission.check_record(ANN.peer_id, shown_by(ANN, token), NOW)
    with pytest.raises(TokenSpent, match=f"the join token {token.grant.certificate} is for one box and has been used"):
        admission.check_record(BOB.peer_id, shown_by(BOB, token), NOW)
    admission.check_record(ANN.peer_id, shown_by(ANN, token), NOW)
    assert admission.was_admitted(ANN.peer_id, token.grant)
    assert not admission.was_admitted(BOB.peer_id, token.grant)


@pytest.mark.parametrize("now", [None, 1.0])
def test_who_was_revoked_is_not_let_in_nor_told_of(now: float | None) -> None:
    with pytest.raises(TokenSpent, match=f"{NAME} was revoked"):
        ordered(Orders(1, (NAME,))).check_record(ANN.peer_id, shown_by(ANN), now)


def test_a_renewed_certificate_lets_in_with_the_old_one_shown() -> None:
    admission = ordered(Orders(1, (), {NAME: Renewal(LATER.certificate, LATER.signature)}))
    admission.check_record(ANN.peer_id, shown_by(ANN), 1999.0)
    admission.check_record(ANN.peer_id, shown_by(ANN), 2000.0)
    with pytest.raises(TokenError, match="expired"):
        admission.check_record(BOB.peer_id, shown_by(BOB), 2000.0)


def test_one_that_was_renewed_for_its_members_lets_nobody_else_in() -> None:
    admission = ordered(Orders(1, (), {NAME: Renewal(LATER.certificate, LATER.signature, (ANN.peer_id,))}))
    admission.check_record(ANN.peer_id, shown_by(ANN), 1500.0)
    admission.check_record(ANN.peer_id, shown_by(ANN, LATER), 1500.0)
    with pytest.raises(TokenError, match="expired"):
        admission.check_record(BOB.peer_id, shown_by(BOB), 1500.0)
    with pytest.raises(TokenError, match="renewed for other boxes"):
        admission.check_record(BOB.peer_id, shown_by(BOB, LATER), 1500.0)
    admission.check_record(BOB.peer_id, shown_by(BOB), 999.0)  # until its own end it lets in as it did
