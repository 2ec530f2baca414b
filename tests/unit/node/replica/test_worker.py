"""The worker between gateways and a scripted engine: who is told what, and what the engine is asked for."""

import random
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId, RemoteError, RequestTimeout, Role, Unreachable
from p2pserve.coordinator import Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.link.dialling import DialPath
from p2pserve.kvtransport.wire.channel import LINK_HELLO_BYTES, LinkHello, LinkRole
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLink, EngineLost
from p2pserve.node.links.kv_outlets import KvOutlets
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.replica.kv_transfers import KvTransfers
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.worker import Worker
from p2pserve.node.settings import WAN
from p2pserve.node.testing import MemoryExchange

A, B = PeerId("gateway-a"), PeerId("gateway-b")
OWN, P, D = PeerId("own"), PeerId("prefill-node"), PeerId("decode-node")
LINK = issue_link(600.0, random.Random(99).randbytes)
SERVICE = "tiny-1234"
SAMPLING = protocol.Sampling(max_tokens=5)
STATS = protocol.EngineStats(1, 0, 0.5, 100)
READY = protocol.EngineReady(
    pid=1,
    engine="scripted",
    device="cpu",
    dtype="float32",
    layers=4,
    kv_heads=2,
    head_dim=64,
    vocabulary=4096,
    max_model_len=512,
    kv_tokens=1000,
    eos_tokens=(0,),
    load_s=0.1,
    tflops=1.0,
    memory_gbps=1.0,
)

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
PATHS = (DialPath("192.0.2.7", 4321, streams=2),)

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


def outlet_of(seed: int = 0) -> protocol.Outlet:
    return protocol.Outlet(slice=WHOLE, ticket=ticket_of(seed), link=LINK, paths=PATHS, gbps=1.0, rtt_s=0.01)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a handler that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("the handler waited")


class ScriptedOutlets:
    """In place of `KvOutlets`: the outlet that is set, and what it has been told."""

    own = OWN

    def __init__(self) -> None:
        self.faults: list[BaseException] = []
        self.during: Callable[[], None] = lambda: None
        self.asked: list[tuple[messages.TicketedSlice, int]] = []
        self.lost: list[PeerId] = []
        self.links: dict[PeerId, LinkTicket] = {}
        self.link_reports: list[protocol.LinkReport] = []
        self.transfers: list[tuple[PeerId, protocol.TransferReport]] = []
        self.engines: list[str] = []

    async def open(self, part: messages.TicketedSlice, tokens: int) -> protocol.Outlet:
        self.asked.append((part, tokens))
        self.during()
        if self.faults:
            raise self.faults.pop(0)
        return protocol.Outlet(
            slice=part.rank_slice.slice, ticket=part.ticket, link=LINK, paths=PATHS, gbps=1.0, rtt_s=0.01
        )

    def use_dtype(self, dtype: str) -> None:
        self.engines.append(dtype)

    def forget_all(self) -> None:
        self.engines.append("lost")

    def forget_peer(self, peer: PeerId) -> list[LinkTicket]:
        self.lost.append(peer)
        return [self.links.pop(peer)] if peer in self.links else []

    def on_link_report(self, report: protocol.LinkReport) -> None:
        self.link_reports.append(report)

    def end_transfer(self, peer: PeerId, report: protocol.TransferReport) -> float:
        self.transfers.append((peer, report))
        return 0.25


