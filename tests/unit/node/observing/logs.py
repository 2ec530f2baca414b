"""Events of a request, as the boxes that had a part in it have logged them, each by its own clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pserve.node.engine.protocol import LayerTimes
from p2pserve.node.observing.values import EventKind, Fact, NodeEvent

GATEWAY, PREFILL, DECODE = "gateway", "prefill-box", "decode-box"
REQUEST = "5f" * 12
CLIENT = "client"
LAYERS = (
    LayerTimes(first_layer=0, last_layer=1, begin_s=0.0, end_s=0.1, wire_bytes=100),
    LayerTimes(first_layer=1, last_layer=2, begin_s=0.05, end_s=0.2, wire_bytes=100),
)


def event(
    number: int, at: float, node: str, kind: EventKind, *, request: str = REQUEST, peer: str = "", **facts: Any
) -> NodeEvent:
    layers = LAYERS if kind in (EventKind.TRANSFER_ENDED, EventKind.TRANSFER_FAILED) else ()
    return NodeEvent(
        number=number, time=at, node=node, kind=kind, request=request, peer=peer, facts=facts, layers=layers
    )


ENDED: dict[str, Any] = {
    "finish": "length", "prompt_tokens": 10, "completion_tokens": 5, "ttft_s": 0.5, "tpot_s": 0.1, "e2e_s": 0.9,
    "raw_bytes": 800, "wire_bytes": 200, "box_usd": 0.002, "traffic_usd": 0.001, "attempts": 1,
}  # fmt: skip


def request_events(skew: Mapping[str, float] | None = None) -> list[NodeEvent]:
    """A request of one attempt: it waits for 100 ms, and its KV takes 200 ms. `skew`: what clocks show too much."""
    by = dict.fromkeys((GATEWAY, PREFILL, DECODE), 0.0) | dict(skew or {})
    kinds = EventKind
    at = 1000.0
    split: Mapping[str, Fact] = {"attempt": 1, "prefill": PREFILL, "decode": DECODE, "split": 10}
    transferred: Mapping[str, Fact] = {"attempt": 1, "span_s": 0.2, "visible_s": 0.05, "raw_bytes": 800}
    transferred = {**transferred, "wire_bytes": 200, "codec_s": 0.01, "hidden_fraction": 0.75, "mode": "layerwise"}

    def here(number: int, since: float, node: str, kind: EventKind, **facts: Any) -> NodeEvent:
        peers = {kinds.REQUEST_BEGUN: CLIENT, kinds.TRANSFER_ENDED: DECODE}
        return event(number, at + since + by[node], node, kind, peer=peers.get(kind, GATEWAY), **facts)

    return [
        here(1, 0.0, GATEWAY, kinds.REQUEST_BEGUN, client_request="mine", service="tiny", prompt_tokens=10),
        here(2, 0.1, GATEWAY, kinds.REQUEST_ROUTED, **split),
        here(1, 0.12, DECODE, kinds.DECODE_BEGUN, attempt=1, prompt_tokens=10),
        here(3, 0.14, GATEWAY, kinds.REQUEST_OPENED, attempt=1, part="decode"),
        here(1, 0.16, PREFILL, kinds.PREFILL_BEGUN, attempt=1, prompt_tokens=10),
        here(4, 0.18, GATEWAY, kinds.REQUEST_OPENED, attempt=1, part="prefill"),
        here(2, 0.4, PREFILL, kinds.PREFILL_DONE, attempt=1),
        here(3, 0.45, PREFILL, kinds.TRANSFER_ENDED, **transferred),
        here(4, 0.45, PREFILL, kinds.PREFILL_ENDED, attempt=1, busy_s=0.3),
        here(5, 0.5, GATEWAY, kinds.REQUEST_FIRST_TOKEN),
        here(2, 0.55, DECODE, kinds.DECODE_FIRST_TOKEN, attempt=1, cached_tokens=10),
        here(3, 0.88, DECODE, kinds.DECODE_ENDED, attempt=1, finish="length", busy_s=0.5),
        here(6, 0.9, GATEWAY, kinds.REQUEST_ENDED, **ENDED),
    ]
