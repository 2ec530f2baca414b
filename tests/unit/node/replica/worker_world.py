"""The worker between gateways and an engine in memory: who is told what, and what the engine is asked for."""

import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.coordinator import Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.replica.kv_transfers import KvTransfers
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.worker import Worker
from p2pserve.node.testing import MemoryEngine, MemoryExchange, MemoryOutlets

A, B = PeerId("gateway-a"), PeerId("gateway-b")
OWN, P, D = PeerId("own"), PeerId("prefill-node"), PeerId("decode-node")
LINK = issue_link(600.0, random.Random(99).randbytes)
SERVICE = "tiny-1234"
SAMPLING = protocol.Sampling(max_tokens=5)
STATS = protocol.EngineStats(1, 0, 0.5, 100)
MODEL = ModelInfo(
    service=SERVICE,
    shape=ModelShape(
        name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
    ),
    max_model_len=512,
    weights=WeightSizes(layers=(1000,) * 4, embeddings=500, head=500),
)
WHOLE = protocol.KvSlice(first_layer=0, last_layer=4, first_head=0, last_head=2)
RANK = protocol.WorkerRank()
WANTED = protocol.Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=7)

T = TypeVar("T")


def alone(peer: str) -> tuple[Stage, ...]:
    """The stages of a replica of one box."""
    return (Stage(peer=peer, tp=1, first_layer=0, last_layer=4),)


def ticket_of(seed: int = 0) -> TransferTicket:
    return issue_transfer(LINK.link, "raw", 30.0, random.Random(seed).randbytes)


def part_of(seed: int = 0, target: str = D) -> messages.TicketedSlice:
    """All of a prompt's KV, from this box to another."""
    piece = messages.RankSlice(source_peer=OWN, source=RANK, target_peer=target, target=RANK, slice=WHOLE)
    return messages.TicketedSlice(rank_slice=piece, ticket=ticket_of(seed))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a handler that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("the handler waited")


class World:
    """A worker, its engine's end of the link, and what gateways were told."""

    def __init__(self) -> None:
        self.exchange = MemoryExchange()
        messenger = self.exchange.join(OWN)
        for peer in (A, B):
            self.exchange.join(peer)
        self.outlets = MemoryOutlets(usd=0.25)
        self.transfers = KvTransfers(model=MODEL, outlets=self.outlets, messenger=messenger)
        self.worker = Worker(service=SERVICE, transfers=self.transfers, messenger=messenger, clock=lambda: 0.0)
        self.engine = MemoryEngine()
        self.use()

    def use(self) -> None:
        self.worker.use(self.engine, Place(alone(OWN), 0))

    def asked(self) -> list[protocol.EngineMessage]:
        """What the engine has been sent since the last call."""
        return self.engine.take_sent()

    def news(self) -> list[tuple[PeerId, str, Any]]:
        told, self.exchange.told = self.exchange.told, []
        return [(sent.target, sent.method, sent.body) for sent in told]

    def decode(self, request: str = "r", gateway: PeerId = A, **changes: Any) -> messages.DecodeOpened:
        fields: dict[str, Any] = {
            "request": request,
            "service": SERVICE,
            "prompt": (1, 2, 3),
            "sampling": SAMPLING,
            "deadline_s": 60.0,
            "receive_tokens": 3,
            "codec": "raw",
            "prefill": alone(P),
        }
        body = messages.DecodeOpen(**{**fields, **changes})
        return run(self.worker.open_decode(gateway, Role.WORKER, body))

    def prefill(self, request: str = "r", gateway: PeerId = A, seed: int = 0, **changes: Any) -> messages.Opened:
        fields: dict[str, Any] = {
            "request": request,
            "service": SERVICE,
            "prompt": (1, 2, 3),
            "deadline_s": 60.0,
            "slices": (part_of(seed),),
        }
        body = messages.PrefillOpen(**{**fields, **changes})
        return run(self.worker.open_prefill(gateway, Role.WORKER, body))

    def step(self, *outputs: protocol.NewTokens) -> None:
        self.worker.on_engine_message(protocol.Step(outputs=outputs, stats=STATS))

    def link(self, peer: PeerId, service: str = SERVICE) -> LinkTicket:
        """What a node is answered that wants to push KV here."""
        body = messages.LinkOpen(service=service)
        return run(self.transfers.open_link(peer, Role.WORKER, body)).link

    def report(self, transfer: bytes, reason: str = "") -> None:
        self.worker.on_engine_message(
            protocol.TransferReport(
                transfer=transfer,
                delivered=not reason,
                reason=reason,
                frames=4,
                raw_bytes=100,
                wire_bytes=50,
                span_s=0.2,
                visible_s=0.1,
                hidden_fraction=0.5,
                link=LINK.link,
                mode="serialised",
                paths={"direct": 30, "relay": 20},
                resent_bytes=5,
                blocked_s=0.0,
            )
        )


def tokens(request: str = "r", *ids: int, **fields: Any) -> messages.Tokens:
    return messages.Tokens(request=request, tokens=ids, **fields)


def ticket(opened: messages.DecodeOpened) -> TransferTicket:
    (part,) = opened.slices
    return part.ticket


def opened_on(world: World, kind: str, **changes: Any) -> object:
    opener: Callable[..., object] = world.decode if kind == "decode" else world.prefill
    return opener(**changes)


def refusal(world: World, kind: str, **changes: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        opened_on(world, kind, **changes)
    assert world.asked() == []
    assert "\n" not in caught.value.message
    return caught.value.code


@contextmanager
def fault_of_outlets(world: World, error: Exception) -> Iterator[None]:
    """No slice can be sent meanwhile."""

    def fail(ticketed: messages.TicketedSlice) -> None:
        raise error

    world.outlets.before = fail
    yield
    world.outlets.before = lambda ticketed: None
