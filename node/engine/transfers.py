"""KV transfers of one engine process: threads that encode, send, receive and decode beside the model.

The engine thread only copies KV out of, or into, its paged cache; everything that can wait happens here.
Sending: one thread per transfer takes copied layers from a queue, encodes and sends them. Receiving: one
thread per transfer decodes frames into an inbox that the engine thread drains between two steps.

A transfer never holds up an engine. A sender that cannot keep up within its memory bound gives the transfer
up (the other side then computes what is missing); a receiver whose inbox is full stops reading its
socket, and TCP holds the sender back.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...kernels.codec import Codec, codec_from_wire, decode, dtype_from_wire, encode, torch_dtype, wire_dtype
from ...kernels.format import KEY_GROUP_TOKENS
from ...kvtransport.assembly import Assembly
from ...kvtransport.errors import TransferError
from ...kvtransport.messages import MAX_PAYLOAD_BYTES, KVFrame
from ...kvtransport.report import TransferTimes
from ...kvtransport.stream import ReceiveStream, SendStream
from ...kvtransport.tickets import Ticket
from .protocol import TransferReport

Report = Callable[[TransferReport], None]

MAX_EARLY = 64  # connections that may wait for the engine thread to hear of their request
MAX_REMEMBERED = 1024  # transfers that are over, whose connections may still come


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


class Outgoing:
    """The sending end of a transfer. Exactly one report is made, whatever happens."""

    def __init__(self, ticket: Ticket, limit_bytes: int, report: Report) -> None:
        self._ticket = ticket
        self._limit = limit_bytes
        self._report = report
        self._pieces: queue.SimpleQueue[LayerPiece | int | str] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self._prefill_done_at: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"kv-send-{ticket.transfer.hex()[:8]}", daemon=True).start()

    def push(self, piece: LayerPiece) -> None:
        """Queue a layer's copy. Called by the engine thread inside the forward pass: never blocks."""
        with self._lock:
            self._queued += piece.nbytes
            overflow = self._queued > self._limit
        if overflow:
            self.abort("the link cannot keep up and the send buffer is full")
        else:
            self._pieces.put(piece)

    def prefill_done(self, tokens: int) -> None:
        """All layers of all `tokens` positions have been pushed."""
        self._prefill_done_at = time.monotonic()
        self._pieces.put(tokens)

    def abort(self, reason: str) -> None:
        """Give the transfer up; the receiver is told if it can be."""
        self._pieces.put(reason)
        self._closed.set()

    def _run(self) -> None:
        first_at: float | None = None
        raw = frames = 0
        stream: SendStream | None = None
        try:
            stream = SendStream.connect(self._ticket, timeout=self._ticket.deadline_s)
            while not isinstance(piece := self._pieces.get(), int | str):
                if first_at is None:
                    first_at = time.monotonic()
                for frame in self._frames(piece):
                    stream.send(frame)
                    frames += 1
                raw += piece.nbytes
                with self._lock:
                    self._queued -= piece.nbytes
                if self._closed.is_set():
                    break
            if isinstance(piece, int):
                stream.finish(piece)
                reason = ""
            else:
                reason = piece if isinstance(piece, str) else "given up"
                stream.abort(reason)
        except (TransferError, OSError, ValueError, RuntimeError) as error:  # the last: torch's
            reason = str(error) or type(error).__name__
        finally:
            if stream is not None:
                stream.close()
        self._finish(stream, first_at, raw, frames, reason)

    def _frames(self, piece: LayerPiece) -> Iterator[KVFrame]:
        k, v = piece.on_host()
        tokens, heads, head_dim = k.shape
        codec, dtype = Codec(self._ticket.codec), wire_dtype(k.dtype)
        for first in range(0, tokens, step := _tokens_per_frame(piece)):
            last = min(first + step, tokens)
            start = piece.start + first
            yield KVFrame(
                layer=piece.layer,
                head_first=0,
                head_last=heads,
                start=start,
                tokens=last - first,
                codec=codec.wire,
                dtype=dtype.wire,
                head_dim=head_dim,
                payload=encode(codec, k[first:last], v[first:last], start=start, layer=piece.layer),
            )

    def _finish(self, stream: SendStream | None, first_at: float | None, raw: int, frames: int, reason: str) -> None:
        now = time.monotonic()
        times = TransferTimes(
            first_frame_at=now if first_at is None else first_at,
            prefill_done_at=now if self._prefill_done_at is None else self._prefill_done_at,
            acknowledged_at=now,
        )
        self._report(
            TransferReport(
                transfer=self._ticket.transfer,
                delivered=not reason,
                reason=reason,
                frames=frames,
                raw_bytes=raw,
                wire_bytes=0 if stream is None else stream.bytes_sent,
                span_s=times.acknowledged_at - times.first_frame_at,
                visible_s=max(0.0, times.acknowledged_at - max(times.prefill_done_at, times.first_frame_at)),
                hidden_fraction=times.hidden_fraction,
            )
        )


