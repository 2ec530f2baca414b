"""What a front lets in: where it may listen, and which requests it takes. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from ...bootstrap import Address, Role
from ...bootstrap.errors import AddressError
from ..web.fields import RawHeaders, is_allowed
from ..web.listening import HttpRefusal, host_of, is_loopback
from ..web.paths import find_refusal, path_of
from .messages import MAX_HEADER_BYTES, MAX_HEADERS, MAX_HEADERS_BYTES, MAX_NAME_BYTES, MAX_TARGET_BYTES

OPEN_PATHS: Final = frozenset({"/health", "/live"})  # for load balancers, which have no key


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRules:
    """Who may ask. `keys`: any of them lets in; none: whoever reaches the port, which must be this machine alone unless
    its owner says that it `needs_no_key`."""

    keys: tuple[str, ...] = ()
    needs_no_key: bool = False


def check_listen(listen: Address, rules: FrontRules) -> None:
    """Raise AddressError where others could ask without a key."""
    if not (rules.keys or rules.needs_no_key or is_loopback(listen.host)):
        raise AddressError(
            f"http: others reach {listen}, and anybody could ask there at your cost; set a key with --api-key, "
            "listen on 127.0.0.1, or say --no-api-key"
        )


def judge(method: str, target: str, headers: RawHeaders, rules: FrontRules) -> HttpRefusal | None:
    """Why a request is not taken; None for one that is."""
    if (refusal := _judge_size(target, headers)) is not None:
        return refusal
    path = path_of(target)
    if path in OPEN_PATHS and "?" not in target:
        return None
    # A page in a browser of this machine can have its own name point here: without a key, that name gives it away.
    if not (rules.keys or rules.needs_no_key or is_loopback(host_of(headers))):
        return HttpRefusal(403, "host: without --api-key this gateway answers to localhost and 127.0.0.1 only")
    # A browser asks before it shows its key.
    if method != "OPTIONS" and not is_allowed(headers, rules.keys):
        return HttpRefusal(401, "api_key: this is not a key of this gateway; send `Authorization: Bearer KEY`")
    # The role is judged by the box, too. An admin's own front has no key for admins: nobody is one there.
    found = find_refusal(method, target, Role.CLIENT)
    return HttpRefusal(*found) if found is not None else None


def _judge_size(target: str, headers: RawHeaders) -> HttpRefusal | None:
    """What a box would take for a broken message."""
    if len(target) > MAX_TARGET_BYTES:
        return HttpRefusal(414, f"path: more than {MAX_TARGET_BYTES} bytes are not carried")
    if len(headers) >= MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADERS_BYTES:
        return HttpRefusal(
            431, f"headers: more than {MAX_HEADERS} or {MAX_HEADERS_BYTES} bytes of them are not carried"
        )
    if any(len(name) > MAX_NAME_BYTES or len(value) > MAX_HEADER_BYTES for name, value in headers):
        return HttpRefusal(431, f"headers: one of more than {MAX_HEADER_BYTES} bytes is not carried")
    return None
