"""What is known of a service on one engine: how long its requests and iterations take, and how long they are.

    profile = ServiceProfile(expect_service(times, prompts, outputs))
    profile.execution.note(seconds)      # of each request that has ended
    profile.execution.mean, profile.execution.deviation

`execution` is SeaLLM's L_s and sd_s (section 4.2): the seconds in which the engine worked for a request, without those
in which it waited. The paper has them "on one GPU". Here they are those of the engine that decides, on its own GPUs,
however many and of whatever kind: priorities compare only requests of one engine, whose services all run on the same
GPUs, so a common factor changes no order. Between engines of unequal GPUs profiles are never compared; one that moves
is scaled by what the planner expects of both (`ServiceProfile.rescaled`).

All figures begin with what the planner expects, as if `PRIOR_WEIGHT` requests had been seen, and follow the latest
`MEMORY` of them. What ends first is short, so right after a start they are too low for a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from ..costs.step_times import StepTimes, chunk_pairs
from .values import SharingError

PRIOR_WEIGHT: Final = 8.0
"""Requests that the planner's estimate counts for."""

GUESS_WEIGHT: Final = 1.0
"""Requests that a guess counts for, where nobody knows what a service is asked. More: a service of short answers counts
as one of long ones for longer, and waits behind them."""

MEMORY: Final = 256.0
"""Latest requests that count. More: steadier; fewer: it follows other traffic sooner."""

TYPICAL_BATCH: Final = 8
"""Requests of a decode iteration, where an estimate is made."""


@dataclass(frozen=True, slots=True)
class ExpectedMoments:
    """A mean and a standard deviation."""

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        if not (isfinite(self.mean) and self.mean > 0.0 and isfinite(self.deviation) and self.deviation >= 0.0):
            raise SharingError(f"a mean of {self.mean:g} with a deviation of {self.deviation:g} cannot be expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedService:
    """What the planner expects of a service on an engine. Times in seconds, lengths in tokens. `weight`: requests that
    lengths and execution times count for."""

    execution: ExpectedMoments
    prompt_tokens: ExpectedMoments
    output_tokens: ExpectedMoments
    prefill_token: ExpectedMoments
    decode_step: ExpectedMoments
    weight: float = PRIOR_WEIGHT


@final
class LearnedMoments:
    """Mean and standard deviation of the latest values; state and time of an observation are constant."""

    __slots__ = ("_count", "_variance", "mean")

    def __init__(self, expected: ExpectedMoments, weight: float = PRIOR_WEIGHT) -> None:
        self.mean = expected.mean
        self._variance = expected.deviation**2
        self._count = weight

    def __repr__(self) -> str:
        return f"<LearnedMoments {self.mean:.3g} +- {self.deviation:.3g}>"

    @property
    def deviation(self) -> float:
        """Of single values."""
        return sqrt(self._variance)

    def note(self, value: float) -> None:
        """One more value. What cannot be one (negative, infinite) is left out."""
        if not 0.0 <= value < float("inf"):
            return
        self._count = min(MEMORY, self._count + 1.0)
        share = 1.0 / self._count
        off = value - self.mean
        self.mean += share * off
        self._variance = (1.0 - share) * (self._variance + share * off * off)

    def expected(self) -> ExpectedMoments:
        """As a frozen value."""
        return ExpectedMoments(self.mean, self.deviation)


@final
class ServiceProfile:
    """See the module. `prefill_token`: seconds of an iteration over its prompt tokens."""

    __slots__ = ("decode_step", "execution", "output_tokens", "prefill_token", "prompt_tokens")

    def __init__(self, expected: ExpectedService) -> None:
        self.execution = LearnedMoments(expected.execution, expected.weight)
        self.prompt_tokens = LearnedMoments(expected.prompt_tokens, expected.weight)
        self.output_tokens = LearnedMoments(expected.output_tokens, expected.weight)
        self.prefill_token = LearnedMoments(expected.prefill_token)
        self.decode_step = LearnedMoments(expected.decode_step)

    def __repr__(self) -> str:
        return f"<ServiceProfile {self.execution!r} s>"

    def rescaled(self, here: ExpectedService, there: ExpectedService) -> ExpectedService:
        """What has been learned on one engine, as what to expect on another, by what the planner expects of both."""

        def scale(learned: LearnedMoments, one: ExpectedMoments, other: ExpectedMoments) -> ExpectedMoments:
            factor = other.mean / one.mean
            return ExpectedMoments(learned.mean * factor, learned.deviation * factor)

        return ExpectedService(
            execution=scale(self.execution, here.execution, there.execution),
            prompt_tokens=self.prompt_tokens.expected(),
            output_tokens=self.output_tokens.expected(),
            prefill_token=scale(self.prefill_token, here.prefill_token, there.prefill_token),
            decode_step=scale(self.decode_step, here.decode_step, there.decode_step),
        )


def expect_service(times: StepTimes, prompts: NDArray[np.int64], outputs: NDArray[np.int64]) -> ExpectedService:
    """By the cost model, for requests of these lengths, each computed without others. Raises SharingError."""
    if not len(prompts) or len(prompts) != len(outputs):
        raise SharingError(f"lengths of {len(prompts)} prompts and {len(outputs)} answers are not those of requests")
    executions = [
        lone_execution_s(times, prompt, output)
        for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)
    ]
    tokens = [times.prefill_s(prompt, chunk_pairs(0, prompt)) / prompt for prompt in prompts.tolist()]
    context = float((prompts + outputs / 2).mean())
    step_s = times.decode_line(TYPICAL_BATCH).step_s(TYPICAL_BATCH * context)
    return ExpectedService(
        execution=_expected(executions),
        prompt_tokens=_expected(prompts),
        output_tokens=_expected(outputs),
        prefill_token=_expected(tokens),
        decode_step=ExpectedMoments(step_s, 0.0),
    )


def lone_execution_s(times: StepTimes, prompt: int, output: int) -> float:
    """Seconds of one request that has an engine to itself."""
    return times.prefill_s(prompt, chunk_pairs(0, prompt)) + times.decode_line(1).run_s(1, prompt, output - 1)


def _expected(values: list[float] | NDArray[np.int64]) -> ExpectedMoments:
    return ExpectedMoments(float(np.mean(values)), float(np.std(values)))
