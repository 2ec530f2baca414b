"""Whether what replicas tell of their prefixes comes true: first tokens come sooner than they could without.

A replica cannot make names up: they are hashes over prompts and salts that it has seen. But it may go on naming what
it has overwritten, or never kept. Then its first tokens take as long as if all of the prompt had been computed, which
its gateways measure. How fast it computes they know from prompts of which it names nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final, final

GAIN: Final = 0.2
"""Share of the latest request in a mean; higher: sooner, and by chance more often."""
CLEAR_SHARE: Final = 0.25
"""A prefix that is less of what lies before the first token would be lost in the noise of that."""
DOUBT_BELOW: Final = 0.5
"""A replica whose prefixes save less than so much of what they should counts for less: measured times are rough."""


@dataclass(slots=True)
class _HitRecord:
    tokens_s: float | None = None
    saved: float = 1.0


@final
class HitTrust:
    """By replica, how much of the prefixes that it names is believed: from 0 to 1."""

    def __init__(self) -> None:
        self._records: dict[str, _HitRecord] = {}

    def __repr__(self) -> str:
        told = ", ".join(f"{replica} {self.share(replica):.2f}" for replica in sorted(self._records))
        return f"<HitTrust {told}>"

    def share(self, replica: str) -> float:
        """How much of what it names is believed."""
        record = self._records.get(replica)
        return min(1.0, record.saved / DOUBT_BELOW) if record is not None else 1.0

    def observe(self, replica: str, *, tokens: int, named: int, seconds: float) -> None:
        """A first token has come after so long, before which `tokens` were to be computed, less the `named` ones that
        the replica said it had."""
        if not (seconds > 0.0 and tokens > 0):
            return
        record = self._records.setdefault(replica, _HitRecord())
        if not named:
            found = tokens / seconds
            record.tokens_s = found if record.tokens_s is None else record.tokens_s + GAIN * (found - record.tokens_s)
            return
        speed = record.tokens_s or self._usual_speed()
        if speed is None or named < CLEAR_SHARE * tokens:
            return
        saved = min(1.0, max(0.0, (tokens - speed * seconds) / named))
        record.saved += GAIN * (saved - record.saved)

    def keep(self, replicas: set[str]) -> None:
        """Forget all others."""
        self._records = {replica: record for replica, record in self._records.items() if replica in replicas}

    def _usual_speed(self) -> float | None:
        speeds = [record.tokens_s for record in self._records.values() if record.tokens_s is not None]
        return median(speeds) if speeds else None
