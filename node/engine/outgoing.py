"""The sending end of a KV transfer: threads that encode and send beside the model.

The engine thread only copies KV out of its paged cache; one thread per transfer takes the copies from a queue, encodes
what the receiver wants of them and gives it to the link, whose own threads send. A transfer never holds up an engine:
when the process's send buffer is full, the one that would overflow it is given up (the other side then computes what
is missing).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch

from ...kernels.codec import Codec, encode, wire_dtype
from ...kernels.format import KEY_SPAN_TOKENS
from ...kvtransport.errors import TransferError, TransferTimeout
from ...kvtransport.frames import MAX_PAYLOAD_BYTES, KVFrame
from ...kvtransport.lanes import EndState
from ...kvtransport.report import TransferTimes
from ...kvtransport.send_link import Outgoing as SendingEnd
from ...kvtransport.send_link import SendLink
from ...kvtransport.sending import SendProgress
from .device import OnHost
from .layout import Shard
from .pacing import Pacing
from .protocol import Outlet, TransferReport
from .reports import Sent, sent_report

Report = Callable[[TransferReport], None]

PRESENT = "all of it is here already"  # what a receiver says, and no failure of the sender
CREDIT_WAIT_S = 0.25  # for the receiver to say what it has already; then all is encoded, so that it can leave at once


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """K and V `[tokens, heads, head_dim]` of all of a worker's heads in one layer, for positions from `start` on. On a
    GPU the copies may still be on their way to main memory."""

    layer: int
    start: int
    values: OnHost


@final
class Budget:
    """Bytes of copied KV that wait to be encoded, over all transfers of the process."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Budget {self._held}/{self._limit}>"

    def take(self, size: int) -> bool:
        """Reserve; False, and nothing reserved, when it is too much."""
        with self._lock:
            if self._held + size > self._limit:
                return False
            self._held += size
            return True

    def give(self, size: int) -> None:
        """Return what was taken."""
        with self._lock:
            self._held -= size


