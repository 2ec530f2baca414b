"""Logging in at a front: its page for browsers, which opens the dashboard by a cookie. No I/O.

A box's own login page is not carried: the box would learn the admin token, and boxes are rented. The page is whole in
itself, so that nothing goes to a box for who has not logged in.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Final, final
from urllib.parse import parse_qsl

from ..web.access import SESSION_S, Caller, Verdict
from ..web.fields import RawHeaders, decode_headers, find_cookie
from ..web.paths import DASHBOARD
from .admission import LOGIN, LOGOUT, FrontRules

MAX_FORM_BYTES: Final = 4096

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; margin: 0; padding: 16px; }
form { max-width: 480px; margin: 8vh auto; display: grid; gap: 10px; }
h1, p { margin: 0; }
h1 { font-size: 20px; font-weight: 600; }
code { font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
input, button { font: inherit; padding: 5px 10px; min-height: 34px; }
[role=alert] { color: #b3261e; }
@media (prefers-color-scheme: dark) { [role=alert] { color: #ff8a7e; } }
"""

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · p2pserve</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<main>
<form method="post" action="$action">
  <h1>Log in</h1>
  <p>With the admin token of this gateway: what was given to it as <code>--admin-token</code>,
     <code>--admin-token-file</code> or in <code>P2PSERVE_ADMIN_TOKEN</code>. API keys and join tokens do not open the
     dashboard.</p>
  <label for="token">Admin token</label>
  <input id="token" name="token" type="password" autocomplete="current-password" required autofocus$marks>
  $fault<button type="submit">Log in</button>
</form>
</main>
</body>
</html>
""")

_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # with none at all, browsers would not say that the form is this page's
)


@final
@dataclass(frozen=True, slots=True)
class LoginAnswer:
    """What a front answers where browsers log in or out."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""


def answer_login(
    method: str, path: str, headers: RawHeaders, body: bytes, rules: FrontRules, host: str | None, now: float
) -> LoginAnswer:
    """The answer at LOGIN and LOGOUT of a front that has an admin token. `now`: unix seconds."""
    fields = decode_headers(headers)
    caller = Caller.of((host,) if host is not None else None, fields)
    if method == "POST":
        if not caller.is_own_page:
            return _show_form(403, f"{Verdict.OTHER_PAGE.value}.")
        return _log_out(rules) if path == LOGOUT else _log_in(rules, caller, body, now)
    if method not in ("GET", "HEAD") or path == LOGOUT:
        allowed = b"POST" if path == LOGOUT else b"GET, HEAD, POST"
        return LoginAnswer(405, ((b"allow", allowed),))
    verdict = rules.access.judge_session(caller, find_cookie(headers, rules.access.cookie), now)
    return _go_to(f"{DASHBOARD}/") if verdict is Verdict.ADMITTED else _show_form(200)


def _log_in(rules: FrontRules, caller: Caller, body: bytes, now: float) -> LoginAnswer:
    token = dict(parse_qsl(body.decode("latin-1"))).get("token", "").strip()
    if not rules.access.knows(token):
        return _show_form(401, "That is not this gateway's admin token.")
    # Behind a proxy that speaks TLS this end does not know of it; the browser says what its page came by.
    secure = "; Secure" if caller.origin.startswith("https://") else ""
    return _go_to(f"{DASHBOARD}/", _cookie(rules, rules.access.open_session(now), SESSION_S) + secure)


def _log_out(rules: FrontRules) -> LoginAnswer:
    return _go_to(LOGIN, _cookie(rules, "", 0))


def _cookie(rules: FrontRules, value: str, lasts_s: int) -> str:
    return f"{rules.access.cookie}={value}; Path={DASHBOARD}; Max-Age={lasts_s}; HttpOnly; SameSite=Strict"


def _go_to(location: str, cookie: str = "") -> LoginAnswer:
    kept = ((b"set-cookie", cookie.encode()),) if cookie else ()
    return LoginAnswer(303, ((b"location", location.encode()), (b"cache-control", b"no-store"), *kept))


def _show_form(status: int, fault: str = "") -> LoginAnswer:
    text = _PAGE.substitute(
        style=_STYLE,
        action=LOGIN,
        marks=' aria-invalid="true" aria-describedby="fault"' if fault else "",
        fault=f'<p id="fault" role="alert">{escape(fault)}</p>\n  ' if fault else "",
    )
    return LoginAnswer(status, _HEADERS, text.encode())
