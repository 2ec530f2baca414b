"""Join tokens: who may join what, until when, and what each kind of bad token is told."""

import base64

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pserve.bootstrap import Bootstrap, Identity, JoinToken, NetworkKey, PeerId, Role, TokenError, admit
from p2pserve.bootstrap.errors import AddressError
from p2pserve.bootstrap.trust.tokens import Credential, admit_credential, parse_bootstrap

KEY, OTHER_KEY = NetworkKey(b"k" * 32), NetworkKey(b"o" * 32)
PEER, THIEF = Identity(b"p" * 32), Identity(b"t" * 32)
BOOTSTRAP = Bootstrap("203.0.113.7", 4001, PEER.peer_id)
TOKEN = KEY.issue((BOOTSTRAP,), Role.WORKER, 1000.0)


def test_a_token_says_what_it_was_issued_for() -> None:
    token = JoinToken.parse(TOKEN)
    assert TOKEN.startswith("p2p_worker_")
    assert (token.network, token.bootstraps, token.role, token.grant.expires_at) == (
        KEY.public,
        (BOOTSTRAP,),
        Role.WORKER,
        1000,
    )
    assert admit(f"  {TOKEN}\n", KEY.public, 999.0) == token.grant
    assert "secret" not in repr(token)


def test_every_token_is_another() -> None:
    assert KEY.issue((BOOTSTRAP,), Role.WORKER, 1000.0) != TOKEN


def flipped(index: int) -> str:
    """The token with one bit of its data changed."""
    raw = bytearray(base64.urlsafe_b64decode(TOKEN.split("_", 2)[2] + "=="))
    raw[index] ^= 1
    return "p2p_worker_" + base64.urlsafe_b64encode(bytes(raw)).decode().rstrip("=")


@pytest.mark.parametrize(
    ("text", "now", "reason"),
    [
        ("", 0.0, "malformed: it is not of the form"),
        ("p2p", 0.0, "malformed: it is not of the form"),
        ("hello_worker_abc", 0.0, "malformed: it does not start"),
        ("p2p_worker_", 0.0, "malformed: a part is missing"),
        ("p2p_worker_!!!!", 0.0, "malformed: a part is missing"),
        ("p2p_worker_aGVsbG8", 0.0, "malformed: a part is missing"),
        ("p2p_worker_ä", 0.0, "malformed: a part is missing"),
        (TOKEN[:-9], 0.0, "(malformed|forged)"),
        (TOKEN + "A" * 9000, 0.0, "malformed: it is longer"),
        (flipped(-1), 0.0, "forged: its signature"),
        (flipped(60), 0.0, "(forged|malformed)"),
        (flipped(-70), 0.0, "forged: its secret"),
        (TOKEN.replace("_worker_", "_admin_"), 0.0, "forged: it says 'admin' outside and 'worker' inside"),
        (OTHER_KEY.issue((), Role.WORKER, 1000.0), 0.0, "for another network"),
        (TOKEN, 1000.0, "expired 0 s ago"),
        (TOKEN, 1000.0 + 7200, "expired 2 h ago"),
    ],
)
def test_a_bad_token_is_told_why(text: str, now: float, reason: str) -> None:
    with pytest.raises(TokenError, match=reason) as caught:
        admit(text, KEY.public, now)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "the fix comes after the reason"


@pytest.mark.parametrize("rest", [b"\x91\xa1\xff", b"\x92\xc4\x01a" + b"\x91" * 4000, b"\x91" * 4000])
def test_nonsense_in_a_credential_is_malformed(rest: bytes) -> None:
    certificate = b"\x96\x01\xc4\x01a\xa1\xff" + rest  # its role is no UTF-8
    for nonsense in (rest, certificate):
        with pytest.raises(TokenError, match="malformed"):
            admit_credential(Credential(nonsense, b"", b""), PEER.peer_id, KEY.public, 0.0)
        with pytest.raises(TokenError, match="malformed"):
            admit("p2p_worker_" + base64.urlsafe_b64encode(nonsense + bytes(64)).decode().rstrip("="), b"", 0.0)


@pytest.mark.parametrize("kind", ["worker", "client"])
def test_a_part_of_a_token_is_told_how_a_whole_one_begins(kind: str) -> None:
    with pytest.raises(TokenError, match=f"copy the whole string, it looks like .*p2p_{kind}_"):
        admit(f"p2p_{kind}_kpLEs...", KEY.public, 0.0)


def test_no_single_bit_can_be_changed() -> None:
    size = len(base64.urlsafe_b64decode(TOKEN.split("_", 2)[2] + "=="))
    for index in range(0, size, 7):
        with pytest.raises(TokenError):
            admit(flipped(index), KEY.public, 0.0)


@pytest.mark.parametrize(
    "bootstrap", [Bootstrap("", 1, PEER.peer_id), Bootstrap("a", 0, PEER.peer_id), Bootstrap("a", 1, PeerId("nobody"))]
)
def test_a_bootstrap_that_nobody_can_dial_is_refused(bootstrap: Bootstrap) -> None:
    with pytest.raises(TokenError, match="which nobody can dial; issue it again"):
        KEY.issue((bootstrap,), Role.WORKER, 1.0)


