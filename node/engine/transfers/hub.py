"""All transfers and links of one worker process: what its connector and the agent talk to."""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from ....kvtransport.errors import KVProtocolError, TransferError
from ....kvtransport.link.budget import ByteBudget
from ....kvtransport.link.endpoint import Endpoint
from ....kvtransport.link.receive_link import ReceiveLink
from ....kvtransport.link.send_link import SendLink
from ....kvtransport.link.settings import LinkSettings
from ....kvtransport.wire.channel import parse_link_hello
from ....kvtransport.wire.dial_path import DialPath
from ..protocol import AbortTransfer, CloseLink, Inlet, LinkReport, Outlet, SetLinkPaths, TransferReport
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..vllm.device import Device, DeviceKind
from ..vllm.layout import Shard
from .host_buffer import HostBuffer
from .incoming import FindSlots, PromptReceiver, StagingArea
from .outgoing import PRESENT, KvSource, PromptSender, ReadKv
from .pacing import Pacer
from .reports import link_report, unopened_report

Tell = Callable[[TransferReport | LinkReport], None]


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
class TransferHub:
    """All transfers of a worker, found by transfer id, and the links they take. `read` copies KV out of its paged cache
    on its `device`.

    `report` is called by threads of the hub, with the end of everything that is sent, once for each link of a transfer,
    and several times a second with how each link gets on that has a transfer. `on_news` is called by them when the
    engine has something to do for what is received.
    """

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
        self._settings = settings
        self.shard = shard
        self._report = report
        self._on_news = on_news
        # Made now: a GPU box pins it.
        self._source = KvSource(device, read, HostBuffer(device.allocate_host(memory.host_bytes)), settings)
        self._staging = StagingArea(device, ByteBudget(memory.staged_bytes))
        self._memory = memory
        self.pacer = Pacer(shard, settings)
        self._endpoint = Endpoint(settings=LinkSettings(limit_bytes=memory.host_bytes))
        self._lock = threading.Lock()
        self._outgoing: dict[bytes, dict[bytes, PromptSender]] = {}  # transfer -> link -> what goes over it
        self._incoming: dict[bytes, PromptReceiver] = {}
        self._early_paths: OrderedDict[bytes, tuple[float, tuple[DialPath, ...]]] = (
            OrderedDict()
        )  # link -> until when, ...
        self._sending = threading.Event()
        threading.Thread(target=self._tell, name="kv-reporter", daemon=True).start()

    def __repr__(self) -> str:
        return f"<TransferHub sending={len(self._outgoing)} receiving={len(self._incoming)} {self._endpoint}>"

    # ---- for the agent --------------------------------------------------------------------------------------

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """Take an accepted socket whose hello has been read; it may come before its link is known here."""
        try:
            self._endpoint.attach(parse_link_hello(hello), connection)
        except KVProtocolError:
            connection.close()

    def carry_out(self, order: SetLinkPaths | CloseLink | AbortTransfer) -> None:
        """An order of the agent. Unknown links are ignored, but their paths kept for a while."""
        match order:
            case SetLinkPaths(link=link, paths=paths):
                self._set_paths(link, paths)
            case CloseLink(link=link, reason=reason):
                # Goodbyes are said by a thread: the engine's must not wait for them.
                name = f"kv-close-{link.hex()[:8]}"
                threading.Thread(target=self._endpoint.forget, args=(link, reason), name=name, daemon=True).start()
            case AbortTransfer(transfer=transfer, reason=reason):
                self.abort(transfer, reason)

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer in either direction."""
        incoming = self.incoming(transfer)
        for outgoing in self.outgoing(transfer):
            outgoing.abort(reason)
        if incoming is not None:
            incoming.abort(reason)

    def give_way(self, transfer: bytes) -> None:
        """Give up what waits for a place at its receiver."""
        for outgoing in self.outgoing(transfer):
            if not outgoing.granted:
                outgoing.abort("the receiver has no place for it, and other KV needs the memory that it lies in")

    # ---- for the engine -------------------------------------------------------------------------------------

    def send(self, outlet: Outlet, tokens: int) -> None:
        """Open a sending end for a prompt of `tokens`; the link is dialled at once, so that this hides behind the first
        layer. One that cannot be opened is reported as a transfer that has failed."""
        ticket = outlet.ticket
        try:
            if not self.shard.holds(outlet.slice):
                raise TransferError(f"{outlet.slice} is not held by this worker, which holds {self.shard}")
            link = self._sending_link(outlet)
            pacing = self.pacer.transfer(ticket.codec, tokens, outlet)
            with self._lock:  # its thread may be done, and want to say so, before this one is
                outgoing = PromptSender(outlet, link, self.shard, self._source, pacing, self._sent)
                self._outgoing.setdefault(ticket.transfer, {})[ticket.link] = outgoing
                self._sending.set()
        except TransferError as error:
            self._report(unopened_report(outlet, str(error)))

    def expect(self, inlets: Sequence[Inlet], tokens: int) -> None:
        """Open the receiving end for the first `tokens` positions of a prompt. Raises TransferError."""
        links = []
        for inlet in inlets:
            link = self._endpoint.link(inlet.link.link)
            if not isinstance(link, ReceiveLink) or link.ended is not None:
                link = self._endpoint.open_receiver(inlet.link)
            links.append((inlet, link))
        incoming = PromptReceiver(links, tokens, self.shard, self._staging, self._on_news)
        with self._lock:
            self._incoming[incoming.transfer] = incoming

    def start(self, incoming: PromptReceiver, first: int, find_slots: FindSlots) -> None:
        """The engine has blocks for a transfer's positions from `first` on: its senders may send. How far ahead of the
        decoding depends on what others may: all together fill no more memory than there is for them. Again is no
        matter."""
        if incoming.window_bytes:
            return
        limit = self._memory.host_bytes
        with self._lock:
            room = limit - sum(each.window_bytes for each in self._incoming.values())
        incoming.start(first, find_slots, min(limit // self._settings.grant_share, room))

    def outgoing(self, transfer: bytes) -> tuple[PromptSender, ...]:
        """The sending ends that are open."""
        with self._lock:
            return tuple(self._outgoing.get(transfer, {}).values())

    def incoming(self, transfer: bytes) -> PromptReceiver | None:
        """The receiving end, until it is closed."""
        with self._lock:
            return self._incoming.get(transfer)

    def decline(self, transfer: bytes) -> None:
        """All that was to come is here already: the senders may stop, and have not failed."""
        incoming = self.incoming(transfer)
        if incoming is not None:
            incoming.abort(PRESENT)
            self.close_incoming(transfer)

    def close_incoming(self, transfer: bytes) -> None:
        """Forget a receiving end whose KV has been applied or is no longer wanted."""
        with self._lock:
            incoming = self._incoming.pop(transfer, None)
        if incoming is not None:
            incoming.close()

    # ---- inside ---------------------------------------------------------------------------------------------

    def _set_paths(self, link: bytes, paths: tuple[DialPath, ...]) -> None:
        with self._lock:
            known = self._endpoint.link(link)
            if known is None:
                self._early_paths[link] = time.monotonic() + self._settings.early_paths_s, paths
                if len(self._early_paths) > self._settings.early_paths:
                    self._early_paths.popitem(last=False)
        if isinstance(known, SendLink):
            known.set_paths(paths)

    def _sending_link(self, outlet: Outlet) -> SendLink:
        """Open, over the paths of the outlet or those that the agent has set since."""
        with self._lock:
            until, paths = self._early_paths.pop(outlet.link.link, (0.0, outlet.paths))
            if time.monotonic() > until:
                paths = outlet.paths
            link = self._endpoint.link(outlet.link.link)
            if not isinstance(link, SendLink) or link.ended is not None:
                return self._endpoint.open_sender(outlet.link, paths)
        link.set_paths(paths)
        return link

    def _sent(self, report: TransferReport) -> None:
        with self._lock:
            links = self._outgoing.get(report.transfer, {})
            links.pop(report.link, None)
            if not links:
                self._outgoing.pop(report.transfer, None)
            if not self._outgoing:
                self._sending.clear()
        self._report(report)
        if not links:
            self._on_news()  # the blocks need not be held any longer

    def _tell(self) -> None:
        """Tell the agent how links with open transfers get on, while there are any."""
        blocked_s: dict[PromptSender, float] = {}
        interval_s = self._settings.report_s
        while True:
            self._sending.wait()
            with self._lock:
                outgoing = [each for links in self._outgoing.values() for each in links.values()]
            for link in {each.link.ticket.link: each.link for each in outgoing}.values():
                self._report(link_report(link, [each for each in outgoing if each.link is link], blocked_s, interval_s))
            blocked_s = {each: each.progress().blocked_s for each in outgoing}
            time.sleep(interval_s)
