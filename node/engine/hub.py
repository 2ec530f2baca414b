"""All transfers and links of one engine process: the one thing that its scheduler side, its worker side and the agent
talk to.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from ...kernels.codec import wire_dtype
from ...kvtransport.channel import parse_link_hello
from ...kvtransport.dialling import Path
from ...kvtransport.endpoint import Endpoint
from ...kvtransport.errors import ProtocolError
from ...kvtransport.lanes import LinkSettings
from ...kvtransport.receive_link import ReceiveLink
from ...kvtransport.send_link import SendLink
from ...kvtransport.tickets import LinkTicket, TransferTicket
from .pacing import Pacer
from .protocol import LinkReport, Outlet, PathReport, TransferReport
from .transfers import Budget, Geometry, Incoming, Outgoing

REPORT_INTERVAL_S = 0.25
ENCODED_BYTES = 64 << 20  # encoded and not yet confirmed, of all links together

Tell = Callable[[TransferReport | LinkReport], None]


class TransferHub:
    """All transfers of an engine process, found by transfer id, and the links they take.

    `report` is called by threads of the hub, with the end of each outgoing transfer, and several times a second with
    how each link gets on that has one.
    """

    def __init__(self, geometry: Geometry, limit_bytes: int, report: Tell) -> None:
        self._geometry = geometry
        self._limit = limit_bytes
        self._report = report
        self._budget = Budget(limit_bytes)
        self.pacer = Pacer(geometry.layers, geometry.heads, geometry.head_dim, wire_dtype(geometry.dtype))
        self._endpoint = Endpoint(settings=LinkSettings(limit_bytes=min(limit_bytes, ENCODED_BYTES)))
        self._lock = threading.Lock()
        self._outgoing: dict[bytes, Outgoing] = {}
        self._incoming: dict[bytes, Incoming] = {}
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

    def set_paths(self, link: bytes, paths: tuple[Path, ...]) -> None:
        """Take other ways from now on, also for what is under way."""
        known = self._endpoint.link(link)
        if isinstance(known, SendLink):
            known.set_paths(paths)

    def close_link(self, link: bytes, reason: str) -> None:
        """End a link, and what is open on it. Goodbyes are said by a thread: the engine's must not wait for them."""
        name = f"kv-close-{link.hex()[:8]}"
        threading.Thread(target=self._endpoint.forget, args=(link, reason), name=name, daemon=True).start()

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer in either direction."""
        outgoing, incoming = self.outgoing(transfer), self.incoming(transfer)
        if outgoing is not None:
            outgoing.abort(reason)
        if incoming is not None:
            incoming.abort(reason)

    # ---- for the engine -------------------------------------------------------------------------------------

    def send(self, ticket: TransferTicket, outlet: Outlet, tokens: int) -> None:
        """Open the sending end for a prompt of `tokens`; the link is dialled at once, so that this hides behind the
        first layer. Raises TransferError."""
        link = self._endpoint.link(outlet.link.link)
        if isinstance(link, SendLink) and link.ended is None:
            link.set_paths(outlet.paths)
        else:
            link = self._endpoint.sending(outlet.link, outlet.paths)
        pacing = self.pacer.transfer(ticket.codec, tokens, outlet)
        with self._lock:  # its thread may be done, and want to say so, before this one is
            self._outgoing[ticket.transfer] = Outgoing(ticket, link, self._budget, pacing, self._sent)
            self._sending.set()

    def expect(self, ticket: TransferTicket, inlet: LinkTicket, tokens: int) -> None:
        """Open the receiving end for the first `tokens` positions of a prompt. Raises TransferError."""
        link = self._endpoint.link(inlet.link)
        if not isinstance(link, ReceiveLink) or link.ended is not None:
            link = self._endpoint.receiving(inlet)
        incoming = Incoming(ticket, link, tokens, self._geometry, self._limit)
        with self._lock:
            self._incoming[ticket.transfer] = incoming

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

    # ---- inside ---------------------------------------------------------------------------------------------

    def _sent(self, report: TransferReport) -> None:
        with self._lock:
            self._outgoing.pop(report.transfer, None)
            if not self._outgoing:
                self._sending.clear()
        self._report(report)

    def _tell(self) -> None:
        """Tell the agent how links with open transfers get on, while there are any."""
        blocked_s: dict[bytes, float] = {}
        while True:
            self._sending.wait()
            with self._lock:
                outgoing = list(self._outgoing.values())
            for link in {each.link.ticket.link: each.link for each in outgoing}.values():
                self._report(_link_report(link, [each for each in outgoing if each.link is link], blocked_s))
            blocked_s = {each.ticket.transfer: each.progress().blocked_s for each in outgoing}
            time.sleep(REPORT_INTERVAL_S)


def _link_report(link: SendLink, transfers: list[Outgoing], blocked_s: dict[bytes, float]) -> LinkReport:
    """`blocked_s`: for how long each transfer had waited for credit at the last report."""
    progress = {each.ticket.transfer: each.progress() for each in transfers}
    # Until its first credit a transfer sends nothing, over connections that are up.
    blocked = [
        each.blocked_s - blocked_s.get(key, 0.0) > REPORT_INTERVAL_S / 2
        or (each.bytes_queued > 0 and each.first_sent_at is None and link.connections > 0)
        for key, each in progress.items()
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
        transfers=len(transfers),
        waiting_bytes=sum(max(0, each.bytes_queued - each.bytes_acknowledged) for each in progress.values()),
        blocked=all(blocked),
    )
