"""A gateway on a virtual clock, between a client and scripted workers that fail in every way they
can."""

import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import trio
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, PeerLost, RemoteError, RequestTimeout, Role
from p2pserve.bootstrap.methods import Answer, AsyncHandler, Body, Method, Notice, NoticeHandler
from p2pserve.coordinator import Pairing, Phase, Plan, Replica, RoutingSettings, Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.prefixes.held import HeldPrefixes
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.coordinator.routing.pools import PoolState
from p2pserve.kvtransport.wire.tickets import TransferTicket
from p2pserve.node import messages
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.protocol import KvSlice, WorkerRank
from p2pserve.node.models import BUNDLED, ModelInfo, WeightSizes
from p2pserve.node.models.text import TextModel
from p2pserve.node.prefixes.messages import PrefixAnswer, PrefixQuery
from p2pserve.node.replica.slot_desk import SlotDesk
from p2pserve.node.replica.splitting import SLOT_WAIT_S
from p2pserve.node.requests.gateway import Gateway
from p2pserve.node.requests.slot_messages import PoolAnswer, PoolAsk, SlotOpen, SlotOpened
from p2pserve.node.settings import ClientLimits
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
PART = messages.TicketedSlice(
    rank_slice=messages.RankSlice(
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

    Workers answer as real ones do. What goes wrong at the next requests of a worker stands in
    `faults`: decode: refuse, timeout, lost, never, fail:N, gone:N, hang:N (after N tokens), wide:N
    (N tokens too many), other (another first token than it was told), alone (it does not wait for
    the prefill node's). prefill: refuse, timeout, lost, fail, gone, silent, end (of the answer,
    with its first token); late-fail, late-gone, late-silent: when the first token has been told.
    """

    nursery: trio.Nursery
    view: NetworkView = field(default_factory=NetworkView)
    faults: defaultdict[PeerId, list[str]] = field(default_factory=lambda: defaultdict(list))
    jobs: dict[tuple[PeerId, str, str], Job] = field(default_factory=dict)
    chunks: defaultdict[str, list[messages.AnswerUpdate]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, float] = field(default_factory=dict)
    opened: list[tuple[str, PeerId, messages.Message]] = field(default_factory=list)
    notices: list[tuple[PeerId, str, messages.Message]] = field(default_factory=list)
    dead: set[PeerId] = field(default_factory=set)
    burst: Callable[[], int] = lambda: 1
    otherwise: dict[PeerId, tuple[int, ...]] = field(default_factory=dict)  # what an engine writes that begins anew
    requests: int = 0
    limits: ClientLimits = field(default_factory=ClientLimits)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    slots: defaultdict[PeerId, SlotDesk] = field(default_factory=lambda: defaultdict(SlotDesk))
    pools: dict[PeerId, PoolState] = field(default_factory=dict)  # by those that keep limits; others are older
    splits: dict[PeerId, Callable[[], Awaitable[int]]] = field(default_factory=dict)  # what prefill replicas say
    held: dict[PeerId, HeldPrefixes] = field(default_factory=dict)  # by those that are asked; others are older
    asked: list[tuple[PeerId, PrefixQuery]] = field(default_factory=list)  # of what they hold

    def __post_init__(self) -> None:
        self.gateway = Gateway(
            view=self.view,
            messenger=self,
            model=MODEL,
            text=TEXT,
            nursery=self.nursery,
            routing=self.routing,
            settings=RequestSettings(),
            limits=self.limits,
        )

    # ---- the network ----------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        return PeerId("gateway")

    async def request(self, peer: PeerId, method: Method[Body, Answer], body: Body, timeout: float) -> Answer:
        if isinstance(body, PrefixQuery):
            return cast("Answer", self._answer_prefixes(peer, body))
        found = await self._request(peer, method.name, body, timeout=timeout)
        assert isinstance(found, method.answer)
        return found

    def _answer_prefixes(self, peer: PeerId, query: PrefixQuery) -> PrefixAnswer:
        self.asked.append((peer, query))
        if peer not in self.held:
            raise RemoteError("unknown_method", "prefixes")
        return PrefixAnswer(news=self.held[peer].news_since(query.heard))

    def notify(self, peer: PeerId, notice: Notice[Body], body: Body) -> None:
        assert isinstance(body, messages.Message)
        self._notify(peer, notice.name, body)

    def handle(self, method: Method[Body, Answer], handler: AsyncHandler[Body, Answer]) -> None:
        raise AssertionError

    def on_notice(self, notice: Notice[Body], handler: NoticeHandler[Body]) -> None:
        raise AssertionError

    def set_engine(
        self, peer: PeerId, state: str = "ready", *, starts: int = 1, draining: bool = False, places: int = 0
    ) -> None:
        """What the peer advertises from now on."""
        self.view.adverts[peer] = messages.Advert(
            hardware=Hardware(cores=1, memory_gib=1.0, processor="x"),
            draining=draining,
            model=MODEL,
            engine=messages.EngineAdvert(
                state=state, tflops=1.0, memory_gbps=1.0, kv_tokens=10_000, starts=starts, max_requests=places
            ),
        )
        self.gateway.network_changed()

    def state_of(self, peer: PeerId) -> str:
        advert = self.view.adverts[peer]
        return advert.engine.state if advert.engine is not None else ""

    def follow(self, *peers: PeerId) -> None:
        """A plan over these peers, whose engines are ready."""
        for peer in peers:
            self.set_engine(peer)
        self.view.plans[MODEL.service] = plan_of(*peers)
        self.gateway.network_changed()

    def lose(self, peer: PeerId) -> None:
        """The connection to a node ends: its jobs with it."""
        self.dead.add(peer)
        self.view.adverts.pop(peer, None)
        self.slots.pop(peer, None)
        self.kill_jobs(peer)
        self.gateway.peer_lost(peer)
        self.gateway.network_changed()

    def kill_jobs(self, peer: PeerId) -> list[Job]:
        """Whatever runs at the peer ends without a word."""
        found = [job for job in self.jobs.values() if job.peer == peer]
        for job in found:
            job.scope.cancel()
            self._close(job)
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

    def _tokens(self, peer: PeerId, body: messages.Tokens) -> None:
        self.gateway.on_tokens(peer, Role.WORKER, body)

    def _prefill_ended(self, peer: PeerId, body: messages.PrefillEnded) -> None:
        self.gateway.on_prefill_ended(peer, Role.WORKER, body)

    def _notify(self, peer: PeerId, method: str, message: messages.Message) -> None:
        if peer in self.dead:
            raise PeerLost(f"{peer} is gone")
        self.notices.append((peer, method, message))
        if isinstance(message, messages.AnswerUpdate):
            assert method == "answer"
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
            self.slots[peer].leave((self.peer_id, message.request))
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
        if method == "prefill.slot":
            return await self._give_slot(peer, body)
        if method == "pool.claim":
            return await self._answer_claim(peer, body)
        fault = self.faults[peer].pop(0) if self.faults[peer] else ""
        self.opened.append((kind, peer, body))
        self.slots[peer].claims.leave((self.peer_id, body.request))
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
        if kind == "prefill":
            self.slots[peer].enter((self.peer_id, body.request))
        run = self._decode if kind == "decode" else self._prefill
        self.nursery.start_soon(run, job, body, fault)
        if kind == "prefill":
            return messages.Opened()
        return messages.DecodeOpened(slices=(PART,) if body.receive_tokens else ())

    # ---- the workers ----------------------------------------------------------------------------------------

    def _close(self, job: Job) -> None:
        del self.jobs[job.peer, job.kind, job.request]
        if job.kind == "prefill":
            self.slots[job.peer].leave((self.peer_id, job.request))

    async def _give_slot(self, peer: PeerId, body: SlotOpen) -> SlotOpened:
        assert (body.service, body.prompt_tokens) == (SERVICE, len(PROMPT_TOKENS))
        self.opened.append(("slot", peer, body))
        await elapse(LATENCY_S)
        if not await self.slots[peer].wait((self.peer_id, body.request), SLOT_WAIT_S):
            return SlotOpened()
        return SlotOpened(split=await self.splits[peer]() if peer in self.splits else body.prompt_tokens)

    async def _answer_claim(self, peer: PeerId, body: PoolAsk) -> PoolAnswer:
        self.opened.append(("claim", peer, body))
        await elapse(LATENCY_S)
        if peer not in self.pools:
            raise RemoteError("unknown_method", "pool.claim")
        limits = self.routing.pool_limits
        key, now = (self.peer_id, body.request), trio.current_time()
        accepted, state = self.slots[peer].claims.answer(key, body.claim, self.pools[peer], limits, now)
        return PoolAnswer(accepted=accepted, state=state)

    async def _decode(self, job: Job, body: messages.DecodeOpen, fault: str) -> None:
        assert body.prompt[: len(PROMPT_TOKENS)] == PROMPT_TOKENS
        done = len(body.prompt) - len(PROMPT_TOKENS)
        assert body.prompt[len(PROMPT_TOKENS) :] == ANSWER[:done], "an engine was given other tokens than were made"
        answer = ANSWER if done else self.otherwise.get(job.peer, ANSWER)
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
                assert not body.awaits_first_token or body.receive_tokens == len(body.prompt)
                await job.kv.wait()
                if body.awaits_first_token and what != "alone":
                    await job.word.wait()
            made = 0
            while made < min(total, good):
                await elapse(STEP_S)
                size = min(max(self.burst(), 1 if what != "wide" else total), total - made)
                size = int(min(size + len(job.told if not made else ()), good - made, total - made))
                piece = answer[done + made : done + made + size]
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

    async def ask(self, client: PeerId = CLIENT, **settings: Any) -> str:
        """Send a request; returns its id."""
        self.requests += 1
        name = f"r{self.requests}"
        fields = {"prompt": PROMPT, "max_tokens": 12, "deadline_s": 60.0, **settings}
        body = messages.Generate(request=name, **fields)
        accepted = await self.gateway.generate(client, Role.CLIENT, body)
        news_s = RequestSettings().news_s
        assert accepted == messages.Generating(service=SERVICE, prompt_tokens=len(PROMPT_TOKENS), news_s=news_s)
        return name

    async def answer(self, **settings: Any) -> messages.AnswerUpdate:
        """Send a request and wait for its last chunk."""
        name = await self.ask(**settings)
        await self.settle()
        return self.chunks[name][-1]

    async def answer_beside(self, **settings: Any) -> messages.AnswerUpdate:
        """The same while other requests go on."""
        name = await self.ask(**settings)
        while name not in self.ended:
            await elapse(0.005)
        return self.chunks[name][-1]

    async def settle(self) -> None:
        """Wait until the gateway has nothing left to do."""
        with trio.fail_after(100_000):
            while not self.gateway.idle:
                await elapse(0.01)

    def tokens(self, name: str = "r1") -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks[name] for token in chunk.tokens)

    def text(self, name: str = "r1") -> str:
        return "".join(chunk.text for chunk in self.chunks[name])

    def sent(self, method: str) -> list[PeerId]:
        """To whom notices of this kind went."""
        return [peer for peer, each, _ in self.notices if each == method]

    def check_nothing_is_left(self) -> None:
        assert self.gateway.idle
        assert self.gateway.queues == {}
        assert self.jobs == {}, "a worker still works for a request that is over"
        assert [desk for desk in self.slots.values() if desk.used] == [], "a request that is over has a slot"
        assert [desk for desk in self.slots.values() if len(desk.claims)] == [], "a request that is over has a place"


@asynccontextmanager
async def open_world(*peers: PeerId, limits: ClientLimits | None = None, policy: str = "plan") -> AsyncIterator[World]:
    """A world in which a plan over these peers is followed; checked at its end."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, limits=limits or ClientLimits(), routing=RoutingSettings(policy=policy))
        if peers:
            world.follow(*peers)
        yield world
        await world.settle()
        world.check_nothing_is_left()
        nursery.cancel_scope.cancel()


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def text_of(count: int) -> str:
    decoder = TEXT.decoder()
    return decoder.push(ANSWER[:count]) + decoder.finish()


def figures_of(chunk: messages.AnswerUpdate) -> messages.RequestFigures:
    assert chunk.figures is not None
    return chunk.figures
