"""How a browser logs in at a front: at its own page, by a cookie that no box sees and that no other front takes."""

import h11
import pytest

from p2pserve.bootstrap import Role
from p2pserve.node.http.admission import LOGIN, LOGOUT, FrontRules, judge
from p2pserve.node.http.login import MAX_FORM_BYTES, LoginAnswer, answer_login
from p2pserve.node.web.access import COOKIE, SESSION_S
from p2pserve.node.web.fields import find_cookie, find_header

from .http_world import NO_HEADERS, Box, Headers, Seen, Send, echo, http_world, in_virtual_time

TOKEN = "correct horse battery"
OURS = FrontRules(role=Role.ADMIN, admin_token=TOKEN, realm="12D3KooWours")
THEIRS = FrontRules(role=Role.ADMIN, admin_token=TOKEN, realm="12D3KooWtheirs")
OPEN = FrontRules(role=Role.ADMIN)
HOST = (b"host", b"box.example")
AWAY = "203.0.113.9"
RIGHT = b"token=correct+horse+battery"


def log_in(rules: FrontRules, body: bytes = RIGHT, origin: bytes = b"http://box.example") -> LoginAnswer:
    return answer_login("POST", LOGIN, [HOST, (b"origin", origin)], body, rules, AWAY, 1000.0)


def cookie_of(answer: LoginAnswer) -> bytes:
    """What the browser sends from then on."""
    return (find_header(answer.headers, b"set-cookie") or b"").partition(b";")[0]


def status_of(rules: FrontRules, cookie: bytes, now: float = 1001.0, *others: tuple[bytes, bytes]) -> int | None:
    refusal = judge("GET", "/dashboard/plan", [HOST, (b"cookie", b"a=b; " + cookie), *others], rules, AWAY, now)
    return refusal.status if refusal is not None else None


def test_a_session_is_good_at_its_front_until_it_ends() -> None:
    answer = log_in(OURS)
    assert (answer.status, find_header(answer.headers, b"location")) == (303, b"/dashboard/")
    kept = (find_header(answer.headers, b"set-cookie") or b"").decode()
    assert kept.endswith(f"; Path=/dashboard; Max-Age={SESSION_S}; HttpOnly; SameSite=Strict")
    assert TOKEN not in kept
    cookie = cookie_of(answer)
    assert status_of(OURS, cookie) is None
    assert status_of(OURS, cookie, 1000.0 + SESSION_S) == 303
    assert status_of(OURS, cookie[:-1]) == 303
    assert status_of(FrontRules(role=Role.ADMIN, admin_token=f"{TOKEN}!", realm=OURS.realm), cookie) == 303
    assert status_of(OURS, cookie, 1001.0, (b"origin", b"https://evil.example")) == 403


def test_a_session_is_good_at_no_other_front_even_under_its_cookies_name() -> None:
    cookie = cookie_of(log_in(OURS))
    name, _, value = cookie.partition(b"=")
    assert name != THEIRS.access.cookie.encode()
    assert name != COOKIE.encode()  # of a box, at another port of the same host
    assert status_of(THEIRS, THEIRS.access.cookie.encode() + b"=" + value) == 303
    assert status_of(THEIRS, cookie_of(log_in(THEIRS))) is None


@pytest.mark.parametrize("body", [b"", b"token=", b"token=wrong", b"\xff\x00", b"other=correct+horse+battery"])
def test_what_is_not_the_token_is_told_in_a_line(body: bytes) -> None:
    answer = log_in(OURS, body)
    assert answer.status == 401
    assert cookie_of(answer) == b""
    assert b'role="alert">That is not this gateway\'s admin token.</p>' in answer.body.replace(b"&#x27;", b"'")


@pytest.mark.parametrize("path", [LOGIN, LOGOUT])
@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://box.example:81"])
def test_another_page_logs_nobody_in_or_out(path: str, origin: bytes) -> None:
    answer = answer_login("POST", path, [HOST, (b"origin", origin)], RIGHT, OURS, AWAY, 1000.0)
    assert (answer.status, cookie_of(answer)) == (403, b"")
    assert b"made by a page of another site" in answer.body


def test_a_cookie_of_https_stays_there() -> None:
    secure = log_in(OURS, origin=b"https://box.example")
    for answer, expected in ((secure, True), (log_in(OURS), False)):
        assert ((find_header(answer.headers, b"set-cookie") or b"").endswith(b"; Secure")) is expected


def test_the_page_is_whole_in_itself() -> None:
    page = answer_login("GET", LOGIN, [HOST], b"", OURS, AWAY, 1000.0)
    assert page.status == 200
    policy = (find_header(page.headers, b"content-security-policy") or b"").decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"<script" not in page.body
    assert b"//" not in page.body  # it names no other place
    assert find_header(page.headers, b"cache-control") == b"no-store"


def test_other_methods_are_refused_and_who_is_in_need_not_log_in() -> None:
    assert answer_login("PUT", LOGIN, [HOST], b"", OURS, AWAY, 0.0).status == 405
    assert answer_login("GET", LOGOUT, [HOST], b"", OURS, AWAY, 0.0).status == 405
    answer = answer_login("GET", LOGIN, [HOST, (b"cookie", cookie_of(log_in(OURS)))], b"", OURS, AWAY, 1001.0)
    assert (answer.status, find_header(answer.headers, b"location")) == (303, b"/dashboard/")


