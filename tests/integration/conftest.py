"""Real networks on loopback: nodes in this process, their engines forked from one fork server."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.bootstrap import Address, Identity, JoinToken, PeerId, Role
from p2pserve.bootstrap.errors import PeerLost
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport
from p2pserve.coordinator import Phase, RoutingSettings
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node import messages, methods
from p2pserve.node.agent import Started, run_node
from p2pserve.node.engine.agent_side.fork_server import fork_server_command
from p2pserve.node.links.reach import lead_client_around
from p2pserve.node.settings import BoxEngineSettings, NodeSettings

from .node.engine.figures import ATTEMPTS

LOOPBACK = Address("127.0.0.1", 0)
CHANNELS = 128  # one for each node that any test starts
KNOBS = BoxEngineSettings(kv_cache_mib=64, threads=1)
WAIT_LIMIT_S = 120.0  # for what takes seconds, unless the machine is very busy


@dataclass
class Answer:
    """What a client got for one request. `undisturbed`: its KV came in time, which on a busy machine it may not."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    error: str = ""
    figures: messages.RequestFigures | None = None

    @property
    def undisturbed(self) -> bool:
        return self.figures is not None and self.figures.recovered == ()


class Client:
    """A client that speaks the network's own messages."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._chunks: dict[str, trio.MemorySendChannel[messages.AnswerUpdate]] = {}
        self._next = 0
        network.on_notice(methods.ANSWER, self._on_chunk)

    def _on_chunk(self, peer: PeerId, role: Role, body: messages.AnswerUpdate) -> None:
        if body.request in self._chunks:
            self._chunks[body.request].send_nowait(body)

    async def status(self, peer: PeerId) -> messages.Status:
        return await self.network.request(peer, methods.STATUS, messages.StatusQuery(), 30)

    async def generate(
        self,
        gateway: PeerId,
        prompt: str,
        *,
        on_tokens: Callable[[int], Awaitable[None]] | None = None,
        **settings: object,
    ) -> Answer:
        """One request to its end; `on_tokens(count)` is awaited after each chunk."""
        self._next += 1
        request = f"test-{self._next}"
        send, receive = trio.open_memory_channel[messages.AnswerUpdate](10_000)
        self._chunks[request] = send
        body = messages.Generate(request=request, prompt=prompt, **settings)  # type: ignore[arg-type]
        accepted = await self.network.request(gateway, methods.GENERATE, body, 30)
        answer = Answer(accepted.prompt_tokens)
        async for chunk in receive:
            answer.tokens += chunk.tokens
            answer.text += chunk.text
            if on_tokens is not None:
                await on_tokens(len(answer.tokens))
            if chunk.finish is not None:
                answer.finish, answer.error, answer.figures = chunk.finish, chunk.error, chunk.figures
                break
        return answer


@dataclass
class Cluster:
    """A running network: `nodes` in the order they were started, without the bootstrap."""

    bootstrap: Started
    nodes: list[Started]
    client: Client
    stops: list[trio.Event]
    said: list[str]

    async def status(self) -> messages.Status:
        return await self.client.status(self.bootstrap.peer)

    async def wait_plan(self, replicas: int) -> messages.Status:
        """Wait until the plan that all nodes follow has this many replicas."""
        with trio.move_on_after(WAIT_LIMIT_S):
            while True:
                with suppress(PeerLost):  # one that nobody can dial, before the others know that it cannot be
                    seen = [await self.client.status(node.peer) for node in self.nodes]
                    plans = [status.plan for status in seen]
                    same = len(set(map(repr, plans))) == 1
                    if same and plans[0] is not None and len(plans[0].replicas) == replicas:
                        return seen[0]
                await trio.sleep(0.05)
        raise AssertionError("\n".join([f"no plan of {replicas} replicas:", *self.said]))

    async def ask_all(
        self, prompts: Sequence[str], *, gateways: Sequence[PeerId] | None = None, **settings: Any
    ) -> list[Answer]:
        """All at the same time, of these gateways in turn, or of all nodes; the answers in the prompts' order."""
        peers = gateways or [node.peer for node in self.nodes]
        answers: dict[int, Answer] = {}

        async def ask(number: int) -> None:
            gateway = peers[number % len(peers)]
            answers[number] = await self.client.generate(gateway, prompts[number], **settings)

        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(ask, number)
        return [answers[number] for number in range(len(prompts))]

    async def ask_until_undisturbed(
        self, asked: Callable[[int], Sequence[str]], **settings: Any
    ) -> list[list[tuple[str, Answer]]]:
        """Ask `asked(0)`, all at the same time; while KV came too late for any of them, `asked(1)` and so on. Returns
        the prompts and answers of every attempt."""
        attempts: list[list[tuple[str, Answer]]] = []
        for number in range(ATTEMPTS):
            prompts = asked(number)
            answers = await self.ask_all(prompts, **settings)
            attempts.append(list(zip(prompts, answers, strict=True)))
            if all(answer.undisturbed for answer in answers):
                break
        return attempts

    async def engine_pid(self, peer: str) -> int:
        """The pid of a node's engine process."""
        status = await self.status()
        adverts = {node.peer: node.advert for node in status.nodes}
        advert = adverts[peer]
        assert advert is not None
        assert advert.engine is not None
        assert advert.engine.pid > 0
        return advert.engine.pid


