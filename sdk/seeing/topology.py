"""A network as one looks at it: sites, boxes, links and what flows over them. Plain values, made of a node's status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from ...coordinator import Plan
from ...coordinator.names import name_of
from ...node.admin import naming
from ...node.adverts import plans_of
from ...node.messages import Status
from ...node.observing.summaries import summarise_links, summarise_nodes
from ...node.observing.values import LinkSummary, NodeSummary
from ..errors import UsageError

LinkKey = tuple[str, str]
NO_SITE = "no site"
GONE = frozenset({"dead", "left"})


class KvFlow(NamedTuple):
    """KV from one replica to another: the plan's share of all requests, what has gone so far, and how fast it goes."""

    source: str
    target: str
    share: float
    transfers: int
    wire_bytes: int
    relayed_bytes: int
    gbps: float | None = None  # None: it has been looked at only once


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What is shown. `folded`: its boxes are sites, and its links the middle of those between them."""

    nodes: tuple[NodeSummary, ...]
    links: Mapping[LinkKey, LinkSummary]
    flows: tuple[KvFlow, ...] = ()
    plans: tuple[Plan, ...] = ()
    coordinator: str | None = None
    answered_by: str = ""
    folded: bool = False
    left_out: int = 0  # boxes that filters have taken out

    @property
    def sites(self) -> dict[str, list[NodeSummary]]:
        """Its boxes by their sites, in order of name; those that name none come last."""
        found: dict[str, list[NodeSummary]] = {}
        for node in sorted(self.nodes, key=lambda node: (not node.site, node.site, node.id)):
            found.setdefault(node.site or NO_SITE, []).append(node)
        return found

    @property
    def present(self) -> tuple[NodeSummary, ...]:
        """The boxes that are there."""
        return tuple(node for node in self.nodes if node.state not in GONE)

    @property
    def usd_per_hour(self) -> float:
        """What the boxes that are there cost by the hour."""
        return sum(node.usd_per_hour for node in self.present)


def build_topology(
    status: Status, now: float, names: Mapping[str, str] | None = None, before: tuple[Status, float] | None = None
) -> Topology:
    """The topology that a node tells of, at `now` in unix seconds; `before` is an earlier answer, for rates."""
    links = {(link.source, link.target): link for link in summarise_links(status, now)}
    earlier = {(link.source, link.target): link for link in summarise_links(*before)} if before is not None else {}
    seconds = now - before[1] if before is not None else 0.0
    return Topology(
        nodes=summarise_nodes(status, names),
        links=links,
        flows=_find_flows(links, plans_of(status), earlier, seconds),
        plans=plans_of(status),
        coordinator=status.coordinator,
        answered_by=status.answered_by,
    )


def _find_flows(
    links: Mapping[LinkKey, LinkSummary], plans: Iterable[Plan], earlier: Mapping[LinkKey, LinkSummary], seconds: float
) -> tuple[KvFlow, ...]:
    """What the plans want, each of its service's requests, and whatever else there was, by share and size."""
    pairs = [pair for plan in plans for pair in plan.pairings]
    shares = {(pair.prefill, pair.decode): pair.weight for pair in pairs if pair.prefill != pair.decode}
    keys = dict.fromkeys([*shares, *(key for key, link in links.items() if link.kv_transfers)])
    found = []
    for key in keys:
        link, old = links.get(key), earlier.get(key)
        sent = link.kv_bytes if link is not None else 0
        moved = sent - old.kv_bytes if old is not None else 0
        found.append(
            KvFlow(
                source=key[0],
                target=key[1],
                share=shares.get(key, 0.0),
                transfers=link.kv_transfers if link is not None else 0,
                wire_bytes=sent,
                relayed_bytes=link.relayed_bytes if link is not None else 0,
                gbps=max(0, moved) * 8e-9 / seconds if seconds > 0.0 else None,
            )
        )
    return tuple(sorted(found, key=lambda flow: (-flow.share, -flow.wire_bytes, flow.source, flow.target)))


def select(topology: Topology, sites: Iterable[str], boxes: Iterable[str]) -> Topology:
    """Only these sites and boxes, each of which must be there; all where none is named. `boxes` are ids, ends of them,
    or short names. Raises UsageError."""
    wanted_sites, named = tuple(sites), tuple(boxes)
    if not wanted_sites and not named:
        return topology
    known = topology.sites
    for site in wanted_sites:
        if site not in known:
            raise UsageError(f"site: no box is at {site}; there are {', '.join(known)}")
    chosen = {find_box(topology.nodes, name).id for name in named}
    chosen |= {node.id for site in wanted_sites for node in known[site]}
    return replace(
        topology,
        nodes=tuple(node for node in topology.nodes if node.id in chosen),
        links={key: link for key, link in topology.links.items() if chosen.issuperset(key)},
        flows=tuple(flow for flow in topology.flows if flow.source in chosen or flow.target in chosen),
        left_out=len(topology.nodes) - len(chosen),
    )


