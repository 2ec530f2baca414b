"""The admin API over a modelled network: bodies, errors, who may ask, events as they come."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from p2pserve.coordinator import Plan
from p2pserve.node.admin import api
from p2pserve.node.admin.api import MAX_FOLLOWERS, Admin, make_admin_api
from p2pserve.node.admin.feed import Feed
from p2pserve.node.admin.listing import EventFilter
from p2pserve.node.admin.source import NetworkSnapshot, SourceError
from p2pserve.node.dev.showcase import Showcase
from p2pserve.node.observing.values import LinkSummary, NodeEvent, RequestTrace
from p2pserve.node.web.access import Access

NOW = 1_800_000_000.0
TOKEN = "correct horse battery"


class Empty:
    """A node that has just begun; `fault`, one that does not answer."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.events: tuple[NodeEvent, ...] = ()

    async def snapshot(self) -> NetworkSnapshot:
        if self.fault:
            raise SourceError(self.fault)
        return NetworkSnapshot(time=NOW, answered_by="a", events=self.events)

    async def links(self) -> tuple[LinkSummary, ...]:
        return ()

    async def trace(self, request: str) -> RequestTrace | None:
        return None


def client_of(source: Any, token: str | None = None, *, away: bool = False, raises: bool = True) -> TestClient:
    app = make_admin_api(Feed(source, lambda: NOW), Access(token))
    host = "203.0.113.9" if away else "127.0.0.1"
    return TestClient(app, base_url="http://127.0.0.1", client=(host, 1), raise_server_exceptions=raises)


@pytest.fixture(scope="module")
def network() -> Showcase:
    return Showcase(8, lambda: NOW, per_site=3)


@pytest.fixture(scope="module")
def client(network: Showcase) -> Iterator[TestClient]:
    with client_of(network) as client:
        yield client


def error_of(answer: Any) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return error


def test_lists_have_what_the_network_has(client: TestClient, network: Showcase) -> None:
    assert [node["id"] for node in client.get("/nodes").json()["data"]] == list(network.peers)
    assert len(client.get("/links?limit=1000").json()["data"]) == 56
    assert msgspec.convert(client.get("/plan").json(), Plan) == network.look(NOW).plan
    newest, oldest = (client.get(f"/requests?order={order}&limit=1").json()["data"][0] for order in ("desc", "asc"))
    assert newest["arrived"] > oldest["arrived"]
    assert client.get("/events?kind=request&limit=1").json()["data"][0]["kind"].startswith("request.")


def test_one_of_each_by_its_name(client: TestClient, network: Showcase) -> None:
    peer = network.peers[1]
    assert client.get("/nodes/brave-otter").json() == client.get(f"/nodes/{peer}").json()
    link = client.get("/links/amber-otter/brave-otter").json()
    assert (link["source"], link["target"]) == network.peers[:2]
    request = client.get("/requests?state=stop").json()["data"][0]["id"]
    assert next(span["name"] for span in client.get(f"/requests/{request}").json()["spans"]) == "queue"


def test_pages_follow_each_other(client: TestClient) -> None:
    seen: list[str] = []
    page: dict[str, Any] = {"last_id": None, "has_more": True}
    while page["has_more"]:
        after = {"after": page["last_id"]} if page["last_id"] else {}
        page = client.get("/links", params={"limit": 25, **after}).json()
        seen += [f"{link['source']}:{link['target']}" for link in page["data"]]
    assert len(seen) == len(set(seen)) == 56


