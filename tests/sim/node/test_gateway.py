"""The gateway on a virtual clock, between a client and scripted workers that fail in every way they can."""

import math
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, PeerLost, RemoteError, RequestTimeout, Role
from p2pserve.bootstrap.methods import Answer, AsyncHandler, Body, Method, Notice, NoticeHandler
from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.wire.tickets import TransferTicket
from p2pserve.node import messages
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.protocol import KvSlice, WorkerRank
from p2pserve.node.models import BUNDLED, ModelInfo, WeightSizes
from p2pserve.node.requests.gateway import FIGURES_GRACE_S, NO_ENGINE_GRACE_S, SHORT_BYTES, Connections, Gateway
from p2pserve.node.requests.request import tokenize
from p2pserve.node.requests.text import TextModel
from p2pserve.node.view import NetworkView

TEXT = TextModel(BUNDLED)
SERVICE = "tiny-1234"
MODEL = ModelInfo(
    service=SERVICE,
    shape=ModelShape(
        name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
    ),
    max_model_len=512,
    weights=WeightSizes(layers=(1 << 20,) * 4, embeddings=1 << 20, head=256),
)
PROMPT = "def f(x):\n"
PROMPT_TOKENS = TEXT.encode(PROMPT)
SOURCE = "    total = 0\n    for each in x:\n        total += each  # π ≈ 3.14 🙂\n    return total\n" * 8
ANSWER = TEXT.encode(SOURCE)
CLIENT = PeerId("client")
P, P2, D, D2 = PeerId("p1"), PeerId("p2"), PeerId("d1"), PeerId("d2")
TICKET = TransferTicket(transfer=b"t" * 16, link=b"l" * 16, codec="raw", deadline_s=30.0)
PART = messages.Part(
    piece=messages.Piece(
        source_peer="p",
        source=WorkerRank(),
        target_peer="d",
        target=WorkerRank(),
        slice=KvSlice(first_layer=0, last_layer=4, first_head=0, last_head=2),
    ),
    ticket=TICKET,
)
LATENCY_S = 0.01
STEP_S = 0.02
FIGURES = messages.TransferFigures(
    raw_bytes=1000, wire_bytes=300, frames=4, span_s=0.1, visible_s=0.01, hidden_fraction=0.9
)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A virtual clock does not wait for threads: prompts are tokenised in place. What would be done on threads."""
    done: list[object] = []

    async def run_sync(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        await trio.lowlevel.checkpoint()
        done.append(function)
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    return done


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def plan_of(*peers: PeerId, prefill_share: float = 1.0) -> Plan:
    """Prefill boxes are called p.., decode boxes d..; one alone does both."""
    phases = {peer: Phase.PREFILL if peer.startswith("p") else Phase.DECODE for peer in peers}
    if len(peers) == 1:
        phases = {peers[0]: Phase.MIXED}
    replicas = tuple(
        Replica(id=peer, phase=phase, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=4),))
        for peer, phase in phases.items()
    )
    pairs = [(p.id, d.id) for p in replicas for d in replicas if p.prefills and d.decodes]
    pairings = tuple(Pairing(prefill=p, decode=d, weight=1 / len(pairs), prefill_share=prefill_share) for p, d in pairs)
    return Plan(epoch=1, version=1, service=SERVICE, replicas=replicas, pairings=pairings, codec="raw", why=())


@dataclass
class Job:
    """A request at a scripted worker."""

    peer: PeerId
    kind: str
    request: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    kv: trio.Event = field(default_factory=trio.Event)
    word: trio.Event = field(default_factory=trio.Event)  # of the first token, or that none will be told
    told: tuple[int, ...] = ()


@dataclass
class World:
    """A gateway with everything around it scripted.

    Workers answer as real ones do. What goes wrong at the next requests of a worker stands in `faults`:
    decode: refuse, timeout, lost, never, fail:N, gone:N, hang:N (after N tokens), wide:N (N tokens too many), other
    (another first token than it was told), alone (it does not wait for the prefill node's).
    prefill: refuse, timeout, lost, fail, gone, silent, end (of the answer, with its first token); late-fail, late-gone,
    late-silent: when the first token has been told.
    """

    nursery: trio.Nursery
    view: NetworkView = field(default_factory=NetworkView)
    faults: defaultdict[PeerId, list[str]] = field(default_factory=lambda: defaultdict(list))
    jobs: dict[tuple[PeerId, str, str], Job] = field(default_factory=dict)
    chunks: defaultdict[str, list[messages.Chunk]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, float] = field(default_factory=dict)
    opened: list[tuple[str, PeerId, messages.Message]] = field(default_factory=list)
    notices: list[tuple[PeerId, str, messages.Message]] = field(default_factory=list)
    dead: set[PeerId] = field(default_factory=set)
    burst: Callable[[], int] = lambda: 1
    requests: int = 0

    def __post_init__(self) -> None:
        self._changed = trio.Event()
        self.gateway = Gateway(
            view=self.view,
            connections=Connections(self, self._wait_changed),
            model=MODEL,
            text=TEXT,
            nursery=self.nursery,
        )

    # ---- the network ----------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        return PeerId("gateway")

    async def request(self, peer: PeerId, method: Method[Body, Answer], body: Body, timeout: float) -> Answer:
        found = await self._request(peer, method.name, body, timeout=timeout)
        assert isinstance(found, method.answer)
        return found

    def notify(self, peer: PeerId, notice: Notice[Body], body: Body) -> None:
        assert isinstance(body, messages.Message)
        self._notify(peer, notice.name, body)

    def handle(self, method: Method[Body, Answer], handler: AsyncHandler[Body, Answer]) -> None:
        raise AssertionError

    def on_notice(self, notice: Notice[Body], handler: NoticeHandler[Body]) -> None:
        raise AssertionError

    def set_engine(self, peer: PeerId, state: str = "ready", *, starts: int = 1, draining: bool = False) -> None:
        """What the peer advertises from now on."""
        self.view.adverts[peer] = messages.Advert(
            hardware=Hardware(cores=1, memory_gib=1.0, processor="x"),
            draining=draining,
            model=MODEL,
            engine=messages.EngineAdvert(state=state, tflops=1.0, memory_gbps=1.0, kv_tokens=10_000, starts=starts),
        )
        self._change()

    def state_of(self, peer: PeerId) -> str:
        advert = self.view.adverts[peer]
        return advert.engine.state if advert.engine is not None else ""

    def follow(self, *peers: PeerId) -> None:
        """A plan over these peers, whose engines are ready."""
        for peer in peers:
            self.set_engine(peer)
        self.view.plan = plan_of(*peers)
        self._change()

    def lose(self, peer: PeerId) -> None:
        """The connection to a node ends: its jobs with it."""
        self.dead.add(peer)
        self.view.adverts.pop(peer, None)
        self.kill_jobs(peer)
        self.gateway.peer_lost(peer)
        self._change()

    def kill_jobs(self, peer: PeerId) -> list[Job]:
        """Whatever runs at the peer ends without a word."""
        found = [job for job in self.jobs.values() if job.peer == peer]
        for job in found:
            job.scope.cancel()
            del self.jobs[job.peer, job.kind, job.request]
        return found

    def engine_lost(self, peer: PeerId) -> None:
        """The engine dies; the node is there and says so."""
        starts = self.view.starts(peer)
        self.set_engine(peer, "restarting", starts=starts)
        for job in self.kill_jobs(peer):
            if job.kind == "decode":
                self._tokens(peer, messages.Tokens(request=job.request, failed="the engine process ended"))
            else:
                self._prefill_ended(peer, messages.PrefillEnded(request=job.request, failed="the engine process ended"))

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _wait_changed(self) -> None:
        await self._changed.wait()

    def _tokens(self, peer: PeerId, body: messages.Tokens) -> None:
        self.gateway.on_tokens(peer, Role.WORKER, body)

    def _prefill_ended(self, peer: PeerId, body: messages.PrefillEnded) -> None:
        self.gateway.on_prefill_ended(peer, Role.WORKER, body)

    def _notify(self, peer: PeerId, method: str, message: messages.Message) -> None:
        if peer in self.dead:
            raise PeerLost(f"{peer} is gone")
        self.notices.append((peer, method, message))
        if isinstance(message, messages.Chunk):
            assert method == "chunk"
            if peer != CLIENT:
                return
            assert message.request not in self.ended, "a chunk after the last one"
            self.chunks[message.request].append(message)
            if message.finish is not None:
                self.ended[message.request] = trio.current_time()
        elif isinstance(message, messages.StopRequest):
            assert method == "request.stop"
            for kind in ("decode", "prefill"):
                job = self.jobs.pop((peer, kind, message.request), None)
                if job is not None:
                    job.scope.cancel()
        else:
            job = self.jobs.get((peer, "decode", message.request))  # type: ignore[attr-defined]
            if isinstance(message, messages.FirstToken):
                assert method == "decode.first"
                if job is not None:
                    job.told = (message.token,)
            else:
                assert isinstance(message, messages.StopTransfer)
                assert method == "transfer.stop"
                if job is not None:
                    job.kv.set()
            if job is not None:
                job.word.set()

    async def _request(self, peer: PeerId, method: str, body: Any, *, timeout: float) -> messages.Message:
        kind = method.removesuffix(".open")
        if peer in self.dead:
            raise PeerLost(f"{peer} is gone")
        fault = self.faults[peer].pop(0) if self.faults[peer] else ""
        self.opened.append((kind, peer, body))
        if fault == "lost":
            await elapse(LATENCY_S)
            self.lose(peer)
            raise PeerLost(f"{peer} was lost")
        if fault == "refuse":
            await elapse(LATENCY_S)
            raise RemoteError("draining", "this node is leaving")
        # From here on the worker has accepted, whether or not the gateway hears of it.
        job = self.jobs[peer, kind, body.request] = Job(peer, kind, body.request)
        await elapse(LATENCY_S)
        if job.scope.cancel_called:
            raise PeerLost(f"{peer} was lost")
        if fault == "timeout":
            await elapse(timeout)
            raise RequestTimeout(f"{peer} did not answer")
        run = self._decode if kind == "decode" else self._prefill
        self.nursery.start_soon(run, job, body, fault)
        if kind == "prefill":
            return messages.Opened()
        return messages.DecodeOpened(parts=(PART,) if body.receive_tokens else ())

    # ---- the workers ----------------------------------------------------------------------------------------

    def _close(self, job: Job) -> None:
        del self.jobs[job.peer, job.kind, job.request]

    async def _decode(self, job: Job, body: messages.DecodeOpen, fault: str) -> None:
        assert body.prompt[: len(PROMPT_TOKENS)] == PROMPT_TOKENS
        done = len(body.prompt) - len(PROMPT_TOKENS)
        assert body.prompt[len(PROMPT_TOKENS) :] == ANSWER[:done], "an engine was given other tokens than were made"
        what, _, count = fault.partition(":")
        good = int(count or 0) if what in ("fail", "gone", "hang", "silent") else math.inf
        wanted = body.sampling.max_tokens
        total = wanted + (int(count) if what == "wide" else 0)
        with job.scope:
            if what == "never":
                self._close(job)
                self._tokens(job.peer, messages.Tokens(request=job.request, refused="the prompt is too long"))
                return
            if body.receive_tokens:
                assert 1 <= body.receive_tokens <= len(body.prompt)
                assert body.prefill
                assert not body.told_first or body.receive_tokens == len(body.prompt)
                await job.kv.wait()
                if body.told_first and what != "alone":
                    await job.word.wait()
            made = 0
            while made < min(total, good):
                await elapse(STEP_S)
                size = min(max(self.burst(), 1 if what != "wide" else total), total - made)
                size = int(min(size + len(job.told if not made else ()), good - made, total - made))
                piece = ANSWER[done + made : done + made + size]
                assert made or piece[: len(job.told)] == job.told[:size]
                if what == "other" and job.told and not made:
                    piece = (piece[0] ^ 1, *piece[1:])
                made += size
                finish = "length" if made >= wanted and what != "wide" else None
                if job.scope.cancel_called:
                    return
                if finish:
                    self._close(job)
                self._tokens(job.peer, messages.Tokens(request=job.request, tokens=piece, finish=finish))
            if (job.peer, job.kind, job.request) not in self.jobs:
                return  # over already
            if what in ("hang", "silent", "wide"):
                await trio.sleep_forever()
            elif what == "fail":
                self._close(job)
                self._tokens(job.peer, messages.Tokens(request=job.request, failed="the engine process ended"))
            elif what == "gone":
                self.lose(job.peer)

    async def _prefill(self, job: Job, body: messages.PrefillOpen, fault: str) -> None:
        with job.scope:
            await elapse(STEP_S)
            what = fault.partition(":")[0]
            if body.sampling is not None and what in ("", "end", "late-fail", "late-gone", "late-silent"):
                done = len(body.prompt) - len(PROMPT_TOKENS)
                finish = "stop" if what == "end" else None
                first = messages.Tokens(request=job.request, tokens=ANSWER[done : done + 1], finish=finish)
                self._tokens(job.peer, first)
            if what.startswith("late-"):
                what = what.removeprefix("late-")
                await elapse(LATENCY_S)
            if what in ("silent", "hang"):
                await trio.sleep_forever()
            if what == "gone":
                self.lose(job.peer)
                return
            failed = "the link was cut" if what == "fail" else ""
            if job.scope.cancel_called:
                return
            self._close(job)
            decode = next(
                (found for found in self.jobs.values() if found.kind == "decode" and found.request == job.request), None
            )
            if decode is not None and not failed:
                decode.kv.set()
            figures = None if failed else FIGURES
            self._prefill_ended(job.peer, messages.PrefillEnded(request=job.request, failed=failed, figures=figures))

    # ---- the client -----------------------------------------------------------------------------------------

    async def ask(self, **settings: Any) -> str:
        """Send a request; returns its id."""
        self.requests += 1
        name = f"r{self.requests}"
        fields = {"prompt": PROMPT, "max_tokens": 12, "deadline_s": 60.0, **settings}
        body = messages.Generate(request=name, **fields)
        accepted = await self.gateway.generate(CLIENT, Role.CLIENT, body)
        assert accepted == messages.Generating(service=SERVICE, prompt_tokens=len(PROMPT_TOKENS))
        return name

    async def answer(self, **settings: Any) -> messages.Chunk:
        """Send a request and wait for its last chunk."""
        name = await self.ask(**settings)
        await self.settle()
        return self.chunks[name][-1]

    async def settle(self) -> None:
        """Wait until the gateway has nothing left to do."""
        with trio.fail_after(100_000):
            while not self.gateway.idle or self.gateway._attempts:
                await elapse(0.01)

    def tokens(self, name: str = "r1") -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks[name] for token in chunk.tokens)

    def text(self, name: str = "r1") -> str:
        return "".join(chunk.text for chunk in self.chunks[name])

    def sent(self, method: str) -> list[PeerId]:
        """To whom notices of this kind went."""
        return [peer for peer, each, _ in self.notices if each == method]

    def check_nothing_is_left(self) -> None:
        assert self.gateway._attempts == {}
        assert self.gateway._scopes == {}
        assert not self.gateway._queues()
        assert self.jobs == {}, "a worker still works for a request that is over"


@asynccontextmanager
async def open_world(*peers: PeerId) -> AsyncIterator[World]:
    """A world in which a plan over these peers is followed; checked at its end."""
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        if peers:
            world.follow(*peers)
        yield world
        await world.settle()
        world.check_nothing_is_left()
        nursery.cancel_scope.cancel()


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def text_of(count: int) -> str:
    return TEXT._tokenizer.decode(list(ANSWER[:count]))


def figures_of(chunk: messages.Chunk) -> messages.RequestFigures:
    assert chunk.figures is not None
    return chunk.figures


# ---- the way it should be ---------------------------------------------------------------------------------


def test_a_split_request() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            last = await world.answer()
            assert (last.finish, last.error) == ("length", "")
            assert world.tokens() == ANSWER[:12]
            assert world.text() == text_of(12)
            figures = figures_of(last)
            assert (figures.prefill_node, figures.decode_node, figures.attempts) == (P, D, 1)
            assert figures.transfer == FIGURES
            assert figures.recovered == ()
            assert (figures.prompt_tokens, figures.completion_tokens) == (len(PROMPT_TOKENS), 12)
            # two opens, a prefill step, then a decode step for each token but the first
            assert figures.ttft_s == pytest.approx(2 * LATENCY_S + STEP_S)
            assert figures.tpot_s == pytest.approx(STEP_S)
            assert figures.e2e_s == pytest.approx(2 * LATENCY_S + 12 * STEP_S)
            assert world.sent("decode.first") == [D]
            assert [kind for kind, _, _ in world.opened] == ["decode", "prefill"]
            assert world.sent("request.stop") == []
            assert world.sent("transfer.stop") == []

    virtually(main)


def test_only_long_prompts_are_tokenised_on_a_thread(threads: list[object]) -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for size, hops in ((SHORT_BYTES, 0), (SHORT_BYTES + 1, 1)):
                with pytest.raises(RemoteError, match="max_tokens"):  # found out when the prompt has become tokens
                    await world.ask(prompt="a" * size, max_tokens=100_000)
                assert threads == [tokenize] * hops

    virtually(main)


def test_demand_is_what_clients_ask_for_and_nothing_when_they_no_longer_do() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for _ in range(40):
                await world.answer(max_tokens=2)
                await elapse(1.0)
            demand = world.gateway.demand
            assert demand is not None
            assert 0.5 < demand.requests_s < 1.0
            assert set(demand.lengths) == {(len(PROMPT_TOKENS), 2)}
            await elapse(600.0)
            assert world.gateway.demand == msgspec.structs.replace(demand, requests_s=0.0)

    virtually(main)


def test_a_prefill_node_whose_part_is_over_is_free_for_the_next_request() -> None:
    """Although the first request's answer is still being written."""

    async def main() -> None:
        async with open_world(PeerId("p1"), PeerId("p2"), D) as world:
            for name in ("r1", "r2"):
                assert await world.ask(max_tokens=40) == name
                while not world.chunks[name]:
                    await elapse(STEP_S)
            assert [peer for kind, peer, _ in world.opened if kind == "prefill"] == ["p1", "p1"]
            await world.ask(max_tokens=40)
            await world.ask(max_tokens=40)  # at the same time
            await elapse(2 * LATENCY_S)
            assert {peer for kind, peer, _ in world.opened[4:] if kind == "prefill"} == {"p1", "p2"}

    virtually(main)


def test_one_box_alone_needs_no_transfer() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            last = await world.answer()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(last).prefill_node is None
            assert [(kind, peer) for kind, peer, _ in world.opened] == [("decode", D)]

    virtually(main)


def test_requests_in_flight_spread_over_decode_nodes_before_any_report() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            for _ in range(10):
                await world.ask()
            await elapse(3 * LATENCY_S)
            decodes = [peer for kind, peer, _ in world.opened if kind == "decode"]
            assert {decodes.count(D), decodes.count(D2)} == {5}
            await world.settle()

    virtually(main)


# ---- prefill fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuse", "timeout", "lost", "fail", "gone"])
def test_a_failed_prefill_is_computed_at_the_decode_node(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = [fault]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            assert world.sent("transfer.stop") == [D]
            figures = figures_of(last)
            assert figures.attempts == 1
            assert figures.transfer is None
            assert len(figures.recovered) == 1
            assert "prefill node ..p1" in figures.recovered[0]

    virtually(main)


def test_a_prefill_node_that_leaves_after_its_work_has_not_failed() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            await world.ask()
            await elapse(2 * LATENCY_S + 2.5 * STEP_S)
            assert len(world.tokens()) == 2
            world.lose(P)
            await world.settle()
            figures = figures_of(world.chunks["r1"][-1])
            assert figures.recovered == ()
            assert figures.transfer == FIGURES
            assert world.sent("transfer.stop") == []

    virtually(main)


def test_a_prefill_that_may_have_been_accepted_is_stopped() -> None:
    """Its answer was lost, or the client left while it was on its way: it must not compute for nobody."""

    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["timeout", "timeout"]
            await world.answer()
            assert P in world.sent("request.stop")
            name = await world.ask()
            await elapse(3 * LATENCY_S)
            assert {job.kind for job in world.jobs.values()} == {"decode", "prefill"}
            world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
            await world.settle()
            assert world.jobs == {}

    virtually(main)


def test_an_answer_does_not_wait_long_for_figures_that_do_not_come() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["late-silent"]
            name = await world.ask()
            await elapse(5 * LATENCY_S)
            (decode,) = [job for job in world.jobs.values() if job.kind == "decode"]
            decode.kv.set()  # the KV has arrived; only the sender's report is missing
            assert world.tokens() == ANSWER[:1]
            begun = trio.current_time()
            await world.settle()
            assert world.ended[name] - begun == pytest.approx(11 * STEP_S + FIGURES_GRACE_S)
            assert world.tokens() == ANSWER[:12]
            assert world.sent("request.stop") == [P]

    virtually(main)


@pytest.mark.parametrize(("share", "split"), [(1.0, len(PROMPT_TOKENS)), (0.5, -(-len(PROMPT_TOKENS) // 2)), (1e-9, 1)])
def test_the_prefill_node_reads_its_share_of_the_prompt(share: float, split: int) -> None:
    """Any part from the first token on; the decode node has all of the prompt and reads the rest."""

    async def main() -> None:
        async with open_world(P, D) as world:
            world.view.plan = plan_of(P, D, prefill_share=share)
            await world.answer()
            assert world.tokens() == ANSWER[:12]
            (_, _, decode), (_, _, prefill) = world.opened
            assert isinstance(decode, messages.DecodeOpen)
            assert (decode.prompt, decode.receive_tokens) == (PROMPT_TOKENS, split)
            whole = split == len(PROMPT_TOKENS)
            assert decode.told_first is whole
            assert [stage.peer for stage in decode.prefill] == [P]
            assert isinstance(prefill, messages.PrefillOpen)
            assert (prefill.prompt, prefill.parts) == (PROMPT_TOKENS[:split], (PART,))
            assert prefill.sampling == (decode.sampling if whole else None)
            assert world.sent("decode.first") == ([D] if whole else [])

    virtually(main)


# ---- the first token is the prefill node's ----------------------------------------------------------------


@pytest.mark.parametrize("fault", ["late-fail", "late-gone"])
def test_the_answer_goes_on_from_a_token_whose_kv_never_comes(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = [fault]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            figures = figures_of(last)
            assert figures.ttft_s == pytest.approx(2 * LATENCY_S + STEP_S)
            assert figures.attempts == 1
            assert "prefill node ..p1" in figures.recovered[0]
            told = [method for peer, method, _ in world.notices if peer == D]
            assert told == ["decode.first", "transfer.stop"]  # in this order: the token counts

    virtually(main)


def test_the_decode_node_is_told_the_token_and_whoever_goes_on_has_the_same_seed() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = ["fail:0"]
            await world.answer(temperature=1.0, seed=5)
            told = next(message for _, _, message in world.notices if isinstance(message, messages.FirstToken))
            decode, replay = (body for kind, _, body in world.opened if kind == "decode")
            assert isinstance(decode, messages.DecodeOpen)
            assert isinstance(replay, messages.DecodeOpen)
            assert (told.request, told.token) == (decode.request, ANSWER[0])
            assert replay.sampling.seed == decode.sampling.seed == 5

    virtually(main)


def test_an_answer_that_begins_differently_at_the_decode_node_goes_on_from_what_was_shown() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[D] = ["other"]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            figures = figures_of(last)
            assert figures.attempts == 2
            assert "began with another token" in figures.recovered[0]
            again = world.opened[2][2]
            assert isinstance(again, messages.DecodeOpen)
            assert again.prompt == PROMPT_TOKENS + ANSWER[:1]
            assert again.sampling.max_tokens == 11
            assert D in world.sent("request.stop")

    virtually(main)


def test_a_decode_node_that_does_not_wait_for_the_first_token_writes_the_same_one() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[D] = ["alone"]
            last = await world.answer()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(last).attempts == 1

    virtually(main)


def test_a_first_token_that_comes_when_the_decode_node_has_begun_is_not_heard() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults.update({P: ["silent"], D: ["alone"]})
            await world.ask()
            await elapse(3 * LATENCY_S)
            decode, prefill = sorted(world.jobs.values(), key=lambda job: job.kind)
            decode.kv.set()
            await elapse(2.5 * STEP_S)
            begun = world.tokens()
            assert begun == ANSWER[: len(begun)] != ()
            late = messages.Tokens(request=prefill.request, tokens=(ANSWER[0] ^ 1,))
            world.gateway.on_tokens(P, Role.WORKER, late)
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            assert world.sent("decode.first") == []

    virtually(main)


@pytest.mark.parametrize("how", ["end of text", "stop string"])
def test_an_answer_that_ends_with_its_first_token_needs_no_decode_node(how: str) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["end" if how == "end of text" else "late-silent"]
            last = await world.answer(stop=() if how == "end of text" else (text_of(1),))
            assert (last.finish, last.error) == ("stop", "")
            assert world.tokens() == ANSWER[:1]
            assert world.text() == (text_of(1) if how == "end of text" else "")
            assert world.ended["r1"] == pytest.approx(2 * LATENCY_S + STEP_S)
            assert D in world.sent("request.stop")
            assert world.sent("decode.first") == []
            figures = figures_of(last)
            assert (figures.completion_tokens, figures.tpot_s, figures.recovered) == (1, 0.0, ())

    virtually(main)


def test_a_single_token_is_written_by_whoever_reads_the_prompt() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            last = await world.answer(max_tokens=1)
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:1]
            assert [(kind, peer) for kind, peer, _ in world.opened] == [("decode", P)]
            assert (figures_of(last).prefill_node, figures_of(last).decode_node) == (None, P)
            world.view.plan = plan_of(P, D, prefill_share=0.5)
            await world.answer(max_tokens=1)
            assert [(kind, peer) for kind, peer, _ in world.opened[1:]] == [("decode", D), ("prefill", P)]

    virtually(main)


def test_a_prefill_node_that_has_been_given_up_is_not_heard() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["fail"]
            await world.ask()
            await elapse(2 * LATENCY_S + 1.5 * STEP_S)
            (decode,) = world.jobs.values()
            assert world.tokens() == ()
            late = messages.Tokens(request=decode.request, tokens=(ANSWER[0] ^ 1,))
            world.gateway.on_tokens(P, Role.WORKER, late)
            await world.settle()
            assert world.tokens() == ANSWER[:12]

    virtually(main)


# ---- decode fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["fail:5", "gone:5", "fail:0", "gone:0"])
def test_a_lost_decode_node_costs_no_token(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = [fault]
            last = await world.answer()
            done = max(1, int(fault.partition(":")[2]))  # the first token was the prefill node's
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            assert world.text() == text_of(12)
            figures = figures_of(last)
            assert (figures.attempts, figures.decode_node) == (2, D2)
            assert "decode node ..d1" in figures.recovered[0]
            again = world.opened[2][2]
            assert isinstance(again, messages.DecodeOpen)
            assert again.prompt == PROMPT_TOKENS + ANSWER[:done]
            assert again.sampling.max_tokens == 12 - done

    virtually(main)


def test_a_request_that_engines_end_with_is_given_up() -> None:
    """With the fourth it would have been answered; but it may be what ends them."""

    async def main() -> None:
        names = [PeerId(f"d{i}") for i in range(1, 6)]
        async with open_world(P, *names) as world:
            for name in names:
                world.faults[name] = ["fail:0"]
            last = await world.answer()
            assert last.finish == "error"
            assert last.error.startswith("given up: 3 engines in a row failed with it (decode node ..d")
            assert last.error.count("the engine process ended") == 3
            assert sum(bool(faults) for faults in world.faults.values()) == 2  # the others have not been asked
            assert world.tokens() == ANSWER[:3]  # of prefill nodes

    virtually(main)


def test_engines_that_fail_one_after_the_other_and_add_to_an_answer_are_no_reason_to_give_up() -> None:
    async def main() -> None:
        names = [PeerId(f"d{i}") for i in range(1, 6)]
        async with open_world(P, *names) as world:
            for name in names[:4]:
                world.faults[name] = ["fail:2"]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]

    virtually(main)


@pytest.mark.parametrize("fault", ["refuse", "timeout", "lost"])
def test_a_decode_node_that_refuses_is_passed_over(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = [fault]
            last = await world.answer()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(last).decode_node == D2
            assert [(kind, peer) for kind, peer, _ in world.opened] == [("decode", D), ("decode", D2), ("prefill", P)]
            if fault == "timeout":  # it may have heard the request
                assert D in world.sent("request.stop")

    virtually(main)


def test_what_no_engine_would_serve_is_not_tried_at_the_next() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = ["never"]
            last = await world.answer()
            assert last.finish == "error"
            assert "the prompt is too long" in last.error
            assert [peer for kind, peer, _ in world.opened if kind == "decode"] == [D]
            assert world.sent("request.stop")  # at least the prefill that goes with it

    virtually(main)


def test_a_bug_costs_the_request_that_meets_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            other = await world.ask()
            await elapse(LATENCY_S)
            with monkeypatch.context() as patched:
                patched.setattr(Gateway, "_choose", None)
                last = await world.answer()
            assert last.error == "internal error: TypeError"
            assert world.chunks[other][-1].finish == "length"
            assert world.tokens(other) == ANSWER[:12]

    virtually(main)
    assert "Traceback" in caplog.text


def test_late_words_of_a_lost_attempt_are_not_heard() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            del world.view.adverts[P]  # decode nodes do all
            world.faults[D] = ["fail:3"]
            name = await world.ask()
            await elapse(2 * LATENCY_S + 4 * STEP_S)
            first, second = (body.request for _, _, body in world.opened if isinstance(body, messages.DecodeOpen))
            assert first != second
            for request, peer in ((first, D), (second, D), (second, P)):
                world.gateway.on_tokens(peer, Role.WORKER, messages.Tokens(request=request, tokens=(1, 2, 3)))
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]

    virtually(main)


def test_an_engine_that_restarts_is_waited_for_and_used_again() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            name = await world.ask()
            await elapse(LATENCY_S + 4.5 * STEP_S)
            assert len(world.tokens()) == 4
            world.engine_lost(D)
            await elapse(10 * NO_ENGINE_GRACE_S)
            assert name not in world.ended
            world.set_engine(D, "ready", starts=2)
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(world.chunks[name][-1]).attempts == 2

    virtually(main)


def test_the_engine_that_failed_is_not_asked_again_until_it_has_been_restarted() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.faults[D] = ["fail:2"]
            last = await world.answer()
            assert last.finish == "error"
            assert world.tokens() == ANSWER[:2]
            assert len(world.opened) == 1
            assert "no engine is left" in last.error
            assert "the engine process ended" in last.error

    virtually(main)


def test_a_node_that_comes_back_counts_its_starts_anew() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.set_engine(D, starts=4)
            world.faults[D] = ["fail:2"]
            await world.ask()
            await elapse(LATENCY_S + 3 * STEP_S)
            world.set_engine(D, starts=1)
            await world.settle()
            assert world.tokens() == ANSWER[:12]

    virtually(main)


def test_an_engine_that_sends_too_much_is_cut_off() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.faults[D] = ["wide:7"]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            assert world.sent("request.stop") == [D]

    virtually(main)


# ---- no engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, "failed", "draining", "no plan"])
def test_no_engine_is_a_clear_error_in_time(state: str | None) -> None:
    async def main() -> None:
        async with open_world() as world:
            if state == "failed":
                world.follow(D)
                world.set_engine(D, "failed")
            elif state == "draining":
                world.follow(D)
                world.set_engine(D, draining=True)
            elif state == "no plan":
                world.set_engine(D)
            last = await world.answer()
            assert last.finish == "error"
            assert last.error.startswith(f"no engine is left for {SERVICE}: ")
            assert "\n" not in last.error
            assert last.figures is None
            assert NO_ENGINE_GRACE_S <= world.ended["r1"] <= NO_ENGINE_GRACE_S + 1.1
            assert world.tokens() == ()

    virtually(main)


def test_an_engine_that_comes_within_the_grace_is_used_at_once() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.ask()
            await elapse(NO_ENGINE_GRACE_S - 0.5)
            world.follow(D)
            before = trio.current_time()
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            assert world.ended["r1"] - before == pytest.approx(LATENCY_S + 12 * STEP_S)

    virtually(main)


@pytest.mark.parametrize("case", ["no engine", "starting for ever", "hangs", "opening hangs"])
def test_the_deadline_ends_every_wait(case: str) -> None:
    async def main() -> None:
        async with open_world() as world:
            if case == "starting for ever":
                world.set_engine(D, "starting", starts=0)
            elif case in ("hangs", "opening hangs"):
                world.follow(D)
                world.faults[D] = ["hang:3" if case == "hangs" else "timeout"]
            last = await world.answer(deadline_s=3.0)
            assert last.finish == "error"
            assert last.error.startswith("deadline: the answer was not complete after 3.0 s")
            assert world.ended["r1"] == pytest.approx(3.0)
            assert world.tokens() == ANSWER[: 3 if case == "hangs" else 0]
            if case in ("hangs", "opening hangs"):
                assert world.sent("request.stop") == [D]

    virtually(main)


def test_a_deadline_tells_what_went_wrong_before() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults.update({D: ["fail:2"], D2: ["hang:2"]})
            last = await world.answer(deadline_s=2.0)
            assert last.error.startswith("deadline: ")
            assert "decode node ..d1: the engine process ended" in last.error
            assert world.tokens() == ANSWER[:4]
            assert figures_of(last).completion_tokens == 4

    virtually(main)


def test_an_engines_own_deadline_leaves_the_last_word_to_the_gateway() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.faults[D] = ["hang:2"]
            await world.ask(deadline_s=1.0)
            await elapse(0.5)
            (job,) = world.jobs.values()
            world.gateway.on_tokens(D, Role.WORKER, messages.Tokens(request=job.request, finish="deadline"))
            await world.settle()
            assert world.chunks["r1"][-1].error.startswith("deadline: ")
            assert world.ended["r1"] == pytest.approx(1.0)

    virtually(main)


# ---- the client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0.5 * LATENCY_S, 1.5 * LATENCY_S, 2 * LATENCY_S + 0.5 * STEP_S, 0.15])
@pytest.mark.parametrize("how", ["gone", "stops", "does not read"])
def test_a_client_that_leaves_ends_everything(how: str, after: float) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            name = await world.ask(max_tokens=200)
            await elapse(after)
            if how == "stops":
                world.gateway.stop(PeerId("stranger"), Role.CLIENT, messages.StopRequest(request=name))
                assert not world.gateway.idle
                world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
            elif how == "gone":
                world.gateway.peer_lost(CLIENT)
            else:
                world.dead.add(CLIENT)
            await elapse(LATENCY_S + 2 * STEP_S if how != "does not read" else 1.0)
            world.check_nothing_is_left()
            assert name not in world.ended
            assert len(world.tokens()) < 20

    virtually(main)


def test_a_client_that_leaves_while_no_engine_is_there() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.ask()
            await elapse(1)
            world.gateway.peer_lost(CLIENT)
            await elapse(0.1)
            world.check_nothing_is_left()
            assert world.chunks == {}

    virtually(main)


def test_a_stop_string_ends_the_answer_at_the_worker_too() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            last = await world.answer(max_tokens=200, stop=("each in",))
            assert (last.finish, last.error) == ("stop", "")
            assert world.text() == SOURCE[: SOURCE.index("each in")]
            assert len(world.tokens()) < 30
            assert world.sent("request.stop") == [D]

    virtually(main)


def test_a_stop_string_is_found_over_two_engines() -> None:
    async def main() -> None:
        stop = "3.14 🙂\n"
        for fail in range(0, 40, 3):
            async with open_world(P, D, D2) as world:
                world.faults[D] = [f"fail:{fail}"]
                last = await world.answer(max_tokens=200, stop=(stop,))
                assert last.finish == "stop"
                assert world.text() == SOURCE[: SOURCE.index(stop)]
                assert world.tokens() == ANSWER[: len(world.tokens())]

    virtually(main)


async def refusal(world: World, client: PeerId = CLIENT, **settings: Any) -> RemoteError:
    fields = {"request": "x", "prompt": PROMPT, **settings}
    with pytest.raises(RemoteError) as caught:
        await world.gateway.generate(client, Role.CLIENT, messages.Generate(**fields))
    return caught.value


def test_what_a_gateway_refuses() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for settings, field_name in (
                ({"max_tokens": 0}, "max_tokens"),
                ({"max_tokens": 512}, "max_tokens"),
                ({"prompt": ""}, "prompt"),
                ({"prompt": SOURCE * 10}, "prompt"),
                ({"service": "another"}, "service"),
            ):
                error = await refusal(world, **settings)
                assert error.code == "invalid"
                assert error.message.startswith(f"{field_name}: ")
            assert world.gateway.idle
            await world.ask(service="tiny")
            await world.ask(service=SERVICE)
            error = await refusal(world, request="r1")
            assert (error.code, error.message[:9]) == ("invalid", "request: ")
            other = messages.Generate(request="r1", prompt=PROMPT, max_tokens=1)
            await world.gateway.generate(PeerId("another"), Role.CLIENT, other)  # ids are a client's own
            await world.settle()

    virtually(main)


def test_an_engine_with_less_room_sets_the_limit() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            advert = world.view.adverts[D]
            assert advert.engine is not None
            small = messages.EngineAdvert(state="ready", max_model_len=50, tflops=1.0, memory_gbps=1.0, starts=1)
            world.view.adverts[D] = messages.Advert(hardware=advert.hardware, draining=False, model=MODEL, engine=small)
            error = await refusal(world, max_tokens=60)
            assert "this model holds 50" in error.message

    virtually(main)


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            name = await world.ask()
            await elapse(LATENCY_S)
            world.gateway.drain()
            assert (await refusal(world)).code == "draining"
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            assert world.chunks[name][-1].finish == "length"

    virtually(main)


# ---- all at once ------------------------------------------------------------------------------------------


async def chaos(world: World, rng: random.Random, until: float) -> None:
    """Engines die and restart, nodes leave and come back."""
    peers = [P, P2, D, D2]
    while trio.current_time() < until:
        await elapse(rng.uniform(0.2, 1.5))
        peer = rng.choice(peers)
        if peer in world.dead:
            world.dead.discard(peer)
            world.set_engine(peer, starts=1)
        elif rng.random() < 0.3 and len(world.dead) < 3:
            world.lose(peer)
        elif world.state_of(peer) == "ready":
            world.engine_lost(peer)
        else:
            world.set_engine(peer, starts=world.view.starts(peer) + 1)
    for peer in peers:
        world.dead.discard(peer)
        world.set_engine(peer, starts=world.view.starts(peer) + 1)


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_whatever_fails(seed: int) -> None:
    """Random failures over 150 requests: one last chunk each, and the tokens are those of the script, in order."""
    rng = random.Random(seed)
    count = 150

    async def main() -> None:
        async with open_world(P, P2, D, D2) as world:
            world.burst = lambda: rng.randint(1, 3)
            world.nursery.start_soon(chaos, world, rng, 40.0)
            asked: dict[str, tuple[int, float]] = {}
            left = set()
            for _ in range(count):
                await elapse(rng.uniform(0, 0.4))
                if rng.random() < 0.2:
                    peer = rng.choice([P, P2])
                    world.faults[peer].append(
                        rng.choice(["refuse", "timeout", "fail", "silent", "gone", "lost", "late-fail", "late-gone"])
                    )
                if rng.random() < 0.2:
                    fault = rng.choice(["refuse", "timeout", "lost", "fail", "gone", "hang", "wide", "other", "alone"])
                    at = f":{rng.randint(1, 9)}" if fault in ("fail", "gone", "hang", "wide") else ""
                    world.faults[rng.choice([D, D2])].append(fault + at)
                wanted, deadline = rng.randint(1, 60), rng.choice([2.0, 20.0, 60.0])
                name = await world.ask(max_tokens=wanted, deadline_s=deadline)
                asked[name] = (wanted, trio.current_time() + deadline)
                if rng.random() < 0.05:
                    await elapse(rng.uniform(0, 0.2))
                    world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
                    left.add(name)
            await world.settle()
            complete = 0
            for name, (wanted, deadline) in asked.items():
                tokens = world.tokens(name)
                assert tokens == ANSWER[: len(tokens)]
                finals = [chunk for chunk in world.chunks[name] if chunk.finish is not None]
                if not finals:
                    assert name in left
                    continue
                (last,) = finals
                assert world.ended[name] <= deadline + 1e-6
                assert (last.finish == "error") == bool(last.error)
                if last.finish == "length":
                    complete += 1
                    assert len(tokens) == wanted
                    assert world.text(name) == text_of(wanted)
                else:
                    assert last.error.startswith(("deadline: ", "no engine is left", "given up: "))
            assert complete > count / 2
            assert any(
                figures.figures.attempts > 1 for chunks in world.chunks.values() if (figures := chunks[-1]).figures
            )

    virtually(main)
