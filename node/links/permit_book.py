"""Which permits of this node's relay are out, and to whom: nobody has so many that nothing is left for others. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple, final

from ...bootstrap import PeerId

_OF_ONE_PAIR = 2  # the one in use, and the one that was asked for before its end


class _Permit(NamedTuple):
    target: PeerId
    expires_at: float


@final
class PermitBook:
    """`total` permits at most, `each` of one asker. Times are seconds of one clock. What has to be revoked for a new
    one is the oldest of its pair, of its asker, or of the asker that has the most."""

    def __init__(self, total: int, each: int) -> None:
        self._total = total
        self._each = each
        self._of: dict[PeerId, OrderedDict[bytes, _Permit]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __repr__(self) -> str:
        return f"<PermitBook {len(self)} of {self._total}, askers={len(self._of)}>"

    def add(self, asker: PeerId, target: PeerId, permit: bytes, expires_at: float, now: float) -> tuple[bytes, ...]:
        """A permit is given out; returns those to be revoked: what has expired, and one for it where it needs room."""
        expired = self._forget_expired(now)
        revoked = []
        held = self._of.setdefault(asker, OrderedDict())
        same = [each for each, known in held.items() if known.target == target]
        if len(same) >= _OF_ONE_PAIR:
            revoked.append(same[0])
        elif len(held) >= self._each:
            revoked.append(next(iter(held)))
        elif len(self) >= self._total:
            fullest = max(self._of.values(), key=len)
            revoked.append(next(iter(fullest)))
        for each in revoked:
            self._forget(each)
        self._of.setdefault(asker, OrderedDict())[permit] = _Permit(target, expires_at)
        return (*expired, *revoked)

    def keep(self, present: Collection[PeerId]) -> tuple[bytes, ...]:
        """These are the members now: returns the permits of and to others, to be revoked."""
        over = [
            permit
            for asker, held in self._of.items()
            for permit, known in held.items()
            if asker not in present or known.target not in present
        ]
        for permit in over:
            self._forget(permit)
        return tuple(over)

    def _forget(self, permit: bytes) -> None:
        for asker, held in self._of.items():
            if held.pop(permit, None) is not None:
                if not held:
                    del self._of[asker]
                return

    def _forget_expired(self, now: float) -> list[bytes]:
        over = [permit for held in self._of.values() for permit, known in held.items() if known.expires_at <= now]
        for permit in over:
            self._forget(permit)
        return over
