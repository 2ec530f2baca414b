"""A network that is only modelled, to look at: adverts, links, a plan, requests and events that fit together, made from
the messages that real boxes send. For previews of the dashboard, and for tests of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final, final

from msgspec.structs import replace

from ...coordinator import Demand, Pairing, Phase, Plan, Replica, Stage
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.plan import Deadlines
from ...kvtransport.probing.figures import BoxFigures, LinkFigures, Source, one_stream_gbps
from ..admin.source import NetworkSnapshot
from ..box.hardware import Gpu, Hardware
from ..engine.protocol import EngineStats
from ..messages import Advert, EngineAdvert, LinkTable, NodeStatus, Status
from ..models import ModelInfo, WeightSizes
from ..observing.summaries import summarise_links, summarise_nodes
from ..observing.values import (
    BoxClock,
    Cost,
    EventKind,
    Fact,
    KvTally,
    LinkSummary,
    NodeEvent,
    RequestSummary,
    RequestTrace,
    Served,
    TraceSpan,
)

SERVICE: Final = "Qwen/Qwen3-32B"
SITES: Final = ("us-east", "eu-north", "us-west", "asia-se", "eu-west", "sa-east")
CARDS: Final = (("NVIDIA A40", 44.9, 0.42), ("NVIDIA RTX A6000", 47.5, 0.49), ("NVIDIA A100 80GB", 79.2, 1.19))
RTT_MS: Final = (0.4, 28.0, 62.0, 91.0, 148.0, 210.0)
FIRST: Final = ("amber", "brave", "calm", "dusty", "eager", "fleet", "gentle", "hazel", "ivory", "jolly")
SECOND: Final = ("otter", "heron", "lynx", "finch", "marten", "bison")
REQUEST_GAP_S: Final = 2.4
MAX_KEPT: Final = 400
DEADLINES: Final = Deadlines(ttft_s=2.0, tpot_s=0.08, e2e_s=30.0)

_LAYERS: Final = 64
_MODEL: Final = ModelInfo(
    service=SERVICE,
    shape=ModelShape(
        name=SERVICE,
        layers=_LAYERS,
        hidden=5120,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=25600,
        vocabulary=151936,
    ),
    max_model_len=32768,
    weights=WeightSizes(layers=(975_000_000,) * _LAYERS, embeddings=1_555_000_000, head=1_555_000_000, float_bytes=2),
)


@final
class Showcase:
    """A source of snapshots: `boxes` boxes of which each `per_site` are at one place, `now` seconds after midnight."""

    def __init__(self, boxes: int, clock: Callable[[], float], *, per_site: int = 4, seed: int = 1) -> None:
        self._clock = clock
        self._began = clock()
        self._rng = Random(seed)
        self.peers = tuple(f"12D3KooW{self._rng.randbytes(22).hex()}" for _ in range(boxes))
        self.names = {
            peer: f"{FIRST[number % len(FIRST)]}-{SECOND[number // len(FIRST) % len(SECOND)]}"
            for number, peer in enumerate(self.peers)
        }
        per_site = max(per_site, -(-boxes // len(SITES)))
        self._site = {peer: number // per_site for number, peer in enumerate(self.peers)}
        self._speed = {peer: self._rng.choice((1.0, 5.0, 10.0, 25.0)) for peer in self.peers}
        self._plan = self._make_plan()
        self._tables = {peer: self._make_table(peer) for peer in self.peers}
        self._requests: list[RequestSummary] = []
        self._events = self._first_events()

    async def snapshot(self) -> NetworkSnapshot:
        """As a node would answer."""
        await asyncio.sleep(0)
        return self.look(self._clock())

    async def links(self) -> tuple[LinkSummary, ...]:
        """As it would, too."""
        return summarise_links(self.status(self._clock()), self._clock())

    async def trace(self, request: str) -> RequestTrace | None:
        """A request that was split between two boxes, or ran on one."""
        for found in self._requests:
            if found.id == request:
                return _trace_of(found)
        return None

    def look(self, now: float) -> NetworkSnapshot:
        """The network at `now`, in unix seconds; what has happened since the last look is made up on the way."""
        self._advance(now)
        status = self.status(now)
        return NetworkSnapshot(
            time=now,
            answered_by=self.peers[0],
            coordinator=self.peers[0],
            epoch=self._plan.epoch,
            nodes=summarise_nodes(status, self.names),
            plan=self._plan,
            requests=tuple(_as_of(request, now) for request in self._requests[-MAX_KEPT:]),
            events=tuple(sorted((e for e in self._events if e.time <= now), key=lambda e: e.time)[-MAX_KEPT:]),
        )

    def status(self, now: float) -> Status:
        """What a node of it would answer, `now` in unix seconds."""
        return Status(
            answered_by=self.peers[0],
            coordinator=self.peers[0],
            epoch=self._plan.epoch,
            nodes=tuple(self._node(number, peer, now) for number, peer in enumerate(self.peers)),
            plan=self._plan,
        )

    def _node(self, number: int, peer: str, now: float) -> NodeStatus:
        rng = Random(f"{peer}{int(now)}")
        card, memory, _ = self._card(peer)
        gpus = tuple(Gpu(name=card, memory_gib=memory, uuid=f"GPU-{peer}-{i}") for i in range(2))
        kind = "dead" if number == 17 else "alive"
        phase = self._plan.phase_of(peer)
        busy = 0.15 if phase is Phase.PREFILL else 0.55
        advert = Advert(
            hardware=Hardware(cores=32, memory_gib=251.0, processor="AMD EPYC 7543", gpus=gpus),
            draining=number == 11,
            model=_MODEL,
            engine=EngineAdvert(
                state="ready" if number != 13 else "loading",
                detail="" if number != 13 else "weights 5/14",
                engine="vllm 0.32.0",
                device="cuda",
                kv_tokens=118_000,
                max_model_len=32768,
                starts=1,
            ),
            stats=EngineStats(
                rng.randint(1, 12), rng.choice((0, 0, 0, 1, 2)), min(0.97, busy + 0.3 * rng.random()), 60_000
            ),
            served=self._served(peer, now),
            fits=_LAYERS,
            tp=2,
            demand=Demand(requests_s=1 / REQUEST_GAP_S, arrival_cv=1.0, lengths=((1200, 180),)) if not number else None,
            usd_per_hour=2 * self._card(peer)[2],
        )
        rtt = RTT_MS[abs(self._site[peer] - self._site[self.peers[0]])] / 1e3 if number else None
        return NodeStatus(
            peer=peer,
            role="worker",
            state=kind,
            address=f"203.0.113.{number + 2}:4001",
            rtt_s=rtt,
            advert=advert,
            links=self._tables[peer],
        )

    def _served(self, peer: str, now: float) -> Served:
        """Of each request its part of the plan, and KV of up to 6 Gb/s."""
        seconds, decoded, sent = now - self._began + 60, 0.0, {}
        for pair in self._plan.pairings:
            if pair.decode == peer:
                decoded += 76 * pair.weight * seconds
            if pair.prefill == peer != pair.decode:
                rate = min(6 * pair.weight, self._tables[peer].links[pair.decode].capacity_gbps)
                sent[pair.decode] = KvTally(
                    wire_bytes=int(rate * seconds * 1.25e8), transfers=int(seconds * pair.weight)
                )
        return Served(decoded_tokens=int(decoded), kv_sent=sent)

    def _card(self, peer: str) -> tuple[str, float, float]:
        return CARDS[self._site[peer] % len(CARDS)]

    def _make_table(self, peer: str) -> LinkTable:
        links = {}
        for other in self.peers:
            if other != peer:
                distance = abs(self._site[peer] - self._site[other])
                rtt = RTT_MS[distance] * self._rng.uniform(0.9, 1.1) / 1e3
                top = min(self._speed[peer], self._speed[other])
                gbps = max(0.06, top * self._rng.uniform(0.5, 0.95) * (1.0 if not distance else 0.8 / distance))
                links[other] = LinkFigures(
                    rtt_s=rtt,
                    one_stream_gbps=min(gbps, one_stream_gbps(rtt)),
                    capacity_gbps=gbps,
                    loss=self._rng.choice((0.0, 0.0, 0.0004)),
                    rate_confidence=0.9,
                    source=self._rng.choice((Source.MEASURED, Source.MEASURED, Source.MEASURED, Source.INFERRED)),
                    measured_at=self._began - self._rng.uniform(2, 900),
                )
        box = BoxFigures(up_gbps=self._speed[peer], down_gbps=self._speed[peer], up_usd_per_gb=0.01)
        return LinkTable(site=SITES[self._site[peer]], box=box, links=links)

    def _make_plan(self) -> Plan:
        phases = (Phase.PREFILL, Phase.DECODE, Phase.DECODE) if len(self.peers) > 1 else (Phase.MIXED,)
        replicas = tuple(
            Replica(id=peer, phase=phases[number % len(phases)], stages=(_stage(peer),))
            for number, peer in enumerate(self.peers)
        )
        prefills = [replica.id for replica in replicas if replica.prefills]
        decodes = [replica.id for replica in replicas if replica.decodes]
        pairs = {(prefills[number % len(prefills)], decode) for number, decode in enumerate(decodes)}
        weights = [1 + number % 3 for number in range(len(pairs))]
        return Plan(
            epoch=3,
            version=7,
            service=SERVICE,
            replicas=replicas,
            pairings=tuple(
                Pairing(prefill=one, decode=other, weight=weight / sum(weights))
                for (one, other), weight in zip(sorted(pairs), weights, strict=True)
            ),
            codec="kv4",
            deadlines=DEADLINES,
            why=(
                "planned for 0.42 requests/s: 1210 tokens in and 182 out on average; deadlines 2 s to the first token",
                f"of {len(self.peers)} boxes {len(prefills)} prefill and {len(decodes)} decode",
                "KV as kv4: raw would take 3.4 times as long over the slowest pair",
            ),
        )

    def _first_events(self) -> list[NodeEvent]:
        joined = EventKind.MEMBER_JOINED
        events = [
            NodeEvent(number=number, time=self._began - 1700 + number, node=self.peers[0], kind=joined, peer=peer)
            for number, peer in enumerate(self.peers[1:], 1)
        ]
        made = NodeEvent(
            number=len(events) + 1,
            time=self._began - 1600,
            node=self.peers[0],
            kind=EventKind.PLAN_MADE,
            facts={"epoch": 3, "version": 7, "replicas": len(self.peers)},
        )
        return [*events, made]

    def _advance(self, now: float) -> None:
        """Requests come one after another, the first of them half an hour before the first look."""
        at = self._requests[-1].arrived if self._requests else self._began - 1500
        while at + REQUEST_GAP_S <= now:
            at += REQUEST_GAP_S
            request = self._make_request(at)
            self._requests.append(request)
            self._tell(request)
        self._requests, self._events = self._requests[-MAX_KEPT:], self._events[-2 * MAX_KEPT :]

    def _make_request(self, at: float) -> RequestSummary:
        rng, pairs = self._rng, self._plan.pairings
        pair = rng.choices(pairs, [pair.weight for pair in pairs])[0]
        prompt, output = int(rng.lognormvariate(6.8, 0.6)), int(rng.lognormvariate(5.0, 0.6))
        slow = rng.random() < 0.04
        ttft = (0.18 + prompt * 3.1e-4) * rng.uniform(0.8, 1.3) * (6 if slow else 1)
        tpot = rng.uniform(0.028, 0.052) * (2.4 if rng.random() < 0.02 else 1)
        raw = 0 if pair.prefill == pair.decode else prompt * 262_144
        failed = rng.random() < 0.008
        seconds = ttft + tpot * output
        return RequestSummary(
            id=f"{rng.getrandbits(48):012x}",
            gateway=self.peers[0],
            client=f"key-{rng.randint(1, 4)}",
            service=SERVICE,
            state="error" if failed else rng.choice(("stop", "stop", "length")),
            arrived=at,
            prefill=pair.prefill,
            decode=pair.decode,
            prompt_tokens=prompt,
            completion_tokens=output,
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=seconds,
            attempts=2 if slow else 1,
            recovered=("the decode box did not answer for 2 s",) if slow else (),
            raw_bytes=raw,
            wire_bytes=raw * 45 // 160,
            error="no replica of the service was left" if failed else "",
            cost=Cost(box_usd=seconds * 0.9 / 3600 / 4, traffic_usd=raw * 45 / 160 / 1e9 * 0.01),
        )

    def _tell(self, request: RequestSummary) -> None:
        begun: dict[str, Fact] = {"prompt_tokens": request.prompt_tokens}
        ended: dict[str, Fact] = {"finish": request.state, "ttft_s": request.ttft_s or 0.0}
        for kind, after, facts in (
            (EventKind.REQUEST_BEGUN, 0.0, begun),
            (EventKind.REQUEST_ENDED, request.e2e_s or 0.0, ended),
        ):
            number, at = self._events[-1].number + 1, request.arrived + after
            self._events.append(
                NodeEvent(number=number, time=at, node=self.peers[0], kind=kind, request=request.id, facts=facts)
            )


def _stage(peer: str) -> Stage:
    return Stage(peer=peer, tp=2, first_layer=0, last_layer=_LAYERS)


def _as_of(request: RequestSummary, now: float) -> RequestSummary:
    """A request that has not ended at `now` is still being answered."""
    if request.arrived + (request.e2e_s or 0.0) <= now:
        return request
    ttft = request.ttft_s if request.ttft_s is not None and request.arrived + request.ttft_s <= now else None
    return replace(
        request, state="answering" if ttft else "routed", completion_tokens=None, ttft_s=ttft, tpot_s=None, e2e_s=None,
        error="",
    )  # fmt: skip


def _trace_of(request: RequestSummary) -> RequestTrace:
    at, ttft, seconds = request.arrived, request.ttft_s or 0.0, request.e2e_s or 0.0
    first, end = at + ttft, at + seconds
    spans = [
        TraceSpan(name="queue", node=request.gateway, begin=at, end=at + 0.1 * ttft),
        TraceSpan(name="route", node=request.gateway, begin=at + 0.1 * ttft, end=at + 0.12 * ttft),
        TraceSpan(
            name="prefill",
            node=request.prefill,
            begin=at + 0.2 * ttft,
            end=first - 0.05 * ttft,
            facts={"tokens": request.prompt_tokens},
        ),
        TraceSpan(
            name="decode", node=request.decode, begin=first, end=end, facts={"tokens": request.completion_tokens or 0}
        ),
    ]
    if request.wire_bytes:
        spans.insert(
            3,
            TraceSpan(
                name="kv",
                node=request.prefill,
                begin=at + 0.3 * ttft,
                end=first,
                facts={"wire_bytes": request.wire_bytes},
            ),
        )
    return RequestTrace(
        id=request.id,
        gateway=request.gateway,
        client=request.client,
        outcome=request.state,
        error=request.error,
        spans=tuple(spans),
        boxes=(BoxClock(node=request.prefill, offset_s=0.0012, error_s=0.014),),
        recovered=request.recovered,
        facts={"prompt_tokens": request.prompt_tokens, "ttft_s": ttft, "e2e_s": seconds},
        cost=request.cost,
    )
