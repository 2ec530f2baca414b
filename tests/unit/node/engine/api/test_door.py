"""The door of the API server: whom paths with an access of their own are told of."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from p2pserve.node.admin.access import Caller
from p2pserve.node.engine.api.door import Door
from p2pserve.node.engine.api.protocol import ApiConfig, ServiceState
from p2pserve.node.web.fields import VOUCHED


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
