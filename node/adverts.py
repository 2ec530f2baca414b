"""What nodes tell of themselves, as it was heard last, and when this one tells it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, final

import msgspec
import trio

from ..bootstrap import DECODE_ERRORS, PeerId
from ..coordinator import Plan, Replica
from ..coordinator.names import name_of
from ..coordinator.regrouping.divisions import BoxDivision, find_divided
from ..coordinator.regrouping.parts import BoxPart
from ..coordinator.repair.ending import is_planned_without
from ..coordinator.services.catalogue import EMPTY, OfferedName, ServiceCatalogue, read_catalogue
from .messages import Advert, Status

if TYPE_CHECKING:
    from .settings import NodeTuning

CATALOGUE: Final = "services"
"""The kind of the owner's document that is the catalogue."""

IS_DEAD = "is dead"
MAX_STATUS_BYTES = 3 << 20  # below the control stream's frame bound
_FAULT_CHARACTERS = 120
_ENGINE_CHARACTERS = 300  # of what an engine says of its failure: it is another box's text
_MAX_NAMED = 3

_adverts = msgspec.msgpack.Decoder(Advert)


def find_fault(replica: Replica, service: str, adverts: Mapping[PeerId, Advert], dead: Collection[PeerId]) -> str:
    """Why this replica takes no new requests for the service now, for people; "" where it does."""
    for peer in replica.peers:
        advert = adverts.get(PeerId(peer))
        if advert is None or advert.model is None or advert.model.service != service:
            return f"{name_of(peer)} {IS_DEAD if peer in dead else 'is not here'}"
        if advert.draining:
            return f"{name_of(peer)} is draining"
    head = adverts[PeerId(replica.head)]
    fault = find_box_fault(replica.head, head)
    if fault or head.engine is None:
        return fault
    is_loaded = head.engine.stages == (replica.stages if len(replica.stages) > 1 else ())
    return "" if is_loaded else f"{name_of(replica.head)} has not loaded its part of the plan"


def find_box_fault(peer: str, advert: Advert) -> str:
    """Why a box takes no new requests, for people; "" where it does: `the engine of amber-otter has failed: ...`."""
    engine = advert.engine
    if advert.draining:
        return f"{name_of(peer)} is draining"
    if engine is None:
        return f"{name_of(peer)} has no engine yet"
    if engine.state == "ready":
        return ""
    does = "has failed" if engine.state == "failed" else f"is {engine.state}"
    return f"the engine of {name_of(peer)} {does}" + f": {engine.detail[:_ENGINE_CHARACTERS]}" * bool(engine.detail)


def find_beside(peer: str, adverts: Mapping[PeerId, Advert]) -> tuple[str, ...]:
    """The nodes of a box whose engines share a process, in one order for all of them, where those that are here say the
    same; () for one alone, and for one that names others who know nothing of it."""
    beside = _told_beside(adverts[PeerId(peer)])
    if len(beside) < 2 or len({*beside}) < len(beside) or peer not in beside:
        return ()
    others = (adverts.get(PeerId(each)) for each in beside)
    told = {_told_beside(each) for each in others if each is not None}
    return beside if told == {beside} else ()


def _told_beside(advert: Advert) -> tuple[str, ...]:
    return advert.hosting.beside if advert.hosting is not None else advert.beside


def find_part(peer: str, adverts: Mapping[PeerId, Advert], asked: Collection[str]) -> float:
    """The part of its box's GPU that a node has: equal ones for itself and for each other engine of the process that is
    of a service that is `asked`."""
    models = (adverts[PeerId(each)].model for each in find_beside(peer, adverts) if each != peer and each in adverts)
    return 1.0 / (1 + sum(model is not None and model.service in asked for model in models))


def fit_status(status: Status) -> Status:
    """What of a status fits one message. In a network that is too large for that, or whose members say too much, all
    members are in it still: without their links, and those that say most without their adverts."""
    excess = 1 + _cost(status) - MAX_STATUS_BYTES
    if excess <= 0:
        return status
    nodes = {node.peer: msgspec.structs.replace(node, links=None) for node in status.nodes}
    excess -= sum(_cost(node.links) for node in status.nodes if node.links is not None)
    adverts = {peer: _cost(node.advert) for peer, node in nodes.items() if node.advert is not None}
    for peer in sorted(adverts, key=lambda peer: -adverts[peer]):
        if excess > 0:
            nodes[peer] = msgspec.structs.replace(nodes[peer], advert=None)
            excess -= adverts[peer]
    plans = {} if excess <= 0 else {"plan": None, "other_plans": ()}
    return msgspec.structs.replace(status, nodes=tuple(nodes.values()), **plans)


def _cost(message: msgspec.Struct) -> int:
    """So many bytes it takes more than None."""
    return len(msgspec.msgpack.encode(message)) - 1


def plans_of(status: Status) -> tuple[Plan, ...]:
    """The plans that the answering node follows: one for each service."""
    return (*((status.plan,) if status.plan is not None else ()), *status.other_plans)


def parts_of(adverts: Mapping[PeerId, Advert]) -> dict[str, BoxPart]:
    """What boxes say of their parts of the plan, as a regrouping goes by it."""
    return {
        str(peer): BoxPart(
            stages=advert.engine.stages,
            is_ready=advert.engine.state == "ready",
            failures=advert.engine.failures,
            detail=": ".join(filter(None, (advert.engine.state, advert.engine.detail))),
            leaves=advert.draining or is_planned_without(advert.ends_in_s),
            division=advert.division,
            beside=advert.engine.beside,
        )
        for peer, advert in adverts.items()
        if advert.engine is not None
    }


