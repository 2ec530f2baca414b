"""What a codec found of a block: known at once on a CPU, and on a GPU when its stream has got
there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

__all__ = ["SOUND", "Moment", "Soundness", "on_device", "record_moment"]


class Moment(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has got there."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """Whether the values or the payload of a block are sound. Until that is asked, nothing waits
    for the device.

    What the codec read must stay as it is until then, or else the error cannot say where the
    unsound value was."""

    _unsound: bool | torch.Tensor
    """A tensor: in memory of the host, filled by `_moment`; not 0 where something is unsound."""
    _moment: Moment | None
    _explain: Callable[[], NoReturn]

    @classmethod
    def of(cls, unsound: bool | torch.Tensor, explain: Callable[[], NoReturn]) -> Soundness:
        """`unsound` as a codec gives it: a tensor is one number on the codec's device. `explain`
        raises the error."""
        if isinstance(unsound, bool):
            return cls(unsound, None, explain)
        # To pinned memory, as torch allocates it for copies that do not wait.
        on_host = unsound.to("cpu", non_blocking=True)
        return cls(on_host, record_moment(unsound.device), explain)

    def raise_if_unsound(self) -> None:
        """Raise what the codec has to say of the block, if anything. Waits for its stream to get
        there."""
        if self._moment is not None:
            self._moment.synchronize()
        if bool(self._unsound):
            self._explain()


def _explain_nothing() -> NoReturn:
    raise AssertionError("a block of which nothing is checked was found to be unsound")


SOUND = Soundness(False, None, _explain_nothing)
"""Of what needs no check."""


def record_moment(device: torch.device) -> Moment:
    """This point of the stream that is current on the device. Who waits for it sleeps, rather than
    spins."""
    moment = torch.cuda.Event(blocking=True)
    moment.record(torch.cuda.current_stream(device))
    return moment


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
