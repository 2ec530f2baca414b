"""Who coordinates: a pure rule over what everybody can see.

A *claim* is a signed entry that names an epoch. The claimer of the highest epoch ever seen leads
while it is alive and has not left; of two that claim the same epoch, the lower peer id leads.
When there is no such leader, the lowest peer id among the candidates claims the next epoch, once
the set of candidates has been stable for a moment. Claims that jump too far do not count
(:func:`select_plausible`).

The rule gives a coordinator to each side of a partition and one again after it heals. A rule that
needs a majority has the same seam: :class:`ElectionView` in, :class:`ElectionResult` out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from ..errors import DECODE_ERRORS
from ..trust.keys import PeerId

CLAIM_KIND: Final = "claim"
MAX_EPOCH: Final = 2**53
MAX_JUMP: Final = 1_000_000  # epochs grow by one; who claims one far above all others would end elections for good


class _Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: int


def encode_claim(epoch: int) -> bytes:
    """The payload of a claim entry."""
    return msgspec.msgpack.encode(_Claim(epoch))


def decode_claim(payload: bytes) -> int:
    """The epoch of a claim entry; 0, which never leads, when it is malformed."""
    try:
        epoch = msgspec.msgpack.decode(payload, type=_Claim).epoch
    except DECODE_ERRORS:
        return 0
    return epoch if 0 < epoch <= MAX_EPOCH else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionView:
    """What one node sees."""

    me: PeerId
    candidates: frozenset[PeerId]  # live members that may lead, this node included if it may
    claims: Mapping[PeerId, int]  # of everybody, the dead included: an epoch once seen never comes back
    stable_since: float  # when `candidates` last changed


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionResult:
    """Who leads in which epoch, and what to publish as `claim`, which takes effect once seen."""

    coordinator: PeerId | None = None
    epoch: int = 0
    claim: int | None = None


def decide(view: ElectionView, now: float, *, settle_s: float) -> ElectionResult:
    """The rule."""
    highest = max(view.claims.values(), default=0)
    leaders = [peer for peer, epoch in view.claims.items() if epoch == highest and peer in view.candidates]
    if highest > 0 and leaders:
        return ElectionResult(coordinator=min(leaders), epoch=highest)
    is_next = view.me in view.candidates and view.me == min(view.candidates)
    if is_next and now - view.stable_since >= settle_s and highest < MAX_EPOCH:
        return ElectionResult(epoch=highest, claim=highest + 1)
    return ElectionResult(epoch=highest)


def select_plausible(claims: Mapping[PeerId, int], seen: int) -> dict[PeerId, int]:
    """The claims that may count: walking up from ``seen``, none more than a jump above those below
    it.

    With nothing seen the lowest claim is the ground, unless it leaves no room for later ones: an
    old network, or one jumped before, has only high ones to show."""
    ground, found = seen, {}
    for peer, epoch in sorted(claims.items(), key=lambda claim: claim[1]):
        if ground == 0 and epoch <= MAX_EPOCH // 2:
            ground = epoch
        if epoch <= ground + MAX_JUMP:
            ground = max(ground, epoch)
            found[peer] = epoch
    return found


class Election:
    """The rule, and since when the candidates are the same and the highest epoch seen."""

    def __init__(self, me: PeerId, *, settle_s: float) -> None:
        self._me = me
        self._settle_s = settle_s
        self._candidates: frozenset[PeerId] = frozenset()
        self._stable_since = 0.0
        self._seen = 0
        self._step = ElectionResult()

    def decide(self, candidates: frozenset[PeerId], claims: Mapping[PeerId, int], now: float) -> ElectionResult:
        """Look at the network now."""
        if candidates != self._candidates:
            self._candidates, self._stable_since = candidates, now
        counting = select_plausible(claims, self._seen)
        if now - self._stable_since >= self._settle_s:  # not before: who joins may hear the wildest claim first
            self._seen = max(counting.values(), default=self._seen)
        view = ElectionView(me=self._me, candidates=candidates, claims=counting, stable_since=self._stable_since)
        self._step = decide(view, now, settle_s=self._settle_s)
        return self._step

    def wake_at(self) -> float | None:
        """When this node might have to claim."""
        if self._step.coordinator is not None or not self._candidates or min(self._candidates) != self._me:
            return None
        return self._stable_since + self._settle_s

    def __repr__(self) -> str:
        return f"Election(coordinator={self._step.coordinator}, epoch={self._step.epoch})"
