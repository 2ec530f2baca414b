"""When a replica that has a request, and answers pings, has been silent about it for too long.

The plan expects of a route a time to the first token, and from token to token. A replica may take
many times as long, since it may be slow, or busy with what others ask of it; and it always has some
seconds. ::

    limit = max(stall_floor_s, stall_factor * expected) * 2 ** stalls

Each stall of a request doubles the limit: where all boxes are slower than was expected, its work is
not moved from one to the next for ever.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from .values import RequestSettings

MOST_DOUBLINGS: Final = 16


class ExpectedTimes(NamedTuple):
    """What is expected of a route, in seconds: until the first token, and from one token to the
    next. Infinite: nothing is, so that no silence is too long."""

    first_token_s: float = inf
    next_token_s: float = inf


def stall_limit_s(expected_s: float, stalls: int, settings: RequestSettings) -> float:
    """How long nothing may be heard of a request that has had so many stalls."""
    limit_s = max(settings.stall_floor_s, settings.stall_factor * expected_s)
    return limit_s * 2.0 ** min(stalls, MOST_DOUBLINGS)
