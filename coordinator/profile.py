"""How long an engine takes, as eight constants that are fitted to its own steps (Xiong et al.,
equations 3 and 4).

A phase's step over b requests of length L is modelled as

    seconds = token_s * b * L  +  request_s * b  +  length_s * L  +  step_s

For prefill, L is how many positions each request has computed in the step; for decode, how many it
holds already. With continuous batching the requests of a step differ in length: b * L is then their
sum, and L their mean.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from .bounds import Count, Figure, Seconds

USUAL_PROMPT: Final = 1024
"""Tokens of a prompt by which a replica's rate is told. Fits to short ones may have all of their time in `step_s`, and
nothing in what grows with their length."""

LEAST_STEP_S: Final = 1e-6
"""No step takes less, whatever a profile says."""


class StepSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One step of an engine: what it has computed, and how long that took.

    A request that computes one position counts as decoding, whatever it is called: that is what it
    costs. Others count as prefilling. `decode_context` is how many positions the decoding ones held
    before, all together; `prefill_context` those of the prefilling ones.
    """

    seconds: Seconds
    prefill_requests: Count
    prefill_tokens: Count
    decode_requests: Count
    decode_context: Count
    prefill_context: Count = 0


class PhaseCost(msgspec.Struct, frozen=True, kw_only=True):
    """The four constants of a phase: p1 to p4 of the paper for prefill, p5 to p8 for decode."""

    token_s: Seconds = 0.0
    request_s: Seconds = 0.0
    length_s: Seconds = 0.0
    step_s: Seconds = 0.0

    def seconds(self, requests: float, length: float) -> float:
        """Of a step over so many requests of this length (their mean)."""
        return self.token_s * requests * length + self.request_s * requests + self.length_s * length + self.step_s

    @property
    def prompt_token_s(self) -> float:
        """Of one token more of a prompt that is computed alone: where b is 1, b * L and L grow alike, and samples of
        one request each do not say which of the two constants has what."""
        return self.token_s + self.length_s

    def marginal_s(self, requests: float, length: float) -> float:
        """What these requests add to a step that runs anyway."""
        return self.seconds(requests, length) - self.step_s if requests else 0.0

    def run_s(self, requests: float, length: float, steps: float) -> float:
        """Of `steps` decode steps in a row (equation 4): before the first, each request holds this
        length, and it holds one token more at each."""
        return steps * self.seconds(requests, length + (steps + 1.0) / 2.0)


class PhaseCosts(NamedTuple):
    """The constants of a replica's phases, where they are known."""

    prefill: PhaseCost | None = None
    decode: PhaseCost | None = None


class MeasuredCosts(NamedTuple):
    """What a replica's engine says of its steps, and what a sweep over a model of its hardware has
    for the same constants. Where the first are not known, the model counts."""

    told: PhaseCosts
    modelled: PhaseCosts


class PhaseFit(msgspec.Struct, frozen=True, kw_only=True):
    """A phase's constants, from how many samples, and the median of |predicted - measured| /
    measured over them."""

    cost: PhaseCost
    samples: Count
    error: Figure


class LatencyProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's own steps say of it; a phase that it has not run often enough is None."""

    prefill: PhaseFit | None = None
    decode: PhaseFit | None = None


class ReplicaProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a replica is, and how many tokens its KV cache holds; 0: that is not known."""

    prefill: PhaseCost
    decode: PhaseCost
    kv_tokens: Count = 0

    def prefill_tokens_s(self, stages: int) -> float:
        """Tokens of usual prompts that it computes in a second, each of its stages its layers of another one."""
        return stages * USUAL_PROMPT / max(LEAST_STEP_S, self.prefill.seconds(1.0, USUAL_PROMPT))

    def batch_s(self, requests: float, prompt: float, output: float) -> tuple[float, float]:
        """Seconds in which a batch of equal requests is prefilled, and decoded (equations 3 and
        4)."""
        return self.prefill.seconds(requests, prompt), self.decode.run_s(requests, prompt, output)


def prompt_s(prefill: PhaseCost, tokens: int, chunk: int) -> float:
    """Seconds to prefill one prompt alone, at most `chunk` positions a step."""
    whole, rest = divmod(tokens, chunk)
    return whole * prefill.seconds(1, chunk) + (prefill.seconds(1, rest) if rest else 0.0)
