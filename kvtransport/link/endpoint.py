"""All links of one process, found by link id."""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from ..errors import TransferError
from ..wire.channel import Channel, LinkHello
from ..wire.dial_path import DialPath
from ..wire.tickets import LinkTicket
from .budget import ByteBudget
from .links import LinkStatistics
from .receive_link import ReceiveLink
from .send_link import SendLink
from .settings import LinkSettings

_MAX_EARLY = 256


class Endpoint:
    """The links of a process, and the memory bound that senders share. A connection before its link
    is kept for `settings.early_s`; of more than 256 the oldest goes."""

    def __init__(self, *, settings: LinkSettings | None = None) -> None:
        self.settings = LinkSettings() if settings is None else settings
        self.budget = ByteBudget(self.settings.limit_bytes)
        self.make_channel: Callable[..., Channel] = Channel  # for tests that look between seal and send
        self._lock = threading.Lock()
        self._links: dict[bytes, SendLink | ReceiveLink] = {}
        self._early: OrderedDict[int, tuple[float, LinkHello, socket.socket]] = OrderedDict()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Endpoint links={len(self._links)} {self.budget}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def open_sender(self, ticket: LinkTicket, paths: Sequence[DialPath] = ()) -> SendLink:
        """The sending end of a link, which dials `paths` in the background."""
        with self._lock:
            self._require_new(ticket)
            link = SendLink(ticket, paths, self.settings, self.budget, self.make_channel)
            self._links[ticket.link] = link
        self._attach_early(link)
        return link

    def open_receiver(self, ticket: LinkTicket, paths: Sequence[DialPath] = ()) -> ReceiveLink:
        """The receiving end of a link; `paths` only if it is this end that dials."""
        with self._lock:
            self._require_new(ticket)
            link = ReceiveLink(ticket, paths, self.settings)
            self._links[ticket.link] = link
        self._attach_early(link)
        return link

    def link(self, link: bytes) -> SendLink | ReceiveLink | None:
        """The link of that id, unless it is over."""
        with self._lock:
            self._sweep()
            return self._links.get(link)

    def attach(self, hello: LinkHello, sock: socket.socket) -> None:
        """Take over the socket of an accepted connection to this process, its hello read."""
        unwanted: list[socket.socket] = []
        with self._lock:
            unwanted += self._sweep()
            link = self._links.get(hello.link)
            if self._closed:
                unwanted.append(sock)
            elif link is None:
                self._early[id(sock)] = (time.monotonic(), hello, sock)
                if len(self._early) > _MAX_EARLY:
                    unwanted.append(self._early.popitem(last=False)[1][2])
        for each in unwanted:
            each.close()
        if link is not None and not self._closed:
            link.attach(sock, hello)

    def forget(self, link: bytes, reason: str = "") -> None:
        """Close a link."""
        with self._lock:
            known = self._links.pop(link, None)
        if known is not None:
            known.close(reason)

    def statistics(self) -> tuple[LinkStatistics, ...]:
        """One entry for each link."""
        with self._lock:
            links = list(self._links.values())
        return tuple(link.statistics() for link in links)

    def check_integrity(self) -> None:
        """Every link holds what its transfers hold, and they hold together what the budget says."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.check_integrity()
        if not any(link.statistics().transfers for link in links) and self.budget.held:
            raise AssertionError(f"nothing is under way, and {self.budget} ")

    def close(self, reason: str = "") -> None:
        """Close every link."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            sockets = [sock for _, _, sock in self._early.values()]
            self._links.clear()
            self._early.clear()
        for sock in sockets:
            sock.close()
        for link in links:
            link.close(reason)

    def _require_new(self, ticket: LinkTicket) -> None:
        if self._closed:
            raise TransferError("this endpoint is closed")
        known = self._links.get(ticket.link)
        if known is not None and known.ended is None:
            raise TransferError(f"link {ticket.link.hex()} is open already")

    def _attach_early(self, link: SendLink | ReceiveLink) -> None:
        with self._lock:
            found = [key for key, (_, hello, _) in self._early.items() if hello.link == link.ticket.link]
            mine = [self._early.pop(key) for key in found]
        for _, hello, sock in mine:
            link.attach(sock, hello)

    def _sweep(self) -> list[socket.socket]:
        """Forget links that are over; return early connections nobody came for."""
        for key in [key for key, link in self._links.items() if link.ended is not None]:
            del self._links[key]
        now = time.monotonic()
        late = [key for key, (since, _, _) in self._early.items() if now - since > self.settings.early_s]
        return [self._early.pop(key)[2] for key in late]
