"""Host memory for outgoing KV: one buffer made at the start, given out in blocks until the receiver
confirms. Pinned on a GPU box, at 0.3 s a GiB under the driver's lock: never while serving."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch

ALIGNMENT: Final = 4096  # neighbours share no page, and few pieces are left over
SHARE: Final = 4  # a transfer that holds a quarter leaves the last quarter to the others
LOOK_AGAIN_S: Final = 0.1


@final
@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of the buffer: `memory` `[size]` bytes, from `offset` on."""

    offset: int
    reserved: int
    memory: torch.Tensor


@final
class HostBuffer:
    """First fit over a sorted list of free runs. Any thread may use it."""

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory` `[bytes]`, uint8."""
        self._memory = memory
        self.size = memory.numel()
        self._free: list[tuple[int, int]] = [(0, self.size)] if self.size else []  # (offset, length), sorted
        self._room = threading.Condition()

    def __repr__(self) -> str:
        return f"<HostBuffer {self.held} of {self.size} bytes in {len(self._free)} free runs>"

    @property
    def held(self) -> int:
        """Bytes that are given out."""
        with self._room:
            return self.size - sum(length for _, length in self._free)

    def take(
        self, size: int, held_by_caller: Callable[[], int], timeout: float, is_wanted: Callable[[], bool]
    ) -> Extent | None:
        """A piece of `size` bytes, once there is one, or None after `timeout` seconds or when it is no longer wanted
        (`is_wanted`). `held_by_caller`: bytes that the caller holds now, which may become less while it waits. Who
        holds much leaves room for who holds little: a receiver that has stopped taking must not hold up others."""
        reserved = -(-size // ALIGNMENT) * ALIGNMENT
        if reserved > self.size:
            raise ValueError(f"{size} bytes do not fit a transfer buffer of {self.size}; make it larger")
        until = time.monotonic() + timeout
        with self._room:
            while (extent := self._fit(reserved, size, held_by_caller())) is None:
                left = until - time.monotonic()
                if left <= 0 or not is_wanted():
                    return None
                self._room.wait(min(left, LOOK_AGAIN_S))
            return extent

    def give(self, extent: Extent) -> None:
        """Return a piece, once."""
        with self._room:
            at = bisect.bisect(self._free, (extent.offset, 0))
            first, last = extent.offset, extent.offset + extent.reserved
            if at < len(self._free) and self._free[at][0] == last:
                last += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == first:
                first = self._free.pop(at - 1)[0]
                at -= 1
            self._free.insert(at, (first, last - first))
            self._room.notify_all()

    def _fit(self, reserved: int, size: int, mine: int) -> Extent | None:
        left = sum(length for _, length in self._free) - reserved
        if mine and left < self.size // SHARE and mine + reserved > self.size // SHARE:
            return None
        for at, (offset, length) in enumerate(self._free):
            if length >= reserved:
                self._free[at : at + 1] = [(offset + reserved, length - reserved)] if length > reserved else []
                return Extent(offset, reserved, self._memory[offset : offset + size])
        return None
