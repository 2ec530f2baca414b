"""Lists of the admin API: what is asked for of a snapshot, page by page. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, Generic, Literal, TypeVar

import msgspec

from ..observing.values import LinkSummary, NodeEvent, NodeSummary, RequestSummary
from .naming import find_box, shown

MAX_PAGE: Final = 1000
PAGE: Final = 100

T = TypeVar("T")

Order = Literal["asc", "desc"]


class CursorError(ValueError):
    """`after` names nothing that is in the list; the text says how to go on."""


class ListPage(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list, as OpenAI's API has them. `last_id`, given as `after`, asks for what follows."""

    object: Literal["list"] = "list"
    data: Annotated[tuple[T, ...], msgspec.Meta(max_length=MAX_PAGE)]
    has_more: bool
    first_id: str | None
    last_id: str | None


def cut_page(items: Sequence[T], key: Callable[[T], str], *, limit: int, after: str | None) -> ListPage[T]:
    """At most `limit` items, from behind the one whose key is `after`. Raises CursorError where there is none."""
    start = 0
    if after is not None:
        start = next((number for number, item in enumerate(items, 1) if key(item) == after), 0)
        if not start:
            raise CursorError(f"after: {shown(after)} is not in this list (any more); begin again without it")
    data = tuple(items[start : start + limit])
    ends = (key(data[0]), key(data[-1])) if data else (None, None)
    return ListPage(data=data, has_more=start + limit < len(items), first_id=ends[0], last_id=ends[1])


def link_key(link: LinkSummary) -> str:
    """A link's name in lists."""
    return f"{link.source}:{link.target}"


def event_key(event: NodeEvent) -> str:
    """An event's name in lists and in streams."""
    return f"{event.node}:{event.number}"


def select_nodes(
    nodes: Iterable[NodeSummary],
    *,
    site: str | None = None,
    state: str | None = None,
    phase: str | None = None,
    service: str | None = None,
) -> list[NodeSummary]:
    """The boxes that fit all that is given."""
    wanted = {"site": site, "state": state, "phase": phase, "service": service}
    asked = {field: value for field, value in wanted.items() if value is not None}
    return [node for node in nodes if all(getattr(node, field) == value for field, value in asked.items())]


class LinkFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which links are asked for; boxes by any of their names. None: all."""

    source: str | None = None
    target: str | None = None
    site: str | None = None  # of either end
    known: str | None = None
    min_gbps: float | None = None
    max_gbps: float | None = None


def select_links(links: Iterable[LinkSummary], nodes: Sequence[NodeSummary], wanted: LinkFilter) -> list[LinkSummary]:
    """The links that fit all that is asked. Raises UnknownBox."""
    source = find_box(nodes, wanted.source, "source").id if wanted.source is not None else None
    target = find_box(nodes, wanted.target, "target").id if wanted.target is not None else None
    sites = {node.id: node.site for node in nodes}
    return [
        link
        for link in links
        if source in (None, link.source)
        and target in (None, link.target)
        and (wanted.site is None or wanted.site in (sites.get(link.source), sites.get(link.target)))
        and wanted.known in (None, link.known)
        and (wanted.min_gbps is None or link.gbps >= wanted.min_gbps)
        and (wanted.max_gbps is None or link.gbps <= wanted.max_gbps)
    ]


def select_requests(
    requests: Iterable[RequestSummary], *, node: str | None = None, state: str | None = None, service: str | None = None
) -> list[RequestSummary]:
    """The requests that fit all that is given. `node` is a peer id: of the gateway or of either replica."""
    return [
        request
        for request in requests
        if node in (None, request.gateway, request.prefill, request.decode)
        and state in (None, request.state)
        and service in (None, request.service)
    ]


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events are asked for; None: all. `kind` may be a group, as `request` for all of `request.*`; `node` is a
    peer id, of the box that tells or of the one told of."""

    kind: str | None = None
    node: str | None = None
    request: str | None = None

    def takes(self, event: NodeEvent) -> bool:
        """Whether it fits all that is asked."""
        return (
            (self.kind is None or event.kind == self.kind or event.kind.startswith(f"{self.kind}."))
            and self.node in (None, event.node, event.peer)
            and self.request in (None, event.request)
        )


def select_events(events: Iterable[NodeEvent], wanted: EventFilter) -> list[NodeEvent]:
    """Those that are asked for, in their order."""
    return [event for event in events if wanted.takes(event)]


def find_news(before: Iterable[NodeEvent], now: Sequence[NodeEvent]) -> list[NodeEvent]:
    """The events of `now` that were not there before. A log's numbers may begin again when its box does, so it is the
    whole list that tells, and not the highest number."""
    seen = {(event.node, event.number, event.time) for event in before}
    return [event for event in now if (event.node, event.number, event.time) not in seen]


def skip_seen(events: Sequence[NodeEvent], last: str) -> Sequence[NodeEvent]:
    """The events behind the one whose key is `last`; all, where it is not there any more."""
    return events[next((number for number, event in enumerate(events, 1) if event_key(event) == last), 0) :]
