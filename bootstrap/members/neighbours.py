"""With whom a node keeps sessions: whom it dials, and which sessions it closes again. Pure."""

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..addresses import Address
from ..settings import NetworkSettings
from ..trust.keys import PeerId
from ..trust.tokens import Bootstrap
from .liveness import Liveness
from .mesh import Dial, DialBook
from .overlay import choose_neighbours
from .roster import Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Contacts:
    """Whom a node knows when it starts.

    ``named`` are the members that the join token names, or that were given by hand; their addresses are known to work
    from here, and win over announced ones. ``standby`` are remembered from earlier runs, and dialled while nobody is
    connected.
    """

    named: tuple[Bootstrap, ...] = ()
    standby: tuple[Bootstrap, ...] = ()


class Neighbours:
    """The sessions that one node wants. Methods get the time as ``now``, in seconds.

    Args:
        keeps_one: a client's: it dials other members only while it has no session at all.
    """

    def __init__(
        self,
        roster: Roster,
        liveness: Liveness,
        contacts: Contacts,
        settings: NetworkSettings,
        rng: random.Random,
        *,
        keeps_one: bool,
    ) -> None:
        self.retry_at = float("inf")  # when to try another one of those gone
        self._me = roster.me
        self._roster = roster
        self._liveness = liveness
        self._settings = settings
        self._rng = rng
        self._keeps_one = keeps_one
        self._named = _addresses(contacts.named)
        self._standby = _addresses(contacts.standby)
        self._dials = DialBook(roster.me, rng, settings, {*self._named, *self._standby})
        self._chosen: dict[PeerId, Address] = {}
        self._part_at = float("-inf")

    # -- events -------------------------------------------------------------------------------------------------------

    def on_named(self, peer: PeerId, address: Address) -> None:
        """It turned out who answers at an address that was given by hand."""
        self._named[peer] = address
        self._dials.prefer(peer)

    def on_known(self, peer: PeerId) -> None:
        """This peer has shown who it is, now or in an earlier run."""
        self._dials.prefer(peer)

    def on_closed(self, peer: PeerId, now: float) -> None:
        """Its session broke."""
        self._dials.on_disconnected(peer, now)

    def on_dialled(self, peer: PeerId, succeeded: bool, now: float) -> None:
        """A dial has ended."""
        self._dials.on_result(peer, succeeded, now)

    # -- decisions ----------------------------------------------------------------------------------------------------

    @property
    def knows_others(self) -> bool:
        """Whether there is anybody to ask at the start."""
        return bool(self._named or self._standby)

    @property
    def is_invited(self) -> bool:
        """Whether a member was named to ask."""
        return bool(self._named)

    def choose(self, now: float) -> None:
        """Choose whom to have sessions with: after members have come, gone or moved."""
        boxes = self._roster.find_addresses()
        self.retry_at = float("inf")
        if len(boxes) < self._settings.full_mesh:
            self._chosen = boxes
            return
        living = {peer for peer in boxes if self._liveness.is_living(peer)}
        chosen = set(choose_neighbours(self._me, living or boxes.keys(), full_mesh=self._settings.full_mesh))
        # Of a large network's other half nobody is a neighbour: by trying one after the other they are found again.
        gone = sorted(boxes.keys() - living)
        if gone:
            chosen.add(self._rng.choice(gone))
            self.retry_at = now + self._settings.retry_gone_s
        chosen |= self._liveness.redialled
        self._chosen = {peer: boxes[peer] for peer in sorted(chosen & boxes.keys())}  # one order in every process

    def take_dials(self, connected: Collection[PeerId], now: float) -> tuple[Dial, ...]:
        """What to dial now. Every :class:`Dial` must be answered by :meth:`on_dialled`."""
        living = self._liveness.living
        wanted = {} if connected else dict(self._standby)
        if not (self._keeps_one and connected):
            wanted |= self._chosen
        # In a large network those who let many in would have a session with each; if they are lost, they are needed.
        is_small = len(living) < self._settings.full_mesh
        wanted |= {peer: at for peer, at in self._named.items() if is_small or peer not in living}
        return self._dials.take_due(wanted, connected, now)

    def choose_parted(
        self, connected: Collection[PeerId], used: Mapping[PeerId, float], now: float
    ) -> tuple[PeerId, ...]:
        """Sessions to close: in a large network, those that were opened to join or to ask something, once they have
        not been used for a while (``used``: when last) and neither end is the other's neighbour."""
        settings = self._settings
        if now < self._part_at or len(self._liveness.living) < settings.full_mesh or self._keeps_one:
            return ()
        self._part_at = now + settings.part_s / 4
        spare = [
            peer
            for peer in sorted(connected)
            if peer not in self._chosen and now - used.get(peer, now) >= settings.part_s
        ]
        boxes = self._roster.find_boxes() if spare else ()
        return tuple(
            peer for peer in spare if self._me not in choose_neighbours(peer, boxes, full_mesh=settings.full_mesh)
        )

    def wake_at(self, connected: Collection[PeerId]) -> float:
        """When the next dial is due, or somebody else is to be tried."""
        return min(self.retry_at, self._dials.wake_at(connected))


def _addresses(members: Iterable[Bootstrap]) -> dict[PeerId, Address]:
    return {each.peer_id: Address(each.host, each.port) for each in members if each.peer_id is not None}
