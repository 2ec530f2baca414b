"""A front and boxes on real sockets and sessions, asked by the stock clients of OpenAI and Anthropic.

What answers on the boxes is a small HTTP server of this test; `tests/unit/node/http` has the cases of the rest.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anthropic
import h11
import msgspec
import openai
import pytest
import trio
from openai.types.chat import ChatCompletionUserMessageParam

from p2pserve.bootstrap import Address, Bootstrap, Identity, JoinToken, NetworkKey, Role
from p2pserve.bootstrap.errors import AddressError, PortInUse
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.streams.dialling import DiallingTransport
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport
from p2pserve.node.agent import Started, run_node
from p2pserve.node.http.admission import FrontRules
from p2pserve.node.http.answering import HttpAnswering
from p2pserve.node.http.asking import HttpAsking
from p2pserve.node.http.front import HttpFront
from p2pserve.node.messages import ADVERT
from p2pserve.node.settings import NodeSettings

from ...unit.node.http.http_world import ADVERTISED
from ..conftest import OpenCluster

pytestmark = [pytest.mark.beside, pytest.mark.timeout(120)]

LOOPBACK = Address("127.0.0.1", 0)
LIMIT_S = 60.0
MESSAGE = {
    "id": "m", "type": "message", "role": "assistant", "model": "m-1", "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip

Send = Callable[[h11.Event], Awaitable[None]]


@dataclass
class ApiBox:
    """A member whose API server says `words` one by one, the last of them only when `go_on` is set."""

    network: Network
    scope: trio.CancelScope
    words: tuple[str, ...] = ("one ", "two ", "three")
    go_on: trio.Event = field(default_factory=trio.Event)
    asked: list[str] = field(default_factory=list)
    hung_up: trio.Event = field(default_factory=trio.Event)

    async def serve(self, stream: trio.SocketStream) -> None:
        http = h11.Connection(h11.SERVER)

        async def send(event: h11.Event) -> None:
            await stream.send_all(http.send(event) or b"")

        try:
            target, body = "", b""
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(bytes(await stream.receive_some(65536)))
                elif isinstance(event, h11.Request):
                    target = event.target.decode()
                elif isinstance(event, h11.Data):
                    body += event.data
            self.asked.append(target)
            if target.startswith("/v1/messages"):
                await self._answer_json(send, MESSAGE)
            elif json.loads(body or b"{}").get("stream"):
                await self._answer_events(send)
            else:
                await self._answer_json(send, {"object": "list", "data": [{"id": "m-1", "object": "model"}]})
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.hung_up.set()

    async def _answer_json(self, send: Send, value: object) -> None:
        body = json.dumps(value).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        await send(h11.Response(status_code=200, headers=headers))
        await send(h11.Data(body))
        await send(h11.EndOfMessage())

    async def _answer_events(self, send: Send) -> None:
        await send(h11.Response(status_code=200, headers=[("content-type", "text/event-stream")]))
        for number, word in enumerate(self.words):
            if number == len(self.words) - 1:
                with trio.move_on_after(LIMIT_S):
                    while not self.go_on.is_set():
                        await trio.sleep(0.02)
                        await send(h11.Data(b": waiting\n\n"))  # as a server finds out that nobody reads
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m-1", "choices": [choice]}
            await send(h11.Data(b"data: " + json.dumps(chunk).encode() + b"\n\n"))
        await send(h11.Data(b"data: [DONE]\n\n"))
        await send(h11.EndOfMessage())


async def serve_front(token: str, rules: FrontRules, adverts: int, task_status: trio.TaskStatus[str]) -> None:
    """A front on a client, which listens once it has heard of so many nodes."""
    identity, parsed = Identity.generate(), JoinToken.parse(token)
    network = Network(
        transport=DiallingTransport(identity, LOOPBACK),
        identity=identity,
        token=token,
        network_key_public=parsed.network,
        role=Role.CLIENT,
        announce=LOOPBACK,
        bootstraps=parsed.bootstraps,
        rng=random.Random(2),
    )
    async with trio.open_nursery() as nursery:
        asking = HttpAsking(network, nursery)
        async with network:
            while len(network.entries(ADVERT)) < adverts:
                await network.wait_changed(network.revision)
            at = await nursery.start(HttpFront(asking, rules).serve, LOOPBACK)
            task_status.started(f"http://{at}")
            await trio.sleep_forever()


class Running:
    """A bootstrap, some boxes and a front."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.boxes: list[ApiBox] = []
        self.url = ""
        self._nursery = nursery
        self._key = NetworkKey.generate()
        self._here: tuple[Bootstrap, ...] = ()

    async def start_box(self, *, serves: bool = True) -> None:
        identity = Identity.generate()
        network = Network(
            transport=Libp2pTransport(identity, LOOPBACK, LOOPBACK),
            identity=identity,
            token=self._key.issue(self._here, Role.WORKER, time.time() + 600, lead=True),
            network_key_public=self._key.public,
            role=Role.WORKER,
            announce=LOOPBACK,
            bootstraps=self._here,
            rng=random.Random(1),
        )
        box = ApiBox(network, trio.CancelScope())

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with box.scope:
                async with network, trio.open_nursery() as nursery:
                    listeners = await nursery.start(trio.serve_tcp, box.serve, 0)
                    port = listeners[0].socket.getsockname()[1]
                    answering = HttpAnswering(network, partial(trio.open_tcp_stream, "127.0.0.1", port), nursery)
                    network.on_peer_lost(answering.peer_lost)
                    advert = ADVERTISED if serves else msgspec.structs.replace(ADVERTISED, model=None, engine=None)
                    network.publish(ADVERT, msgspec.msgpack.encode(advert))
                    task_status.started()
                    await trio.sleep_forever()

        await self._nursery.start(live)
        if serves:
            self.boxes.append(box)
        else:
            self._here = (Bootstrap(network.address.host, network.address.port, network.peer_id),)

    async def start_front(self, rules: FrontRules) -> None:
        token = self._key.issue(self._here, Role.CLIENT, time.time() + 600)
        self.url = await self._nursery.start(serve_front, token, rules, len(self.boxes) + 1)

    @property
    def working(self) -> ApiBox:
        return next(box for box in self.boxes if box.asked)


