"""What the owner of a network tells all of it after tokens were handed out: which are revoked, which
last longer than they say, and documents that mean something to the nodes above.

Signed with the network key, numbered, carried by anybody. The highest number counts; each holds all
that the ones before it said.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..errors import DECODE_ERRORS
from .entries import MAX_COUNTER, MAX_KINDS, MAX_PAYLOAD, Kind, Origin, Signature
from .identity import NetworkKey
from .keys import verify_raw
from .tokens import MAX_CERTIFICATE, CertificateName, Grant, read_grant

_DOMAIN: Final = b"p2pserve-orders-1\n"
MAX_REVOKED: Final = 4096
MAX_RENEWED: Final = 1024
MAX_RENEWED_PEERS: Final = 4096
MAX_ORDERS_BYTES: Final = 1 << 20


class Renewal(msgspec.Struct, frozen=True, array_like=True):
    """A certificate for the holder of an earlier one, in its place."""

    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE)]
    signature: Signature
    peers: Annotated[tuple[Origin, ...], Meta(max_length=MAX_RENEWED_PEERS)] = ()  # for these only; none: for all

    def is_for(self, peer: str) -> bool:
        """Whether this peer may come in by it."""
        return not self.peers or peer in self.peers

    def grant(self) -> Grant | None:
        """What it grants; None for what is no certificate."""
        return read_grant(self.certificate)


Document = Annotated[bytes, Meta(max_length=MAX_PAYLOAD)]


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """All that the owner has said so far. `renewed` by the name of the certificate. Of a newer release's orders those
    that are known are followed: whoever is revoked is so, whatever else was ordered. `documents` by kind; this room
    does not read them."""

    number: Annotated[int, Meta(ge=0, le=MAX_COUNTER)] = 0
    revoked: Annotated[tuple[CertificateName, ...], Meta(max_length=MAX_REVOKED)] = ()
    renewed: Annotated[dict[CertificateName, Renewal], Meta(max_length=MAX_RENEWED)] = {}
    documents: Annotated[dict[Kind, Document], Meta(max_length=MAX_KINDS)] = {}


class SignedOrders(msgspec.Struct, frozen=True, array_like=True):
    """Orders as they travel. Worth nothing until :func:`read_orders` has checked them."""

    payload: Annotated[bytes, Meta(max_length=MAX_ORDERS_BYTES)]
    signature: Signature


def sign_orders(key: NetworkKey, orders: Orders) -> SignedOrders:
    """Orders by the owner of the network."""
    payload = msgspec.msgpack.encode(orders)
    return SignedOrders(payload, key.sign(_DOMAIN + payload))


def read_orders(signed: SignedOrders, network: bytes) -> Orders | None:
    """What the owner of the network with this public key says; None for what it did not sign."""
    if not verify_raw(network, _DOMAIN + signed.payload, signed.signature):
        return None
    try:
        return msgspec.msgpack.decode(signed.payload, type=Orders)
    except DECODE_ERRORS:
        return None
