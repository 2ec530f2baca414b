"""Who coordinates: a pure rule over what everybody can see.

A *claim* is a signed entry that names an epoch. Only members whose certificate says that they may
lead can make one that counts. Its author refreshes it a few times a second: it is a lease, and who
does not refresh it does not lead, whatever else of that member can still be heard.

* Who leads goes on to: a new claim does not displace a leader that refreshes its own.
* When there is no leader (killed, hung, or never claimed), the candidates may claim the next epoch,
  one after the other, in an order that the epoch decides. So one that may and does not claim is
  passed over, and nobody is first in every epoch.
* Nobody claims before it has heard from the others what there is (`synced`).
* Each side of a partition has its leader. When they meet, that of the lower epoch yields; of two
  with the same epoch, the later one in that epoch's order.
* A leader whose plans most boxes refuse is passed over for a while.

:class:`Election` is told the time and what is seen; it says who leads and what to say.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Final

import msgspec

from ..errors import DECODE_ERRORS
from ..settings import NetworkSettings
from ..trust.keys import PeerId

CLAIM_KIND: Final = "claim"
MAX_CLAIM: Final = 64  # bytes of its payload
MAX_EPOCH: Final = 2**53
MAX_JUMP: Final = 1_000_000  # epochs grow by one; who claims one far above all others would end elections for good


class _Claim(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    yielded: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as it was last said. `number` grows with every refreshing."""

    epoch: int
    number: tuple[int, int]  # (incarnation, version) of the entry
    yielded: bool = False


def encode_claim(epoch: int, *, yielded: bool = False) -> bytes:
    """The payload of a claim entry."""
    return msgspec.msgpack.encode(_Claim(epoch, yielded))


def decode_claim(payload: bytes, number: tuple[int, int]) -> Claim | None:
    """The claim of an entry; None for one that is malformed."""
    if len(payload) > MAX_CLAIM:
        return None
    try:
        claim = msgspec.msgpack.decode(payload, type=_Claim)
    except DECODE_ERRORS:
        return None
    return Claim(claim.epoch, number, claim.yielded) if 0 < claim.epoch <= MAX_EPOCH else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionView:
    """What one node sees."""

    candidates: frozenset[PeerId]  # living members that may lead, this node included if it may
    claims: Mapping[PeerId, Claim]  # of all that may lead, the dead included: an epoch once seen never comes back
    synced: bool  # whether this node has heard from the others what there is
    witnessed: int = 0  # the highest epoch of which there is proof, whatever has become of who claimed it
    refused: Collection[tuple[PeerId, int]] = ()  # leaders, with their epochs, whose plans most boxes refuse


class Say(Enum):
    """What a node is to publish as its claim."""

    CLAIM = "claim"
    REFRESH = "refresh"
    YIELD = "yield"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionResult:
    """Who leads in which epoch, and what to say as `claim`: which, and in which epoch."""

    leader: PeerId | None = None
    epoch: int = 0
    say: tuple[Say, int] | None = None
    wake_at: float = float("inf")


def order_in(epoch: int, peer: PeerId) -> bytes:
    """Candidates claim an epoch in this order. It differs with every epoch: no peer id is first in many."""
    return sha256(b"%d %s" % (epoch, peer.encode())).digest()


def select_plausible(claims: Mapping[PeerId, Claim], seen: int) -> dict[PeerId, Claim]:
    """The claims that may count: walking up from ``seen``, none more than a jump above those below
    it.

    With nothing seen the lowest claim is the ground, unless it leaves no room for later ones: an
    old network, or one jumped before, has only high ones to show."""
    ground, found = seen, {}
    for peer, claim in sorted(claims.items(), key=lambda item: item[1].epoch):
        if ground == 0 and claim.epoch <= MAX_EPOCH // 2:
            ground = claim.epoch
        if claim.epoch <= ground + MAX_JUMP:
            ground = max(ground, claim.epoch)
            found[peer] = claim
    return found


@dataclass(slots=True)
class _Lease:
    number: tuple[int, int]
    until: float