class World:
    """A worker, its engine's end of the link, and what gateways were told."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.sockets, self.engine_sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.engine_messages = theirs
        self.exchange = MemoryExchange()
        messenger = self.exchange.join(OWN)
        for peer in (A, B):
            self.exchange.join(peer)
        self.outlets = ScriptedOutlets()
        self.transfers = KvTransfers(model=MODEL, outlets=cast(KvOutlets, self.outlets), messenger=messenger)
        self.worker = Worker(service=SERVICE, transfers=self.transfers, messenger=messenger)
        self.engine = EngineLink(trio.socket.from_stdlib_socket(ours), self.sockets, self.worker.on_engine_message)
        self.engine.ready = READY
        self.use()

    def use(self) -> None:
        self.worker.use(self.engine, Place(alone(OWN), 0))

    def close(self) -> None:
        async def hang_up() -> None:
            self.engine.close()

        trio.run(hang_up)  # trio closes its sockets only inside a run
        self.engine_messages.close()
        self.engine_sockets.close()

    def asked(self) -> list[protocol.EngineMessage]:
        """What the engine has been sent since the last call."""
        found = []
        while True:
            try:
                found.append(self.engine._outbox.receive_nowait())
            except trio.WouldBlock:
                return found

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


@contextmanager
def open_world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as made:
        yield made


def tokens(request: str = "r", *ids: int, **fields: Any) -> messages.Tokens:
    return messages.Tokens(request=request, tokens=ids, **fields)


# ---- opening ----------------------------------------------------------------------------------------------


def test_every_engine_of_the_replica_hears_how_much_a_step_may_compute(world: World) -> None:
    world.worker.limit_steps(0)
    assert world.asked() == []
    world.worker.limit_steps(768)
    world.worker.limit_steps(768)
    assert world.asked() == [protocol.LimitSteps(tokens=768)]
    world.use()  # it has been started again
    assert world.asked() == [protocol.LimitSteps(tokens=768)]
    world.worker.limit_steps(0)
    assert world.asked() == [protocol.LimitSteps(tokens=0)]


def test_a_decode_request_gets_a_ticket_for_the_link_of_its_prefill_node(world: World) -> None:
    (part,) = world.decode(deadline_s=60.0, codec="kv4").slices
    assert (part.ticket.codec, part.ticket.deadline_s) == ("kv4", 30.0)
    assert part.rank_slice == messages.RankSlice(source_peer=P, source=RANK, target_peer=OWN, target=RANK, slice=WHOLE)
    link = world.link(P)
    expected = protocol.Submit(
        request="decode:r",
        prompt=(1, 2, 3),
        sampling=SAMPLING,
        deadline_s=60.0,
        receive=(protocol.Inlet(slice=WHOLE, ticket=part.ticket, link=link),),
        receive_tokens=3,
    )
    assert world.asked() == [expected]
    assert not world.worker.idle


def ticket(opened: messages.DecodeOpened) -> TransferTicket:
    (part,) = opened.slices
    return part.ticket


def test_every_ticket_has_an_id_of_its_own_and_the_link_of_its_sender(world: World) -> None:
    tickets = [ticket(world.decode(str(i), prefill=alone(f"p{i % 2}"))) for i in range(20)]
    assert len({each.transfer for each in tickets}) == 20
    assert [each.link for each in tickets] == [world.link(PeerId(f"p{i % 2}")).link for i in range(20)]
    assert world.link(PeerId("p0")) != world.link(PeerId("p1"))


def test_a_gateway_never_sees_the_secret_of_a_link(world: World) -> None:
    """Its answer goes through the gateway, and on to the prefill node from there."""
    opened = world.decode()
    secret = world.link(P).secret
    assert secret not in msgspec.msgpack.encode(opened)
    assert any(secret in protocol.pack(message) for message in world.asked())  # the engine needs it


def test_links_are_opened_for_the_service_that_is_served_here(world: World) -> None:
    def refused(service: str = SERVICE) -> str:
        with pytest.raises(RemoteError) as caught:
            world.link(P, service)
        return caught.value.code

    assert refused("another") == "wrong-service"
    first = world.link(P)
    assert world.link(P) == first
    world.worker.engine_lost("ended")
    assert refused() == "no-engine"
    world.use()
    again = world.link(P)
    assert again != first  # the receiving end of the first one is gone
    world.worker.drain()
    assert world.link(P) == again  # for what is still being finished


def test_kv_is_not_awaited_for_hours(world: World) -> None:
    assert ticket(world.decode(deadline_s=86400.0)).deadline_s == WAN.max_transfer_s


@pytest.mark.parametrize("changes", [{"receive_tokens": 0}, {"prefill": ()}, {"receive_tokens": 0, "prefill": ()}])
def test_a_request_of_one_box_needs_no_ticket(world: World, changes: dict[str, Any]) -> None:
    assert world.decode(**changes).slices == ()
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.receive, submit.send, submit.receive_tokens) == ((), (), 0)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_any_part_of_a_prompt_may_be_read_elsewhere(world: World, split: int) -> None:
    world.decode(receive_tokens=split)
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.prompt, submit.receive_tokens, len(submit.receive)) == ((1, 2, 3), split, 1)


def test_more_tokens_than_there_are_cannot_come(world: World) -> None:
    assert refusal(world, "decode", receive_tokens=4) == "invalid"


@pytest.mark.parametrize(
    "stages",
    [
        (Stage(peer="p", tp=1, first_layer=0, last_layer=5),),
        (Stage(peer="p", tp=1, first_layer=1, last_layer=4),),
        (Stage(peer="p", tp=1, first_layer=0, last_layer=2), Stage(peer="p", tp=1, first_layer=2, last_layer=4)),
        (Stage(peer="p", tp=3, first_layer=0, last_layer=4),),
    ],
    ids=["too many layers", "a gap", "a box twice", "heads that cannot be shared"],
)
def test_stages_that_are_no_replica_of_this_model_are_the_askers_fault(world: World, stages: tuple[Stage, ...]) -> None:
    assert refusal(world, "decode", prefill=stages) == "invalid"
    assert world.worker.idle


def test_a_prefill_request_takes_its_ticket_along(world: World) -> None:
    assert world.prefill() == messages.Opened()
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.request, submit.send, submit.sampling.max_tokens) == ("prefill:r", (outlet_of(),), 1)
    assert submit.receive == ()
    assert world.outlets.asked == [(part_of(), 3)]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Unreachable("nobody answers"), "no-path", "nobody answers"),
        (RequestTimeout("link.open took too long"), "no-path", "link.open took too long"),
        (TransferError("every path costs too much"), "no-path", "every path costs too much"),
        (RemoteError("draining", "this node is leaving"), "draining", "this node is leaving"),
    ],
)
def test_a_prefill_without_a_way_to_its_decode_node_is_refused(
    world: World, error: Exception, code: str, said: str
) -> None:
    world.outlets.faults = [error]
    with pytest.raises(RemoteError) as caught:
        world.prefill()
    assert caught.value.code == code
    assert said in caught.value.message
    assert world.asked() == []
    assert world.worker.idle
    assert world.prefill() == messages.Opened()  # its id is free again


def test_a_bug_on_the_way_to_an_outlet_leaves_nothing_behind(world: World) -> None:
    world.outlets.faults = [ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError):
        world.prefill()
    assert world.worker.idle


def test_kv_for_this_very_node_is_the_askers_fault(world: World) -> None:
    assert refusal(world, "prefill", slices=(part_of(target=OWN),)) == "invalid"
    assert world.outlets.asked == []
    assert world.worker.idle


@pytest.mark.parametrize("how", ["stopped", "gateway lost", "engine lost"])
def test_a_prefill_that_is_stopped_while_its_link_is_agreed_on_never_starts(world: World, how: str) -> None:
    def end() -> None:
        if how == "stopped":
            world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="r"))
        elif how == "gateway lost":
            world.worker.peer_lost(A)
        else:
            world.worker.engine_lost("ended")

    world.outlets.during = end
    with pytest.raises(RemoteError) as caught:
        world.prefill()
    assert caught.value.code == "stopped"
    assert not any(isinstance(message, protocol.Submit) for message in world.asked())
    assert world.worker.idle


def test_an_id_that_another_has_taken_meanwhile_stays_anothers(world: World) -> None:
    """Stopped and opened again while the first one's link was being agreed on."""

    def again() -> None:
        world.outlets.during = lambda: None
        world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="r"))
        world.prefill("r", B, seed=1)

    world.outlets.during = again
    with pytest.raises(RemoteError):
        world.prefill("r", A)
    (submit,) = [message for message in world.asked() if isinstance(message, protocol.Submit)]
    assert submit.send == (outlet_of(1),)
    world.report(ticket_of(1).transfer)
    assert [peer for peer, _, _ in world.news()] == [B]
    assert world.worker.idle


