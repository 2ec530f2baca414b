"""KV transfers between replicas that span boxes, on a virtual clock: workers and outlets are real, engines in memory.

The prefill replica has three stages, the decode replica two, cut elsewhere.
"""

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, NetworkError, PeerId, RemoteError, RequestTimeout, Role
from p2pserve.coordinator import Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.probing.figures import BoxFigures
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.links.kv_outlets import KvOutlets
from p2pserve.node.links.link_knowledge import LinkKnowledge
from p2pserve.node.links.path_selection import PathSelector
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.replica.kv_transfers import KvTransfers
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.worker import Worker
from p2pserve.node.settings import BoxLinkSettings
from p2pserve.node.testing import MemoryEngine, MemoryExchange, Sent, dial_at

SERVICE = "tiny-1234"
MODEL = ModelInfo(
    service=SERVICE,
    shape=ModelShape(
        name="tiny", layers=6, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
    ),
    max_model_len=512,
    weights=WeightSizes(layers=(1000,) * 6, embeddings=500, head=500),
)
GATEWAY = PeerId("gateway")
LATENCY_S = 0.01
USD_PER_GB = 0.09


def stages(name: str, *layers: int) -> tuple[Stage, ...]:
    ends = [sum(layers[: i + 1]) for i in range(len(layers))]
    return tuple(
        Stage(peer=f"{name}{i}", tp=1, first_layer=end - count, last_layer=end)
        for i, (count, end) in enumerate(zip(layers, ends, strict=True))
    )


PREFILL, DECODE = stages("p", 1, 3, 2), stages("d", 2, 4)
P0, P1, P2, D0, D1 = (PeerId(stage.peer) for stage in (*PREFILL, *DECODE))


@dataclass
class Box:
    """A node of a replica: its worker, and what its engine was asked for."""

    transfers: KvTransfers
    worker: Worker
    engine: MemoryEngine = field(default_factory=MemoryEngine)


