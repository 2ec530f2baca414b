"""What nodes tell of themselves, as it was heard last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from ..bootstrap import DECODE_ERRORS, PeerId
from .messages import Advert

_FAULT_CHARACTERS = 120

_adverts = msgspec.msgpack.Decoder(Advert)


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
    """Adverts of the live members."""

    adverts: dict[PeerId, Advert] = field(default_factory=dict)
    unreadable: dict[PeerId, str] = field(default_factory=dict)  # whose advert is none, and why
    _payloads: dict[PeerId, bytes] = field(default_factory=dict)

    def update(self, entries: Mapping[PeerId, bytes]) -> None:
        """Take in the adverts of the live members; only what has changed is decoded."""
        news = {peer: payload for peer, payload in entries.items() if self._payloads.get(peer) != payload}
        kept = {peer: advert for peer, advert in self.adverts.items() if peer in entries and peer not in news}
        read = dict(_read_adverts(news))
        self.adverts = kept | {peer: advert for peer, advert in read.items() if isinstance(advert, Advert)}
        still = {peer: fault for peer, fault in self.unreadable.items() if peer in entries and peer not in news}
        self.unreadable = still | {peer: fault for peer, fault in read.items() if isinstance(fault, str)}
        self._payloads = dict(entries)