def opened_on(world: World, kind: str, **changes: Any) -> object:
    opener: Callable[..., object] = world.decode if kind == "decode" else world.prefill
    return opener(**changes)


def refusal(world: World, kind: str, **changes: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        opened_on(world, kind, **changes)
    assert world.asked() == []
    assert "\n" not in caught.value.message
    return caught.value.code


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_what_is_refused_never_reaches_the_engine(world: World, kind: str) -> None:
    assert refusal(world, kind, service="another") == "wrong-service"
    world.worker.engine_lost("ended")
    assert refusal(world, kind) == "no-engine"
    world.use()
    world.worker.drain()
    assert refusal(world, kind) == "draining"
    assert world.worker.idle


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_an_engine_that_has_just_died_gets_nothing(world: World, kind: str) -> None:
    """Its process is gone, and nobody has told the worker yet."""
    world.engine._gone.set()
    assert refusal(world, kind) == "no-engine"
    assert world.worker.idle


def test_a_node_whose_engine_never_started_refuses() -> None:
    outlets = cast(KvOutlets, ScriptedOutlets())
    messenger = MemoryExchange().join(OWN)
    transfers = KvTransfers(model=MODEL, outlets=outlets, messenger=messenger)
    worker = Worker(service=SERVICE, transfers=transfers, messenger=messenger)
    body = messages.PrefillOpen(request="r", service=SERVICE, prompt=(1,), deadline_s=1.0, slices=(part_of(),))
    with pytest.raises(RemoteError) as caught:
        run(worker.open_prefill(A, Role.WORKER, body))
    assert caught.value.code == "no-engine"


def test_a_codec_that_is_none_is_the_askers_fault(world: World) -> None:
    assert refusal(world, "decode", codec="zip") == "invalid"
    assert world.worker.idle


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_nobody_takes_over_the_id_of_anothers_request(world: World, kind: str) -> None:
    opened_on(world, kind)
    world.asked()
    assert refusal(world, kind, gateway=B) == "invalid"
    world.worker.engine_lost("ended")
    assert [peer for peer, _, _ in world.news()] == [A]


# ---- tokens -----------------------------------------------------------------------------------------------


def test_tokens_go_to_the_gateway_that_asked(world: World) -> None:
    world.decode("r", A)
    world.decode("s", B)
    world.step(protocol.NewTokens("decode:r", (5,), None, 2), protocol.NewTokens("decode:s", (6, 7)))
    assert world.news() == [
        (A, "tokens", tokens("r", 5, cached_tokens=2)),
        (B, "tokens", tokens("s", 6, 7)),
    ]
    assert world.worker.stats == STATS
    world.step(protocol.NewTokens("decode:r", (8,), "length"))
    assert world.news() == [(A, "tokens", tokens("r", 8, finish="length"))]
    world.step(protocol.NewTokens("decode:r", (9,)), protocol.NewTokens("decode:nobody", (1,)))
    assert world.news() == []
    world.step(protocol.NewTokens("decode:s", (), "deadline"))
    assert world.news() == [(B, "tokens", tokens("s", finish="deadline"))]
    assert world.worker.idle


def test_an_engine_that_gives_up_a_request_lets_another_have_it(world: World) -> None:
    world.decode()
    world.step(protocol.NewTokens("decode:r", (), "error"))
    ((_, _, message),) = world.news()
    assert isinstance(message, messages.Tokens)
    assert message.failed
    assert message.finish is None
    assert world.worker.idle


def test_what_an_engine_refuses_is_said_with_its_reason(world: World) -> None:
    world.decode()
    world.step(protocol.NewTokens("decode:r", (), "refused", reason="the prompt is too long"))
    assert world.news() == [(A, "tokens", tokens("r", refused="the prompt is too long"))]
    assert world.worker.idle


def test_a_gateway_that_does_not_read_loses_its_request(world: World) -> None:
    """An answer with a gap would be worse than none."""
    world.decode()
    world.asked()
    world.exchange.lost.add(A)
    world.step(protocol.NewTokens("decode:r", (5,)))
    assert world.asked() == [protocol.Cancel(request="decode:r")]
    assert world.worker.idle
    world.exchange.lost.clear()
    world.step(protocol.NewTokens("decode:r", (6,)))
    assert world.news() == []


# ---- transfers --------------------------------------------------------------------------------------------


def test_the_transfers_report_ends_the_prefill_and_its_sampled_token_does_not(world: World) -> None:
    world.prefill("r", A, seed=1)
    world.prefill("s", B, seed=2)
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.news() == []
    assert "prefilling=2" in repr(world.worker)
    world.report(ticket_of(1).transfer)
    figures = messages.TransferFigures(
        raw_bytes=100,
        wire_bytes=50,
        frames=4,
        span_s=0.2,
        visible_s=0.1,
        hidden_fraction=0.5,
        mode="serialised",
        paths={"direct": 30, "relay": 20},
        resent_bytes=5,
        usd=0.25,
    )
    assert [peer for peer, _ in world.outlets.transfers] == [D]
    assert world.news() == [(A, "prefill.ended", messages.PrefillEnded(request="r", figures=figures))]
    world.asked()
    world.report(ticket_of(2).transfer, "cut")
    ((peer, method, message),) = world.news()
    assert (peer, method) == (B, "prefill.ended")
    assert isinstance(message, messages.PrefillEnded)
    assert message.failed == "cut"
    assert world.worker.idle
    assert world.asked() == [  # the rest of the prompt is for nobody
        protocol.Cancel(request="prefill:s"),
        protocol.AbortTransfer(transfer=ticket_of(2).transfer, reason="cut"),
    ]
    world.report(ticket_of(2).transfer, "cut")
    assert world.news() == []


WANTED = protocol.Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=7)