def divided_boxes(adverts: Mapping[PeerId, Advert], service: str) -> dict[str, BoxDivision]:
    """By head, the machines that may be divided among other numbers of nodes, all of which offer the service."""
    return find_divided(
        {
            str(peer): advert.division
            for peer, advert in adverts.items()
            if advert.division is not None and advert.model is not None and advert.model.service == service
        }
    )


def join_faults(faults: Iterable[str]) -> str:
    """The first few of these as one text, each once."""
    found = list(dict.fromkeys(filter(None, faults)))
    more = [f"and {len(found) - _MAX_NAMED} more"] if len(found) > _MAX_NAMED else []
    return "; ".join([*found[:_MAX_NAMED], *more])


def decode_adverts(entries: Mapping[PeerId, bytes]) -> dict[PeerId, Advert]:
    """Adverts by peer, without those that are none (of another version, or garbage)."""
    return {peer: advert for peer, advert in _read_adverts(entries) if isinstance(advert, Advert)}


def _read_adverts(entries: Mapping[PeerId, bytes]) -> Iterator[tuple[PeerId, Advert | str]]:
    """Adverts by peer, or what is wrong with them."""
    for peer, payload in entries.items():
        try:
            yield peer, _adverts.decode(payload)
        except DECODE_ERRORS as error:
            yield peer, str(error)[:_FAULT_CHARACTERS]


@dataclass(slots=True)
class AdvertBook:
    """Adverts of the live members, and the catalogue of the services that they are to serve."""

    adverts: dict[PeerId, Advert] = field(default_factory=dict)
    unreadable: dict[PeerId, str] = field(default_factory=dict)  # whose advert is none, and why
    catalogue: ServiceCatalogue = EMPTY
    _payloads: dict[PeerId, bytes] = field(default_factory=dict)
    _catalogue_payload: bytes = b""

    def update(self, entries: Mapping[PeerId, bytes]) -> None:
        """Take in the adverts of the live members; only what has changed is decoded."""
        news = {peer: payload for peer, payload in entries.items() if self._payloads.get(peer) != payload}
        kept = {peer: advert for peer, advert in self.adverts.items() if peer in entries and peer not in news}
        read = dict(_read_adverts(news))
        self.adverts = kept | {peer: advert for peer, advert in read.items() if isinstance(advert, Advert)}
        still = {peer: fault for peer, fault in self.unreadable.items() if peer in entries and peer not in news}
        self.unreadable = still | {peer: fault for peer, fault in read.items() if isinstance(fault, str)}
        self._payloads = dict(entries)

    def update_catalogue(self, documents: Mapping[str, bytes]) -> bool:
        """Take in the catalogue among the owner's documents; whether it is another. What is none, as a later release's
        may be, changes nothing."""
        payload = documents.get(CATALOGUE, b"")
        if payload == self._catalogue_payload:
            return False
        self._catalogue_payload = payload
        found = read_catalogue(payload) if payload else EMPTY
        if found is None or found == self.catalogue:
            return False
        self.catalogue = found
        return True

    def offered_names(self) -> Iterator[OfferedName]:
        """What boxes offer, by box."""
        models = (advert.model for advert in self.adverts.values())
        return (OfferedName(model.service, model.name) for model in models if model is not None)


@final
class Advertising:
    """Tells all members the advert that `make` makes, when it has changed: at once for news, else once an interval. Of
    a node whose box several services share, requests that come and go are told sooner, one that comes at once after a
    quiet while: gateways of the others know nothing of them, queues there are short or long by one of them, and two
    services may each take the same box for an idle one."""

    def __init__(self, make: Callable[[], Advert], publish: Callable[[Advert], object], tuning: NodeTuning) -> None:
        self._make = make
        self._publish = publish
        self._tuning = tuning
        self._news = trio.Event()
        self._told_at = -inf
        self._is_shared = False

    def __repr__(self) -> str:
        return f"<Advertising news={self._news.is_set()}>"

    def hurry(self) -> None:
        """There is news."""
        self._news.set()

    def note_request(self) -> None:
        """The engine has one more request."""
        if self._is_shared and trio.current_time() - self._told_at >= self._tuning.load_interval_s:
            self.hurry()

    async def run(self) -> None:
        """For as long as the node is there."""
        told: Advert | None = None
        interval_s = self._tuning.advert_interval_s
        while True:
            advert, now, is_news = self._make(), trio.current_time(), self._news.is_set()
            if is_news:
                self._news = trio.Event()
            is_due = is_news or now - self._told_at >= interval_s or _count_requests(advert) != _count_requests(told)
            if advert != told and is_due:
                told, self._told_at = advert, now
                self._publish(advert)
            self._is_shared = bool(_told_beside(advert)) and advert.stats is not None
            with trio.move_on_after(min(interval_s, self._tuning.load_interval_s) if self._is_shared else interval_s):
                await self._news.wait()


def _count_requests(advert: Advert | None) -> int:
    stats = advert.stats if advert is not None else None
    return stats.running + stats.waiting if stats is not None else 0