def find_box(nodes: Iterable[NodeSummary], name: str, field: str = "box") -> NodeSummary:
    """The one box that is called so. Raises UsageError, which names the argument `field`."""
    try:
        return naming.find_box(tuple(nodes), name, field)
    except naming.UnknownBox as error:
        raise UsageError(f"{error}") from None


def fold(topology: Topology) -> Topology:
    """Sites in place of boxes: a site's links are the middle of those of its boxes, and flows are added up."""
    site_of = {node.id: node.site or NO_SITE for node in topology.nodes}
    links: dict[LinkKey, list[LinkSummary]] = {}
    for (source, target), link in topology.links.items():
        links.setdefault((site_of[source], site_of[target]), []).append(link)
    flows: dict[LinkKey, list[KvFlow]] = {}
    for flow in topology.flows:
        key = site_of.get(flow.source, NO_SITE), site_of.get(flow.target, NO_SITE)
        flows.setdefault(key, []).append(flow)
    return replace(
        topology,
        nodes=tuple(_fold_site(site, nodes) for site, nodes in topology.sites.items()),
        links={key: _fold_links(key, found) for key, found in links.items()},
        flows=tuple(_fold_flows(key, found) for key, found in flows.items()),
        folded=True,
    )


def label(node: NodeSummary) -> str:
    """What a box is called for people."""
    return node.name or name_of(node.id)


def labels_of(topology: Topology) -> Callable[[str], str]:
    """What any peer is called for people."""
    known = {node.id: node.id if topology.folded else label(node) for node in topology.nodes}
    return lambda peer: known.get(peer) or name_of(peer)


def _fold_site(site: str, nodes: list[NodeSummary]) -> NodeSummary:
    present = [node for node in nodes if node.state not in GONE]
    kinds: dict[str, int] = {}
    for node in present:
        kinds[node.gpu or "CPU"] = kinds.get(node.gpu or "CPU", 0) + max(1, node.gpus)
    phases = sorted({node.phase for node in present if node.phase})
    return NodeSummary(
        id=site,
        role="site",
        state=f"{len(present)} of {len(nodes)} boxes"
        if len(present) < len(nodes)
        else f"{len(nodes)} box{'es' * (len(nodes) != 1)}",
        address="",
        site=site,
        phase=" ".join(phases)[:128],
        hardware=", ".join(f"{count}x {kind}" for kind, count in sorted(kinds.items()))[:500],
        gpus=sum(node.gpus for node in present),
        emulated=any(node.emulated for node in present),
        running=sum(node.running or 0 for node in present),
        waiting=sum(node.waiting or 0 for node in present),
        usd_per_hour=sum(node.usd_per_hour for node in present),
        is_coordinator=any(node.is_coordinator for node in nodes),
    )


def _fold_links(key: LinkKey, links: list[LinkSummary]) -> LinkSummary:
    measured = [link for link in links if link.known == "measured"] or links
    ages = [link.age_s for link in measured if link.age_s is not None]
    return LinkSummary(
        source=key[0],
        target=key[1],
        gbps=median(link.gbps for link in measured),
        one_stream_gbps=median(link.one_stream_gbps for link in measured),
        streams=round(median(link.streams for link in measured)),
        rtt_s=median(link.rtt_s for link in measured),
        loss=median(link.loss for link in measured),
        jitter_s=median(link.jitter_s for link in measured),
        usd_per_gb=median(link.usd_per_gb for link in measured),
        reachable=any(link.reachable for link in links),
        is_floor=2 * sum(link.is_floor for link in measured) > len(measured),
        known=measured[0].known,
        confidence=median(link.confidence for link in measured),
        reason=f"middle of {len(measured)} links",
        age_s=min(ages) if ages else None,
        kv_transfers=sum(link.kv_transfers for link in links),
        kv_failed=sum(link.kv_failed for link in links),
        kv_bytes=sum(link.kv_bytes for link in links),
        relayed_bytes=sum(link.relayed_bytes for link in links),
    )


def _fold_flows(key: LinkKey, flows: list[KvFlow]) -> KvFlow:
    rates = [flow.gbps for flow in flows if flow.gbps is not None]
    return KvFlow(
        source=key[0],
        target=key[1],
        share=sum(flow.share for flow in flows),
        transfers=sum(flow.transfers for flow in flows),
        wire_bytes=sum(flow.wire_bytes for flow in flows),
        relayed_bytes=sum(flow.relayed_bytes for flow in flows),
        gbps=sum(rates) if rates else None,
    )
