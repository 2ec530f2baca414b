"""What boxes say that host what they are given, and what a coordinator makes of it: plain values.

A box that may host several services has a node for each: so many `HostingBox`es that know of each other. What each of
them is to host is decided by the `assigner`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Final, final

import msgspec
from msgspec import Meta

from ..bounds import MAX_SERVICES, Count, Layer, Name, Text
from ..costs.model_shape import ModelShape
from .catalogue import EntryName

MAX_BESIDE: Final = 8
"""Nodes of a box that share its engine process."""

NodesOfBox = Annotated[tuple[Name, ...], Meta(max_length=MAX_BESIDE)]


class HostedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a box says of one entry: how many of its model's layers fit there, of how many, the bytes of all weights,
    those that it would have to fetch, why it cannot host it ("": it can), and its dimensions (None: not told)."""

    fits: Layer = 0
    layers: Layer = 0
    weight_bytes: Count = 0
    missing_bytes: Count = 0
    fault: Text = ""
    shape: ModelShape | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the box can have a part in it."""
        return not self.fault and self.fits > 0 and self.layers > 0


class HostingOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a box says that hosts what it is given: the entry that it `hosts` now ("": none), the one that it makes
    ready, how far that is, and what it can do of each. `beside`: the nodes of its box, itself among them, whose engines
    share a process; the weights of all of these may take `room_bytes`."""

    hosts: Annotated[str, Meta(max_length=64)] = ""
    prepares: Annotated[str, Meta(max_length=64)] = ""
    detail: Text = ""
    models: Annotated[dict[EntryName, HostedModel], Meta(max_length=MAX_SERVICES)] = {}
    beside: NodesOfBox = ()
    room_bytes: Count = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HostingBox:
    """A node as it is to be decided about. `power`: GiB of its GPUs, or of the box: its part of what can be served.
    `serves`: the entry for which its engine is ready, "" for none; None: that is not known. `beside`: the nodes of its
    box, where there are several. `shows`: what it says of how far it is, another text while it gets on; its engine has
    failed so many times in a row."""

    id: str
    offer: HostingOffer
    power: float
    serves: str | None = None
    beside: tuple[str, ...] = ()
    shows: str = ""
    failures: int = 0

    @property
    def machine(self) -> str:
        """The first node of its box."""
        return self.beside[0] if self.beside else self.id

    def has_room_for(self, names: Collection[str]) -> bool:
        """Whether the engine process of its box has room for the weights of all of these."""
        models = [self.offer.models.get(name) for name in names]
        if not all(model is not None and model.is_possible and model.fits >= model.layers for model in models):
            return False
        return sum(model.weight_bytes for model in models if model is not None) <= self.offer.room_bytes

    def fits(self, name: str) -> int:
        """How many layers of an entry's model it can hold, at most all."""
        model = self.offer.models.get(name)
        return min(model.fits, model.layers) if model is not None and model.is_possible else 0

    def is_whole(self, name: str) -> bool:
        """Whether it can serve an entry alone."""
        model = self.offer.models.get(name)
        return model is not None and model.is_possible and model.fits >= model.layers

    def missing(self, name: str) -> int:
        """Bytes that it would have to fetch for an entry."""
        model = self.offer.models.get(name)
        return model.missing_bytes if model is not None else 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What a service has without these boxes: those that were started with its model, the layers of it that these have
    together, whether they serve it alone, and what clients ask of it, in tokens per second."""

    power: float = 0.0
    fits: int = 0
    is_placed: bool = False
    is_served: bool = False
    tokens_s: float = 0.0


NOTHING: Final = Brought()