@dataclass(slots=True)
class Election:
    """The rule, and what it has to remember: when each claim was last refreshed, who leads, since when nobody does."""

    me: PeerId
    settings: NetworkSettings
    _leases: dict[PeerId, _Lease] = field(default_factory=dict)
    _leader: tuple[PeerId, int] | None = None
    _vacant_since: float = float("-inf")
    _seen: int = 0
    _refresh_at: float = 0.0
    _passed_over: dict[PeerId, float] = field(default_factory=dict)  # until when

    def decide(self, view: ElectionView, now: float, *, paused_s: float = 0.0) -> ElectionResult:
        """Look at the network now. For `paused_s` before that this node itself got no time: leases are that much
        longer, for their refreshings may lie unread."""
        claims = select_plausible(view.claims, self._seen)
        self._renew_leases(claims, now, paused_s)
        for peer, epoch in view.refused:
            if (peer, epoch) == self._leader:
                self._passed_over[peer] = now + self.settings.pass_over_s
        self._passed_over = {peer: until for peer, until in self._passed_over.items() if now < until}
        if view.synced:  # not before: who joins may hear the wildest claim first
            self._seen = max((self._seen, *(claim.epoch for claim in claims.values())))
            if self._seen == 0 or view.witnessed <= self._seen + MAX_JUMP:
                self._seen = max(self._seen, view.witnessed)
        leading = {
            peer: claim
            for peer, claim in claims.items()
            if peer in view.candidates
            and not claim.yielded
            and (claim.epoch >= self._seen or peer == self.me)
            and self._is_leading(peer, now)
        }
        self._follow(leading, now)
        return self._act(view, leading, now)

    def _renew_leases(self, claims: Mapping[PeerId, Claim], now: float, paused_s: float) -> None:
        for peer, claim in claims.items():
            lease = self._leases.get(peer)
            if lease is None or claim.number > lease.number:
                self._leases[peer] = _Lease(claim.number, now + self.settings.lease_s)
            else:
                lease.until += paused_s
        self._leases = {peer: lease for peer, lease in self._leases.items() if peer in claims}

    def _is_leading(self, peer: PeerId, now: float) -> bool:
        return now < self._leases[peer].until and peer not in self._passed_over

    def _follow(self, leading: Mapping[PeerId, Claim], now: float) -> None:
        """Stay with the leader while it leads; else take the best that does."""
        if self._leader is not None:
            claim = leading.get(self._leader[0])
            if claim is not None and claim.epoch >= self._leader[1]:
                self._leader = (self._leader[0], claim.epoch)
                return
            self._leader, self._vacant_since = None, now
        best = _best(leading)
        if best is not None:
            self._leader = (best, leading[best].epoch)
            self._seen = max(self._seen, leading[best].epoch)

    def _act(self, view: ElectionView, leading: Mapping[PeerId, Claim], now: float) -> ElectionResult:
        leader, settings = self._leader, self.settings
        if leader is None:
            epoch = self._seen + 1
            claim_at = self._claims_at(view, epoch)
            if now >= claim_at and epoch <= MAX_EPOCH:
                self._refresh_at = now + settings.refresh_s
                return ElectionResult(epoch=self._seen, say=(Say.CLAIM, epoch))
            return ElectionResult(epoch=self._seen, wake_at=claim_at)
        peer, epoch = leader
        if peer != self.me:
            return ElectionResult(leader=peer, epoch=epoch, wake_at=self._leases[peer].until)
        if _best(leading) != self.me:
            self._leader, self._vacant_since = None, now
            return ElectionResult(epoch=self._seen, say=(Say.YIELD, epoch), wake_at=now)
        if epoch < self._seen:  # of another part, whose leader is gone: nobody goes back behind that
            self._refresh_at = now + settings.refresh_s
            return ElectionResult(epoch=self._seen, say=(Say.CLAIM, self._seen + 1))
        if now >= self._refresh_at:
            self._refresh_at = now + settings.refresh_s
            return ElectionResult(leader=peer, epoch=epoch, say=(Say.REFRESH, epoch), wake_at=self._refresh_at)
        return ElectionResult(leader=peer, epoch=epoch, wake_at=self._refresh_at)

    def _claims_at(self, view: ElectionView, epoch: int) -> float:
        """When this node claims, if nobody does before it; infinity for one that may not."""
        waiting = [peer for peer in view.candidates if peer not in self._passed_over and not self._is_hung(peer, view)]
        if not view.synced or self.me not in waiting:
            return float("inf")
        place = sorted(waiting, key=lambda peer: order_in(epoch, peer)).index(self.me)
        return self._vacant_since + self.settings.settle_s + place * self.settings.claim_step_s

    def _is_hung(self, peer: PeerId, view: ElectionView) -> bool:
        """Whether this candidate's own claim of the latest epoch has run out: it is not waited for again."""
        claim = view.claims.get(peer)
        return claim is not None and claim.epoch == self._seen and not claim.yielded and peer != self.me


def _best(leading: Mapping[PeerId, Claim]) -> PeerId | None:
    """Of several that lead, the one that stays: the highest epoch, then that epoch's order."""
    if not leading:
        return None
    highest = max(claim.epoch for claim in leading.values())
    return min((p for p, claim in leading.items() if claim.epoch == highest), key=lambda peer: order_in(highest, peer))
