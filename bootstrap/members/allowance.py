"""How much of something a peer may have per second. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """A bucket of ``burst`` that fills at ``rate`` per second."""

    rate: float
    burst: float
    left: float = -1.0
    at: float = 0.0

    def __post_init__(self) -> None:
        if self.left < 0.0:
            self.left = self.burst

    def take(self, now: float) -> bool:
        """Have one, if there is one left at ``now`` (seconds)."""
        self.left = min(self.left + max(now - self.at, 0.0) * self.rate, self.burst)
        self.at = now
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True

    def next_at(self) -> float:
        """When there is one again, as of the last :meth:`take`."""
        return self.at + max(1.0 - self.left, 0.0) / self.rate
