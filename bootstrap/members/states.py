"""What the member table takes and gives, as plain values."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..addresses import Address
from ..trust.entries import Entry, MemberRecord
from ..trust.keys import PeerId
from ..trust.tokens import Role

Digest = dict[str, tuple[int, dict[str, int]]]  # origin -> (incarnation, kind -> version)
CheckRecord = Callable[[str, MemberRecord], None]  # raises TokenError unless this peer may have this role


class MemberState(Enum):
    """See the picture in :mod:`.membership`."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member as others see it."""

    peer_id: PeerId
    role: Role
    state: MemberState
    address: Address
    incarnation: int
    rtt_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What a merge did. Blame the sender for ``forged``; ``ignored`` may merely be early."""

    changed: tuple[Entry, ...] = ()
    forged: int = 0
    ignored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    """What time brought: first ``drop``, then ping, then dial; ``changed``: tell the readers."""

    drop: tuple[PeerId, ...] = ()
    ping: tuple[PeerId, ...] = ()
    changed: bool = False
