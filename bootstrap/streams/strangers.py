"""Whom to hang up on when too many connections are open of which it is not known yet whether they belong here. Pure.

What tells a member that has just connected from somebody who will never say a word is that the
member is soon done. So a new connection is let in, and in its place one goes that has waited for
long, of the address that has the most of them."""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from ..addresses import plain_ip

T = TypeVar("T", bound=Hashable)

IsMemberHost = Callable[[str], bool]
"""Whether a box that is known as a member has this IP address."""

_PREFIX_BITS: Final = 64  # of an IPv6 address: what one customer has


class Origin(NamedTuple):
    """Where a connection comes from."""

    source: str = ""  # see `source_of`
    is_member: bool = False  # whether a known member has this address


def source_of(host: str) -> str:
    """What counts as one address: all of IPv4, the first half of IPv6."""
    found = plain_ip(host)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(found) >> _PREFIX_BITS << _PREFIX_BITS, _PREFIX_BITS)))
    return host if found is None else str(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrangerLimits:
    """How many connections may be undecided at once.

    ``spared_s``: one that came less than so long ago is not closed for another of its own address.
    Longer lets a crowd behind one address get through in turn; it also keeps an honest one out for
    as long, when somebody at its own address opens many."""

    total: int
    each: int  # of one address
    for_members: int  # places of the total that only addresses of members get
    spared_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.each <= self.total or not 0 <= self.for_members < self.total:
            raise ValueError(
                f"{self.total} undecided connections, {self.each} of one address and {self.for_members} kept for "
                "members do not fit together; the first must be the largest, and the second at least 1"
            )


class Strangers(Generic[T]):
    """The undecided connections of one port. ``now`` is in seconds."""

    def __init__(self, limits: StrangerLimits) -> None:
        self._limits = limits
        self._origins: dict[T, Origin] = {}
        self._waiting: dict[Origin, OrderedDict[T, float]] = {}  # oldest first, with when each came
        self._members = 0  # of them those from addresses of members

    def add(self, one: T, origin: Origin, now: float) -> T | None:
        """A connection has come. Returns the one to be closed, perhaps this one, which is forgotten here."""
        self._origins[one] = origin
        self._waiting.setdefault(origin, OrderedDict())[one] = now
        self._members += origin.is_member
        crowd = self._find_crowd(origin)
        if crowd is None:
            return None
        oldest, since = next(iter(self._waiting[crowd].items()))
        victim = one if crowd == origin and now - since < self._limits.spared_s else oldest
        self.remove(victim)
        return victim

    def remove(self, one: T) -> None:
        """A connection is decided, or gone. Nothing happens when it is not known here."""
        origin = self._origins.pop(one, None)
        if origin is None:
            return
        self._members -= origin.is_member
        waiting = self._waiting[origin]
        del waiting[one]
        if not waiting:
            del self._waiting[origin]

    def evict(self) -> T | None:
        """The one to be closed because this process can hold no more; it is forgotten here."""
        if not self._origins:
            return None
        victim = next(iter(self._waiting[self._fullest(members_too=True)]))
        self.remove(victim)
        return victim

    def __len__(self) -> int:
        return len(self._origins)

    def __repr__(self) -> str:
        return f"Strangers({len(self)} of {self._limits.total}, addresses={len(self._waiting)})"

    def _find_crowd(self, newest: Origin) -> Origin | None:
        """The origin that has to give a place up for the newest one, if any has."""
        limits = self._limits
        if len(self._waiting[newest]) > limits.each:
            return newest
        if not newest.is_member and len(self) - self._members > limits.total - limits.for_members:
            return self._fullest(members_too=False)
        if len(self) > limits.total:
            return self._fullest(members_too=True)
        return None

    def _fullest(self, *, members_too: bool) -> Origin:
        """The origin with the most; of several the one whose oldest has waited longest."""
        return max(
            (origin for origin in self._waiting if members_too or not origin.is_member),
            key=lambda origin: (len(self._waiting[origin]), -next(iter(self._waiting[origin].values()))),
        )
