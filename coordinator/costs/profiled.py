"""A replica's own profile as step times: the eight constants that it has fitted to its steps."""

from __future__ import annotations

from ..profile import LatencyProfile
from .step_times import DecodeLine

__all__ = ["ProfileError", "ProfiledTimes"]


class ProfileError(ValueError):
    """A profile that lacks a phase."""


class ProfiledTimes:
    """StepTimes of a profile. It knows lengths, not pairs: attention to earlier chunks of a prompt
    is in none of its constants."""

    def __init__(self, profile: LatencyProfile) -> None:
        """Raises ProfileError where the replica has not run both phases often enough."""
        if profile.prefill is None or profile.decode is None:
            missing = "prefill" if profile.prefill is None else "decode"
            raise ProfileError(f"the profile has no constants for {missing} yet")
        self._prefill = profile.prefill.cost
        self._decode = profile.decode.cost
        self.source = "profile"

    def prefill_s(self, tokens: int, pairs: float) -> float:
        # A whole prompt of n tokens has n (n + 1) / 2 pairs: the mean length of several is told by their pairs. A chunk
        # has more pairs than that, and is one request of its own length.
        length = min(float(tokens), max(1.0, 2.0 * pairs / tokens - 1.0)) if tokens else 0.0
        requests = tokens / length if tokens else 0.0
        return self._prefill.seconds(requests, length)

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        return self.prefill_s(tokens, pairs)

    def decode_line(self, requests: int) -> DecodeLine:
        cost = self._decode
        per_request_s = cost.length_s / requests if requests else 0.0
        return DecodeLine(cost.request_s * requests + cost.step_s, cost.token_s + per_request_s)

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        """A prefill, and what the requests add to a step that runs anyway."""
        return self.prefill_s(tokens, pairs) + self._decode.marginal_s(requests, context / requests if requests else 0)
