"""Join tokens: one string that lets a box into one network, in one role, until one moment.

A token is a *certificate* signed by the network key, and a *holder secret* whose public half the
certificate names. The certificate says what it grants: a role, whether its holders may lead, for
how many boxes it is, and until when they may join::

    p2p_worker_<base64url( msgpack{certificate, secret} | network signature of certificate )>

The string is a bearer secret and never crosses the wire. What a node shows is a
:class:`Credential`: the certificate and the holder's signature of the node's own peer id. So
whoever sees a worker's credential (a client, say) cannot join as a worker with it.
"""

import base64
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from ..addresses import Address
from ..errors import DECODE_ERRORS, AddressError, TokenError
from .keys import KEY_BYTES, SIGNATURE_BYTES, PeerId, parse_peer_id, private_key, public_key_of, verify_raw

_VERSION: Final = 1
_PREFIX: Final = "p2p"
_CERTIFICATE_DOMAIN: Final = b"p2pserve-join-1\n"
_HOLDER_DOMAIN: Final = b"p2pserve-holder-1\n"
_MAX_TEXT: Final = 8192
_MAX_BOOTSTRAPS: Final = 16
MAX_USES: Final = 4096
DEFAULT_USES: Final = 256
MAX_CERTIFICATE: Final = 4096
_NAME_CHARS: Final = 16

CertificateName = Annotated[str, Meta(min_length=_NAME_CHARS, max_length=_NAME_CHARS)]


