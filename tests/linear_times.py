"""Step times that one can add up by hand."""

from __future__ import annotations

from dataclasses import dataclass

from p2pserve.coordinator.costs.step_times import DecodeLine


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTimes:
    """StepTimes of constants, in seconds per step, prompt token, query-key pair, decoding request
    and context token; `interval_share`: prefill overlap."""

    step: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    request: float = 0.0
    context: float = 0.0
    interval_share: float = 1.0
    source: str = "linear"

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """See `StepTimes`."""
        return self.step + self.token * tokens + self.pair * pairs

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        """See `StepTimes`."""
        return self.prefill_s(tokens, pairs) * self.interval_share

    def decode_line(self, requests: int) -> DecodeLine:
        """See `StepTimes`."""
        return DecodeLine(self.step + self.request * requests, self.context)

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        """See `StepTimes`."""
        return self.prefill_s(tokens, pairs) + self.request * requests + self.context * context
