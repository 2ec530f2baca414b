"""KV transfers of one engine process: threads that encode, send, receive and decode beside the model.

The engine thread only copies KV out of, or into, its paged cache; everything that can wait happens here.
Sending: one thread per transfer takes copied layers from a queue, encodes them and gives them to the link, whose
own threads send. Receiving: one thread per transfer decodes frames into an inbox that the engine thread drains
between two steps; the sender is granted credit once the engine has blocks.

A transfer never holds up an engine. When the process's send buffer is full, the transfer that would overflow it is
given up (the other side then computes what is missing); a receiver whose inbox is full grants no more credit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...kernels.codec import Codec, codec_from_wire, decode, dtype_from_wire, encode, torch_dtype, wire_dtype
from ...kernels.format import KEY_SPAN_TOKENS
from ...kvtransport.assembly import Assembly
from ...kvtransport.errors import TransferError
from ...kvtransport.frames import MAX_PAYLOAD_BYTES, KVFrame
from ...kvtransport.lanes import EndState
from ...kvtransport.receive_link import ReceiveLink
from ...kvtransport.receiving import MIN_WINDOW_BYTES
from ...kvtransport.report import TransferTimes
from ...kvtransport.send_link import Outgoing as SendingEnd
from ...kvtransport.send_link import SendLink
from ...kvtransport.sending import SendProgress
from ...kvtransport.tickets import TransferTicket
from .pacing import Pacing
from .protocol import TransferReport

Report = Callable[[TransferReport], None]


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """Canonical K and V `[tokens, heads, head_dim]` of one layer for positions from `start` on.

    On a GPU the copies may still be in flight; `copied` is then the event after them.
    """

    layer: int
    start: int
    k: torch.Tensor
    v: torch.Tensor
    copied: torch.cuda.Event | None = None

    def on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in main memory; waits for the device where there is one."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.k.cpu(), self.v.cpu()

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.k.nbytes + self.v.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What both ends must agree on to exchange KV."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype


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


class Outgoing:
    """The sending end of a transfer. Exactly one report is made, whatever happens."""

    def __init__(self, ticket: TransferTicket, link: SendLink, budget: Budget, pacing: Pacing, report: Report) -> None:
        self.ticket = ticket
        self.link = link
        self._budget = budget
        self.pacing = pacing
        self._report = report
        self._pieces: queue.SimpleQueue[LayerPiece | int | str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        self._prefill_done_at: float | None = None
        self._sending = link.open(ticket, self._on_end)
        threading.Thread(target=self._run, name=f"kv-encode-{ticket.transfer.hex()[:8]}", daemon=True).start()

    def push(self, piece: LayerPiece) -> None:
        """Queue a layer's copy. Called by the engine thread inside the forward pass: never blocks."""
        if not self._budget.take(piece.nbytes):
            self.abort("the link cannot keep up and the send buffer is full")
            return
        with self._lock:
            if not self._over:
                self._pieces.put(piece)
                return
        self._budget.give(piece.nbytes)  # it has ended, and nobody looks into the queue any more

    def prefill_done(self, tokens: int) -> None:
        """All layers of all `tokens` positions have been pushed."""
        self._prefill_done_at = time.monotonic()
        self._pieces.put(tokens)

    def abort(self, reason: str) -> None:
        """Give the transfer up; the receiver is told if it can be."""
        self._sending.abort(reason)
        self._pieces.put(reason)

    def progress(self) -> SendProgress:
        """How far it is."""
        return self._sending.progress()

    def _on_end(self, sending: SendingEnd, state: EndState) -> None:
        """By a thread of the link: a transfer that fails before its prefill has begun must not wait for it."""
        if state.name == "failed":
            self._pieces.put(state.reason)

    def _run(self) -> None:
        raw = frames = wire = 0
        first_at: float | None = None
        reason = "a bug in the sending engine; its log has the details"  # unless one of the ends below is reached
        try:
            for piece in self._pieces_until_end():
                if isinstance(piece, int):
                    self._sending.finish(piece)
                    break
                first_at = time.monotonic() if first_at is None else first_at
                try:
                    for frame in self._frames(piece):
                        self._sending.send(frame, timeout=self.ticket.deadline_s)
                        frames += 1
                        wire += self.link.wire_bytes(memoryview(frame.payload).nbytes)
                finally:
                    self._budget.give(piece.nbytes)
                raw += piece.nbytes
            state = self._sending.wait(self.ticket.deadline_s)
            reason = "" if state.name == "delivered" else state.reason or "not delivered before the deadline"
        except (TransferError, OSError, ValueError, RuntimeError) as error:  # the last: torch's
            reason = str(error) or type(error).__name__
        finally:
            if reason:
                self._sending.abort(reason)  # no matter to one that has ended
            self._empty()
            self._finish(first_at, (raw, wire, frames), reason)

    def _pieces_until_end(self) -> Iterator[LayerPiece | int]:
        """What the engine thread pushes; the number of tokens comes last. Ends early when given up."""
        while not isinstance(item := self._pieces.get(), str):
            yield item
            if isinstance(item, int):
                return

    def _empty(self) -> None:
        """Whatever the engine thread has still queued, or is about to, is not wanted."""
        with self._lock:
            self._over = True
        while not self._pieces.empty():
            item = self._pieces.get()
            if isinstance(item, LayerPiece):
                self._budget.give(item.nbytes)

    def _frames(self, piece: LayerPiece) -> Iterator[KVFrame]:
        k, v = piece.on_host()
        tokens, heads, head_dim = k.shape
        codec, dtype = Codec(self.ticket.codec), wire_dtype(k.dtype)
        for first in range(0, tokens, step := _tokens_per_frame(piece)):
            last = min(first + step, tokens)
            start = piece.start + first
            begun = time.monotonic()
            payload = encode(codec, k[first:last], v[first:last], start=start, layer=piece.layer)
            self.pacing.encoded(payload.nbytes, time.monotonic() - begun)
            yield KVFrame(
                layer=piece.layer,
                head_first=0,
                head_last=heads,
                start=start,
                tokens=last - first,
                codec=codec.wire,
                dtype=dtype.wire,
                head_dim=head_dim,
                payload=payload,
            )

    def _finish(self, first_at: float | None, amounts: tuple[int, int, int], reason: str) -> None:
        raw, wire, frames = amounts
        now = time.monotonic()
        progress = self._sending.progress()
        times = TransferTimes(
            first_frame_at=now if first_at is None else first_at,
            prefill_done_at=now if self._prefill_done_at is None else self._prefill_done_at,
            acknowledged_at=now,
        )
        self._report(
            TransferReport(
                transfer=self.ticket.transfer,
                delivered=not reason,
                reason=reason,
                frames=frames,
                raw_bytes=raw,
                wire_bytes=wire + progress.bytes_resent,
                span_s=times.span,
                visible_s=times.visible,
                hidden_fraction=times.hidden_fraction,
                link=self.ticket.link,
                mode=self.pacing.mode.mode.value,
                paths=progress.bytes_by_path,
                resent_bytes=progress.bytes_resent,
                blocked_s=progress.blocked_s,
            )
        )


