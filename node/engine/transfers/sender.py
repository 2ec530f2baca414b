"""What every sending end of a KV transfer does, whatever it sends: one thread, one report."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ....kvtransport.errors import TransferError
from ....kvtransport.link.send_link import OutgoingTransfer, SendLink
from ....kvtransport.link.sending import SendProgress
from ....kvtransport.link.transfers import EndState
from ....kvtransport.routing.report import TransferTimes
from ....kvtransport.wire.frames import KVFrame
from ..protocol import Outlet, TransferReport
from .layer_meter import LayerMeter

SendReport = Callable[[TransferReport], None]

PRESENT = "all of it is here already"  # what a receiver says, and no failure of the sender


class FrameToSend(NamedTuple):
    """A frame, the bytes of its KV as they lie in the cache, and what to call once its payload may change."""

    frame: KVFrame
    raw_bytes: int
    release: Callable[[], None] | None = None


class TransferSender(ABC):
    """Sends the KV of a prompt to one worker of another engine. Exactly one report is made, whatever happens.

    A subclass calls `_begin` once it is complete; from then on its `_frames` run on a thread.
    """

    def __init__(self, outlet: Outlet, link: SendLink, report: SendReport) -> None:
        self.outlet = outlet
        self.ticket = outlet.ticket
        self.link = link
        self.is_granted = False  # the receiver has a place for the KV
        self.withdrawals = 0  # how often the prompt has lost its blocks
        self._report = report
        self._waits_since: float | None = None  # for the receiver to have a place
        self._waited_s = 0.0
        self._first_at: float | None = None  # when the first frame could leave
        self._layer_meter = LayerMeter(outlet.slice.layers)
        self._codec_s = 0.0
        self._prefill_done_at: float | None = None

    def _begin(self) -> None:
        self._end = self.link.open(self.ticket, self._on_end)
        threading.Thread(target=self._run, name=f"kv-send-{self.ticket.transfer.hex()[:8]}", daemon=True).start()

    @property
    @abstractmethod
    def mode(self) -> str:
        """`layerwise` or `serialised`, for the report."""

    @abstractmethod
    def _frames(self) -> Iterator[FrameToSend]:
        """All frames, each when it may be sent; `_end.finish` before the last `next`. Raises TransferError."""

    @abstractmethod
    def _stop(self, reason: str) -> None:
        """By any thread: the transfer has failed, so `_frames` is to end soon."""

    def abort(self, reason: str) -> None:
        """Give the transfer up; the receiver is told if it can be."""
        self._end.abort(reason)
        self._stop(reason)

    def progress(self) -> SendProgress:
        """How far it is, with the wait for credit, which the link does not see."""
        progress, since = self._end.progress(), self._waits_since
        waits_s = 0.0 if since is None else time.monotonic() - since
        return replace(progress, blocked_s=progress.blocked_s + self._waited_s + waits_s)

    def _on_end(self, end: OutgoingTransfer, state: EndState) -> None:
        """By a thread of the link: a transfer that fails before its prefill has begun must not wait for it."""
        if state.name == "failed":
            self._stop(state.reason)

    def _wait_for_credit(self) -> int:
        """The first position that the receiver wants. Raises TransferError."""
        self._waits_since = begun = time.monotonic()
        try:
            return self._end.wait_for_credit(self.ticket.deadline_s)
        finally:
            self.is_granted = True
            self._waits_since, self._waited_s = None, self._waited_s + time.monotonic() - begun

    def _run(self) -> None:
        frames = raw_bytes = wire_bytes = 0
        deadline_s = self.ticket.deadline_s
        reason = "a bug in the sending engine; its log has the details"  # unless one of the ends below is reached
        try:
            for frame, size, release in self._frames():
                now, on_wire = time.monotonic(), self.link.wire_bytes(memoryview(frame.payload).nbytes)
                self._first_at = self._first_at or now
                self._layer_meter.on_sent(frame.layer, on_wire, now)
                acknowledged = partial(self._on_acknowledged, frame.layer, release)
                self._end.send(frame, release=acknowledged, timeout=deadline_s)
                frames, raw_bytes, wire_bytes = frames + 1, raw_bytes + size, wire_bytes + on_wire
            state = self._end.wait(deadline_s)
            reason = "" if state.name == "delivered" else state.reason or "not delivered before the deadline"
        except (TransferError, OSError, ValueError, RuntimeError) as error:  # the last: torch's
            reason = str(error) or type(error).__name__
        finally:
            if reason.endswith(PRESENT):  # what it is wrapped in depends on when it was heard
                reason = ""
            if reason:
                self._end.abort(reason)  # no matter to one that has ended
            now, progress = time.monotonic(), self.progress()
            times = TransferTimes(self._first_at or now, self._prefill_done_at or now, now)
            self._report(
                TransferReport(
                    transfer=self.ticket.transfer,
                    link=self.ticket.link,
                    mode=self.mode,
                    delivered=not reason,
                    reason=reason,
                    frames=frames,
                    raw_bytes=raw_bytes,
                    wire_bytes=wire_bytes + progress.bytes_resent,
                    span_s=times.span,
                    visible_s=times.visible,
                    hidden_fraction=times.hidden_fraction,
                    paths=progress.bytes_by_path,
                    resent_bytes=progress.bytes_resent,
                    blocked_s=progress.blocked_s,
                    codec_s=self._codec_s,
                    layers=self._layer_meter.times(),
                )
            )

    def _on_acknowledged(self, layer: int, release: Callable[[], None] | None) -> None:
        """By a thread of the link, when the receiver has a frame of this layer, or nobody wants it any more."""
        self._layer_meter.on_acknowledged(layer, time.monotonic())
        if release is not None:
            release()
