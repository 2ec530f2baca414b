"""The sending end of a KV transfer: a thread that reads the paged cache, encodes and sends beside the model.

    model's thread   announces:  layer 3, positions up to 512, these blocks, this mark
    transfer's thread            waits for the mark | reads a window | encodes it into the host buffer | sends it

The prompt's blocks are held until the transfer has ended (vLLM frees them later then), so nothing is copied ahead: a
slow link fills neither main memory nor the GPU's. It is the link that holds the thread back, and only a deadline, an
abort or a loss gives a transfer up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, final

import torch

from ....kernels.codec import encode_into, wire_dtype
from ....kernels.codecs import codec_named
from ....kernels.format import GROUP_TOKENS, WINDOW_TOKENS, payload_bytes
from ....kvtransport.errors import TransferTimeout
from ....kvtransport.link.send_link import SendLink
from ....kvtransport.link.sending import SendProgress
from ....kvtransport.wire.frames import MAX_PAYLOAD_BYTES, KVFrame
from ..protocol import Outlet
from ..settings import TransferSettings
from ..vllm.device import Device, Mark
from ..vllm.layout import Shard
from .host_buffer import Extent, HostBuffer
from .pacing import Pacing
from .sender import FrameToSend, SendReport, TransferSender

ReadKv = Callable[[int, list[int], int, int], tuple[torch.Tensor, torch.Tensor]]
"""Copies canonical K and V `[tokens, heads, head_dim]` of one layer, for the positions `[first, last)` of the prompt in
these blocks, out of a worker's paged cache; by any thread, on the stream that is current in it."""


@final
@dataclass(frozen=True, slots=True)
class KvSource:
    """A worker's paged cache, as transfers read it, and the memory in which their payloads wait for the link."""

    device: Device
    read: ReadKv
    buffer: HostBuffer
    settings: TransferSettings


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Up to `last`, a prompt's positions are in these blocks once the device has reached `mark`."""

    block_ids: list[int]
    last: int
    mark: Mark


class _Window(NamedTuple):
    layer: int
    first: int
    computed: Prefilled
    withdrawals: int


class _Done(NamedTuple):
    tokens: int
    mark: Mark
    withdrawals: int


