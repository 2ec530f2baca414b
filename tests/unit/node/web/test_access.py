"""Who may look: with a token whoever shows it, without one only the box itself, and no page of anybody else's."""

from __future__ import annotations

import pytest

from p2pserve.node.web.access import SESSION_S, Access, AdminTokenError, Caller, Verdict
from p2pserve.node.web.fields import VOUCHED

TOKEN = "correct horse battery"
HERE = Caller("127.0.0.1", "127.0.0.1:8000")
AWAY = Caller("203.0.113.9", "203.0.113.2:8000")


@pytest.mark.parametrize(
    "caller",
    [
        HERE,
        Caller("::1", "[::1]:8000"),
        Caller("127.0.0.1", "localhost:8000"),
        Caller("127.0.0.1", "LOCALHOST"),
        Caller("127.0.0.1", "localhost:8000", origin="http://localhost:8000"),
    ],
)
def test_without_a_token_the_box_itself_may_look(caller: Caller) -> None:
    access = Access(None)
    assert access.judge_bearer(caller, "") is Verdict.ADMITTED
    assert access.judge_session(caller, "", 0.0) is Verdict.ADMITTED


@pytest.mark.parametrize(
    ("caller", "verdict"),
    [
        (AWAY, Verdict.NOT_FROM_HERE),
        (Caller(None, "localhost:8000"), Verdict.NOT_FROM_HERE),  # a Unix socket: carried here from another box
        (HERE._replace(passed_on=True), Verdict.NOT_FROM_HERE),
        (HERE._replace(asked_for="evil.example:8000"), Verdict.NOT_FROM_HERE),  # DNS rebinding
        (HERE._replace(asked_for=""), Verdict.NOT_FROM_HERE),
        (HERE._replace(asked_for="[::1"), Verdict.NOT_FROM_HERE),
        (HERE._replace(origin="https://evil.example"), Verdict.OTHER_PAGE),
        (HERE._replace(origin="null"), Verdict.OTHER_PAGE),
        (HERE._replace(origin="http://127.0.0.1:9000"), Verdict.OTHER_PAGE),  # another program of this box
    ],
)
def test_without_a_token_nobody_else_may(caller: Caller, verdict: Verdict) -> None:
    access = Access(None)
    assert access.judge_bearer(caller, f"Bearer {TOKEN}") is verdict
    assert access.judge_session(caller, access.open_session(0.0), 1.0) is verdict


@pytest.mark.parametrize(
    ("shown", "verdict"),
    [
        (f"Bearer {TOKEN}", Verdict.ADMITTED),
        (f"bearer  {TOKEN} ", Verdict.ADMITTED),
        ("Bearer correct horse batter", Verdict.TOKEN_WRONG),
        ("Bearer pässword", Verdict.TOKEN_WRONG),
        ("Bearer ", Verdict.TOKEN_MISSING),
        (f"Basic {TOKEN}", Verdict.TOKEN_MISSING),
        ("", Verdict.TOKEN_MISSING),
    ],
)
@pytest.mark.parametrize("caller", [HERE, AWAY, Caller(None, "")])
def test_with_a_token_it_is_what_counts(caller: Caller, shown: str, verdict: Verdict) -> None:
    assert Access(TOKEN).judge_bearer(caller, shown) is verdict


def test_another_page_may_not_use_the_token_of_its_viewer() -> None:
    access = Access(TOKEN)
    caller = AWAY._replace(origin="https://evil.example")
    assert access.judge_bearer(caller, f"Bearer {TOKEN}") is Verdict.OTHER_PAGE
    assert access.judge_session(caller, access.open_session(0.0), 1.0) is Verdict.OTHER_PAGE


def test_a_session_ends_and_cannot_be_made_up() -> None:
    access = Access(TOKEN)
    cookie = access.open_session(1000.0)
    expiry, _, signature = cookie.partition(".")

    def judge(cookie: str, now: float = 1001.0) -> Verdict:
        return access.judge_session(AWAY, cookie, now)

    assert judge(cookie) is Verdict.ADMITTED
    assert judge(cookie, 1000.0 + SESSION_S) is Verdict.TOKEN_MISSING
    for made_up in (
        "",
        ".",
        "9",
        f"{int(expiry) + 9}.{signature}",
        f"{expiry}.",
        f"²{cookie}",
        "9" * 5000,
        f"-{cookie}",
    ):
        assert judge(made_up) is Verdict.TOKEN_MISSING


def test_a_session_outlives_a_restart_but_not_its_token() -> None:
    cookie = Access(TOKEN).open_session(0.0)
    assert Access(TOKEN).judge_session(AWAY, cookie, 1.0) is Verdict.ADMITTED
    assert Access(f"{TOKEN}!").judge_session(AWAY, cookie, 1.0) is Verdict.TOKEN_MISSING


@pytest.mark.parametrize("token", ["", "short", "0123456789abcde", "sixteen letters\n", "sechzehn Zeichen ß"])
def test_a_token_that_can_be_guessed_is_refused(token: str) -> None:
    with pytest.raises(AdminTokenError, match="admin-token: it has to be at least 16 printable ASCII characters"):
        Access(token)


def test_headers_tell_of_the_caller() -> None:
    caller = Caller.of(("127.0.0.1", 4), {"host": "localhost", "origin": "http://localhost"})
    assert caller.is_local
    assert caller.is_own_page
    for header in ("x-forwarded-for", "forwarded", "via", "x-real-ip", "x-forwarded-host"):
        assert not Caller.of(("127.0.0.1", 4), {"host": "localhost", header: "10.0.0.1"}).is_local
    assert not Caller.of(None, {"host": "localhost"}).is_local


@pytest.mark.parametrize("access", [Access(None), Access(TOKEN)])
def test_whom_an_admins_front_has_let_in_is_let_in_unless_another_page_asks(access: Access) -> None:
    headers = {"host": "localhost:8000", "x-p2p-role": "admin"}
    vouched = Caller.of_scope({"client": None, VOUCHED: True}, headers)
    assert access.judge_bearer(vouched, "") is access.judge_session(vouched, "", 0.0) is Verdict.ADMITTED
    foreign = Caller.of_scope({"client": None, VOUCHED: True}, {**headers, "origin": "https://evil.example"})
    assert access.judge_bearer(foreign, "") is access.judge_session(foreign, "", 0.0) is Verdict.OTHER_PAGE
    for scope in ({"client": None}, {"client": None, VOUCHED: False}):
        assert access.judge_bearer(Caller.of_scope(scope, headers), "") is not Verdict.ADMITTED


def test_it_does_not_show_its_token() -> None:
    assert TOKEN not in repr(Access(TOKEN))
