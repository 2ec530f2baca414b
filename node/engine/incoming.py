"""The receiving end of a KV transfer: threads that decode beside the model.

A worker receives its layers and heads from one worker of another engine or from several, each on a link of its own.
One thread for each decodes frames into a common inbox, which the engine thread drains between two steps. The senders
are granted credit once the engine has blocks; while the inbox is full they get no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from ...kernels.codec import codec_from_wire, decode, dtype_from_wire, torch_dtype
from ...kvtransport.assembly import Assembly
from ...kvtransport.errors import FiguresError, TransferError
from ...kvtransport.frames import KVFrame
from ...kvtransport.receive_link import Incoming as ReceivingEnd
from ...kvtransport.receive_link import ReceiveLink
from ...kvtransport.receiving import MIN_WINDOW_BYTES
from ...kvtransport.reslice import localise
from .layout import Shard
from .protocol import Inlet


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """K and V `[tokens, heads, head_dim]` of one layer for positions from `start` on, and for heads from `head` on,
    counted from the first one that this worker holds."""

    layer: int
    head: int
    start: int
    k: torch.Tensor
    v: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.k.nbytes + self.v.nbytes


@final
class Incoming:
    """What one worker receives of one prompt: an inbox of decoded pieces, and what has arrived so far."""

    def __init__(
        self,
        inlets: Sequence[tuple[Inlet, ReceiveLink]],
        tokens: int,
        shard: Shard,
        limit_bytes: int,
        on_news: Callable[[], None],
    ) -> None:
        """Expect the first `tokens` positions on these links. Raises TransferError if one of them is over.

        `on_news` is called, by any thread, when there is something to `take` again, or an `outcome`.
        """
        self.transfer = inlets[0][0].ticket.transfer
        self.tokens = tokens
        self._shard = shard
        self._limit = limit_bytes
        self._on_news = on_news
        self._expires_at = time.monotonic() + min(inlet.ticket.deadline_s for inlet, _ in inlets)
        self._room = threading.Condition()
        self._assembly = Assembly(shard.layers, len(shard.heads), tokens)
        self._first = 0
        self._inbox: list[LayerPiece] = []
        self._held = 0
        self._failure: str | None = None
        self._started = False
        self._coming = len(inlets)
        self._applied = False
        self._ends: list[tuple[Inlet, ReceivingEnd]] = []
        try:
            for inlet, link in inlets:
                self._ends.append((inlet, link.expect(inlet.ticket)))
        except TransferError as error:
            self.abort(str(error))
            raise

    def start(self, first: int) -> None:
        """The engine has blocks, and needs the positions from `first` on: the senders may send. Again is no matter."""
        with self._room:
            if self._started or self._failure is not None:
                return
            self._started, self._first = True, first
            self._assembly = Assembly(self._shard.layers, len(self._shard.heads), self.tokens - first, first=first)
        window = max(self._limit // len(self._ends), MIN_WINDOW_BYTES)
        for inlet, end in self._ends:
            name = f"kv-decode-{self.transfer.hex()[:8]}"
            threading.Thread(target=self._run, args=(inlet, end), name=name, daemon=True).start()
            end.grant(window, first)

    def take(self) -> list[LayerPiece]:
        """Return what has been decoded since the last call (engine thread)."""
        with self._room:
            pieces, self._inbox, self._held = self._inbox, [], 0
            self._room.notify_all()
        return pieces

    def outcome(self, now: float) -> str | None:
        """None while KV may still come, "" when all of it has arrived, else why it will not."""
        with self._room:
            if self._failure is None and self._coming and now > self._expires_at:
                self._failure = "no KV arrived before the transfer's deadline"
            if self._failure is not None:
                return self._failure
            return None if self._coming else ""

    def progress(self) -> tuple[float, int]:
        """Which part of everything has arrived, and how many positions every layer and head has, from the first one
        that was needed."""
        with self._room:
            return self._assembly.part, int(self._assembly.complete_tokens())

    def applied(self) -> None:
        """The engine has written everything into its cache: the senders may be told."""
        with self._room:
            self._applied = True
            self._room.notify_all()

    def abort(self, reason: str) -> None:
        """No more is wanted, or no more will come."""
        with self._room:
            if self._failure is None and not self._applied:
                self._failure = reason
            # What has been decoded stays in the inbox: `progress` counts it, so it must still be taken.
            self._room.notify_all()
            applied = self._applied
        self._on_news()
        if not applied:
            for _, end in self._ends:
                end.abort(reason)

    def _run(self, inlet: Inlet, end: ReceivingEnd) -> None:
        try:
            for frame in end:
                self._deliver(frame, inlet)
            with self._room:
                self._coming -= 1
                if not self._coming and not self._assembly.done:
                    raise ValueError(f"the transfer ended after {self._assembly.complete_tokens()} complete positions")
                self._on_news()
                self._room.wait_for(lambda: self._applied or self._failure, self._remaining())
                applied, failure = self._applied, self._failure
            if applied:
                end.acknowledge()
            else:
                end.abort(failure or "the engine did not take the KV before the deadline")
        except (TransferError, FiguresError, OSError, ValueError) as error:
            self.abort(str(error) or type(error).__name__)

    def _remaining(self) -> float:
        return max(0.0, self._expires_at - time.monotonic())

    def _deliver(self, frame: KVFrame, inlet: Inlet) -> None:
        where, shard = inlet.slice, self._shard
        if frame.head_dim != shard.head_dim:
            raise ValueError(f"KV of head_dim {frame.head_dim} for a model of head_dim {shard.head_dim}")
        if frame.layer not in where.layers or not (
            where.first_head <= frame.head_first and frame.head_last <= where.last_head
        ):
            raise ValueError(f"{frame} lies outside what was agreed on for its link: {where}")
        late = max(0, self._first - frame.start)  # it was cut before its sender knew what is here already
        if late >= frame.tokens:
            return
        k, v = decode(
            codec_from_wire(frame.codec),
            frame.payload,
            tokens=frame.tokens,
            heads=frame.heads,
            head_dim=frame.head_dim,
            dtype=torch_dtype(dtype_from_wire(frame.dtype)),
            start=frame.start,
            layer=frame.layer,
        )
        here = replace(localise(frame, shard.heads), start=frame.start + late, tokens=frame.tokens - late)
        piece = LayerPiece(frame.layer, here.head_first, here.start, k[late:], v[late:])
        with self._room:
            # One piece is always let in: a bound smaller than a piece must not stop everything.
            if not self._room.wait_for(
                lambda: self._failure is not None or not self._held or self._held + piece.nbytes <= self._limit,
                self._remaining(),
            ):
                raise ValueError("the engine did not take the KV before the deadline")
            if self._failure is not None:
                raise ValueError(self._failure)
            self._assembly.add(here)
            self._inbox.append(piece)
            self._held += piece.nbytes
            if len(self._inbox) == 1:
                self._on_news()
