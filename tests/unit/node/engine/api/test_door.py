"""The door of the API server: whom paths with an access of their own are told of, and whose costs metrics tell."""

from __future__ import annotations

from hashlib import sha256

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from p2pserve.node.engine.api.door import Door
from p2pserve.node.engine.api.protocol import ApiConfig, KeyDigest, ServiceState
from p2pserve.node.web.access import Caller
from p2pserve.node.web.fields import KEYS_TOLD, VOUCHED


class Serves:
    network = ServiceState(serving=True, reason="", max_model_len=9, kv_usage=0.0)

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
