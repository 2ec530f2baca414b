"""What one node does about its peers, as a pure machine: whom to hang up on, ping and dial, and
whether to claim.

Events come in, each with the time; :meth:`Peering.tick` answers with :class:`Actions`. No clock,
task or socket::

    opened, closed, dialled, heard, merged  -->  Membership, Election, DialBook  -->  Actions

:mod:`..network` runs it over connections, and tests/sim/bootstrap/scripts over lines of text.
"""

import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..addresses import Address
from ..settings import NetworkSettings
from ..trust.entries import Entry
from ..trust.identity import Identity
from ..trust.keys import PeerId
from ..trust.tokens import Bootstrap, Role
from .election import CLAIM_KIND, Election, decode_claim, encode_claim
from .membership import Membership
from .mesh import Dial, DialBook
from .states import CheckRecord, MemberState

_log = logging.getLogger(__name__)

CLIENT_SESSIONS: Final = 1  # a client dials other members only when no session is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What to do now, in this order; each ``dial`` is answered by :meth:`Peering.on_dialled`."""

    drop: tuple[PeerId, ...]  # silent for too long: hang up BEFORE the rest, so that nothing more is sent to them
    ping: tuple[PeerId, ...]
    push: tuple[Entry, ...]  # to everybody who is connected
    dial: tuple[Dial, ...]
    changed: bool  # who reads members or coordinator should look again
    wake_at: float  # when to tick again, unless an event comes first; infinity when only an event can matter


class Peering:
    """The peers of one node.

    Args:
        named: members that the join token names, or that were given by hand; their addresses are known to work from
            here, and win over announced ones.
        standby: remembered members, dialled while nobody is connected.
    """

    def __init__(
        self,
        identity: Identity,
        role: Role,
        *,
        incarnation: int,
        check: CheckRecord,
        settings: NetworkSettings,
        rng: random.Random,
        named: Iterable[Bootstrap] = (),
        standby: Iterable[Bootstrap] = (),
    ) -> None:
        self.membership = Membership(identity, role, incarnation=incarnation, check=check, settings=settings)
        self.coordinator: tuple[PeerId, int] | None = None
        self.epoch = 0
        self.is_leaving = False
        self._role = role
        self._named = {each.peer_id: Address(each.host, each.port) for each in named if each.peer_id is not None}
        self._standby = {each.peer_id: Address(each.host, each.port) for each in standby if each.peer_id is not None}
        self._election = Election(identity.peer_id, settle_s=settings.settle_s)
        self._dials = DialBook(identity.peer_id, rng, settings, {*self._named, *self._standby})
        self._connected: set[PeerId] = set()
        self._just_lost: set[PeerId] = set()  # their connection closed, and no dial since has told whether they live

    # -- events -----------------------------------------------------------------------------------------------------

    def on_named(self, peer: PeerId, address: Address) -> None:
        """It turned out who answers at an address that was given by hand."""
        self._named[peer] = address
        self._dials.add_named(peer)

    def on_opened(self, peer: PeerId) -> None:
        """A session with this peer is open."""
        self._connected.add(peer)
        self._just_lost.discard(peer)

    def on_closed(self, peer: PeerId, now: float) -> None:
        """Its last session closed: it may be dead, or only the connection may be."""
        self._connected.discard(peer)
        record = self.membership.record(peer)
        if record is not None and record.role is Role.CLIENT:
            self.membership.on_lost(peer, now)  # nobody can dial it: it is gone until it comes back itself
        else:
            self._just_lost.add(peer)
            self._dials.on_disconnected(peer, now)

    def on_dialled(self, peer: PeerId, succeeded: bool, now: float) -> None:
        """A dial that :attr:`Actions.dial` asked for has ended."""
        self._dials.on_result(peer, succeeded, now)
        # A closed connection, and nobody at its address: together they tell a death at once. Silence
        # alone takes seconds.
        if not succeeded and peer in self._just_lost and peer not in self._connected:
            self.membership.on_lost(peer, now)
        self._just_lost.discard(peer)

    # -- decisions --------------------------------------------------------------------------------------------------

    def tick(self, now: float, heard: Mapping[PeerId, float]) -> Actions:
        """Decide what to do now; ``heard`` says when anything last came from each connected peer."""
        for peer, heard_at in heard.items():
            self.membership.on_heard(peer, heard_at)
        liveness = self.membership.tick(now)
        before = self.coordinator
        push = self._elect(now)
        dial = () if self.is_leaving else self._dials.take_due(self._find_wanted(), self._connected, now)
        moments = (self.membership.wake_at(now), self._dials.wake_at(self._connected), self._election.wake_at())
        return Actions(
            drop=liveness.drop,
            ping=liveness.ping,
            push=push,
            dial=dial,
            changed=liveness.changed or self.coordinator != before,
            wake_at=min((moment for moment in moments if moment is not None), default=float("inf")),
        )

    def _elect(self, now: float) -> tuple[Entry, ...]:
        """Apply the election's rule; the claim to push, if this node makes one."""
        candidates = frozenset(
            member.peer_id
            for member in self.membership.members()
            if member.role is not Role.CLIENT and member.state in (MemberState.ALIVE, MemberState.SUSPECT)
        )
        push: tuple[Entry, ...] = ()
        result = self._election.decide(candidates, self._read_claims(), now)
        if result.claim is not None and not self.is_leaving:
            _log.info("claiming epoch %d", result.claim)
            push = (self.membership.publish(CLAIM_KIND, encode_claim(result.claim)),)
            # A claim counts once it is seen, by its own author too: the rule is the same for everybody.
            result = self._election.decide(candidates, self._read_claims(), now)
        before = self.coordinator
        self.coordinator = None if result.coordinator is None else (result.coordinator, result.epoch)
        self.epoch = result.epoch
        if self.coordinator != before:
            _log.info("coordinator is now %s", self.coordinator)
        return push

    def _read_claims(self) -> dict[PeerId, int]:
        return {peer: decode_claim(payload) for peer, payload in self.membership.highest(CLAIM_KIND).items()}

    def _find_wanted(self) -> dict[PeerId, Address]:
        """Whom this node should have a session with, and where it is dialled."""
        wanted: dict[PeerId, Address] = {}
        if not self._connected:
            wanted |= self._standby
        if self._role is not Role.CLIENT or len(self._connected) < CLIENT_SESSIONS:
            wanted |= self.membership.dial_targets()
        return wanted | self._named

    def __repr__(self) -> str:
        return f"Peering({self.membership!r}, connected={len(self._connected)}, coordinator={self.coordinator})"
