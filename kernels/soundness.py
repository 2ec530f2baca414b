"""What a codec found of a block: known at once on a CPU, on a GPU when its stream gets there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch


class Moment(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has got there."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """Whether a block's values or payload are sound; the device is waited for only when asked. What
    the codec read must stay until then, so that the error can name the position."""

    _unsound: bool | torch.Tensor
    """A tensor: in memory of the host, filled by `_moment`; not 0 where something is unsound."""
    _moment: Moment | None
    _explain: Callable[[], NoReturn]

    @classmethod
    def of(cls, unsound: bool | torch.Tensor, explain: Callable[[], NoReturn]) -> Soundness:
        """From a codec's `unsound` (a tensor: one number on its device); `explain` raises the
        error."""
        if isinstance(unsound, bool):
            return cls(unsound, None, explain)
        # To pinned memory, as torch allocates it for copies that do not wait.
        on_host = unsound.to("cpu", non_blocking=True)
        return cls(on_host, record_moment(unsound.device), explain)

    def raise_if_unsound(self) -> None:
        """Wait for the stream, then raise what the codec found, if anything."""
        if self._moment is not None:
            self._moment.synchronize()
        if bool(self._unsound):
            self._explain()


def _explain_nothing() -> NoReturn:
    raise AssertionError("a block of which nothing is checked was found to be unsound")


SOUND = Soundness(False, None, _explain_nothing)
"""Of what needs no check."""


def record_moment(device: torch.device) -> Moment:
    """This point of the device's current stream. Who waits for it sleeps, rather than spins."""
    moment = torch.cuda.Event(blocking=True)
    moment.record(torch.cuda.current_stream(device))
    return moment


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
