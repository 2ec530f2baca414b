"""All transfers and links of one worker process: what its connector and the agent talk to."""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import final

from ...kvtransport.channel import parse_link_hello
from ...kvtransport.dialling import Path
from ...kvtransport.endpoint import Endpoint
from ...kvtransport.errors import ProtocolError, TransferError
from ...kvtransport.lanes import LinkSettings
from ...kvtransport.receive_link import ReceiveLink
from ...kvtransport.send_link import SendLink
from .incoming import Incoming
from .layout import Shard
from .outgoing import PRESENT, Budget, Outgoing
from .pacing import Pacer
from .protocol import AbortTransfer, CloseLink, Inlet, LinkReport, Outlet, SetPaths, TransferReport
from .reports import REPORT_INTERVAL_S, link_report, not_opened

MAX_EARLY, EARLY_S = 256, 5.0  # links that are not open, of which new paths are kept, and for how long
ENCODED_BYTES = 64 << 20  # encoded and not yet confirmed, of all links together

Tell = Callable[[TransferReport | LinkReport], None]


@final
class TransferHub:
    """All transfers of a worker, found by transfer id, and the links they take.

    `report` is called by threads of the hub, with the end of everything that is sent, once for each link of a transfer,
    and several times a second with how each link gets on that has a transfer. `on_news` is called by them when the
    engine has something to do for what is received.
    """

    def __init__(
        self, shard: Shard, limit_bytes: int, report: Tell, on_news: Callable[[], None] = lambda: None
    ) -> None:
        self.shard = shard
        self._limit = limit_bytes
        self._report = report
        self._on_news = on_news
        self._budget = Budget(limit_bytes)
        self.pacer = Pacer(shard)
        self._endpoint = Endpoint(settings=LinkSettings(limit_bytes=min(limit_bytes, ENCODED_BYTES)))
        self._lock = threading.Lock()
        self._outgoing: dict[bytes, dict[bytes, Outgoing]] = {}  # transfer -> link -> what goes over it
        self._incoming: dict[bytes, Incoming] = {}
        self._early_paths: OrderedDict[bytes, tuple[float, tuple[Path, ...]]] = OrderedDict()  # link -> until when, ...
        self._sending = threading.Event()
        threading.Thread(target=self._tell, name="kv-reporter", daemon=True).start()

    def __repr__(self) -> str:
        return f"<TransferHub sending={len(self._outgoing)} receiving={len(self._incoming)} {self._endpoint}>"

    # ---- for the agent --------------------------------------------------------------------------------------

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """Hand over an accepted socket whose hello has been read; it may come before its link is known here."""
        try:
            self._endpoint.attach(parse_link_hello(hello), connection)
        except ProtocolError:
            connection.close()

    def carry_out(self, order: SetPaths | CloseLink | AbortTransfer) -> None:
        """What the agent wants of a link or a transfer. What is not known here is no matter; but paths are kept for a
        while, for a link that a step is about to open."""
        match order:
            case SetPaths(link=link, paths=paths):
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
                outgoing = Outgoing(outlet, link, self.shard, self._budget, pacing, self._sent)
                self._outgoing.setdefault(ticket.transfer, {})[ticket.link] = outgoing
                self._sending.set()
        except TransferError as error:
            self._report(not_opened(outlet, str(error)))

    def expect(self, inlets: Sequence[Inlet], tokens: int) -> None:
        """Open the receiving end for the first `tokens` positions of a prompt. Raises TransferError."""
        links = []
        for inlet in inlets:
            link = self._endpoint.link(inlet.link.link)
            if not isinstance(link, ReceiveLink) or link.ended is not None:
                link = self._endpoint.receiving(inlet.link)
            links.append((inlet, link))
        incoming = Incoming(links, tokens, self.shard, self._limit, self._on_news)
        with self._lock:
            self._incoming[incoming.transfer] = incoming

    def outgoing(self, transfer: bytes) -> tuple[Outgoing, ...]:
        """The sending ends that are open."""
        with self._lock:
            return tuple(self._outgoing.get(transfer, {}).values())

    def incoming(self, transfer: bytes) -> Incoming | None:
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
            self._incoming.pop(transfer, None)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _set_paths(self, link: bytes, paths: tuple[Path, ...]) -> None:
        with self._lock:
            known = self._endpoint.link(link)
            if known is None:
                self._early_paths[link] = time.monotonic() + EARLY_S, paths
                if len(self._early_paths) > MAX_EARLY:
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
                return self._endpoint.sending(outlet.link, paths)
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

    def _tell(self) -> None:
        """Tell the agent how links with open transfers get on, while there are any."""
        blocked_s: dict[Outgoing, float] = {}
        while True:
            self._sending.wait()
            with self._lock:
                outgoing = [each for links in self._outgoing.values() for each in links.values()]
            for link in {each.link.ticket.link: each.link for each in outgoing}.values():
                self._report(link_report(link, [each for each in outgoing if each.link is link], blocked_s))
            blocked_s = {each: each.progress().blocked_s for each in outgoing}
            time.sleep(REPORT_INTERVAL_S)
