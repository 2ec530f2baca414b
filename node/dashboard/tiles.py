"""The figures at the top of the page: what an operator wants to see first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..observing.values import NodeSummary
from . import units
from .statistics import WINDOW_S, LatencyPercentiles, Traffic, measure_traffic
from .timeline import draw_spark
from .view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure with what belongs to it; `tone` is "bad" where somebody should look; `hint` says how it is made."""

    label: str
    value: str
    detail: str
    hint: str
    tone: str = ""
    spark: str = ""


def make_tiles(view: View) -> tuple[Tile, ...]:
    """In the order in which they stand."""
    snapshot = view.snapshot
    traffic = measure_traffic(snapshot.requests, snapshot.deadlines, snapshot.time)
    return (
        _boxes(view),
        _queue(view, traffic),
        _tokens(view, traffic),
        _times("First token", traffic.ttft, traffic.ttft_course, "TTFT: from a request's arrival to its first token"),
        _times("Each next token", traffic.tpot, traffic.tpot_course, "TPOT: a request's mean time from token to token"),
        _in_time(view, traffic),
        _kv(view, traffic),
        _cost(view.alive, traffic),
    )


def _boxes(view: View) -> Tile:
    nodes, alive = view.snapshot.nodes, view.alive
    gone = len(nodes) - len(alive)
    ready = sum(node.engine_state == "ready" for node in alive)
    phases = Counter(node.phase for node in alive if node.phase)
    detail = " · ".join(f"{count} {phase}" for phase, count in sorted(phases.items())) or f"{ready} ready"
    return Tile(
        label="Boxes",
        value=f"{len(alive)}",
        detail=f"{detail} · {gone} gone" if gone else detail,
        hint="boxes that are there, and what they do by the plan",
        tone="bad" if gone or not ready else "",
    )


def _queue(view: View, traffic: Traffic) -> Tile:
    running = sum(node.running or 0 for node in view.alive)
    waiting = sum(node.waiting or 0 for node in view.alive)
    refused_s = sum(node.refused_s for node in view.alive)
    detail = f"{running} running · {waiting} waiting"
    return Tile(
        label="Requests",
        value=f"{units.digits(traffic.requests_s)}{units.SPACE}/s",
        detail=f"{detail} · {units.digits(refused_s)}{units.SPACE}/s refused" if refused_s else detail,
        hint="answered through this box in the last minute; running, waiting and refused at all boxes now",
        tone="bad" if refused_s else "",
    )


def _tokens(view: View, traffic: Traffic) -> Tile:
    everywhere = view.tokens_s is not None
    rate = view.tokens_s if view.tokens_s is not None else traffic.tokens_s
    return Tile(
        label="Tokens out",
        value=f"{units.digits(rate)}{units.SPACE}/s",
        detail=f"{units.count(traffic.ended)} answers in {WINDOW_S / 60:.0f}{units.SPACE}min",
        hint="what all boxes decode" if everywhere else "new tokens of requests that ended here in the last minute",
    )


def _times(label: str, found: LatencyPercentiles, course: tuple[float | None, ...], hint: str) -> Tile:
    return Tile(
        label=label,
        value=units.seconds(found.p50),
        detail=f"p95 {units.seconds(found.p95)} · p99 {units.seconds(found.p99)}",
        hint=f"{hint}; the median, and percentiles of the last {WINDOW_S / 60:.0f} minutes",
        spark=draw_spark(course),
    )


def _in_time(view: View, traffic: Traffic) -> Tile:
    deadlines = view.snapshot.deadlines
    named = (("first", deadlines.ttft_s), ("next", deadlines.tpot_s), ("all", deadlines.e2e_s))
    limits = " · ".join(f"{name} {units.seconds(limit)}" for name, limit in named if limit)
    return Tile(
        label="In time",
        value=units.share(traffic.in_time),
        detail=f"{limits or 'no deadlines are set'}" + (f" · {traffic.failed} failed" if traffic.failed else ""),
        hint="SLO attainment: the share of the last requests that met all their deadlines",
        tone="bad" if traffic.in_time is not None and traffic.in_time < 0.9 else "",
    )


def _kv(view: View, traffic: Traffic) -> Tile:
    saved = f" · {units.digits(traffic.raw_bytes / traffic.wire_bytes)}× smaller" if traffic.wire_bytes else ""
    return Tile(
        label="KV between boxes",
        value=units.gbps(sum(view.flows.values()) if view.flows is not None else None),
        detail=f"{units.size(traffic.wire_bytes)} in {WINDOW_S / 60:.0f}{units.SPACE}min{saved}",
        hint="what crosses links now; of requests here the bytes on the wire, and how much smaller than in engines",
    )


def _cost(nodes: tuple[NodeSummary, ...], traffic: Traffic) -> Tile:
    per_hour = sum(node.usd_per_hour for node in nodes)
    unpriced = sum(not node.usd_per_hour for node in nodes)
    detail = f"{units.usd(traffic.usd_per_million)} per million tokens"
    if not per_hour:
        detail = "tell a box's price with --usd-per-hour"
    elif unpriced:
        detail += f" · {unpriced} without a price"
    return Tile(
        label="Cost",
        value=f"{units.usd(per_hour)}{units.SPACE}/h" if per_hour else units.NONE,
        detail=detail,
        hint="what all boxes cost; per million tokens in and out, by the requests' own time and traffic",
    )
