"""What clients saw, and whether it is right. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Final

import msgspec
import numpy as np

from .schedule import PlannedRequest

NOTICED_S: Final = 1.0  # a stream may fall silent so long before the fault is written down that silenced it

LIE: Final = 3
"""The token that a box which lies always tells."""

Expect = Callable[[tuple[int, ...], int], tuple[int, ...]]
"""A prompt and how many tokens are wanted: the right answer."""


@dataclass(slots=True)
class AnswerRecord:
    """One request as its client saw it, in seconds of the run. `times`: of each piece of the answer. `error`: how it
    ended, where it failed; `late`: it had not ended by its deadline."""

    asked: PlannedRequest
    asked_at: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended_at: float | None = None
    error: str = ""
    late: bool = False
    attempts: int = 1
    recovered: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it ended, and not with an error."""
        return self.ended_at is not None and not self.error and not self.late

    @property
    def was_moved(self) -> bool:
        """Whether other boxes, or another gateway, had to go on with it."""
        return self.attempts > 1 or bool(self.recovered)

    def take(self, tokens: Sequence[int], now: float) -> None:
        """More of the answer has come."""
        if tokens:
            self.tokens += tokens
            self.times.append(now)

    def find_longest_wait(self) -> tuple[float, float]:
        """From when to when its client waited longest for more; until its end, where nothing came."""
        marks = [self.asked_at, *self.times]
        if len(marks) == 1:
            marks.append(self.asked_at if self.ended_at is None else self.ended_at)
        return max(pairwise(marks), key=lambda wait: wait[1] - wait[0])

    def find_longest_gap_s(self) -> float:
        """The longest time between two pieces of the answer."""
        return max((after - before for before, after in pairwise(self.times)), default=0.0)


class TimeSpread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles, in seconds, of so many values."""

    count: int
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    worst_s: float = 0.0


def spread_of(values: Sequence[float]) -> TimeSpread:
    """Percentiles of these; zeros of none."""
    if not values:
        return TimeSpread(count=0)
    p50, p90, p99 = (float(np.percentile(values, percent)) for percent in (50, 90, 99))
    return TimeSpread(count=len(values), p50_s=p50, p90_s=p90, p99_s=p99, worst_s=max(values))


def find_wrong(record: AnswerRecord, expected: Sequence[int]) -> str:
    """What is wrong with the tokens of an answer; "" for nothing. What came of one that failed must be right too."""
    for position, (token, right) in enumerate(zip(record.tokens, expected, strict=False)):
        if token != right:
            return f"request {record.asked.number}: token {position} is {token}, should be {right}"
    if len(record.tokens) > len(expected):
        return f"request {record.asked.number}: {len(record.tokens)} tokens, {len(expected)} were asked for"
    if record.is_complete and len(record.tokens) < len(expected):
        return f"request {record.asked.number}: complete with {len(record.tokens)} of {len(expected)} tokens"
    return ""


def is_lie(record: AnswerRecord, expected: Sequence[int]) -> bool:
    """Whether the first token that is not right, or too many, is the liar's."""
    wrong = (token for token, right in zip_longest(record.tokens, expected) if token not in (None, right))
    return next(wrong, None) == LIE


def find_recovery_s(record: AnswerRecord, faults: Sequence[float]) -> float | None:
    """From the fault that silenced a stream to the first token after it: of the moments of `faults`, the nearest to the
    beginning of its longest wait. None for one that nothing happened to, or that never went on."""
    if not record.was_moved or not record.is_complete:
        return None
    since, until = record.find_longest_wait()
    during = [at for at in faults if since - NOTICED_S <= at < until]
    return until - min(during, key=lambda at: abs(at - since)) if during else None
