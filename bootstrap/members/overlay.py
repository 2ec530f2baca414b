"""Whom a node keeps a control stream with. Pure.

A small network is a full mesh. In a larger one each node dials about 2 log2(n) others: on a ring
ordered by the hash of the peer id, those next to it and those half, a quarter, an eighth... of the
ring further on (as in Chord, Stoica et al. 2001). Everybody is then a few hops from everybody, a
member that comes or goes changes a few neighbours only, and who dials whom follows from the members
alone: nobody can choose to be next to somebody without trying many identities.
"""

from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache
from hashlib import sha256
from typing import Final

from ..trust.keys import PeerId

_RING: Final = 1 << 64
NEXT: Final = 2  # on the ring: one may die, and the ring still holds
_FARTHEST: Final = 16  # halvings of the ring at most


@lru_cache(maxsize=8192)
def place_on_ring(peer: PeerId) -> int:
    """Where a member stands on the ring: in [0, 2**64)."""
    return int.from_bytes(sha256(peer.encode()).digest()[:8], "big")


def choose_neighbours(me: PeerId, members: Collection[PeerId], *, full_mesh: int) -> frozenset[PeerId]:
    """The members to dial, of a network of these (with or without ``me``). All of them, up to ``full_mesh``."""
    others = {peer for peer in members if peer != me}
    if len(others) < full_mesh:
        return frozenset(others)
    ring = sorted((place_on_ring(peer), peer) for peer in others)
    here = place_on_ring(me)
    first = bisect_left(ring, (here, me))
    chosen = {ring[(first + step) % len(ring)][1] for step in range(NEXT)}
    for halving in range(1, _FARTHEST):
        distance = _RING >> halving
        if distance < _RING // len(ring):
            break  # nearer than the next one
        chosen.add(ring[bisect_left(ring, ((here + distance) % _RING, "")) % len(ring)][1])
    return frozenset(chosen)
