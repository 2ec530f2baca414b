"""How long one stage takes, from what it has to compute, to read, and to agree on with the other cards of the stage.

A step's matrix products take as long as the slower of computing them and reading their weights; attention, the KV cache
and the all-reduces of tensor parallelism come on top, since nothing of the next product can start before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final

from .efficiency import Efficiency
from .gpus import GpuSpec
from .model_shape import ModelShape
from .step_times import DecodeLine

__all__ = ["TYPICAL_CONTEXT", "StageCost", "stage_cost"]

TYPICAL_CONTEXT: Final = 1024
"""Tokens of context a request is taken to have wherever one straight line stands for a bent one."""

GIGA: Final = 1e9
REDUCES_PER_LAYER: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """A stage's coefficients, each in seconds; its cards work in step, so they are those of one card.

    `fixed_s` of any step. `weights_s`: reading all weights that any token needs; `experts_s`: reading all experts.
    `token_s`: matrix products and all-reduced bytes of a token. `pair_s`: attention of a prompt's query-key pair;
    `context_s`: reading a cached token's KV. `request_s`: what a decoding request costs besides.
    """

    fixed_s: float
    weights_s: float
    experts_s: float
    expert_share: float
    token_s: float
    reduce_s: float
    head_s: float
    pair_s: float
    context_s: float
    request_s: float
    window: int
    windowed_share: float

    def step_s(self, tokens: float, pairs: float, requests: float, context: float) -> float:
        """One step over so many prompt tokens and decoding requests."""
        line = self.decode_line(requests, tokens)
        return line.fixed_s + line.context_s * context + self.pair_s * self._seen(tokens, pairs)

    def decode_line(self, requests: float, tokens: float = 0.0) -> DecodeLine:
        """Of a step that decodes so many requests, and computes so many prompt tokens besides (without their pairs)."""
        together = requests + tokens
        products = max(self._read_s(together), self.token_s * together + self.head_s * requests)
        fixed = self.fixed_s + products + self.reduce_s * together + self.request_s * requests
        if self.window and self.window < TYPICAL_CONTEXT:
            fixed += self.context_s * self.windowed_share * self.window * requests
            return DecodeLine(fixed, self.context_s * (1.0 - self.windowed_share))
        return DecodeLine(fixed, self.context_s)

    def _read_s(self, tokens: float) -> float:
        """Reading the weights that this many tokens need: of a mixture, the experts that they are sent to."""
        if not self.experts_s:
            return self.weights_s
        return self.weights_s + self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)

    def _seen(self, tokens: float, pairs: float) -> float:
        """Pairs that are computed, on average over the layers."""
        if not self.window:
            return pairs
        return pairs - self.windowed_share * max(0.0, pairs - tokens * self.window)


def stage_cost(
    model: ModelShape, gpu: GpuSpec, efficiency: Efficiency, *, layers: int, tp: int, link_gbps: float, last: bool
) -> StageCost:
    """Of so many layers on `tp` cards that are joined at `link_gbps` Gb/s; the last stage computes the logits."""
    flop_s = 1.0 / (gpu.tflops * 1e12 * efficiency.compute_share * tp)
    byte_s = 1.0 / (gpu.memory_gbps * GIGA * efficiency.bandwidth_share * tp)
    head = model.head_parameters if last else 0
    dense = layers * (model.attention_parameters + (model.mlp_parameters if model.experts == 1 else 0)) + head
    experts = layers * model.experts * model.mlp_parameters if model.experts > 1 else 0
    reduces = REDUCES_PER_LAYER * layers if tp > 1 else 0
    reduced_bytes = 2.0 * (tp - 1) / tp * model.activation_bytes_per_token  # a ring's share of each card
    return StageCost(
        fixed_s=layers * efficiency.layer_s + reduces * efficiency.reduce_s * log2(tp),
        weights_s=dense * model.dtype_bytes * byte_s,
        experts_s=experts * model.dtype_bytes * byte_s,
        expert_share=model.active_experts / model.experts,
        token_s=2.0 * layers * model.active_layer_parameters * flop_s,
        reduce_s=reduces * reduced_bytes * 8.0 / (link_gbps * GIGA),
        head_s=2.0 * head * flop_s,
        pair_s=4.0 * layers * model.heads * model.head_dim * flop_s,
        context_s=layers * model.kv_bytes_per_token_layer * byte_s,
        request_s=efficiency.request_s,
        window=model.window if model.windowed_layers else 0,
        windowed_share=model.windowed_layers / model.layers,
    )
