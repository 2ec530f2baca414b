"""What a thread that looks for the next message does meanwhile, so that the message finds warm caches.

Code that a stage runs once in a step has left the processor's caches when it is needed again. Measured on a rented box
of two cores (docs/pipelines.md): decoding a small message takes 9 to 22 µs in a loop and 110 to 125 µs after a pause of
5 ms, opening it 8 and 80 µs; a layer that comes after a pause of some milliseconds takes longer too. The waiting thread
has time to spare: `MessageWarmUp` uses a sixth of its interval, one product of `LayerWarmUp` 15 to 70 µs.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from ....kvtransport.wire.ciphers import Cipher
from ....kvtransport.wire.pipe import Pipe, PipeSettings
from ..settings import PipelineSettings
from .vocabulary import CODEC


@final
class MessageWarmUp:
    """Sends the last message once more through codec, cipher and kernel, to itself, and drops it. One thread."""

    def __init__(self, settings: PipelineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        nobody = PipeSettings(beat_s=math.inf, lost_s=math.inf)  # nobody is at the other end
        key = secrets.token_bytes(32)  # for one direction, and nobody else
        self._out, self._in = (
            Pipe(end, Cipher(key, nobody.bounds), Cipher(key, nobody.bounds), nobody) for end in socket.socketpair()
        )
        self._clock = clock
        self._message: Sequence[memoryview] = ()
        self._due = clock()

    def __repr__(self) -> str:
        return f"<MessageWarmUp of {len(self._message)} buffers>"

    def remember(self, message: Sequence[memoryview]) -> None:
        """The next message is expected to be like this one."""
        self._message = message if sum(map(len, message)) <= self._settings.max_message_bytes else ()

    def run_if_due(self) -> None:
        """Repeat the message if the last time is `message_warm_up_s` ago."""
        if self._message and self._clock() >= self._due:
            self._out.send(CODEC.encode(CODEC.decode(self._message)))
            CODEC.decode(self._in.receive())
            self._due = self._clock() + self._settings.message_warm_up_s

    def close(self) -> None:
        """Free the connection."""
        self._message = ()
        self._out.close()
        self._in.close()


@final
class LayerWarmUp:
    """Computes one of `products` after the other and drops the results. One thread."""

    def __init__(
        self,
        products: Sequence[Callable[[], object]],
        settings: PipelineSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._products = products
        self._every_s = settings.layer_warm_up_s
        self._clock = clock
        self._next = 0
        self._due = clock()

    def __repr__(self) -> str:
        return f"<LayerWarmUp of {len(self._products)} products>"

    def run_if_due(self) -> None:
        """Compute the next product if the last one is `layer_warm_up_s` ago."""
        if self._products and self._clock() >= self._due:
            with torch.inference_mode():
                self._products[self._next]()
            self._next = (self._next + 1) % len(self._products)
            self._due = self._clock() + self._every_s


def small_products(model: torch.nn.Module, max_bytes: int) -> list[Callable[[], object]]:
    """One position through each linear layer of at most `max_bytes` that works alone."""
    return [
        partial(module, torch.zeros(1, module.input_size, dtype=module.params_dtype))
        for module in model.modules()
        if isinstance(module, LinearBase)
        and module.tp_size == 1
        and isinstance(module.quant_method, UnquantizedLinearMethod)
        and module.input_size * module.output_size * module.params_dtype.itemsize <= max_bytes
    ]
