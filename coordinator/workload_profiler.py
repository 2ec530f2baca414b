"""What the traffic is like now, and whether it has changed (ThunderServe section 3.4 and appendix
E).

Prompt and output lengths are watched by a two-sided CUSUM on their logarithms: a sum that grows
while lengths are more than DRIFT standard deviations off the reference's mean, and alarms above
ALARM. At DRIFT 0.5 and ALARM 20, a stationary stream of normal values would alarm less than once in
a hundred million requests; a shift of d deviations is found after about ALARM / (d - DRIFT)
requests: some 10 between coding and conversation, whose outputs are two deviations apart.

The rate is watched the same way, on the mean gap of blocks of requests. Bursts make gaps alone say
little: a block is as long as it takes to know its mean to BLOCK_ERROR, (cv / BLOCK_ERROR)^2
requests, where cv is the gaps' coefficient of variation. For Poisson arrivals that is 16 requests
and a doubled rate is found in about 5 blocks; at the coding trace's 13 a block is 2,700 requests,
because nothing shorter tells a burst from a shift. Rates that are off by less than a quarter do not
count.

The reference is learnt from the first requests, and anew after each alarm. While it is, a rate is taken for another one
only where the latest RECENT gaps are clearly not like those before them: Poisson arrivals of 2.5 times the rate, and
regular ones of 1.5 times. Nothing here reads a clock: arrival times are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import log, sqrt
from typing import Final, NamedTuple

import numpy as np

from .planning.model.workload import Workload

WINDOW: Final = 512
"""Finished requests that the statistics and `workload` are about, at most."""

REFERENCE: Final = 512
"""Requests that a reference is learnt from, at least."""

DRIFT: Final = 0.5
"""In standard deviations: smaller shifts of lengths do not count."""

ALARM: Final = 20.0
"""In standard deviations of lengths, summed up."""

REFERENCE_ERROR: Final = 0.05
"""Relative error of the mean gap up to which a reference of arrivals is learnt."""

BLOCK_ERROR: Final = 0.25
"""Relative error of the mean gap of one block."""

BLOCK_DRIFT: Final = 1.0
"""As DRIFT, for blocks: above what a reference may be off by itself."""

BLOCK_ALARM: Final = 8.0
"""As ALARM, for blocks."""

RECENT: Final = 32
"""Gaps that are held against those before them while a reference is learnt. More: smaller shifts count, later."""

CLEARLY: Final = 5.0
"""Standard errors of their mean, by which recent gaps are off at least..."""

RATE_FACTOR: Final = 1.5
"""...and by this factor."""

LEAST_DEVIATION: Final = 0.05
"""Of log lengths: lengths that hardly vary may vary so much before it is a shift."""


class Watched(StrEnum):
    """What shifts."""

    PROMPT = "prompt length"
    OUTPUT = "output length"
    RATE = "request rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The traffic is not what it was. `before` and `after`: geometric mean of lengths in tokens, or
    requests a second. `since`: about how many requests ago it began."""

    what: Watched
    before: float
    after: float
    since: int


class WorkloadStatistics(NamedTuple):
    """Of the window; 0 where nothing has been seen. Lengths are means, in tokens."""

    requests: int
    rate: float
    arrival_cv: float
    prompt: float
    output: float


