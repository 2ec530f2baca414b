"""The ways to and from a node's port, put together: who is dialled, who dials back, who is relayed, and what is told
of all that."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple, final

import trio

from ...bootstrap import Address, PeerId, RemoteError, Role
from ...bootstrap.addresses import FoundAddress, default_route_address, find_announced
from ...kvtransport.link.relay import Relay
from ..joined import Joined
from ..methods import TOKEN_PLACES
from .bandwidth import answer_bandwidth
from .call_back import CallBacks
from .data_port import Around, DataPort, RelayDesk
from .messages import PlacesLeft, PlacesQuery
from .reach import Reach, ReachTimes
from .reachability import Announcing, DialBackDesk, Reachability

_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


class Doors(NamedTuple):
    """How connections come in and go out: the one port, the relay, what serves a connection that was dialled here as if
    it had come to the port, and where that is."""

    port: DataPort
    relay: Relay
    adopt: Callable[[trio.SocketStream], None]
    listen: Address


@final
class Ways:
    """One per node; tasks run in `nursery`."""

    def __init__(self, joined: Joined, doors: Doors, nursery: trio.Nursery) -> None:
        settings, network = joined.settings, joined.network
        tuning = settings.tuning
        self._joined = joined
        listen = self._listen = doors.listen
        self.calls = CallBacks(
            messenger=network,
            where=joined.address_of,
            prove=lambda peer, address: network.prove(peer, address, _is_any),
            adopt=doors.adopt,
            nursery=nursery,
            tuning=tuning,
        )
        self._desk = RelayDesk(
            doors.relay,
            settings.links,
            messenger=network,
            where=joined.address_of,
            prove=network.prove,
            own=network.address.host,
            around=Around(joined.is_closed, lambda peer: peer in network.connected(), self.calls.connect),
            tuning=tuning,
        )
        self.reach = Reach(
            messenger=network,
            where=joined.address_of,
            is_closed=joined.is_closed,
            permit_own=self._desk.permit_own,
            relays=joined.relays_to,
            loopback=Address(_LOOPBACK.get(listen.host, listen.host), listen.port),
            times=ReachTimes(tuning.ask_s, tuning.around_life_s, tuning.permit_margin_s),
        )
        network.go_around_by(self.reach.dial_around)
        self._answers = DialBackDesk(
            messenger=network,
            where=self._find_announced_by,
            seen_host=network.seen_host,
            prove=network.prove,
            tuning=tuning,
        )
        self.reachability = Reachability(
            messenger=network,
            announcing=Announcing(
                lambda address, closed: network.move_to(address, closed=closed),
                lambda: (network.address, network.is_closed),
            ),
            find=self._find,
            listen=listen,
            boxes=self._find_askable,
            say=joined.say,
            tuning=tuning,
        )
        answer_bandwidth(network)
        network.handle(TOKEN_PLACES, self._on_places)
        network.on_peer_lost(self.reachability.on_peer_lost)

    def __repr__(self) -> str:
        return f"<Ways {self.reachability} {self.reach} {self.calls}>"

    def keep(self, present: frozenset[PeerId]) -> None:
        """These are the members now."""
        self._desk.keep(present | self._joined.network.connected())  # clients, too, have permits
        self.calls.keep(present)
        self.reach.keep(present)

    def _find(self) -> FoundAddress:
        """The address to announce as of now."""
        flag, listen = self._joined.settings.announce, self._listen
        found = find_announced(flag, os.environ, listen, lambda: default_route_address(listen.host))
        port = found.address.port or listen.port
        return replace(found, address=replace(found.address, port=port))

    def _find_announced_by(self, peer: PeerId) -> Address | None:
        """What a peer, who may be a client, announces now."""
        return next((each.address for each in self._joined.network.members() if each.peer_id == peer), None)

    async def _on_places(self, peer: PeerId, role: Role, body: PlacesQuery) -> PlacesLeft:
        """A box that looks around wants to know whether it could join."""
        places = self._joined.network.count_places(peer, body.peer)
        if places is None:
            raise RemoteError("forbidden", "places are told to whom looks around with a worker's join token")
        return PlacesLeft(uses=places.uses, taken=places.taken, is_holder=places.is_holder)

    def _find_askable(self) -> dict[PeerId, str]:
        network = self._joined.network
        connected = network.connected()
        return {
            each.peer_id: each.address.host
            for each in network.members()
            if each.peer_id in connected and each.role is not Role.CLIENT and not each.is_closed
        }


def _is_any(host: str) -> bool:
    """A box dials for itself whatever members announce."""
    return True
