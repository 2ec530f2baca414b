"""A node's metrics, beside those of its engine: `p2pserve:*`, in Prometheus's text format.

    text = render_metrics(counts, Snapshot(...))

What happens is counted (see `counts`); how things stand is looked at when somebody asks. Every family is there from the
start, so that a dashboard of an idle node is not empty, and no label takes values that others choose without a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from ...coordinator.requests.admission import CLASS_LABELS
from .counts import Histogram, NodeCounts
from .values import LinkSummary, NodeSummary

PREFIX: Final = "p2pserve:"
PHASES: Final = ("prefill", "decode", "mixed", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """How things stand at a node: what it knows of the network, and of itself."""

    node: str
    nodes: Sequence[NodeSummary] = ()
    links: Sequence[LinkSummary] = ()
    plans: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by service, epoch and version
    is_coordinator: bool = False
    waiting: int = 0  # requests at its gateway
    refused: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(CLASS_LABELS, 0))  # there, by class
    key_usd: Mapping[str, float] = field(default_factory=dict)  # what each API key's requests have cost
    up_s: float = 0.0


def render_metrics(counts: NodeCounts, snapshot: Snapshot) -> str:
    """All families, in the text format that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(counts, snapshot))
    return generate_latest(registry).decode("utf-8")


def family_names() -> frozenset[str]:
    """The names of all series that any node shows, as expressions of dashboards have them."""
    lines = render_metrics(NodeCounts(), Snapshot(node="n")).splitlines()
    found = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    histograms = {line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith(" histogram")}
    return frozenset(found | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")})


@final
class _Families(Collector):
    def __init__(self, counts: NodeCounts, snapshot: Snapshot) -> None:
        self._counts = counts
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield from _kv_families(self._counts)
        yield from _request_families(self._counts)
        yield from _network_families(self._snapshot)
        yield from _link_families(self._snapshot)
        yield from _cost_families(self._counts, self._snapshot)
        yield _counter("events_total", "Events in this node's log, by kind", "kind", self._counts.events)


def _kv_families(counts: NodeCounts) -> Iterator[Metric]:
    yield _histogram("kv_xfer_time_seconds", "KV transfers sent, first frame to acknowledgement", counts.transfer_s)
    yield _histogram("kv_xfer_visible_seconds", "The part of it after prefill had ended", counts.visible_s)
    yield _total("kv_bytes_raw_total", "KV that was sent, as it lies in the cache", counts.raw_bytes)
    yield _total("kv_bytes_wire_total", "What was sent for it", counts.wire_bytes)
    yield _total("kv_bytes_resent_total", "Of that, what was sent again", counts.resent_bytes)
    yield _total("kv_codec_seconds_total", "Thread time that encoding KV took", counts.codec_s)
    yield _counter("kv_xfer_failed_total", "KV transfers that were not delivered", "reason", counts.failed_transfers)


def _request_families(counts: NodeCounts) -> Iterator[Metric]:
    yield _counter("requests_total", "Requests that have ended at this gateway", "outcome", counts.requests)
    yield _histogram("request_ttft_seconds", "Time to the first token, at the gateway", counts.ttft_s)
    yield _histogram("request_tpot_seconds", "Time per later token, at the gateway", counts.tpot_s)
    yield _histogram("request_e2e_seconds", "Time to the last token, at the gateway", counts.e2e_s)
    yield _total("prompt_tokens_total", "Prompt tokens of requests that have ended here", counts.prompt_tokens)
    yield _total("completion_tokens_total", "Tokens of their answers", counts.completion_tokens)
    yield _counter("replays_total", "Requests that went on elsewhere, or without their KV", "type", counts.replays)
    yield _gauge("slo_attainment_ratio", "Share of requests here that met their deadlines", counts.attainment)


def _network_families(now: Snapshot) -> Iterator[Metric]:
    epochs = GaugeMetricFamily(f"{PREFIX}plan_epoch", "Epoch of the plan that this node follows", labels=["service"])
    versions = GaugeMetricFamily(f"{PREFIX}plan_generation", "Version of that plan", labels=["service"])
    for service, (epoch, version) in now.plans.items():
        epochs.add_metric([service], epoch)
        versions.add_metric([service], version)
    yield from (epochs, versions)
    yield _gauge("is_coordinator", "Whether this node coordinates", float(now.is_coordinator))
    yield _gauge("requests_waiting", "Requests at this gateway that have not ended", now.waiting)
    yield _counter("requests_refused_total", "Requests that this gateway had no place for", "class", now.refused)
    yield _gauge("uptime_seconds", "Since this node was started", now.up_s)
    own = next((node for node in now.nodes if node.id == now.node), None)
    tokens = {"computed": own.prefilled_tokens, "prefix cache": own.cached_tokens} if own is not None else {}
    yield _counter("prefill_tokens_total", "Prompt tokens of this box, by where their KV is from", "source", tokens)
    usage, quota = (own.kv_usage or 0.0, own.kv_quota) if own is not None else (0.0, 1.0)
    yield _gauge("kv_usage_ratio", "Part of the box's KV memory that this node's model has in use", usage)
    yield _gauge("kv_quota_ratio", "Part that it may have when models beside it need theirs", quota)
    members = GaugeMetricFamily(f"{PREFIX}members", "Boxes by state, as this node sees them", labels=["state"])
    states = [node.state for node in now.nodes]
    for state in ("alive", "draining", "suspect", "dead", "left"):
        members.add_metric([state], states.count(state))
    yield members
    phases = GaugeMetricFamily(f"{PREFIX}phase", "1 for what a box does by the plan", labels=["node", "phase"])
    for node in now.nodes or [NodeSummary(id=now.node, role="worker", state="alive", address="")]:
        for phase in PHASES:
            phases.add_metric([node.id, phase], float((node.phase or "none") == phase))
    yield phases
    roles = GaugeMetricFamily(f"{PREFIX}role", "1 for the role of a box", labels=["node", "role"])
    for node in now.nodes:
        roles.add_metric([node.id, node.role], 1.0)
    yield roles


def _link_families(now: Snapshot) -> Iterator[Metric]:
    links = [link for link in now.links if link.source == now.node]  # all boxes together show all links
    rate = GaugeMetricFamily(
        f"{PREFIX}link_bandwidth_bytes_per_second", "Capacity over many streams", labels=["src", "dst", "known"]
    )
    rtt = GaugeMetricFamily(f"{PREFIX}link_rtt_seconds", "Round trip, smoothed", labels=["src", "dst"])
    loss = GaugeMetricFamily(f"{PREFIX}link_loss_ratio", "Share of pings that were lost", labels=["src", "dst"])
    sent = CounterMetricFamily(f"{PREFIX}link_kv_bytes", "KV that went from box to box", labels=["src", "dst"])
    for link in links:
        rate.add_metric([link.source, link.target, link.known], link.gbps * 1.25e8 if link.reachable else 0.0)
        rtt.add_metric([link.source, link.target], link.rtt_s)
        loss.add_metric([link.source, link.target], link.loss)
        sent.add_metric([link.source, link.target], link.kv_bytes)
    yield from (rate, rtt, loss, sent)


def _cost_families(counts: NodeCounts, now: Snapshot) -> Iterator[Metric]:
    own = next((node.usd_per_hour for node in now.nodes if node.id == now.node), 0.0)
    cost = CounterMetricFamily(f"{PREFIX}cost_usd", "What this box has cost since it was started", labels=["node"])
    cost.add_metric([now.node], own * now.up_s / 3600.0)
    yield cost
    price = GaugeMetricFamily(f"{PREFIX}price_usd_per_hour", "What a box costs", labels=["node"])
    for node in now.nodes:
        price.add_metric([node.id], node.usd_per_hour)
    yield price
    spent = {"box": counts.box_usd, "traffic": counts.traffic_usd}
    yield _counter("request_cost_usd_total", "What requests at this gateway have cost, by what for", "part", spent)
    yield _counter("key_cost_usd_total", "What requests at this gateway have cost, by API key", "key", now.key_usd)


def _counter(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    found = CounterMetricFamily(f"{PREFIX}{name.removesuffix('_total')}", about, labels=[label])
    for key in sorted(values):
        found.add_metric([key], values[key])
    return found


def _total(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name.removesuffix('_total')}", about, value=value)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", about, value=value)


def _histogram(name: str, about: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(f"{PREFIX}{name}", about, buckets=values.cumulative(), sum_value=values.sum)
