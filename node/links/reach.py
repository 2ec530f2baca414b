"""How this node gets a connection to the port of another one.

| the other one | this node | the way |
|---|---|---|
| can be dialled | any | it is dialled |
| cannot | can | it is asked to dial, and this node's own relay joins the two ends |
| cannot | cannot | a third one's relay, which asks it to dial |
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NamedTuple, final

import trio

from ...bootstrap import Address, NetworkError, PeerId, Role, Unreachable
from ...bootstrap.members.overlay import choose_neighbours
from ...bootstrap.members.states import Member, MemberState
from ...bootstrap.methods import Messenger
from ...bootstrap.network import Network
from ...bootstrap.streams.hosts import SMALL_SEGMENT_BYTES, open_connection
from ...kvtransport.wire.dial_path import DialPath
from ...kvtransport.wire.permits import Permit, pack_relay_hello
from ..messages import RelayOpen
from ..methods import RELAY_OPEN

_CLIENT: Final = Role.CLIENT

PathTo = Callable[[PeerId], Awaitable[DialPath]]
"""How to dial a member's port. Raises NetworkError."""


class ReachTimes(NamedTuple):
    """Seconds; as `NodeTuning` has them, which clients cannot import."""

    ask_s: float = 5.0
    around_life_s: float = 86_400.0
    permit_margin_s: float = 30.0
    narrow_s: float = 3600.0  # for how long a member is dialled with small segments that large ones did not reach


USUAL: Final = ReachTimes()


class _Known(NamedTuple):
    path: DialPath
    relay: PeerId | None  # None: this node's own
    until: float


def choose_relays(
    peer: PeerId, boxes: Collection[PeerId], closed: Collection[PeerId], connected: Collection[PeerId], full_mesh: int
) -> list[PeerId]:
    """Which members to ask for a connection to one that nobody can dial: those that it has sessions with, as its place
    in the overlay of these boxes says; of them first those that this node is connected with. None that is `closed`."""
    near = choose_neighbours(peer, {*boxes, peer}, full_mesh=full_mesh).difference(closed, {peer})
    return sorted(near, key=lambda each: (each not in connected, each))