@final
class PromptSender(TransferSender):
    """What one worker sends to one other. After its report the cache is not read any more. `announce_layers`,
    `prefill_done` and `withdraw` are for the model's thread, and never block for long.
    """

    def __init__(
        self,
        outlet: Outlet,
        link: SendLink,
        shard: Shard,
        source: KvSource,
        decide_pacing: Callable[[], Pacing],
        report: SendReport,
    ) -> None:
        super().__init__(outlet, link, report)
        self._decide_pacing = decide_pacing
        self._slice = outlet.slice
        self._shard = shard
        self._source = source
        self._queue: queue.SimpleQueue[_Window | _Done | str] = queue.SimpleQueue()
        self._announced_up_to = dict.fromkeys(outlet.slice.layers, 0)  # position up to which each layer is in the queue
        self._read_up_to = dict(self._announced_up_to)  # ... and has been read
        self._reading = threading.Lock()  # held while the cache is read, and while blocks are withdrawn
        self._token_bytes = self._payload_bytes(0, WINDOW_TOKENS) // WINDOW_TOKENS
        self._held = 0  # bytes of the host buffer
        self._holding = threading.Lock()
        self._begin()

    # ---- for the model's thread -----------------------------------------------------------------------------

    @cached_property
    def pacing(self) -> Pacing:
        """How its layers leave. Decided when the first of them has been computed, not when the transfer is opened: of
        many prompts that come at once, the later ones then go by what the first have shown."""
        return self._decide_pacing()

    def announce_layers(self, layers: range, computed: Prefilled) -> int:
        """These layers have been computed so far; those that are not of this end, or announced already, are no matter.
        The device may still be at it. Returns how many were news."""
        fresh = 0
        for layer in layers:
            first = self._announced_up_to.get(layer, computed.last)
            if first < computed.last:
                self._announced_up_to[layer] = computed.last
                self._queue.put(_Window(layer, first, computed, self.withdrawals))
                fresh += 1
        return fresh

    def prefill_done(self, tokens: int, mark: Mark) -> None:
        """All layers of all `tokens` positions have been announced; they are computed when the mark is reached."""
        self._queue.put(_Done(tokens, mark, self.withdrawals))

    def withdraw(self) -> None:
        """The prompt loses its blocks, unread from now on; the rest is announced again later."""
        self.withdrawals += 1  # first: the window that is being read is waited for, and none that comes after it
        with self._reading:
            self._announced_up_to.update(self._read_up_to)

    def progress(self) -> SendProgress:
        """The link is given nothing before the receiver has a place for it, and then a little at a time: what still
        lies in the cache waits for it all the same."""
        progress = super().progress()
        unread = sum(last - self._read_up_to[layer] for layer, last in self._announced_up_to.items())
        return replace(progress, bytes_queued=progress.bytes_queued + unread * self._token_bytes)

    # ---- the transfer's thread ------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        return self.pacing.mode.mode.value

    def _stop(self, reason: str) -> None:
        self._queue.put(reason)

    def _payload_bytes(self, start: int, tokens: int) -> int:
        return payload_bytes(
            codec_named(self.ticket.codec),
            wire_dtype(self._shard.dtype),
            start=start,
            tokens=tokens,
            heads=len(self._slice.heads),
            head_dim=self._shard.head_dim,
        )

    def _frames(self) -> Iterator[FrameToSend]:
        """What is announced, encoded. Ends with the prompt, or when the transfer is given up."""
        # Until the receiver has a place for it and says what it has already, the KV is best where it is.
        wanted = self._wait_for_credit()
        while not isinstance(item := self._queue.get(), str):
            if isinstance(item, _Window):
                yield from self._frames_of(item, wanted)
            elif item.withdrawals == self.withdrawals:  # else some of it is still to be announced again
                item.mark.wait()
                with self._source.device.copy_stream() as stream:
                    self._prefill_done_at = stream.moment_of(item.mark)
                self._end.finish(item.tokens)
                return

    def _frames_of(self, window: _Window, wanted: int) -> Iterator[FrameToSend]:
        step = self._tokens_per_frame()
        start, last = max(window.first, wanted), window.computed.last
        while start < last:
            # Cut where the codecs' spans end, so that it changes no value.
            end = min(last, start // step * step + step)
            extent = self._take(self._payload_bytes(start, end - start))
            if extent is None:
                return  # the transfer has ended; the queue says why
            encoded = False
            try:
                encoded = self._encode(window, start, end, extent)
            finally:
                if not encoded:
                    self._give(extent)
            if not encoded:
                return
            frame = KVFrame(
                layer=window.layer,
                head_first=self._slice.first_head,
                head_last=self._slice.last_head,
                start=start,
                tokens=end - start,
                codec=codec_named(self.ticket.codec).wire,
                dtype=wire_dtype(self._shard.dtype).wire,
                head_dim=self._shard.head_dim,
                payload=extent.memory.numpy().data,
            )
            yield FrameToSend(frame, (end - start) * self._row_bytes, partial(self._give, extent))
            start = end

    @property
    def _row_bytes(self) -> int:
        """Of K and V of one position in one layer, as they lie in the cache."""
        return 2 * len(self._slice.heads) * self._shard.head_dim * self._shard.dtype.itemsize

    def _encode(self, window: _Window, start: int, end: int, into: Extent) -> bool:
        """Read these positions and write their payload there. False when the blocks have been withdrawn."""
        mine = slice(self._slice.first_head - self._shard.heads.start, self._slice.last_head - self._shard.heads.start)
        computed = window.computed
        computed.mark.wait()  # before others are kept from a stream
        device = self._source.device
        with device.copy_stream() as stream, self._reading:
            begun = device.thread_clock()
            if window.withdrawals != self.withdrawals:
                return False
            k, v = self._source.read(window.layer, computed.block_ids, start, end)
            k, v = k[:, mine].contiguous(), v[:, mine].contiguous()
            payload = stream.payload_for(into.memory)
            soundness = encode_into(self.ticket.codec, k, v, payload, start=start, layer=window.layer)
            stream.download(payload, into.memory)
            stream.drain()
            soundness.raise_if_unsound()
            self._read_up_to[window.layer] = end
            seconds = device.thread_clock() - begun
        self._codec_s += seconds
        self.pacing.on_frame(into.memory.numel(), seconds)
        return True

    def _tokens_per_frame(self) -> int:
        """As many whole windows as frame and buffer share hold; where none fits, whole groups."""
        settings = self._source.settings
        room = min(MAX_PAYLOAD_BYTES, self._source.buffer.size // settings.window_share)
        usual, most = (size // self._row_bytes for size in (min(room, settings.window_bytes), room))
        windows = usual // WINDOW_TOKENS or min(1, most // WINDOW_TOKENS)
        return windows * WINDOW_TOKENS or max(1, most // GROUP_TOKENS) * GROUP_TOKENS

    def _take(self, size: int) -> Extent | None:
        """Room for a payload, as soon as the link has confirmed others; None when the transfer has ended."""
        timeout = self.ticket.deadline_s
        extent = self._source.buffer.take(size, lambda: self._held, timeout, lambda: self._end.state.name == "open")
        if extent is not None:
            with self._holding:
                self._held += extent.reserved
        elif self._end.state.name == "open":
            raise TransferTimeout(f"no room for {size} bytes in the transfer buffer within {timeout:g} s")
        return extent

    def _give(self, extent: Extent) -> None:
        """By a thread of the link, when the receiver has the payload or nobody wants it any more."""
        with self._holding:
            self._held -= extent.reserved
        self._source.buffer.give(extent)