class Role(Enum):
    """What a token lets its holder do."""

    WORKER = "worker"  # hosts engines
    CLIENT = "client"  # sends requests, is not dialled, publishes nothing to others
    ADMIN = "admin"  # like a worker without engines: inspects, drains


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A member to ask: where to dial, and who must answer; without a peer id any member may."""

    host: str
    port: int
    peer_id: PeerId | None = None

    def __str__(self) -> str:
        return str(Address(self.host, self.port))


# Unknown fields are refused: what a newer release says there may narrow what the certificate grants.
class _Certificate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    network: bytes
    role: Role
    expires_at: int
    holder: bytes
    bootstraps: tuple[tuple[str, int, str], ...]
    lead: bool = True  # as all could in the releases whose certificates did not say
    uses: int = DEFAULT_USES


@dataclass(frozen=True, slots=True)
class Grant:
    """What a certificate lets its holders do. `certificate` names it: renewed, it is still the same."""

    certificate: str
    role: Role
    lead: bool
    uses: int
    expires_at: int

    def check_role(self, role: Role, fix: str) -> None:
        """Raise TokenError unless its holders may be in the network as this. Workers and admins may come as clients,
        too: nobody dials them then, or tells others of them."""
        if role not in (self.role, Role.CLIENT):
            raise TokenError(f"the join token is for the role {self.role.value!r}, not {role.value!r}; {fix}")

    def asks_as(self, role: Role) -> Role:
        """As what others answer a holder that is in the network in this role: an admin that has come as a client may
        still ask what admins may, and a worker may not."""
        return Role.ADMIN if self.role is Role.ADMIN else role

    def check_expiry(self, now: float) -> None:
        """Raise TokenError when its holders may not join any more at unix time ``now``."""
        if now >= self.expires_at:
            ago = _ago(now - self.expires_at)
            raise TokenError(
                f"the join token expired {ago} ago; ask the network's owner for a new one, or to renew it "
                f"(p2pserve token renew {self.certificate})"
            )


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    certificate: bytes
    secret: bytes


class Credential(msgspec.Struct, frozen=True, array_like=True):
    """What a node shows of its token: useless to any other peer id."""

    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE)]
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
    proof: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A join token, well formed and signed by the network it names (not necessarily *ours*)."""

    network: bytes
    bootstraps: tuple[Bootstrap, ...]
    grant: Grant
    certificate: bytes = field(repr=False)
    signature: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Read a token; :class:`TokenError` says whether it is malformed or forged."""
        prefix, role_text, data = _split(text)
        if prefix != _PREFIX:
            raise _malformed("it does not start with p2p_")
        # The role outside is for people, and for refusing a wrong kind of token early. What counts is
        # the one inside, which is signed.
        try:
            raw = base64.b64decode(data + "=" * (-len(data) % 4), altchars=b"-_", validate=True)
            body = msgspec.msgpack.decode(raw[:-SIGNATURE_BYTES], type=_Body)
            certificate = _read_certificate(body.certificate)
        except (ValueError, *DECODE_ERRORS) as error:
            raise _malformed("a part is missing or mistyped") from error
        if certificate.role.value != role_text:
            raise TokenError(
                f"the join token is forged: it says {role_text!r} outside and {certificate.role.value!r} inside; "
                "ask the network's owner for a new one"
            )
        signature = raw[-SIGNATURE_BYTES:]
        _check_signature(certificate, body.certificate, signature)
        if len(body.secret) != KEY_BYTES or _public_of(body.secret) != certificate.holder:
            raise TokenError("the join token is forged: its secret does not fit; ask the network's owner for a new one")
        return cls(
            network=certificate.network,
            bootstraps=_bootstraps_of(certificate),
            grant=_grant_of(certificate),
            certificate=body.certificate,
            signature=signature,
            secret=body.secret,
        )

    @property
    def role(self) -> Role:
        """What its holder is in the network."""
        return self.grant.role

    def renewed(self, certificate: bytes, signature: bytes) -> "JoinToken":
        """The same token by a later certificate for its holder. Raises TokenError for one of another holder."""
        read = _read_certificate(certificate)
        _check_signature(read, certificate, signature)
        if read.holder != _public_of(self.secret) or read.network != self.network:
            raise TokenError("the renewed certificate is for the holder of another join token; issue a new token")
        return replace(self, grant=_grant_of(read), certificate=certificate, signature=signature)

    def credential(self, peer_id: PeerId) -> Credential:
        """What the node with this peer id shows to others."""
        proof = private_key(self.secret).sign(_HOLDER_DOMAIN + peer_id.encode("ascii"))
        return Credential(self.certificate, self.signature, proof)


def issue_token(
    sign: Callable[[bytes], bytes],
    network: bytes,
    bootstraps: tuple[Bootstrap, ...],
    role: Role,
    expires_at: float,
    *,
    lead: bool = False,
    uses: int = DEFAULT_USES,
    secret: bytes | None = None,
) -> str:
    """Make a token for ``uses`` boxes; ``sign`` signs with the network key whose public half is ``network``. With the
    ``secret`` of an earlier one it is that token by another certificate: its name and its boxes stay."""
    if not 0 < uses <= MAX_USES:
        raise TokenError(f"uses: {uses} boxes; a join token is for 1 to {MAX_USES}")
    if lead and role is Role.CLIENT:
        raise TokenError("lead: a client leads nothing; leave it out, or issue a worker's token")
    if len(bootstraps) > _MAX_BOOTSTRAPS:
        raise TokenError(f"a join token names at most {_MAX_BOOTSTRAPS} bootstraps, not {len(bootstraps)}; name fewer")
    for bootstrap in bootstraps:
        _check_bootstrap(bootstrap.host, bootstrap.port, bootstrap.peer_id or "")
    # A secret for each token, not the network's: who holds one can join, and cannot issue others.
    secret = secret or secrets.token_bytes(KEY_BYTES)
    certificate = msgspec.msgpack.encode(
        _Certificate(
            version=_VERSION,
            network=network,
            role=role,
            expires_at=int(expires_at),
            holder=_public_of(secret),
            bootstraps=tuple((each.host, each.port, each.peer_id or "") for each in bootstraps),
            lead=lead,
            uses=uses,
        )
    )
    body = msgspec.msgpack.encode(_Body(certificate, secret))
    raw = body + sign(_CERTIFICATE_DOMAIN + certificate)
    return f"{_PREFIX}_{role.value}_{base64.urlsafe_b64encode(raw).decode('ascii').rstrip('=')}"


def admit(text: str, network: bytes, now: float) -> Grant:
    """What a token grants in ``network`` at unix time ``now``. Raises TokenError."""
    token = JoinToken.parse(text)
    check_network(token.network, network)
    token.grant.check_expiry(now)
    return token.grant


def admit_credential(credential: Credential, peer_id: str, network: bytes, now: float | None) -> Grant:
    """What a peer's credential grants it; ``now=None`` skips the expiry, which bounds joining only."""
    grant = _verify_credential(credential, peer_id, network)
    if now is not None:
        grant.check_expiry(now)
    return grant


