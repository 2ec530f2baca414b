"""What has happened at a node since it was started, counted as the node's log tells it.

    counts = NodeCounts()
    log.followers.append(counts.on_event)

Shown by `metrics`, apart from here: Prometheus's library is 12 MB of a node's memory, and few are asked for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from ...coordinator.plan import Deadlines
from .values import EventKind, Fact, NodeEvent

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS: Final = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
OUTCOMES: Final = ("stop", "length", "error", "cancelled")
REPLAYS: Final = ("decode", "prefill")
REASONS: Final = {  # of failed KV transfers: what a reason has in it -> its label
    "deadline": "deadline", "within": "deadline", "lost": "lost", "gone": "lost", "closed": "lost", "reset": "lost",
    "cancel": "cancelled", "abort": "cancelled", "prefill ended": "prefill", "did not begin": "prefill",
    "finite": "unsound", "nan": "unsound", "room": "memory", "engine": "engine",
}  # fmt: skip
OTHER: Final = "other"
NO_DEADLINES: Final = Deadlines()


@final
class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """One value more."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has them: how many are at most each bound."""
        total, found = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


def are_met(deadlines: Deadlines, facts: Mapping[str, Fact]) -> bool:
    """By a request that has ended like this: what is asked for, and an answer without an error."""
    limits = {"ttft_s": deadlines.ttft_s, "tpot_s": deadlines.tpot_s, "e2e_s": deadlines.e2e_s}
    late = any(limit and _number(facts, name) > limit for name, limit in limits.items())
    return not late and facts.get("finish") in ("stop", "length")


@final
@dataclass(slots=True)
class NodeCounts:
    """What has happened since the node was started. `deadlines` are those that attainment is measured by."""

    deadlines: Deadlines = NO_DEADLINES
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys((kind.value for kind in EventKind), 0))
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    attained: int = 0
    judged: int = 0
    replays: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REPLAYS, 0))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    box_usd: float = 0.0
    traffic_usd: float = 0.0
    raw_bytes: int = 0
    wire_bytes: int = 0
    resent_bytes: int = 0
    codec_s: float = 0.0
    failed_transfers: dict[str, int] = field(default_factory=lambda: dict.fromkeys({*REASONS.values(), OTHER}, 0))
    transfer_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    visible_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def on_event(self, event: NodeEvent) -> None:
        """Count what the log has just been told."""
        self.events[event.kind] = self.events.get(event.kind, 0) + 1
        match event.kind:
            case EventKind.REQUEST_ENDED:
                self._on_request(event.facts)
            case EventKind.REQUEST_RECOVERED:
                kind = str(event.facts.get("type", ""))
                self.replays[kind] = self.replays.get(kind, 0) + 1
            case EventKind.TRANSFER_ENDED | EventKind.TRANSFER_FAILED:
                self._on_transfer(event)
            case _:
                pass

    @property
    def attainment(self) -> float:
        """The share of requests that met their deadlines; 1 before the first."""
        return self.attained / self.judged if self.judged else 1.0

    def _on_request(self, facts: Mapping[str, Fact]) -> None:
        outcome = str(facts.get("finish", ""))
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
        self.prompt_tokens += _whole(facts, "prompt_tokens")
        self.completion_tokens += _whole(facts, "completion_tokens")
        self.box_usd += _number(facts, "box_usd")
        self.traffic_usd += _number(facts, "traffic_usd")
        for name, histogram in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("e2e_s", self.e2e_s)):
            if name in facts:
                histogram.observe(_number(facts, name))
        if outcome != "cancelled":  # who goes away has not been failed
            self.judged += 1
            self.attained += are_met(self.deadlines, facts)

    def _on_transfer(self, event: NodeEvent) -> None:
        facts = event.facts
        self.raw_bytes += _whole(facts, "raw_bytes")
        self.wire_bytes += _whole(facts, "wire_bytes")
        self.resent_bytes += _whole(facts, "resent_bytes")
        self.codec_s += _number(facts, "codec_s")
        if event.kind == EventKind.TRANSFER_FAILED:
            self.failed_transfers[reason_label(str(facts.get("failed", "")))] += 1
            return
        self.transfer_s.observe(_number(facts, "span_s"))
        self.visible_s.observe(_number(facts, "visible_s"))


def reason_label(reason: str) -> str:
    """The label of a failed transfer: one of a few, whatever a peer has said."""
    text = reason.lower()
    return next((label for part, label in REASONS.items() if part in text), OTHER)


def _whole(facts: Mapping[str, Fact], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _number(facts: Mapping[str, Fact], name: str) -> float:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
