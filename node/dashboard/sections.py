"""The parts of pages: each is drawn from a view, and drawn again when what it shows has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jinja2
from markupsafe import Markup

from ...coordinator import Plan
from ..admin.listing import EventFilter, select_events, select_requests
from ..observing.values import EventKind, NodeEvent, NodeSummary
from . import bands, units
from .matrix import draw_matrix
from .statistics import measure_traffic
from .tiles import make_tiles
from .timeline import WIDTH, draw_timeline
from .topology import draw_topology, site_of, wants_sites
from .view import View

MAX_ROWS: Final = 200
DESKTOP: Final = (980, 600)
PHONE: Final = (370, 460)
GONE: Final = frozenset({"dead", "left"})

TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,  # boxes' and clients' words are in every page
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    name: getattr(units, name) for name in ("seconds", "gbps", "size", "usd", "share", "count", "ago", "clock_time")
}
TEMPLATES.globals |= {"nothing": units.NONE, "space": units.SPACE, "site_of": site_of}


def tiles(view: View) -> Markup:
    """Figures of the whole network."""
    return _render("_tiles.html", view, tiles=make_tiles(view))


def topology(view: View) -> Markup:
    """Boxes and links, as a map or as a matrix."""
    matrix = draw_matrix(view) if view.query.get("view") == "matrix" and len(view.shown) > 1 else None
    drawings = () if matrix else (("wide", draw_topology(view, *DESKTOP)), ("narrow", draw_topology(view, *PHONE)))
    sites = {site_of(node) for node in view.alive}
    return _render(
        "_topology.html",
        view,
        matrix=matrix,
        drawings=drawings,
        bands=bands.NAMES,
        is_folded=wants_sites(view),
        may_fold=1 < len(sites) < len(view.alive),
    )


def boxes(view: View) -> Markup:
    """A line for each box."""
    site = view.query.get("site")
    nodes = [node for node in view.snapshot.nodes if site in (None, "", site_of(node))]
    nodes.sort(key=lambda node: (node not in view.alive, site_of(node), view.label(node.id)))
    return _render("_boxes.html", view, nodes=nodes[:MAX_ROWS], left_out=max(0, len(nodes) - MAX_ROWS), site=site)


def plan(view: View) -> Markup:
    """Who does what, for whom, and why: one plan after the other."""
    return Markup("").join(_draw_plan(view, each) for each in view.snapshot.plans or (None,))


def _draw_plan(view: View, found: Plan | None) -> Markup:
    pairings = sorted(found.pairings, key=lambda pair: -pair.weight) if found is not None else []
    heads = {replica.id: replica.head for replica in found.replicas} if found is not None else {}
    told = {(link.source, link.target): link for link in view.links}
    why = [_shorten(view, reason) for reason in found.why] if found is not None else []
    return _render(
        "_plan.html", view, plan=found, pairings=pairings[:MAX_ROWS], left_out=max(0, len(pairings) - MAX_ROWS),
        heads=heads, told=told, why=why, faults=_plan_faults(view, found) if found is not None else [],
    )  # fmt: skip


def _plan_faults(view: View, found: Plan) -> list[tuple[str, str]]:
    """Boxes of the plan that do not serve now, and why."""
    nodes = {node.id: node for node in view.snapshot.nodes}
    faults = []
    for peer in dict.fromkeys(found.peers):
        node = nodes.get(peer)
        if node is None or node.state in GONE:
            faults.append((peer, node.state if node is not None else "not here"))
        elif node.state == "draining":
            faults.append((peer, node.state))
        elif node.engine_state not in ("", "ready"):
            faults.append((peer, ": ".join(filter(None, [f"engine {node.engine_state}", node.engine_detail]))))
    return faults


def requests(view: View) -> Markup:
    """The latest requests, the newest first."""
    asked = {name: view.query.get(name) or None for name in ("state", "node")}
    found = select_requests(view.snapshot.requests, **asked)[::-1]
    traffic = measure_traffic(view.snapshot.requests, view.snapshot.deadlines, view.snapshot.time)
    return _render(
        "_requests.html", view, requests=found[:MAX_ROWS], left_out=max(0, len(found) - MAX_ROWS), traffic=traffic
    )


def trace(view: View) -> Markup:
    """One request across boxes."""
    timeline = draw_timeline(view, view.trace) if view.trace is not None else None
    return _render("_trace.html", view, trace=view.trace, timeline=timeline, timeline_width=WIDTH)


def events(view: View) -> Markup:
    """What happened, the newest first."""
    asked = {name: view.query.get(name) or None for name in ("kind", "node", "request")}
    found = select_events(view.snapshot.events, EventFilter(**asked))[::-1]
    return _render(
        "_events.html", view, events=[(event, _tell(view, event)) for event in found[:MAX_ROWS]],
        is_filtered=any(asked.values()),
    )  # fmt: skip


def box(view: View) -> Markup:
    """One box, with its links, requests and events."""
    node = next((node for node in view.snapshot.nodes if node.id == view.name), None)
    fastest = sorted(view.links, key=lambda link: -link.gbps)
    out = [link for link in fastest if link.source == view.name]
    into = [link for link in fastest if link.target == view.name]
    told = [
        (event, _tell(view, event))
        for event in select_events(view.snapshot.events, EventFilter(node=view.name))[::-1][:20]
    ]
    return _render(
        "_box.html", view, node=node, out=out, into=into, events=told,
        requests=select_requests(view.snapshot.requests, node=view.name)[::-1][:20], band_of=bands.band_of,
    )  # fmt: skip


SECTIONS: Final[Mapping[str, Callable[[View], Markup]]] = MappingProxyType(
    {draw.__name__: draw for draw in (tiles, topology, boxes, plan, requests, trace, events, box)}
)


def event_groups() -> list[str]:
    """What events may be filtered by: each kind, after the group that it is in."""
    kinds = [kind.value for kind in EventKind]
    return sorted({kind.partition(".")[0] for kind in kinds} | set(kinds))


def _render(template: str, view: View, **values: Any) -> Markup:
    text = TEMPLATES.get_template(template).render(view=view, label=view.label, base=view.base, **values)
    return Markup(text)


def _tell(view: View, event: NodeEvent) -> str:
    """An event's facts in a line."""
    who = [view.label(event.peer)] if event.peer else []
    return " · ".join([*who, *(_shorten(view, units.fact(name, value)) for name, value in event.facts.items())])


def _shorten(view: View, text: str) -> str:
    """A text with boxes' ids as what people call them."""
    for node in view.snapshot.nodes:
        if node.id in text:
            text = text.replace(node.id, view.label(node.id))
    return text


def find_node(view: View) -> NodeSummary | None:
    """The box that the page is about."""
    return next((node for node in view.snapshot.nodes if node.id == view.name), None)
