"""What happened, as text: a line for each event, or the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import msgspec

from ...node.observing.event_log import describe
from ...node.observing.values import EventKind, NodeEvent
from ..errors import UsageError

GROUPS = tuple(dict.fromkeys(kind.value.partition(".")[0] for kind in EventKind))


def event_line(event: NodeEvent, name_of: Callable[[str], str]) -> str:
    """`12:00:01.250  amber-otter  request.ended request=5f.. finish=stop`, in UTC. Ids of boxes are shortened."""
    at = datetime.fromtimestamp(event.time, UTC).strftime("%H:%M:%S.%f")[:-3]
    text = describe(event)
    for peer in _peers(event):
        text = text.replace(peer, name_of(peer))
    return f"{at}  {name_of(event.node):<16}{text}"


def event_json(event: NodeEvent) -> str:
    """One line for programs."""
    return json.dumps(msgspec.to_builtins(event))


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """Kinds or groups of them, as a log has them. Raises UsageError."""
    found = tuple(kinds)
    known = {*GROUPS, *(kind.value for kind in EventKind)}
    for kind in found:
        if kind not in known:
            raise UsageError(
                f"kind: {kind} is none; there are {', '.join(GROUPS)}, or one like {EventKind.ENGINE_STATE}"
            )
    return found


def _peers(event: NodeEvent) -> list[str]:
    """What looks like a peer id in it."""
    words = [event.peer, *(word.strip(",;:") for value in event.facts.values() for word in str(value).split())]
    return [word for word in words if word.startswith("12D3KooW") and len(word) > 40]
