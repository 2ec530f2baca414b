"""Whom to dial when, and which of two connections to keep. Pure.

The lower peer id dials first; the higher one waits a moment and dials too, since the lower one may
be unable to reach it."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ..addresses import Address
from ..settings import NetworkSettings
from ..trust.keys import PeerId
from .allowance import Allowance

_MOVES_S: Final = 1 / 30  # new addresses per second of one peer that are tried at once
_MOVES_BURST: Final = 3


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial this peer now."""

    peer: PeerId
    address: Address


@dataclass(slots=True)
class _Target:
    address: Address
    failures: int
    next_at: float
    moves: Allowance
    in_flight: bool = False


class DialBook:
    """The peers we are missing, each with its own back-off: doubling, with jitter, never giving up.

    ``named`` members (in our token, or remembered) are dialled at once and with a short back-off,
    because one that restarts knows nobody; so are those that were here before. Of the others, of whom
    one has only been told, so many are dialled per second and no more: any address may be among them."""

    def __init__(
        self, me: PeerId, rng: random.Random, settings: NetworkSettings, named: Collection[PeerId] = ()
    ) -> None:
        self._me = me
        self._rng = rng
        self._settings = settings
        self._preferred = set(named)
        self._strange = Allowance(settings.strange_dials_s, settings.strange_dials_burst)
        self._targets: dict[PeerId, _Target] = {}

    def take_due(self, wanted: Mapping[PeerId, Address], connected: Collection[PeerId], now: float) -> tuple[Dial, ...]:
        """What to dial now. Every :class:`Dial` must be answered by :meth:`on_result`."""
        for peer in [p for p, t in self._targets.items() if p not in wanted and not t.in_flight]:
            del self._targets[peer]
        dials = []
        for peer, address in wanted.items():
            if peer == self._me or peer in connected:
                continue
            target = self._targets.get(peer)
            if target is None:
                is_first = self._me < peer or peer in self._preferred
                wait = 0.0 if is_first else self._settings.higher_waits_s * self._rng.uniform(0.8, 1.2)
                target = self._targets[peer] = _new_target(address, now + wait)
            if target.address != address:
                target.address = address
                # What we learned about the old address is void. Who moves on and on would have all dial whom it likes.
                if target.moves.take(now):
                    target.failures, target.next_at = 0, min(target.next_at, now)
            if target.in_flight or now < target.next_at or address.port == 0:
                continue
            if peer not in self._preferred and not self._strange.take(now):
                target.next_at = self._strange.next_at()
                continue
            target.in_flight = True
            dials.append(Dial(peer, address))
        return tuple(dials)

    def prefer(self, peer: PeerId) -> None:
        """One more of those that are dialled without delay."""
        self._preferred.add(peer)

    def on_result(self, peer: PeerId, succeeded: bool, now: float) -> None:
        """A dial ended."""
        target = self._targets.get(peer)
        if target is None:
            return
        target.in_flight = False
        if succeeded:
            target.failures, target.next_at = 0, now
            self._preferred.add(peer)
        else:
            longest = self._settings.named_backoff_s if peer in self._preferred else self._settings.last_backoff_s
            backoff = min(self._settings.first_backoff_s * 2**target.failures, longest)
            target.failures = min(target.failures + 1, 16)
            target.next_at = now + backoff * self._rng.uniform(0.75, 1.25)

    def on_disconnected(self, peer: PeerId, now: float) -> None:
        """A connection broke: redial at once, which tells a dead peer from a broken link."""
        target = self._targets.get(peer)
        if target is not None:
            target.failures, target.next_at = 0, now
        self._targets.setdefault(peer, _new_target(Address("", 0), now))

    def wake_at(self, connected: Collection[PeerId]) -> float:
        """When the next dial is due."""
        moments = [
            target.next_at
            for peer, target in self._targets.items()
            if not target.in_flight and peer not in connected and target.address.port != 0
        ]
        return min(moments, default=float("inf"))

    def __repr__(self) -> str:
        in_flight = sum(target.in_flight for target in self._targets.values())
        return f"DialBook(targets={len(self._targets)}, in_flight={in_flight})"


def _new_target(address: Address, next_at: float) -> _Target:
    return _Target(address, 0, next_at, Allowance(_MOVES_S, _MOVES_BURST))


def should_replace(
    *,
    me: PeerId,
    peer: PeerId,
    new_dialled_by_me: bool,
    held_dialled_by_me: bool,
    held_age_s: float,
    crossing_s: float,
) -> bool:
    """Whether a new connection to ``peer`` replaces the one we hold; both ends decide alike.

    A connected peer does not dial, so a new one means it lost the old one, unless both dialled
    within ``crossing_s``: then the lower peer id's dial wins."""
    if held_age_s > crossing_s or new_dialled_by_me == held_dialled_by_me:
        return True
    return new_dialled_by_me == (me < peer)