def test_a_first_token_that_is_wanted_is_sampled_as_the_answer_and_told_once(world: World) -> None:
    world.prefill(sampling=WANTED)
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert submit.sampling == msgspec.structs.replace(WANTED, max_tokens=1)
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.news() == [(A, "tokens", tokens("r", 5))]  # it is not the answer that ends by its length
    assert not world.worker.idle
    world.step(protocol.NewTokens("prefill:r", (6,)))
    assert world.news() == []
    world.report(ticket_of().transfer)
    assert [method for _, method, _ in world.news()] == ["prefill.ended"]
    assert world.worker.idle


def test_an_answer_that_ends_with_its_first_token_is_told_to(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.step(protocol.NewTokens("prefill:r", (0,), "stop"))
    assert world.news() == [(A, "tokens", tokens("r", 0, finish="stop"))]


def test_kv_that_is_delivered_before_the_first_token_is_written_does_not_end_the_prefill(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.asked()
    world.report(ticket_of().transfer)
    assert world.news() == []
    assert world.asked() == []
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    (_, _, token), (_, method, ended) = world.news()
    assert token == tokens("r", 5)
    assert method == "prefill.ended"
    assert isinstance(ended, messages.PrefillEnded)
    assert ended.failed == ""
    assert ended.figures is not None
    assert world.worker.idle


def test_kv_that_fails_ends_the_prefill_whether_or_not_its_token_is_written(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.asked()
    world.report(ticket_of().transfer, "cut")
    assert [method for _, method, _ in world.news()] == ["prefill.ended"]
    assert protocol.Cancel(request="prefill:r") in world.asked()
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.news() == []


def test_a_gateway_that_cannot_be_told_the_first_token_loses_its_prefill(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.asked()
    world.exchange.lost.add(A)
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.asked()[0] == protocol.Cancel(request="prefill:r")
    assert world.worker.idle


def test_the_first_token_is_passed_on_by_its_gateway_only(world: World) -> None:
    world.decode(told_first=True)
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert submit.told_first
    body = messages.FirstToken(request="r", token=5)
    world.worker.first_token(B, Role.WORKER, body)
    world.worker.first_token(A, Role.WORKER, messages.FirstToken(request="unknown", token=5))
    assert world.asked() == []
    world.worker.first_token(A, Role.WORKER, body)
    assert world.asked() == [protocol.SetFirstToken(request="decode:r", token=5)]


def test_nobody_waits_for_a_first_token_without_kv_of_the_whole_prompt(world: World) -> None:
    world.decode(told_first=True, prefill=())
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert not submit.told_first
    assert refusal(world, "decode", request="s", told_first=True, receive_tokens=2) == "invalid"


@pytest.mark.parametrize("finish", ["deadline", "error", "refused"])
@pytest.mark.parametrize("sampling", [None, WANTED])
def test_a_prefill_that_ends_early_is_reported(world: World, finish: str, sampling: protocol.Sampling | None) -> None:
    world.prefill(sampling=sampling)
    world.step(protocol.NewTokens("prefill:r", (), finish))
    ((_, _, message),) = world.news()
    assert isinstance(message, messages.PrefillEnded)
    assert finish in message.failed
    assert world.worker.idle


def test_no_more_kv_is_passed_on_by_its_gateway_only(world: World) -> None:
    found = ticket(world.decode())
    world.asked()
    body = messages.StopTransfer(request="r", reason="prefill failed")
    world.worker.stop_transfer(B, Role.WORKER, body)
    assert world.asked() == []
    world.worker.stop_transfer(A, Role.WORKER, body)
    assert world.asked() == [protocol.AbortTransfer(transfer=found.transfer, reason="prefill failed")]
    world.decode("alone", receive_tokens=0)
    world.asked()
    world.worker.stop_transfer(A, Role.WORKER, messages.StopTransfer(request="alone", reason="x"))
    world.worker.stop_transfer(A, Role.WORKER, messages.StopTransfer(request="unknown", reason="x"))
    assert world.asked() == []


def hello_of(link: bytes) -> bytes:
    return LinkHello(link, b"n" * 16, LinkRole.SENDER).pack()


def test_an_accepted_socket_goes_to_the_engine_with_its_hello(world: World) -> None:
    found = ticket(world.decode())
    hello = hello_of(found.link)
    near, far = socket.socketpair()
    assert world.worker.attach(hello, near)
    assert near.fileno() == -1  # this process's copy is closed
    told, descriptors, _, _ = socket.recv_fds(world.engine_sockets, 64, 1)
    with far, socket.socket(fileno=descriptors[0]) as handed:
        assert told == hello
        far.sendall(b"hello")
        assert handed.recv(5) == b"hello"


def test_the_connections_of_a_link_outlive_its_requests(world: World) -> None:
    """They are kept warm for the next one."""
    world.link(P)
    world.decode()
    world.step(protocol.NewTokens("decode:r", (1,), "length"))
    near, far = socket.socketpair()
    with far:
        world.worker.attach(hello_of(world.link(P).link), near)
        _, descriptors, _, _ = socket.recv_fds(world.engine_sockets, 64, 1)
        socket.socket(fileno=descriptors[0]).close()


def fill(link: EngineLink) -> None:
    """Hand over sockets until the engine's end takes no more."""
    with socket.socket() as spare:
        for _ in range(10_000):
            try:
                link.attach(b"x" * LINK_HELLO_BYTES, spare)
            except EngineLost:
                return
    raise AssertionError("the link took 10,000 sockets that nobody read")


@pytest.mark.parametrize("case", ["unknown", "sender gone", "engine lost", "engine does not read", "engine hung up"])
def test_a_socket_that_nobody_waits_for_is_closed(world: World, case: str) -> None:
    found = ticket(world.decode())
    link = b"?" * 16 if case == "unknown" else found.link
    if case == "sender gone":
        world.worker.peer_lost(P)
    elif case == "engine lost":
        world.worker.engine_lost("ended")
    elif case == "engine hung up":
        world.engine_sockets.close()
    elif case == "engine does not read":
        fill(world.engine)
    near, far = socket.socketpair()
    with far:
        assert world.worker.attach(hello_of(link), near)
        assert near.fileno() == -1
        far.settimeout(1)
        assert far.recv(1) == b""


# ---- ends -------------------------------------------------------------------------------------------------


def test_a_lost_engine_is_told_to_every_gateway_even_when_one_is_gone(world: World) -> None:
    world.decode("r", A)
    world.decode("s", B)
    world.prefill("t", B)
    world.step()
    world.asked()
    world.exchange.lost.add(A)
    world.worker.engine_lost("was killed by SIGKILL")
    failed = "the engine process was killed by SIGKILL"
    assert world.news() == [
        (B, "tokens", messages.Tokens(request="s", failed=failed)),
        (B, "prefill.ended", messages.PrefillEnded(request="t", failed=failed)),
    ]
    assert world.worker.idle
    assert world.worker.stats is None
    assert world.asked() == []


def test_a_lost_gateway_cancels_its_requests_and_no_others(world: World) -> None:
    world.decode("r", A)
    world.prefill("r", B, seed=1)
    world.prefill("s", A, seed=2)
    world.decode("u", B)
    world.asked()
    world.worker.peer_lost(A)
    assert world.asked() == [
        protocol.Cancel(request="decode:r"),
        protocol.Cancel(request="prefill:s"),
        protocol.AbortTransfer(transfer=ticket_of(2).transfer, reason="the request was cancelled"),
    ]
    world.step(protocol.NewTokens("decode:r", (1,)), protocol.NewTokens("decode:u", (2,), "stop"))
    world.report(ticket_of(1).transfer)
    assert [(peer, method) for peer, method, _ in world.news()] == [(B, "tokens"), (B, "prefill.ended")]
    assert world.worker.idle


def test_a_lost_node_takes_its_links_along(world: World) -> None:
    """In both directions; the requests that wait for its KV compute it, and their gateways are still there."""
    inlet = world.link(P)
    world.decode("r", A)
    outgoing = issue_link(600.0, random.Random(5).randbytes)
    world.outlets.links = {P: outgoing}
    world.asked()
    world.worker.peer_lost(P)
    gone = "the node at the other end is gone"
    assert world.asked() == [
        protocol.CloseLink(link=inlet.link, reason=gone),
        protocol.CloseLink(link=outgoing.link, reason=gone),
    ]
    assert world.outlets.lost == [P]
    assert world.link(P) != inlet
    world.worker.peer_lost(PeerId("stranger"))
    assert world.asked() == []
    world.step(protocol.NewTokens("decode:r", (1,), "length"))
    assert [peer for peer, _, _ in world.news()] == [A]


def test_other_paths_and_what_links_do_pass_between_engine_and_ways(world: World) -> None:
    world.worker.set_paths(LINK.link, PATHS)
    assert world.asked() == [protocol.SetLinkPaths(link=LINK.link, paths=PATHS)]
    report = protocol.LinkReport(link=LINK.link, paths=(), transfers=1, waiting_bytes=5, blocked=False)
    world.worker.on_engine_message(report)
    assert world.outlets.link_reports == [report]
    assert world.outlets.engines == ["float32"]
    world.worker.engine_lost("ended")
    assert world.outlets.engines == ["float32", "lost"]
    world.worker.set_paths(LINK.link, PATHS)
    assert world.asked() == []


def test_only_the_gateway_that_asked_may_stop_a_request(world: World) -> None:
    world.decode("r", A)
    world.prefill("r", B, seed=1)
    world.asked()
    world.worker.stop_request(PeerId("stranger"), Role.WORKER, messages.StopRequest(request="r"))
    world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="unknown"))
    assert world.asked() == []
    world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="r"))
    assert world.asked() == [protocol.Cancel(request="decode:r")]
    world.worker.stop_request(B, Role.WORKER, messages.StopRequest(request="r"))
    assert world.asked()[0] == protocol.Cancel(request="prefill:r")
    assert world.worker.idle
    assert world.news() == []


def test_draining_finishes_what_is_running(world: World) -> None:
    world.decode()
    world.worker.drain()
    assert not world.worker.idle
    world.step(protocol.NewTokens("decode:r", (5,), "stop"))
    assert world.news() == [(A, "tokens", tokens("r", 5, finish="stop"))]
    assert world.worker.idle


# ---- the link ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        protocol.frame(protocol.Cancel(request="x")),
        protocol.frame(protocol.StartFailed(reason="abc")).replace(b"abc", b"\xff\xfe\xfd"),
    ],
    ids=["absurd length", "no message", "wrong direction", "no text"],
)
def test_an_engine_that_talks_nonsense_is_hung_up_on(world: World, garbage: bytes) -> None:
    """It must not take its agent with it."""

    async def main() -> None:
        world.engine_messages.sendall(garbage)
        with trio.fail_after(5):
            await world.engine.serve()

    trio.run(main)
    assert not world.engine.running
    with pytest.raises(EngineLost):
        world.engine.send(protocol.Stop())
