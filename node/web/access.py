"""Who may look at the network: decided from where a request comes and what it shows.

With a token, whoever shows it: as `Authorization: Bearer`, or by the cookie that logging in gives. Without one, nobody
but the box itself: the connection comes from loopback and was not passed on by a proxy, and it was this box's name that
was asked for. A browser sends the last even from a page of somebody else's whose name was made to lead here (DNS
rebinding); and it says from which page a request comes, so that another's cannot use a cookie or this loophole.

A front that is an admin's by its certificate judges by the same rules who asks at its port; the box takes its word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import sha256
from hmac import compare_digest, new
from ipaddress import ip_address
from typing import Any, Final, NamedTuple, final
from urllib.parse import urlsplit

from .fields import VOUCHED

MIN_TOKEN_CHARACTERS: Final = 16
SESSION_S: Final = 12 * 3600
COOKIE: Final = "p2pserve_dashboard"

_PASSED_ON: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class AdminTokenError(ValueError):
    """The token is none that anybody should trust; the text says what to give instead."""


class Verdict(Enum):
    """Whether somebody is let in, or why not, in words for them."""

    ADMITTED = ""
    TOKEN_MISSING = "give the admin token, as `Authorization: Bearer <token>`"
    TOKEN_WRONG = "this is not the admin token"
    NOT_FROM_HERE = (
        "this node has no admin token, so it answers only to the box itself; start it with --admin-token to look at it "
        "from elsewhere"
    )
    OTHER_PAGE = "the request was made by a page of another site"


class Caller(NamedTuple):
    """A request as far as it matters here: the other end's address (None: a Unix socket), the page that a browser says
    it comes from, the name asked for, whether a proxy has passed it on, and whether an admin's front has."""

    host: str | None
    asked_for: str
    origin: str = ""
    passed_on: bool = False
    is_vouched: bool = False

    @classmethod
    def of(cls, client: Sequence[Any] | None, headers: Mapping[str, str], *, is_vouched: bool = False) -> Caller:
        """From a connection's peer (its host first) and headers (with lower-case names)."""
        return cls(
            host=str(client[0]) if client else None,
            asked_for=headers.get("host", ""),
            origin=headers.get("origin", ""),
            passed_on=any(name in headers for name in _PASSED_ON),
            is_vouched=is_vouched,
        )

    @classmethod
    def of_scope(cls, scope: Mapping[str, Any], headers: Mapping[str, str]) -> Caller:
        """From an ASGI request."""
        return cls.of(scope.get("client"), headers, is_vouched=scope.get(VOUCHED) is True)

    @property
    def is_local(self) -> bool:
        """Whether it comes from this box, and was meant for it."""
        return not self.passed_on and _is_loopback(self.host) and _is_loopback(_host_in(f"//{self.asked_for}"))

    @property
    def is_own_page(self) -> bool:
        """Whether no page of another site has made it. Programs name none; a page without an address sends `null`."""
        if not self.origin:
            return True
        return bool(self.asked_for) and urlsplit(self.origin).netloc.lower() == self.asked_for.lower()


@final
class Access:
    """Holds the token of a node, or that it has none. Raises AdminTokenError for one that can be guessed.

    `realm`: whom sessions are good for. Without one they are good at every node with the same token.
    """

    def __init__(self, token: str | None, realm: str = "") -> None:
        if token is not None and (len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable()):
            raise AdminTokenError(
                f"admin-token: it has to be at least {MIN_TOKEN_CHARACTERS} printable ASCII characters; "
                "`openssl rand -hex 16` makes one"
            )
        self._token = token
        # Whoever changes the token ends all sessions; a restart does not, nor does another box with the same token.
        self._session_key = new((token or "").encode(), b"p2pserve dashboard session" + realm.encode(), sha256).digest()
        # Browsers do not tell ports apart: two gateways of one machine would overwrite each other's cookie.
        self._cookie = f"{COOKIE}_{realm[-8:]}" if realm else COOKIE

    def __repr__(self) -> str:
        return f"<Access {'by token' if self.needs_token else 'from this box'}>"

    @property
    def needs_token(self) -> bool:
        """Whether there is a token to show."""
        return self._token is not None

    @property
    def cookie(self) -> str:
        """The name of the cookie that a session is kept in."""
        return self._cookie

    def judge_bearer(self, caller: Caller, authorization: str) -> Verdict:
        """Of a program that shows the token in each request."""
        if self._token is None or not caller.is_own_page or caller.is_vouched:
            return self._judge_place(caller)
        scheme, _, shown = authorization.partition(" ")
        if scheme.lower() != "bearer" or not shown.strip():
            return Verdict.TOKEN_MISSING
        return Verdict.ADMITTED if self.knows(shown.strip()) else Verdict.TOKEN_WRONG

    def judge_session(self, caller: Caller, cookie: str, now: float) -> Verdict:
        """Of a browser that has logged in, or need not."""
        if self._token is None or not caller.is_own_page or caller.is_vouched:
            return self._judge_place(caller)
        expiry, _, _ = cookie.partition(".")
        known = expiry.isascii() and expiry.isdigit() and len(expiry) < 16
        if known and compare_digest(cookie.encode(), self._sign(int(expiry)).encode()) and now < int(expiry):
            return Verdict.ADMITTED
        return Verdict.TOKEN_MISSING

    def knows(self, token: str) -> bool:
        """Whether this is the token, in a time that does not tell how much of it is right."""
        return self._token is not None and compare_digest(token.encode(), self._token.encode())

    def open_session(self, now: float) -> str:
        """A cookie's value, good until SESSION_S later."""
        return self._sign(int(now) + SESSION_S)

    def _judge_place(self, caller: Caller) -> Verdict:
        if not caller.is_own_page:
            return Verdict.OTHER_PAGE
        return Verdict.ADMITTED if caller.is_local or caller.is_vouched else Verdict.NOT_FROM_HERE

    def _sign(self, expiry: int) -> str:
        return f"{expiry}.{new(self._session_key, str(expiry).encode(), sha256).hexdigest()}"


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _host_in(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