@final
class Outgoing:
    """What one worker sends to one other. Exactly one report is made, whatever happens."""

    def __init__(
        self, outlet: Outlet, link: SendLink, shard: Shard, budget: Budget, pacing: Pacing, report: Report
    ) -> None:
        self.ticket = outlet.ticket
        self.link = link
        self.pacing = pacing
        self._slice = outlet.slice
        self._shard = shard
        self._budget = budget
        self._report = report
        self._copies: queue.SimpleQueue[LayerCopy | int | str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        self._prefill_done_at: float | None = None
        self._sending = link.open(self.ticket, self._on_end)
        threading.Thread(target=self._run, name=f"kv-encode-{self.ticket.transfer.hex()[:8]}", daemon=True).start()

    @property
    def first(self) -> int:
        """Positions before this one are not wanted, as far as is known."""
        return self._sending.first

    def wants(self, layer: int) -> bool:
        """Whether this layer is among those that go to the other end."""
        return layer in self._slice.layers

    def push(self, copy: LayerCopy) -> None:
        """Queue a layer's copy. Called by the engine thread inside the forward pass: never blocks."""
        size = self._size(copy)
        if not self._budget.take(size):
            self.abort("the link cannot keep up and the send buffer is full")
            return
        with self._lock:
            if not self._over:
                self._copies.put(copy)
                return
        self._budget.give(size)  # it has ended, and nobody looks into the queue any more

    def prefill_done(self, tokens: int, computed_at: float) -> None:
        """All layers of all `tokens` positions have been pushed; they had been computed at that moment."""
        self._prefill_done_at = computed_at
        self._copies.put(tokens)

    def abort(self, reason: str) -> None:
        """Give the transfer up; the receiver is told if it can be."""
        self._sending.abort(reason)
        self._copies.put(reason)

    def progress(self) -> SendProgress:
        """How far it is."""
        return self._sending.progress()

    def _on_end(self, sending: SendingEnd, state: EndState) -> None:
        """By a thread of the link: a transfer that fails before its prefill has begun must not wait for it."""
        if state.name == "failed":
            self._copies.put(state.reason)

    def _run(self) -> None:
        raw = frames = wire = 0
        first_at: float | None = None
        reason = "a bug in the sending engine; its log has the details"  # unless one of the ends below is reached
        try:
            with contextlib.suppress(TransferTimeout):
                self._sending.wait_for_credit(CREDIT_WAIT_S)
            for copy in self._copies_until_end():
                if isinstance(copy, int):
                    self._sending.finish(copy)
                    break
                first_at = time.monotonic() if first_at is None else first_at
                try:
                    for frame, size in self._frames(copy, max(self.first, copy.start)):
                        self._sending.send(frame, timeout=self.ticket.deadline_s)
                        frames += 1
                        raw += size
                        wire += self.link.wire_bytes(memoryview(frame.payload).nbytes)
                finally:
                    self._budget.give(self._size(copy))
            state = self._sending.wait(self.ticket.deadline_s)
            reason = "" if state.name == "delivered" else state.reason or "not delivered before the deadline"
        except (TransferError, OSError, ValueError, RuntimeError) as error:  # the last: torch's
            reason = str(error) or type(error).__name__
        finally:
            if reason.endswith(PRESENT):  # what it is wrapped in depends on when it was heard
                reason = ""
            if reason:
                self._sending.abort(reason)  # no matter to one that has ended
            self._empty()
            self._finish(first_at, Sent(raw, wire, frames), reason)

    def _copies_until_end(self) -> Iterator[LayerCopy | int]:
        """What the engine thread pushes; the number of tokens comes last. Ends early when given up."""
        while not isinstance(item := self._copies.get(), str):
            yield item
            if isinstance(item, int):
                return

    def _empty(self) -> None:
        """Whatever the engine thread has still queued, or is about to, is not wanted."""
        with self._lock:
            self._over = True
        while not self._copies.empty():
            item = self._copies.get()
            if isinstance(item, LayerCopy):
                self._budget.give(self._size(item))

    def _size(self, copy: LayerCopy) -> int:
        """The bytes of a copy that are for this end; several ends may share it."""
        return copy.values.nbytes * len(self._slice.heads) // len(self._shard.heads)

    def _frames(self, copy: LayerCopy, start: int) -> Iterator[tuple[KVFrame, int]]:
        """This end's heads of a copy from position `start` on, encoded, each with its size before that."""
        mine = slice(self._slice.first_head - self._shard.heads.start, self._slice.last_head - self._shard.heads.start)
        k, v = (each[start - copy.start :, mine] for each in copy.values.wait())
        codec, dtype = Codec(self.ticket.codec), wire_dtype(k.dtype)
        for first in range(0, k.shape[0], step := _tokens_per_frame(k)):
            part = slice(first, first + step)
            keys, values = k[part].contiguous(), v[part].contiguous()
            begun = time.monotonic()
            payload = encode(codec, keys, values, start=start + first, layer=copy.layer)
            self.pacing.encoded(payload.nbytes, time.monotonic() - begun)
            frame = KVFrame(
                layer=copy.layer,
                head_first=self._slice.first_head,
                head_last=self._slice.last_head,
                start=start + first,
                tokens=keys.shape[0],
                codec=codec.wire,
                dtype=dtype.wire,
                head_dim=keys.shape[2],
                payload=payload,
            )
            yield frame, keys.nbytes + values.nbytes

    def _finish(self, first_at: float | None, sent: Sent, reason: str) -> None:
        now = time.monotonic()
        times = TransferTimes(
            first_frame_at=now if first_at is None else first_at,
            prefill_done_at=now if self._prefill_done_at is None else self._prefill_done_at,
            acknowledged_at=now,
        )
        mode = self.pacing.mode.mode.value
        self._report(sent_report(self.ticket, sent, times, self._sending.progress(), mode=mode, reason=reason))


def _tokens_per_frame(values: torch.Tensor) -> int:
    """How many of K's or V's tokens fit a frame, a multiple of the codecs' token group so that cutting changes no
    value."""
    per_token = 2 * values[0].numel() * values.element_size() if values.shape[0] else 1
    return max(1, MAX_PAYLOAD_BYTES // 2 // per_token // KEY_SPAN_TOKENS) * KEY_SPAN_TOKENS
