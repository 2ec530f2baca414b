"""KV transfers from prefill replicas to decode replicas, as flows over the simulated network.

Layerwise, the KV of a step is sent while the step computes it, and that of the last layer is left
when it ends; serialised, all of it is sent after the prefill. Nothing is sent before the decode
replica has reserved blocks for it, and the prefill replica keeps its own until everything has
arrived.
"""

from __future__ import annotations

from math import inf, isnan, nan
from typing import Final, NamedTuple, final

from ..coordinator.plan import Replica
from ..coordinator.planning.model.cluster import Cluster
from .network import Flow, FluidNetwork
from .scenario import WorldError

HOLD_S: Final = 0.25
MARGIN_S: Final = 0.1
"""KV is too late when it has looked so for the former, by more than the latter: as in the running network's engines
(`WaitLimitSettings`)."""


class LinkShare(NamedTuple):
    """The fraction of a request's KV that goes from one box to another (indices)."""

    source: int
    target: int
    fraction: float


class TransferLinks(NamedTuple):
    """All links between the boxes of two replicas, and their longest round trip."""

    shares: tuple[LinkShare, ...]
    rtt_s: float


@final
class KVTransfer:
    """The transfer of one request's KV. `unsent`: tokens that are computed and not in any flow; `present`: the first
    ones that are in the receiver's cache, as far as they are not computed yet, and are not sent;
    `is_short`: it is sent after the prefill whatever others are; `is_layerwise`: some of it was sent
    while the prompt was computed."""

    __slots__ = (
        "begun_at", "flows", "has_room", "is_layerwise", "is_prefilled", "is_short", "layers", "limited", "links",
        "prefilled_at", "present", "request", "token_bytes", "unsent"
    )  # fmt: skip

    def __init__(self, request: int, links: TransferLinks, token_bytes: float, layers: int) -> None:
        self.request = request
        self.is_short = False
        self.is_layerwise = False
        self.links = links
        self.token_bytes = token_bytes
        self.layers = layers
        self.begun_at = nan
        self.has_room = False  # the decode replica has reserved blocks
        self.is_prefilled = False  # all of it
        self.prefilled_at = nan
        self.unsent = 0
        self.present = 0
        self.flows: dict[int, Flow] = {}  # under way, by key
        self.limited: list[tuple[Flow, LinkShare, float]] = []  # no faster than they are computed; bytes of a layer


@final
class KVTransfers:
    """The flows of all transfers. The caller advances the network and calls `end_flow`. `wait_limit`: see
    `SimSettings.kv_wait_limit`."""

    def __init__(self, network: FluidNetwork, *, layerwise: bool, wait_limit: float = inf) -> None:
        self._network = network
        self._wait_limit = wait_limit
        self._layerwise = layerwise
        self._by_flow: dict[int, KVTransfer] = {}
        self.sent_bytes: dict[tuple[int, int], float] = {}
        """By (source box, target box); includes transfers that were abandoned later."""

    def start_prefill_step(self, transfer: KVTransfer, tokens: int, until: float, now: float) -> None:
        """A step has begun that prefills so many tokens and ends at `until`."""
        self._lift_limits(transfer, now)
        here = min(tokens, transfer.present)
        transfer.present -= here
        tokens -= here
        if not tokens:
            return
        layers = transfer.layers
        streams = self._layerwise and not transfer.is_short
        if not (streams and transfer.has_room and until > now and layers > 1):
            transfer.unsent += tokens
            return
        transfer.is_layerwise = True
        share_early = (layers - 1) / layers
        for share in transfer.links.shares:
            size = tokens * transfer.token_bytes * share.fraction
            flow = self._start(transfer, share, size, now, limit=size * share_early / (until - now))
            transfer.limited.append((flow, share, size / layers))

    def end_prefill(self, transfer: KVTransfer, now: float) -> None:
        """The whole prompt is computed: nothing limits its KV any more but the links."""
        transfer.is_prefilled, transfer.prefilled_at = True, now
        self._lift_limits(transfer, now)
        self._send_rest(transfer, now)

    def grant_room(self, transfer: KVTransfer, now: float, present: int = 0) -> None:
        """The decode replica has reserved blocks: what is computed may be sent, but for the first `present` tokens,
        which it has in its cache."""
        transfer.has_room = True
        here = min(present, transfer.unsent)
        transfer.unsent, transfer.present = transfer.unsent - here, present - here
        if transfer.is_prefilled:
            self._send_rest(transfer, now)

    def end_flow(self, flow: Flow) -> KVTransfer | None:
        """A flow has ended. Returns its transfer if that was the last of the KV."""
        transfer = self._by_flow.pop(flow.key)
        del transfer.flows[flow.key]
        return transfer if transfer.is_prefilled and not transfer.flows and not transfer.unsent else None

    @property
    def may_be_late(self) -> bool:
        """Whether KV is given up at all."""
        return self._wait_limit < inf

    def is_late(self, transfer: KVTransfer, compute_s: float, now: float) -> bool:
        """Whether it looks as if computing the prompt in `compute_s` were better than to wait."""
        left_s = 0.0
        for flow in transfer.flows.values() if transfer.has_room else ():
            left = flow.left - flow.rate * (now - flow.since)
            left_s = max(left_s, left / flow.rate if flow.rate > 0.0 else inf)
        return left_s > self._wait_limit * compute_s + MARGIN_S

    def abandon(self, transfer: KVTransfer, now: float) -> None:
        """Stop the transfer: its request has left this route."""
        for key, flow in transfer.flows.items():
            self._network.stop(flow, now)
            del self._by_flow[key]
        transfer.flows.clear()
        transfer.limited.clear()

    def _send_rest(self, transfer: KVTransfer, now: float) -> None:
        if not (transfer.has_room and transfer.unsent):
            return
        for share in transfer.links.shares:
            self._start(transfer, share, transfer.unsent * transfer.token_bytes * share.fraction, now)
        transfer.unsent = 0

    def _start(self, transfer: KVTransfer, share: LinkShare, size: float, now: float, limit: float = inf) -> Flow:
        flow = self._network.start(share.source, share.target, size, now, limit=limit)
        if isnan(transfer.begun_at):
            transfer.begun_at = now
        ends = (share.source, share.target)
        self.sent_bytes[ends] = self.sent_bytes.get(ends, 0.0) + size
        transfer.flows[flow.key] = flow
        self._by_flow[flow.key] = transfer
        return flow

    def _lift_limits(self, transfer: KVTransfer, now: float) -> None:
        for flow, share, layer in transfer.limited:
            # The next step came late: all but the last layer had been sent by then, and that layer is sent now.
            if flow.done:
                self.sent_bytes[share.source, share.target] -= layer
                self._start(transfer, share, layer, now)
            else:
                self._network.lift_limit(flow, now, at_least=layer)
        transfer.limited.clear()


def links_between(cluster: Cluster, prefill: Replica, decode: Replica) -> TransferLinks:
    """From every prefill stage to every decode stage with some of its layers. Raises WorldError
    without a link."""
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
