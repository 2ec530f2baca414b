"""The topology as text: boxes by site, the matrix of links in colours, and KV flows with the paths they would take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...kvtransport.errors import FiguresError
from ...kvtransport.routing.paths import NoPath, PathNetwork, PathQuery, choose
from ...node.observing.ages import describe_age
from ...node.observing.values import LinkSummary, NodeSummary
from ..actions.status_view import keep_whole
from . import colours
from .topology import GONE, KvFlow, LinkKey, Topology, label, labels_of
from .topology_map import rate_text

HARDWARE: Final = "hardware"
BOX_COLUMNS: Final = ("site", "box", "phase", HARDWARE, "run/wait, KV", "$/h")
METRICS: Final = ("rate", "rtt", "loss", "price", "age")
_CELL: Final = 6
_FLOW_BYTES: Final = 80_000_000  # a long prompt's KV: what paths are chosen for here
MAX_FLOWS: Final = 12


def print_topology(topology: Topology, network: PathNetwork | None, console: Console, metric: str = "rate") -> None:
    """All of it. `network` is what paths are chosen by; None: they are left out."""
    console.print(Group(*topology_parts(topology, network, console.width, metric)))


def topology_parts(
    topology: Topology, network: PathNetwork | None, width: int, metric: str = "rate"
) -> Iterator[RenderableType]:
    """What is printed, from the top."""
    yield Text(headline(topology), style="bold")
    yield from (Text(line) for line in plan_line(topology))
    yield boxes_table(topology, width)
    yield Text("")
    yield from matrix_parts(topology, width, metric)
    flows = [flow for flow in topology.flows if flow.source != flow.target or topology.folded]
    if flows:
        yield Text("")
        yield flows_table(topology, flows[:MAX_FLOWS], network)
        if len(flows) > MAX_FLOWS:
            yield Text(f"and {len(flows) - MAX_FLOWS} more flows; --site and --box choose", style="dim")


def headline(topology: Topology) -> str:
    """What there is, in a line."""
    present, sites = topology.present, topology.sites
    gpus = sum(node.gpus for node in present)
    boxes = f"{len(present)} box{'es' * (len(present) != 1)} at "
    text = f"{'' if topology.folded else boxes}{len(sites)} site{'s' * (len(sites) != 1)}, "
    text += f"{gpus} GPU{'s' * (gpus != 1)}, ${topology.usd_per_hour:.2f}/h"
    gone = len(topology.nodes) - len(present)
    text += f"; {gone} gone" if gone else ""
    return text + (f"; {topology.left_out} not shown" if topology.left_out else "")


def plan_line(topology: Topology) -> Iterator[str]:
    """Plans and coordinator."""
    name_of = labels_of(topology)
    for plan in topology.plans:
        yield f"plan {plan.epoch}.{plan.version} for {plan.service}, KV as {plan.codec}"
    if not topology.plans:
        yield "plan: none yet"
    if topology.coordinator is not None and not topology.folded:
        yield f"coordinator*: {name_of(topology.coordinator)}"


def boxes_table(topology: Topology, width: int) -> Table:
    """A line for each box, those of a site together. Hardware has what the other columns leave of the width."""
    table = Table(*BOX_COLUMNS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    for site, nodes in topology.sites.items():
        for number, node in enumerate(nodes):
            table.add_row(site if not number else "", *_box_cells(node, folded=topology.folded))
    keep_whole(table, *(header for header in BOX_COLUMNS if header != HARDWARE))
    taken = sum((column.min_width or 0) + 2 for column in table.columns if column.header != HARDWARE)
    table.columns[BOX_COLUMNS.index(HARDWARE)].max_width = max(len(HARDWARE), width - taken)
    return table


def _box_cells(node: NodeSummary, *, folded: bool) -> tuple[str | Text, ...]:
    name = node.state if folded else label(node) + "*" * node.is_coordinator
    phase = Text(node.phase or "-", style=colours.ON_DARK.get(node.phase, "") if node.phase else "dim")
    if node.state in GONE:
        return name, Text(node.state, style="dim"), Text(node.hardware or "-", style="dim"), "-", "-"
    load = f"{node.running}/{node.waiting}" if node.running is not None else node.engine_state or "-"
    if node.kv_usage is not None and not folded:
        load += f", {node.kv_usage:.0%}"
    return name, phase, node.hardware or "-", load, f"{node.usd_per_hour:.2f}"


def matrix_parts(
    topology: Topology, width: int, metric: str, chosen: tuple[str, str] | None = None
) -> Iterator[RenderableType]:
    """The matrix, in as many parts below each other as the width needs, and what its cells mean; the cell of the
    `chosen` link stands out."""
    nodes = matrix_nodes(topology)
    if not topology.links:
        yield Text("links: none has been measured yet" if len(nodes) > 1 else "links: there is one box")
        return
    names = [node.id if topology.folded else label(node) for node in nodes]
    room = max(4, *map(len, names)) + 5
    each = max(1, (width - room) // (_CELL + 1))
    yield Text(f"links: {_about(metric)}, from the box in the row to the one in the column", style="bold")
    for first in range(0, len(nodes), each):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=True, header_style="bold")
        table.add_column("")
        columns = range(first, min(len(nodes), first + each))
        for column in columns:
            table.add_column(f"{column + 1}", justify="right", min_width=_CELL)
        for row, source in enumerate(nodes):
            keys = [(source.id, nodes[column].id) for column in columns]
            cells = [matrix_cell(topology.links.get(key), key, metric, is_chosen=key == chosen) for key in keys]
            table.add_row(f"{row + 1:>3} {names[row]}", *cells)
        yield table
    yield _legend()


def matrix_nodes(topology: Topology) -> list[NodeSummary]:
    """The boxes of the matrix, in its order."""
    return [node for group in topology.sites.values() for node in group if node.state not in GONE]


def matrix_cell(link: LinkSummary | None, key: LinkKey, metric: str, *, is_chosen: bool = False) -> Text:
    """One link: its figure on its colour. `~`: inferred, `>`: at least, `?`: not known."""
    frame = "reverse bold" if is_chosen else "dim"
    if link is None:
        return Text(("" if key[0] == key[1] else "?").rjust(_CELL), style=frame)
    colour = colours.link_colour(link)
    text = "down" if not link.reachable else cell_text(link, metric)
    mark = "~" if link.known == "inferred" else ""
    style = "reverse bold" if is_chosen else f"{colours.ink_on(colour)} on {colour}"
    return Text(f"{mark}{text}".rjust(_CELL), style=style)


def cell_text(link: LinkSummary, metric: str) -> str:
    """The figure of a link that is shown, in five characters at most."""
    match metric:
        case "rtt":
            return f"{link.rtt_s * 1e3:.0f}ms" if link.rtt_s >= 0.00995 else f"{link.rtt_s * 1e3:.1f}ms"
        case "loss":
            return f"{link.loss:.1%}"
        case "price":
            return f"${link.usd_per_gb:.3f}".replace("$0.", "$.")
        case "age":
            return age_text(link.age_s)
        case _:
            return (">" if link.is_floor else "") + rate_text(link.gbps)


def age_text(seconds: float | None) -> str:
    """How long ago, in four characters at most."""
    if seconds is None:
        return "-"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds >= size:
            return f"{min(999.0, seconds / size):.0f}{unit}"
    return f"{seconds:.0f}s"


def _about(metric: str) -> str:
    return {
        "rtt": "round trip",
        "loss": "loss",
        "price": "dollars per GB",
        "age": "time since it was measured",
    }.get(metric, "Gb/s over many streams")


def _legend() -> Text:
    text = Text("Gb/s: ")
    for gbps in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        colour = colours.rate_colour(gbps)
        text.append(f" {gbps:g} ", style=f"{colours.ink_on(colour)} on {colour}")
    return text.append("  ~ inferred, > at least, ? not known", style="dim")


def flows_table(topology: Topology, flows: list[KvFlow], network: PathNetwork | None) -> Table:
    """What KV goes where, and the path that it takes."""
    columns = ["KV from", "to", "share", "sent", "now"] + (["path for 80 MB"] if network is not None else [])
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    name_of = labels_of(topology)
    for flow in flows:
        now = "-" if flow.gbps is None else f"{flow.gbps:.2f} Gb/s"
        relayed = f", {flow.relayed_bytes / max(1, flow.wire_bytes):.0%} relayed" if flow.relayed_bytes else ""
        sent = f"{flow.transfers} in {flow.wire_bytes / 1e9:.2f} GB{relayed}" if flow.transfers else "nothing yet"
        cells = [name_of(flow.source), name_of(flow.target), f"{flow.share:.0%}" if flow.share else "-", sent, now]
        table.add_row(*cells, *([path_text(topology, flow, network)] if network is not None else []))
    return keep_whole(table, "KV from", "to", "share")


def path_text(topology: Topology, flow: KvFlow, network: PathNetwork) -> str:
    """The path that a long prompt's KV would take, as far as others can tell."""
    name_of = labels_of(topology)
    try:
        choice = choose(PathQuery(source=flow.source, target=flow.target, bytes=_FLOW_BYTES), network)
    except (FiguresError, NoPath) as error:
        return f"none: {error}"
    ways = [f"via {name_of(path.via)}" if path.via else "direct" for path in choice.paths]
    streams = sum(path.streams for path in choice.paths)
    return f"{' + '.join(ways)}, {streams} stream{'s' * (streams != 1)}, {rate_text(choice.taken.gbps)} Gb/s"


