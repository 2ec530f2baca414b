"""What a front lets in: where it may listen, and which requests it takes. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from ...bootstrap import Address, Role
from ...bootstrap.errors import AddressError
from ..web.access import Access, Caller, Verdict
from ..web.fields import RawHeaders, decode_headers, find_cookie, is_allowed
from ..web.listening import HttpRefusal, host_of, is_loopback
from ..web.paths import ADMIN, DASHBOARD, find_refusal, is_below, path_of
from .messages import MAX_HEADER_BYTES, MAX_HEADERS, MAX_HEADERS_BYTES, MAX_NAME_BYTES, MAX_TARGET_BYTES

LOGIN: Final = f"{DASHBOARD}/login"
LOGOUT: Final = f"{DASHBOARD}/logout"
OPEN_PATHS: Final = frozenset({"/health", "/live"})  # for load balancers, which have no key


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRules:
    """Who may ask. `keys`: any of them lets in; none: whoever reaches the port, which must be this machine alone unless
    its owner says that it `needs_no_key`. `role`: what the network takes the front for; where it is an admin, the admin
    API and the dashboard are for who shows the `admin_token`, or without one, for this machine. `realm`: what tells the
    front from others, so that who has logged in here has not done so elsewhere."""

    keys: tuple[str, ...] = ()
    needs_no_key: bool = False
    role: Role = Role.CLIENT
    admin_token: str | None = None
    realm: str = ""

    @property
    def access(self) -> Access:
        """Who may look at the network."""
        return Access(self.admin_token, self.realm)

    def has_login(self, path: str | None) -> bool:
        """Whether the front answers this itself, because browsers log in or out there."""
        return self.role is Role.ADMIN and self.admin_token is not None and path in (LOGIN, LOGOUT)


def check_listen(listen: Address, rules: FrontRules) -> None:
    """Raise AddressError where others could ask without a key."""
    if not (rules.keys or rules.needs_no_key or is_loopback(listen.host)):
        raise AddressError(
            f"http: others reach {listen}, and anybody could ask there at your cost; set a key with --api-key, "
            "listen on 127.0.0.1, or say --no-api-key"
        )


def judge(
    method: str, target: str, headers: RawHeaders, rules: FrontRules, host: str | None = None, now: float = 0.0
) -> HttpRefusal | None:
    """Why a request is not taken; None for one that is. `host`: the address that it comes from, where that is known.
    `now`: unix seconds, for sessions."""
    if (refusal := _judge_size(target, headers)) is not None:
        return refusal
    path = path_of(target)
    if path in OPEN_PATHS and "?" not in target:
        return None
    if path is not None and is_below(path, ADMIN):
        return _judge_admin(method, target, headers, rules, host, now)
    # A page in a browser of this machine can have its own name point here: without a key, that name gives it away.
    if not (rules.keys or rules.needs_no_key or is_loopback(host_of(headers))):
        return HttpRefusal(403, "host: without --api-key this gateway answers to localhost and 127.0.0.1 only")
    # A browser asks before it shows its key.
    if method != "OPTIONS" and not is_allowed(headers, rules.keys):
        return HttpRefusal(401, "api_key: this is not a key of this gateway; send `Authorization: Bearer KEY`")
    found = find_refusal(method, target, Role.CLIENT)
    return HttpRefusal(*found) if found is not None else None


def _judge_admin(
    method: str, target: str, headers: RawHeaders, rules: FrontRules, host: str | None, now: float
) -> HttpRefusal | None:
    """Of what is for admins: the box looks at the role, too, and takes the front's word for the rest. API keys do not
    count here; a program shows the admin token, a browser that has logged in its cookie."""
    if rules.role is not Role.ADMIN:
        return HttpRefusal(
            403,
            f"path: this is for admins, and this gateway has a {rules.role.value}'s join token; start it with an "
            "admin's, which the network's owner makes: p2pserve token create --role admin",
        )
    if (found := find_refusal(method, target, rules.role)) is not None:
        return HttpRefusal(*found)
    path = path_of(target)
    if rules.has_login(path):
        return None
    fields = decode_headers(headers)
    caller = Caller.of((host,) if host is not None else None, fields)
    has_pages = path is not None and is_below(path, (DASHBOARD,)) and "authorization" not in fields
    if has_pages:
        verdict = rules.access.judge_session(caller, find_cookie(headers, rules.access.cookie), now)
    else:
        verdict = rules.access.judge_bearer(caller, fields.get("authorization", ""))
    if verdict is Verdict.ADMITTED:
        return None
    # A page that asks for its news is told that its session has ended; everything else a browser shows to its user.
    if has_pages and verdict is Verdict.TOKEN_MISSING and method in ("GET", "HEAD") and "x-have" not in fields:
        return HttpRefusal(303, f"{verdict.value}, or log in at {LOGIN}", location=LOGIN)
    return HttpRefusal(401 if verdict in (Verdict.TOKEN_MISSING, Verdict.TOKEN_WRONG) else 403, verdict.value)


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
