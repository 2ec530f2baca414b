"""A client's requests against scripted gateways on the in-memory transport: what is retried, and what is said."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio.testing

from p2pserve.bootstrap import Address, Bootstrap, Identity, NetworkKey, NetworkSettings, PeerId, RemoteError, Role
from p2pserve.bootstrap.network import Network
from p2pserve.coordinator.costs.model_shape import ModelShape
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
from p2pserve.sdk.errors import ClientClosed, ConnectionFailed, DeadlineExceeded, InvalidRequest, RequestFailed
from p2pserve.sdk.requests import Generation, TextDelta, build_request
from p2pserve.sdk.session import Session, enter

from ...sim.bootstrap.memory import MemoryNetwork

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
        self._nursery = nursery
        self._key = NetworkKey.generate()
        self._identity = Identity.generate()
        self._client = Identity.generate()
        self._here = (Bootstrap("10.0.0.1", 4001, self._identity.peer_id),)

    async def run_node(self, identity: Identity, address: Address, script: Script | None) -> None:
        is_first = identity is self._identity
        token = self._key.issue(() if is_first else self._here, Role.WORKER, NOW + 1e6)
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
        async with enter(made.client_network(), 3.0) as session:
            await settle(session, len(scripts) + 1)
            yield made, session
        nursery.cancel_scope.cancel()


async def settle(session: Session, gateways: int) -> None:
    """Wait until the client knows of all gateways."""
    while sum(candidate.advert is not None for candidate in session._candidates()) < gateways:
        await session._network.wait_changed(session._network.revision)


def in_virtual_time(function: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(1000):
            await function()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


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


def test_an_answer_arrives_in_pieces_and_whole() -> None:
    async def main() -> None:
        async with world(whole) as (made, session):
            pieces: list[TextDelta] = []
            assert await session.generate(request(), pieces.append) == COMPLETE
            assert pieces == [TextDelta(word, (number,)) for number, word in enumerate(WORDS, start=1)]
            assert made.gateways[0].stopped == []
            assert "requests=0" in repr(session)

    in_virtual_time(main)


@pytest.mark.parametrize("code", ["draining", "busy", "no-engine", "internal"])
def test_a_gateway_that_cannot_is_replaced(code: str) -> None:
    async def main() -> None:
        async with world(refuses(code), whole) as (made, session):
            assert await session.generate(request(), lambda delta: None) == COMPLETE
            assert [len(gateway.asked) for gateway in made.gateways] == [1, 1]

    in_virtual_time(main)


def test_a_gateway_that_dies_before_the_first_token_is_replaced_for_any_request() -> None:
    async def main() -> None:
        death = Death(0)
        async with world(death.script, whole) as (made, session):
            death.world = made
            assert await session.generate(request(temperature=1.0), death.deliver) == COMPLETE

    in_virtual_time(main)


def test_an_answer_goes_on_after_a_death_with_nothing_lost_repeated_or_changed() -> None:
    """Although the second gateway would begin with other words: it is told those that the client has."""

    async def main() -> None:
        death = Death(2)
        async with world(death.script, other_words) as (made, session):
            death.world = made
            assert await session.generate(request(), death.deliver) == COMPLETE
            pieces = death.pieces
            assert "".join(delta.text for delta in pieces) == "".join(WORDS)
            assert [token for delta in pieces for token in delta.tokens] == [1, 2, 3, 4]
            (first,), (continued,) = made.gateways[0].asked, made.gateways[1].continued
            assert continued.tokens == (1, 2)
            second = continued.generate
            assert first.request != second.request
            assert second.deadline_s <= first.deadline_s
            assert (second.prompt, second.service) == (first.prompt, "m-1")  # of whoever began
            assert made.gateways[1].asked == []

    in_virtual_time(main)


def test_a_sampled_answer_goes_on_by_the_seed_that_its_client_has_drawn() -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, other_words) as (made, session):
            death.world = made
            assert await session.generate(request(temperature=0.7), death.deliver) == COMPLETE
            (first,), (continued,) = made.gateways[0].asked, made.gateways[1].continued
            assert first.seed is not None
            assert continued.generate.seed == first.seed

    in_virtual_time(main)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_gateway_of_an_earlier_release_begins_anew_and_what_it_repeats_is_left_out(temperature: float) -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, whole, is_old=True) as (made, session):
            death.world = made
            assert await session.generate(request(temperature=temperature), death.deliver) == COMPLETE
            assert [token for delta in death.pieces for token in delta.tokens] == [1, 2, 3, 4]
            assert [len(gateway.asked) for gateway in made.gateways] == [1, 1]

    in_virtual_time(main)


def test_a_second_answer_that_differs_is_not_sewn_to_the_first() -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, other_words, is_old=True) as (made, session):
            death.world = made
            with pytest.raises(RequestFailed, match="answers otherwise"):
                await session.generate(request(), death.deliver)
            await made.gateways[1].was_stopped.wait()

    in_virtual_time(main)


def test_when_every_gateway_has_failed_all_are_named() -> None:
    async def main() -> None:
        async with world(refuses("draining"), refuses("busy")) as (made, session):
            with pytest.raises(RequestFailed, match="no gateway is left") as caught:
                await session.generate(request(), lambda delta: None)
            for gateway in made.gateways:
                assert gateway.network.peer_id[-6:] in str(caught.value)

    in_virtual_time(main)


def test_what_the_gateway_calls_invalid_is_not_tried_elsewhere() -> None:
    async def main() -> None:
        async with world(refuses("invalid"), whole) as (made, session):
            with pytest.raises(InvalidRequest, match=r"^a reason$"):
                await session.generate(request(), lambda delta: None)
            assert made.gateways[1].asked == []

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("error", "kind"),
    [("no engine is left", RequestFailed), ("deadline: the answer was not complete", DeadlineExceeded)],
)
def test_the_gateways_last_word_is_the_error(error: str, kind: type[RequestFailed]) -> None:
    async def script(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        gateway.say(client, body, "", finish="error", error=error)
        return Generating(service="m-1", prompt_tokens=3)

    async def main() -> None:
        async with world(script) as (_, session):
            with pytest.raises(kind, match=error):
                await session.generate(request(), lambda delta: None)

    in_virtual_time(main)


def test_a_gateway_that_falls_silent_meets_the_deadline_and_is_told_to_stop() -> None:
    async def main() -> None:
        async with world(silent) as (made, session):
            began = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="after 5 s"):
                await session.generate(request(deadline_s=5.0), lambda delta: None)
            assert 5 <= trio.current_time() - began < 8
            await made.gateways[0].was_stopped.wait()
            assert made.gateways[0].stopped == [made.gateways[0].asked[0].request]

    in_virtual_time(main)


def test_a_network_without_a_model_says_what_is_missing() -> None:
    async def main() -> None:
        async with world() as (_, session):
            with pytest.raises(RequestFailed, match="no node of this network serves a model"):
                await session.generate(request(), lambda delta: None)

    in_virtual_time(main)


def test_a_service_that_nobody_has_is_refused_at_once_with_what_is_served() -> None:
    async def main() -> None:
        async with world(whole) as (_, session):
            began = trio.current_time()
            with pytest.raises(InvalidRequest, match=r"^service: nobody serves gpt; this network serves m-1$"):
                await session.generate(request(service="gpt"), lambda delta: None)
            assert trio.current_time() == began

    in_virtual_time(main)


def test_status_comes_from_a_node() -> None:
    async def main() -> None:
        async with world(whole) as (made, session):
            status = await session.status()
            assert status.answered_by in {c.peer for c in session._candidates()}
            assert len(made.gateways) == 1

    in_virtual_time(main)


def test_a_bootstrap_that_is_not_there() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            made = World(nursery)  # nothing is started
            with pytest.raises(ConnectionFailed, match=r"10\.0\.0\.1:4001"):
                async with enter(made.client_network(), 1.0):
                    pass

    in_virtual_time(main)


# ---- the clients: real threads around the same network ---------------------------------------------------------


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


def client_threads() -> int:
    return sum(thread.name == "p2pserve-client" for thread in threading.enumerate())


def test_a_client_answers_whole_and_in_pieces_and_leaves_no_thread() -> None:
    with Site(whole).client() as client:
        assert client.generate("a prompt") == COMPLETE
        with client.generate("a prompt", stream=True) as stream:
            with pytest.raises(RequestFailed, match="not complete"):
                _ = stream.result
            assert [delta.text for delta in stream] == list(WORDS)
            assert stream.result == COMPLETE
            assert list(stream) == []
        assert client.status().epoch == 0
        assert "connected" in repr(client)
    assert client_threads() == 0
    with pytest.raises(ClientClosed):
        client.generate("a prompt")
    client.close()


def test_a_client_may_be_used_from_many_threads() -> None:
    answers: list[Generation] = []
    with Site(whole).client() as client:
        threads = [threading.Thread(target=lambda: answers.append(client.generate("a prompt"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [COMPLETE] * 8


@pytest.mark.parametrize("run", [trio.run, lambda function: asyncio.run(function())], ids=["trio", "asyncio"])
def test_an_async_client_under_both_libraries(run: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
    async def main() -> None:
        async with Site(whole).async_client() as client:
            assert await client.generate("a prompt") == COMPLETE
            async with client.generate("a prompt", stream=True) as stream:
                assert [delta.text async for delta in stream] == list(WORDS)
            assert stream.result == COMPLETE
            assert (await client.status()).epoch == 0
        with pytest.raises(ClientClosed):
            await client.status()

    run(main)
    assert client_threads() == 0


def test_closing_a_stream_stops_the_request() -> None:
    async def endless(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        gateway.say(client, body, "one ", 1)
        return Generating(service="m-1", prompt_tokens=3)

    site = Site(endless)
    with site.client() as client:
        with client.generate("a prompt", stream=True) as stream:
            assert next(stream) == TextDelta("one ", (1,))
        assert site.gateway.stop_seen.wait(5)
        assert list(stream) == []
    assert site.gateway.stopped == [site.gateway.asked[0].request]


def test_an_interrupt_while_waiting_stops_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(silent)
    with site.client() as client:
        stream = client.generate("a prompt", stream=True)

        def interrupted() -> TextDelta:
            assert site.request_seen.wait(5)
            raise KeyboardInterrupt

        monkeypatch.setattr(stream._job.mailbox, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert site.gateway.stop_seen.wait(5)
    assert len(site.gateway.stopped) == len(site.gateway.asked) == 1


def test_cancelling_a_task_stops_its_request() -> None:
    site = Site(silent)

    async def main() -> None:
        async with site.async_client() as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.generate, "a prompt")
                assert await trio.to_thread.run_sync(site.request_seen.wait, 5)
                nursery.cancel_scope.cancel()
            assert await trio.to_thread.run_sync(site.gateway.stop_seen.wait, 5)

    trio.run(main)
    assert len(site.gateway.stopped) == len(site.gateway.asked) == 1


def test_closing_a_client_ends_a_request_of_another_thread() -> None:
    site = Site(silent)
    client = site.client()
    failures: list[Exception] = []

    def ask() -> None:
        try:
            client.generate("a prompt")
        except ClientClosed as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert site.request_seen.wait(5)
    client.close()
    thread.join(5)
    assert len(failures) == 1
    assert client_threads() == 0


def test_a_failed_connection_is_told_to_everyone_and_tried_anew() -> None:
    attempts: list[int] = []

    @asynccontextmanager
    async def refuse() -> AsyncIterator[Session]:
        attempts.append(1)
        if attempts:
            raise ConnectionFailed("nobody there")
        yield Session(None, 1.0)  # type: ignore[arg-type]

    client = Client(connect=refuse)
    for _ in range(2):
        with pytest.raises(ConnectionFailed, match="nobody there"):
            client.status()
    with pytest.raises(ConnectionFailed):
        client.__enter__()
    assert len(attempts) == 3
    assert client_threads() == 0


def test_parameters_are_checked_before_anything_is_started() -> None:
    client = Client("10.0.0.1:4001")
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate("a", temperature=float("nan"))
    with pytest.raises(InvalidRequest, match="timeout_s"):
        Client("10.0.0.1:4001", timeout_s=float("nan"))
    assert client_threads() == 0
    client.close()


def test_a_forgotten_client_ends_its_thread() -> None:
    client = Site(whole).client()
    client.connect()
    assert client_threads() == 1
    del client
    assert client_threads() == 0
