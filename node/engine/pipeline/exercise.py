"""Keeping the code of a stage's layers warm while it waits for the next batch.

A layer that comes after a pause of some milliseconds takes longer, whatever else this thread did meanwhile: most likely
its code, and what the processor had learned of its branches, have made room for others (docs/engines.md). A thread that
looks for a message has time to spare; one product with a matrix of the stage takes some 15 to 70 µs of `EVERY_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

__all__ = ["Exercise", "small_products"]

EVERY_S = 0.0005
MOST_BYTES = 2 << 20  # of a matrix: larger ones leave a core's caches by themselves, and keep a message waiting


@final
class Exercise:
    """Computes one of `parts` after the other, for nothing. One thread may use it."""

    def __init__(self, parts: Sequence[Callable[[], object]], clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._next = 0
        self._due = clock()

    def __repr__(self) -> str:
        return f"<Exercise of {len(self._parts)} parts>"

    def perhaps(self) -> None:
        """Compute, if it is time to."""
        if self._parts and self._clock() >= self._due:
            with torch.inference_mode():
                self._parts[self._next]()
            self._next = (self._next + 1) % len(self._parts)
            self._due = self._clock() + EVERY_S


def small_products(model: torch.nn.Module) -> list[Callable[[], object]]:
    """What a model's linear layers compute of one position: those of them that need nobody else for it, neither another
    worker nor a batch around them, and have at most `MOST_BYTES` of weights."""
    return [
        partial(module, torch.zeros(1, module.input_size, dtype=module.params_dtype))
        for module in model.modules()
        if isinstance(module, LinearBase)
        and module.tp_size == 1
        and isinstance(module.quant_method, UnquantizedLinearMethod)
        and module.input_size * module.output_size * module.params_dtype.itemsize <= MOST_BYTES
    ]