@asynccontextmanager
async def running(boxes: int, rules: FrontRules | None = None) -> AsyncIterator[Running]:
    async with trio.open_nursery() as nursery:
        made = Running(nursery)
        await made.start_box(serves=False)
        for _ in range(boxes):
            await made.start_box()
        await made.start_front(rules or FrontRules())
        with trio.fail_after(LIMIT_S):
            yield made
        nursery.cancel_scope.cancel()


def stream_chat(url: str, words: list[str], *, stop_after: int = 100) -> str:
    """Words as they come; what ended it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        asked = ChatCompletionUserMessageParam(role="user", content="x" * 1_000_000)
        try:
            with client.chat.completions.create(model="m-1", messages=[asked], stream=True) as stream:
                for chunk in stream:
                    words.append(chunk.choices[0].delta.content or "")
                    if len(words) == stop_after:
                        return "left"
        except openai.APIError as error:
            return str(error)
    return "done"


def test_the_stock_clients_are_answered() -> None:
    async def main() -> None:
        async with running(1) as made:
            made.boxes[0].go_on.set()
            words: list[str] = []
            assert await trio.to_thread.run_sync(stream_chat, made.url, words) == "done"
            assert words == ["one ", "two ", "three"]

            def ask() -> tuple[str, str]:
                with openai.OpenAI(base_url=f"{made.url}/v1", api_key="any") as client:
                    models = [model.id for model in client.models.list()]
                with anthropic.Anthropic(base_url=made.url, api_key="any") as claude:
                    said = claude.messages.create(
                        model="m-1", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
                    )
                return models[0], said.content[0].text  # type: ignore[union-attr]

            assert await trio.to_thread.run_sync(ask) == ("m-1", "hi")

    trio.run(main)


def test_a_stream_whose_box_is_lost_ends_with_an_error_of_openais_form() -> None:
    async def main() -> None:
        async with running(2) as made:
            words: list[str] = []
            ended: list[str] = []

            async def read() -> None:
                ended.append(await trio.to_thread.run_sync(stream_chat, made.url, words))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                while len(words) < 2:  # noqa: ASYNC110 (a thread says them)
                    await trio.sleep(0.02)
                made.working.scope.cancel()
            assert words == ["one ", "two "]
            assert "the box that answered was lost" in ended[0]
            for box in made.boxes:
                box.go_on.set()
            assert await trio.to_thread.run_sync(stream_chat, made.url, words) == "done"  # by the other one

    trio.run(main)


def test_a_reader_that_leaves_is_noticed_at_the_box() -> None:
    async def main() -> None:
        async with running(1) as made:
            words: list[str] = []
            ended = await trio.to_thread.run_sync(lambda: stream_chat(made.url, words, stop_after=1))
            assert ended == "left"
            await made.working.hung_up.wait()

    trio.run(main)


def test_a_key_and_a_port_that_is_taken() -> None:
    async def main() -> None:
        async with running(1, FrontRules(keys=("secret-key",))) as made:

            def ask(key: str) -> str:
                with openai.OpenAI(base_url=f"{made.url}/v1", api_key=key, max_retries=0) as client:
                    try:
                        return next(iter(client.models.list())).id
                    except openai.AuthenticationError as error:
                        return str(error.status_code)

            assert await trio.to_thread.run_sync(ask, "secret-key") == "m-1"
            assert await trio.to_thread.run_sync(ask, "secret-kez") == "401"
            with socket.create_server(("127.0.0.1", 0)) as taken:
                there = Address("127.0.0.1", taken.getsockname()[1])
                front = HttpFront(HttpAsking(made.boxes[0].network, made._nursery), FrontRules())
                with pytest.raises(PortInUse, match=r"^http: cannot listen on 127\.0\.0\.1:.* give another port$"):
                    await front.serve(there)

    trio.run(main)


def test_a_node_without_a_model_is_a_gateway_too(tmp_path: Path) -> None:
    async def main() -> None:
        stop = trio.Event()
        settings = NodeSettings(home=tmp_path / "node", listen=LOOPBACK, http=LOOPBACK)
        async with trio.open_nursery() as nursery:
            run = partial(run_node, settings, say=lambda line: None, stop=stop)
            started: Started = await nursery.start(run)
            assert started.http is not None
            async with await trio.open_tcp_stream(started.http.host, started.http.port) as stream:
                await stream.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                answer = b"".join([bytes(piece) async for piece in stream])
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"no box of this network is ready to serve" in answer
            stop.set()
        refused = NodeSettings(home=tmp_path / "other", listen=LOOPBACK, http=Address("0.0.0.0", 0))
        with pytest.raises(AddressError, match=r"^http: .*--api-key"):
            await run_node(refused, say=lambda line: None, stop=trio.Event())
        assert not (tmp_path / "other").exists()

    trio.run(main)


def test_vllms_own_server_answers_through_it(cluster: OpenCluster, tmp_path: Path) -> None:
    """On boxes that were not told to serve HTTP: the one that is asked starts its API process for that."""

    async def main() -> None:
        prompt = "def fibonacci(n):"
        async with cluster(tmp_path, "bundled", 2) as made, trio.open_nursery() as nursery:
            await made.wait_plan(2)
            token = made.bootstrap.tokens["client"]
            url = await nursery.start(serve_front, token, FrontRules(), 3)
            expected = await made.client.generate(made.nodes[1].peer, prompt, max_tokens=12)

            def ask() -> tuple[str, str]:
                with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
                    told = client.completions.create(model="bundled", prompt=prompt, max_tokens=12, temperature=0)
                    streamed = client.completions.create(
                        model="bundled", prompt=prompt, max_tokens=12, temperature=0, stream=True
                    )
                    return told.choices[0].text, "".join(chunk.choices[0].text for chunk in streamed)

            assert await trio.to_thread.run_sync(ask) == (expected.text, expected.text)
            nursery.cancel_scope.cancel()

    trio.run(main)
