"""Header fields on their way through the network: which pass, and what is read of them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...bootstrap import Role
from ..web.fields import CLIENT, DEADLINE, REQUEST_ID, ROLE, SESSION, RawHeaders, find_header
from .messages import HttpHeader

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
"""RFC 9110, 7.6.1: what is said between two neighbours only."""
KEYS: Final = frozenset({b"authorization", b"x-api-key", b"cookie"})
"""What opens doors at the front; a browser sends the cookies of all that listens on the front's machine."""
OURS: Final = b"x-p2p-"  # how the names of fields begin that boxes add; nobody else may say them


def _is_ours(name: bytes) -> bool:
    """Whether a field is one that boxes add. How long an answer may take is for who asks to say."""
    return name.lower().startswith(OURS) and name.lower() != DEADLINE


def drop_hop_by_hop(headers: RawHeaders) -> RawHeaders:
    """Without the fields that are for this hop alone: those of HOP_BY_HOP, and those that `Connection` names."""
    named = {
        name.strip().lower() for field, value in headers if field.lower() == b"connection" for name in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP and name.lower() not in named]


def pass_request(
    headers: RawHeaders, request_id: bytes, *, names_front: bool = False, has_session: bool = False
) -> tuple[HttpHeader, ...]:
    """What of a request's fields goes to a box: no keys, which are the front's own, and nothing that boxes add.
    `names_front`: with the name that the front was asked by, for pages that lead to others. `has_session`: its reader
    has logged in at the front."""
    left = {*KEYS, b"expect", REQUEST_ID} | (set() if names_front else {b"host"})
    kept = [
        HttpHeader(name.lower(), value)
        for name, value in drop_hop_by_hop(headers)
        if name.lower() not in left and not _is_ours(name)
    ]
    session = [HttpHeader(SESSION, b"yes")] if has_session else []
    return (*kept, *session, HttpHeader(REQUEST_ID, request_id))


def pass_answer(headers: Iterable[HttpHeader]) -> list[tuple[bytes, bytes]]:
    """What of a box's answer goes to the reader: no cookies, which would be kept for the front and sent to it."""
    return [(header.name, header.value) for header in headers if header.name.lower() != b"set-cookie"]


def to_api_server(headers: Iterable[HttpHeader], peer: str, role: Role) -> list[tuple[bytes, bytes]]:
    """What of a peer's fields goes to the API server; that it is this peer stands beside them. An admin's front may
    say by which name it was asked, and that its reader has logged in."""
    passed = drop_hop_by_hop([(header.name, header.value) for header in headers])
    kept = [(name, value) for name, value in passed if name not in KEYS and not _is_ours(name)]
    own = {b"host", b"connection"}
    is_admin = role is Role.ADMIN
    host = find_header(kept, b"host") if is_admin else None
    return [
        (b"host", host or b"p2pserve"),
        *((name, value) for name, value in kept if name.lower() not in own),
        (CLIENT, peer.encode()),
        *([(ROLE, role.value.encode())] if is_admin else []),
        *([(SESSION, b"yes")] if is_admin and find_header(passed, SESSION) else []),
        (b"connection", b"close"),
    ]
