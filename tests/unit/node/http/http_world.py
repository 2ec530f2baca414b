"""A network on the in-memory transport whose boxes answer HTTP by scripts, and a front on a client of it."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11
import msgspec
import trio
import trio.testing

from p2pserve.bootstrap import Address, Bootstrap, Identity, NetworkKey, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.testing import MemoryNetwork
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.http.admission import FrontRules
from p2pserve.node.http.answering import ApiUnavailable, HttpAnswering
from p2pserve.node.http.asking import HttpAsking
from p2pserve.node.http.front import HttpFront
from p2pserve.node.messages import ADVERT, Advert, EngineAdvert
from p2pserve.node.models import ModelInfo, WeightSizes

NOW = 1_700_000_000.0
ADVERTISED = Advert(
    hardware=Hardware(cores=1, memory_gib=1.0, processor="x"),
    draining=False,
    model=ModelInfo(
        service="m-1",
        shape=ModelShape(name="m", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocabulary=9),
        max_model_len=99,
        weights=WeightSizes(layers=(1,), embeddings=1, head=1),
    ),
    engine=EngineAdvert(state="ready"),
)

Headers = Mapping[str, str]
NO_HEADERS: Headers = {}
Send = Callable[[h11.Event], Awaitable[None]]
Script = Callable[["Box", "Seen", Send], Awaitable[None]]


@dataclass
class Seen:
    """A request as an API server got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Box:
    """A worker with an API server that answers by a script."""

    network: Network
    script: Script
    nursery: trio.Nursery
    has_api: bool = True
    seen: list[Seen] = field(default_factory=list)
    hung_up: trio.Event = field(default_factory=trio.Event)
    read_body: bool = True
    sent: int = 0  # bytes that the connection to the API server has taken of its answers

    def __post_init__(self) -> None:
        self.answering = HttpAnswering(self.network, self.connect, self.nursery)
        self.network.on_peer_lost(self.answering.peer_lost)

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    async def connect(self) -> trio.abc.Stream:
        if not self.has_api:
            raise ApiUnavailable("this node has no model, and so no API server")
        mine, theirs = trio.testing.lockstep_stream_pair()
        self.nursery.start_soon(self._serve, theirs)
        return mine

    async def _serve(self, stream: trio.abc.HalfCloseableStream) -> None:
        http = h11.Connection(h11.SERVER)

        async def send(event: h11.Event) -> None:
            await stream.send_all(http.send(event) or b"")
            self.sent += len(event.data) if isinstance(event, h11.Data) else 0

        async def next_event() -> object:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(bytes(await stream.receive_some(65536)))
            return event

        async with stream:
            try:
                head = await next_event()
                assert isinstance(head, h11.Request)
                body = b""
                while self.read_body and isinstance(event := await next_event(), h11.Data):
                    body += event.data
                headers = {name.decode(): value.decode() for name, value in head.headers}
                seen = Seen(head.method.decode(), head.target.decode(), headers, body)
                self.seen.append(seen)
                await self.script(self, seen, send)
            except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                self.hung_up.set()


@dataclass
class HttpWorld:
    """Its boxes, nearest first."""

    memory: MemoryNetwork
    front: HttpFront
    asking: HttpAsking
    client: Network
    nursery: trio.Nursery
    boxes: list[Box] = field(default_factory=list)

    def connect(self) -> "Browser":
        mine, theirs = trio.testing.lockstep_stream_pair()
        self.nursery.start_soon(self.front.serve_stream, theirs)
        return Browser(mine)


