"""The open transfers of one process and the links that they take: what the agent and the engine want of them."""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from ....kvtransport.errors import KVProtocolError, TransferError
from ....kvtransport.link.endpoint import Endpoint
from ....kvtransport.link.receive_link import ReceiveLink
from ....kvtransport.link.send_link import SendLink
from ....kvtransport.link.settings import LinkSettings
from ....kvtransport.wire.channel import parse_link_hello
from ....kvtransport.wire.dial_path import DialPath
from ..protocol import AbortTransfer, CloseLink, Inlet, LinkReport, Outlet, PathReport, SetLinkPaths, TransferReport
from ..settings import TransferSettings
from .sender import SendReport, TransferSender

Tell = Callable[[TransferReport | LinkReport], None]


class OpenReceiver(Protocol):
    """The receiving end of a transfer."""

    def abort(self, reason: str) -> None:
        """No more is wanted."""


S = TypeVar("S", bound=TransferSender)
R = TypeVar("R", bound=OpenReceiver)


class OpenTransfers(ABC, Generic[S, R]):
    """All transfers of a process, found by transfer id, and their links, which hold at most `limit_bytes` together.

    `report` is called by threads of this: with the end of everything that is sent, once for each link of a transfer,
    and several times a second with how each link gets on that has a transfer.
    """

    def __init__(self, limit_bytes: int, report: Tell, settings: TransferSettings) -> None:
        self.endpoint = Endpoint(settings=LinkSettings(limit_bytes=limit_bytes))
        self._limit_bytes = limit_bytes
        self._report = report
        self._settings = settings
        self._lock = threading.Lock()
        self._outgoing: dict[bytes, dict[bytes, S]] = {}  # transfer -> link -> what goes over it
        self._incoming: dict[bytes, R] = {}
        self._early_paths: OrderedDict[bytes, tuple[float, tuple[DialPath, ...]]] = OrderedDict()  # link -> until when
        self._is_sending = threading.Event()
        threading.Thread(target=self._report_links, name="kv-reporter", daemon=True).start()

    def __repr__(self) -> str:
        counts = f"sending={len(self._outgoing)} receiving={len(self._incoming)}"
        return f"<{type(self).__name__} {counts} {self.endpoint}>"

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """Take an accepted socket whose hello has been read; it may come before its link is known here."""
        try:
            self.endpoint.attach(parse_link_hello(hello), connection)
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
                threading.Thread(target=self.endpoint.forget, args=(link, reason), name=name, daemon=True).start()
            case AbortTransfer(transfer=transfer, reason=reason):
                self.abort(transfer, reason)

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer in either direction."""
        incoming = self.incoming(transfer)
        for outgoing in self.outgoing(transfer):
            outgoing.abort(reason)
        if incoming is not None:
            incoming.abort(reason)

    def outgoing(self, transfer: bytes) -> tuple[S, ...]:
        """The sending ends of a transfer that are open, one for each link."""
        with self._lock:
            return tuple(self._outgoing.get(transfer, {}).values())

    def incoming(self, transfer: bytes) -> R | None:
        """The receiving end, until it is closed."""
        with self._lock:
            return self._incoming.get(transfer)

    def close_incoming(self, transfer: bytes) -> R | None:
        """Forget a receiving end whose KV has been taken or is no longer wanted."""
        with self._lock:
            return self._incoming.pop(transfer, None)

    # ---- for subclasses -------------------------------------------------------------------------------------

    def _open_sender(
        self, outlet: Outlet, make: Callable[[SendLink, SendReport], S], on_end: Callable[[], None]
    ) -> None:
        """Open a sending end; the link is dialled at once. One that cannot be opened is reported as a transfer that has
        failed. `on_end` is called after the report, by some thread."""
        ticket = outlet.ticket

        def end(sent: TransferReport) -> None:
            with self._lock:
                links = self._outgoing.get(ticket.transfer, {})
                links.pop(ticket.link, None)
                if not links:
                    self._outgoing.pop(ticket.transfer, None)
                if not self._outgoing:
                    self._is_sending.clear()
            self._report(sent)
            on_end()

        try:
            link = self._sending_link(outlet)
            with self._lock:  # its thread may be done, and want to say so, before this one is
                outgoing = make(link, end)
                self._outgoing.setdefault(ticket.transfer, {})[ticket.link] = outgoing
                self._is_sending.set()
        except TransferError as error:
            failed = TransferReport(
                transfer=ticket.transfer, link=ticket.link, mode=outlet.pacing, delivered=False, reason=str(error)
            )
            self._report(failed)
            on_end()

    def _open_receiver(self, inlets: Sequence[Inlet], make: Callable[[Sequence[tuple[Inlet, ReceiveLink]]], R]) -> R:
        """Open the receiving end of a transfer. Raises TransferError."""
        links = []
        for inlet in inlets:
            link = self.endpoint.link(inlet.link.link)
            if not isinstance(link, ReceiveLink) or link.ended is not None:
                link = self.endpoint.open_receiver(inlet.link)
            links.append((inlet, link))
        incoming = make(links)
        with self._lock:
            self._incoming[inlets[0].ticket.transfer] = incoming
        return incoming

    # ---- inside ---------------------------------------------------------------------------------------------

    def _set_paths(self, link: bytes, paths: tuple[DialPath, ...]) -> None:
        with self._lock:
            known = self.endpoint.link(link)
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
            link = self.endpoint.link(outlet.link.link)
            if not isinstance(link, SendLink) or link.ended is not None:
                return self.endpoint.open_sender(outlet.link, paths)
        link.set_paths(paths)
        return link

    def _report_links(self) -> None:
        """Tell the agent how links with open transfers get on, while there are any."""
        blocked_s: dict[TransferSender, float] = {}
        interval_s = self._settings.report_s
        while True:
            self._is_sending.wait()
            with self._lock:
                outgoing = [each for links in self._outgoing.values() for each in links.values()]
            for link in {each.link.ticket.link: each.link for each in outgoing}.values():
                senders = [each for each in outgoing if each.link is link]
                self._report(_describe_link(link, senders, blocked_s, interval_s))
            blocked_s = {each: each.progress().blocked_s for each in outgoing}
            time.sleep(interval_s)


def _describe_link(
    link: SendLink, senders: Iterable[TransferSender], blocked_s: Mapping[TransferSender, float], interval_s: float
) -> LinkReport:
    """How a link gets on. `blocked_s`: waits for credit at the report `interval_s` ago."""
    progress = {each: each.progress() for each in senders}
    # Until its first credit a transfer sends nothing, and no path is to blame; but without a connection that is up
    # nobody knows what the receiver has to say.
    blocked = [
        link.connections > 0
        and (
            each.blocked_s - blocked_s.get(sender, 0.0) > interval_s / 2
            or (each.bytes_queued > 0 and each.first_sent_at is None)
        )
        for sender, each in progress.items()
    ]
    return LinkReport(
        link=link.ticket.link,
        paths=tuple(
            PathReport(
                path.label,
                path.connections,
                path.bytes_acknowledged,
                path.bytes_in_flight,
                path.rate_bytes_s,
                path.rtt_s,
            )
            for path in link.statistics().paths.values()
        ),
        transfers=len(progress),
        waiting_bytes=sum(max(0, each.bytes_queued - each.bytes_acknowledged) for each in progress.values()),
        blocked=all(blocked),
    )
