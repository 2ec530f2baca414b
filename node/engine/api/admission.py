"""What the API process lets in, before anything of a request is parsed. No I/O."""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from ...web.fields import CLIENT, DEADLINE, RawHeaders, find_header, shown_keys
from ...web.listening import HttpRefusal, host_of, is_loopback
from .protocol import ApiConfig, KeyDigest


class Admitted(NamedTuple):
    """Who asks, and how long the answer may take."""

    key: str
    deadline_s: float


def admit(
    method: str, headers: RawHeaders, config: ApiConfig, *, is_vouched: bool, has_token: bool = False
) -> Admitted | HttpRefusal:
    """Judge a request by its head. `is_vouched`: it came through the agent, which says who it is of. `has_token`: it
    shows the admin token, where that lets in."""
    if has_token:
        key: str | None = ""
    elif is_vouched:
        key = (find_header(headers, CLIENT) or b"").decode("latin-1")[:256]
    elif not config.keys:
        # A page in a browser of this machine can have its own name point here: without a key, that name gives it away.
        if not config.is_open and not is_loopback(host_of(headers)):
            return HttpRefusal(403, "host: without --api-key this server answers to localhost and 127.0.0.1 only")
        key = ""
    else:
        key = "" if method == "OPTIONS" else find_key(headers, config.keys)  # a browser asks before it shows its key
    if key is None:
        return HttpRefusal(401, "api_key: this is not a key of this server; send `Authorization: Bearer KEY`")
    length = find_header(headers, b"content-length")
    if length is not None and length.isdigit() and int(length[:20]) > config.max_body_bytes:
        return too_large(config)
    return _with_deadline(key, headers, config)


def too_large(config: ApiConfig) -> HttpRefusal:
    """The refusal of a body that is too long."""
    return HttpRefusal(413, f"body: more than {config.max_body_bytes} bytes; send less, or raise --max-body-mib")


def find_key(headers: RawHeaders, keys: Sequence[KeyDigest]) -> str | None:
    """Whose key a request shows, as OpenAI's clients do or as Anthropic's. Takes as long for each wrong one."""
    digests = [sha256(one).digest() for one in shown_keys(headers)]
    found = [key.name for key in keys for digest in digests if hmac.compare_digest(digest, key.digest)]
    return found[0] if found else None


def _with_deadline(key: str, headers: RawHeaders, config: ApiConfig) -> Admitted | HttpRefusal:
    wanted = find_header(headers, DEADLINE)
    if wanted is None:
        return Admitted(key, config.deadline_s)
    try:
        deadline_s = float(wanted)
    except ValueError:
        deadline_s = math.nan
    if not 0 < deadline_s <= config.deadline_s:
        return HttpRefusal(400, f"{DEADLINE.decode()}: not above 0 and at most {config.deadline_s:g} seconds")
    return Admitted(key, deadline_s)
