"""The transfers of one worker: out of its paged cache, and into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from ....kvtransport.errors import TransferError
from ....kvtransport.link.budget import ByteBudget
from ....kvtransport.link.send_link import SendLink
from ..protocol import Inlet, Outlet
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..vllm.device import Device, DeviceKind
from ..vllm.layout import Shard
from .host_buffer import HostBuffer
from .incoming import FindSlots, PromptReceiver, StagingArea
from .open_transfers import OpenTransfers, Tell
from .outgoing import KvSource, PromptSender, ReadKv
from .pacing import Pacer
from .sender import PRESENT, SendReport


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMemory:
    """Bounds of one worker, in bytes. `host_bytes`: payloads that wait for the link or its confirmation, and as many
    again that have arrived and are not decoded. `staged_bytes`: what is decoded on the device and not yet written into
    the cache."""

    host_bytes: int
    staged_bytes: int


def transfer_memory(host_bytes: int, kind: DeviceKind, settings: TransferSettings) -> TransferMemory:
    """Of a worker that has so much main memory for its transfers in each direction. What is decoded lies in a GPU's own
    memory, of which the KV cache has left little."""
    return TransferMemory(
        host_bytes=host_bytes, staged_bytes=min(host_bytes, settings.gpu_staged_bytes) if kind == "cuda" else host_bytes
    )


@final
class TransferHub(OpenTransfers[PromptSender, PromptReceiver]):
    """All transfers of a worker. `read` copies KV out of its paged cache on its `device`. `on_news` is called by
    threads when the engine has something to do for KV that is received, or that need not be held any longer."""

    def __init__(
        self,
        shard: Shard,
        device: Device,
        read: ReadKv,
        memory: TransferMemory,
        report: Tell,
        on_news: Callable[[], None] = lambda: None,
        settings: TransferSettings = TRANSFER_DEFAULTS,
    ) -> None:
        super().__init__(memory.host_bytes, report, settings)
        self.shard = shard
        self._on_news = on_news
        # Made now: a GPU box pins it.
        self._source = KvSource(device, read, HostBuffer(device.allocate_host(memory.host_bytes)), settings)
        self._staging = StagingArea(device, ByteBudget(memory.staged_bytes))
        self.pacer = Pacer(shard, settings)

    @property
    def memory_in_use(self) -> TransferMemory:
        """Payloads that are sent, and decoded KV. What has arrived and is not decoded, the links count."""
        return TransferMemory(host_bytes=self._source.buffer.held, staged_bytes=self._staging.budget.held)

    def send(self, outlet: Outlet, tokens: int) -> None:
        """Open a sending end for a prompt of `tokens`; the link is dialled at once, so that this hides behind the first
        layer. One that cannot be opened is reported as a transfer that has failed."""

        def make(link: SendLink, report: SendReport) -> PromptSender:
            if not self.shard.holds(outlet.slice):
                raise TransferError(f"{outlet.slice} is not held by this worker, which holds {self.shard}")
            decide = partial(self.pacer.decide, outlet.ticket.codec, tokens, outlet)
            return PromptSender(outlet, link, self.shard, self._source, decide, report)

        def tell_if_last() -> None:
            if not self.outgoing(outlet.ticket.transfer):
                self._on_news()  # the blocks need not be held any longer

        self._open_sender(outlet, make, tell_if_last)

    def abort_unless_granted(self, transfer: bytes) -> None:
        """Give up what waits for a place at its receiver."""
        for outgoing in self.outgoing(transfer):
            if not outgoing.is_granted:
                outgoing.abort("the receiver has no place for it, and other KV needs the memory that it lies in")

    def expect(self, inlets: Sequence[Inlet], tokens: int) -> None:
        """Open the receiving end for the first `tokens` positions of a prompt. Raises TransferError."""
        self._open_receiver(
            inlets, lambda links: PromptReceiver(links, tokens, self.shard, self._staging, self._on_news)
        )

    def start(self, incoming: PromptReceiver, first: int, find_slots: FindSlots) -> None:
        """The engine has blocks for a transfer's positions from `first` on: its senders may send. How far ahead of the
        decoding depends on what others may: all together fill no more memory than there is for them. Again is no
        matter."""
        if incoming.window_bytes:
            return
        with self._lock:
            room = self._limit_bytes - sum(each.window_bytes for each in self._incoming.values())
        incoming.start(first, find_slots, min(self._limit_bytes // self._settings.grant_share, room))

    def decline(self, transfer: bytes) -> None:
        """All that was to come is here already: the senders may stop, and have not failed."""
        incoming = self.incoming(transfer)
        if incoming is not None:
            incoming.abort(PRESENT)
            self.close_incoming(transfer)

    def close_incoming(self, transfer: bytes) -> PromptReceiver | None:
        """Also drops what has come and was not written."""
        incoming = super().close_incoming(transfer)
        if incoming is not None:
            incoming.close()
        return incoming
