"""Admin API and dashboard on the port of the API server, over the node that runs it."""

from __future__ import annotations

import httpx

from .servers import Server


def test_they_are_on_the_same_port(ours: Server) -> None:
    with httpx.Client(base_url=ours.url, timeout=60) as client:
        answer = client.post("/v1/completions", json={"model": "bundled", "prompt": "def f(", "max_tokens": 4})
        assert answer.status_code == 200
        (node,) = client.get("/p2p/v1/nodes").json()["data"]
        assert (node["phase"], node["engine_state"]) == ("mixed", "ready")
        assert client.get("/p2p/v1/plan").json()["service"] == node["service"]
        request = client.get("/p2p/v1/requests?limit=1").json()["data"][0]
        assert request["decode"] == node["id"]
        spans = client.get(f"/p2p/v1/requests/{request['id']}").json()["spans"]
        assert "decode" in {span["name"] for span in spans}
        for page in ("", "plan", "requests", "events", "chat", f"boxes/{node['id']}", f"requests/{request['id']}"):
            assert client.get(f"/dashboard/{page}").status_code == 200


def test_another_page_or_name_does_not_open_them(ours: Server) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}, {"x-forwarded-for": "203.0.113.9"}):
        for path in ("/p2p/v1/nodes", "/dashboard/"):
            assert httpx.get(f"{ours.url}{path}", headers=headers).status_code == 403


def test_a_parameter_that_cannot_be_is_named(ours: Server) -> None:
    """The only requests that are answered with 422: vLLM's own paths say 400."""
    for query, field in (("nodes?phse=decode", "phse"), ("requests?limit=many", "limit"), ("events?order=up", "order")):
        refused = ours.ask("GET", f"/p2p/v1/{query}")
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", field, 422)
        assert error["message"].startswith(f"{field}: ")
    for path in ("/tokenize", "/v1/completions", "/v1/responses"):
        assert ours.post(path, {"model": ["bundled"], "prompt": {}}).status_code == 400