class Incoming:
    """The receiving end: an inbox of decoded layers, and what has arrived so far."""

    def __init__(self, ticket: Ticket, tokens: int, geometry: Geometry, limit_bytes: int) -> None:
        self.ticket = ticket
        self.tokens = tokens
        self._geometry = geometry
        self._limit = limit_bytes
        self._expires_at = time.monotonic() + ticket.deadline_s
        self._assembly = Assembly(layers=range(geometry.layers), heads=geometry.heads, tokens=tokens)
        self._room = threading.Condition()
        self._inbox: list[LayerPiece] = []
        self._held = 0
        self._stream: ReceiveStream | None = None
        self._failure: str | None = None
        self._complete = False
        self._applied = False

    def attach(self, connection: socket.socket) -> None:
        """Start receiving from a socket whose hello has been read."""
        remaining = max(0.1, self._expires_at - time.monotonic())
        with self._room:
            if self._stream is not None or self._failure is not None:
                connection.close()
                return
            self._stream = ReceiveStream(connection, self.ticket, timeout=remaining)
        name = f"kv-receive-{self.ticket.transfer.hex()[:8]}"
        threading.Thread(target=self._run, args=(self._stream,), name=name, daemon=True).start()

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
            stream = self._stream
        if stream is not None:
            stream.close()

    def _run(self, stream: ReceiveStream) -> None:
        try:
            for frame in stream:
                self._deliver(frame)
            with self._room:
                if not self._assembly.done:
                    raise ValueError(f"the transfer ended after {self._assembly.complete_tokens()} complete positions")
                self._complete = True
                self._room.wait_for(lambda: self._applied or self._failure, self._remaining())
                applied, failure = self._applied, self._failure
            if applied:
                stream.acknowledge()
            else:
                stream.abort(failure or "the engine did not take the KV before the deadline")
        except (TransferError, OSError, ValueError) as error:
            stream.abort(str(error))
            with self._room:
                if self._failure is None and not self._applied:
                    self._failure = str(error) or type(error).__name__
        finally:
            stream.close()

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


class TransferHub:
    """All transfers of an engine process, found by transfer id."""

    def __init__(self, geometry: Geometry, limit_bytes: int, report: Report) -> None:
        self._geometry = geometry
        self._limit = limit_bytes
        self._report = report
        self._lock = threading.Lock()
        self._outgoing: dict[bytes, Outgoing] = {}
        self._incoming: dict[bytes, Incoming] = {}
        self._early: dict[bytes, socket.socket] = {}
        self._over: dict[bytes, None] = {}  # in order of their end

    def __repr__(self) -> str:
        return f"<TransferHub sending={len(self._outgoing)} receiving={len(self._incoming)}>"

    def send(self, ticket: Ticket) -> None:
        """Open the sending end; dials at once, so that the handshake hides behind the first layer."""
        with self._lock:
            self._outgoing[ticket.transfer] = Outgoing(ticket, self._limit, self._sent)

    def expect(self, ticket: Ticket, tokens: int) -> None:
        """Open the receiving end for the first `tokens` positions of a prompt."""
        incoming = Incoming(ticket, tokens, self._geometry, self._limit)
        with self._lock:
            self._incoming[ticket.transfer] = incoming
            early = self._early.pop(ticket.transfer, None)
        if early is not None:
            incoming.attach(early)

    def attach(self, transfer: bytes, connection: socket.socket) -> None:
        """Hand over an accepted socket.

        It may come before its request, which waits while the engine thread is busy with a step: then it is kept.
        The agent lets only transfers of its requests through, so few wait here; beyond a bound the oldest goes.
        """
        unwanted: socket.socket | None = None
        with self._lock:
            incoming = self._incoming.get(transfer)
            if incoming is None:
                unwanted = self._keep(transfer, connection)
        if incoming is not None:
            incoming.attach(connection)
        elif unwanted is not None:
            unwanted.close()

    def _keep(self, transfer: bytes, connection: socket.socket) -> socket.socket | None:
        """Put an early connection by; return the one there is no place for."""
        if transfer in self._early or transfer in self._over:
            return connection
        self._early[transfer] = connection
        return self._early.pop(next(iter(self._early))) if len(self._early) > MAX_EARLY else None

    def outgoing(self, transfer: bytes) -> Outgoing | None:
        """The sending end, while it is open."""
        with self._lock:
            return self._outgoing.get(transfer)

    def incoming(self, transfer: bytes) -> Incoming | None:
        """The receiving end, until it is closed."""
        with self._lock:
            return self._incoming.get(transfer)

    def close_incoming(self, transfer: bytes) -> None:
        """Forget a receiving end whose KV has been applied or is no longer wanted."""
        with self._lock:
            self._incoming.pop(transfer, None)
            early = self._early.pop(transfer, None)
            self._over[transfer] = None
            if len(self._over) > MAX_REMEMBERED:
                del self._over[next(iter(self._over))]
        if early is not None:
            early.close()

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer in either direction."""
        outgoing, incoming = self.outgoing(transfer), self.incoming(transfer)
        if outgoing is not None:
            outgoing.abort(reason)
        if incoming is not None:
            incoming.abort(reason)

    def _sent(self, report: TransferReport) -> None:
        with self._lock:
            self._outgoing.pop(report.transfer, None)
        self._report(report)


def _tokens_per_frame(piece: LayerPiece) -> int:
    """How many tokens fit a frame, a multiple of the codec's token group so that cutting changes no value."""
    per_token = piece.nbytes // piece.k.shape[0]
    return max(1, MAX_PAYLOAD_BYTES // 2 // per_token // KEY_GROUP_TOKENS) * KEY_GROUP_TOKENS
