"""Step times of a replica by the eight constants that are fitted to its engine's own steps (Xiong et
al.).

The constants are held against those that a sweep over a model of the hardware has: how many times
as long a step takes, at its batch and length, is what the engine says; that many times the model is
what is expected. Both sets of constants draw the same straight lines through steps that are not
quite straight, so what the lines miss drops out: an engine that is as fast as its card is taken for
counts exactly so. At sizes beyond a sweep, and for attention to earlier chunks of a prompt, which
is in none of the constants, the factor of the nearest size counts.

The constants are a box's own word: none is taken as more than `FURTHEST` off the model.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

from ..profile import MeasuredCosts, PhaseCost
from .gpus import GpuSpec
from .step_times import DecodeLine, StepTimes

FURTHEST: Final = 8.0
"""By what factor a box's own figures may differ from what its hardware is taken for, up or down."""

KNOWN_TOKENS: Final = 2048
"""Tokens of a prefill up to which the constants say what they were fitted to,"""

KNOWN_REQUESTS: Final = 32
"""and requests of a decode step. A sweep covers as many, or nearly."""

STAGE_PREFILL: Final = (1.0, 512.0)
STAGE_DECODE: Final = (8.0, 512.0)
"""Requests and their length at which a card is scaled."""

CONTEXTS: Final = (64.0, 1024.0)
"""Of each request of a decode step, between which it is taken to be linear."""


@final
class ProfiledTimes:
    """StepTimes of a replica. `prior`: the model of its hardware. `fastest`: by what factor steps may
    be faster than that."""

    def __init__(self, prior: StepTimes, costs: MeasuredCosts, fastest: float = FURTHEST) -> None:
        self._prior, self._costs = prior, costs
        self._least = 1.0 / fastest
        self.source = f"{prior.source}, own steps"
        self._lines: dict[int, DecodeLine] = {}

    def prefill_s(self, tokens: int, pairs: float) -> float:
        return self._prior.prefill_s(tokens, pairs) * self.prefill_factor(tokens, pairs)

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        return self._prior.prefill_interval_s(tokens, pairs) * self.prefill_factor(tokens, pairs)

    def decode_line(self, requests: int) -> DecodeLine:
        line = self._lines.get(requests)
        if line is None:
            line = self._lines[requests] = self._decode_line(requests)
        return line

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        """As the model has it, slower or faster as prefill and decode are, each for its part."""
        alone_s = self._prior.prefill_s(tokens, pairs) + self._prior.decode_line(requests).step_s(context)
        own_s = self.prefill_s(tokens, pairs) + self.decode_line(requests).step_s(context)
        return self._prior.mixed_s(tokens, pairs, requests, context) * own_s / alone_s

    def prefill_factor(self, tokens: int, pairs: float) -> float:
        """How many times as long so many tokens take as the model has it."""
        if not tokens:
            return 1.0
        # Whole prompts of n tokens have n (n + 1) / 2 pairs each, which tells their mean length. A chunk has more:
        # it is of one request.
        known = min(tokens, KNOWN_TOKENS)
        length = min(float(known), max(1.0, 2.0 * pairs / tokens - 1.0))
        return self._factor(self._costs.told.prefill, self._costs.modelled.prefill, known / length, length)

    def decode_factor(self, requests: int, length: float) -> float:
        """The same of a decode step over so many requests, each of which holds `length` tokens."""
        known = min(requests, KNOWN_REQUESTS)
        return self._factor(self._costs.told.decode, self._costs.modelled.decode, known, length)

    def _decode_line(self, requests: int) -> DecodeLine:
        line = self._prior.decode_line(requests)
        if not requests:
            return line
        (low, near), (high, far) = (
            (requests * length, line.step_s(requests * length) * self.decode_factor(requests, length))
            for length in CONTEXTS
        )
        slope = max(0.0, (far - near) / (high - low))
        return DecodeLine(max(0.0, far - slope * high), slope)

    def _factor(self, told: PhaseCost | None, modelled: PhaseCost | None, requests: float, length: float) -> float:
        return max(_over(told, modelled, requests, length), self._least)


def scale_card(card: GpuSpec, costs: MeasuredCosts) -> GpuSpec:
    """A card whose compute and bandwidth fall short as an engine's prefills and decodes do: for a box
    that is to be a stage among others, of which its engine's constants say nothing."""
    prefill = _over(costs.told.prefill, costs.modelled.prefill, *STAGE_PREFILL)
    decode = _over(costs.told.decode, costs.modelled.decode, *STAGE_DECODE)
    return msgspec.structs.replace(card, tflops=card.tflops / prefill, memory_gbps=card.memory_gbps / decode)


def _over(told: PhaseCost | None, modelled: PhaseCost | None, requests: float, length: float) -> float:
    if told is None or modelled is None:
        return 1.0
    factor = told.seconds(requests, length) / modelled.seconds(requests, length)
    return min(max(factor, 1.0 / FURTHEST), FURTHEST)
