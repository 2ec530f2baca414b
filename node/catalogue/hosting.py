"""A box that hosts what the coordinator gives it: `p2pserve join` without a model.

    in the network, with what it hosts now or nothing
        examine each entry of the catalogue   -> its advert says what it can do
        the coordinator gives it an entry     -> fetch the files, while it serves on
        all files are here                    -> finish the requests, leave, and come back with that model

An engine serves one model from its start to its end, and so does a node. The box keeps its identity, its place in the
network and what the others know of its links.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Final, NamedTuple, final

import trio

from ...bootstrap import PeerId, Unreachable
from ...coordinator.services.catalogue import CatalogueEntry, ServiceCatalogue
from ...coordinator.services.hosting import HostedModel, HostingOffer
from ..engine.backend import ServedModel
from ..joined import Joined
from ..messages import EngineAdvert
from ..models.fetching import run_download
from .messages import HostingPlan
from .shelf import CANNOT, ModelShelf, describe_fault

LOOK_S: Final = 0.5  # between two looks at what it is to host
RETRY_S: Final = (
    60.0  # before it is looked at again whether what was not possible is; shorter: a hub that is back helps
)
FAILED: Final = "failed"  # an engine that was given up


class Placed(NamedTuple):
    """An entry of the catalogue, of that version, on this box: all of its files are here."""

    entry: CatalogueEntry
    served: ServedModel
    version: int = 0


class Looked(NamedTuple):
    """What the box has found out of an entry, and when it is to look again."""

    entry: CatalogueEntry
    model: HostedModel
    again_at: float


def find_wanted(
    plan: HostingPlan | None, own: str, catalogue: ServiceCatalogue, models: Mapping[str, HostedModel], hosts: str
) -> str:
    """Which entry the box is to host: what the coordinator gives it, where it can do that; else what it has. "": none,
    as when its entry is no longer in the catalogue, or the coordinator says so."""
    if plan is not None and own in plan.idle:
        return ""
    kept = hosts if catalogue.find(hosts) is not None else ""
    given = plan.entry_of(own) if plan is not None else ""
    model = models.get(given)
    is_possible = catalogue.find(given) is not None and model is not None and model.is_possible
    return given if is_possible else kept


def find_taken(beside: Sequence[str], own: str, offers: Mapping[str, HostingOffer]) -> set[str]:
    """What the other nodes of a box host, and those before this one prepare; some may have said nothing yet."""
    taken = {offer.hosts for peer, offer in offers.items() if peer != own}
    before = (offers[peer] for peer in takewhile(lambda peer: peer != own, beside) if peer in offers)
    return (taken | {offer.prepares for offer in before}) - {""}


def leave_room(models: Mapping[str, HostedModel], taken: Collection[str], room_bytes: int) -> dict[str, HostedModel]:
    """Those that this node can host beside what the others of its box have: whole, none of the same, and all weights
    within the room of their process. A coordinator of the last release knows nothing of that."""
    if not taken:
        return dict(models)
    used = sum(models[name].weight_bytes for name in taken if name in models)
    return {
        name: model
        for name, model in models.items()
        if name not in taken and model.fits >= model.layers and used + model.weight_bytes <= room_bytes
    }


def find_due(catalogue: ServiceCatalogue, looked: Mapping[str, Looked], now: float) -> CatalogueEntry | None:
    """An entry that the box is to look at: a new one first, then one that was not possible some time ago."""
    known = {entry.name: looked[entry.name] for entry in catalogue.entries if entry.name in looked}
    new = (e for e in catalogue.entries if e.name not in known or known[e.name].entry.model != e.model)
    late = (entry for entry in catalogue.entries if entry.name in known and known[entry.name].again_at <= now)
    return next(new, None) or next(late, None)


def describe_idle(catalogue: ServiceCatalogue) -> str:
    """For people: why a box hosts nothing."""
    if not catalogue.entries:
        return "waits: the catalogue is empty; an admin adds to it with `p2pserve models add`"
    return "waits: the coordinator has given it nothing yet"


def follow_lives(shelf: ModelShelf, stop: trio.Event) -> Iterator[HostingLife]:
    """One life after the other, each to be lived before the next, until `stop` is set."""
    life = HostingLife(shelf, None, {})
    while not stop.is_set():
        yield life
        life = life.after()


@final
class HostingLife:
    """From when a box joins with what it hosts until it leaves for another model. `placed`: what it hosts now."""

    def __init__(
        self, shelf: ModelShelf, placed: Placed | None, looked: dict[str, Looked], *, is_back: bool = False
    ) -> None:
        self.placed = placed
        self.next: Placed | None = None
        """What it comes back with, once `ended` is set; None: with nothing."""
        self.ended = trio.Event()
        self._shelf = shelf
        self._looked = looked
        self._is_back = is_back  # it has been in the network
        self._prepares = ""
        self._detail = ""

    def __repr__(self) -> str:
        return f"<HostingLife {self.hosts or 'nothing'} prepares={self._prepares or 'nothing'}>"

    @property
    def hosts(self) -> str:
        """The entry that the box serves, or is about to."""
        return self.placed.entry.name if self.placed is not None else ""

    @property
    def served(self) -> ServedModel | None:
        """The model of that entry."""
        return self.placed.served if self.placed is not None else None

    def offer(self, engine: EngineAdvert | None) -> HostingOffer:
        """What others are told. `engine`: of what it hosts."""
        models = {name: each.model for name, each in self._looked.items()}
        if engine is not None and engine.state == FAILED and self.hosts in models:
            fault = f"its engine has failed: {engine.detail}"[:300]
            models[self.hosts] = HostedModel(fault=fault)
        return HostingOffer(
            hosts=self.hosts,
            prepares=self._prepares,
            detail=self._detail,
            models=models,
            beside=self._shelf.beside,
            room_bytes=self._shelf.room_bytes,
        )

    def after(self) -> HostingLife:
        """The life that follows this one, with what it has made ready."""
        return HostingLife(self._shelf, self.next, self._looked, is_back=True)

    @contextmanager
    def bear_absence(self, say: Callable[[str], None]) -> Iterator[None]:
        """Where the box that comes back with a model reaches nobody, it tries again; one that has not been in the
        network yet does not get in, and that is raised."""
        try:
            yield
        except* Unreachable as errors:
            if not self._is_back:
                raise
            why = " ".join(str(errors.exceptions[0]).split())
            say(f"cannot come back with {self.hosts or 'nothing'} yet: {why}; tries again")
            self.next = self.placed

    async def wait_end(self, stop: trio.Event) -> None:
        """Until the box is to leave: for another model, or for good."""
        async with trio.open_nursery() as nursery:

            async def wait(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait, stop)
            nursery.start_soon(wait, self.ended)

    async def run(self, joined: Joined, on_news: Callable[[], None]) -> None:
        """Follow catalogue and coordinator, until the box is to leave for another model."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._examine, joined, on_news)
            while not self.ended.is_set():
                await self._follow(joined, on_news)
                await trio.sleep(LOOK_S)
            nursery.cancel_scope.cancel()

    async def _examine(self, joined: Joined, on_news: Callable[[], None]) -> None:
        while True:
            catalogue, now = joined.view.catalogue, trio.current_time()
            gone = [name for name in self._looked if catalogue.find(name) is None]
            for name in gone:
                del self._looked[name]
            entry = find_due(catalogue, self._looked, now)
            if entry is None:
                await trio.sleep(LOOK_S)
                continue
            before = self._looked.get(entry.name)
            found = await trio.to_thread.run_sync(self._shelf.examine, entry, abandon_on_cancel=True)
            again_at = trio.current_time() + RETRY_S if found.fault else float("inf")
            self._looked[entry.name] = Looked(entry, found, again_at)
            if found.fault and (before is None or before.model.fault != found.fault):
                joined.say(f"{entry.name} cannot be hosted here: {found.fault}")
            on_news()

    async def _follow(self, joined: Joined, on_news: Callable[[], None]) -> None:
        wanted = self._find_wanted(joined)
        if wanted == self.hosts:
            idle = describe_idle(joined.view.catalogue) if not wanted else ""
            if idle != self._detail:
                joined.show(idle)
            self._tell(idle, "", on_news)
            return
        entry = joined.view.catalogue.find(wanted)
        if entry is None and self.placed is not None and joined.view.catalogue.version < self.placed.version:
            return  # it has just come back, and has not heard of the latest yet
        if entry is None:
            is_listed = joined.view.catalogue.find(self.hosts) is not None
            why = "has its place elsewhere now" if is_listed else "is out of the catalogue"
            self._end(None, joined, f"{self.hosts} {why}: this box hosts it no more")
            return
        joined.say(f"{wanted} is to be hosted here: its model is {entry.model}")
        self._tell("fetches its files", wanted, on_news)
        served = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._call_off, joined, wanted, nursery.cancel_scope)
            try:
                served = await self._fetch(entry, joined, on_news)
            except CANNOT as error:
                fault = describe_fault(error)
                self._looked[wanted] = Looked(entry, HostedModel(fault=fault), trio.current_time() + RETRY_S)
                joined.say(f"{wanted} cannot be hosted here: {fault}")
            nursery.cancel_scope.cancel()
        joined.show("")
        self._tell("", "", on_news)
        if served is not None and self._find_wanted(joined) == wanted:
            placed = Placed(entry, served, joined.view.catalogue.version)
            self._end(placed, joined, f"{wanted} is here: this box comes back with it")

    async def _fetch(self, entry: CatalogueEntry, joined: Joined, on_news: Callable[[], None]) -> ServedModel:
        def say(text: str) -> None:
            joined.show(f"{entry.name}: {text}")
            self._tell(text, entry.name, on_news)

        return await run_download(lambda report: self._shelf.fetch(entry, report), say)

    async def _call_off(self, joined: Joined, wanted: str, fetching: trio.CancelScope) -> None:
        """End a download of what is not wanted any more."""
        while not fetching.cancel_called:
            await trio.sleep(LOOK_S)
            if self._find_wanted(joined) != wanted:
                fetching.cancel()

    def _find_wanted(self, joined: Joined) -> str:
        beside = self._shelf.beside
        adverts = ((peer, joined.view.adverts.get(PeerId(peer))) for peer in beside)
        offers = {peer: each.hosting for peer, each in adverts if each is not None and each.hosting is not None}
        models = {name: each.model for name, each in self._looked.items()}
        models = leave_room(models, find_taken(beside, joined.own, offers), self._shelf.room_bytes)
        return find_wanted(joined.view.hosting, joined.own, joined.view.catalogue, models, self.hosts)

    def _tell(self, detail: str, prepares: str, on_news: Callable[[], None]) -> None:
        if (detail, prepares) != (self._detail, self._prepares):
            self._detail, self._prepares = detail, prepares
            on_news()

    def _end(self, placed: Placed | None, joined: Joined, why: str) -> None:
        joined.say(why)
        self.next = placed
        self.ended.set()
