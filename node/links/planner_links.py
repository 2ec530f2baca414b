"""The links between boxes as the planner wants them, made anew only for boxes that tell something else than before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, final

from ...bootstrap import PeerId
from ...coordinator import LinkView
from ...coordinator.capacity import SLOWEST_GBPS
from ...kvtransport.probing.figures import BoxFigures, LinkFigures
from ...kvtransport.probing.sites import SiteLinks
from ..messages import LinkTable

_UNTOLD: Final = LinkTable()


class _LinkEnd(NamedTuple):
    """What a box says of itself that the links of others depend on."""

    site: str
    box: BoxFigures


@final
class PlannerLinks:
    """One per view of the network.

    Of 60 boxes there are 3,540 links, and they are asked for on the agent's event loop each time that one box has
    measured something: those of the other 59 are the same values as before."""

    def __init__(self) -> None:
        self._ends: dict[PeerId, _LinkEnd] = {}
        self._made: dict[PeerId, tuple[LinkTable, tuple[LinkView, ...]]] = {}

    def __repr__(self) -> str:
        return f"<PlannerLinks boxes={len(self._made)}>"

    def between(self, peers: Iterable[PeerId], told: Mapping[PeerId, LinkTable]) -> list[LinkView]:
        """Links between these boxes, by source and target, as the boxes at their beginnings tell of them."""
        return [link for source in self._update(peers, told) for link in self._made[source][1]]

    def to(
        self, target: PeerId, sources: Iterable[PeerId], peers: Iterable[PeerId], told: Mapping[PeerId, LinkTable]
    ) -> dict[str, LinkView]:
        """By their sources, the links from some of the boxes to one of them."""
        known = set(self._update(peers, told)).intersection(sources)
        return {source: link for source in known for link in self._made[source][1] if link.target == target}

    def round_trips(self, peer: PeerId, peers: Iterable[PeerId], told: Mapping[PeerId, LinkTable]) -> dict[str, float]:
        """Between this box and others, as either end tells of them, the longer ones where both do."""
        found: dict[str, float] = {}
        for source in self._update(peers, told):
            for link in self._made[source][1]:
                if peer in (link.source, link.target):
                    other = link.target if link.source == peer else link.source
                    found[other] = max(link.rtt_s, found.get(other, 0.0))
        return found

    def _update(self, peers: Iterable[PeerId], told: Mapping[PeerId, LinkTable]) -> Iterable[PeerId]:
        """Make what has changed; returns these boxes in order."""
        tables = {peer: told.get(peer, _UNTOLD) for peer in sorted(peers)}
        ends = {peer: _LinkEnd(table.site, table.box) for peer, table in tables.items()}
        if ends != self._ends:
            self._ends, self._made = ends, {}
        for source, table in tables.items():
            made = self._made.get(source)
            if made is None or made[0] is not table:
                self._made[source] = (table, _make_links(source, table, ends))
        return tables


def _make_links(source: PeerId, table: LinkTable, ends: Mapping[PeerId, _LinkEnd]) -> tuple[LinkView, ...]:
    """The links of one box: to whom it tells of, and to all whose site it knows a link to."""
    told: dict[tuple[str, str], LinkFigures] = {
        (source, target): figures for target, figures in table.links.items() if target in ends
    }
    known = SiteLinks(told, {peer: end.site for peer, end in ends.items()})
    up_gbps, up_usd = table.box.up_gbps, table.box.up_usd_per_gb
    links = []
    for target, end in ends.items():
        figures = known.get((source, target))
        if figures is not None:
            usd = figures.usd_per_gb
            links.append(
                LinkView(
                    source=source,
                    target=target,
                    rtt_s=figures.rtt_s,
                    gbps=_usable_gbps(figures, up_gbps, end.box.down_gbps),
                    usd_per_gb=up_usd + end.box.down_usd_per_gb if usd is None else usd,
                )
            )
    return tuple(links)


def _usable_gbps(figures: LinkFigures, up_gbps: float | None, down_gbps: float | None) -> float:
    return max(figures.capacity_within(up_gbps, down_gbps) if figures.reachable else 0.0, SLOWEST_GBPS)
