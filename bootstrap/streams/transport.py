"""What the network needs from below: authenticated, ordered, long-lived control streams.

:mod:`.libp2p_host` (TCP) and :mod:`.memory` (tests, simulation) keep the same contract."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from ..addresses import Address
from ..trust.keys import PeerId
from .strangers import IsMemberHost

_log = logging.getLogger(__name__)

CONTROL_PROTOCOL: Final = "/p2pserve/ctl/1"
DATA_PREFIX: Final = b"p2p"  # how every bulk-data socket begins; what follows says of which kind it is
DATA_HEAD_BYTES: Final = 8  # prefix, kind and version, such as b"p2pKV/2\n"


class PeerConnection(Protocol):
    """The only control stream to a peer that has proved the key of :attr:`peer`.

    Frames arrive whole, in order, at most once; lost only when the connection dies. Any call may be
    cancelled and leaves the connection usable."""

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        ...

    @property
    def remote(self) -> Address | None:
        """The address packets come from (behind a mapping this is not where the peer listens)."""
        ...

    async def send(self, frame: bytes) -> None:
        """Queue a frame of at most 4 MiB, waiting while the queue is full. PeerLost when closed."""
        ...

    def send_nowait(self, frame: bytes) -> None:
        """The same without waiting: raises ``trio.WouldBlock`` when the queue is full."""
        ...

    async def receive(self) -> bytes:
        """The next frame. Raises PeerLost once the connection is closed and everything before was
        taken. One receiver at a time, and it must keep receiving: a peer that is not read for
        five seconds is cut off."""
        ...

    def admit(self) -> None:
        """Whoever dialled us was let in. Until then its frames may have 128 KiB, and few of them
        are kept; and the transport may turn others away. Nothing happens on a connection that was
        dialled here."""
        ...

    async def aclose(self) -> None:
        """Send what is queued (for a bounded time), then close. Safe to call again."""
        ...


ConnectionHandler = Callable[[PeerConnection], Awaitable[None]]


def knows_nobody(host: str) -> bool:
    """An :data:`.strangers.IsMemberHost` to whom everybody is a stranger."""
    return False


class Transport(Protocol):
    """Dials and accepts. One object is served once."""

    @property
    def peer_id(self) -> PeerId:
        """Our own id, which the other side has proof of."""
        ...

    async def dial(self, address: Address, peer_id: PeerId) -> PeerConnection:
        """Connect to exactly this peer at this address, within
        :attr:`..settings.TransportSettings.dial_s`.

        Raises Unreachable when nobody, or somebody else, answers. Two dials give two connections.
        Needs a running :meth:`serve`."""
        ...

    async def dial_over(self, stream: trio.SocketStream, address: Address, peer_id: PeerId) -> PeerConnection:
        """The same over a TCP connection that is there already and leads to this peer, whose own
        address this is. It is closed where that fails, with Unreachable."""
        ...

    async def identify(self, address: Address) -> PeerId:
        """Who answers at this address, proved by its key. Raises Unreachable. Needs a running
        :meth:`serve`."""
        ...

    async def serve(
        self,
        on_connection: ConnectionHandler,
        is_member_host: IsMemberHost = knows_nobody,
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept connections until cancelled; ``task_status`` gets the address to announce, its
        port never 0. When too many strangers are connected, room is kept for hosts of members.

        Opens its own nursery. ``on_connection`` runs in a task of its own for each connection
        that somebody else dialled, and that connection is closed when it returns. Its errors are
        logged and cost only that connection. Raises PortInUse or AddressError before it has
        started. When it ends, all its connections are closed.
        """
        ...


async def run_handler(on_connection: ConnectionHandler, connection: PeerConnection) -> None:
    """Let a connection's handler run to its end. Its own failure is reported here and costs only
    this connection: whoever is at its other end must never be able to stop the others from being
    served."""
    try:
        await on_connection(connection)
    except Exception:
        _log.exception("the handler of a connection to %s failed", connection.peer)
