"""A node's metrics, beside those of its engine: `p2pserve:*`, in Prometheus's text format.

    counted = NodeCounts()
    log.followers.append(counted.on_event)
    text = render_metrics(counted, Snapshot(...))

What happens is counted as the node's log tells it; how things stand is looked at when somebody asks. Every family is
there from the start, so that a dashboard of an idle node is not empty, and no label takes values that others choose
without a bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from ...coordinator.plan import Deadlines
from .values import EventKind, Fact, LinkSummary, NodeEvent, NodeSummary

PREFIX: Final = "p2pserve:"
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS: Final = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
OUTCOMES: Final = ("stop", "length", "error", "cancelled")
REPLAYS: Final = ("decode", "prefill")
PHASES: Final = ("prefill", "decode", "mixed", "none")
REASONS: Final = {  # of failed KV transfers: what a reason has in it -> its label
    "deadline": "deadline", "within": "deadline", "lost": "lost", "gone": "lost", "closed": "lost", "reset": "lost",
    "cancel": "cancelled", "abort": "cancelled", "prefill ended": "prefill", "did not begin": "prefill",
    "finite": "unsound", "nan": "unsound", "room": "memory", "engine": "engine",
}  # fmt: skip
OTHER: Final = "other"
NO_DEADLINES: Final = Deadlines()


@final
class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """One value more."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has them: how many are at most each bound."""
        total, found = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


def are_met(deadlines: Deadlines, facts: Mapping[str, Fact]) -> bool:
    """By a request that has ended like this: what is asked for, and an answer without an error."""
    limits = {"ttft_s": deadlines.ttft_s, "tpot_s": deadlines.tpot_s, "e2e_s": deadlines.e2e_s}
    late = any(limit and _number(facts, name) > limit for name, limit in limits.items())
    return not late and facts.get("finish") in ("stop", "length")


@final
@dataclass(slots=True)
class NodeCounts:
    """What has happened since the node was started. `deadlines` are those that attainment is measured by."""

    deadlines: Deadlines = NO_DEADLINES
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys((kind.value for kind in EventKind), 0))
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    attained: int = 0
    judged: int = 0
    replays: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REPLAYS, 0))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    box_usd: float = 0.0
    traffic_usd: float = 0.0
    raw_bytes: int = 0
    wire_bytes: int = 0
    resent_bytes: int = 0
    codec_s: float = 0.0
    failed_transfers: dict[str, int] = field(default_factory=lambda: dict.fromkeys({*REASONS.values(), OTHER}, 0))
    transfer_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    visible_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def on_event(self, event: NodeEvent) -> None:
        """Count what the log has just been told."""
        self.events[event.kind] = self.events.get(event.kind, 0) + 1
        match event.kind:
            case EventKind.REQUEST_ENDED:
                self._on_request(event.facts)
            case EventKind.REQUEST_RECOVERED:
                kind = str(event.facts.get("type", ""))
                self.replays[kind] = self.replays.get(kind, 0) + 1
            case EventKind.TRANSFER_ENDED | EventKind.TRANSFER_FAILED:
                self._on_transfer(event)
            case _:
                pass

    @property
    def attainment(self) -> float:
        """The share of requests that met their deadlines; 1 before the first."""
        return self.attained / self.judged if self.judged else 1.0

    def _on_request(self, facts: Mapping[str, Fact]) -> None:
        outcome = str(facts.get("finish", ""))
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
        self.prompt_tokens += _whole(facts, "prompt_tokens")
        self.completion_tokens += _whole(facts, "completion_tokens")
        self.box_usd += _number(facts, "box_usd")
        self.traffic_usd += _number(facts, "traffic_usd")
        for name, histogram in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("e2e_s", self.e2e_s)):
            if name in facts:
                histogram.observe(_number(facts, name))
        if outcome != "cancelled":  # who goes away has not been failed
            self.judged += 1
            self.attained += are_met(self.deadlines, facts)

    def _on_transfer(self, event: NodeEvent) -> None:
        facts = event.facts
        self.raw_bytes += _whole(facts, "raw_bytes")
        self.wire_bytes += _whole(facts, "wire_bytes")
        self.resent_bytes += _whole(facts, "resent_bytes")
        self.codec_s += _number(facts, "codec_s")
        if event.kind == EventKind.TRANSFER_FAILED:
            self.failed_transfers[reason_label(str(facts.get("failed", "")))] += 1
            return
        self.transfer_s.observe(_number(facts, "span_s"))
        self.visible_s.observe(_number(facts, "visible_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """How things stand at a node: what it knows of the network, and of itself."""

    node: str
    nodes: Sequence[NodeSummary] = ()
    links: Sequence[LinkSummary] = ()
    plan: tuple[int, int] = (0, 0)  # epoch and version; zeros: it follows none
    is_coordinator: bool = False
    waiting: int = 0  # requests at its gateway
    up_s: float = 0.0


def reason_label(reason: str) -> str:
    """The label of a failed transfer: one of a few, whatever a peer has said."""
    text = reason.lower()
    return next((label for part, label in REASONS.items() if part in text), OTHER)


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
    yield _gauge("plan_epoch", "Epoch of the plan that this node follows; 0: none", now.plan[0])
    yield _gauge("plan_generation", "Version of that plan", now.plan[1])
    yield _gauge("is_coordinator", "Whether this node coordinates", float(now.is_coordinator))
    yield _gauge("requests_waiting", "Requests at this gateway that have not ended", now.waiting)
    yield _gauge("uptime_seconds", "Since this node was started", now.up_s)
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


def _whole(facts: Mapping[str, Fact], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _number(facts: Mapping[str, Fact], name: str) -> float:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