class Browser:
    """An HTTP client on one connection to the front."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self.http = h11.Connection(h11.CLIENT)

    async def ask(self, method: str, target: str, body: bytes = b"", headers: Headers = NO_HEADERS) -> "Told":
        await self.send(method, target, body, headers)
        return await self.read()

    async def send(self, method: str, target: str, body: bytes = b"", headers: Headers = NO_HEADERS) -> None:
        fields = {"host": "localhost:8000", **headers}
        if body:
            fields |= {"content-length": str(len(body)), "content-type": "application/json"}
        await self.stream.send_all(
            self.http.send(h11.Request(method=method, target=target, headers=list(fields.items()))) or b""
        )
        if body:
            await self.stream.send_all(self.http.send(h11.Data(body)) or b"")
        await self.stream.send_all(self.http.send(h11.EndOfMessage()) or b"")

    async def event(self) -> object:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(bytes(await self.stream.receive_some(65536)))
        return event

    async def read(self) -> "Told":
        head = await self.event()
        while isinstance(head, h11.InformationalResponse):
            head = await self.event()
        assert isinstance(head, h11.Response), head
        body = b""
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
        return Told(head.status_code, {n.decode(): v.decode() for n, v in head.headers}, body)


@dataclass
class Told:
    """An answer as the client got it."""

    status: int
    headers: dict[str, str]
    body: bytes


@asynccontextmanager
async def http_world(
    *scripts: Script, rules: FrontRules | None = None, role: Role = Role.CLIENT, token_role: Role | None = None
) -> AsyncIterator[HttpWorld]:
    async with trio.open_nursery() as nursery:
        memory, key = MemoryNetwork(), NetworkKey.generate()
        identities = [Identity.generate() for _ in range(len(scripts) + 1)]
        client = Identity.generate()
        here = (Bootstrap("10.0.0.1", 4001, identities[0].peer_id),)
        boxes: list[Box] = []
        for number, identity in enumerate(identities):
            address = Address(f"10.0.0.{number + 1}", 4001)
            network = Network(
                transport=memory.transport(identity, address),
                identity=identity,
                token=key.issue(here if number else (), Role.WORKER, NOW + 1e6, lead=True),
                network_key_public=key.public,
                role=Role.WORKER,
                announce=address,
                bootstraps=here if number else (),
                rng=random.Random(1),
                clock=lambda: NOW,
            )
            if number:
                box = Box(network, scripts[number - 1], nursery)
                boxes.append(box)
                memory.set_latency(identity.peer_id, client.peer_id, 0.001 * number)
            await nursery.start(_live, network, bool(number))
        network = Network(
            transport=memory.transport(client, Address("10.9.9.9", 0)),
            identity=client,
            token=key.issue(here, token_role or role, NOW + 1e6),
            network_key_public=key.public,
            role=role,
            announce=Address("10.9.9.9", 0),
            bootstraps=here,
            rng=random.Random(2),
            clock=lambda: NOW,
            settings=NetworkSettings(join_s=1.0),
        )
        asking = HttpAsking(network, nursery)
        async with network:
            while len(network.entries(ADVERT)) < len(scripts) + 1:
                await network.wait_changed(network.revision)
            yield HttpWorld(memory, HttpFront(asking, rules or FrontRules()), asking, network, nursery, boxes)
        nursery.cancel_scope.cancel()


async def _live(network: Network, serves: bool, task_status: trio.TaskStatus[None]) -> None:
    async with network:
        advert = ADVERTISED if serves else msgspec.structs.replace(ADVERTISED, model=None, engine=None)
        network.publish(ADVERT, msgspec.msgpack.encode(advert))
        task_status.started()
        await trio.sleep_forever()


async def pass_time(seconds: float) -> None:
    """On the virtual clock."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


async def until(is_so: Callable[[], object]) -> None:
    """Wait for something that shows nowhere."""
    while not is_so():
        await pass_time(0.05)


def in_virtual_time(function: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(2000):
            await function()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def echo(box: Box, seen: Seen, send: Send) -> None:
    """What was asked, as JSON."""
    body = msgspec.json.encode({"box": box.peer, "method": seen.method, "target": seen.target, "size": len(seen.body)})
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    await send(h11.Response(status_code=200, headers=headers))
    await send(h11.Data(body))
    await send(h11.EndOfMessage())


async def begin_events(send: Send) -> None:
    await send(h11.Response(status_code=200, headers=[("content-type", "text/event-stream; charset=utf-8")]))


async def stream_three(box: Box, seen: Seen, send: Send) -> None:
    """Three events, then the end."""
    await begin_events(send)
    for word in (b"one", b"two", b"[DONE]"):
        await send(h11.Data(b"data: " + word + b"\n\n"))
    await send(h11.EndOfMessage())


async def begin_and_wait(box: Box, seen: Seen, send: Send) -> None:
    """One event and a half, and no more until the connection breaks."""
    await begin_events(send)
    await send(h11.Data(b'data: one\n\ndata: {"half":'))
    while True:
        await pass_time(1)
        await send(h11.Data(b" "))


async def wait_long(box: Box, seen: Seen, send: Send) -> None:
    """Nothing at all."""
    await pass_time(1500)
