"""Bulk connections that arrive at the node's port: each says in its first bytes what it is, and goes where it belongs.

p2pKV   a connection of a KV link,
        or of a pipe to a stage     -> the engine process, with its hello
p2pKR   something to be forwarded   -> the relay
p2pBW   one of a bandwidth burst    -> the prober
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, final

import trio

from ...bootstrap import Address, PeerId, RemoteError, Role
from ...bootstrap.methods import Messenger
from ...kvtransport.errors import TransferError
from ...kvtransport.link.relay import Relay
from ...kvtransport.probing.figures import BoxFigures, bytes_per_s
from ...kvtransport.wire.permits import PERMIT_ID_BYTES, RELAY_MAGIC, Permit
from .. import messages
from ..methods import RELAY_OPEN
from ..settings import WAN, NodeTuning

UNBOUNDED_BYTES_S = 1e12
_SECRET_BYTES = 32


@final
class RelayDesk:
    """Hands out permits for this node's relay, to members and for members only."""

    def __init__(
        self,
        relay: Relay,
        box: BoxFigures,
        *,
        messenger: Messenger,
        where: Callable[[PeerId], Address | None],
        tuning: NodeTuning = WAN,
    ) -> None:
        self._relay = relay
        self._box = box
        self._where = where
        self._tuning = tuning
        messenger.handle(RELAY_OPEN, self.on_open)

    async def on_open(self, peer: PeerId, role: Role, body: messages.RelayOpen) -> messages.RelayOpened:
        """A node wants its KV forwarded to `body.target`."""
        target = self._where(PeerId(body.target))
        if target is None or not target.port:
            raise RemoteError("unknown-target", f"this node knows no member {body.target} that could be dialled")
        if self._box.relay_gbps == 0 or self._box.relay_budget_bytes == 0:
            raise RemoteError("no-relay", "this node forwards nothing for others")
        permit = Permit(
            permit=secrets.token_bytes(PERMIT_ID_BYTES),
            secret=secrets.token_bytes(_SECRET_BYTES),
            next_host=target.host,
            next_port=target.port,
            byte_budget=self._box.relay_budget_bytes or self._tuning.permit_bytes,
            bytes_per_s=bytes_per_s(self._box.relay_gbps) if self._box.relay_gbps else UNBOUNDED_BYTES_S,
            expires_at=time.monotonic() + self._tuning.permit_life_s,
        )
        try:
            self._relay.admit(permit)
        except TransferError as error:
            raise RemoteError("busy", str(error)) from error
        return messages.RelayOpened(permit=permit)


class _Door(NamedTuple):
    hello_bytes: int
    take: Callable[[bytes, socket.socket], bool]


@final
class DataPort:
    """Sorts bulk connections by their first bytes; unexpected ones are closed. `accept` runs in the
    event loop and neither blocks nor raises."""

    def __init__(self, nursery: trio.Nursery, relay: Relay, tuning: NodeTuning = WAN) -> None:
        self._nursery = nursery
        self._relay = relay
        self._tuning = tuning
        self._doors: dict[bytes, _Door] = {}
        self._pending = 0

    def __repr__(self) -> str:
        return f"<DataPort undecided={self._pending} {self._relay}>"

    def open_door(self, magic: bytes, hello_bytes: int, take: Callable[[bytes, socket.socket], bool]) -> None:
        """From now on `take(hello, connection)` gets connections that begin with this, and says whether it keeps them.
        It raises TransferError for a hello that is none."""
        self._doors[magic] = _Door(hello_bytes, take)

    def accept(self, connection: socket.socket, head: bytes) -> None:
        """A connection has arrived; `head` are its first eight bytes, peeked at. Its hello may take a while."""
        if self._pending >= self._tuning.max_pending_hellos:
            connection.close()
            return
        if head == RELAY_MAGIC:
            self._relay.attach(connection)
            return
        self._pending += 1
        self._nursery.start_soon(self._sort, connection, head)

    async def _sort(self, connection: socket.socket, head: bytes) -> None:
        is_taken = False
        try:
            door = self._doors.get(head)
            with trio.move_on_after(self._tuning.hello_s):
                if door is not None:
                    hello = await read_hello(connection, door.hello_bytes, self._tuning.hello_poll_s)
                    is_taken = door.take(hello, connection)
        except (TransferError, OSError):
            pass  # whoever it was did not speak the protocol; a real peer reports the failure
        finally:
            self._pending -= 1
            if not is_taken:
                connection.close()


async def read_hello(connection: socket.socket, size: int, poll_s: float = WAN.hello_poll_s) -> bytes:
    """Exactly the first `size` bytes, without a thread: strangers may connect and say nothing. The socket blocks again
    afterwards. Raises OSError when the connection ends before."""
    connection.setblocking(False)
    while True:
        await trio.lowlevel.wait_readable(connection)
        ended = _ended(connection)  # before the look: what comes between the two is seen
        seen = len(connection.recv(size, socket.MSG_PEEK))
        if seen == size:
            break
        if seen == 0 or ended:
            raise ConnectionResetError("the connection ended before its hello was complete")
        await trio.sleep(poll_s)  # readable, but not all of it yet: the kernel has no word for that
    data = connection.recv(size)
    connection.setblocking(True)
    return data


def _ended(connection: socket.socket) -> bool:
    """Whether nothing will follow what has come: peeking does not tell while some of it is unread."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
