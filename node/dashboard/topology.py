"""The map of a network: boxes on a ellipse, site by site, with links as curves between them. Pure geometry.

On a ring no box hides another, and no label lies over a link. Beyond MAX_BOXES a site is one spot with as many boxes
as it has: their links are told by the median of all between two sites.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from math import cos, degrees, dist, pi, sin
from statistics import median
from typing import Final

from ..observing.values import LinkSummary, NodeSummary
from . import units
from .bands import band_of, describe
from .view import NO_SITE, View

MAX_BOXES: Final = 24

ALONE_HEIGHT: Final = 130  # of a drawing with a single spot
BOX_RADIUS: Final = 9.0
SITE_RADIUS: Final = 20.0

_SITE_GAP: Final = 0.55  # of a box's share of the ring, between two sites
_LEVEL_MARGIN: Final = (106.0, 42.0)  # from the ring to the edge, for labels beside it or above it
_TURNED_MARGIN: Final = (110.0, 104.0)
_CHORDS: Final = 720
_LETTER: Final = 8.0
_SMALL_LETTER: Final = 6.9
_LABEL_LINES: Final = 17.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A box, or the boxes of a site: its place, and its label's with the angle that it is turned by (None: it is level,
    and has a second line)."""

    key: str
    label: str
    detail: str
    phase: str
    state: str
    is_coordinator: bool
    is_here: bool
    boxes: int
    arcs: tuple[PhaseArc, ...]
    href: str
    tip: str
    x: float
    y: float
    label_x: float
    label_y: float
    anchor: str
    turn: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What connects two spots. `band` is of the slower direction; `planned`: KV goes over it by the plan; `flow`: it
    does now, which way (1: as drawn, -1: against it, 0: none)."""

    one: str
    other: str
    d: str
    band: int
    is_measured: bool
    is_reachable: bool
    planned: bool
    flow: int
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkMap:
    """A drawing of `width` by `height` units. `is_crowded`: only those curves are drawn that the plan uses."""

    width: int
    height: int
    spots: tuple[Spot, ...]
    curves: tuple[Curve, ...]
    is_folded: bool
    is_crowded: bool


@dataclass(frozen=True, slots=True)
class PhaseArc:
    """How many hundredths of a site's boxes have a phase, and where its arc begins."""

    phase: str
    begin: float
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One of those that share the ring: a box, or a site with several."""

    key: str
    site: str
    nodes: tuple[NodeSummary, ...]


def wants_sites(view: View) -> bool:
    """Whether each site is to be one spot: as the viewer asks, else where there are too many boxes for a map."""
    asked = view.query.get("sites")
    return asked == "folded" or (asked != "open" and len(view.shown) > MAX_BOXES and len(_sites(view.shown)) > 1)


def draw_topology(view: View, width: int, height: int) -> NetworkMap:
    """A map of this size. Labels need 14 units a line, whatever the size: a phone has a drawing of its own."""
    folded = wants_sites(view)
    places = _fold(view.shown) if folded else _line_up(view.shown)
    if len(places) == 1:
        height = ALONE_HEIGHT
    centre = (width / 2, height / 2)
    spots = _place_spots(view, places, centre, level=True)
    if len(places) > MAX_BOXES or any(_lie_upon_each_other(one, other) for one, other in combinations(spots, 2)):
        spots = _place_spots(view, places, centre, level=False)
    curves = _make_curves(view, places, {spot.key: (spot.x, spot.y) for spot in spots}, centre)
    crowded = len(places) > MAX_BOXES
    return NetworkMap(
        width=width,
        height=height,
        spots=spots,
        curves=tuple(curve for curve in curves if curve.planned) if crowded else curves,
        is_folded=folded,
        is_crowded=crowded,
    )


def site_of(node: NodeSummary) -> str:
    """Where a box is, in words."""
    return node.site or NO_SITE


def _sites(nodes: Sequence[NodeSummary]) -> list[str]:
    return sorted({site_of(node) for node in nodes})


def _line_up(nodes: Sequence[NodeSummary]) -> list[_Place]:
    """Boxes of a site stand side by side."""
    ordered = sorted(nodes, key=lambda node: (site_of(node), node.name, node.id))
    return [_Place(key=node.id, site=site_of(node), nodes=(node,)) for node in ordered]


def _fold(nodes: Sequence[NodeSummary]) -> list[_Place]:
    groups = ((site, tuple(node for node in nodes if site_of(node) == site)) for site in _sites(nodes))
    return [_Place(key=site, site=site, nodes=group) for site, group in groups]


def _place_spots(view: View, places: Sequence[_Place], centre: tuple[float, float], *, level: bool) -> tuple[Spot, ...]:
    radius = max((BOX_RADIUS if place.key == place.nodes[0].id else SITE_RADIUS for place in places), default=0.0)
    margin = _LEVEL_MARGIN if level else _TURNED_MARGIN
    ring = tuple(max(40.0, half - radius - edge) for half, edge in zip(centre, margin, strict=True))
    if len(places) == 1:
        ring = (0.0, 0.0)
    angles = _share_ring(places, ring[0], ring[1])
    return tuple(
        _make_spot(view, place, angle, ring=(ring[0], ring[1]), centre=centre, level=level)
        for place, angle in zip(places, angles, strict=True)
    )


def _share_ring(places: Sequence[_Place], across: float, down: float) -> list[float]:
    """An angle for each, clockwise from the top, so that they are equally far apart along the ellipse; between two
    sites there is more room than between two boxes."""
    sites = {place.site for place in places}
    gap = _SITE_GAP if 1 < len(sites) < len(places) else 0.0
    marks, at = [], 0.0
    for number, place in enumerate(places):
        at += 1.0 + (gap if places[number - 1].site != place.site else 0.0)
        marks.append(at)
    # The ellipse as a chain of chords, from the top on: where so much of it lies behind, there is the angle.
    turns = [2 * pi * step / _CHORDS - pi / 2 for step in range(_CHORDS + 1)]
    points = [(across * cos(turn), down * sin(turn)) for turn in turns]
    lengths = [0.0, *accumulate(dist(one, other) for one, other in pairwise(points))]
    return [turns[bisect_left(lengths, (mark - marks[0]) / marks[-1] * lengths[-1])] for mark in marks]


def _label_area(spot: Spot) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of what a level label takes, by the width of wide letters."""
    width = max(_LETTER * len(spot.label), _SMALL_LETTER * len(spot.detail))
    left = spot.label_x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[spot.anchor]
    return left, spot.label_y - 14.0, left + width, spot.label_y + 18.0


