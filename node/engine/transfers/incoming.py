"""The receiving end of a KV transfer: threads that decode and stage beside the model.

A worker receives its layers and heads from one worker of another engine or from several, each on a link of its own.
One thread for each decodes frames on the device, where a common inbox keeps them until the model's thread writes them
into the paged cache between two steps. The senders are granted credit once the engine has blocks; while there is no
room for what is decoded they get no more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from ....kernels.codec import decode, torch_dtype
from ....kernels.codecs import codec_from_wire
from ....kernels.format import dtype_from_wire
from ....kvtransport.errors import FiguresError, TransferError
from ....kvtransport.link.budget import ByteBudget
from ....kvtransport.link.receive_link import IncomingTransfer as ReceivingEnd
from ....kvtransport.link.receive_link import ReceiveLink
from ....kvtransport.link.receiving import MIN_WINDOW_BYTES
from ....kvtransport.routing.reslice import localise
from ....kvtransport.wire.assembly import Assembly
from ....kvtransport.wire.frames import KVFrame
from ..protocol import Inlet
from ..vllm.device import Device
from ..vllm.layout import Shard

FindSlots = Callable[[int, int], torch.Tensor]
"""Where the positions `[first, last)` of a prompt lie in the paged cache `[tokens]`, on its device; by any thread."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """K and V `[tokens, heads, head_dim]` of one layer for positions from `start` on, and for heads from `head` on,
    counted from the first one that this worker holds; and their `slots` `[tokens]`. All on the cache's device."""

    layer: int
    head: int
    start: int
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.k.nbytes + self.v.nbytes


@final
@dataclass(frozen=True, slots=True)
class StagingArea:
    """Where a worker's transfers decode: the `device` of its cache, and a bound on what is decoded and not written."""

    device: Device
    budget: ByteBudget


@final
class PromptReceiver:
    """What one worker receives of one prompt: an inbox of decoded pieces, and what has arrived so far."""

    def __init__(
        self,
        inlets: Sequence[tuple[Inlet, ReceiveLink]],
        tokens: int,
        shard: Shard,
        staging: StagingArea,
        on_news: Callable[[], None],
    ) -> None:
        """Expect the first `tokens` positions on these links; TransferError if one is over.
        `on_news`, from any thread: much to `take`, or an `outcome`."""
        self.transfer = inlets[0][0].ticket.transfer
        self.tokens = tokens
        self._shard = shard
        self._staging = staging
        self._on_news = on_news
        self.deadline = time.monotonic() + min(inlet.ticket.deadline_s for inlet, _ in inlets)
        self._room = threading.Condition()
        self._assembly = Assembly(shard.layers, len(shard.heads), tokens)
        self._first = 0
        self._inbox: deque[LayerKv] = deque()
        self._find_slots: FindSlots | None = None
        self._failure: str | None = None
        self.window_bytes = 0  # encoded bytes that may be here; none before the engine has blocks
        self._coming = len(inlets)
        self._applied = False
        self._ends: list[tuple[Inlet, ReceivingEnd]] = []
        try:
            for inlet, link in inlets:
                self._ends.append((inlet, link.expect(inlet.ticket)))
        except TransferError as error:
            self.abort(str(error))
            raise

    def start(self, first: int, find_slots: FindSlots, window_bytes: int) -> None:
        """The engine has blocks, and needs the positions from `first` on: the senders may send, `window_bytes` ahead of
        what is decoded here, but a chunk each at least. Once."""
        window = max(window_bytes // len(self._ends), MIN_WINDOW_BYTES)
        with self._room:
            self.window_bytes = window * len(self._ends)
            if self._failure is not None:
                return
            self._first, self._find_slots = first, find_slots
            self._assembly = Assembly(self._shard.layers, len(self._shard.heads), self.tokens - first, first=first)
        for inlet, end in self._ends:
            name = f"kv-decode-{self.transfer.hex()[:8]}"
            threading.Thread(target=self._run, args=(inlet, end), name=name, daemon=True).start()
            end.grant(window, first)

    def take(self) -> LayerKv | None:
        """The next piece that is to be written (model's thread); None when there is none now."""
        with self._room:
            if not self._inbox:
                return None
            piece = self._inbox.popleft()
        self._staging.budget.give(piece.nbytes)
        return piece

    @property
    def waiting_pieces(self) -> int:
        """How many are to be written."""
        with self._room:
            return len(self._inbox)

    def outcome(self, now: float) -> str | None:
        """None while KV may still come, "" when all of it has arrived, else why it will not."""
        with self._room:
            if self._failure is None and self._coming and now > self.deadline:
                self._failure = "no KV arrived before the transfer's deadline"
            if self._failure is not None:
                return self._failure
            return None if self._coming else ""

    def progress(self) -> tuple[float, int]:
        """The part of everything that has arrived, and positions complete in all layers and heads."""
        with self._room:
            return self._assembly.fraction, int(self._assembly.complete_tokens())

    def confirm_applied(self) -> None:
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

    def close(self) -> None:
        """Nobody will take what is still in the inbox."""
        while self.take() is not None:
            pass

    def _run(self, inlet: Inlet, end: ReceivingEnd) -> None:
        try:
            for frame in end:
                self._deliver(frame, inlet)
            with self._room:
                self._coming -= 1
                if not self._coming and not self._assembly.is_done:
                    raise ValueError(f"the transfer ended after {self._assembly.complete_tokens()} complete positions")
                self._on_news()
                self._room.wait_for(lambda: self._applied or self._failure, self._remaining())
                applied, failure = self._applied, self._failure
            if applied:
                end.acknowledge()
            else:
                end.abort(failure or "the engine did not take the KV before the deadline")
        except (TransferError, FiguresError, OSError, ValueError, RuntimeError) as error:  # the last: torch's
            self.abort(str(error) or type(error).__name__)

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

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
        here = replace(localise(frame, shard.heads), start=frame.start + late, tokens=frame.tokens - late)
        size = 2 * here.tokens * here.heads * here.head_dim * dtype_from_wire(here.dtype).itemsize
        # Before it is decoded: there is no room for it elsewhere.
        if not self._staging.budget.take(size, self._remaining(), lambda: self._failure is None):
            raise ValueError(self._failure or "the engine did not take the KV before the deadline")
        kept = False
        try:
            piece = self._stage(frame, here)
            with self._room:
                if self._failure is not None:
                    raise ValueError(self._failure)
                self._assembly.add(here)
                self._inbox.append(piece)
                kept = True
            if 2 * self._staging.budget.held > self._staging.budget.limit_bytes:
                self._on_news()  # of less only when all is there: every step keeps this thread from the interpreter
        finally:
            if not kept:
                self._staging.budget.give(size)

    def _stage(self, frame: KVFrame, here: KVFrame) -> LayerKv:
        """Decode a frame on the device of the cache; `here` is the part of it that is wanted."""
        late = here.start - frame.start
        assert self._find_slots is not None
        with self._staging.device.copy_stream() as stream:
            k, v = decode(
                codec_from_wire(frame.codec),
                stream.upload(memoryview(frame.payload)),
                tokens=frame.tokens,
                heads=frame.heads,
                head_dim=frame.head_dim,
                dtype=torch_dtype(dtype_from_wire(frame.dtype)),
                start=frame.start,
                layer=frame.layer,
            )
            slots = self._find_slots(here.start, here.start + here.tokens)
            stream.drain()
        return LayerKv(frame.layer, here.head_first, here.start, k[late:], v[late:], slots)
