"""The door of the API server: whom paths with an access of their own are told of, and whose costs metrics tell."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from p2pserve.node.engine.api.carrying import Carry, NotCarriedOn, Send
from p2pserve.node.engine.api.door import Door
from p2pserve.node.engine.api.protocol import ApiConfig, KeyDigest, OtherService, ServiceState
from p2pserve.node.web.access import Caller
from p2pserve.node.web.fields import KEYS_TOLD, VOUCHED, RawHeaders


async def carry_nothing(method: str, target: str, headers: RawHeaders, body: bytes, send: Send) -> None:
    raise AssertionError


ALONE = ServiceState(serving=True, reason="", max_model_len=9, kv_usage=0.0)


@dataclass
class Serves:
    network: ServiceState = ALONE
    carry: Carry = carry_nothing

    async def probe(self) -> bool:
        return True


def show(request: Request) -> JSONResponse:
    return JSONResponse(Caller.of_scope(request.scope, request.headers).is_vouched)


@pytest.mark.parametrize(
    ("is_vouched", "role", "told"),
    [(True, "admin", True), (True, "client", False), (True, None, False), (False, "admin", False)],
)
def test_only_what_the_agent_carries_here_is_an_admins(*, is_vouched: bool, role: str | None, told: bool) -> None:
    app = Starlette(routes=[Mount("/p2p/v1", Starlette(routes=[Route("/nodes", show)]))])
    door = Door(app, ApiConfig(model="m", names=("m",)), Serves(), ("/p2p/v1",), is_vouched=is_vouched)
    headers = {VOUCHED: "true"} | ({"x-p2p-role": role} if role is not None else {})
    assert TestClient(door).get("/p2p/v1/nodes", headers=headers).json() is told


ADMIN = "0123456789abcdef"
KEYS = tuple(KeyDigest(name, sha256(f"sk-of-{name}".encode()).digest()) for name in ("alice", "bob"))
KEYED = ApiConfig(model="m", names=("m",), keys=KEYS)
GUARDED = ApiConfig(model="m", names=("m",), keys=KEYS, admin_token=ADMIN)
OPEN = ApiConfig(model="m", names=("m",), is_open=True)
HERE, THERE = ("127.0.0.1", 1), ("203.0.113.9", 1)
ALICE = {"x-api-key": "sk-of-alice"}
OWNER = {"authorization": f"Bearer {ADMIN}"}
LOCAL = {"host": "localhost"}


def show_keys(request: Request) -> JSONResponse:
    return JSONResponse({"told": request.scope[KEYS_TOLD]})


@pytest.mark.parametrize(
    ("config", "client", "headers", "told"),
    [
        (KEYED, THERE, ALICE, ["alice"]),
        (KEYED, THERE, {}, 401),
        (KEYED, HERE, {**ALICE, **LOCAL}, None),  # its owner, as for the dashboard
        (KEYED, HERE, LOCAL, 401),
        (KEYED, HERE, {**ALICE, "host": "box.example"}, ["alice"]),
        (KEYED, HERE, {**ALICE, **LOCAL, "x-forwarded-for": "203.0.113.9"}, ["alice"]),
        (KEYED, HERE, {**ALICE, **LOCAL, "origin": "https://evil.example"}, ["alice"]),
        (KEYED, THERE, OWNER, 401),  # it has no such token
        (GUARDED, THERE, OWNER, None),
        (GUARDED, THERE, {**OWNER, **ALICE}, None),
        (GUARDED, HERE, {**ALICE, **LOCAL}, ["alice"]),
        (GUARDED, THERE, {"authorization": "Bearer fedcba9876543210"}, 401),
        (GUARDED, THERE, {**ALICE, "x-p2p-role": "admin", VOUCHED: "true", KEYS_TOLD: "bob"}, ["alice"]),
        (GUARDED, THERE, {"x-p2p-role": "admin", "x-p2p-client": "bob"}, 401),
        (OPEN, THERE, {}, None),  # it has nobody's name to tell
    ],
)
def test_whose_costs_metrics_tell(
    config: ApiConfig, client: tuple[str, int], headers: dict[str, str], told: list[str] | int | None
) -> None:
    app = Starlette(routes=[Route("/metrics", show_keys), Route("/v1/models", show_keys)])
    with TestClient(Door(app, config, Serves(), (), is_vouched=False), client=client) as asking:
        answer = asking.get("/metrics", headers=headers)
        if isinstance(told, int):
            assert answer.status_code == told
        else:
            assert answer.json() == {"told": told}
        if not config.is_open and "x-api-key" not in headers:
            assert asking.get("/v1/models", headers=headers).status_code == 401  # the admin token is no API key


def test_who_asks_through_a_gateway_is_told_of_nobodys_costs() -> None:
    app = Starlette(routes=[Route("/metrics", show_keys)])
    for config in (KEYED, GUARDED, OPEN):
        door = Door(app, config, Serves(), (), is_vouched=True)
        for headers in ({}, ALICE, OWNER, {"x-p2p-role": "admin", "x-p2p-client": "alice", **LOCAL}):
            assert TestClient(door, client=HERE).get("/metrics", headers=headers).json() == {"told": []}


# -- several services -----------------------------------------------------------------------------------------

OTHERS = (OtherService(names=("other", "other-1234"), max_model_len=77), OtherService(names=("third",)))
STATE = ServiceState(serving=True, max_model_len=9, service="m-1111", others=OTHERS)
NAMED = ApiConfig(model="m", names=("m",), is_open=True, max_body_bytes=4096)


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"here": await request.json()})


async def list_models(request: Request) -> JSONResponse:
    cards = [{"id": "m", "root": "/m", "max_model_len": 9, "object": "model"}]
    return JSONResponse({"object": "list", "data": cards})


APP = Starlette(
    routes=[
        Route("/v1/completions", echo, methods=["POST"]),
        Route("/v1/models", list_models),
    ]
)


def door_of(serves: Serves, *, is_vouched: bool = False) -> TestClient:
    return TestClient(Door(APP, NAMED, serves, (), is_vouched=is_vouched), client=HERE)


@pytest.mark.parametrize("body", [{"model": "m"}, {}, {"model": "m", "prompt": "x" * 3000}])
def test_a_request_for_the_own_model_or_none_is_answered_here_as_it_came(body: dict[str, str]) -> None:
    assert door_of(Serves(STATE)).post("/v1/completions", json=body).json() == {"here": body}


def test_a_request_may_name_the_service_in_place_of_the_model() -> None:
    answer = door_of(Serves(STATE)).post("/v1/completions", json={"model": "m-1111", "prompt": "x"})
    assert answer.json() == {"here": {"model": "m", "prompt": "x"}}


def test_in_a_network_of_one_model_the_server_itself_refuses_another() -> None:
    alone = Serves(ServiceState(serving=True, service="m-1111"))
    assert door_of(alone).post("/v1/completions", json={"model": "x"}).json() == {"here": {"model": "x"}}


def test_a_request_for_a_model_of_another_box_is_carried_there_whole_and_its_answer_is_passed_on() -> None:
    asked = []

    async def carry(method: str, target: str, headers: RawHeaders, body: bytes, send: Send) -> None:
        asked.append((method, target, body))
        await send({"type": "http.response.start", "status": 202, "headers": [(b"x-from", b"there")]})
        for piece in (b"one ", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    for name in ("other", "other-1234", "third"):
        answer = door_of(Serves(STATE, carry)).post(
            "/v1/completions?a=b", content=f'{{"model": "{name}"}}', headers=JSON
        )
        assert (answer.status_code, answer.text, answer.headers["x-from"]) == (202, "one two", "there")
        assert asked.pop() == ("POST", "/v1/completions?a=b", f'{{"model": "{name}"}}'.encode())


JSON = {"content-type": "application/json"}


def test_what_the_agent_does_not_carry_may_be_asked_for_again() -> None:
    async def carry(*asked: Any) -> None:
        raise NotCarriedOn("the node's agent broke off")

    answer = door_of(Serves(STATE, carry)).post("/v1/completions", json={"model": "other"})
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert answer.json()["error"]["message"] == "the node's agent broke off"


@pytest.mark.parametrize("is_vouched", [True, False])
def test_a_model_that_nobody_knows_gets_a_line_with_those_there_are(*, is_vouched: bool) -> None:
    answer = door_of(Serves(STATE), is_vouched=is_vouched).post("/v1/completions", json={"model": "fourth"})
    assert answer.status_code == 404
    told = answer.json()["error"]
    assert told["message"] == "model: this network does not serve fourth; it serves m, other, third"
    assert (told["param"], told["type"]) == ("model", "not_found_error")


def test_a_request_that_was_carried_here_for_a_model_that_no_box_has_now_goes_no_further() -> None:
    answer = door_of(Serves(STATE), is_vouched=True).post("/v1/completions", json={"model": "third"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "no box serves third now" in answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused_whatever_it_names() -> None:
    answer = door_of(Serves(STATE)).post("/v1/completions", json={"model": "other", "prompt": "x" * 5000})
    assert answer.status_code == 413


def test_the_list_of_models_has_one_line_for_each_service() -> None:
    listed = door_of(Serves(STATE)).get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"], card["object"]) for card in listed] == [
        ("m", 9, "model"),
        ("other", 77, "model"),
        ("third", None, "model"),
    ]
    alone = door_of(Serves(ServiceState(serving=True, service="m-1111"))).get("/v1/models").json()["data"]
    assert [card["id"] for card in alone] == ["m"]


# -- the catalogue --------------------------------------------------------------------------------------------

CALLED = ServiceState(
    serving=True, max_model_len=9, service="m-1111", entry="chat",
    others=(*OTHERS, OtherService(names=("code",), is_placed=False)),
)  # fmt: skip
GONE = msgspec.structs.replace(CALLED, removed=True)


def test_a_request_may_call_the_own_model_as_the_catalogue_does() -> None:
    answer = door_of(Serves(CALLED)).post("/v1/completions", json={"model": "chat", "prompt": "x"})
    assert answer.json() == {"here": {"model": "m", "prompt": "x"}}


@pytest.mark.parametrize("is_vouched", [True, False])
def test_a_service_that_no_box_has_yet_is_asked_for_again_and_not_listed(*, is_vouched: bool) -> None:
    door = door_of(Serves(CALLED), is_vouched=is_vouched)
    answer = door.post("/v1/completions", json={"model": "code"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert [card["id"] for card in door.get("/v1/models").json()["data"]] == ["m", "chat", "other", "third"]


@pytest.mark.parametrize("body", [{"model": "m"}, {"model": "m-1111"}, {"model": "chat"}, {}])
def test_a_model_that_was_removed_gets_a_line_with_those_there_are(body: dict[str, str]) -> None:
    door = door_of(Serves(GONE))
    answer = door.post("/v1/completions", json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("serves code, other, third")
    assert [card["id"] for card in door.get("/v1/models").json()["data"]] == ["other", "third"]


def test_where_nothing_else_is_served_that_is_said() -> None:
    alone = ServiceState(serving=True, service="m-1111", removed=True)
    answer = door_of(Serves(alone)).post("/v1/completions", json={"model": "m"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        404,
        "model: this network does not serve m; it serves nothing",
    )
    assert door_of(Serves(alone)).get("/v1/models").json()["data"] == []
