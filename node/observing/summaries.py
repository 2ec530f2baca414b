"""Boxes, links and requests as people look at them, from what a node answers to `status` and what its log has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ...kvtransport.probing.figures import LinkFigures, Source, streams_for
from ...kvtransport.probing.sites import SiteLinks
from ..messages import Advert, LinkTable, NodeStatus, Status
from .values import LinkSummary, NodeSummary

_NO_TABLE = LinkTable()
ALIVE = "alive"
CLIENT = "client"


def summarise_nodes(status: Status, names: Mapping[str, str] | None = None) -> tuple[NodeSummary, ...]:
    """The boxes of a network, without its clients; `names` are short ones for people."""
    names = names or {}
    return tuple(
        _summarise_node(node, status, names.get(node.peer, "")) for node in status.nodes if node.role != CLIENT
    )


def summarise_links(status: Status, now: float) -> tuple[LinkSummary, ...]:
    """Every link of which somebody has told, and those that their sites tell of; `now` in unix seconds."""
    nodes = [node for node in status.nodes if node.role != CLIENT and node.state == ALIVE]
    tables = {node.peer: node.links or _NO_TABLE for node in nodes}
    told = {
        (source, target): figures
        for source, table in tables.items()
        for target, figures in table.links.items()
        if target in tables
    }
    known = SiteLinks(told, {peer: table.site for peer, table in tables.items()})
    found = []
    for source in tables:
        for target in tables:
            figures = known.get((source, target)) if source != target else None
            if figures is not None:
                own = (source, target) in told
                found.append(_summarise_link(source, target, figures, tables, is_told=own, now=now))
    return tuple(found)


def services_of(nodes: Iterable[NodeSummary]) -> tuple[str, ...]:
    """What is served, in order of name."""
    return tuple(sorted({node.service for node in nodes if node.service}))


def _summarise_node(node: NodeStatus, status: Status, name: str) -> NodeSummary:
    advert, table, plan = node.advert, node.links or _NO_TABLE, status.plan
    found = NodeSummary(
        id=node.peer,
        name=name,
        role=node.role,
        state="draining" if advert is not None and advert.draining and node.state == ALIVE else node.state,
        address=node.address,
        is_coordinator=node.peer == status.coordinator,
        site=table.site,
        rtt_s=node.rtt_s,
        up_usd_per_gb=table.box.up_usd_per_gb,
        down_usd_per_gb=table.box.down_usd_per_gb,
    )
    if advert is None:
        return found
    replica = plan.replica_of(node.peer) if plan is not None else None
    stages = [stage for stage in replica.stages if stage.peer == node.peer] if replica is not None else []
    layers = (stages[0].first_layer, stages[0].last_layer) if stages else None
    return _with_advert(found, advert, replica.phase.value if replica is not None else "", layers)


def _with_advert(node: NodeSummary, advert: Advert, phase: str, layers: tuple[int, int] | None) -> NodeSummary:
    hardware, engine, stats = advert.hardware, advert.engine, advert.stats
    return replace(
        node,
        phase=phase,
        pinned=advert.phase.value if advert.phase is not None else "",
        hardware=hardware.summary(),
        gpus=len(hardware.gpus),
        gpu=hardware.gpus[0].name if hardware.gpus else "",
        emulated=hardware.emulated,
        service=advert.model.service if advert.model is not None else "",
        engine=f"{engine.engine} on {engine.device}" if engine is not None and engine.engine else "",
        engine_state=engine.state if engine is not None else "",
        engine_detail=engine.detail if engine is not None else "",
        layers=layers,
        running=stats.running if stats is not None else None,
        waiting=stats.waiting if stats is not None else None,
        kv_usage=min(1.0, stats.kv_usage) if stats is not None else None,
        kv_tokens=engine.kv_tokens if engine is not None else None,
        requests_s=advert.demand.requests_s if advert.demand is not None else None,
        usd_per_hour=advert.usd_per_hour,
    )


def _summarise_link(
    source: str, target: str, link: LinkFigures, tables: Mapping[str, LinkTable], *, is_told: bool, now: float
) -> LinkSummary:
    one, other = tables[source].box, tables[target].box
    bounded = link.bounded(one.up_gbps, other.down_gbps)
    billed = one.up_usd_per_gb + other.down_usd_per_gb
    return LinkSummary(
        source=source,
        target=target,
        gbps=bounded.capacity_gbps,
        one_stream_gbps=bounded.one_stream_gbps,
        streams=streams_for(bounded.capacity_gbps, link.rtt_s, bounded.one_stream_gbps),
        rtt_s=link.rtt_s,
        loss=link.loss,
        jitter_s=link.jitter_s,
        usd_per_gb=billed if link.usd_per_gb is None else link.usd_per_gb,
        reachable=link.reachable,
        is_floor=link.capacity_is_floor,
        known=link.source.value if is_told else Source.INFERRED.value,
        confidence=link.rate_confidence,
        reason=link.reason if is_told else f"as between their sites: {link.reason}",
        age_s=max(0.0, now - link.measured_at) if link.measured_at else None,
    )
