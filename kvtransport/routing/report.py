"""How much of a transfer the client never waited for."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Three moments of one transfer on the sender's clock, in seconds.

        first_frame_at      prefill_done_at              acknowledged_at
        |--- hidden behind prefill ---|---- visible ----|
        |-------------------- span ---------------------|

    Layer by layer, most of a transfer runs while later layers still compute; only what is left
    after prefill delays the first token that the decode side makes."""

    first_frame_at: float
    prefill_done_at: float
    acknowledged_at: float

    def __post_init__(self) -> None:
        moments = (self.first_frame_at, self.prefill_done_at, self.acknowledged_at)
        if not all(math.isfinite(moment) for moment in moments):
            raise ValueError(f"not moments in time: {self}")
        if self.acknowledged_at < self.first_frame_at:
            raise ValueError(f"acknowledged before the first frame: {self}")

    @property
    def span(self) -> float:
        return self.acknowledged_at - self.first_frame_at

    @property
    def visible(self) -> float:
        """Seconds from the end of prefill (or a later first frame) to the acknowledgement."""
        return max(0.0, self.acknowledged_at - max(self.first_frame_at, self.prefill_done_at))

    @property
    def hidden_fraction(self) -> float:
        """`1 - visible / span`, in [0, 1]. A transfer that took no time had nothing to hide: 1."""
        return 1.0 - self.visible / self.span if self.span > 0 else 1.0
