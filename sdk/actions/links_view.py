"""What the nodes say of the links between them, and which path KV would take by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from ...bootstrap import MemberState, Role
from ...coordinator.names import find_peers, name_of
from ...kvtransport.errors import FiguresError
from ...kvtransport.probing.figures import BoxFigures, LinkFigures
from ...kvtransport.routing.paths import NoPath, PathChoice, PathNetwork, PathQuery, choose
from ...node.messages import Status
from ..errors import UsageError
from .status_view import keep_whole, open_console

COLUMNS = ("from", "to", "rtt", "loss", "one stream", "capacity", "sure", "source")
NARROW = ("from", "to", "rtt", "loss", "capacity", "source")
"""What fits 80 columns."""


def network_of(status: Status) -> PathNetwork:
    """The network's links and boxes, as their nodes advertise them."""
    links: dict[tuple[str, str], LinkFigures] = {}
    boxes: dict[str, BoxFigures] = {}
    for node in status.nodes:
        if node.links is not None and node.state in (MemberState.ALIVE.value, MemberState.SUSPECT.value):
            boxes[node.peer] = node.links.box
            links |= {(node.peer, target): figures for target, figures in node.links.links.items()}
    return PathNetwork(links, boxes)


def print_links(status: Status, console: Console | None = None, *, wide: bool = False) -> None:
    """Print the table of links, or that there is none yet."""
    console = console or open_console()
    network = network_of(status)
    console.print("links:" if network.links else "links: none has been measured yet")
    if network.links:
        console.print(links_table(network, COLUMNS if wide else NARROW))


def links_table(network: PathNetwork, columns: Sequence[str] = COLUMNS) -> Table:
    """One line for each directed link, with these of COLUMNS."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for (source, target), link in sorted(network.links.items()):
        bound = ">=" if link.capacity_is_floor else ""
        cells = (
            name_of(source),
            name_of(target),
            f"{link.rtt_s * 1e3:.1f} ms" if link.reachable else "unreachable",
            f"{link.loss:.2%}",
            f"{link.one_stream_gbps:.3f} Gb/s",
            f"{bound}{link.capacity_gbps:.3f} Gb/s",
            f"{link.rate_confidence:.0%}",
            link.source.value,
        )
        table.add_row(*(cell for name, cell in zip(COLUMNS, cells, strict=True) if name in columns))
    return keep_whole(table, "from", "to")


def explain_path(
    status: Status, source: str, target: str, megabytes: float, prices: tuple[float | None, float | None]
) -> PathChoice:
    """The path `megabytes` would take between two nodes; every candidate, and why it was not taken.

    `prices`: dollars a second saved is worth, and most dollars per GB. Raises UsageError."""
    ends = _node(status, source, "source"), _node(status, target, "target")
    if ends[0] == ends[1]:
        raise UsageError(f"target: {target} is the source itself; name another node")
    size = max(1, round(megabytes * 1e6))
    job = PathQuery(source=ends[0], target=ends[1], bytes=size, usd_per_s=prices[0], max_usd_per_gb=prices[1])
    try:
        return choose(job, network_of(status))
    except FiguresError:
        text = f"source: {name_of(ends[0])} has not measured its link to {name_of(ends[1])} yet; try again in a minute"
        raise UsageError(text) from None
    except NoPath as error:
        raise UsageError(f"target: {error}") from None


def choice_text(choice: PathChoice) -> str:
    """A line for each candidate, with node ids as tables show them."""
    peers = {
        peer for each in choice.why for path in each.paths for peer in (path.via, path.source, path.target) if peer
    }
    lines = []
    for candidate in choice.why:
        paths = tuple(replace(path, via=name_of(path.via) if path.via else None) for path in candidate.paths)
        line = replace(candidate, paths=paths).explain()
        for peer in peers:
            line = line.replace(peer, name_of(peer))
        lines.append(line)
    return "\n".join(lines)


def _node(status: Status, name: str, field: str) -> str:
    """The one node that is called so: by its name, its id or the end of that."""
    nodes = [node.peer for node in status.nodes if node.role != Role.CLIENT.value]
    found = find_peers(name, nodes)
    if len(found) != 1:
        known = ", ".join(map(name_of, nodes))
        what = "no node" if not found else f"{len(found)} nodes"
        raise UsageError(f"{field}: {what} called {name}; there are {known}")
    return found[0]
