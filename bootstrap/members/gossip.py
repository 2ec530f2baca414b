"""How what one member says gets to all: pure decisions of what is told to whom, and when.

* What this node says itself goes to all it has sessions with, at once.
* What others say is passed on to those who do not hear its origin themselves. So in a full mesh
  nothing is passed on. In a larger network an *urgent* kind (who leads, the plan) goes to all of
  them at once; anything else to a few at random, a fraction of a second later
  and with what else has come by then, and those do the same: a rumour, which reaches nearly all in
  a few rounds (Demers et al. 1987).
* Now and then two neighbours compare what they hold, by one hash per bucket of origins, and tell
  each other what the other lacks. That repairs what the rest has missed.
"""

import random
from collections.abc import Callable, Collection, Iterable
from typing import Final

from ..settings import NetworkSettings
from ..trust.entries import MEMBER_KIND, Entry, Lie
from ..trust.keys import PeerId
from ..trust.orders import SignedOrders
from .election import CLAIM_KIND
from .liveness import Places
from .overlay import place_on_ring
from .states import HeldClaim, Tell
from .table import BEAT_KIND

MAX_TELL_BYTES: Final = 256 * 1024
_ENTRY_BYTES: Final = 200  # of an entry beside its payload
_LIES_OF_A_TELL: Final = 8  # of 128 KiB at most: with orders and entries, half of a frame


class Spread:
    """What is on its way to others. `hears` says whom a member hears itself."""

    def __init__(
        self,
        rng: random.Random,
        settings: NetworkSettings,
        hears: Callable[[PeerId], Places],
        urgent: Collection[str] = (),
    ) -> None:
        self._rng = rng
        self._settings = settings
        self._hears = hears
        self._urgent = frozenset({CLAIM_KIND, *urgent})
        self._due: dict[PeerId, dict[tuple[str, str], Entry]] = {}
        self._lies: dict[PeerId, list[Lie]] = {}
        self._orders: dict[PeerId, SignedOrders] = {}
        self._latest: dict[PeerId, HeldClaim] = {}
        self._complete: set[PeerId] = set()
        self._rumours: dict[tuple[str, str], tuple[Entry, PeerId]] = {}
        self._rumours_at = float("inf")

    def tell(self, peers: Iterable[PeerId], entries: Iterable[Entry], *, complete: bool = False) -> None:
        """Tell these peers, with the next messages. Of one kind of one origin only the latest goes out."""
        batch = {(entry.origin, entry.kind): entry for entry in entries}
        for peer in peers:
            self._due.setdefault(peer, {}).update(batch)
            if complete:
                self._complete.add(peer)

    def tell_lies(self, peers: Iterable[PeerId], lies: Iterable[Lie]) -> None:
        """Tell these peers who lies, with the proofs."""
        for peer in peers:
            self._lies.setdefault(peer, []).extend(lies)

    def tell_orders(self, peers: Iterable[PeerId], orders: SignedOrders) -> None:
        """Tell these peers what the owner of the network has ordered."""
        self._orders.update((peer, orders) for peer in peers)

    def tell_latest(self, peer: PeerId, latest: HeldClaim) -> None:
        """Tell a peer of a higher epoch than it knows of."""
        self._latest[peer] = latest

    def pass_on(
        self, entries: Iterable[Entry], sender: PeerId, boxes: Collection[PeerId], clients: Iterable[PeerId], now: float
    ) -> None:
        """Tell others what came from ``sender``: the clients here, who hear nobody else, and other boxes."""
        entries = tuple(entries)
        self.tell(clients, entries)
        for entry in entries:
            if entry.kind in self._urgent:
                self.tell(self._find_unaware(entry, sender, boxes), (entry,))
            else:
                self._rumours[entry.origin, entry.kind] = (entry, sender)
                wait_s = self._settings.rumour_beat_s if entry.kind == BEAT_KIND else self._settings.rumour_s
                self._rumours_at = min(self._rumours_at, now + wait_s)

    def take(self, boxes: Collection[PeerId], now: float) -> list[tuple[PeerId, Tell]]:
        """What is to be sent now, and to whom, in this order."""
        if now >= self._rumours_at:
            rumours = [(entry, self._find_unaware(entry, sender, boxes)) for entry, sender in self._rumours.values()]
            # One order for all of them: what goes to the same few is few messages.
            order = {peer: self._rng.random() for _, unaware in rumours for peer in unaware}
            for entry, unaware in rumours:
                few = sorted(unaware, key=order.__getitem__)[: self._settings.rumour_peers]
                self.tell(few, (entry,))
            self._rumours, self._rumours_at = {}, float("inf")
        told = [
            (peer, message)
            for peer in sorted({*self._due, *self._lies, *self._orders, *self._latest, *self._complete})
            for message in self._write(peer)
        ]
        self._due, self._lies, self._orders, self._latest, self._complete = {}, {}, {}, {}, set()
        return told

    def wake_at(self) -> float:
        """When :meth:`take` next has something to do by time alone."""
        is_due = self._due or self._lies or self._orders or self._latest or self._complete
        return float("-inf") if is_due else self._rumours_at

    def __repr__(self) -> str:
        return f"Spread(due={sum(map(len, self._due.values()))}, rumours={len(self._rumours)})"

    def _find_unaware(self, entry: Entry, sender: PeerId, boxes: Collection[PeerId]) -> list[PeerId]:
        """Who may not have this entry yet, as far as can be known here."""
        origin = PeerId(entry.origin)
        aware = self._hears(origin)
        return [peer for peer in boxes if peer not in (origin, sender) and place_on_ring(peer) not in aware]

    def _write(self, peer: PeerId) -> Iterable[Tell]:
        """All that one peer is told: in pieces, so that none holds up what else goes over its session."""
        batch: list[Entry] = []
        size = 0
        for entry in sorted(self._due.get(peer, {}).values(), key=lambda entry: entry.kind != MEMBER_KIND):
            cost = len(entry.payload) + _ENTRY_BYTES
            if batch and size + cost > MAX_TELL_BYTES:
                yield Tell(tuple(batch))
                batch, size = [], 0
            batch.append(entry)
            size += cost
        lies = self._lies.get(peer, [])
        while len(lies) > _LIES_OF_A_TELL:
            yield Tell(lies=tuple(lies[:_LIES_OF_A_TELL]))
            lies = lies[_LIES_OF_A_TELL:]
        yield Tell(
            tuple(batch),
            tuple(lies),
            self._orders.get(peer),
            self._latest.get(peer),
            peer in self._complete,
        )
