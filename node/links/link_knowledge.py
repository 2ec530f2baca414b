"""What a node knows of links: its own as it measures them, others' as they tell. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import msgspec

from ...bootstrap import PeerId
from ...kvtransport.probing.estimates import LinkEstimator
from ...kvtransport.probing.figures import BoxFigures, LinkFigures, Source, one_stream_gbps, prior
from ...kvtransport.probing.sites import SiteLinks, infer, leave_out_alike
from ...kvtransport.routing.paths import PathNetwork, RunningTransfer
from ..messages import LinkTable
from ..settings import WAN, BoxLinkSettings, NodeTuning


@final
class LinkKnowledge:
    """One per node. Times are seconds of one clock. `estimators` is what is believed of its own links already."""

    def __init__(
        self,
        own: PeerId,
        settings: BoxLinkSettings,
        tuning: NodeTuning = WAN,
        estimators: dict[PeerId, LinkEstimator] | None = None,
    ) -> None:
        self.own = own
        self.settings = settings
        self._tuning = tuning
        self._estimators = estimators if estimators is not None else {}
        self._tables: Mapping[PeerId, LinkTable] = {}
        self._own_figures: Mapping[PeerId, LinkFigures] = {}
        self._joined: PathNetwork | None = None  # the tables and the own figures, for as long as neither changes
        self._measured: set[PeerId] = set()
        self._inferred_from: object = None  # whose links, and when each was measured here
        self._infer_at = float("-inf")  # when to infer anew, if nothing changes before

    def __repr__(self) -> str:
        return f"<LinkKnowledge of {len(self._estimators)} links, told {len(self._tables)} tables>"

    def learn(self, tables: Mapping[PeerId, LinkTable], members: Iterable[PeerId]) -> None:
        """What other nodes say of their links. Who is neither a member nor has a table is forgotten."""
        if tables != self._tables:
            self._tables, self._joined = dict(tables), None
            self._infer_at = float("-inf")
        for peer in self._estimators.keys() - tables.keys() - set(members):
            del self._estimators[peer]

    def estimator(self, peer: PeerId) -> LinkEstimator:
        """What is believed of the link to a peer."""
        known = self._estimators.get(peer)
        if known is None:
            rtt = self._tuning.unmeasured_rtt_s
            belief = prior(rtt * 1e3, one_stream_gbps(rtt), self._tuning.unmeasured_gbps, reason="nothing measured yet")
            known = self._estimators[peer] = LinkEstimator(belief)
        return known

    def fill_in(self, peers: Iterable[PeerId], now: float) -> None:
        """Believe of links that this node has not measured what nodes of the same sites have measured of theirs. What
        that comes from is looked at when some of it is new, and now and then as figures age: it takes a large network
        long."""
        peers = tuple(peers)
        inferred_from = (peers, {peer: each.measured_at for peer, each in self._estimators.items()})
        if inferred_from == self._inferred_from and now < self._infer_at:
            return
        self._inferred_from, self._infer_at = inferred_from, now + self._tuning.infer_interval_s
        known: dict[tuple[str, str], LinkFigures] = {}
        sites: dict[str, str] = {self.own: self.settings.site or self.own}
        boxes: dict[str, BoxFigures] = {self.own: self.settings.box}
        for source, table in self._tables.items():
            if source != self.own:
                known |= {(source, target): figures for target, figures in table.links.items()}
                sites[source], boxes[source] = self.site_of(source), table.box
        known |= {(self.own, peer): estimator.figures(now) for peer, estimator in self._estimators.items()}
        measured = {pair: figures for pair, figures in known.items() if figures.source is Source.MEASURED}
        for (_, target), inferred in infer(measured, sites, boxes, [(self.own, peer) for peer in peers]).items():
            self.estimator(PeerId(target)).set_prior(inferred)

    def site_of(self, peer: PeerId) -> str:
        """Where a node says it is; a node that says nothing is a site of its own."""
        table = self._tables.get(peer)
        return (table.site if table is not None else "") or peer

    def relays_to(self, target: PeerId) -> frozenset[PeerId]:
        """Members that say they forward, and that both ends have figures of."""
        links = self._joined_tables().links
        return frozenset(
            peer
            for peer, table in self._tables.items()
            if peer not in (self.own, target)
            and table.box.relay_gbps != 0
            and (peer, target) in links
            and peer in self._estimators
        )

    def note_measured(self, peer: PeerId) -> None:
        """A transfer has measured the link to a peer as well as a burst would."""
        self._measured.add(peer)

    def take_measured(self) -> set[PeerId]:
        """Peers that were noted as measured since the last call."""
        measured, self._measured = self._measured, set()
        return measured

    def table(self, told: LinkTable | None, now: float, unix: float = 0.0) -> LinkTable:
        """What this node tells the others; `unix` is the moment `now` by the calendar. Figures that have hardly moved
        since `told` stay as they were told: every change travels to every node."""
        before = told.links if told is not None else {}
        links: dict[str, LinkFigures] = {}
        for peer, estimator in sorted(self._estimators.items()):
            figures, old = estimator.figures(now), before.get(peer)
            if figures.source is Source.PRIOR:
                continue
            if estimator.measured_at is not None:
                measured_at = max(0.0, unix - max(0.0, now - estimator.measured_at))
                figures = msgspec.structs.replace(figures, measured_at=measured_at)
            links[peer] = old if old is not None and self._is_old_news(old, figures) else figures
        links = leave_out_alike(links, self._sites(), self._tuning.link_news)
        return LinkTable(site=self.settings.site, box=self.settings.box, links=links)

    def _is_old_news(self, old: LinkFigures, new: LinkFigures) -> bool:
        """Whether figures need not be told again: they are alike, and not much younger."""
        is_recent = new.measured_at - old.measured_at < self._tuning.link_age_s
        return is_recent and old.alike(new, self._tuning.link_news)

    def network(self, running: tuple[RunningTransfer, ...], now: float) -> PathNetwork:
        """All links and boxes, with what flows from here."""
        own = {peer: estimator.stable_figures(now) for peer, estimator in self._estimators.items()}
        # Choices are cached for as long as these tables are the same objects, so they are made anew only for news.
        if own != self._own_figures:
            self._own_figures, self._joined = own, None
        joined = self._joined_tables()
        return PathNetwork(joined.links, joined.boxes, running)

    def _joined_tables(self) -> PathNetwork:
        if self._joined is None:
            self._joined = self._join_tables(self._own_figures)
        return self._joined

    def _sites(self) -> dict[str, str]:
        """Of those who say where they are."""
        return {peer: table.site for peer, table in self._tables.items() if table.site}

    def _join_tables(self, own: Mapping[PeerId, LinkFigures]) -> PathNetwork:
        links: dict[tuple[str, str], LinkFigures] = {(self.own, peer): figures for peer, figures in own.items()}
        boxes: dict[str, BoxFigures] = {self.own: self.settings.box}
        for peer, table in self._tables.items():
            if peer != self.own:
                boxes[peer] = table.box
                links.update({(peer, target): figures for target, figures in table.links.items()})
        return PathNetwork(SiteLinks(links, self._sites()), boxes)
