"""Metrics: every family from the start, what events count for, and a dashboard that only asks for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2pserve.coordinator.plan import Deadlines
from p2pserve.node.observing.counts import Histogram, NodeCounts, are_met, reason_label
from p2pserve.node.observing.metrics import PREFIX, Snapshot, family_names, render_metrics
from p2pserve.node.observing.values import EventKind, LinkSummary, NodeSummary

from .logs import ENDED, GATEWAY, REQUEST, event, request_events

DASHBOARD = Path(__file__).resolve().parents[4] / "sdk" / "grafana" / "p2pserve.json"
WANTED = (
    "kv_xfer_time_seconds", "kv_bytes_raw_total", "kv_bytes_wire_total", "kv_codec_seconds_total",
    "kv_xfer_failed_total", "link_bandwidth_bytes_per_second", "link_rtt_seconds", "plan_generation", "phase", "role",
    "replays_total", "slo_attainment_ratio", "cost_usd_total", "request_cost_usd_total",
    "key_cost_usd_total",
)  # fmt: skip


def samples(counts: NodeCounts, snapshot: Snapshot | None = None) -> dict[tuple[str, tuple[str, ...]], float]:
    text = render_metrics(counts, snapshot or Snapshot(node="here"))
    return {
        (sample.name.removeprefix(PREFIX), tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_an_idle_node_shows_every_family() -> None:
    assert {PREFIX + name for name in WANTED} <= family_names()
    found = samples(NodeCounts())
    assert found["kv_xfer_failed_total", ("lost",)] == 0.0
    assert found["replays_total", ("decode",)] == 0.0
    assert found["requests_total", ("error",)] == 0.0
    assert found["requests_refused_total", ("batch",)] == 0.0
    assert found["slo_attainment_ratio", ()] == 1.0
    assert found["phase", ("here", "none")] == 1.0


def test_a_request_counts_where_it_should() -> None:
    counts = NodeCounts()
    for each in request_events():
        counts.on_event(each)
    found = samples(counts)
    assert found["requests_total", ("length",)] == 1.0
    assert found["prompt_tokens_total", ()] == 10.0
    assert found["completion_tokens_total", ()] == 5.0
    assert found["kv_bytes_raw_total", ()] == 800.0
    assert found["kv_bytes_wire_total", ()] == 200.0
    assert found["kv_codec_seconds_total", ()] == pytest.approx(0.01)
    assert found["kv_xfer_time_seconds_bucket", ("0.1",)] == 0.0
    assert found["kv_xfer_time_seconds_bucket", ("0.25",)] == 1.0
    assert found["kv_xfer_time_seconds_sum", ()] == pytest.approx(0.2)
    assert found["request_ttft_seconds_count", ()] == 1.0
    assert found["request_cost_usd_total", ("box",)] == pytest.approx(0.002)
    assert found["request_cost_usd_total", ("traffic",)] == pytest.approx(0.001)
    assert found["events_total", ("request.ended",)] == 1.0


def test_a_model_has_a_part_of_the_kv_memory() -> None:
    node = NodeSummary(id="here", role="worker", state="alive", address="", kv_usage=0.5, kv_quota=0.75)
    found = samples(NodeCounts(), Snapshot(node="here", nodes=(node,)))
    assert (found["kv_usage_ratio", ()], found["kv_quota_ratio", ()]) == (0.5, 0.75)
    found = samples(NodeCounts(), Snapshot(node="there", nodes=(node,)))
    assert (found["kv_usage_ratio", ()], found["kv_quota_ratio", ()]) == (0.0, 1.0)


def test_keys_are_told_apart_by_name_whatever_it_is() -> None:
    found = samples(NodeCounts(), Snapshot(node="here", key_usd={'al"ice\n': 0.75, "": 0.125}))
    assert found["key_cost_usd_total", ('al"ice\n',)] == 0.75
    assert found["key_cost_usd_total", ("",)] == 0.125


def test_replays_and_failed_transfers_have_their_labels() -> None:
    counts = NodeCounts()
    counts.on_event(event(1, 1.0, GATEWAY, EventKind.REQUEST_RECOVERED, type="prefill"))
    counts.on_event(event(2, 1.0, GATEWAY, EventKind.TRANSFER_FAILED, failed="the node at the other end is gone"))
    found = samples(counts)
    assert found["replays_total", ("prefill",)] == 1.0
    assert found["kv_xfer_failed_total", ("lost",)] == 1.0


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("not delivered before the deadline", "deadline"),
        ("connection reset by peer", "lost"),
        ("the request was cancelled", "cancelled"),
        ("layer 3: values are not finite", "unsound"),
        ("whatever a hostile peer says", "other"),
        ("", "other"),
    ],
)
def test_reasons_are_a_few_whatever_is_said(reason: str, label: str) -> None:
    assert reason_label(reason) == label


def test_attainment_is_by_the_deadlines_of_the_plan() -> None:
    counts = NodeCounts(deadlines=Deadlines(ttft_s=0.4))
    counts.on_event(event(1, 1.0, GATEWAY, EventKind.REQUEST_ENDED, **ENDED))
    assert counts.attainment == 0.0
    counts.deadlines = Deadlines(ttft_s=0.6, tpot_s=0.2)
    counts.on_event(event(2, 1.0, GATEWAY, EventKind.REQUEST_ENDED, **ENDED))
    assert counts.attainment == 0.5
    counts.on_event(event(3, 1.0, GATEWAY, EventKind.REQUEST_ENDED, **(ENDED | {"finish": "cancelled"})))
    assert counts.attainment == 0.5
    assert not are_met(Deadlines(), {"finish": "error"})
    assert are_met(Deadlines(), {"finish": "stop"})


def test_how_things_stand_is_shown_as_of_now() -> None:
    nodes = (
        NodeSummary(id="here", role="worker", state="alive", address="", phase="prefill", usd_per_hour=3.6),
        NodeSummary(id="there", role="admin", state="dead", address="", phase="decode", usd_per_hour=1.0),
    )
    links = tuple(
        LinkSummary(source=a, target=b, gbps=8.0, one_stream_gbps=1.0, streams=8, rtt_s=0.02, kv_bytes=7)
        for a, b in (("here", "there"), ("there", "here"))
    )
    snapshot = Snapshot(
        node="here", nodes=nodes, links=links, plans={"x": (3, 4), "y": (3, 7)}, is_coordinator=True, waiting=2,
        up_s=1000.0, refused={"urgent": 0, "normal": 2, "batch": 5},
    )  # fmt: skip
    found = samples(NodeCounts(), snapshot)
    assert found["plan_epoch", ("x",)] == 3.0
    assert [found["plan_generation", (service,)] for service in "xy"] == [4.0, 7.0]
    assert found["requests_refused_total", ("batch",)] == 5.0
    assert found["phase", ("here", "prefill")] == 1.0
    assert found["phase", ("there", "prefill")] == 0.0
    assert found["role", ("there", "admin")] == 1.0
    assert found["members", ("dead",)] == 1.0
    assert found["cost_usd_total", ("here",)] == pytest.approx(1.0)
    assert found["link_bandwidth_bytes_per_second", ("there", "measured", "here")] == pytest.approx(1e9)
    assert ("link_rtt_seconds", ("here", "there")) not in found  # the other box shows it
    assert found["link_kv_bytes_total", ("there", "here")] == 7.0


def test_labels_of_hostile_names_are_escaped() -> None:
    node = NodeSummary(id='a"\n} 1', role="worker", state="alive", address="")
    text = render_metrics(NodeCounts(), Snapshot(node="here", nodes=(node,)))
    assert any(
        sample.labels.get("node") == node.id for f in text_string_to_metric_families(text) for sample in f.samples
    )


def test_a_histogram_counts_at_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 12.0


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    named = {name for each in expressions for name in re.findall(r"p2pserve:[a-z0-9_]+", each)}
    assert len(expressions) > 20
    assert named <= family_names()
    assert {PREFIX + "kv_xfer_failed_total", PREFIX + "slo_attainment_ratio", PREFIX + "phase"} <= named
    ids = [panel["id"] for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(ids) == len(set(ids))


def test_no_request_is_a_label() -> None:
    counts = NodeCounts()
    for each in request_events():
        counts.on_event(each)
    assert REQUEST not in render_metrics(counts, Snapshot(node="here"))
