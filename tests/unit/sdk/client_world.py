"""A network on the in-memory transport for clients to ask: its gateways answer by scripts."""

import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio
import trio.testing

from p2pserve.bootstrap import Address, Bootstrap, Identity, NetworkKey, NetworkSettings, PeerId, RemoteError, Role
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.testing import MemoryNetwork
from p2pserve.bootstrap.trust.orders import Orders, sign_orders
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.services.catalogue import CatalogueEntry, ServiceCatalogue, write_catalogue
from p2pserve.node.adverts import CATALOGUE
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import (
    ADVERT,
    Advert,
    AnswerUpdate,
    ContinueGenerate,
    EngineAdvert,
    Generate,
    Generating,
    Status,
    StatusQuery,
    StopRequest,
)
from p2pserve.node.methods import ANSWER, GENERATE, GENERATE_CONTINUE, GENERATE_STOP, STATUS
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.sdk import AsyncClient, Client
from p2pserve.sdk.requests import Generation, TextDelta, build_request
from p2pserve.sdk.session import Session, enter

NOW = 1_700_000_000.0
WORDS = ("one ", "two ", "three ", "four ")
MODEL = ModelInfo(
    service="m-1",
    shape=ModelShape(name="m", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocabulary=9),
    max_model_len=99,
    weights=WeightSizes(layers=(1,) * 1, embeddings=1, head=1),
)
ADVERTISED = Advert(
    hardware=Hardware(cores=1, memory_gib=1.0, processor="x"),
    draining=False,
    model=MODEL,
    engine=EngineAdvert(state="ready"),
)

Script = Callable[["Gateway", PeerId, Generate], Awaitable[Generating]]


@dataclass
class Gateway:
    """A worker that answers `generate` by a script and notes what it was asked."""

    network: Network
    script: Script
    nursery: trio.Nursery
    asked: list[Generate] = field(default_factory=list)
    continued: list[ContinueGenerate] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    was_stopped: trio.Event = field(default_factory=trio.Event)
    stop_seen: threading.Event = field(default_factory=threading.Event)  # the same for another thread

    async def generate(self, client: PeerId, role: Role, body: Generate) -> Generating:
        self.asked.append(body)
        return await self.script(self, client, body)

    async def continue_answer(self, client: PeerId, role: Role, body: ContinueGenerate) -> Generating:
        """Go on with the words after those that the client has; the text is said from its start."""
        self.continued.append(body)
        had = len(body.tokens)
        for number, word in list(enumerate(WORDS, start=1))[had:]:
            text = "".join(WORDS[: had + 1]) if number == had + 1 else word
            self.say(client, body.generate, text, number)
        self.say(client, body.generate, "", finish="length")
        return Generating(service="m-1", prompt_tokens=3)

    def on_stop(self, client: PeerId, role: Role, body: StopRequest) -> None:
        self.stopped.append(body.request)
        self.was_stopped.set()
        self.stop_seen.set()

    def say(
        self, client: PeerId, body: Generate, text: str, *tokens: int, finish: str | None = None, error: str = ""
    ) -> None:
        chunk = AnswerUpdate(request=body.request, text=text, tokens=tokens, finish=finish, error=error)
        self.network.notify(client, ANSWER, chunk)


