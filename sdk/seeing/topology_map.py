"""The drawing of a topology: sites with their boxes, KV flows between them, and the matrix of links."""

from __future__ import annotations

from math import log10
from typing import Final, NamedTuple

from ...node.observing.values import LinkSummary, NodeSummary
from . import colours
from .drawing import Arrow, Drawing, Rectangle, Words
from .topology import GONE, Topology, label, labels_of

WIDTH: Final = 1200.0
MARGIN: Final = 24.0
CARD: Final = (168.0, 58.0)
SMALL_CARD: Final = (104.0, 30.0)
GAP: Final = 10.0
HEAD: Final = 26.0  # of a site, for its name
MANY: Final = 16  # boxes from which on cards and cells are small
MAX_ARROWS: Final = 48
READABLE: Final = 24.0  # a cell that is smaller has a colour only
INK, FAINT, FRAME, PAPER = "#14161a", "#5b616e", "#c9ccd3", "#f6f7f9"


class MapPlace(NamedTuple):
    """Where a box is drawn."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def draw_topology(topology: Topology) -> Drawing:
    """The whole page."""
    drawing = Drawing(width=WIDTH, height=0.0, title="p2pserve topology")
    y = _draw_head(drawing, topology)
    y, places = _draw_sites(drawing, topology, y)
    _draw_flows(drawing, topology, places)  # below the cards, so that those can be read
    for node in topology.nodes:
        _draw_card(drawing, node, places[node.id], folded=topology.folded)
    drawing.height = _draw_matrix(drawing, topology, y + 2 * MARGIN) + MARGIN
    return drawing


def rate_text(gbps: float) -> str:
    """A rate in Gb/s, in at most four characters."""
    if gbps >= 9.95:
        return f"{gbps:.0f}"
    return f"{gbps:.1f}" if gbps >= 0.095 else f"{gbps:.2f}"


def link_text(link: LinkSummary) -> str:
    """All that is known of a link, for whoever points at it."""
    age = f", measured {link.age_s:.0f} s ago" if link.age_s is not None else ""
    return (
        f"{'at least ' if link.is_floor else ''}{rate_text(link.gbps)} Gb/s over {link.streams} streams, "
        f"{link.one_stream_gbps:.2f} over one; round trip {link.rtt_s * 1e3:.1f} ms, loss {link.loss:.2%}, "
        f"${link.usd_per_gb:.3f}/GB; {link.known}, {link.confidence:.0%} sure{age}"
    )


def _draw_head(drawing: Drawing, topology: Topology) -> float:
    present = topology.present
    gpus, sites = sum(node.gpus for node in present), len(topology.sites)
    boxes = f"{len(present)} box{'es' * (len(present) != 1)} at {sites} site{'s' * (sites != 1)}"
    name_of = labels_of(topology)
    what = f"{sites} site{'s' * (sites != 1)}" if topology.folded else boxes
    first = f"{what}, {gpus} GPU{'s' * (gpus != 1)}, ${topology.usd_per_hour:.2f}/h"
    if any(node.emulated for node in present):
        first += "; some GPUs are emulated"
    if topology.left_out:
        first += f"; {topology.left_out} others are not shown"
    drawing.add(Words(x=MARGIN, y=MARGIN + 16, text=first, size=18, bold=True, fill=INK))
    plans = (f"plan {plan.epoch}.{plan.version} for {plan.service}, KV as {plan.codec}" for plan in topology.plans)
    second = "; ".join(plans) or "no plan"
    if topology.coordinator is not None and not topology.folded:
        second += f"; coordinator {name_of(topology.coordinator)}"
    drawing.add(Words(x=MARGIN, y=MARGIN + 38, text=second, size=13, fill=FAINT))
    x = WIDTH - MARGIN
    for phase in reversed(("prefill", "decode", "mixed")):
        drawing.add(Words(x=x, y=MARGIN + 14, text=phase, size=12, anchor="end", fill=INK))
        x -= 6.6 * len(phase) + 8
        drawing.add(Rectangle(x=x - 12, y=MARGIN + 3, width=12, height=12, radius=3, fill=colours.phase_colour(phase)))
        x -= 30
    return MARGIN + 58


def _draw_sites(drawing: Drawing, topology: Topology, y: float) -> tuple[float, dict[str, MapPlace]]:
    """Sites beside each other, each with its boxes in a grid."""
    width, height = SMALL_CARD if len(topology.nodes) > MANY else CARD
    places: dict[str, MapPlace] = {}
    x, row = MARGIN, 0.0
    groups = {"": list(topology.nodes)} if topology.folded else topology.sites
    for site, nodes in groups.items():
        columns = _columns(len(nodes), width, wide=not site)
        rows = -(-len(nodes) // columns)
        frame = (columns * (width + GAP) + GAP, rows * (height + GAP) + (HEAD if site else GAP))
        if x + frame[0] > WIDTH - MARGIN + 1 and x > MARGIN:
            x, y, row = MARGIN, y + row + MARGIN, 0.0
        drawing.add(Rectangle(x=x, y=y, width=frame[0], height=frame[1], radius=10, fill=PAPER, stroke=FRAME))
        if site:
            drawing.add(Words(x=x + GAP, y=y + 18, text=_cut(site, frame[0] / 9), size=13, bold=True, fill=INK))
        for number, node in enumerate(nodes):
            place = MapPlace(
                x + GAP + number % columns * (width + GAP),
                y + (HEAD if site else GAP) + number // columns * (height + GAP),
                width,
                height,
            )
            places[node.id] = place
        x, row = x + frame[0] + MARGIN, max(row, frame[1])
    return y + row, places


def _columns(count: int, width: float, *, wide: bool) -> int:
    most = int((WIDTH - 2 * MARGIN - GAP) // (width + GAP))
    if wide:
        return max(1, min(most, count))
    square = max(1, round((count * 0.8) ** 0.5)) if count > 2 else count
    return max(1, min(most, square if count <= MANY else max(square, 5)))


def _draw_card(drawing: Drawing, node: NodeSummary, place: MapPlace, *, folded: bool) -> None:
    colour = colours.phase_colour(node.phase)
    gone = node.state in GONE
    small = place.height < CARD[1]
    title = f"{label(node)} {node.id}: {node.state}, {node.phase or 'no phase'}, {node.hardware}, {node.engine_state}"
    stroke, fill, width = (FRAME, PAPER, 1.5) if gone else (colour, "#ffffff", 1.5 if small else 2.0)
    drawing.add(
        Rectangle(**place._asdict(), stroke=stroke, fill=fill, radius=6, stroke_width=width, dashed=gone, title=title)
    )
    bar = FRAME if gone else colour
    drawing.add(Rectangle(x=place.x + 5, y=place.y + 5, width=5, height=place.height - 10, radius=2, fill=bar))
    star = " *" if node.is_coordinator and not folded else ""
    name = f"{node.id if folded else label(node)}{star}"
    x = place.x + 16
    ink = FAINT if gone else INK
    if small:
        drawing.add(Words(x=x, y=place.y + 13, text=_cut(name, 13), size=10, bold=True, fill=ink))
        drawing.add(Words(x=x, y=place.y + 25, text=_cut(_hardware(node), 15), size=8.5, fill=FAINT))
        return
    drawing.add(Words(x=x, y=place.y + 17, text=_cut(name, 19), size=12, bold=True, fill=ink))
    drawing.add(Words(x=x, y=place.y + 33, text=_cut(_hardware(node), 24), size=10, fill=FAINT))
    drawing.add(Words(x=x, y=place.y + 49, text=_cut(_state(node, folded=folded), 25), size=10, fill=FAINT))


def _hardware(node: NodeSummary) -> str:
    if not node.gpus or node.role == "site":
        return node.hardware or node.state
    return f"{'emulated ' if node.emulated else ''}{node.gpus}x {node.gpu}"


def _state(node: NodeSummary, *, folded: bool) -> str:
    if node.state in GONE or folded:
        return node.state
    load = f"{node.running} running, {node.waiting} queued" if node.running is not None else node.engine_state
    return load or node.state


def _draw_flows(drawing: Drawing, topology: Topology, places: dict[str, MapPlace]) -> None:
    """The plan's pairs, and what else has flowed: the wider, the more."""
    shown = [flow for flow in topology.flows if flow.source in places and flow.target in places][:MAX_ARROWS]
    name_of = labels_of(topology)
    most = max((flow.share for flow in shown), default=0.0) or 1.0
    for flow in shown:
        if flow.source == flow.target:
            continue
        (x1, y1), (x2, y2) = _edge(places[flow.source], places[flow.target])
        what = f"{flow.share:.0%} of requests, {flow.transfers} transfers"
        title = f"{name_of(flow.source)} to {name_of(flow.target)}: {what}"
        drawing.add(
            Arrow(
                x1=x1, y1=y1, x2=x2, y2=y2, bend=14.0, stroke="#3b3f8f", width=1.0 + 2.5 * flow.share / most,
                opacity=0.75 if len(shown) <= MANY else 0.4, title=title,
            )
        )  # fmt: skip


