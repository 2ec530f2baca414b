"""A real network's answers, as admin API and dashboard show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.applications import Starlette
from starlette.testclient import TestClient

from p2pserve.node import agent
from p2pserve.node.admin.answering import NodeAnswers
from p2pserve.node.admin.asking import METRICS, TRACE, AskedNode
from p2pserve.node.admin.source import SourceError
from p2pserve.node.dashboard.mounting import mount
from p2pserve.node.web.access import Access

from ...conftest import OpenCluster

pytestmark = pytest.mark.beside


class Refused(Exception):
    """The question is not known."""


class Told:
    """A node's answers, kept for a server that runs on another kind of loop."""

    def __init__(self, answers: dict[tuple[str, str], bytes]) -> None:
        self.answers = answers

    async def ask(self, what: str, body: bytes) -> bytes:
        found = self.answers.get((what, body.decode("latin-1")))
        if found is None:
            raise Refused(f"{what}: this node has no answer to that")
        return found


def test_what_a_network_did_is_shown(
    cluster: OpenCluster, random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, gateway, request = trio.run(run_network, cluster, random_model, tmp_path, monkeypatch)
    look_at(told, gateway, request)


async def run_network(
    cluster: OpenCluster, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Told, str, str]:
    """The answers of a gateway that has answered one request; its peer id, and the request's id."""
    nodes: list[agent.Node] = []
    real = agent.Node

    def keep(*settings: Any) -> agent.Node:
        nodes.append(real(*settings))
        return nodes[-1]

    monkeypatch.setattr(agent, "Node", keep)
    async with cluster(home, model, 2) as network:
        await network.wait_plan(2)
        gateway = network.nodes[0].peer
        (answer,) = await network.ask_all(["def add(a, b):"], gateways=[gateway], max_tokens=8)
        assert answer.finish == "length"
        node = next(node for node in nodes if node._joined.own == gateway)
        answers = NodeAnswers(node._joined, node.showing)
        whole = {what: answer_to for what, answer_to in answers.by_name().items() if what not in (METRICS, TRACE)}
        told = {(what, ""): await answer_to(b"") for what, answer_to in whole.items()}
        shown = await AskedNode(Told(told).ask, Refused).snapshot()
        request = shown.requests[-1]
        assert request.completion_tokens == 8
        assert {request.prefill, request.decode} == {each.peer for each in network.nodes}
        question = b"\x81\xa7request" + bytes([0xA0 + len(request.id)]) + request.id.encode()
        told[TRACE, question.decode("latin-1")] = await answers.trace(question)
    return Told(told), shown.answered_by, request.id


def look_at(told: Told, gateway: str, request: str) -> None:
    app = Starlette()
    mount(app, AskedNode(told.ask, Refused), Access(None))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 1)) as client:
        assert len(client.get("/p2p/v1/nodes").json()["data"]) == 3
        assert {node["phase"] for node in client.get("/p2p/v1/nodes").json()["data"]} == {"prefill", "decode", ""}
        assert client.get("/p2p/v1/plan").json()["pairings"][0]["weight"] == 1.0
        assert client.get("/p2p/v1/events?kind=request.ended").json()["data"][0]["request"] == request
        trace = client.get(f"/p2p/v1/requests/{request}").json()
        assert {"prefill", "decode", "kv"} <= {span["name"] for span in trace["spans"]}
        assert "no answer to that" in client.get("/p2p/v1/requests/another").json()["error"]["message"]
        for page in ("", "plan", "requests", "events", "?view=matrix", f"boxes/{gateway}", f"requests/{request}"):
            answer = client.get(f"/dashboard/{page}")
            assert answer.status_code == 200
            assert "None" not in answer.text
        assert request[-12:] in client.get("/dashboard/requests").text
        assert "span-prefill" in client.get(f"/dashboard/requests/{request}").text


def test_what_is_no_answer_is_told() -> None:
    async def ask() -> None:
        node = AskedNode(Told({}).ask, Refused)
        for question in (node.snapshot, node.links):
            with pytest.raises(SourceError, match="this node has no answer to that"):
                await question()

    trio.run(ask)