class World:
    """A network with a bootstrap and gateways, nearest first; the client is built by `client_network`."""

    def __init__(self, nursery: trio.Nursery, *, is_old: bool = False) -> None:
        self.is_old = is_old  # its gateways cannot continue an answer that another one began
        self.memory = MemoryNetwork()
        self.gateways: list[Gateway] = []
        self.peers: set[PeerId] = set()  # of all its nodes
        self._nursery = nursery
        self._key = NetworkKey.generate()
        self._identity = Identity.generate()
        self._client = Identity.generate()
        self._here = (Bootstrap("10.0.0.1", 4001, self._identity.peer_id),)

    @property
    def client(self) -> PeerId:
        return self._client.peer_id

    async def run_node(self, identity: Identity, address: Address, script: Script | None) -> None:
        is_first = identity is self._identity
        token = self._key.issue(() if is_first else self._here, Role.WORKER, NOW + 1e6, lead=True)
        network = Network(
            transport=self.memory.transport(identity, address),
            identity=identity,
            token=token,
            network_key_public=self._key.public,
            role=Role.WORKER,
            announce=address,
            bootstraps=() if is_first else self._here,
            rng=random.Random(1),
            clock=lambda: NOW,
        )

        self.peers.add(network.peer_id)

        async def status(peer: PeerId, role: Role, body: StatusQuery) -> Status:
            return Status(answered_by=network.peer_id, coordinator=None, epoch=0, nodes=(), plan=None)

        network.handle(STATUS, status)
        if script is not None:
            gateway = Gateway(network, script, self._nursery)
            self.gateways.append(gateway)
            self.memory.set_latency(identity.peer_id, self._client.peer_id, 0.001 * len(self.gateways))
            network.handle(GENERATE, gateway.generate)
            if not self.is_old:
                network.handle(GENERATE_CONTINUE, gateway.continue_answer)
            network.on_notice(GENERATE_STOP, gateway.on_stop)

        async def live(task_status: trio.TaskStatus[None]) -> None:
            async with network:
                advert = ADVERTISED if script is not None else msgspec.structs.replace(ADVERTISED, model=None)
                network.publish(ADVERT, msgspec.msgpack.encode(advert))
                task_status.started()
                await trio.sleep_forever()

        await self._nursery.start(live)

    async def start(self, *scripts: Script) -> None:
        await self.run_node(self._identity, Address("10.0.0.1", 4001), None)
        for number, script in enumerate(scripts, start=2):
            await self.run_node(Identity.generate(), Address(f"10.0.0.{number}", 4001), script)

    def list_service(self, name: str) -> None:
        """The owner puts the model of all gateways into the catalogue, under this name."""
        catalogue = ServiceCatalogue(version=1, entries=(CatalogueEntry(name=name, model=MODEL.name),))
        orders = Orders(1, documents={CATALOGUE: write_catalogue(catalogue)})
        self.gateways[0].network.order(sign_orders(self._key, orders))

    def client_network(self) -> Network:
        address = Address("10.9.9.9", 0)
        return Network(
            transport=self.memory.transport(self._client, address),
            identity=self._client,
            token=self._key.issue(self._here, Role.CLIENT, NOW + 1e6),
            network_key_public=self._key.public,
            role=Role.CLIENT,
            announce=address,
            bootstraps=self._here,
            rng=random.Random(2),
            clock=lambda: NOW,
            settings=NetworkSettings(join_s=1.0),
        )


@asynccontextmanager
async def world(*scripts: Script, is_old: bool = False) -> AsyncIterator[tuple[World, Session]]:
    async with trio.open_nursery() as nursery:
        made = World(nursery, is_old=is_old)
        await made.start(*scripts)
        network = made.client_network()
        async with enter(network, 3.0) as session:
            while len(network.entries(ADVERT)) < len(scripts) + 1:  # until it knows of all nodes
                await network.wait_changed(network.revision)
            yield made, session
        nursery.cancel_scope.cancel()


def in_virtual_time(function: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(1000):
            await function()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def let_pass(seconds: float) -> None:
    """Virtual ones."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


async def whole(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
    """Everything, as it should be."""
    for number, word in enumerate(WORDS, start=1):
        gateway.say(client, body, word, number)
    gateway.say(client, body, "", finish="length")
    return Generating(service="m-1", prompt_tokens=3)


class Death:
    """A gateway that says some words and, once the client has them, loses its process."""

    def __init__(self, words: int) -> None:
        self.world: World | None = None
        self.pieces: list[TextDelta] = []
        self._words = words
        self._heard = trio.Event()

    def deliver(self, delta: TextDelta) -> None:
        self.pieces.append(delta)
        if len(self.pieces) == self._words:
            self._heard.set()

    async def script(self, gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        gateway.nursery.start_soon(self._speak_and_die, gateway, client, body)
        return Generating(service="m-1", prompt_tokens=3)

    async def _speak_and_die(self, gateway: Gateway, client: PeerId, body: Generate) -> None:
        for number, word in enumerate(WORDS[: self._words], start=1):
            gateway.say(client, body, word, number)
        if self._words:
            await self._heard.wait()
        assert self.world is not None
        self.world.memory.kill(gateway.network.peer_id)


def refuses(code: str) -> Script:
    async def script(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        raise RemoteError(code, "a reason")

    return script


async def silent(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
    """Accepts and says nothing more."""
    return Generating(service="m-1", prompt_tokens=3)


async def other_words(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
    """Another answer than that of `whole`."""
    gateway.say(client, body, "uno ", 7)
    gateway.say(client, body, "", finish="stop")
    return Generating(service="m-1", prompt_tokens=3)


def request(**options: Any) -> Generate:
    return build_request("a prompt", None, options)


COMPLETE = Generation("".join(WORDS), (1, 2, 3, 4), "length", None)


class Site:
    """Makes a network inside a client's own thread, and keeps hold of it for the test."""

    def __init__(self, *scripts: Script) -> None:
        self.request_seen = threading.Event()
        self.world: World | None = None
        self._scripts = scripts

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Session]:
        async with AsyncExitStack() as stack:
            self.world, session = await stack.enter_async_context(world(*map(self._noted, self._scripts)))
            yield session

    def _noted(self, script: Script) -> Script:
        async def noted(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
            self.request_seen.set()
            return await script(gateway, client, body)

        return noted

    def client(self) -> Client:
        return Client(connect=self.connect)

    def async_client(self) -> AsyncClient:
        return AsyncClient(connect=self.connect)

    @property
    def gateway(self) -> Gateway:
        assert self.world is not None
        return self.world.gateways[0]