def _edge(one: MapPlace, other: MapPlace) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where a line between the middles of two cards leaves the one and meets the other."""

    def leave(place: MapPlace, towards: tuple[float, float]) -> tuple[float, float]:
        (mx, my), (tx, ty) = place.middle, towards
        dx, dy = tx - mx, ty - my
        scale = min(
            place.width / 2 / abs(dx) if dx else 1e9,
            place.height / 2 / abs(dy) if dy else 1e9,
        )
        return mx + dx * scale, my + dy * scale

    return leave(one, other.middle), leave(other, one.middle)


def _draw_matrix(drawing: Drawing, topology: Topology, y: float) -> float:
    """Rows send, columns receive. Returns where it ends."""
    nodes = [node for group in topology.sites.values() for node in group if node.state not in GONE]
    count = len(nodes)
    if count < 2 and not (topology.folded and topology.links):
        drawing.add(Words(x=MARGIN, y=y + 14, text="No links: there is one box.", size=13, fill=FAINT))
        return y + 20
    longest = max(len(_name(node, topology)) for node in nodes)
    size = min(58.0, max(11.0, 760.0 / count))
    letters = min(11.0, max(7.0, size * 0.62))
    room = min(22, longest) * letters * 0.64 + 12
    drawing.add(
        Words(x=MARGIN, y=y + 14, text="Links in Gb/s, from the row to the column", size=14, bold=True, fill=INK)
    )
    top, left = y + 30 + room, MARGIN + room
    for row, source in enumerate(nodes):
        name = _cut(_name(source, topology), 22)
        at = top + row * size + size / 2
        drawing.add(Words(x=left - 6, y=at + letters * 0.36, text=name, size=letters, anchor="end", fill=INK))
        x = left + row * size + size / 2 + letters * 0.36
        drawing.add(Words(x=x, y=top - 6, text=name, size=letters, turned=True, fill=INK))
        for column, target in enumerate(nodes):
            link = topology.links.get((source.id, target.id))
            _draw_cell(drawing, link, left + column * size, top + row * size, size, is_self=source is target)
    bottom = top + count * size
    _draw_scale(drawing, left + count * size + 2 * MARGIN, top, readable=size >= READABLE)
    return max(bottom, top + 300)


def _name(node: NodeSummary, topology: Topology) -> str:
    return node.id if topology.folded else label(node)


def _draw_cell(drawing: Drawing, link: LinkSummary | None, x: float, y: float, size: float, *, is_self: bool) -> None:
    if is_self and link is None:
        drawing.add(Rectangle(x=x, y=y, width=size - 1, height=size - 1, fill=PAPER))
        return
    colour = colours.link_colour(link)
    inferred = link is not None and link.known == "inferred"
    title = link_text(link) if link is not None else "nothing is known of it"
    drawing.add(Rectangle(x=x, y=y, width=size - 1, height=size - 1, fill=colour, title=title))
    ink = colours.ink_on(colour)
    if inferred and size >= READABLE:  # a corner is cut: it can be told without colours
        drawing.add(Rectangle(x=x + size - 1 - size * 0.22, y=y, width=size * 0.22, height=size * 0.22, fill=ink))
    if link is None or size < READABLE or link.known == "prior":
        return
    if not link.reachable:
        drawing.add(Words(x=x + size / 2, y=y + size * 0.6, text="down", size=size * 0.24, anchor="middle", fill=ink))
        return
    rate = ("≥" if link.is_floor else "") + rate_text(link.gbps)
    drawing.add(
        Words(x=x + size / 2, y=y + size * 0.50, text=rate, size=size * 0.27, anchor="middle", fill=ink, bold=True)
    )
    rtt = f"{link.rtt_s * 1e3:.0f} ms" if link.rtt_s >= 0.00995 else f"{link.rtt_s * 1e3:.1f} ms"
    drawing.add(Words(x=x + size / 2, y=y + size * 0.78, text=rtt, size=size * 0.18, anchor="middle", fill=ink))


def _draw_scale(drawing: Drawing, x: float, y: float, *, readable: bool) -> None:
    steps, height = 60, 200.0
    x = min(x, WIDTH - 130)
    for step in range(steps):
        gbps = colours.SLOW_GBPS * (colours.FAST_GBPS / colours.SLOW_GBPS) ** (1 - (step + 0.5) / steps)
        part = height / steps
        drawing.add(Rectangle(x=x, y=y + step * part, width=18, height=part + 0.6, fill=colours.rate_colour(gbps)))
    for gbps in (50.0, 10.0, 1.0, 0.1):
        share = 1 - _log_share(gbps)
        drawing.add(Words(x=x + 26, y=y + share * height + 4, text=f"{gbps:g} Gb/s", size=11, fill=INK))
    for number, (fill, text) in enumerate(((colours.UNREACHABLE, "unreachable"), (colours.UNKNOWN, "not known"))):
        at = y + height + 18 + number * 20
        drawing.add(
            Rectangle(x=x, y=at, width=14, height=14, fill=fill),
            Words(x=x + 26, y=at + 11, text=text, size=11, fill=INK),
        )
    if not readable:
        return
    at = y + height + 58
    drawing.add(
        Rectangle(x=x, y=at, width=14, height=14, fill=colours.rate_colour(5.0)),
        Rectangle(x=x + 9, y=at, width=5, height=5, fill=INK),
        Words(x=x + 26, y=at + 11, text="inferred", size=11, fill=INK),
    )  # fmt: skip


def _log_share(gbps: float) -> float:
    return log10(gbps / colours.SLOW_GBPS) / log10(colours.FAST_GBPS / colours.SLOW_GBPS)


def _cut(text: str, letters: float) -> str:
    """What fits, with a mark where something is left out."""
    most = max(2, int(letters))
    return text if len(text) <= most else text[: most - 1] + "…"
