"""The dashboard's pages: who gets them, what is in them, and that nobody's words become code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from p2pserve.node.admin.source import NetworkSnapshot, SourceError
from p2pserve.node.dashboard.mounting import OWN_ACCESS, mount
from p2pserve.node.dashboard.view import View
from p2pserve.node.dev.showcase import Showcase
from p2pserve.node.observing.values import LinkSummary, RequestTrace
from p2pserve.node.web.access import COOKIE, Access
from p2pserve.node.web.fields import VOUCHED

from .networks import NOW, network

TOKEN = "correct horse battery"
PAGES = (
    "",
    "plan",
    "requests",
    "events",
    "chat",
    "boxes/amber-otter",
    "?view=matrix",
    "?sites=folded",
    "?sites=nonsense",
)
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class Changed:
    """A network of which one thing is different; `fault`: it does not answer."""

    def __init__(self, showcase: Showcase, fault: str = "", **changes: Any) -> None:
        self.showcase, self.fault, self.changes = showcase, fault, changes

    async def snapshot(self) -> NetworkSnapshot:
        if self.fault:
            raise SourceError(self.fault)
        return replace(self.showcase.look(NOW), **self.changes)

    async def links(self) -> tuple[LinkSummary, ...]:
        return await self.showcase.links() if "nodes" not in self.changes else ()

    async def trace(self, request: str) -> RequestTrace | None:
        return await self.showcase.trace(request)


def open_client(source: Any, token: str | None = None, *, away: bool = False) -> TestClient:
    app = Starlette()
    mount(app, source, Access(token))
    host = "203.0.113.9" if away else "127.0.0.1"
    return TestClient(app, base_url="http://127.0.0.1", client=(host, 1), follow_redirects=False)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with open_client(network(8)) as client:
        yield client


class Reader(HTMLParser):
    """What a page refers to, and the tags that are open at its end."""

    VOID = frozenset({"meta", "link", "img", "input", "br", "hr", "path", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "action", "data-news")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("boxes", [1, 8, 60])
def test_every_page_is_whole_and_refers_to_nobody_else(page: str, boxes: int) -> None:
    with open_client(network(boxes)) as client:
        answer = client.get(f"/dashboard/{page}")
        assert answer.status_code == 200
        for reference in read(answer.text).references:
            assert reference.startswith(("/dashboard/", "#")), reference
        assert "http://" not in answer.text
        assert "https://" not in answer.text
        assert len(answer.content) < 300_000


@pytest.mark.parametrize("page", PAGES)
def test_a_browser_may_load_nothing_else(client: TestClient, page: str) -> None:
    answer = client.get(f"/dashboard/{page}")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    reader = read(answer.text)
    assert "style" not in reader.tags + reader.attributes
    assert not [name for name in reader.attributes if name.startswith("on")]
    assert answer.headers["cache-control"] == "no-store"


def test_files_are_served_and_refer_to_nobody_else(client: TestClient) -> None:
    for name in ("dashboard.css", "dashboard.js", "chat.js", "theme.js", "icon.svg"):
        answer = client.get(f"/dashboard/static/{name}")
        assert answer.status_code == 200
        found = re.findall(r"(?:https?:)?//[a-z0-9]+\.[a-z0-9]+", answer.text)
        assert found in ([], ["http://www.w3"])  # a namespace, which nobody loads
    assert client.get("/dashboard/static/../app.py").status_code == 404


def test_nobody_s_words_become_code() -> None:
    showcase = network(3)
    snapshot = showcase.look(NOW)
    texts = ("name", "site", "hardware", "engine", "engine_detail", "state", "address", "service", "phase", "pinned")
    nodes = tuple(replace(node, **dict.fromkeys(texts, EVIL)) for node in snapshot.nodes)
    requests = tuple(replace(each, id=EVIL, client=EVIL, state="error", error=EVIL) for each in snapshot.requests[-3:])
    events = tuple(replace(each, kind=EVIL, request=EVIL, facts={EVIL: EVIL}) for each in snapshot.events[-3:])
    assert snapshot.plan is not None
    plan = replace(snapshot.plan, why=(EVIL,), service=EVIL, codec=EVIL)
    source = Changed(showcase, nodes=nodes, requests=requests, events=events, plan=plan)
    with open_client(source) as client:
        for page in ("", "plan", "requests", "events", f"boxes/{showcase.peers[0]}", "?view=matrix", "?sites=folded"):
            answer = client.get(f"/dashboard/{page}")
            assert answer.status_code == 200
            reader = read(answer.text)
            assert reader.tags.count("script") == 2
            assert "onerror" not in reader.attributes
            assert EVIL[:20] not in answer.text
        assert EVIL[:20] not in client.get("/dashboard/boxes/" + EVIL[:30].replace("/", "")).text
        for name in ("kind", "request", "site", "state"):
            assert EVIL[:20] not in client.get("/dashboard/events", params={name: EVIL}).text


def test_news_are_the_sections_that_have_changed(client: TestClient) -> None:
    page = client.get("/dashboard/").text
    digests = re.findall(r'data-digest="(\w+)"', page)
    assert len(digests) == 3
    answer = client.get("/dashboard/news/", headers={"x-have": ",".join(digests)})
    assert answer.json()["sections"] == {}
    answer = client.get("/dashboard/news/", headers={"x-have": f"{digests[0]},old,{digests[2]}"})
    assert list(answer.json()["sections"]) == ["topology"]
    told = answer.json()["sections"]["topology"]
    assert told["digest"] == digests[1]
    assert told["html"] in page


def test_pages_ask_for_their_own_news(client: TestClient) -> None:
    for page, news in (
        ("", "/news/"),
        ("plan", "/news/plan"),
        ("events?kind=member", "/news/events?kind=member"),
        ("?view=matrix&other=1", "/news/?view=matrix"),
    ):
        (found,) = re.findall(r'data-news="/dashboard([^"]*)"', client.get(f"/dashboard/{page}").text)
        assert found.replace("&amp;", "&") == news
        assert client.get(f"/dashboard{news}").status_code == 200


def test_who_asks_through_the_api_is_called_by_the_key() -> None:
    view = View(snapshot=NetworkSnapshot(time=NOW, answered_by="a"))
    assert [view.label(peer) for peer in ("local:", "local:team-a", "12D3KooWabcdef")] == [
        "API",
        "team-a",
        "bronze-reindeer",
    ]


def test_a_request_has_a_page(client: TestClient) -> None:
    request = client.get("/p2p/v1/requests?state=stop").json()["data"][0]["id"]
    text = client.get(f"/dashboard/requests/{request}").text
    assert "Timeline" in text
    assert "span-prefill" in text or "span-decode" in text
    assert "No box remembers this request" in client.get("/dashboard/requests/unknown").text


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("events?kind=member.dead", "No event is like that"),
        ("requests?state=cancelled", "None of the latest requests is like that"),
        ("?site=nowhere", "None at this site"),
    ],
)
def test_filters_that_find_nothing_say_so(client: TestClient, query: str, words: str) -> None:
    assert words in client.get(f"/dashboard/{query}").text


def test_a_network_that_has_just_begun_says_what_to_do() -> None:
    source = Changed(network(1), nodes=(), plan=None, requests=(), events=())
    with open_client(source) as client:
        assert "p2pserve join --bootstrap TOKEN" in client.get("/dashboard/").text
        assert "There is no plan yet" in client.get("/dashboard/plan").text
        assert "Nobody has asked for anything yet" in client.get("/dashboard/requests").text
        assert "Nothing has happened yet" in client.get("/dashboard/events").text


def test_a_box_that_is_not_there(client: TestClient) -> None:
    answer = client.get("/dashboard/boxes/nobody")
    assert answer.status_code == 404
    assert "no box is called nobody" in answer.text
    assert client.get("/dashboard/news/boxes/nobody").status_code == 404


def test_a_node_that_does_not_answer_is_asked_again() -> None:
    with open_client(Changed(network(1), "the node is leaving")) as client:
        answer = client.get("/dashboard/")
        assert answer.status_code == 503
        assert "the node is leaving" in answer.text
        assert 'http-equiv="refresh"' in answer.text
        news = client.get("/dashboard/news/")
        assert (news.status_code, news.json()) == (503, {"error": "the node is leaving"})


def test_who_has_the_token_logs_in_and_out() -> None:
    with open_client(network(3), TOKEN, away=True) as client:
        for page in PAGES:
            answer = client.get(f"/dashboard/{page}")
            assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/login")
        assert client.get("/dashboard/news/", headers={"x-have": "x"}).status_code == 401
        form = client.get("/dashboard/login").text
        assert 'type="password"' in form
        assert "amber" not in form
        wrong = client.post("/dashboard/login", data={"token": "wrong"})
        assert wrong.status_code == 401
        assert "not this node" in wrong.text
        right = client.post("/dashboard/login", data={"token": TOKEN})
        assert (right.status_code, right.headers["location"]) == (303, "/dashboard/")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Path=/dashboard" in cookie
        assert TOKEN not in cookie
        assert client.get("/dashboard/").status_code == 200
        assert client.get("/dashboard/login").status_code == 303
        assert client.post("/dashboard/logout").status_code == 303
        assert COOKIE not in client.cookies
        assert client.get("/dashboard/").status_code == 303


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("logged_in", [False, True])
def test_who_has_logged_in_at_a_gateway_may_log_out_there(token: str | None, logged_in: bool) -> None:
    app = Starlette()
    mount(app, network(3), Access(token))

    async def carried(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, VOUCHED: True}, receive, send)

    headers = {"x-p2p-session": "yes"} if logged_in else {}
    with TestClient(carried, base_url="http://127.0.0.1", client=("", 0)) as client:
        assert ("Log out" in client.get("/dashboard/", headers=headers).text) is logged_in


def test_another_page_cannot_log_in_or_look() -> None:
    with open_client(network(3), TOKEN) as client:
        evil = {"origin": "https://evil.example"}
        assert client.post("/dashboard/login", data={"token": TOKEN}, headers=evil).status_code == 401
        client.post("/dashboard/login", data={"token": TOKEN})
        assert client.get("/dashboard/news/", headers=evil).status_code == 403


def test_a_form_is_bounded() -> None:
    with open_client(network(1), TOKEN) as client:
        assert client.post("/dashboard/login", data={"token": "x" * 5000}).status_code == 413


def test_without_a_token_others_are_told_what_to_do() -> None:
    with open_client(network(3), away=True) as client:
        answer = client.get("/dashboard/")
        assert answer.status_code == 403
        assert "--admin-token" in answer.text
        assert "amber" not in answer.text


def test_without_a_token_no_login_is_asked_for(client: TestClient) -> None:
    assert client.get("/dashboard/login").status_code == 303
    assert "Log out" not in client.get("/dashboard/").text


def test_a_cookie_of_https_stays_there() -> None:
    with open_client(network(1), TOKEN) as client:
        answer = client.post("https://127.0.0.1/dashboard/login", data={"token": TOKEN})
        assert "Secure" in answer.headers["set-cookie"]


def test_both_are_behind_the_admin_token() -> None:
    assert OWN_ACCESS == ("/p2p/v1", "/dashboard")
