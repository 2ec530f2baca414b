"""Pairs of a prefill and a decode replica, and the links that KV takes between them.

Each box of the prefill replica sends each box of the decode replica the layers that both hold, all
of them at the same time, over a direct link each. A transfer takes as long as the slowest of these,
or as a box takes to send or to receive all that is its part. Links inside a box have no common
limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...costs.replica import Hop
from ...plan import Phase
from ..model.cluster import Cluster
from ..model.link_share import MOST, LinkShares
from .flow import LinkCapacities, LinkDemand
from .parallel import LOCAL_RTT_S

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Spans = tuple[tuple[int, float, float], ...]
"""Boxes in layer order: (box, first, last), with the layers as shares of the model."""

ROUNDING: Final = 1e-9
"""Shares of layers below this are none."""


class KVHolder(NamedTuple):
    """A replica as its neighbours see it."""

    phase: Phase
    spans: Spans


class ClusterLinks:
    """The cluster's links, with those inside of boxes on the diagonals. `capacities`: what plans
    may count on."""

    def __init__(self, cluster: Cluster, shares: LinkShares) -> None:
        gbps, rtt = cluster.gbps.copy(), cluster.rtt_s.copy()
        # what a box can send or take in all is at least its fastest link; nothing says that it were more
        away = np.where(np.eye(len(gbps), dtype=bool), 0.0, gbps)
        rates = gbps.copy(), away.max(axis=1), away.max(axis=0)
        self._rates = LinkCapacities(*rates)
        self.capacities = LinkCapacities(*(shares.of(one) * one for one in rates))
        np.fill_diagonal(gbps, [box.gpu_link_gbps for box in cluster.boxes])
        np.fill_diagonal(rtt, LOCAL_RTT_S)
        self.latency_s = rtt / 2
        # Requests come to the gateways of all boxes alike; inside a box there is no way to go.
        self.control_s = np.where(np.eye(len(rtt), dtype=bool), 0.0, cluster.rtt_s).mean(axis=0)
        with np.errstate(divide="ignore"):
            self.gigabit_s = 1.0 / gbps
            self.out_gigabit_s, self.into_gigabit_s = 1.0 / rates[1], 1.0 / rates[2]
        self._gbps, self._rtt_s = gbps.tolist(), rtt.tolist()

    def hops(self, boxes: Sequence[int]) -> tuple[tuple[Hop, ...], ...]:
        """[from][to] among these boxes; nothing for one box."""
        if len(boxes) < 2:
            return ()
        return tuple(tuple(Hop(self._rtt_s[a][b], self._gbps[a][b]) for b in boxes) for a in boxes)

    def use(self, used: Array) -> Array:
        """[from, to]: the share of a link's rate that is taken, or of its ends', when `used` Gb/s
        flow."""
        if not used.any():
            return used
        out, into = used.sum(axis=1, keepdims=True), used.sum(axis=0, keepdims=True)
        rates = self._rates
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.maximum(used / rates.between, np.maximum(out / rates.out[:, None], into / rates.into))
        return np.asarray(np.nan_to_num(share, nan=0.0, posinf=MOST))


class ReplicaPairs(NamedTuple):
    """By pair: indices of the replicas, seconds until the first byte and per Gb, what goes over which
    links, and the seconds in which its replicas and a gateway hear each other.

    A replica that keeps its requests is a pair with itself, and takes no time to send KV.
    """

    prefill: Index
    decode: Index
    latency_s: Array
    gigabit_s: Array
    link_demands: list[tuple[LinkDemand, ...]]
    control_s: Array


def pair_replicas(holders: Sequence[KVHolder], links: ClusterLinks, gigabits: float) -> ReplicaPairs:
    """All pairs that can: prefill to decode, prefill to mixed, mixed to decode, and every mixed one
    with itself.

    One mixed replica does not send to another, for which it would rather have kept the request.
    Pairs without a link are left out. `gigabits`: of the KV of an average request.
    """
    kept = np.array([i for i, holder in enumerate(holders) if holder.phase is Phase.MIXED], dtype=np.intp)
    nothing = np.zeros(len(kept))
    control_s = links.control_s[[holder.spans[0][0] for holder in holders]]
    own = ReplicaPairs(kept, kept, nothing, nothing, [()] * len(kept), control_s[kept])
    prefills = [i for i, holder in enumerate(holders) if holder.phase is not Phase.DECODE]
    decodes = [i for i, holder in enumerate(holders) if holder.phase is not Phase.PREFILL]
    if len(kept) == len(prefills) == len(decodes) or not prefills or not decodes:
        return own
    alpha, gigabit_s = _slowest_links([holders[i].spans for i in prefills], [holders[i].spans for i in decodes], links)
    is_prefill = np.array([holders[i].phase is Phase.PREFILL for i in prefills])
    is_decode = np.array([holders[i].phase is Phase.DECODE for i in decodes])
    rows, columns = np.nonzero((is_prefill[:, None] | is_decode[None, :]) & np.isfinite(gigabit_s))
    prefill, decode = np.array(prefills)[rows], np.array(decodes)[columns]
    link_demands = [
        _link_demands(holders[i].spans, holders[j].spans, gigabits)
        for i, j in zip(prefill.tolist(), decode.tolist(), strict=True)
    ]
    return ReplicaPairs(
        np.concatenate((kept, prefill)), np.concatenate((kept, decode)),
        np.concatenate((nothing, alpha[rows, columns])), np.concatenate((nothing, gigabit_s[rows, columns])),
        own.link_demands + link_demands, np.concatenate((own.control_s, control_s[prefill] + control_s[decode])),
    )  # fmt: skip


def _slowest_links(prefills: Sequence[Spans], decodes: Sequence[Spans], links: ClusterLinks) -> tuple[Array, Array]:
    """[prefill, decode]: the slowest pair of boxes that share layers, in latency, and in time per
    Gb of a request, which a box that sends or receives for several may take longer for."""
    box_r, first_r, last_r, start_r = _flatten_spans(prefills)
    box_w, first_w, last_w, start_w = _flatten_spans(decodes)
    shared = np.minimum(last_r[:, None], last_w) - np.maximum(first_r[:, None], first_w)
    boxes = np.ix_(box_r, box_w)
    together = shared > ROUNDING
    alpha = np.where(together, links.latency_s[boxes], 0.0)
    with np.errstate(invalid="ignore"):
        gigabit_s = np.where(together, links.gigabit_s[boxes] * shared, 0.0)
    if len(box_r) > len(prefills) or len(box_w) > len(decodes):
        alpha = np.maximum.reduceat(np.maximum.reduceat(alpha, start_r, axis=0), start_w, axis=1)
        gigabit_s = np.maximum.reduceat(np.maximum.reduceat(gigabit_s, start_r, axis=0), start_w, axis=1)
        away = np.where(together & (box_r[:, None] != box_w), shared, 0.0)
        with np.errstate(invalid="ignore"):
            out_s = np.nan_to_num(np.add.reduceat(away, start_w, axis=1) * links.out_gigabit_s[box_r, None])
            into_s = np.nan_to_num(np.add.reduceat(away, start_r, axis=0) * links.into_gigabit_s[box_w])
        for end_s in (np.maximum.reduceat(out_s, start_r, axis=0), np.maximum.reduceat(into_s, start_w, axis=1)):
            gigabit_s = np.maximum(gigabit_s, end_s)
    return alpha, gigabit_s


def _flatten_spans(replicas: Sequence[Spans]) -> tuple[Index, Array, Array, Index]:
    """Boxes, first and last layers of all replicas, and where each one's begin."""
    box, first, last = zip(*(span for spans in replicas for span in spans), strict=True)
    counts = np.array([len(spans) for spans in replicas])
    return np.array(box), np.array(first), np.array(last), np.concatenate(([0], np.cumsum(counts)[:-1]))


def _link_demands(prefill: Spans, decode: Spans, gigabits: float) -> tuple[LinkDemand, ...]:
    """Between different boxes only."""
    if len(prefill) == len(decode) == 1:
        source, target = prefill[0][0], decode[0][0]
        return (LinkDemand(source, target, gigabits),) if source != target else ()
    found = []
    for source, first_r, last_r in prefill:
        for target, first_w, last_w in decode:
            shared = min(last_r, last_w) - max(first_r, first_w)
            if shared > ROUNDING and source != target:
                found.append(LinkDemand(source, target, shared * gigabits))
    return tuple(found)
