"""Which gateway a request goes to: ready engines first, then the nearest, and of those about as near the one that was
asked last. For clients and for fronts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import trio

from ...bootstrap import NetworkError, PeerId, Role
from ...bootstrap.members.states import MemberState
from ...bootstrap.network import Network
from ...coordinator.services.catalogue import OfferedName, ServiceCatalogue
from ..adverts import AdvertBook
from ..messages import ADVERT, PLAN, Advert, Status, StatusQuery
from ..methods import STATUS
from ..observing.ages import describe_gone
from ..planning.manifest import read_manifest

STATUS_TIMEOUT_S: Final = 5.0
NEARER_S: Final = 0.01
NEARER_SHARE: Final = 0.25
"""By so much of the other's round trip and so many seconds more is another gateway nearer before it is asked instead:
round trips vary, and a gateway knows of the requests that it sent itself at once, of others' up to a second late."""

RACERS: Final = 3  # a client knows how far its bootstrap is; of the rest it tries so many at once


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCandidate:
    """A living node as a client sees it."""

    peer: PeerId
    advert: Advert | None
    rtt_s: float | None

    @property
    def model(self) -> OfferedName | None:
        """What it offers, by its service's id and its model's name."""
        model = self.advert.model if self.advert is not None else None
        return OfferedName(model.service, model.name) if model is not None else None

    @property
    def service(self) -> str | None:
        """The one that it offers."""
        return self.advert.model.service if self.advert is not None and self.advert.model is not None else None


class _Ranked(NamedTuple):
    """A gateway of a service. The least is the best."""

    is_starting: bool
    rtt_s: float
    peer: PeerId

    def is_as_good(self, best: _Ranked) -> bool:
        """Whether it is no worse than the best by more than what round trips vary by."""
        return self.is_starting == best.is_starting and self.rtt_s <= best.rtt_s * (1.0 + NEARER_SHARE) + NEARER_S


def gateways(candidates: Iterable[GatewayCandidate], service: str | None, planned: str | None = None) -> list[PeerId]:
    """Gateways, best first: ready engines, then the nearest. A request that names no `service` goes
    to the `planned` one where any node offers it."""
    return [each.peer for each in _rank(candidates, service, planned)]


def _rank(candidates: Iterable[GatewayCandidate], service: str | None, planned: str | None) -> list[_Ranked]:
    offers = [candidate for candidate in candidates if candidate.service is not None]
    if service is None and any(candidate.service == planned for candidate in offers):
        service = planned
    ranked = []
    for candidate in offers:
        advert = candidate.advert
        if advert is None or advert.model is None or advert.draining:
            continue
        if service is not None and service not in (advert.model.service, advert.model.name):
            continue
        state = advert.engine.state if advert.engine is not None else ""
        if state == "failed":
            continue
        rtt = candidate.rtt_s if candidate.rtt_s is not None else float("inf")
        ranked.append(_Ranked(state != "ready", rtt, candidate.peer))
    return sorted(ranked)


@final
class GatewayFinder:
    """The gateways of a network that has been entered, as one of its members or clients sees them."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._book = AdvertBook()
        self._considered: tuple[tuple[PeerId, int], bytes] | None = None  # the plan that was looked at last
        self._planned: str | None = None  # its service
        self._measured: dict[PeerId, float] = {}  # seconds that dialling and one answer took
        self._kept: set[PeerId] = set()  # of each service, the gateway that was asked last

    def describe_dead(self) -> str:
        """Which boxes are dead, and since when; for people, "" where none is."""
        ages: dict[str, float] = {}
        for member in self._network.members():
            if member.role is not Role.CLIENT and member.state is MemberState.DEAD and member.gone_s is not None:
                ages[member.peer_id] = member.gone_s
        return describe_gone(ages)

    def candidates(self) -> list[GatewayCandidate]:
        """The nodes that are alive."""
        return self._find_boxes(MemberState.ALIVE)

    def find_silent(self, service: str | None) -> frozenset[PeerId]:
        """Those that offered it and are silent just now: a busy machine or a lossy path, or they have died."""
        return frozenset(gateways(self._find_boxes(MemberState.SUSPECT), service, self.planned_service()))

    def _find_boxes(self, state: MemberState) -> list[GatewayCandidate]:
        book = self._book
        book.update(self._network.entries(ADVERT))
        catalogue = self._catalogue
        found = [
            GatewayCandidate(
                peer=member.peer_id,
                advert=book.adverts.get(member.peer_id),
                rtt_s=member.rtt_s if member.rtt_s is not None else self._measured.get(member.peer_id),
            )
            for member in self._network.members()
            if member.state is state and member.role is not Role.CLIENT
        ]
        return [each for each in found if each.model is None or not catalogue.is_removed(*each.model)]

    def rank(self, service: str | None) -> list[PeerId]:
        """Those that offer it, best first."""
        return [each.peer for each in self._rank(service)]

    def _rank(self, service: str | None) -> list[_Ranked]:
        return _rank(self.candidates(), self.model_of(service), self.planned_service())

    def model_of(self, service: str | None) -> str | None:
        """What boxes call that which a request calls so: the model, where the catalogue has an entry of this name."""
        return self._catalogue.model_of(service) if service is not None else None

    def is_awaited(self, service: str | None) -> bool:
        """Whether the catalogue has it, so that a box may come to serve it."""
        return service is not None and any(service in (e.name, e.model_name) for e in self._catalogue.entries)

    @property
    def _catalogue(self) -> ServiceCatalogue:
        """As it has been heard of by now."""
        self._book.update_catalogue(self._network.orders.documents)
        return self._book.catalogue

    def planned_service(self) -> str | None:
        """The service that the coordinator has a plan for, as far as it has been heard of here."""
        leader = self._network.coordinator
        entry = self._network.entries(PLAN).get(leader[0]) if leader is not None else None
        if leader is not None and entry is not None and (leader, entry) != self._considered:
            self._considered = leader, entry
            manifest = read_manifest(entry)
            if manifest is not None and manifest.epoch == leader[1]:
                self._planned = manifest.service
        return self._planned

    async def ask_status(self, peer: PeerId) -> Status:
        """The network as one node sees it. Raises NetworkError."""
        return await self._network.request(peer, STATUS, StatusQuery(), STATUS_TIMEOUT_S)

    async def pick(self, usable: list[PeerId], service: str | None) -> PeerId:
        """The best of these, which are ranked; the one that was asked last, where it is about as good. Finds out first
        which is near, where none has been measured yet."""
        await self._race(usable)
        ranked = [each for each in self._rank(service) if each.peer in usable]
        if not ranked:
            return usable[0]
        chosen = next((each for each in ranked if each.peer in self._kept and each.is_as_good(ranked[0])), ranked[0])
        members = {member.peer_id for member in self._network.members()}
        self._kept = (self._kept & members).difference(each.peer for each in ranked) | {chosen.peer}
        return chosen.peer

    async def _race(self, usable: list[PeerId]) -> None:
        """The first to answer ends it."""
        known = {candidate.peer for candidate in self.candidates() if candidate.rtt_s is not None}
        if len(usable) < 2 or not known.isdisjoint(usable):
            return
        async with trio.open_nursery() as nursery:

            async def ask(peer: PeerId) -> None:
                began = trio.current_time()
                try:
                    await self.ask_status(peer)
                except NetworkError:
                    return  # whoever comes first is asked; if nobody does, the request itself finds out why
                self._measured[peer] = trio.current_time() - began
                nursery.cancel_scope.cancel()

            for peer in random.sample(usable, min(RACERS, len(usable))):
                nursery.start_soon(ask, peer)