def test_too_many_bootstraps() -> None:
    with pytest.raises(TokenError, match="at most 16 bootstraps"):
        KEY.issue((BOOTSTRAP,) * 17, Role.WORKER, 1.0)


def test_as_many_bootstraps_as_a_token_may_name() -> None:
    token = JoinToken.parse(KEY.issue((BOOTSTRAP,) * 16, Role.WORKER, 1.0))
    assert token.bootstraps == (BOOTSTRAP,) * 16


def test_how_long_a_token_may_be() -> None:
    longest = "p2p_worker_" + "A" * (8192 - 11)
    with pytest.raises(TokenError, match="a part is missing"):
        admit(longest, KEY.public, 0.0)
    with pytest.raises(TokenError, match="longer than 8192 characters"):
        admit(longest + "A", KEY.public, 0.0)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(59.4, "59 s"), (60, "1 min"), (3599, "60 min"), (3600, "1 h"), (86399, "24 h"), (86400, "1 d"), (200_000, "2 d")],
)
def test_how_long_ago_it_expired(seconds: float, told: str) -> None:
    with pytest.raises(TokenError, match=f"expired {told} ago"):
        admit(TOKEN, KEY.public, 1000.0 + seconds)


@pytest.mark.parametrize("port", [1, 65535])
def test_the_ports_that_a_bootstrap_may_have(port: int) -> None:
    there = Bootstrap("h", port, PEER.peer_id)
    assert JoinToken.parse(KEY.issue((there,), Role.WORKER, 1.0)).bootstraps == (there,)
    with pytest.raises(TokenError, match="nobody can dial"):
        KEY.issue((Bootstrap("h", 65536, PEER.peer_id),), Role.WORKER, 1.0)


def signed(**changed: object) -> str:
    """A token that the network's key signed, although no program of ours would have made it so."""
    secret = b"h" * 32
    fields: dict[str, object] = {
        "version": 1,
        "network": KEY.public,
        "role": "worker",
        "expires_at": 1000,
        "holder": Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw(),
        "bootstraps": (),
        "secret": secret,
    }
    fields.update(changed)
    secret = fields.pop("secret")  # type: ignore[assignment]
    certificate = msgspec.msgpack.encode(list(fields.values()))
    raw = msgspec.msgpack.encode([certificate, secret]) + KEY.sign(b"p2pserve-join-1\n" + certificate)
    return "p2p_worker_" + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def test_what_is_signed_and_sound_is_taken() -> None:
    assert admit(signed(), KEY.public, 0.0).role is Role.WORKER


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 2}, "has version 2 and this program reads version 1"),
        ({"network": KEY.public[:31]}, "malformed: a part is missing"),
        ({"holder": b"x" * 31}, "malformed: a part is missing"),
        ({"bootstraps": (("h", 1, PEER.peer_id),) * 17}, "malformed: a part is missing"),
        ({"bootstraps": (("h", 0, PEER.peer_id),)}, "nobody can dial"),
        ({"secret": b"x" * 32}, "forged: its secret"),
        ({"secret": b"h" * 31}, "forged: its secret"),
    ],
)
def test_what_is_signed_and_cannot_be_is_refused(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(TokenError, match=reason):
        admit(signed(**changed), KEY.public, 0.0)


def test_a_credential_is_bound_to_its_peer() -> None:
    credential = JoinToken.parse(TOKEN).credential(PEER.peer_id)
    assert admit_credential(credential, PEER.peer_id, KEY.public, 0.0).role is Role.WORKER
    assert admit_credential(credential, PEER.peer_id, KEY.public, None).role is Role.WORKER
    with pytest.raises(TokenError, match="made for another peer"):
        admit_credential(credential, THIEF.peer_id, KEY.public, 0.0)
    with pytest.raises(TokenError, match="another network"):
        admit_credential(credential, PEER.peer_id, OTHER_KEY.public, 0.0)
    with pytest.raises(TokenError, match="expired"):
        admit_credential(credential, PEER.peer_id, KEY.public, 1000.0)


def test_a_credential_does_not_give_the_token_away() -> None:
    token = JoinToken.parse(TOKEN)
    credential = token.credential(PEER.peer_id)
    assert token.secret not in credential.certificate + credential.signature + credential.proof


@pytest.mark.parametrize(
    "text", ["host:1", "host/x", f"host/{PEER.peer_id}", f"host:x/{PEER.peer_id}", "host:1/nobody"]
)
def test_a_bad_bootstrap_text(text: str) -> None:
    with pytest.raises(AddressError, match="write"):
        parse_bootstrap(text)


def test_a_good_bootstrap_text() -> None:
    assert parse_bootstrap(f"[2001:db8::7]:4001/{PEER.peer_id}") == Bootstrap("2001:db8::7", 4001, PEER.peer_id)
