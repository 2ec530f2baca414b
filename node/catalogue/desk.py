"""Changes of the catalogue, as admins of the network ask for them: done where the network's key is, refused elsewhere.

admin's client -- catalogue.change --> the box that ran `bootstrap` -- signed orders --> every node, which keeps them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, final

import trio

from ...bootstrap import PeerId, RemoteError, Role, TokenError
from ...bootstrap.trust.orders import sign_orders
from ...coordinator.demand import Demand, mean_lengths
from ...coordinator.names import name_of
from ...coordinator.services.catalogue import (
    EMPTY,
    CatalogueError,
    OfferedName,
    ServiceCatalogue,
    add_entry,
    find_slo_fault,
    learn_lengths,
    read_catalogue,
    remove_name,
    write_catalogue,
)
from ..adverts import CATALOGUE
from ..box.errors import NodeError
from ..joined import Joined
from ..methods import CATALOGUE_CHANGE
from ..owner.messages import CatalogueChange, CatalogueChanged
from ..ownership import Ownership
from ..view import NetworkView
from .refusals import NOT_OWNER

LEARN_S: Final = 120.0  # between two looks at how long requests are; shorter: what is remembered is fresher


@final
class CatalogueDesk:
    """One per node. `owner`: the network's key, where this box has it."""

    def __init__(self, joined: Joined, owner: Ownership | None) -> None:
        self._joined = joined
        self._owner = owner
        joined.network.handle(CATALOGUE_CHANGE, self._on_change)

    def __repr__(self) -> str:
        return f"<CatalogueDesk version={self._joined.view.catalogue.version} owner={self._owner is not None}>"

    async def run(self) -> None:
        """Where the key is, have the catalogue remember how long requests are, until cancelled."""
        owner, joined = self._owner, self._joined
        while owner is not None:
            await trio.sleep(LEARN_S)
            seen = find_lengths(joined.view)
            if learn_lengths(joined.view.catalogue, seen) is joined.view.catalogue:
                continue
            try:
                await self._write(owner, partial(remember_lengths, seen=seen))
            except (NodeError, TokenError, CatalogueError) as error:
                joined.say(f"the catalogue was not written: {error}")

    async def _write(self, owner: Ownership, edit: Callable[[bytes], bytes]) -> ServiceCatalogue:
        """Change it, and tell everybody. Raises NodeError, TokenError, and what `edit` does."""
        network = self._joined.network
        orders = await trio.to_thread.run_sync(owner.write_document, CATALOGUE, edit, network.orders)
        network.order(sign_orders(owner.key, orders))
        changed = read_catalogue(orders.documents[CATALOGUE])
        assert changed is not None, "it was written by this node"
        return changed

    async def _on_change(self, peer: PeerId, role: Role, body: CatalogueChange) -> CatalogueChanged:
        """An admin of the network wants one more service, or one less. Raises RemoteError."""
        joined, owner = self._joined, self._owner
        if owner is None:
            raise RemoteError(
                NOT_OWNER, "this box has not the network's key; ask the one that ran `p2pserve bootstrap`"
            )
        edit = partial(change_catalogue, change=body, offers=tuple(joined.view.offered_names()))
        try:
            changed = await self._write(owner, edit)
        except CatalogueError as error:
            raise RemoteError("invalid", str(error)) from error
        except (NodeError, TokenError) as error:
            raise RemoteError("failed", str(error)) from error
        joined.say(f"{describe_change(body)}, as {name_of(peer)} wants, an admin of the network")
        return CatalogueChanged(catalogue=changed)


def find_lengths(view: NetworkView) -> dict[str, tuple[float, float]]:
    """By entry, what requests are like that boxes get now."""
    asked: dict[str, list[Demand]] = {}
    for advert in view.adverts.values():
        model, demand = advert.model, advert.demand
        entry = view.catalogue.entry_of(model.service, model.name) if model is not None else None
        if entry is not None and demand is not None and demand.requests_s > 0.0:
            asked.setdefault(entry.name, []).append(demand)
    found = {name: mean_lengths(demands) for name, demands in asked.items()}
    return {name: lengths for name, lengths in found.items() if lengths is not None}


def remember_lengths(payload: bytes, *, seen: Mapping[str, tuple[float, float]]) -> bytes:
    """The bytes of a catalogue that knows how long requests are. Raises CatalogueError."""
    return write_catalogue(learn_lengths(_read(payload), seen))


def _read(payload: bytes) -> ServiceCatalogue:
    held = read_catalogue(payload) if payload else EMPTY
    if held is None:
        raise CatalogueError("the catalogue of this network is of a later release; upgrade the box with its key")
    return held


def change_catalogue(payload: bytes, *, change: CatalogueChange, offers: tuple[OfferedName, ...]) -> bytes:
    """The bytes of a catalogue, with one more service, or one less. Raises CatalogueError."""
    held = _read(payload)
    if (change.add is None) is (change.remove is None):
        raise CatalogueError("a change adds one service or removes one")
    changed: ServiceCatalogue
    if change.add is not None:
        if fault := find_slo_fault(change.add.slo):
            raise CatalogueError(fault)
        changed = add_entry(held, change.add, offers)
    else:
        changed = remove_name(held, change.remove or "", offers)
    return write_catalogue(changed)


def describe_change(change: CatalogueChange) -> str:
    """For people: what it does."""
    if change.add is not None:
        return f"{change.add.name} ({change.add.model}) is in the catalogue"
    return f"{change.remove} is out of the catalogue"