class Incoming:
    """The receiving end: an inbox of decoded layers, and what has arrived so far."""

    def __init__(
        self, ticket: TransferTicket, link: ReceiveLink, tokens: int, geometry: Geometry, limit_bytes: int
    ) -> None:
        self.ticket = ticket
        self.tokens = tokens
        self._geometry = geometry
        self._limit = limit_bytes
        self._expires_at = time.monotonic() + ticket.deadline_s
        self._assembly = Assembly(layers=range(geometry.layers), heads=geometry.heads, tokens=tokens)
        self._room = threading.Condition()
        self._inbox: list[LayerPiece] = []
        self._held = 0
        self._failure: str | None = None
        self._started = False
        self._complete = False
        self._applied = False
        self._receiving = link.expect(ticket)

    def start(self) -> None:
        """The engine has blocks: the sender may send. Again is no matter."""
        with self._room:
            if self._started or self._failure is not None:
                return
            self._started = True
        name = f"kv-decode-{self.ticket.transfer.hex()[:8]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        self._receiving.grant(max(self._limit, MIN_WINDOW_BYTES))

    def take(self) -> list[LayerPiece]:
        """Return what has been decoded since the last call (engine thread)."""
        with self._room:
            pieces, self._inbox, self._held = self._inbox, [], 0
            self._room.notify_all()
        return pieces

    def outcome(self, now: float) -> str | None:
        """None while KV may still come, "" when all of it has arrived, else why it will not."""
        with self._room:
            if self._failure is None and not self._complete and now > self._expires_at:
                self._failure = "no KV arrived before the transfer's deadline"
            if self._failure is not None:
                return self._failure
            return "" if self._complete else None

    def arrived_tokens(self) -> int:
        """Length of the prefix that every layer and head has."""
        with self._room:
            return int(self._assembly.complete_tokens())

    def applied(self) -> None:
        """The engine has written everything into its cache: the sender may be told."""
        with self._room:
            self._applied = True
            self._room.notify_all()

    def abort(self, reason: str) -> None:
        """No more is wanted, or no more will come."""
        with self._room:
            if self._failure is None:
                self._failure = reason
            # What has been decoded stays in the inbox: `arrived_tokens` counts it, so it must still be taken.
            self._room.notify_all()
        if not self._applied:
            self._receiving.abort(reason)

    def _run(self) -> None:
        try:
            for frame in self._receiving:
                self._deliver(frame)
            with self._room:
                if not self._assembly.done:
                    raise ValueError(f"the transfer ended after {self._assembly.complete_tokens()} complete positions")
                self._complete = True
                self._room.wait_for(lambda: self._applied or self._failure, self._remaining())
                applied, failure = self._applied, self._failure
            if applied:
                self._receiving.acknowledge()
            else:
                self._receiving.abort(failure or "the engine did not take the KV before the deadline")
        except (TransferError, OSError, ValueError) as error:
            self._receiving.abort(str(error))
            with self._room:
                if self._failure is None and not self._applied:
                    self._failure = str(error) or type(error).__name__

    def _remaining(self) -> float:
        return max(0.0, self._expires_at - time.monotonic())

    def _deliver(self, frame: KVFrame) -> None:
        geometry = self._geometry
        if frame.head_dim != geometry.head_dim:
            raise ValueError(f"KV of head_dim {frame.head_dim} for a model of head_dim {geometry.head_dim}")
        if (frame.head_first, frame.head_last) != (0, geometry.heads):
            raise ValueError(f"KV of heads {frame.head_first}..{frame.head_last}, not all {geometry.heads}")
        k, v = decode(
            codec_from_wire(frame.codec),
            frame.payload,
            tokens=frame.tokens,
            heads=geometry.heads,
            head_dim=frame.head_dim,
            dtype=torch_dtype(dtype_from_wire(frame.dtype)),
            start=frame.start,
            layer=frame.layer,
        )
        piece = LayerPiece(frame.layer, frame.start, k, v)
        with self._room:
            # One piece is always let in: a bound smaller than a piece must not stop everything.
            if not self._room.wait_for(
                lambda: self._failure is not None or not self._held or self._held + piece.nbytes <= self._limit,
                self._remaining(),
            ):
                raise ValueError("the engine did not take the KV before the deadline")
            if self._failure is not None:
                raise ValueError(self._failure)
            self._assembly.add(frame)
            self._inbox.append(piece)
            self._held += piece.nbytes


def _tokens_per_frame(piece: LayerPiece) -> int:
    """How many tokens fit a frame, a multiple of the codec's token group so that cutting changes no value."""
    per_token = piece.nbytes // piece.k.shape[0]
    return max(1, MAX_PAYLOAD_BYTES // 2 // per_token // KEY_SPAN_TOKENS) * KEY_SPAN_TOKENS
