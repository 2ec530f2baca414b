"""How long the KV cache of a prompt is on its way from the prefill replica to the one that
goes on with it.

The model is alpha-beta: half a round trip until the first byte is there, then the bytes at the rate
of the link. The round trip is paid once, since layers follow each other without waiting for an
answer. ThunderServe's equation 1 is the same with b * s tokens of 2 * h elements; as printed it
lacks the number of layers, which counts here.

All functions take numbers, or arrays that fit each other, and return the like.
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...costs.model_shape import ModelShape

Numbers = TypeVar("Numbers", float, NDArray[np.float64])

RAW_BITS: Final = 16.0


def kv_gigabits(model: ModelShape, tokens: Numbers, kv_bits: float) -> Numbers:
    """Gb on the wire for a prompt of so many tokens, at `kv_bits` per element with all overhead,
    however many an engine keeps of it.

    Grouped-query attention is in the model's KV values; layers with a window keep no more tokens
    than it spans.
    """
    layer_tokens = (model.layers - model.windowed_layers) * tokens
    if model.windowed_layers:
        layer_tokens += model.windowed_layers * np.minimum(tokens, float(model.window))
    return layer_tokens * (model.raw_kv_bytes_per_token_layer * kv_bits / RAW_BITS * 8e-9)


def visible_s(wire_s: Numbers, alpha_s: Numbers, prefill_s: Numbers, layers: int) -> Numbers:
    """Seconds of a transfer of `wire_s` on the link that are left after the prefill, layers leaving as
    they are done.

    A layer is done every prefill_s / layers and takes wire_s / layers. Where the link is the faster
    one, only the last layer is left in the end; where it is the slower one, it has been busy since
    the first layer was done.
    """
    behind: Numbers = np.maximum(wire_s - prefill_s, 0.0)
    return alpha_s + wire_s / layers + behind * ((layers - 1) / layers)
