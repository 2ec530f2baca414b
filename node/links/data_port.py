"""Bulk connections that arrive at the node's port: each says in its first bytes what it is, and goes where it belongs.

p2pKV   a connection of a KV link,
        or of a pipe to a stage     -> the engine process, with its hello
p2pKR   something to be forwarded   -> the relay
p2pBW   one of a bandwidth burst    -> the prober
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple, final

import trio

from ...bootstrap import Address, NetworkError, PeerId, RemoteError, Role
from ...bootstrap.addresses import may_be_relayed_to
from ...bootstrap.methods import Messenger
from ...bootstrap.streams.shared_port import wake_for
from ...bootstrap.streams.strangers import Origin, Strangers
from ...kvtransport.errors import TransferError
from ...kvtransport.link.relay import Relay
from ...kvtransport.probing.figures import bytes_per_s
from ...kvtransport.wire.permits import PERMIT_ID_BYTES, Permit
from .. import messages
from ..methods import RELAY_OPEN
from ..settings import WAN, BoxLinkSettings, NodeTuning
from .permit_book import PermitBook

_log = logging.getLogger(__name__)

UNBOUNDED_BYTES_S = 1e12
UNBOUNDED_BYTES = 1 << 60
_SECRET_BYTES = 32

ProveAddress = Callable[[PeerId, Address, Callable[[str], bool]], Awaitable[Address]]


class _Proof(NamedTuple):
    announced: Address
    proved: Address | None  # None: its node was not there
    until: float


class Around(NamedTuple):
    """How a relay leads to members for whom `is_closed`, as nobody can dial them: `connect` gets a connection to the
    port of one that this node is connected with. It is for threads, and raises OSError."""

    is_closed: Callable[[PeerId], bool]
    is_connected: Callable[[PeerId], bool]
    connect: Callable[[PeerId], socket.socket]


@final
class RelayDesk:
    """Hands out permits for this node's relay, to members and for members only: to where they have proved their keys,
    and nowhere into what only this box can reach. `own`: the host that this box announces. `around`: how it leads
    to those that nobody can dial; without, to none of them."""

    def __init__(
        self,
        relay: Relay,
        links: BoxLinkSettings,
        *,
        messenger: Messenger,
        where: Callable[[PeerId], Address | None],
        prove: ProveAddress,
        own: str,
        around: Around | None = None,
        tuning: NodeTuning = WAN,
    ) -> None:
        self.own = messenger.peer_id
        self._around = around
        self._relay = relay
        self._links = links
        self._where = where
        self._prove = prove
        self._own = own
        self._tuning = tuning
        self._book = PermitBook(tuning.permits, tuning.permits_each)
        self._proofs: dict[PeerId, _Proof] = {}
        self._asking: set[PeerId] = set()  # those for whom an address is being proved
        messenger.handle(RELAY_OPEN, self.on_open)

    def __repr__(self) -> str:
        return f"<RelayDesk {self._book} proofs={len(self._proofs)}>"

    async def on_open(self, peer: PeerId, role: Role, body: messages.RelayOpen) -> messages.RelayOpened:
        """A node wants its KV forwarded to `body.target`."""
        box, target, is_client = self._links.box, PeerId(body.target), role is Role.CLIENT
        announced = self._where(target)
        if announced is None or not announced.port:
            raise RemoteError("unknown-target", f"this node knows no member {target} that could be dialled")
        if box.relay_gbps == 0 or box.relay_budget_bytes == 0:
            raise RemoteError("no-relay", "this node forwards nothing for others")
        is_closed = self._around is not None and self._around.is_closed(target)
        if is_client and not is_closed:
            raise RemoteError("forbidden", "clients dial members that can be dialled")
        if is_closed and self._around is not None and not self._around.is_connected(target):
            raise RemoteError("unreachable-target", f"nobody can dial {target}, and it is not connected with this node")
        proved = announced if is_closed else await self._proved_address(peer, target, announced)
        budget = box.relay_budget_bytes or self._tuning.permit_bytes
        if is_closed and not box.relay_budget_bytes:  # as much in a second as any other: it only lives longer
            budget = int(budget * self._tuning.around_life_s / self._tuning.permit_life_s)
        rate = bytes_per_s(box.relay_gbps) if box.relay_gbps else UNBOUNDED_BYTES_S
        if is_client:
            budget, rate = min(budget, self._tuning.client_bytes), min(rate, self._tuning.client_bytes_s)
        return messages.RelayOpened(permit=self._issue(peer, target, proved, budget, rate, is_closed=is_closed))

    def permit_own(self, target: PeerId) -> Permit:
        """For what this node itself sends to a member that nobody can dial. Raises RemoteError."""
        announced = self._where(target)
        if announced is None or not announced.port:
            raise RemoteError("unknown-target", f"this node knows no member {target} that could be dialled")
        return self._issue(self.own, target, announced, UNBOUNDED_BYTES, UNBOUNDED_BYTES_S, is_closed=True)

    def _issue(
        self, owner: PeerId, target: PeerId, at: Address, budget: int, bytes_s: float, *, is_closed: bool
    ) -> Permit:
        now = time.monotonic()
        life_s = self._tuning.around_life_s if is_closed else self._tuning.permit_life_s
        permit = Permit(
            permit=secrets.token_bytes(PERMIT_ID_BYTES),
            secret=secrets.token_bytes(_SECRET_BYTES),
            next_host=at.host,
            next_port=at.port,
            byte_budget=budget,
            bytes_per_s=bytes_s,
            expires_at=now + life_s,
        )
        self._revoke(self._book.add(owner, target, permit.permit, permit.expires_at, now))
        try:
            if is_closed and self._around is not None:
                # What goes from here to different boxes does not share the connections that one asker may have.
                name = f"{owner} > {target}" if owner == self.own else owner
                self._relay.admit(permit, owner=name, connect=partial(self._around.connect, target))
            else:
                self._relay.admit(permit, owner=owner)
        except TransferError as error:
            raise RemoteError("busy", str(error)) from error
        return permit

    def keep(self, present: Collection[PeerId]) -> None:
        """These are the members now: permits of and to others end."""
        self._revoke(self._book.keep({self.own, *present}))
        self._proofs = {peer: proof for peer, proof in self._proofs.items() if peer in present}

    async def _proved_address(self, asker: PeerId, target: PeerId, announced: Address) -> Address:
        """Where the target was met. Whoever asks costs one dial at a time, and none for what is known."""
        proof = self._proofs.get(target)
        if proof is None or proof.announced != announced or trio.current_time() >= proof.until:
            if asker in self._asking:
                raise RemoteError("busy", "another address is being proved for you; ask again when that is answered")
            self._asking.add(asker)
            proved: Address | None = None
            try:
                proved = await self._prove(target, announced, self._is_allowed)
            except NetworkError as error:
                _log.info("nothing is forwarded to %s for %s: %s", target, asker, error)
            finally:
                self._asking.discard(asker)
            proof = self._proofs[target] = _Proof(announced, proved, trio.current_time() + self._tuning.proof_s)
        if proof.proved is None:
            raise RemoteError("unreachable-target", f"{target} was not met at {announced}, or that address is private")
        return proof.proved

    def _is_allowed(self, host: str) -> bool:
        return may_be_relayed_to(host, self._own, private=self._links.relay_private)

    def _revoke(self, permits: Iterable[bytes]) -> None:
        for permit in permits:
            self._relay.revoke(permit)


class _Door(NamedTuple):
    hello_bytes: int
    take: Callable[[bytes, socket.socket], bool]


@final
class DataPort:
    """Sorts bulk connections by their first bytes; unexpected ones are closed. `accept` runs in the
    event loop and neither blocks nor raises."""

    def __init__(self, nursery: trio.Nursery, tuning: NodeTuning = WAN) -> None:
        self._nursery = nursery
        self._tuning = tuning
        self._doors: dict[bytes, _Door] = {}
        self._pending = Strangers[trio.CancelScope](tuning.pending_hellos)

    def __repr__(self) -> str:
        return f"<DataPort undecided={len(self._pending)}>"

    def open_door(self, magic: bytes, hello_bytes: int, take: Callable[[bytes, socket.socket], bool]) -> None:
        """From now on `take(hello, connection)` gets connections that begin with this, and says whether it keeps them.
        It raises TransferError for a hello that is none."""
        self._doors[magic] = _Door(hello_bytes, take)

    def accept(self, connection: socket.socket, head: bytes, origin: Origin) -> None:
        """A connection has arrived; `head` are its first eight bytes, peeked at. Its hello may take a while."""
        scope = trio.CancelScope()
        too_many = self._pending.add(scope, origin, trio.current_time())
        if too_many is not None:
            too_many.cancel()
        self._nursery.start_soon(self._sort, connection, head, scope)

    async def _sort(self, connection: socket.socket, head: bytes, scope: trio.CancelScope) -> None:
        is_taken = False
        try:
            door = self._doors.get(head)
            with scope, trio.move_on_after(self._tuning.hello_s):
                if door is not None:
                    hello = await read_hello(connection, door.hello_bytes, self._tuning.hello_poll_s)
                    is_taken = door.take(hello, connection)
        except (TransferError, OSError):
            pass  # whoever it was did not speak the protocol; a real peer reports the failure
        finally:
            self._pending.remove(scope)
            if not is_taken:
                connection.close()


async def read_hello(connection: socket.socket, size: int, poll_s: float = WAN.hello_poll_s) -> bytes:
    """Exactly the first `size` bytes, without a thread: strangers may connect and say nothing. The socket blocks again
    afterwards. Raises OSError when the connection ends before."""
    connection.setblocking(False)
    with wake_for(connection, size):
        while True:
            await trio.lowlevel.wait_readable(connection)
            ended = _ended(connection)  # before the look: what comes between the two is seen
            seen = len(connection.recv(size, socket.MSG_PEEK))
            if seen == size:
                break
            if seen == 0 or ended:
                raise ConnectionResetError("the connection ended before its hello was complete")
            await trio.sleep(poll_s)  # where the kernel wakes for less all the same, as it does for pairs of sockets
    data = connection.recv(size)
    connection.setblocking(True)
    return data


def _ended(connection: socket.socket) -> bool:
    """Whether nothing will follow what has come: peeking does not tell while some of it is unread."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