@final
class Reach:
    """One per node.

    Args:
        where: what a member announces.
        is_closed: whether nobody can dial a member, or this node.
        permit_own: this node's relay's permit to such a member.
        relays: the members to ask, best first, to bring this node together with one.
        loopback: where this node's own port is dialled from this box.
    """

    def __init__(
        self,
        *,
        messenger: Messenger,
        where: Callable[[PeerId], Address | None],
        is_closed: Callable[[PeerId], bool],
        permit_own: Callable[[PeerId], Permit],
        relays: Callable[[PeerId], list[PeerId]],
        loopback: Address,
        times: ReachTimes = USUAL,
    ) -> None:
        self.own = messenger.peer_id
        self._messenger = messenger
        self._where = where
        self._is_closed = is_closed
        self._permit_own = permit_own
        self._relays = relays
        self._loopback = loopback
        self._times = times
        self._known: dict[PeerId, _Known] = {}
        self._narrow: dict[PeerId, float] = {}  # members that large packets do not reach -> until when that is believed

    def __repr__(self) -> str:
        return f"<Reach around {len(self._known)}, narrow={len(self._narrow)}>"

    def note_stuck(self, peer: PeerId) -> None:
        """A connection to this member was made, and nothing large got through: it is dialled with small segments from
        now on. Where something else was wrong, that costs little."""
        self._narrow[peer] = trio.current_time() + self._times.narrow_s

    async def path_to(self, peer: PeerId) -> DialPath:
        """How to dial this member's port, by one stream. Raises NetworkError."""
        address = self._address(peer)
        if not self._is_closed(peer):
            is_narrow = self._narrow.get(peer, 0.0) > trio.current_time()
            return DialPath(address.host, address.port, segment_bytes=SMALL_SEGMENT_BYTES if is_narrow else 0)
        known = self._known.get(peer)
        is_closed = self._is_closed(self.own)
        if known is not None and trio.current_time() < known.until and (known.relay is not None) is is_closed:
            return known.path
        if is_closed:
            return (await self._ask_relays(peer)).path
        here = self._loopback
        return self._remember(peer, DialPath(here.host, here.port, relay=self._permit_own(peer)), None).path

    async def dial_around(self, peer: PeerId) -> trio.SocketStream:
        """A connection to the port of a member that this node is not connected with. Raises NetworkError."""
        path = (await self._ask_relays(peer)).path  # anew: what was known did not keep the two together
        assert path.relay is not None
        try:
            with trio.fail_after(3 * self._times.ask_s):
                return await _open_relayed(path, path.relay)
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Unreachable(f"the relay at {path.host}:{path.port} does not answer") from error

    def keep(self, present: frozenset[PeerId]) -> None:
        """These are the members now."""
        self._known = {
            peer: known
            for peer, known in self._known.items()
            if peer in present and self._is_closed(peer) and (known.relay is None or known.relay in present)
        }
        self._narrow = {peer: until for peer, until in self._narrow.items() if peer in present}

    def _address(self, peer: PeerId) -> Address:
        address = self._where(peer)
        if address is None or not address.port:
            raise Unreachable(f"{peer} has no address that could be dialled")
        return address

    def _remember(self, peer: PeerId, path: DialPath, relay: PeerId | None) -> _Known:
        until = trio.current_time() + self._times.around_life_s - self._times.permit_margin_s
        known = self._known[peer] = _Known(path, relay, until)
        return known

    async def _ask_relays(self, peer: PeerId) -> _Known:
        """The first that permits it, which is remembered."""
        reasons: list[str] = []
        for relay in self._relays(peer):
            try:
                address = self._address(relay)
                answer = await self._messenger.request(relay, RELAY_OPEN, RelayOpen(target=peer), self._times.ask_s)
                return self._remember(peer, DialPath(address.host, address.port, relay=answer.permit), relay)
            except NetworkError as error:
                reasons.append(str(error))
        why = " | ".join(reasons) or "no member is connected with both"
        raise Unreachable(f"nobody can dial {peer}, and no relay leads there: {why}")


def lead_client_around(network: Network) -> None:
    """Let a client reach the members that nobody can dial through those that it can."""

    def find() -> dict[PeerId, Member]:
        states = (MemberState.ALIVE, MemberState.SUSPECT)
        return {each.peer_id: each for each in network.members() if each.state in states and each.role is not _CLIENT}

    def relays(peer: PeerId) -> list[PeerId]:
        boxes = find()
        closed = {each for each, member in boxes.items() if member.is_closed}
        return choose_relays(peer, boxes, closed, network.connected(), network.settings.full_mesh)

    def permit_own(peer: PeerId) -> Permit:
        raise Unreachable("a client has no relay of its own")

    reach = Reach(
        messenger=network,
        where=lambda peer: found.address if (found := find().get(peer)) is not None else None,
        is_closed=lambda peer: peer == network.peer_id or ((found := find().get(peer)) is not None and found.is_closed),
        permit_own=permit_own,
        relays=relays,
        loopback=network.address,
    )
    network.go_around_by(reach.dial_around)


async def _open_relayed(path: DialPath, permit: Permit) -> trio.SocketStream:
    """A connection through a relay, up to the first byte from its other end."""
    stream = await open_connection(Address(path.host, path.port))
    try:
        await stream.send_all(pack_relay_hello(permit, secrets.token_bytes(16)))
        code, length = await _receive_exactly(stream, 2)
        reason = await _receive_exactly(stream, length)
        if code:
            raise Unreachable(f"the relay refuses: {reason.decode('utf-8', 'replace')}")
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def _receive_exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await stream.receive_some(count - len(data))
        if not more:
            raise Unreachable("the relay hung up")
        data += more
    return data