@pytest.mark.parametrize(
    ("method", "target", "headers", "status"),
    [
        ("GET", "/dashboard", [], 303),
        ("HEAD", "/dashboard/requests/5f0c?view=matrix", [], 303),
        ("POST", "/dashboard/", [], 401),
        ("GET", "/dashboard/news/", [(b"x-have", b"abc")], 401),  # a page's script, which then loads the page anew
        ("GET", "/dashboard/", [(b"authorization", b"Bearer wrong")], 401),  # a program
        ("GET", "/p2p/v1/nodes", [], 401),
    ],
)
def test_who_has_not_logged_in_is_led_to_the_page_or_told(
    method: str, target: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    refusal = judge(method, target, [HOST, *headers], OURS, AWAY, 0.0)
    assert refusal is not None
    assert (refusal.status, refusal.location) == (status, LOGIN if status == 303 else None)


def test_a_front_that_carries_no_dashboard_or_has_no_token_has_no_login() -> None:
    client = FrontRules(role=Role.CLIENT, admin_token=TOKEN)
    for rules, status in ((client, 403), (OPEN, 403)):
        refusal = judge("POST", LOGIN, [HOST], rules, AWAY)
        assert refusal is not None
        assert refusal.status == status
        assert not rules.has_login(LOGIN)
    assert judge("GET", LOGIN, [(b"host", b"localhost")], OPEN, "127.0.0.1") is None  # the box leads on to the pages


def test_a_cookie_is_found_among_others() -> None:
    assert find_cookie([(b"Cookie", b"xa=1; a=2=3;a=4")], "a") == "2=3"
    assert find_cookie([(b"cookie", b"b=1"), (b"cookie", b"a=2")], "a") == "2"
    assert find_cookie([(b"cookie", b"a"), (b"x", b"a=1")], "a") == ""


async def answer_with_cookie(box: Box, seen: Seen, send: Send) -> None:
    """As a box would that wants to be remembered."""
    headers = [("content-length", "0"), ("set-cookie", f"{OURS.access.cookie}=evil"), ("Set-Cookie", "a=b")]
    await send(h11.Response(status_code=200, headers=headers))
    await send(h11.EndOfMessage())


def test_a_browser_logs_in_looks_and_logs_out_and_no_box_learns_by_what() -> None:
    async def main() -> None:
        async with http_world(echo, rules=OURS, token_role=Role.ADMIN) as world:
            browser, (box,) = world.connect(), world.boxes
            told = await browser.ask("GET", "/dashboard/")
            assert (told.status, told.headers["location"]) == (303, LOGIN)
            assert (await browser.ask("GET", LOGIN)).status == 200
            assert (await browser.ask("HEAD", LOGIN)).body == b""
            assert (await browser.ask("POST", LOGIN, b"token=wrong")).status == 401
            told = await browser.ask("POST", LOGIN, RIGHT)
            cookie = {"cookie": f"jupyter=secret; {told.headers['set-cookie'].partition(';')[0]}"}
            assert box.seen == []
            for target, headers, status in (("/dashboard/", cookie, 200), ("/v1/models", cookie, 200)):
                assert (await browser.ask("GET", target, headers=headers)).status == status
            shown, models = box.seen
            assert "cookie" not in shown.headers | models.headers
            assert (shown.headers["x-p2p-session"], shown.headers["x-p2p-role"]) == ("yes", "admin")
            assert "x-p2p-session" not in models.headers
            box.seen.clear()
            told = await browser.ask("POST", LOGOUT, headers=cookie)
            assert (told.status, told.headers["location"]) == (303, LOGIN)
            assert f"{OURS.access.cookie}=; Path=/dashboard; Max-Age=0" in told.headers["set-cookie"]
            assert box.seen == []

    in_virtual_time(main)


@pytest.mark.parametrize("headers", [NO_HEADERS, {"x-p2p-session": "yes"}])
def test_a_box_is_told_of_a_session_only_by_the_front(headers: Headers) -> None:
    async def main() -> None:
        async with http_world(echo, rules=OURS, token_role=Role.ADMIN) as world:
            shown = {**headers, "authorization": f"Bearer {TOKEN}"}
            assert (await world.connect().ask("GET", "/dashboard/", headers=shown)).status == 200
            assert "x-p2p-session" not in world.boxes[0].seen[0].headers

    in_virtual_time(main)


def test_a_box_sets_no_cookie_at_the_front() -> None:
    async def main() -> None:
        async with http_world(answer_with_cookie, rules=OURS, token_role=Role.ADMIN) as world:
            told = await world.connect().ask("GET", "/dashboard/", headers={"authorization": f"Bearer {TOKEN}"})
            assert told.status == 200
            assert "set-cookie" not in {name.lower() for name in told.headers}

    in_virtual_time(main)


def test_a_form_is_bounded_before_it_is_held() -> None:
    async def main() -> None:
        async with http_world(echo, rules=OURS, token_role=Role.ADMIN) as world:
            browser = world.connect()
            fields = [("host", "localhost"), ("content-length", str(MAX_FORM_BYTES + 1))]
            head = h11.Request(method="POST", target=LOGIN, headers=fields)
            await browser.stream.send_all(browser.http.send(head) or b"")
            assert (await browser.read()).status == 413

    in_virtual_time(main)
