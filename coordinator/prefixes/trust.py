"""Whether what replicas tell of their prefixes comes true: first tokens come sooner than they could without.

A replica cannot make names up: they are hashes over prompts and salts that it has seen. But it may go on naming what
it has overwritten, or never kept. Then its first tokens take as long as if all of the prompt had been computed, which
its gateways measure. How fast it computes they know from prompts of which it names nothing.

Likewise a replica from which KV is fetched: it may be slow, or send nothing, so that all is computed where the request
is. Then it is not asked until some of that is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2
from statistics import median
from typing import Final, final

GAIN: Final = 0.2
"""Share of the latest request in a mean; higher: sooner, and by chance more often."""
CLEAR_SHARE: Final = 0.25
"""A prefix that is less of what lies before the first token would be lost in the noise of that."""
DOUBT_BELOW: Final = 0.5
"""A replica whose prefixes save less than so much of what they should counts for less: measured times are rough."""
FETCH_BELOW: Final = 0.25
"""KV is not fetched from where it has saved less than so much of what it should. Higher: first tokens that are late for
other reasons keep more from being fetched."""
FORGET_S: Final = 300.0
"""Half of what speaks against fetching from a replica is forgotten after so long. Shorter: it is tried again sooner."""


@dataclass(slots=True)
class _HitRecord:
    tokens_s: float | None = None
    saved: float = 1.0


@dataclass(slots=True)
class _SourceRecord:
    saved: float = 1.0
    at: float = 0.0

    def saved_at(self, now: float) -> float:
        """With what has been forgotten since."""
        return 1.0 - (1.0 - self.saved) * exp2(-max(0.0, now - self.at) / FORGET_S)


@final
class HitTrust:
    """By replica, how much of the prefixes that it names is believed: from 0 to 1."""

    def __init__(self) -> None:
        self._records: dict[str, _HitRecord] = {}
        self._sources: dict[str, _SourceRecord] = {}

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

    def is_source(self, replica: str, now: float) -> bool:
        """Whether KV may be fetched from it: that has saved enough lately, or has not been tried."""
        record = self._sources.get(replica)
        return record is None or record.saved_at(now) >= FETCH_BELOW

    def observe_fetch(
        self, replica: str, source: str, *, tokens: int, fetched: int, seconds: float, now: float
    ) -> None:
        """This replica has had a first token after so long, before which `tokens` were to be computed there, less the
        `fetched` ones that came from `source`, or were to."""
        record = self._records.get(replica)
        speed = (record.tokens_s if record is not None else None) or self._usual_speed()
        if speed is None or not fetched >= CLEAR_SHARE * tokens > 0.0:
            return
        known = self._sources.setdefault(source, _SourceRecord(at=now))
        saved = min(1.0, max(0.0, (tokens - speed * seconds) / fetched))
        before = known.saved_at(now)
        known.saved, known.at = before + GAIN * (saved - before), now

    def keep(self, replicas: set[str]) -> None:
        """Forget all others."""
        self._records = {replica: record for replica, record in self._records.items() if replica in replicas}
        self._sources = {replica: record for replica, record in self._sources.items() if replica in replicas}

    def _usual_speed(self) -> float | None:
        speeds = [record.tokens_s for record in self._records.values() if record.tokens_s is not None]
        return median(speeds) if speeds else None
