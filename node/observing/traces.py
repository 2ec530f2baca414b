"""One request across boxes, put together from the event logs of those that had a part in it. No I/O, no clock.

Each log is in the time of its own box. What a box's clock shows beyond the gateway's is known from a round trip
(`clock_from_round_trip`), or afterwards from the logs themselves: what was asked comes before what was answered
(`estimate_clocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from .values import (
    MAX_BOXES,
    MAX_REASONS,
    MAX_SPANS,
    BoxClock,
    Cost,
    EventKind,
    Fact,
    NodeEvent,
    RequestTrace,
    TraceSpan,
)

_NO_CLOCKS: Mapping[str, BoxClock] = {}
_OF_OUTCOME = ("finish", "error", "prefill", "decode")


def clock_from_round_trip(node: str, shown: float, asked: float, answered: float) -> BoxClock:
    """A box's clock was `shown` at some moment between the question and the answer, which are by another clock."""
    middle = (asked + answered) / 2
    return BoxClock(node=node, offset_s=shown - middle, error_s=max(0.0, answered - asked) / 2)


def relative_clocks(clocks: Mapping[str, BoxClock], gateway: str) -> dict[str, BoxClock]:
    """The same clocks as seen from the gateway, whose own was read with an error as well."""
    here = clocks.get(gateway, BoxClock(node=gateway, error_s=0.0))
    return {
        node: BoxClock(
            node=node,
            offset_s=clock.offset_s - here.offset_s,
            error_s=0.0 if node == gateway else _sum(clock.error_s, here.error_s),
        )
        for node, clock in clocks.items()
    }


def find_request(events: Iterable[NodeEvent], named: str) -> str | None:
    """The network's id of a request, from that or from what its client calls it."""
    for event in events:
        if event.request and named in (event.request, event.facts.get("client_request")):
            return event.request
    return None


def boxes_of(events: Iterable[NodeEvent]) -> tuple[str, ...]:
    """The boxes that had a part in a request, by its gateway's events."""
    found: dict[str, None] = {}
    for event in events:
        found |= {event.node: None}
        names = (
            [event.facts.get(part) for part in ("prefill", "decode")] if event.kind == EventKind.REQUEST_ROUTED else []
        )
        found |= {name: None for name in names if isinstance(name, str)}
    return tuple(found)[:MAX_BOXES]


def estimate_clocks(events: Sequence[NodeEvent]) -> dict[str, BoxClock]:
    """What each box's clock shows beyond the gateway's, from one request's events: a replica begins after the gateway
    has asked it, and before it has heard that."""
    gateway = next((event.node for event in events if event.kind == EventKind.REQUEST_BEGUN), None)
    if gateway is None:
        return {}
    bounds: dict[str, tuple[float, float]] = {}
    for node, earliest, latest in _bounds(events, gateway):
        low, high = bounds.get(node, (-inf, inf))
        bounds[node] = max(low, earliest), min(high, latest)
    found = {gateway: BoxClock(node=gateway, error_s=0.0)}
    for node, (low, high) in bounds.items():
        if low > -inf and high < inf:
            found[node] = BoxClock(node=node, offset_s=(low + high) / 2, error_s=abs(high - low) / 2)
    return found


def _bounds(events: Sequence[NodeEvent], gateway: str) -> Iterator[tuple[str, float, float]]:
    """Boxes, each with an offset that its clock has at least and one that it has at most."""
    asked: dict[tuple[str, Fact | None], float] = {}  # by part and attempt, by the gateway's clock
    heard: dict[tuple[str, Fact | None], float] = {}
    for event in events:
        attempt = event.facts.get("attempt")
        if event.node == gateway and event.kind == EventKind.REQUEST_ROUTED:
            asked["decode", attempt] = event.time
        if event.node == gateway and event.kind == EventKind.REQUEST_OPENED:
            heard[str(event.facts.get("part")), attempt] = event.time
            if event.facts.get("part") == "decode":
                asked["prefill", attempt] = event.time
    parts = {EventKind.DECODE_BEGUN: "decode", EventKind.PREFILL_BEGUN: "prefill"}
    for event in events:
        part = next((part for kind, part in parts.items() if kind == event.kind), None)
        key = (part or "", event.facts.get("attempt"))
        if part is not None and event.node != gateway and key in asked and key in heard:
            yield event.node, event.time - heard[key], event.time - asked[key]


def assemble_trace(
    events: Iterable[NodeEvent], clocks: Mapping[str, BoxClock] = _NO_CLOCKS, missing: Mapping[str, str] | None = None
) -> RequestTrace | None:
    """A request from its events, all of them its own, in any order; None without any."""
    events = sorted(events, key=lambda event: (event.time - _offset(clocks, event.node), event.node, event.number))
    if not events:
        return None
    moved = [(event, event.time - _offset(clocks, event.node)) for event in events]
    begun = next((event for event in events if event.kind == EventKind.REQUEST_BEGUN), None)
    ended = next((event for event in events if event.kind == EventKind.REQUEST_ENDED), None)
    spans = sorted(_spans(moved), key=lambda span: (span.begin, span.name))
    recovered = [str(e.facts.get("why", "")) for e in events if e.kind == EventKind.REQUEST_RECOVERED]
    here = {event.node for event in events}
    absent = dict(missing or {}) | {
        node: "its log has nothing of it" for node in boxes_of(events) if node not in here | (missing or {}).keys()
    }
    return RequestTrace(
        id=events[0].request,
        gateway=begun.node if begun is not None else "",
        client=begun.peer if begun is not None else "",
        outcome=str(ended.facts.get("finish", "")) if ended is not None else "",
        error=str(ended.facts.get("error", "")) if ended is not None else "",
        spans=tuple(spans[:MAX_SPANS]),
        boxes=tuple(clocks.get(node, BoxClock(node=node)) for node in sorted(here))[:MAX_BOXES],
        recovered=tuple(recovered[:MAX_REASONS]),
        missing=absent,
        facts=_facts(begun, ended),
        cost=cost_of(ended) if ended is not None else Cost(),
    )