@pytest.mark.parametrize(
    ("path", "status", "param", "message"),
    [
        ("/nodes/nobody", 404, "node", "no box is called nobody"),
        ("/nodes?phse=decode", 422, "phse", "there is no such parameter"),
        ("/nodes?limit=0", 422, "limit", "greater than or equal to 1"),
        ("/nodes?limit=1001", 422, "limit", "less than or equal to 1000"),
        ("/nodes?limit=many", 422, "limit", "valid integer"),
        ("/nodes?after=x", 404, "after", "begin again without it"),
        ("/links?source=nobody", 404, "source", "there are amber-otter"),
        ("/links?min_gbps=nan", 422, "min_gbps", "finite number"),
        ("/links?max_gbps=-1", 422, "max_gbps", "greater than or equal to 0"),
        ("/links/amber-otter/amber-otter", 404, "target", "nothing is known yet"),
        ("/requests/none", 404, "request_id", "no box remembers"),
        ("/requests?order=up", 422, "order", "'asc' or 'desc'"),
        ("/events?node=nobody", 404, "node", "no box is called"),
        ("/nothing", 404, None, "/openapi.json has all paths"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    client: TestClient, path: str, status: int, param: str | None, message: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    error = error_of(answer)
    assert error["param"] == param
    assert message in error["message"]


def test_other_methods_are_refused(client: TestClient) -> None:
    answer = client.post("/nodes")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET"
    error_of(answer)


def test_a_network_that_has_just_begun() -> None:
    with client_of(Empty()) as client:
        assert client.get("/nodes").json() == {
            "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None,
        }  # fmt: skip
        assert "there is no plan yet" in error_of(client.get("/plan"))["message"]
        assert "there are none at all" in error_of(client.get("/nodes/a-box"))["message"]


def test_a_node_that_does_not_answer() -> None:
    with client_of(Empty("the node is leaving")) as client:
        answer = client.get("/nodes")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert error_of(answer)["message"] == "the node is leaving"


@pytest.mark.parametrize("away", [False, True])
def test_with_a_token_everybody_shows_it(away: bool) -> None:
    with client_of(Empty(), TOKEN, away=away) as client:
        answer = client.get("/nodes")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert error_of(answer)["type"] == "authentication_error"
        assert client.get("/nodes", headers={"authorization": "Bearer no"}).status_code == 401
        assert client.get("/nodes", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/openapi.json").status_code == 200


def test_without_a_token_others_are_told_what_to_do() -> None:
    with client_of(Empty(), away=True) as client:
        error = error_of(client.get("/nodes"))
        assert error["code"] == 403
        assert "--admin-token" in error["message"]


def test_nothing_is_kept_by_browsers(client: TestClient) -> None:
    assert client.get("/nodes").headers["cache-control"] == "no-store"


def test_the_document_names_every_body_and_error(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {
        "NodeSummary",
        "LinkSummary",
        "RequestSummary",
        "RequestTrace",
        "NodeEvent",
        "Plan",
        "Error",
    } <= schemas.keys()
    assert "HTTPValidationError" not in schemas
    for path in document["paths"].values():
        responses = path["get"]["responses"]
        assert {"200", "401", "403", "422", "503"} <= responses.keys()
        assert path["get"]["security"]
    text = json.dumps(document)
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.partition('"')[0] in schemas


def follow(source: Empty, count: int, *, last: str | None = None, **asked: str) -> list[str]:
    """The first chunks of a stream; before each but the first two more events happen."""

    async def read() -> list[str]:
        clock = itertools.count()
        admin = Admin(Feed(source, lambda: NOW + 10 * next(clock)), Access(None))
        stream = api._follow(admin, EventFilter(**asked), last)
        found = []
        for number in range(count):
            found.append((await anext(stream)).decode())
            assert admin.followers == 1
            for kind in ("request.begun", "member.dead"):
                source.events += (NodeEvent(number=number + 10, time=NOW, node="a", kind=kind, request="r\nid: 7"),)
        await stream.aclose()  # type: ignore[attr-defined]
        assert admin.followers == 0
        return found

    return asyncio.run(read())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "SNAPSHOT_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_events_come_as_they_happen() -> None:
    first, second, third = follow(Empty(), 3)
    assert first == ": following\n\n"
    begun, dead, rest = second.split("\n\n")
    assert begun.startswith("id: a:10\nevent: request.begun\ndata: {")
    assert json.loads(begun.partition("data: ")[2])["request"] == "r\nid: 7"  # in JSON no line begins within a text
    assert dead.startswith("id: a:10\nevent: member.dead\n")
    assert rest == ""
    assert third.startswith("id: a:11\nevent: request.begun\n")


@pytest.mark.usefixtures("at_once")
def test_a_follower_may_go_on_after_what_it_has() -> None:
    source = Empty()
    source.events = tuple(NodeEvent(number=number, time=NOW, node="a", kind="x") for number in (1, 2, 3))
    assert follow(source, 2, last="a:2")[1].startswith("id: a:3\nevent: x\n")


@pytest.mark.usefixtures("at_once")
def test_a_follower_hears_what_it_asks_for() -> None:
    assert follow(Empty(), 2, kind="member")[1].startswith("id: a:10\nevent: member.dead\n")


def test_followers_are_bounded(network: Showcase) -> None:
    app = make_admin_api(Feed(network, lambda: NOW), Access(None))
    app.state.admin.followers = MAX_FOLLOWERS
    with TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as client:
        answer = client.get("/events?stream=true")
        assert answer.status_code == 429
        assert "try again when one of them has ended" in error_of(answer)["message"]
