"""What a thread that looks for the next message does meanwhile, so that the message finds warm caches.

Code that a stage runs once in a step has left the processor's caches when it is needed again. Measured on a rented box
of two cores (docs/engines.md): decoding a small message takes 9 to 22 µs in a loop and 110 to 125 µs after a pause of
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
from typing import Final, final

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from ....kvtransport.wire.ciphers import Cipher
from ....kvtransport.wire.pipe import Pipe, PipeSettings
from .vocabulary import CODEC

__all__ = ["LayerWarmUp", "MessageWarmUp", "small_products"]

MESSAGE_EVERY_S: Final = 0.001  # after 1 ms nothing has left the caches yet, after 4 ms most of it
MAX_MESSAGE_BYTES: Final = 16 << 10  # a batch that computes for longer than this takes to copy can start cold
LAYER_EVERY_S: Final = 0.0005
MAX_WEIGHT_BYTES: Final = 2 << 20  # larger matrices do not stay in a core's caches, and delay a message


@final
class MessageWarmUp:
    """Sends the last message once more through codec, cipher and kernel, to itself, and drops it. One thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        settings = PipeSettings(beat_s=math.inf, lost_s=math.inf)  # nobody is at the other end
        key = secrets.token_bytes(32)  # for one direction, and nobody else
        self._out, self._in = (
            Pipe(end, Cipher(key, settings.bounds), Cipher(key, settings.bounds), settings)
            for end in socket.socketpair()
        )
        self._clock = clock
        self._message: Sequence[memoryview] = ()
        self._due = clock()

    def __repr__(self) -> str:
        return f"<MessageWarmUp of {len(self._message)} buffers>"

    def remember(self, message: Sequence[memoryview]) -> None:
        """The next message is expected to be like this one."""
        self._message = message if sum(map(len, message)) <= MAX_MESSAGE_BYTES else ()

    def run_if_due(self) -> None:
        """Repeat the message if the last time is `MESSAGE_EVERY_S` ago."""
        if self._message and self._clock() >= self._due:
            self._out.send(CODEC.encode(CODEC.decode(self._message)))
            CODEC.decode(self._in.receive())
            self._due = self._clock() + MESSAGE_EVERY_S

    def close(self) -> None:
        """Free the connection."""
        self._message = ()
        self._out.close()
        self._in.close()


@final
class LayerWarmUp:
    """Computes one of `products` after the other and drops the results. One thread."""

    def __init__(self, products: Sequence[Callable[[], object]], clock: Callable[[], float] = time.monotonic) -> None:
        self._products = products
        self._clock = clock
        self._next = 0
        self._due = clock()

    def __repr__(self) -> str:
        return f"<LayerWarmUp of {len(self._products)} products>"

    def run_if_due(self) -> None:
        """Compute the next product if the last one is `LAYER_EVERY_S` ago."""
        if self._products and self._clock() >= self._due:
            with torch.inference_mode():
                self._products[self._next]()
            self._next = (self._next + 1) % len(self._products)
            self._due = self._clock() + LAYER_EVERY_S


def small_products(model: torch.nn.Module) -> list[Callable[[], object]]:
    """One position through each linear layer of a model that needs neither another worker nor a batch for it, and has
    at most `MAX_WEIGHT_BYTES` of weights."""
    return [
        partial(module, torch.zeros(1, module.input_size, dtype=module.params_dtype))
        for module in model.modules()
        if isinstance(module, LinearBase)
        and module.tp_size == 1
        and isinstance(module.quant_method, UnquantizedLinearMethod)
        and module.input_size * module.output_size * module.params_dtype.itemsize <= MAX_WEIGHT_BYTES
    ]