def _lie_upon_each_other(one: Spot, other: Spot) -> bool:
    left, top, right, bottom = _label_area(one)
    left_2, top_2, right_2, bottom_2 = _label_area(other)
    return left < right_2 and left_2 < right and top < bottom_2 and top_2 < bottom


def _make_spot(
    view: View,
    place: _Place,
    angle: float,
    *,
    ring: tuple[float, float],
    centre: tuple[float, float],
    level: bool,
) -> Spot:
    x, y = centre[0] + ring[0] * cos(angle), centre[1] + ring[1] * sin(angle)
    node = place.nodes[0]
    is_box = place.key == node.id
    if ring[0] == 0.0:  # alone: its label stands below it
        y -= 20.0
        angle = pi / 2
    label, anchor, turn = _place_label(angle, (x, y), BOX_RADIUS if is_box else SITE_RADIUS, level=level)
    return Spot(
        key=place.key,
        label=view.label(node.id) if is_box else place.site,
        detail=place.site if is_box else f"{len(place.nodes)} boxes",
        phase=_common({node.phase for node in place.nodes}),
        state=node.state if is_box else "alive",
        is_coordinator=any(node.is_coordinator for node in place.nodes),
        is_here=any(node.id == view.snapshot.answered_by for node in place.nodes),
        boxes=0 if is_box else len(place.nodes),
        arcs=() if is_box else _make_arcs(place.nodes),
        href=f"{view.base}/boxes/{node.id}" if is_box else f"{view.base}/?sites=open&site={place.site}",
        tip=_tell_box(view, node) if is_box else f"{place.site}: {_count_phases(place.nodes)}",
        x=round(x, 1),
        y=round(y, 1),
        label_x=round(label[0], 1),
        label_y=round(label[1], 1),
        anchor=anchor,
        turn=turn,
    )


def _place_label(
    angle: float, at: tuple[float, float], radius: float, *, level: bool
) -> tuple[tuple[float, float], str, float | None]:
    """Outside the ring: level beside its spot, or, where spots are close, turned away from the centre."""
    across, down = cos(angle), sin(angle)
    away = radius + 8.0
    if not level:
        left = across < -1e-9
        turn = degrees(angle) + (180.0 if left else 0.0)
        return (at[0] + away * across, at[1] + away * down), "end" if left else "start", round(turn, 1)
    anchor = "middle" if abs(across) < 0.35 else "start" if across > 0 else "end"
    beside = 0.0 if anchor == "middle" else away * (1 if across > 0 else -1)
    above = (-away - _LABEL_LINES if down < 0 else away + 10.0) if anchor == "middle" else -2.0
    return (at[0] + beside, at[1] + above), anchor, None