@asynccontextmanager
async def open_client(bootstrap: Started, role: str = "client") -> AsyncIterator[Client]:
    """A client that has joined with the network's client token, or with its admin's."""
    token = bootstrap.tokens[role]
    parsed = JoinToken.parse(token)
    identity = Identity.generate()
    network = Network(
        transport=Libp2pTransport(identity, None, LOOPBACK),
        identity=identity,
        token=token,
        network_key_public=parsed.network,
        role=Role.CLIENT,
        announce=LOOPBACK,
        bootstraps=parsed.bootstraps,
        rng=random.Random(0),
        clock=time.time,
    )
    client = Client(network)
    lead_client_around(network)
    async with network:
        yield client


@pytest.fixture(scope="session", autouse=True)
def no_sweep() -> Iterator[None]:
    """Nodes that tests start as commands serve at once: they do not measure their engines first."""
    with pytest.MonkeyPatch.context() as patch:
        for command in ("JOIN", "SERVE", "BOOTSTRAP"):
            patch.setenv(f"P2PSERVE_{command}_SWEEP_S", "0")
        yield


@pytest.fixture(scope="session")
def engine_channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Channels to one fork server for the whole run: vLLM is imported once. Each node takes one and closes it."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(CHANNELS)]
    log = tmp_path_factory.mktemp("engines") / "fork.log"
    command, environment = fork_server_command([theirs for _, theirs in pairs], log=log, threads=1)
    inherited = [theirs.fileno() for _, theirs in pairs]
    server = subprocess.Popen(command, env=environment, pass_fds=inherited, stdin=subprocess.DEVNULL)
    for _, theirs in pairs:
        theirs.close()
    channels = [ours.detach() for ours, _ in pairs]
    yield channels
    for channel in channels:
        os.close(channel)
    try:
        server.wait(WAIT_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        pytest.fail("the fork server outlived its nodes")


@asynccontextmanager
async def open_cluster(
    channels: list[int] | None,
    home: Path,
    model: Path | str,
    nodes: int,
    *,
    codec: str = "raw",
    knobs: tuple[dict[str, Any], ...] = (),
    phases: Sequence[Phase | None] = (Phase.PREFILL, Phase.DECODE),
    announce: Sequence[str | None] = (),
    drain_s: float = 1.0,
    requests: RequestSettings | None = None,
    policy: str = "plan",
    routing: RoutingSettings | None = None,
) -> AsyncIterator[Cluster]:
    """A bootstrap and `nodes` nodes on loopback, all in this process, with engines from one fork server, or, without
    `channels`, each from its own.

    `knobs` has what is different for the engines of the first nodes, `announce` where they say that they are,
    `requests` how long their gateways wait, `policy` or `routing` how they route. Several
    nodes are pinned to `phases` in turn: of so small a model and machine, the planner would let each do both.
    """
    said: list[str] = []
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:

        async def start(
            name: str,
            token: str | None,
            channel: int | None,
            changes: dict[str, Any],
            phase: Phase | None,
            at: str | None = None,
        ) -> tuple[Started, trio.Event]:
            stop = trio.Event()
            settings = NodeSettings(
                home=home / name,
                listen=LOOPBACK,
                bootstrap=token,
                model=str(model) if token is not None else None,
                codec=codec,
                engine=replace(KNOBS, **changes),
                requests=requests or RequestSettings(),
                routing=routing or RoutingSettings(policy=policy),
                drain_s=drain_s,
                phase=phase,
                announce=at,
                engine_channel=channel,
            )

            async def run(task_status: trio.TaskStatus[Started]) -> None:
                say = lambda text: said.append(f"{name}: {text}")  # noqa: E731
                await run_node(settings, say=say, stop=stop, task_status=task_status)

            return await nursery.start(run), stop

        bootstrap, bootstrap_stop = await start("bootstrap", None, None, {}, None)
        started = [
            await start(
                f"node{i}",
                bootstrap.tokens["leader"],
                channels.pop() if channels is not None else None,
                dict(*knobs[i : i + 1]),
                phases[i % len(phases)] if nodes > 1 else None,
                *announce[i : i + 1],
            )
            for i in range(nodes)
        ]
        client = await stack.enter_async_context(open_client(bootstrap))
        stops = [stop for _, stop in started]
        yield Cluster(bootstrap, [each for each, _ in started], client, stops, said)
        await stack.aclose()
        for stop in (*stops, bootstrap_stop):
            stop.set()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights and the bundled model's tokenizer: answers are noise, but deterministic."""
    return make_random_model(tmp_path_factory.mktemp("model"))


def make_random_model(folder: Path, **dimensions: int) -> Path:
    """The same, with other dimensions than the tiny ones where these are given."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from p2pserve.node.models import BUNDLED

    tiny = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
        **{**tiny, **dimensions},  # type: ignore[arg-type]
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    return folder


OpenCluster = Callable[..., AbstractAsyncContextManager[Cluster]]


@pytest.fixture
def cluster(engine_channels: list[int]) -> OpenCluster:
    """`cluster(home, model, nodes, codec=...)`: an async context manager that yields a running `Cluster`."""
    return partial(open_cluster, engine_channels)
