"""Which KV links this node's engine has: those it takes KV on, and those it sends over, one for each two workers.

A link's ticket is agreed between the two nodes at its ends on their control stream, once, and serves every
transfer between two workers of their engines; no gateway sees its secret. A link belongs to one life of the receiving
engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, final

import trio

from ...bootstrap import PeerId
from ...kvtransport.wire.tickets import LinkTicket, issue_link
from ..engine.protocol import WorkerRank


class Ends(NamedTuple):
    """Between whom a link is: the node at the other end, and the workers that send and receive."""

    peer: PeerId
    source: WorkerRank
    target: WorkerRank


Ask = Callable[[Ends], Awaitable[LinkTicket]]


@final
class IncomingLinks:
    """Links on which other nodes may push KV into this node's engine."""

    def __init__(self, random: Callable[[int], bytes], lease_s: float) -> None:
        self._random = random
        self._lease_s = lease_s
        self._tickets: dict[Ends, LinkTicket] = {}

    def __repr__(self) -> str:
        return f"<IncomingLinks {len(self._tickets)}>"

    def of(self, ends: Ends) -> LinkTicket:
        """The link of this sender, made when it is first asked for."""
        ticket = self._tickets.get(ends)
        if ticket is None:
            ticket = self._tickets[ends] = issue_link(self._lease_s, self._random)
        return ticket

    def knows(self, link: bytes) -> bool:
        """Whether a connection that names this link is expected."""
        return any(ticket.link == link for ticket in self._tickets.values())

    def forget_peer(self, peer: PeerId) -> list[LinkTicket]:
        """A sending node is gone for good; returns the links that end with it."""
        return [self._tickets.pop(ends) for ends in list(self._tickets) if ends.peer == peer]

    def forget_all(self) -> None:
        """The engine is gone, and with it the receiving end of every link."""
        self._tickets.clear()


@final
class OutgoingLinks:
    """Links over which this node's engine pushes KV. `ask` requests one from a node (raises NetworkError)."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[Ends, tuple[int, LinkTicket]] = {}
        self._asking: dict[Ends, trio.Lock] = {}

    def __repr__(self) -> str:
        return f"<OutgoingLinks {len(self._known)}>"

    async def to(self, ends: Ends, life: int) -> LinkTicket:
        """The link to a worker of this node's engine; `life` counts the engine's starts. Several callers share one
        question."""
        lock = self._asking.setdefault(ends, trio.Lock())
        async with lock:
            known = self._known.get(ends)
            if known is None or known[0] != life:
                known = self._known[ends] = (life, await self._ask(ends))
            return known[1]

    def forget(self, ends: Ends) -> None:
        """The link does not work any more: the next transfer asks for a new one."""
        self._known.pop(ends, None)

    def forget_peer(self, peer: PeerId) -> list[LinkTicket]:
        """A node is gone; returns the links that ended with it."""
        return [self._known.pop(ends)[1] for ends in list(self._known) if ends.peer == peer]

    def forget_all(self) -> None:
        """This node's engine is gone: a new one begins with new links."""
        self._known.clear()
