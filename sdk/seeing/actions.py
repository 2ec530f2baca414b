"""What the commands do that look at a network: `topology`, `events` and `inspect`.

Each takes a client and plain options, prints, and raises ClientError or UsageError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from ...node.messages import Status
from ...node.observing.event_file import EventFileError, merge, read_events
from ...node.observing.event_log import matches
from ...node.observing.queries import EventQuery
from ...node.observing.traces import assemble_trace, estimate_clocks, find_request
from ...node.observing.values import LinkSummary, NodeEvent, RequestTrace
from ..client import Client
from ..commands.links_view import network_of
from ..commands.status_view import open_console, plan_lines
from ..errors import UsageError
from ..printing import printable
from .drawing import write_png, write_svg
from .events_view import check_kinds, event_json, event_line
from .request_trace import write_trace
from .topology import Topology, build_topology, find_box, fold, labels_of, select
from .topology_map import draw_topology
from .topology_view import check_metric, link_lines, node_lines, print_topology
from .trace_view import trace_lines
from .watch import TopologyApp, WatchOptions

FOLLOW_S: Final = 10.0  # that a node is asked to wait for the next event
FOLD_FROM: Final = 40  # boxes from which on a terminal shows their sites, if nothing else is said


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyOptions:
    """What `topology` shows, and how. `folded` None: sites in place of boxes where those are many."""

    format: str = "table"
    sites: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    folded: bool | None = None
    metric: str = "rate"
    svg: Path | None = None
    png: Path | None = None
    watch: bool = False
    interval_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """Which events are shown. `node` None: those of the nearest; `files` in place of a network."""

    format: str = "text"
    kinds: tuple[str, ...] = ()
    request: str = ""
    node: str | None = None
    count: int = 100
    follow: bool = False
    files: tuple[Path, ...] = field(default=())


def show_topology(client: Client, options: TopologyOptions) -> None:
    """`p2pserve topology`."""
    check_metric(options.metric)
    if options.watch:
        watch_topology(client, options)
        return
    status = client.status()
    topology = select(build_topology(status, time.time()), options.sites, options.boxes)
    if options.format == "json":
        print(json.dumps(topology_json(topology)))
        return
    drawn = fold(topology) if options.folded else topology
    if options.svg is not None:
        write_svg(draw_topology(drawn), options.svg)
    if options.png is not None:
        write_png(draw_topology(drawn), options.png)
    if options.svg is None and options.png is None:
        many = len(topology.nodes) >= FOLD_FROM
        shown = fold(topology) if options.folded or (options.folded is None and many) else topology
        print_topology(shown, None if shown.folded else network_of(status), open_console(), options.metric)


def watch_topology(client: Client, options: TopologyOptions) -> None:
    """`p2pserve topology --watch`. Raises UsageError where there is no terminal."""
    if not open_console().is_terminal:
        raise UsageError("watch: the output is no terminal; leave --watch out, or use --format json")
    watched = WatchOptions(
        interval_s=options.interval_s,
        sites=options.sites,
        boxes=options.boxes,
        folded=bool(options.folded),
        metric=options.metric,
    )
    TopologyApp(client.status, time.time, watched).run()


def topology_json(topology: Topology) -> dict[str, object]:
    """All of it, for programs."""
    return {
        "answered_by": topology.answered_by,
        "coordinator": topology.coordinator,
        "plan": msgspec.to_builtins(topology.plan),
        "nodes": msgspec.to_builtins(topology.nodes),
        "links": msgspec.to_builtins(tuple(topology.links.values())),
        "flows": [flow._asdict() for flow in topology.flows],
        "usd_per_hour": topology.usd_per_hour,
    }


def show_events(connect: Callable[[], Client], options: EventOptions) -> None:
    """`p2pserve events`: from files, or of a node of a network, which `connect` reaches."""
    kinds = check_kinds(options.kinds)
    if options.files:
        if options.follow:
            raise UsageError("follow: files do not grow here; leave --follow or --from out")
        found = [event for event in read_logs(options.files) if _is_wanted(event, kinds, options.request)]
        _print_events(found[-options.count :], options.format, _last_six)
        return
    with connect() as client:
        topology = build_topology(client.status(), time.time())
        node = find_box(topology.nodes, options.node).id if options.node is not None else topology.answered_by
        query = EventQuery(kinds=kinds, request=options.request, limit=min(options.count, 512))
        page = client.events(query, node)
        _print_events(page.events, options.format, labels_of(topology))
        while options.follow:
            following = msgspec.structs.replace(query, after=max(1, page.reached), limit=512, wait_s=FOLLOW_S)
            page = client.events(following, node)
            if page.reached < following.after - 1:  # the node was started anew, with an empty log
                page = msgspec.structs.replace(page, reached=0)
            _print_events(page.events, options.format, labels_of(topology))


def inspect_request(
    connect: Callable[[], Client],
    request: str,
    *,
    files: Sequence[Path] = (),
    trace: Path | None = None,
    with_layers: bool = False,
    as_json: bool = False,
) -> None:
    """`p2pserve inspect request`: from event logs, or from a network. Raises UsageError for one that nobody knows."""
    name_of: Callable[[str], str] = _last_six
    if files:
        found = trace_from_logs(read_logs(files), request)
    else:
        with connect() as client:
            found = client.trace(request)
            if found is not None:
                name_of = labels_of(build_topology(client.status(), time.time()))
    if found is None:
        where = "these logs have" if files else "no box has"
        raise UsageError(
            f"request: {where} no event of {request} that may be shown; name the id that `generate` has printed"
        )
    if trace is not None:
        write_trace(found, trace, name_of)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
        return
    for line in trace_lines(found, name_of, with_layers=with_layers, width=open_console().width):
        print(printable(line))
    if trace is not None:
        print(f"trace: {trace} opens in ui.perfetto.dev and chrome://tracing")


def inspect_node(status: Status, node: str) -> Iterator[str]:
    """`p2pserve inspect node`: lines. Raises UsageError."""
    topology = build_topology(status, time.time())
    return node_lines(find_box(topology.nodes, node), topology)


def inspect_link(status: Status, source: str, target: str) -> tuple[LinkSummary, Iterator[str]]:
    """`p2pserve inspect link`: what is known of it, and as lines. Raises UsageError."""
    topology = build_topology(status, time.time())
    one, other = find_box(topology.nodes, source), find_box(topology.nodes, target)
    name_of = labels_of(topology)
    link = topology.links.get((one.id, other.id))
    if link is None:
        what = "it is the same box" if one is other else "neither has told of it yet; try again in a minute"
        raise UsageError(f"target: nothing is known of the link {name_of(one.id)} -> {name_of(other.id)}: {what}")
    return link, link_lines(link, name_of(one.id), name_of(other.id))


def inspect_plan(status: Status) -> list[str]:
    """`p2pserve inspect plan`: coordinator, plan, pairings and the reasons for them."""
    return plan_lines(status)


def read_logs(files: Iterable[Path]) -> list[NodeEvent]:
    """The events of several nodes' files. Raises UsageError."""
    try:
        return merge([read_events(path) for path in files])
    except EventFileError as error:
        raise UsageError(f"from: {error}") from error


def trace_from_logs(events: Iterable[NodeEvent], named: str) -> RequestTrace | None:
    """A request from whole logs, afterwards."""
    events = list(events)
    request = find_request(events, named)
    if request is None:
        return None
    own = [event for event in events if event.request == request]
    return assemble_trace(own, estimate_clocks(own))


def _is_wanted(event: NodeEvent, kinds: tuple[str, ...], request: str) -> bool:
    return matches(event, EventQuery(kinds=kinds, request=request))


def _print_events(events: Iterable[NodeEvent], form: str, name_of: Callable[[str], str]) -> None:
    for event in events:
        print(event_json(event) if form == "json" else printable(event_line(event, name_of)), flush=True)


def _last_six(peer: str) -> str:
    return f"..{peer[-6:]}"
