"""What one drawing of a page starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..admin.naming import labels_of, short_id
from ..admin.source import NetworkSnapshot
from ..observing.values import LinkSummary, NodeSummary, RequestTrace

NO_SITE: Final = "no site"
LOCAL: Final = "local:"


@dataclass(frozen=True, kw_only=True)
class View:
    """The network, and what its viewer asks to see of it. `flows`: KV between two boxes in Gb/s,
    and `tokens_s`, what all boxes decode, both lately; None: not
    known yet. `base`: where the dashboard is mounted; `query`: what stands
    behind the page's address, each at most once; `name`: the box or request that the page is about."""

    snapshot: NetworkSnapshot
    links: tuple[LinkSummary, ...] = ()
    flows: Mapping[tuple[str, str], float] | None = None
    tokens_s: float | None = None
    base: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    trace: RequestTrace | None = None
    labels: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", labels_of(self.snapshot.nodes))

    def label(self, peer: str) -> str:
        """What people call a box; one that is not there any more, or a client, by the end of its id; and who asks
        through the box's own API, by the name of the key."""
        if peer.startswith(LOCAL):
            return peer.removeprefix(LOCAL) or "API"
        return self.labels.get(peer) or short_id(peer)

    def flow(self, source: str, target: str) -> float:
        """KV that goes from one box to the other, Gb/s."""
        return self.flows.get((source, target), 0.0) if self.flows else 0.0

    @property
    def alive(self) -> tuple[NodeSummary, ...]:
        """The boxes that are there."""
        return tuple(node for node in self.snapshot.nodes if node.state in ("alive", "draining", "suspect"))

    @property
    def shown(self) -> tuple[NodeSummary, ...]:
        """The boxes that are there, at the site that is asked for."""
        site = self.query.get("site")
        return tuple(node for node in self.alive if not site or site == (node.site or NO_SITE))
