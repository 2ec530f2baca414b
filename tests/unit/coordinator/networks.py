"""Boxes and links of a running network, and the plans that are made for them."""

from typing import Any

from p2pserve.coordinator import BoxView, Demand, LinkView, Phase, Plan
from p2pserve.coordinator.capacity import KvCodec
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.network_plan import plan_network

KV4, RAW = KvCodec("kv4", 4.5), KvCodec("raw", 16.0)
P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def model(layers: int = 8, name: str = "small") -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=32000
    )


def box(peer: str, tflops: float = 100.0, gbps: float = 1000.0, *, layers: int = 8, **more: Any) -> BoxView:
    """One with room for some layers only has not started an engine, which would say how much KV it holds."""
    tokens = 100_000 if more.get("fits", layers) == layers else 0
    figures = {"ready": True, "draining": False, "memory_gib": 24.0, "kv_tokens": tokens, "fits": layers}
    return BoxView(
        peer=peer, service="llama", model=model(layers), compute_tflops=tflops, memory_gbps=gbps, **(figures | more)
    )


def plan_of(
    *boxes: BoxView,
    links: tuple[LinkView, ...] = (),
    demands: tuple[Demand, ...] = (),
    previous: Plan | None = None,
    epoch: int = 1,
    codec: KvCodec = KV4,
) -> Plan | None:
    version = previous.version + 1 if previous is not None else 0
    return plan_network(
        boxes, links, demands, service="llama", epoch=epoch, version=version, previous=previous, codec=codec
    )


def some_plan(*boxes: BoxView, **more: Any) -> Plan:
    plan = plan_of(*boxes, **more)
    assert plan is not None
    return plan


def roles(plan: Plan) -> dict[str, Phase]:
    return {item.head: item.phase for item in plan.replicas}


def shares(plan: Plan) -> dict[str, float]:
    """Of all requests, what each replica decodes."""
    return {item.id: sum(pair.weight for pair in plan.pairings if pair.decode == item.id) for item in plan.replicas}


def fast(*peers: str) -> tuple[LinkView, ...]:
    """Links that cost next to nothing."""
    return tuple(
        LinkView(source=one, target=two, rtt_s=1e-4, gbps=100.0) for one in peers for two in peers if one != two
    )
