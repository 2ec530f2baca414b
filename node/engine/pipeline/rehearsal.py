"""Keeping the way of a message warm for a thread that looks for the next one.

What a stage runs once in a step has left the processor's caches when it is wanted again, most likely to others on the
host: it does so in a process that is alone on its box, too (docs/engines.md). Measured on a rented box of two cores,
decoding a small message takes 9 to 22 µs in a loop and 110 to 125 after a pause of 5 ms, opening it 8 and 80. A thread
that looks has time to spare, and spends a sixth of `EVERY_S` here.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import final

from ....kvtransport.wire.ciphers import Cipher
from ....kvtransport.wire.pipe import Pipe, PipeSettings
from .vocabulary import CODEC

__all__ = ["Rehearsal"]

EVERY_S = 0.001  # after that nothing is lost yet, after 4 ms most of what will be
MOST_BYTES = 16 << 10  # of a message: what computes for longer than this takes to copy does not mind a cold start


@final
class Rehearsal:
    """Takes the last message once more through codec, cipher and kernel, to itself, and drops it."""

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
        return f"<Rehearsal of {len(self._message)} buffers>"

    def remember(self, message: Sequence[memoryview]) -> None:
        """The next is expected to be like this one."""
        self._message = message if sum(map(len, message)) <= MOST_BYTES else ()

    def perhaps(self) -> None:
        """Rehearse, if it is time to."""
        if self._message and self._clock() >= self._due:
            self._out.send(CODEC.encode(CODEC.decode(self._message)))
            CODEC.decode(self._in.receive())
            self._due = self._clock() + EVERY_S

    def close(self) -> None:
        """Free the connection."""
        self._message = ()
        self._out.close()
        self._in.close()
