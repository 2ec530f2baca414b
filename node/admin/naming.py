"""Boxes by the names that people use: the short one, the peer id, or the id's end as tables show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...coordinator.names import find_peers, name_of
from ..observing.values import NodeSummary

MAX_SHOWN: Final = 64
LEAST_ENDING: Final = 4  # characters of an id that may stand for it


class UnknownBox(LookupError):
    """No box is called that, or several are; the text names those there are."""


def label_of(node: NodeSummary) -> str:
    """What people call a box."""
    return node.name or short_id(node.id)


def short_id(peer: str) -> str:
    """What a peer is called of which no more is known."""
    return peer if len(peer) <= 8 else name_of(peer)


def shown(text: str) -> str:
    """What somebody has given, no longer than is told back."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def labels_of(nodes: Sequence[NodeSummary]) -> dict[str, str]:
    """What people call them, by peer id."""
    return {node.id: label_of(node) for node in nodes}


def find_box(nodes: Sequence[NodeSummary], name: str, field: str = "node") -> NodeSummary:
    """The one box that is called `name`. Raises UnknownBox, which names `field`."""
    exact = [node for node in nodes if name in (node.id, node.name)]
    peers = find_peers(name, [node.id for node in nodes]) if len(name) >= LEAST_ENDING else []
    found = exact or [node for node in nodes if node.id in peers]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownBox(f"{field}: {len(found)} boxes are called {shown(name)}; give the whole peer id")
    known = ", ".join(label_of(node) for node in nodes[:20]) or "none at all"
    raise UnknownBox(f"{field}: no box is called {shown(name)}; there are {known}")
