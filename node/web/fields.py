"""Header fields of requests: which key is shown, and what a request is called. No I/O."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

REQUEST_ID: Final = b"x-request-id"
DEADLINE: Final = b"x-p2p-deadline-s"
"""How long the whole answer may take, in seconds: a field of the request."""
CLIENT: Final = b"x-p2p-client"
"""Who asks: a box adds it for its API server, which counts and limits by it instead of a key."""
ROLE: Final = b"x-p2p-role"
"""The role of who asks: likewise, where it is an admin."""
SESSION: Final = b"x-p2p-session"
"""An admin's front adds it where its reader has logged in there, and so may log out."""
VOUCHED: Final = "p2pserve.admin"
"""In the scope of an ASGI request: it was carried here from an admin, as the node has told. No field of a request
can say so."""
KEYS_TOLD: Final = "p2pserve.keys"
"""Likewise: the names of the API keys whose costs may be told to who asks; None: of all."""

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")

RawHeaders = Sequence[tuple[bytes, bytes]]


def find_header(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first field of that name."""
    return next((value for field, value in headers if field.lower() == name), None)


class _NamesModel(msgspec.Struct):
    model: str | None = None


def find_model(headers: RawHeaders, body: bytes) -> str | None:
    """The model that a body of JSON names."""
    if not body or b"json" not in (find_header(headers, b"content-type") or b""):
        return None
    try:
        return msgspec.json.decode(body, type=_NamesModel).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the API server says what is wrong with it


def decode_headers(headers: RawHeaders) -> dict[str, str]:
    """As text, by their names in lower case; of several with one name, the last."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def find_cookie(headers: RawHeaders, name: str) -> str:
    """The value of a cookie that a browser sends; empty where it sends none of that name."""
    for field, value in headers:
        pairs = value.decode("latin-1").split(";") if field.lower() == b"cookie" else []
        for pair in pairs:
            found, _, text = pair.strip().partition("=")
            if found == name:
                return text
    return ""


def pick_request_id(headers: RawHeaders) -> bytes:
    """The request's own id if it may be printed anywhere, else a new one."""
    given = find_header(headers, REQUEST_ID)
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return secrets.token_hex(16).encode()


def shown_keys(headers: RawHeaders) -> list[bytes]:
    """What a request shows as its key, as OpenAI's clients do or as Anthropic's."""
    shown = [find_header(headers, b"x-api-key") or b""]
    scheme, _, secret = (find_header(headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        shown.append(secret.strip())
    return shown


def is_allowed(headers: RawHeaders, keys: Sequence[str]) -> bool:
    """Whether the request shows one of these keys, as OpenAI's clients do or as Anthropic's; anybody may where there
    are none. Takes as long for each wrong one."""
    if not keys:
        return True
    matches = [hmac.compare_digest(one, key.encode()) for one in shown_keys(headers) for key in keys]
    return any(matches)