class _Moments:
    """Mean and variance of a stream (Welford)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        off = value - self.mean
        self.mean += off / self.count
        self._squares += off * (value - self.mean)

    @property
    def deviation(self) -> float:
        return sqrt(self._squares / max(1, self.count - 1))

    @property
    def cv(self) -> float:
        return self.deviation / self.mean if self.mean > 0.0 else 0.0


class _Cusum:
    """Sums of what is too high and too low; `run` counts since the larger of them was last 0."""

    def __init__(self, drift: float, alarm: float) -> None:
        self._drift, self._alarm = drift, alarm
        self._sums = [0.0, 0.0]
        self._totals = [0.0, 0.0]
        self._runs = [0, 0]

    def add(self, deviations: float) -> tuple[int, float] | None:
        """At an alarm: how many values the shift is old, and their mean."""
        for side, sign in enumerate((1.0, -1.0)):
            self._sums[side] = max(0.0, self._sums[side] + sign * deviations - self._drift)
            if self._sums[side] == 0.0:
                self._runs[side], self._totals[side] = 0, 0.0
                continue
            self._runs[side] += 1
            self._totals[side] += deviations
            if self._sums[side] > self._alarm:
                return self._runs[side], self._totals[side] / self._runs[side]
        return None


class _LengthWatch:
    """Of one kind of length."""

    def __init__(self, what: Watched) -> None:
        self._what = what
        self.restart()

    def restart(self) -> None:
        self._reference = _Moments()
        self._cusum = _Cusum(DRIFT, ALARM)

    def add(self, tokens: int) -> Shift | None:
        value = log(max(1, tokens))
        if self._reference.count < REFERENCE:
            self._reference.add(value)
            return None
        deviation = max(LEAST_DEVIATION, self._reference.deviation)
        found = self._cusum.add((value - self._reference.mean) / deviation)
        if found is None:
            return None
        since, mean = found
        before = self._reference.mean
        return Shift(
            what=self._what,
            before=float(np.exp(before)),
            after=float(np.exp(before + mean * deviation)),
            since=since,
        )


class _RateWatch:
    """Of gaps between arrivals."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._reference = _Moments()
        self._learnt = False
        self._cusum = _Cusum(BLOCK_DRIFT, BLOCK_ALARM)
        self._block: list[float] = []
        self._recent: deque[float] = deque()  # the latest while the reference is learnt
        self._before = _Moments()  # of those before them

    def add(self, gap: float) -> Shift | None:
        if not self._learnt:
            return self._learn(gap)
        self._block.append(gap)
        size = max(2, round((self._reference.cv / BLOCK_ERROR) ** 2))
        if len(self._block) < size:
            return None
        mean = sum(self._block) / size
        self._block.clear()
        # a block's mean is unsure, and so is the reference's that it is held against
        unsure = self._reference.cv * sqrt(1.0 / size + 1.0 / self._reference.count)
        deviation = max(LEAST_DEVIATION, unsure)
        found = self._cusum.add(log(self._reference.mean / mean) / deviation if mean > 0.0 else ALARM)
        if found is None:
            return None
        blocks, off = found
        before = 1.0 / self._reference.mean
        return Shift(
            what=Watched.RATE, before=before, after=before * float(np.exp(off * deviation)), since=blocks * size
        )

    def _learn(self, gap: float) -> Shift | None:
        reference = self._reference
        reference.add(gap)
        enough = max(REFERENCE, (reference.cv / REFERENCE_ERROR) ** 2)
        self._learnt = reference.count >= enough and reference.mean > 0.0
        self._recent.append(gap)
        if len(self._recent) > RECENT:
            self._before.add(self._recent.popleft())
        before = self._before
        if self._learnt or before.count < RECENT:
            return None
        mean = sum(self._recent) / RECENT
        if not min(mean, before.mean) > 0.0:
            return None
        unsure = before.cv * sqrt(1.0 / RECENT + 1.0 / before.count)
        if abs(log(mean / before.mean)) <= max(log(RATE_FACTOR), CLEARLY * unsure):
            return None
        # the later half: of what is before it some may be of the rate that was
        return Shift(what=Watched.RATE, before=1.0 / before.mean, after=1.0 / mean, since=RECENT // 2)


def complete_lengths(ended: Collection[tuple[int, int]], running: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Prompts and outputs of requests that have ended, and of running ones as they may end.

    Short answers end first: of the first hundred requests of a conversation's lengths those that have
    ended are half as long as all. So an answer with n tokens so far counts as long as those that have
    ended with more are on average (as redistributing censored values to the right does, Efron 1967),
    and twice as long as it is where there are none."""
    outputs = np.sort(np.array([output for _, output in ended], dtype=np.int64))
    after = np.append(np.cumsum(outputs[::-1])[::-1], 0)  # sums of those from each one on
    found = list(ended)
    for prompt, count in running:
        place = int(np.searchsorted(outputs, count, side="right"))
        longer = len(outputs) - place
        found.append((prompt, round(after[place] / longer) if longer else max(1, 2 * count)))
    return found


class WorkloadProfiler:
    """Of one service. Tell it of every arrival and every end; it answers with a `Shift` when there
    is one, and begins anew from there: its window then has only what came since the shift."""

    def __init__(self) -> None:
        self._arrivals: deque[float] = deque(maxlen=WINDOW + 1)
        self._lengths: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._rate = _RateWatch()
        self._prompt, self._output = _LengthWatch(Watched.PROMPT), _LengthWatch(Watched.OUTPUT)

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<WorkloadProfiler: {now.requests} requests, {now.rate:.3g}/s (CV {now.arrival_cv:.2g}), "
            f"{now.prompt:.0f} in, {now.output:.0f} out>"
        )

    def record_arrival(self, prompt: int, *, now: float) -> Shift | None:
        """A request of so many prompt tokens has come. `now` must not go back."""
        gap = now - self._arrivals[-1] if self._arrivals else None
        if gap is not None and gap < 0.0:
            raise ValueError(f"a request arrived {-gap:g} s before the one ahead of it")
        self._arrivals.append(now)
        shift = self._prompt.add(prompt) or (self._rate.add(gap) if gap is not None else None)
        return self._restart_after(shift)

    def record_finish(self, prompt: int, output: int) -> Shift | None:
        """A request has ended with so many output tokens."""
        self._lengths.append((prompt, output))
        return self._restart_after(self._output.add(output))

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival of the window to the last."""
        return self._arrivals[-1] - self._arrivals[0] if self._arrivals else 0.0

    def statistics(self, running: Iterable[tuple[int, int]] = ()) -> WorkloadStatistics:
        """Of the window. `running`: as for `workload`; `requests` are without them."""
        gaps = np.diff(np.array(self._arrivals))
        mean_gap = float(gaps.mean()) if len(gaps) else 0.0
        lengths = complete_lengths(self._lengths, running)
        prompts, outputs = zip(*lengths, strict=True) if lengths else ((0,), (0,))
        return WorkloadStatistics(
            requests=len(self._lengths),
            rate=1.0 / mean_gap if mean_gap > 0.0 else 0.0,
            arrival_cv=float(gaps.std() / mean_gap) if mean_gap > 0.0 else 0.0,
            prompt=float(np.mean(prompts)),
            output=float(np.mean(outputs)),
        )

    def workload(self, name: str, running: Iterable[tuple[int, int]] = ()) -> Workload:
        """The window as a workload to plan for. `running`: prompts of requests that have not ended,
        and the tokens of their answers so far. Raises WorkloadError while nothing has ended or
        arrived twice."""
        now = self.statistics()
        lengths = complete_lengths(self._lengths, running)
        return Workload(
            name=name,
            prompts=np.array([prompt for prompt, _ in lengths], dtype=np.int64),
            outputs=np.array([output for _, output in lengths], dtype=np.int64),
            rate=now.rate,
            arrival_cv=now.arrival_cv,
        )

    def _restart_after(self, shift: Shift | None) -> Shift | None:
        if shift is not None:
            for watch in (self._prompt, self._output, self._rate):
                watch.restart()
            # what came before the shift says nothing of the traffic now
            while len(self._lengths) > shift.since:
                self._lengths.popleft()
            while len(self._arrivals) > shift.since + 1:
                self._arrivals.popleft()
        return shift
