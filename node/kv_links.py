"""Which KV links this node's engine has: those it takes KV on, one per sending node, and those it sends over.

A link's ticket is agreed between the two nodes at its ends on their control stream, once, and serves every
transfer between their engines; no gateway sees its secret. A link belongs to one life of the receiving engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

import trio

from ..bootstrap import PeerId
from ..kvtransport.tickets import LinkTicket, issue_link

LEASE_S = 600.0  # connections of a link that carries nothing for so long are closed; the next transfer dials again

Ask = Callable[[PeerId], Awaitable[LinkTicket]]


@final
class IncomingLinks:
    """Links on which other nodes may push KV into this node's engine."""

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self._random = random
        self._by_peer: dict[PeerId, LinkTicket] = {}
        self._owners: dict[bytes, PeerId] = {}

    def __repr__(self) -> str:
        return f"<IncomingLinks {len(self._by_peer)}>"

    def of(self, peer: PeerId) -> LinkTicket:
        """The link of this sender, made when it is first asked for."""
        ticket = self._by_peer.get(peer)
        if ticket is None:
            ticket = self._by_peer[peer] = issue_link(LEASE_S, self._random)
            self._owners[ticket.link] = peer
        return ticket

    def knows(self, link: bytes) -> bool:
        """Whether a connection that names this link is expected."""
        return link in self._owners

    def forget_peer(self, peer: PeerId) -> LinkTicket | None:
        """A sender is gone for good; returns the link that ends with it."""
        ticket = self._by_peer.pop(peer, None)
        if ticket is not None:
            del self._owners[ticket.link]
        return ticket

    def forget_all(self) -> None:
        """The engine is gone, and with it the receiving end of every link."""
        self._by_peer.clear()
        self._owners.clear()


@final
class OutgoingLinks:
    """Links over which this node's engine pushes KV. `ask` requests one from a node (raises NetworkError)."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[PeerId, tuple[int, LinkTicket]] = {}
        self._asking: dict[PeerId, trio.Lock] = {}

    def __repr__(self) -> str:
        return f"<OutgoingLinks {len(self._known)}>"

    async def to(self, peer: PeerId, life: int) -> LinkTicket:
        """The link to this node's engine; `life` counts the engine's starts. Several callers share one question."""
        lock = self._asking.setdefault(peer, trio.Lock())
        async with lock:
            known = self._known.get(peer)
            if known is None or known[0] != life:
                known = self._known[peer] = (life, await self._ask(peer))
            return known[1]

    def forget(self, peer: PeerId) -> LinkTicket | None:
        """The link does not work any more, or its node is gone: the next transfer asks for a new one."""
        known = self._known.pop(peer, None)
        return known[1] if known is not None else None

    def forget_all(self) -> None:
        """This node's engine is gone: a new one begins with new links."""
        self._known.clear()
