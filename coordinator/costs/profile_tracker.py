"""An engine's profile while its speed changes: hardware warms, throttles, or is shared with others.

Steps are kept by kind (powers of two of their requests and tokens), few of each, so that a batch's
decodes do not push out its one prefill. What is fitted to them (`profile_fit`) forgets: a step
counts for half as much after each `HALF_LIFE` later ones of its phase. It never counts for nothing,
because steps of kinds that are seen no more still say how times grow with batch and length.

So a slow drift is followed, and a sudden change is too: the latest `LATEST` steps of a phase are
held against earlier ones of their own kind. Where most of them are off to the same side, the engine
has another speed now, and the earlier steps are rescaled to it: a card that throttles is slower at
all sizes, also at those that it is not asked for just now. Few outliers (a pause, a preemption)
are not most. Comparing like with like keeps errors of the fit out of this: where traffic moves to
sizes at which the fit is off, no engine has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import log
from statistics import median
from typing import Final, NamedTuple, final

from ..profile import LatencyProfile, PhaseCost, StepSample

OF_A_KIND: Final = 32
"""Settled steps that are kept of a kind."""

LATEST: Final = 16
"""Steps of a phase that are held against those before them. More: surer, and later."""

COMPARED: Final = 12
"""So many of those must have had earlier ones of their kind,"""

AGREEING: Final = 0.75
"""and this share of them must be off to one side,"""

CHANGED: Final = 1.1
"""by this factor. Less: noise of a busy machine would be news."""

ALIKE: Final = 4
"""Earlier steps of its kind that a step is compared with, at least."""

HALF_LIFE: Final = 128.0
"""Steps of its phase after which one counts for half."""

LEAST_WEIGHT: Final = 0.1
"""What the oldest steps count for. Without them what is seen now could not tell all constants apart."""

_Kind = tuple[int, ...]


class _Step(NamedTuple):
    """A step, the how many-th of its phase, and how many times as long it took as earlier ones of
    its kind; None where there were too few."""

    number: int
    sample: StepSample
    over_alike: float | None


class _PhaseSteps:
    """The steps of one phase."""

    def __init__(self) -> None:
        self.seen = 0
        self._settled: dict[_Kind, deque[_Step]] = {}
        self._latest: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._latest) + sum(map(len, self._settled.values()))

    def __iter__(self) -> Iterator[_Step]:
        for steps in self._settled.values():
            yield from steps
        yield from self._latest

    def add(self, sample: StepSample, profile: LatencyProfile | None) -> None:
        """Keep it among the latest; the oldest of those settles."""
        self.seen += 1
        self._latest.append(_Step(self.seen, sample, self._compare(sample, profile)))
        if len(self._latest) > LATEST:
            self._settle(self._latest.popleft())

    def take_change(self) -> float | None:
        """By what factor the latest steps take longer than those before, if they do: those are
        rescaled by it, and the latest settle."""
        ratios = [step.over_alike for step in self._latest if step.over_alike is not None]
        if len(ratios) < COMPARED:
            return None
        slower = sum(ratio > CHANGED for ratio in ratios)
        faster = sum(ratio < 1.0 / CHANGED for ratio in ratios)
        if max(slower, faster) < AGREEING * len(ratios):
            return None
        factor = median(ratios)
        for kind, steps in self._settled.items():
            self._settled[kind] = deque((_rescale(step, factor) for step in steps), maxlen=OF_A_KIND)
        while self._latest:
            self._settle(self._latest.popleft())
        return factor

    def _settle(self, step: _Step) -> None:
        self._settled.setdefault(_kind_of(step.sample), deque(maxlen=OF_A_KIND)).append(step)

    def _compare(self, sample: StepSample, profile: LatencyProfile | None) -> float | None:
        """With settled steps of its kind, each as a multiple of what the profile has for it: within
        a kind sizes differ, too."""
        alike = self._settled.get(_kind_of(sample), ())
        if len(alike) < ALIKE or (expected := _predict_s(profile, sample)) is None:
            return None
        usual = median(each.sample.seconds / (_predict_s(profile, each.sample) or expected) for each in alike)
        return sample.seconds / expected / usual


@final
class ProfileTracker:
    """The steps of one engine that its profile is fitted to."""

    def __init__(self) -> None:
        self.profile: LatencyProfile | None = None
        """What was fitted to them last; whoever fits says so. New steps are compared by it."""
        self._prefills, self._decodes = _PhaseSteps(), _PhaseSteps()

    def __repr__(self) -> str:
        return f"<ProfileTracker {len(self._prefills)} prefills, {len(self._decodes)} decodes>"

    def __len__(self) -> int:
        return len(self._prefills) + len(self._decodes)

    def add(self, samples: Iterable[StepSample]) -> float | None:
        """Take in what the engine did. Returns the factor by which its steps take longer, where
        that has turned out to be another than before: the profile is to be fitted anew."""
        changed: float | None = None
        for sample in samples:
            if sample.seconds <= 0.0 or not (sample.prefill_requests or sample.decode_requests):
                continue
            steps = self._prefills if sample.prefill_requests else self._decodes
            steps.add(sample, self.profile)
            factor = steps.take_change()
            if factor is not None and abs(log(factor)) > abs(log(changed or 1.0)):
                changed = factor
        return changed

    def samples(self) -> list[StepSample]:
        """What is kept, as it would be at the engine's present speed."""
        return [step.sample for steps in (self._prefills, self._decodes) for step in steps]

    def weights(self) -> list[float]:
        """What each of `samples` counts for in a fit."""
        return [
            max(LEAST_WEIGHT, 0.5 ** ((steps.seen - step.number) / HALF_LIFE))
            for steps in (self._prefills, self._decodes)
            for step in steps
        ]


def _kind_of(sample: StepSample) -> _Kind:
    sizes = (sample.prefill_requests, sample.prefill_tokens, sample.decode_requests, sample.decode_context)
    return tuple(size.bit_length() for size in sizes)


def _rescale(step: _Step, factor: float) -> _Step:
    sample = step.sample
    slower = StepSample(
        sample.seconds * factor, sample.prefill_requests, sample.prefill_tokens, sample.decode_requests,
        sample.decode_context, sample.prefill_context,
    )  # fmt: skip
    return step._replace(sample=slower)


def _predict_s(profile: LatencyProfile | None, sample: StepSample) -> float | None:
    """What the profile has for such a step; None where it has nothing for its phase."""
    fitted = None if profile is None else profile.prefill if sample.prefill_requests else profile.decode
    if profile is None or fitted is None:
        return None
    if not sample.prefill_requests:
        return _mean_s(fitted.cost, sample.decode_requests, sample.decode_context) or None
    seconds = _mean_s(fitted.cost, sample.prefill_requests, sample.prefill_tokens)
    if sample.decode_requests and profile.decode is not None:
        length = sample.decode_context / sample.decode_requests
        seconds += profile.decode.cost.marginal_s(sample.decode_requests, length)
    return seconds or None


def _mean_s(cost: PhaseCost, requests: int, tokens: int) -> float:
    return cost.seconds(requests, tokens / requests)
