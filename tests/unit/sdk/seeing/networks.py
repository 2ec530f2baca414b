"""Networks of any size, as a node tells of them: made up, and the same for the same size."""

from __future__ import annotations

import random

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures, Source
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert, EngineAdvert, LinkTable, NodeStatus, Status
from p2pserve.node.observing.values import KvTally, Served

NOW = 1_000_000_000.0
SITES = ("fra", "lon", "nyc")
PHASES = (Phase.PREFILL, Phase.DECODE, Phase.MIXED)


def peer(number: int) -> str:
    return f"12D3KooW{'x' * 38}{number:06d}"


def network(boxes: int, *, sent_bytes: int = 3_000_000_000) -> Status:
    """Boxes at three sites in turn, the first of which coordinates; the last of more than seven is dead."""
    rng = random.Random(boxes)
    nodes = tuple(_node(rng, number, boxes, sent_bytes) for number in range(boxes))
    return Status(answered_by=peer(0), coordinator=peer(0), epoch=1, nodes=nodes, plan=_plan(boxes))


def _node(rng: random.Random, number: int, boxes: int, sent_bytes: int) -> NodeStatus:
    gpus = 1 + number % 4
    links = {peer(other): _link(rng, number, other) for other in range(boxes) if other != number}
    kv = {peer(1): KvTally(transfers=10, wire_bytes=sent_bytes, relayed_bytes=5)} if number == 0 and boxes > 1 else {}
    return NodeStatus(
        peer=peer(number),
        role="worker",
        state="dead" if boxes > 7 and number == boxes - 1 else "alive",
        address=f"192.0.2.{number}:4001",
        rtt_s=0.01,
        advert=Advert(
            hardware=Hardware(
                cores=8, memory_gib=64, processor="p", gpus=(Gpu(name="RTX A6000", memory_gib=48, uuid="u"),) * gpus
            ),
            draining=False,
            engine=EngineAdvert(state="ready", engine="vLLM", device="cuda", kv_tokens=1000),
            stats=EngineStats(running=3, waiting=1, kv_usage=0.5, kv_free_tokens=500),
            usd_per_hour=0.5,
            served=Served(prefilled_tokens=100, decoded_tokens=10, kv_sent=kv),
        ),
        links=LinkTable(site=SITES[number % 3], box=BoxFigures(up_usd_per_gb=0.01), links=links),
    )


def _link(rng: random.Random, source: int, target: int) -> LinkFigures:
    near = source % 3 == target % 3
    return LinkFigures(
        rtt_s=0.0005 if near else 0.08,
        one_stream_gbps=0.2,
        capacity_gbps=rng.uniform(10.0, 30.0) if near else rng.uniform(0.2, 5.0),
        capacity_is_floor=target == 2,
        reachable=(source, target) != (1, 2),
        source=Source.INFERRED if (source, target) == (0, 2) else Source.MEASURED,
        rate_confidence=0.8,
        measured_at=NOW - 90.0,
    )


def _plan(boxes: int) -> Plan | None:
    if boxes < 3:
        return None
    replicas = tuple(
        Replica(id=peer(n), phase=PHASES[n % 3], stages=(Stage(peer=peer(n), tp=1, first_layer=0, last_layer=4),))
        for n in range(boxes)
    )
    pairs = (
        Pairing(prefill=peer(0), decode=peer(1), weight=0.75),
        Pairing(prefill=peer(2), decode=peer(2), weight=0.25),
    )
    return Plan(
        epoch=1, version=2, service="tiny", replicas=replicas, pairings=pairs, codec="kv4", why=(f"{peer(0)} is fast",)
    )
