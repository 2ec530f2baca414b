"""The page of metrics: vLLM's families, then the node's."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from p2pserve.node.admin.source import SourceError
from p2pserve.node.engine.api.metrics import NodeMetrics


def page(request: Request) -> Response:
    assert "accept-encoding" not in request.headers
    return StreamingResponse(iter([b"vllm:a 1\n", b"vllm:b 2\n"]), media_type="text/plain")


def client_of(said: str | Exception, status: int = 200) -> TestClient:
    async def render(keys: tuple[str, ...] | None) -> str:
        if isinstance(said, Exception):
            raise said
        assert keys == ()  # unless something before it says whose costs may be told, nobody's are
        return said

    routes = [
        Route("/metrics", page if status == 200 else lambda request: PlainTextResponse("no", status)),
        Route("/other", lambda request: PlainTextResponse("other")),
    ]
    return TestClient(NodeMetrics(Starlette(routes=routes), render, SourceError))


def test_the_nodes_families_are_behind_those_of_vllm() -> None:
    answer = client_of("p2pserve:c 3\n").get("/metrics")
    assert answer.text == "vllm:a 1\nvllm:b 2\np2pserve:c 3\n"
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_an_agent_that_is_silent_costs_its_own_families_alone() -> None:
    answer = client_of(SourceError("the node does\nnot answer")).get("/metrics")
    assert answer.text == "vllm:a 1\nvllm:b 2\n# p2pserve: the node does not answer\n"


@pytest.mark.parametrize(("path", "status", "text"), [("/other", 200, "other"), ("/metrics", 401, "no")])
def test_nothing_else_is_touched(path: str, status: int, text: str) -> None:
    answer = client_of("p2pserve:c 3\n", status).get(path)
    assert (answer.status_code, answer.text) == (status, text)
