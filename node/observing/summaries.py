"""Boxes, links and requests as people look at them, from what a node answers to `status` and what its log has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ...coordinator.names import naming
from ...kvtransport.probing.figures import LinkFigures, Source, streams_for
from ...kvtransport.probing.sites import SiteLinks
from ..adverts import plans_of
from ..messages import Advert, LinkTable, NodeStatus, Status
from .traces import cost_of
from .values import MAX_REASONS, EventKind, Fact, KvTally, LinkSummary, NodeEvent, NodeSummary, RequestSummary

_NO_TABLE = LinkTable()
ALIVE = "alive"
CLIENT = "client"


def summarise_nodes(status: Status, names: Mapping[str, str] | None = None) -> tuple[NodeSummary, ...]:
    """The boxes of a network, without its clients; `names`: other ones than those that follow from their ids."""
    boxes = [node for node in status.nodes if node.role != CLIENT]
    name, given = naming(node.peer for node in boxes), names or {}
    return tuple(_summarise_node(node, status, given.get(node.peer) or name(node.peer)) for node in boxes)


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
    sent = {
        (node.peer, target): sent
        for node in nodes
        if node.advert is not None and node.advert.served is not None
        for target, sent in node.advert.served.kv_sent.items()
    }
    found = []
    for source in tables:
        for target in tables:
            figures = known.get((source, target)) if source != target else None
            if figures is not None:
                own = (source, target) in told
                link = _summarise_link(source, target, figures, tables, is_told=own, now=now)
                found.append(_with_flow(link, sent.get((source, target), KvTally())))
    return tuple(found)


def services_of(nodes: Iterable[NodeSummary]) -> tuple[str, ...]:
    """What is served, in order of name."""
    return tuple(sorted({node.service for node in nodes if node.service}))


def _summarise_node(node: NodeStatus, status: Status, name: str) -> NodeSummary:
    advert, table = node.advert, node.links or _NO_TABLE
    found = NodeSummary(
        id=node.peer,
        name=name,
        role=node.role,
        state="draining" if advert is not None and advert.draining and node.state == ALIVE else node.state,
        address=node.address,
        is_coordinator=node.peer == status.coordinator,
        site=table.site,
        rtt_s=node.rtt_s,
        gone_s=node.gone_s,
        tokens_s=node.tokens_s,
        up_usd_per_gb=table.box.up_usd_per_gb,
        down_usd_per_gb=table.box.down_usd_per_gb,
    )
    if advert is None:
        return found
    replica = next(filter(None, (plan.replica_of(node.peer) for plan in plans_of(status))), None)
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
        kv_quota=min(1.0, stats.kv_quota) if stats is not None else 1.0,
        kv_tokens=engine.kv_tokens if engine is not None else None,
        requests_s=advert.demand.requests_s if advert.demand is not None else None,
        refused_s=advert.served.refused_s if advert.served is not None else 0.0,
        usd_per_hour=advert.usd_per_hour,
        ends_in_s=advert.ends_in_s,
        prefilled_tokens=advert.served.prefilled_tokens if advert.served is not None else 0,
        decoded_tokens=advert.served.decoded_tokens if advert.served is not None else 0,
        cached_tokens=advert.served.cached_tokens if advert.served is not None else 0,
    )


def _with_flow(link: LinkSummary, sent: KvTally) -> LinkSummary:
    return replace(
        link,
        kv_transfers=sent.transfers,
        kv_failed=sent.failed,
        kv_bytes=sent.wire_bytes,
        relayed_bytes=sent.relayed_bytes,
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


def summarise_requests(events: Iterable[NodeEvent]) -> tuple[RequestSummary, ...]:
    """The requests of a gateway, oldest first, from its log: as far as that goes back."""
    found: dict[str, RequestSummary] = {}
    for event in events:
        if event.kind == EventKind.REQUEST_BEGUN:
            found[event.request] = _begun(event)
        elif event.request in found:
            found[event.request] = _follow(found[event.request], event)
    return tuple(found.values())


def _begun(event: NodeEvent) -> RequestSummary:
    return RequestSummary(
        id=event.request,
        gateway=event.node,
        client=event.peer,
        client_request=_text(event.facts.get("client_request"))[:128],
        service=_text(event.facts.get("service")) or None,
        arrived=event.time,
        prompt_tokens=_count(event.facts.get("prompt_tokens")) or 0,
    )


def _follow(request: RequestSummary, event: NodeEvent) -> RequestSummary:
    """What it is after an event of its gateway."""
    facts = event.facts
    match event.kind:
        case EventKind.REQUEST_ROUTED:
            prefill, decode = _text(facts.get("prefill"))[:128], _text(facts.get("decode"))[:128]
            attempts = _count(facts.get("attempt")) or 0
            return replace(request, state="routed", prefill=prefill, decode=decode, attempts=attempts)
        case EventKind.REQUEST_FIRST_TOKEN:
            return replace(request, state="answering", ttft_s=max(0.0, event.time - request.arrived))
        case EventKind.REQUEST_RECOVERED:
            return replace(request, recovered=(*request.recovered, _text(facts.get("why")))[-MAX_REASONS:])
        case EventKind.REQUEST_ENDED:
            return replace(
                request,
                state=_text(facts.get("finish"))[:128],
                completion_tokens=_count(facts.get("completion_tokens")),
                ttft_s=_seconds(facts.get("ttft_s")),
                tpot_s=_seconds(facts.get("tpot_s")),
                e2e_s=_seconds(facts.get("e2e_s")),
                raw_bytes=_count(facts.get("raw_bytes")) or 0,
                wire_bytes=_count(facts.get("wire_bytes")) or 0,
                error=_text(facts.get("error")),
                cost=cost_of(event),
            )
        case _:
            return request


def _text(value: Fact | None) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Fact | None) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _seconds(value: Fact | None) -> float | None:
    return value if isinstance(value, float) and 0.0 <= value <= 1e6 else None
