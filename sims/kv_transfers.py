"""KV caches on their way from the replica that read a prompt to the one that writes the answer.

Layer by layer, what a step computes leaves while it is computed, and a layer's worth is left when the step ends; or
all of it leaves when the prompt is read. Nothing leaves before the other side has reserved blocks for it, and the
reading side keeps its own until everything has arrived.
"""

from __future__ import annotations

from math import inf, isnan, nan
from typing import NamedTuple, final

from ..coordinator.plan import Replica
from ..coordinator.planning.model.cluster import Cluster
from .network import Flow, FluidNetwork
from .scenario import WorldError

__all__ = ["KVTransfer", "KVTransfers", "LinkShare", "TransferLinks", "links_between"]


class LinkShare(NamedTuple):
    """Which share of a request's KV goes from which box to which (indices)."""

    source: int
    target: int
    share: float


class TransferLinks(NamedTuple):
    """All of them between two replicas, and the longest round trip among them."""

    ways: tuple[LinkShare, ...]
    rtt_s: float


@final
class KVTransfer:
    """One request's KV between two replicas. `unsent` tokens are read and not on their way."""

    __slots__ = (
        "begun_at", "flows", "layers", "limited", "read", "read_at", "request", "room", "token_bytes", "unsent", "ways"
    )  # fmt: skip

    def __init__(self, request: int, ways: TransferLinks, token_bytes: float, layers: int) -> None:
        self.request = request
        self.ways = ways
        self.token_bytes = token_bytes
        self.layers = layers
        self.begun_at = nan
        self.room = False  # the other side has reserved blocks
        self.read = False  # all of it
        self.read_at = nan
        self.unsent = 0
        self.flows: set[int] = set()  # under way, by key
        self.limited: list[
            tuple[Flow, LinkShare, float]
        ] = []  # as fast as they are computed; what a layer of each comes to


@final
class KVTransfers:
    """Puts KV on the network. The caller advances the network, and tells `ended` of each flow that ends."""

    def __init__(self, network: FluidNetwork, *, layerwise: bool) -> None:
        self._network = network
        self._layerwise = layerwise
        self._by_flow: dict[int, KVTransfer] = {}
        self._live: dict[int, Flow] = {}
        self.sent_bytes: dict[tuple[int, int], float] = {}
        """From box to box (indices), also of transfers that were abandoned later."""

    def reading(self, handover: KVTransfer, tokens: int, until: float, now: float) -> None:
        """A step reads so many tokens until `until`."""
        self._unlimit(handover, now)
        layers = handover.layers
        if not (self._layerwise and handover.room and until > now and layers > 1):
            handover.unsent += tokens
            return
        share_early = (layers - 1) / layers
        for way in handover.ways.ways:
            size = tokens * handover.token_bytes * way.share
            flow = self._start(handover, way, size, now, limit=size * share_early / (until - now))
            handover.limited.append((flow, way, size / layers))

    def all_read(self, handover: KVTransfer, now: float) -> None:
        """The prompt is read, up to its end."""
        handover.read, handover.read_at = True, now
        self._unlimit(handover, now)
        self._send_rest(handover, now)

    def room_made(self, handover: KVTransfer, now: float) -> None:
        """The other side has reserved blocks."""
        handover.room = True
        if handover.read:
            self._send_rest(handover, now)

    def ended(self, flow: Flow) -> KVTransfer | None:
        """Whose the flow was, if that was the last of its KV."""
        del self._live[flow.key]
        handover = self._by_flow.pop(flow.key)
        handover.flows.discard(flow.key)
        return handover if handover.read and not handover.flows and not handover.unsent else None

    def abandon(self, handover: KVTransfer, now: float) -> None:
        """Nobody waits for it any more."""
        for key in sorted(handover.flows):
            self._network.stop(self._live.pop(key), now)
            del self._by_flow[key]
        handover.flows.clear()
        handover.limited.clear()

    def _send_rest(self, handover: KVTransfer, now: float) -> None:
        if not (handover.room and handover.unsent):
            return
        for way in handover.ways.ways:
            self._start(handover, way, handover.unsent * handover.token_bytes * way.share, now)
        handover.unsent = 0

    def _start(self, handover: KVTransfer, way: LinkShare, size: float, now: float, limit: float = inf) -> Flow:
        flow = self._network.start(way.source, way.target, size, now, limit=limit)
        if isnan(handover.begun_at):
            handover.begun_at = now
        ends = (way.source, way.target)
        self.sent_bytes[ends] = self.sent_bytes.get(ends, 0.0) + size
        handover.flows.add(flow.key)
        self._by_flow[flow.key] = handover
        self._live[flow.key] = flow
        return flow

    def _unlimit(self, handover: KVTransfer, now: float) -> None:
        for flow, way, layer in handover.limited:
            if flow.done:  # the next chunk was put off: all but the last layer had left long ago, and that leaves now
                self.sent_bytes[way.source, way.target] -= layer
                self._start(handover, way, layer, now)
            else:
                self._network.unlimit(flow, now, at_least=layer)
        handover.limited.clear()


def links_between(cluster: Cluster, prefill: Replica, decode: Replica) -> TransferLinks:
    """From every stage of one to every stage of the other that holds some of its layers.

    Raises WorldError where there is no link.
    """
    shares: dict[tuple[int, int], int] = {}
    for source in prefill.stages:
        for target in decode.stages:
            layers = min(source.last_layer, target.last_layer) - max(source.first_layer, target.first_layer)
            if layers > 0:
                ends = (cluster.index(source.peer), cluster.index(target.peer))
                shares[ends] = shares.get(ends, 0) + layers
    for a, b in shares:
        if a != b and not cluster.gbps[a, b] > 0.0:
            names = f"{cluster.boxes[a].id} to box {cluster.boxes[b].id}"
            raise WorldError(f"pairing {prefill.id} -> {decode.id}: there is no link from box {names}")
    rtt_s = max((float(cluster.rtt_s[a, b]) for a, b in shares if a != b), default=0.0)
    return TransferLinks(tuple(LinkShare(a, b, layers / prefill.layers) for (a, b), layers in shares.items()), rtt_s)
