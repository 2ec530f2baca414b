"""How long one stage takes, from what it has to compute, to read, and to agree on with the other
cards of the stage.

Matrix products read their weights while they compute. Where one of the two takes much longer it
hides the other; where they are near each other neither roof is reached. `hypot(compute, read)` is
both: it leaves the roofs by up to 41 %. Attention, the KV cache and the all-reduces of tensor
parallelism come on top: the next product waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, log2
from typing import Final

from .efficiency import Efficiency
from .gpus import GpuSpec
from .model_shape import ModelShape
from .step_times import DecodeLine

TYPICAL_CONTEXT: Final = 1024
"""Tokens of context a request is taken to have wherever one straight line stands for a bent one."""

LINK_SHARE: Final = 0.55
"""Of the rate between two cards, what an all-reduce reaches; with `REQUEST_S` the constants that
all cards share."""

REQUEST_S: Final = 20e-6
"""What a decoding request costs the engine besides: its row in the tables, its sampling."""

REDUCES_PER_LAYER: Final = 2  # after the attention and after the feed-forward


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """A stage's coefficients, in seconds; its cards work in step, so they are those of one card.

    Of a step: `fixed_s`, and reading the weights that every token needs (`weights_s`) and, of a
    mixture, all experts (`experts_s`), of which each token is sent to `expert_share`. Of a token:
    matrix products (`token_s`) and bytes to all-reduce (`reduce_s`). Of a decoding request: its
    logits (`logits_s`) and `request_s`. Of a query-key pair of a prompt: `pair_s`; in
    `windowed_share` of the layers, where `window` is above 0, a token is paired with so many at
    most. Of a token in the KV cache: `context_s`.
    """

    fixed_s: float
    weights_s: float
    experts_s: float
    expert_share: float
    token_s: float
    reduce_s: float
    logits_s: float
    request_s: float
    pair_s: float
    context_s: float
    window: int
    windowed_share: float

    def step_s(self, tokens: float, pairs: float, requests: float, context: float) -> float:
        """Of a step over so many prompt tokens and decoding requests."""
        if self.window:
            pairs -= self.windowed_share * max(0.0, pairs - tokens * self.window)
        return self._rows_s(tokens + requests, requests) + self.context_s * context + self.pair_s * pairs

    def decode_line(self, requests: float) -> DecodeLine:
        """Of a step that only decodes."""
        return DecodeLine(self._rows_s(requests, requests), self.context_s)

    def _rows_s(self, rows: float, requests: float) -> float:
        """All but the attention: of so many tokens, some of them of decoding requests."""
        read_s = self.weights_s
        if self.experts_s:
            read_s += self.experts_s * (1.0 - (1.0 - self.expert_share) ** rows)
        products_s = hypot(self.token_s * rows + self.logits_s * requests, read_s)
        return self.fixed_s + products_s + self.reduce_s * rows + self.request_s * requests


def stage_cost(
    model: ModelShape, gpu: GpuSpec, efficiency: Efficiency, *, layers: int, tp: int, link_gbps: float, last: bool
) -> StageCost:
    """Of so many layers on `tp` cards, any two of which are joined at `link_gbps` Gb/s; the last
    stage has the logits.

    A step computes logits of few rows (each decoding request's, each prompt's last), so of prompts
    only reading their matrix counts. Decode has to be linear in the context: a window shorter than
    TYPICAL_CONTEXT counts as always full, a longer one as never.
    """
    flop_s = 1.0 / (gpu.tflops * 1e12 * efficiency.compute_share * tp)
    byte_s = 1.0 / (gpu.memory_gbps * 1e9 * efficiency.bandwidth_share * tp)
    head = model.head_parameters if last else 0
    experts = layers * model.experts * model.mlp_parameters if model.experts > 1 else 0
    weights = layers * model.layer_parameters - experts + head
    # KV heads are not split further: with more cards than heads, several cards read the same one.
    kv_copies = max(1.0, tp / model.kv_heads)
    reduces = REDUCES_PER_LAYER * layers if tp > 1 else 0
    context_s = layers * model.kv_bytes_per_token_layer * kv_copies * byte_s
    windowed_share = model.windowed_layers / model.layers
    full_windows_s = context_s * windowed_share if model.window < TYPICAL_CONTEXT else 0.0
    ring_bytes = 2.0 * (tp - 1) / tp * model.activation_bytes_per_token  # that each card sends, per token
    return StageCost(
        fixed_s=layers * efficiency.layer_s + reduces * efficiency.reduce_s * log2(tp),
        weights_s=weights * model.dtype_bytes * byte_s,
        experts_s=experts * model.dtype_bytes * byte_s,
        expert_share=model.active_experts / model.experts,
        token_s=2.0 * layers * model.active_layer_parameters * flop_s,
        reduce_s=reduces * ring_bytes * 8.0 / (link_gbps * 1e9 * LINK_SHARE),
        logits_s=2.0 * head * flop_s,
        request_s=(REQUEST_S if last else 0.0) + full_windows_s * model.window,
        pair_s=4.0 * layers * model.heads * model.head_dim * flop_s,
        context_s=context_s - full_windows_s,
        window=model.window if model.windowed_layers else 0,
        windowed_share=windowed_share,
    )
