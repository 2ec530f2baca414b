"""Who is let in: by the version, the network, the record and the credential that a peer shows."""

import msgspec
import pytest

from p2pserve.bootstrap import Identity, JoinToken, NetworkKey, Role, TokenError
from p2pserve.bootstrap.errors import ProtocolError, TokenSpent
from p2pserve.bootstrap.members.admission import Admission
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
    assert ADMISSION.check_greeting(greeting, ANN.peer_id, None, NOW) == shown


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (record(bare=True), "no join token was shown; ask"),
        (record(key=OTHER_KEY), "for another network"),
        (record(expires_at=NOW), "expired 0 s ago"),
        (record(expires_at=NOW - 60), "expired 1 min ago"),
        (record(token_role=Role.CLIENT), "for the role 'client', not 'worker'; use one for 'worker'"),
        (record(role=Role.ADMIN, token_role=Role.WORKER), "for the role 'worker', not 'admin'"),
        (record(BOB), "made for another peer"),
    ],
)
def test_a_bad_credential_is_told(shown: MemberRecord, reason: str) -> None:
    with pytest.raises(TokenError, match=reason):
        ADMISSION.check_greeting(hello(shown), ANN.peer_id, None, NOW)


def test_a_token_is_good_until_the_second_it_expires() -> None:
    shown = record(expires_at=NOW + 1)
    assert ADMISSION.check_greeting(hello(shown), ANN.peer_id, None, NOW + 0.9) == shown
    with pytest.raises(TokenError, match="expired"):
        ADMISSION.check_greeting(hello(shown), ANN.peer_id, None, NOW + 1.0)


def test_expiry_bounds_joining_and_not_coming_back() -> None:
    shown = record(expires_at=NOW - 60)
    assert ADMISSION.check_greeting(hello(shown), ANN.peer_id, shown, NOW) == shown
    ADMISSION.check_record(ANN.peer_id, shown)  # gossip of those who joined in time goes on
    with pytest.raises(TokenError, match="expired"):
        ADMISSION.check_record(ANN.peer_id, shown, NOW)


@pytest.mark.parametrize(
    "known",
    [
        record(expires_at=NOW - 50),  # another token
        MemberRecord(Role.ADMIN, "192.0.2.1", 4001, record(expires_at=NOW - 60).credential),
    ],
)
def test_another_credential_or_role_than_before_is_joining(known: MemberRecord) -> None:
    shown = record(expires_at=NOW - 60)
    with pytest.raises(TokenError, match="expired"):
        ADMISSION.check_greeting(hello(shown), ANN.peer_id, known, NOW)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_told_before_anything_else(version: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"protocol version {version} and this node version {PROTOCOL_VERSION}; use"
    ):
        ADMISSION.check_greeting(hello(record(bare=True), version=version), ANN.peer_id, None, NOW)


def test_another_network_is_told_by_its_first_letters() -> None:
    with pytest.raises(TokenError, match=f"another network \\({OTHER_KEY.public.hex()[:8]}, this one is"):
        ADMISSION.check_greeting(hello(record(), network=OTHER_KEY.public), ANN.peer_id, None, NOW)


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
        ADMISSION.check_greeting(Hello(PROTOCOL_VERSION, KEY.public, forged), ANN.peer_id, None, NOW)


# -- what the owner has ordered ---------------------------------------------------------------------------------------


TOKEN = JoinToken.parse(KEY.issue((), Role.WORKER, 1000.0, uses=2))
NAME = TOKEN.grant.certificate
LATER = JoinToken.parse(KEY.issue((), Role.WORKER, 2000.0, uses=2, secret=TOKEN.secret))


def shown_by(who: Identity, token: JoinToken = TOKEN) -> MemberRecord:
    return MemberRecord(Role.WORKER, "192.0.2.1", 4001, token.credential(who.peer_id))


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
    with pytest.raises(TokenError, match="expired"):
        admission.check_record(ANN.peer_id, shown_by(ANN), 2000.0)


def test_one_that_was_renewed_for_its_members_lets_nobody_else_in() -> None:
    admission = ordered(Orders(1, (), {NAME: Renewal(LATER.certificate, LATER.signature, (ANN.peer_id,))}))
    admission.check_record(ANN.peer_id, shown_by(ANN), 1500.0)
    admission.check_record(ANN.peer_id, shown_by(ANN, LATER), 1500.0)
    with pytest.raises(TokenError, match="expired"):
        admission.check_record(BOB.peer_id, shown_by(BOB), 1500.0)
    with pytest.raises(TokenError, match="renewed for other boxes"):
        admission.check_record(BOB.peer_id, shown_by(BOB, LATER), 1500.0)
    admission.check_record(BOB.peer_id, shown_by(BOB), 999.0)  # until its own end it lets in as it did
