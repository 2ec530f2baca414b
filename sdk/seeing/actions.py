"""What the commands do that look at a network: `topology`, `events` and `inspect`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import msgspec
from msgspec.structs import replace

from ...coordinator.names import name_of
from ...node.observing.event_file import EventFileError, merge, read_events
from ...node.observing.event_log import matches
from ...node.observing.queries import EventQuery
from ...node.observing.traces import assemble_trace, estimate_clocks, find_request
from ...node.observing.values import MAX_EVENTS, NodeEvent, RequestTrace
from ..actions.links_view import network_of
from ..actions.network import client_of
from ..actions.status_view import open_console, print_prose
from ..errors import UsageError
from ..printing import printable
from .drawing import write_png, write_svg, write_text
from .events_view import check_kinds, event_json, event_line
from .request_trace import write_trace
from .topology import Topology, build_topology, find_box, fold, label, labels_of, select
from .topology_map import draw_topology
from .topology_view import link_lines, node_lines, print_topology
from .trace_view import trace_lines

FOLLOW_S: Final = 10.0  # that a node is asked to wait for the next event
NOTHING: Final = (
    "no such events that may be shown; those of a request are shown to who names its id (--request ID), and all of a "
    "box to who reads its log there (--from events.msgpack)"
)
STDOUT: Final = Path("-")
FOLD_FROM: Final = 40  # boxes from which on a table has their sites, if nothing else is said


def topology(arguments: SimpleNamespace) -> int:
    """`p2pserve topology`."""
    if arguments.watch:
        return _watch(arguments)
    with client_of(arguments) as client:
        status = client.status()
    found = select(build_topology(status, time.time()), arguments.sites, arguments.boxes)
    if arguments.svg is not None:
        write_svg(draw_topology(fold(found) if arguments.fold else found), arguments.svg)
    if arguments.png is not None:
        write_png(draw_topology(fold(found) if arguments.fold else found), arguments.png)
    to_stdout = arguments.format == "json" or arguments.json == STDOUT
    if arguments.json is not None and arguments.json != STDOUT:
        write_text("json", f"{json.dumps(topology_json(found))}\n", arguments.json)
    if to_stdout:
        print(json.dumps(topology_json(found)))
    elif arguments.svg is None and arguments.png is None and arguments.json is None:
        is_folded = arguments.fold or (arguments.fold is None and len(found.nodes) >= FOLD_FROM)
        shown = fold(found) if is_folded else found
        print_topology(shown, None if is_folded else network_of(status), open_console(), arguments.show)
    return 0


def _watch(arguments: SimpleNamespace) -> int:
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise UsageError("watch: this is no terminal; leave --watch out, or use --format json")
    files = (arguments.svg, arguments.png, arguments.json)
    if arguments.format == "json" or any(file is not None for file in files):
        raise UsageError("watch: it goes with neither --format json nor a file; leave one of them out")
    from .watch import TopologyApp, WatchOptions  # a terminal program's library takes a tenth of a second

    options = WatchOptions(
        interval_s=arguments.interval_s,
        sites=arguments.sites,
        boxes=arguments.boxes,
        folded=bool(arguments.fold),
        metric=arguments.show,
    )
    with client_of(arguments) as client:
        select(build_topology(client.status(), time.time()), options.sites, options.boxes)
        TopologyApp(client.status, time.time, options).run()
    return 0


def topology_json(topology: Topology) -> dict[str, object]:
    """All of it, for programs."""
    return {
        "answered_by": topology.answered_by,
        "coordinator": topology.coordinator,
        "plan": msgspec.to_builtins(next(iter(topology.plans), None)),
        "other_plans": msgspec.to_builtins(topology.plans[1:]),
        "nodes": msgspec.to_builtins(topology.nodes),
        "links": msgspec.to_builtins(tuple(topology.links.values())),
        "flows": [flow._asdict() for flow in topology.flows],
        "usd_per_hour": topology.usd_per_hour,
    }


def events(arguments: SimpleNamespace) -> int:
    """`p2pserve events`: of a box of a network, or from files."""
    kinds = check_kinds(arguments.kinds)
    query = EventQuery(kinds=kinds, request=arguments.request[:128], limit=min(arguments.count, MAX_EVENTS))
    if arguments.files:
        if arguments.follow or arguments.box:
            raise UsageError("from: files do not grow here, and have all boxes; leave --follow and --box out")
        found = [event for event in read_logs(arguments.files) if matches(event, query)]
        _print_events(sorted(found, key=lambda event: event.time)[-arguments.count :], arguments.format, name_of)
        return 0
    with client_of(arguments) as client:
        known = build_topology(client.status(), time.time())
        box = find_box(known.nodes, arguments.box).id if arguments.box is not None else known.answered_by
        page = client.events(query, box)
        _print_events(page.events, arguments.format, labels_of(known))
        if not page.events and not arguments.follow:
            print(NOTHING, file=sys.stderr)
        while arguments.follow:
            after = page.reached
            page = client.events(replace(query, after=max(1, after), limit=MAX_EVENTS, wait_s=FOLLOW_S), box)
            if page.reached < after:  # the node was started anew, with an empty log
                page = client.events(replace(query, limit=MAX_EVENTS), box)
            _print_events(page.events, arguments.format, labels_of(known))
    return 0


def inspect_request(arguments: SimpleNamespace) -> int:
    """`p2pserve inspect request`: from a network, or afterwards from event logs. Raises UsageError."""
    called: Callable[[str], str] = name_of
    named = arguments.request[:128]
    if not named:
        raise UsageError("request: it is empty; name the id that `generate` has printed")
    if arguments.files:
        found = trace_from_logs(read_logs(arguments.files), named)
    else:
        with client_of(arguments) as client:
            found = client.trace(named)
            if found is not None:
                called = labels_of(build_topology(client.status(), time.time()))
    if found is None:
        where = "these logs have no event" if arguments.files else "no box has an event"
        raise UsageError(f"request: {where} of {named} that may be shown; name the id that `generate` has printed")
    if arguments.trace is not None:
        write_trace(found, arguments.trace, called)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(found)))
        return 0
    width = min(160, open_console().width) if sys.stdout.isatty() else 80
    print_prose(trace_lines(found, called, with_layers=arguments.layers, width=width), open_console())
    if arguments.trace is not None:
        print(f"trace: {arguments.trace} opens in ui.perfetto.dev and chrome://tracing")
    return 0


def inspect_node(arguments: SimpleNamespace) -> int:
    """`p2pserve inspect node`."""
    known = _look(arguments)
    node = find_box(known.nodes, arguments.box)
    _print_one(node, node_lines(node, known), arguments.format)
    return 0


def inspect_link(arguments: SimpleNamespace) -> int:
    """`p2pserve inspect link`."""
    known = _look(arguments)
    one, other = (find_box(known.nodes, getattr(arguments, end), end) for end in ("source", "target"))
    names = label(one), label(other)
    link = known.links.get((one.id, other.id))
    if link is None:
        what = "it is the same box" if one is other else "neither has told of it yet; try again in a minute"
        raise UsageError(f"target: nothing is known of the link {names[0]} -> {names[1]}: {what}")
    _print_one(link, link_lines(link, *names), arguments.format)
    return 0


def _look(arguments: SimpleNamespace) -> Topology:
    with client_of(arguments) as client:
        return build_topology(client.status(), time.time())


def _print_one(found: msgspec.Struct, lines: Iterable[str], form: str) -> None:
    if form == "json":
        print(json.dumps(msgspec.to_builtins(found)))
        return
    print_prose(lines, open_console())


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


def _print_events(events: Iterable[NodeEvent], form: str, name_of: Callable[[str], str]) -> None:
    for event in events:
        print(event_json(event) if form == "json" else printable(event_line(event, name_of)), flush=True)