def cost_of(ended: NodeEvent) -> Cost:
    """What a request has cost, by the event of its end."""
    box, traffic = ended.facts.get("box_usd"), ended.facts.get("traffic_usd")
    return Cost(
        box_usd=max(0.0, box) if isinstance(box, float) else 0.0,
        traffic_usd=max(0.0, traffic) if isinstance(traffic, float) else 0.0,
    )


def _facts(begun: NodeEvent | None, ended: NodeEvent | None) -> dict[str, Fact]:
    found = {**begun.facts} if begun is not None else {}
    return found | {k: v for k, v in (ended.facts if ended is not None else {}).items() if k not in _OF_OUTCOME}


def _spans(moved: Sequence[tuple[NodeEvent, float]]) -> Iterator[TraceSpan]:
    yield from _gateway_spans(moved)
    yield from _between(moved, "prefill", EventKind.PREFILL_BEGUN, (EventKind.PREFILL_DONE, EventKind.PREFILL_ENDED))
    yield from _between(moved, "wait", EventKind.DECODE_BEGUN, (EventKind.DECODE_FIRST_TOKEN, EventKind.DECODE_ENDED))
    yield from _between(moved, "decode", EventKind.DECODE_FIRST_TOKEN, (EventKind.DECODE_ENDED,))
    for event, at in moved:
        if event.kind in (EventKind.TRANSFER_ENDED, EventKind.TRANSFER_FAILED):
            yield from _transfer_spans(event, at)


def _gateway_spans(moved: Sequence[tuple[NodeEvent, float]]) -> Iterator[TraceSpan]:
    yield from _between(
        moved, "queue", EventKind.REQUEST_BEGUN, (EventKind.REQUEST_ROUTED, EventKind.REQUEST_ENDED), by_attempt=False
    )
    yield from _between(moved, "open", EventKind.REQUEST_ROUTED, (EventKind.REQUEST_OPENED, EventKind.REQUEST_ENDED))
    yield from _between(moved, "answer", EventKind.REQUEST_FIRST_TOKEN, (EventKind.REQUEST_ENDED,), by_attempt=False)
    for event, at in moved:
        if event.kind == EventKind.REQUEST_RECOVERED:
            yield TraceSpan(
                name="replay", node=event.node, begin=at, end=at, attempt=_attempt(event), facts=event.facts
            )


def _between(
    moved: Sequence[tuple[NodeEvent, float]],
    name: str,
    begin: EventKind,
    ends: tuple[EventKind, ...],
    *,
    by_attempt: bool = True,
) -> Iterator[TraceSpan]:
    """A span from each such event to the next of `ends` at the same box, of the same attempt."""
    for index, (event, at) in enumerate(moved):
        if event.kind != begin:
            continue
        end = next(
            (
                (other, then)
                for other, then in moved[index + 1 :]
                if other.node == event.node
                and other.kind in ends
                and (not by_attempt or other.kind == EventKind.REQUEST_ENDED or _attempt(other) == _attempt(event))
            ),
            None,
        )
        facts = {**event.facts, **(end[0].facts if end is not None and end[0].kind in ends[-1:] else {})}
        yield TraceSpan(
            name=name,
            node=event.node,
            begin=at,
            end=max(at, end[1]) if end is not None else None,
            attempt=_attempt(event),
            facts=dict(list(facts.items())[:32]),
        )


def _transfer_spans(event: NodeEvent, ended: float) -> Iterator[TraceSpan]:
    span_s = event.facts.get("span_s")
    begin = max(0.0, ended - (span_s if isinstance(span_s, float) else 0.0))
    attempt, facts = _attempt(event), {**event.facts, "target": event.peer}
    yield TraceSpan(name="kv", node=event.node, begin=begin, end=ended, attempt=attempt, facts=facts)
    for layers in event.layers:
        yield TraceSpan(
            name="kv.layers",
            node=event.node,
            begin=begin + layers.begin_s,
            end=begin + max(layers.begin_s, layers.end_s),
            attempt=attempt,
            facts={"first": layers.first_layer, "last": layers.last_layer, "wire_bytes": layers.wire_bytes},
        )


def _attempt(event: NodeEvent) -> int:
    value = event.facts.get("attempt")
    return value if isinstance(value, int) and value > 0 else 0


def _offset(clocks: Mapping[str, BoxClock], node: str) -> float:
    clock = clocks.get(node)
    return clock.offset_s if clock is not None else 0.0


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