def link_lines(link: LinkSummary, source: str, target: str) -> Iterator[str]:
    """All that is known of a link, for `inspect link`."""
    yield f"link {source} -> {target}: {'up' if link.reachable else 'unreachable'}"
    bound = "at least " if link.is_floor else ""
    single = f"one stream {link.one_stream_gbps:.3f} Gb/s"
    yield f"  capacity    {bound}{link.gbps:.3f} Gb/s over {link.streams} streams; {single}"
    yield f"  round trip  {link.rtt_s * 1e3:.2f} ms, jitter {link.jitter_s * 1e3:.2f} ms, loss {link.loss:.2%}"
    yield f"  price       ${link.usd_per_gb:.4f} per GB"
    age = f", measured {describe_age(link.age_s)} ago" if link.age_s is not None else ""
    yield f"  known       {link.known}, {link.confidence:.0%} sure{age}"
    yield f"  why         {link.reason or '-'}"
    relayed = f", {link.relayed_bytes / 1e9:.3f} GB of it through relays" if link.relayed_bytes else ""
    failed = f", {link.kv_failed} of them failed" if link.kv_failed else ""
    yield f"  KV sent     {link.kv_bytes / 1e9:.3f} GB in {link.kv_transfers} transfers{failed}{relayed}"


def node_lines(node: NodeSummary, topology: Topology) -> Iterator[str]:
    """All that is known of a box, for `inspect node`."""
    mark = ", coordinator" if node.is_coordinator else ""
    age = f", {describe_age(node.gone_s)} ago" if node.gone_s is not None else ""
    yield f"box {label(node)}: {node.state}{age}{mark}"
    yield f"  id        {node.id}"
    yield f"  address   {node.address}, role {node.role}, site {node.site or '-'}"
    rtt = (
        f"{node.rtt_s * 1e3:.1f} ms from {labels_of(topology)(topology.answered_by)}" if node.rtt_s is not None else "-"
    )
    yield f"  distance  {rtt}"
    yield f"  hardware  {node.hardware or '-'}"
    pinned = f", pinned to {node.pinned}" if node.pinned else ""
    layers = f", layers {node.layers[0]} to {node.layers[1]}" if node.layers is not None else ""
    yield f"  phase     {node.phase or 'none'}{pinned}{layers}"
    detail = f", {node.engine_detail}" if node.engine_detail else ""
    yield f"  engine    {node.engine_state or 'none'}{detail}; {node.engine or '-'}"
    yield f"  serves    {node.service or 'nothing'}"
    if node.running is not None and node.kv_usage is not None:
        quota = f" (may have {node.kv_quota:.0%})" if node.kv_quota < 1.0 else ""
        kv = f"KV {node.kv_usage:.0%}{quota} of {node.kv_tokens} tokens"
        yield f"  load      {node.running} running, {node.waiting} waiting, {kv}"
    yield f"  served    {node.prefilled_tokens} tokens prefilled, {node.decoded_tokens} decoded since it was started"
    if node.cached_tokens:
        hit = node.cached_tokens / (node.cached_tokens + node.prefilled_tokens)
        yield f"  cached    {node.cached_tokens} more of prompts were in its prefix cache, {hit:.0%} of them"
    traffic = f"${node.up_usd_per_gb:.3f} per GB out, ${node.down_usd_per_gb:.3f} in"
    yield f"  price     ${node.usd_per_hour:.2f}/h, {traffic}"
    for plan in topology.plans:
        for why in plan.why:
            if node.id in why:
                text = why
                for peer in plan.peers:
                    text = text.replace(peer, labels_of(topology)(peer))
                yield f"  why       {text}"