def _make_curves(
    view: View, places: Sequence[_Place], spots: Mapping[str, tuple[float, float]], centre: tuple[float, float]
) -> tuple[Curve, ...]:
    """One for each two spots between which a link is known; the fastest first, so that they lie below the slow ones."""
    place_of = {node.id: place.key for place in places for node in place.nodes}
    between: defaultdict[tuple[str, str], list[LinkSummary]] = defaultdict(list)
    for link in view.links:
        ends = place_of.get(link.source), place_of.get(link.target)
        if ends[0] is not None and ends[1] is not None and ends[0] != ends[1]:
            between[ends[0], ends[1]].append(link)
    planned = _planned_pairs(view, place_of)
    pairs = {(min(pair), max(pair)) for pair in between}
    curves = []
    for pair in sorted(pairs):
        ways = (between.get(pair, []), between.get(pair[::-1], []))
        curves.append(_make_curve(view, pair, ways, planned, _bend(spots, pair, centre)))
    return tuple(sorted(curves, key=lambda curve: (curve.planned, -curve.band)))


def _make_curve(
    view: View,
    pair: tuple[str, str],
    ways: tuple[Sequence[LinkSummary], Sequence[LinkSummary]],
    planned: set[tuple[str, str]],
    d: str,
) -> Curve:
    rates = [median(link.gbps if link.reachable else 0.0 for link in links) for links in ways if links]
    loads = [sum(view.flow(link.source, link.target) for link in links) for links in ways]
    links = [*ways[0], *ways[1]]
    told = (_tell_links(view, ways[0], pair), _tell_links(view, ways[1], pair[::-1]))
    return Curve(
        one=pair[0],
        other=pair[1],
        d=d,
        band=band_of(min(rates)),
        is_measured=any(link.known == "measured" for link in links),
        is_reachable=any(link.reachable for link in links),
        planned=pair in planned or pair[::-1] in planned,
        flow=(0 if not any(loads) else 1 if loads[0] >= loads[1] else -1),
        tip="\n".join(filter(None, told)),
    )


def _bend(spots: Mapping[str, tuple[float, float]], pair: tuple[str, str], centre: tuple[float, float]) -> str:
    """A curve between two spots that is drawn to the centre, more so the closer they are."""
    (x1, y1), (x2, y2) = spots[pair[0]], spots[pair[1]]
    middle = (x1 + x2) / 2, (y1 + y2) / 2
    x, y = (centre[i] + (middle[i] - centre[i]) * 0.35 for i in (0, 1))
    return f"M{x1:.0f} {y1:.0f}Q{x:.0f} {y:.0f} {x2:.0f} {y2:.0f}"


def _planned_pairs(view: View, place_of: Mapping[str, str]) -> set[tuple[str, str]]:
    ends = [
        (place_of.get(heads[pair.prefill]), place_of.get(heads[pair.decode]))
        for plan in view.snapshot.plans
        for heads in [{replica.id: replica.head for replica in plan.replicas}]
        for pair in plan.pairings
    ]
    return {(one, other) for one, other in ends if one is not None and other is not None and one != other}


def _tell_links(view: View, links: Sequence[LinkSummary], ends: tuple[str, str]) -> str:
    if not links:
        return ""
    if len(links) == 1:
        pair = (links[0].source, links[0].target)
        return describe(links[0], view.label(pair[0]), view.label(pair[1]), view.flow(*pair))
    rates = [link.gbps for link in links]
    rtt = median(link.rtt_s for link in links)
    return (
        f"{ends[0]} → {ends[1]}: {units.gbps(median(rates))} in the middle of {len(links)} links "
        f"({units.digits(min(rates))} to {units.digits(max(rates))}), rtt {units.seconds(rtt)}"
    )


def _tell_box(view: View, node: NodeSummary) -> str:
    """A box in three lines."""
    queue = f"{node.running} running, {node.waiting} waiting" if node.running is not None else "no engine runs"
    kv = f", KV {units.share(node.kv_usage)}" if node.kv_usage is not None else ""
    if kv and node.kv_quota < 1.0:
        kv += f" of one memory with other models, {units.share(node.kv_quota)} its own when all need it"
    roles = [node.phase or "no part in the plan", node.state if node.state != "alive" else ""]
    roles.append("coordinates" if node.is_coordinator else "")
    roles.append("shows you this" if node.id == view.snapshot.answered_by else "")
    return f"{view.label(node.id)} · {site_of(node)}\n{node.hardware}\n{', '.join(filter(None, roles))}\n{queue}{kv}"


def _count_phases(nodes: Sequence[NodeSummary]) -> str:
    phases = Counter(node.phase or "idle" for node in nodes)
    return f"{len(nodes)} box{'es' if len(nodes) > 1 else ''}: " + ", ".join(
        f"{number} {phase}" for phase, number in sorted(phases.items())
    )


def _make_arcs(nodes: Sequence[NodeSummary]) -> tuple[PhaseArc, ...]:
    at, arcs = 0.0, []
    for phase, number in sorted(Counter(node.phase for node in nodes).items()):
        arcs.append(PhaseArc(phase, round(at, 1), round(100 * number / len(nodes), 1)))
        at += 100 * number / len(nodes)
    return tuple(arcs)


def _common(values: set[str]) -> str:
    """What all have in common, or nothing."""
    return next(iter(values)) if len(values) == 1 else ""
