"""Header fields on their way through the network: which pass, and what is read of them. No I/O."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from .messages import HttpHeader

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
"""RFC 9110, 7.6.1: what is said between two neighbours only."""
KEYS: Final = frozenset({b"authorization", b"x-api-key"})
OURS: Final = b"x-p2p-"  # how the names of fields begin that boxes add; nobody else may say them
REQUEST_ID: Final = b"x-request-id"
CLIENT: Final = b"x-p2p-client"
"""Who asks: a box adds it for its API server, which counts and limits by it instead of a key."""

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")

RawHeaders = Sequence[tuple[bytes, bytes]]


def drop_hop_by_hop(headers: RawHeaders) -> RawHeaders:
    """Without the fields that are for this hop alone: those of HOP_BY_HOP, and those that `Connection` names."""
    named = {
        name.strip().lower() for field, value in headers if field.lower() == b"connection" for name in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP and name.lower() not in named]


def pass_request(headers: RawHeaders, request_id: bytes) -> tuple[HttpHeader, ...]:
    """What of a request's fields goes to a box: no keys, which are the front's own, and nothing that boxes add."""
    kept = [
        HttpHeader(name.lower(), value)
        for name, value in drop_hop_by_hop(headers)
        if name.lower() not in {*KEYS, b"host", b"expect", REQUEST_ID} and not name.lower().startswith(OURS)
    ]
    return (*kept, HttpHeader(REQUEST_ID, request_id))


def to_api_server(headers: Iterable[HttpHeader], peer: str) -> list[tuple[bytes, bytes]]:
    """What of a peer's fields goes to the API server; that it is this peer stands beside them."""
    passed = drop_hop_by_hop([(header.name, header.value) for header in headers])
    kept = [(name, value) for name, value in passed if name not in KEYS and not name.lower().startswith(OURS)]
    own = {b"host", b"connection"}
    return [
        (b"host", b"p2pserve"),
        *((name, value) for name, value in kept if name.lower() not in own),
        (CLIENT, peer.encode()),
        (b"connection", b"close"),
    ]


def find_header(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first field of that name."""
    return next((value for field, value in headers if field.lower() == name), None)


def pick_request_id(headers: RawHeaders) -> bytes:
    """The request's own id if it may be printed anywhere, else a new one."""
    given = find_header(headers, REQUEST_ID)
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return secrets.token_hex(16).encode()


def is_allowed(headers: RawHeaders, keys: Sequence[str]) -> bool:
    """Whether the request shows one of these keys, as OpenAI's clients do or as Anthropic's; anybody may where there
    are none. Takes as long for each wrong one."""
    if not keys:
        return True
    shown = [find_header(headers, b"x-api-key") or b""]
    scheme, _, secret = (find_header(headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        shown.append(secret.strip())
    matches = [hmac.compare_digest(one, key.encode()) for one in shown for key in keys]
    return any(matches)