class World:
    """Five boxes that form two replicas, and a gateway that remembers what it is told."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.boxes: dict[PeerId, Box] = {}
        self.faults: dict[tuple[PeerId, str], NetworkError] = {}
        self.during: dict[tuple[PeerId, str], Callable[[], None]] = {}
        self.exchange = MemoryExchange(latency_s=LATENCY_S, before=self._before)
        self.exchange.join(GATEWAY)
        for replica in (PREFILL, DECODE):
            for index, stage in enumerate(replica):
                self._add(PeerId(stage.peer), Place(replica, index))

    def _add(self, own: PeerId, place: Place) -> None:
        messenger = self.exchange.join(own)
        settings = BoxLinkSettings(box=BoxFigures(up_usd_per_gb=USD_PER_GB))
        outlets = KvOutlets(
            MODEL,
            PathSelector(LinkKnowledge(own, settings), lambda peer: True),
            messenger=messenger,
            path_to=dial_at(lambda peer: Address(f"{peer}.example", 7000)),
            starts=lambda peer: 1,
            nursery=self._nursery,
        )
        transfers = KvTransfers(model=MODEL, outlets=outlets, messenger=messenger)
        box = Box(transfers, Worker(service=SERVICE, transfers=transfers, messenger=messenger))
        box.worker.use(box.engine, place)
        self.boxes[own] = box

    def _before(self, sent: Sent) -> None:
        if (sent.target, sent.method) in self.faults:
            raise self.faults[sent.target, sent.method]
        self.during.pop((sent.target, sent.method), lambda: None)()

    @property
    def told(self) -> list[tuple[PeerId, str, Any]]:
        """What the gateway was told, and by whom."""
        return [(sent.source, sent.method, sent.body) for sent in self.exchange.told if sent.target == GATEWAY]

    @property
    def asked(self) -> list[tuple[PeerId, PeerId, str]]:
        return [(sent.source, sent.target, sent.method) for sent in self.exchange.asked]

    async def decode(self, request: str = "r", tokens: int = 3) -> messages.DecodeOpened:
        body = messages.DecodeOpen(
            request=request,
            service=SERVICE,
            prompt=(1, 2, 3),
            sampling=protocol.Sampling(max_tokens=5),
            deadline_s=60.0,
            receive_tokens=tokens,
            codec="kv4",
            prefill=PREFILL,
        )
        return await self.boxes[D0].worker.open_decode(GATEWAY, Role.WORKER, body)

    async def prefill(self, parts: tuple[messages.TicketedSlice, ...], request: str = "r") -> None:
        body = messages.PrefillOpen(request=request, service=SERVICE, prompt=(1, 2), deadline_s=60.0, slices=parts)
        await self.boxes[P0].worker.open_prefill(GATEWAY, Role.WORKER, body)

    async def both(self) -> tuple[messages.TicketedSlice, ...]:
        """A request under way between the two replicas."""
        parts = (await self.decode()).slices
        await self.prefill(parts)
        return parts

    def submitted(self, peer: PeerId) -> protocol.Submit:
        (found,) = self.boxes[peer].engine.take_sent()
        assert isinstance(found, protocol.Submit)
        return found

    def report(self, part: messages.TicketedSlice, reason: str = "", size: int = 100, span_s: float = 1.0) -> None:
        """The engine of the part's source says how it ended."""
        self.boxes[PeerId(part.rank_slice.source_peer)].worker.on_engine_message(
            protocol.TransferReport(
                transfer=part.ticket.transfer,
                delivered=not reason,
                reason=reason,
                frames=2,
                raw_bytes=size,
                wire_bytes=size // 4,
                span_s=span_s,
                visible_s=span_s / 10,
                hidden_fraction=0.9,
                link=part.ticket.link,
                mode="layerwise",
                paths={"direct": size // 4},
                resent_bytes=1,
                blocked_s=0.0,
            )
        )


def play(main: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await main(World(nursery))

    trio.run(run, clock=MockClock(autojump_threshold=0))


def test_every_stage_sends_straight_to_the_stages_that_need_its_layers() -> None:
    async def main(world: World) -> None:
        parts = await world.both()
        ends = [(p.rank_slice.source_peer, p.rank_slice.target_peer, list(p.rank_slice.slice.layers)) for p in parts]
        assert ends == [(P0, D0, [0]), (P1, D0, [1]), (P1, D1, [2, 3]), (P2, D1, [4, 5])]
        assert len({part.ticket.transfer for part in parts}) == 1
        assert len({part.ticket.link for part in parts}) == 4
        receive, send = world.submitted(D0), world.submitted(P0)
        assert [(inlet.rank.stage, inlet.slice, inlet.ticket) for inlet in receive.receive] == [
            (part.rank_slice.target.stage, part.rank_slice.slice, part.ticket) for part in parts
        ]
        assert [(outlet.rank.stage, outlet.slice, outlet.ticket) for outlet in send.send] == [
            (part.rank_slice.source.stage, part.rank_slice.slice, part.ticket) for part in parts
        ]
        assert [outlet.link for outlet in send.send] == [inlet.link for inlet in receive.receive]
        assert [outlet.paths[0].host for outlet in send.send] == [f"{p.rank_slice.target_peer}.example" for p in parts]
        for peer in (P1, P2, D1):
            assert world.boxes[peer].engine.take_sent() == []  # its engine hears of it from the head's engine
        assert {(source, peer) for source, peer, method in world.asked if method == "stage.outlets"} == {
            (P0, P1),
            (P0, P2),
        }
        assert world.boxes[D1].transfers.knows(parts[2].ticket.link)
        assert not world.boxes[D0].transfers.knows(parts[2].ticket.link)

    play(main)


def test_stages_are_asked_at_the_same_time() -> None:
    async def main(world: World) -> None:
        parts = (await world.decode()).slices
        begun = trio.current_time()
        await world.prefill(parts)
        assert trio.current_time() - begun == pytest.approx(2 * LATENCY_S + LATENCY_S)  # P1 asks for two links

    play(main)


def test_a_second_request_asks_for_no_link_again() -> None:
    async def main(world: World) -> None:
        await world.both()
        before = [method for _, _, method in world.asked]
        parts = (await world.decode("s")).slices
        await world.prefill(parts, "s")
        after = [method for _, _, method in world.asked[len(before) :]]
        assert sorted(after) == ["stage.inlets", "stage.outlets", "stage.outlets"]

    play(main)


@pytest.mark.parametrize("seed", range(3))
def test_the_transfer_has_ended_when_all_its_parts_have(seed: int) -> None:
    async def main(world: World) -> None:
        parts = await world.both()
        for number, part in enumerate(random.Random(seed).sample(parts, 4)):
            assert world.told == []
            world.report(part, size=100 * (number + 1), span_s=number + 1.0)
            world.report(part)  # the same once more is no news
        ((peer, method, ended),) = world.told
        assert (peer, method) == (P0, "prefill.ended")
        assert isinstance(ended, messages.PrefillEnded)
        assert ended.failed == ""
        figures = ended.figures
        assert figures is not None
        assert (figures.raw_bytes, figures.wire_bytes, figures.frames, figures.resent_bytes) == (1000, 250, 8, 4)
        assert (figures.span_s, figures.visible_s, figures.hidden_fraction) == (4.0, 0.4, 0.9)
        assert (figures.paths, figures.mode) == ({"direct": 250}, "layerwise")
        assert figures.usd == pytest.approx(250e-9 * USD_PER_GB)
        assert world.boxes[P0].worker.idle
        assert all(not box.transfers.sending for box in world.boxes.values())

    play(main)


@pytest.mark.parametrize("failing", range(4))
def test_one_part_that_fails_ends_all_of_them(failing: int) -> None:
    async def main(world: World) -> None:
        parts = await world.both()
        for box in world.boxes.values():
            box.engine.take_sent()
        world.report(parts[failing], "the link was cut")
        ((_, _, ended),) = world.told
        assert isinstance(ended, messages.PrefillEnded)
        assert ended.failed == "the link was cut"
        transfer = parts[0].ticket.transfer
        abort = protocol.AbortTransfer(transfer=transfer, reason="the link was cut")
        assert world.boxes[P0].engine.take_sent() == [protocol.Cancel(request="prefill:r"), abort]
        assert [world.boxes[peer].engine.take_sent() for peer in (P1, P2)] == [[abort], [abort]]
        for part in parts:
            world.report(part, "aborted")
        assert len(world.told) == 1
        assert all(not box.transfers.sending for box in world.boxes.values())

    play(main)


def test_what_a_gateway_calls_off_ends_on_every_stage() -> None:
    async def main(world: World) -> None:
        parts = await world.both()
        for box in world.boxes.values():
            box.engine.take_sent()
        stop = messages.StopTransfer(request="r", reason="prefill is slow")
        world.boxes[D0].worker.stop_transfer(GATEWAY, Role.WORKER, stop)
        abort = protocol.AbortTransfer(transfer=parts[0].ticket.transfer, reason="prefill is slow")
        assert [world.boxes[peer].engine.take_sent() for peer in (D0, D1)] == [[abort], [abort]]
        world.boxes[P0].worker.stop_request(GATEWAY, Role.WORKER, messages.StopRequest(request="r"))
        abort = protocol.AbortTransfer(transfer=parts[0].ticket.transfer, reason="the request was cancelled")
        assert world.boxes[P0].engine.take_sent() == [protocol.Cancel(request="prefill:r"), abort]
        assert [world.boxes[peer].engine.take_sent() for peer in (P1, P2)] == [[abort], [abort]]

    play(main)


@pytest.mark.parametrize(
    ("peer", "method", "code"),
    [(D1, "stage.inlets", "no-stage"), (P2, "stage.outlets", "no-path"), (D1, "link.open", "no-path")],
)
def test_a_stage_that_does_not_answer_costs_only_the_request(peer: PeerId, method: str, code: str) -> None:
    async def main(world: World) -> None:
        world.faults[peer, method] = RequestTimeout("no answer")
        with pytest.raises(RemoteError) as caught:
            await world.both()
        assert caught.value.code == code or "no answer" in caught.value.message
        assert "no answer" in caught.value.message
        assert world.boxes[P0].worker.idle
        assert world.boxes[P0].engine.take_sent() == []
        del world.faults[peer, method]
        await world.decode("s")
        world.boxes[D0].worker.stop_request(GATEWAY, Role.WORKER, messages.StopRequest(request="r"))

    play(main)


@pytest.mark.parametrize("method", ["stage.inlets", "stage.outlets"])
def test_what_is_stopped_while_stages_are_asked_never_starts(method: str) -> None:
    async def main(world: World) -> None:
        peer, head = (D1, D0) if method == "stage.inlets" else (P1, P0)
        stop = messages.StopRequest(request="r")
        world.during[peer, method] = lambda: world.boxes[head].worker.stop_request(GATEWAY, Role.WORKER, stop)
        with pytest.raises(RemoteError) as caught:
            await world.both()
        assert caught.value.code == "stopped"
        assert world.boxes[head].worker.idle
        assert not any(isinstance(message, protocol.Submit) for message in world.boxes[head].engine.take_sent())
        assert not any(world.boxes[each].transfers.sending for each in (P0, P1, P2))

    play(main)


def test_only_the_head_is_obeyed_and_only_heads_take_requests() -> None:
    async def main(world: World) -> None:
        parts = await world.both()
        inlets = messages.StageInlets(
            transfer=b"x" * 16, codec="raw", deadline_s=1.0, slices=tuple(part.rank_slice for part in parts[2:])
        )
        outlets = messages.StageOutlets(tokens=1, slices=parts[1:3])
        stranger = PeerId("stranger")
        for peer in (stranger, P0, D1, GATEWAY):
            with pytest.raises(RemoteError, match="not-head"):
                await world.boxes[D1].transfers.open_inlets(peer, Role.WORKER, inlets)
        for peer in (stranger, D0, P1, GATEWAY):
            with pytest.raises(RemoteError, match="not-head"):
                await world.boxes[P1].transfers.open_outlets(peer, Role.WORKER, outlets)
        world.boxes[P1].engine.take_sent()
        abort = messages.StageAbort(transfer=parts[0].ticket.transfer, reason="mischief")
        world.boxes[P1].worker.stage_abort(stranger, Role.WORKER, abort)
        assert world.boxes[P1].engine.take_sent() == []
        forged = messages.StageTransfer(
            transfer=parts[0].ticket.transfer,
            link=parts[3].ticket.link,
            failed="mischief",
            figures=messages.TransferFigures(
                raw_bytes=0, wire_bytes=0, frames=0, span_s=0.0, visible_s=0.0, hidden_fraction=0.0
            ),
        )
        world.boxes[P0].worker.stage_transfer(stranger, Role.WORKER, forged)
        assert world.told == []
        body = messages.PrefillOpen(request="z", service=SERVICE, prompt=(1,), deadline_s=1.0, slices=parts)
        with pytest.raises(RemoteError, match="not-head"):
            await world.boxes[P1].worker.open_prefill(GATEWAY, Role.WORKER, body)

    play(main)


def test_a_stage_answers_for_its_own_layers_only() -> None:
    async def main(world: World) -> None:
        parts = await world.both()
        with pytest.raises(RemoteError, match="invalid"):
            await world.boxes[P1].transfers.open_outlets(
                P0, Role.WORKER, messages.StageOutlets(tokens=1, slices=(parts[1], parts[3]))
            )
        wrong = messages.LinkOpen(service=SERVICE, source=protocol.WorkerRank(), target=protocol.WorkerRank(stage=1))
        with pytest.raises(RemoteError, match="no worker"):
            await world.boxes[D0].transfers.open_link(P0, Role.WORKER, wrong)

    play(main)


def test_a_stage_whose_engine_is_lost_forgets_what_it_sent() -> None:
    async def main(world: World) -> None:
        parts = await world.both()
        world.boxes[P1].worker.engine_lost("ended")
        world.report(parts[1])
        assert world.boxes[P0].transfers.sending
        world.boxes[P0].worker.engine_lost("lost a stage")
        ((_, _, ended),) = world.told
        assert isinstance(ended, messages.PrefillEnded)
        assert "lost a stage" in ended.failed
        with pytest.raises(RemoteError, match="no-engine"):
            await world.boxes[P1].transfers.open_link(P0, Role.WORKER, messages.LinkOpen(service=SERVICE))

    play(main)