@lru_cache(maxsize=4096)  # two signatures, and each peer shows the same one again with every record
def _verify_credential(credential: Credential, peer_id: str, network: bytes) -> Grant:
    try:
        certificate = _read_certificate(credential.certificate)
    except (ValueError, *DECODE_ERRORS) as error:
        raise _malformed("a part is missing or mistyped") from error
    check_network(certificate.network, network)
    _check_signature(certificate, credential.certificate, credential.signature)
    # The proof binds the certificate to one peer: a credential that was overheard fits nobody else.
    if not verify_raw(certificate.holder, _HOLDER_DOMAIN + peer_id.encode("utf-8"), credential.proof):
        raise TokenError("the credential is forged: it was made for another peer; join with a token of your own")
    return _grant_of(certificate)


def read_grant(certificate: bytes) -> Grant | None:
    """What a certificate says; None for what is none. Its signature is not checked here."""
    try:
        return _grant_of(_read_certificate(certificate))
    except (ValueError, TokenError, *DECODE_ERRORS):
        return None


def _split(text: str) -> tuple[str, str, str]:
    if len(text) > _MAX_TEXT:
        raise _malformed(f"it is longer than {_MAX_TEXT} characters")
    parts = text.strip().split("_", 2)
    if len(parts) != 3:
        raise _malformed("it is not of the form p2p_<role>_<text>")
    return parts[0], parts[1], parts[2]


def _read_certificate(raw: bytes) -> _Certificate:
    certificate = msgspec.msgpack.decode(raw, type=_Certificate)
    if certificate.version != _VERSION:
        raise TokenError(
            f"the join token has version {certificate.version} and this program reads version {_VERSION}; "
            "use the same p2pserve release everywhere"
        )
    if len(certificate.network) != KEY_BYTES or len(certificate.holder) != KEY_BYTES:
        raise ValueError("a key in the certificate has the wrong size")
    if len(certificate.bootstraps) > _MAX_BOOTSTRAPS:
        raise ValueError("too many bootstraps")
    if not 0 < certificate.uses <= MAX_USES:
        raise ValueError("a certificate for no box, or for too many")
    return certificate


def _grant_of(certificate: _Certificate) -> Grant:
    name = certificate.holder.hex()[:_NAME_CHARS]
    lead = certificate.lead and certificate.role is not Role.CLIENT
    return Grant(name, certificate.role, lead, certificate.uses, certificate.expires_at)


def _bootstraps_of(certificate: _Certificate) -> tuple[Bootstrap, ...]:
    for host, port, peer_id in certificate.bootstraps:
        _check_bootstrap(host, port, peer_id)
    return tuple(
        Bootstrap(host, port, PeerId(peer_id) if peer_id else None) for host, port, peer_id in certificate.bootstraps
    )


def _check_bootstrap(host: str, port: int, peer_id: str) -> None:
    if not host or not 0 < port < 65536 or (peer_id and public_key_of(peer_id) is None):
        raise TokenError(
            f"the join token names the bootstrap {host}:{port} with peer id {peer_id!r}, which nobody can dial; "
            "issue it again with host, port 1-65535 and the peer id the bootstrap prints"
        )


@lru_cache(maxsize=1024)  # one certificate is shown by many
def _is_signed(network: bytes, raw: bytes, signature: bytes) -> bool:
    return verify_raw(network, _CERTIFICATE_DOMAIN + raw, signature)


def _check_signature(certificate: _Certificate, raw: bytes, signature: bytes) -> None:
    if not _is_signed(certificate.network, raw, signature):
        raise TokenError("the join token is forged: its signature does not fit; ask the network's owner for a new one")


def check_network(named: bytes, ours: bytes) -> None:
    """Raise TokenError where a certificate names another network than ours."""
    if named != ours:
        raise TokenError(
            f"the join token is for another network ({named.hex()[:8]}, this one is {ours.hex()[:8]}); "
            "use a token issued by this network"
        )


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _public_of(secret: bytes) -> bytes:
    key: Ed25519PrivateKey = private_key(secret)
    return key.public_key().public_bytes_raw()


def _malformed(why: str) -> TokenError:
    shapes = f"{_PREFIX}_worker_... or {_PREFIX}_client_..."
    return TokenError(f"the join token is malformed: {why}; copy the whole string, it looks like {shapes}")


def parse_bootstrap(text: str) -> Bootstrap:
    """``host:port/peer_id`` as people write it on a command line."""
    place, slash, peer = text.rpartition("/")
    host, colon, port = place.rpartition(":")
    if not slash or not colon or not port.isdigit():
        raise AddressError(
            f"{text!r} is not a bootstrap; write host:port/peer-id, such as 203.0.113.7:4001/12D3KooW..."
        )
    return Bootstrap(host.strip("[]"), int(port), parse_peer_id(peer))
