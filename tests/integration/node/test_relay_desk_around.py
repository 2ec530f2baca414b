"""What a relay lets whom do with members that nobody can dial."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio

from p2pserve.bootstrap import Address, PeerId, RemoteError, Role
from p2pserve.kvtransport.link.relay import Relay
from p2pserve.kvtransport.probing.figures import BoxFigures
from p2pserve.kvtransport.wire.permits import Permit
from p2pserve.node import messages
from p2pserve.node.links.data_port import Around, RelayDesk
from p2pserve.node.settings import WAN, BoxLinkSettings
from p2pserve.node.testing import MemoryExchange

pytestmark = pytest.mark.beside

RELAY, ASKER, INNER, PLAIN, AWAY = (PeerId(name) for name in ("relay", "asker", "inner", "plain", "away"))
MEMBERS = {peer: Address("10.0.0.2", 7000 + at) for at, peer in enumerate((INNER, AWAY))} | {
    PLAIN: Address("8.8.8.8", 7000)
}


class Admitted:
    """In place of a relay: permits, with their owners and how they are connected."""

    def __init__(self) -> None:
        self.permits: dict[bytes, tuple[Permit, str, Callable[[], socket.socket] | None]] = {}

    def admit(self, permit: Permit, owner: str, connect: Callable[[], socket.socket] | None = None) -> None:
        self.permits[permit.permit] = permit, owner, connect

    def revoke(self, permit: bytes) -> None:
        self.permits.pop(permit, None)


async def prove(peer: PeerId, address: Address, is_allowed: Callable[[str], bool]) -> Address:
    return address


def connect(peer: PeerId) -> socket.socket:
    raise OSError(f"{peer} was called")


def desk_of(**box: Any) -> tuple[RelayDesk, Admitted]:
    relay = Admitted()
    desk = RelayDesk(
        cast(Relay, relay),
        BoxLinkSettings(box=BoxFigures(**box)),
        messenger=MemoryExchange().join(RELAY),
        where=MEMBERS.get,
        prove=prove,
        own="9.9.9.9",
        around=Around(lambda peer: peer in (INNER, AWAY), lambda peer: peer != AWAY, connect),
    )
    return desk, relay


def ask(desk: RelayDesk, target: PeerId, role: Role = Role.WORKER) -> Permit:
    async def main() -> messages.RelayOpened:
        return await desk.on_open(ASKER, role, messages.RelayOpen(target=target))

    return trio.run(main).permit


def test_the_target_is_called_and_not_dialled() -> None:
    desk, relay = desk_of()
    permit = ask(desk, INNER)
    _, owner, how = relay.permits[permit.permit]
    assert (owner, permit.next_host) == (ASKER, "10.0.0.2")
    assert how is not None
    with pytest.raises(OSError, match="inner was called"):
        how()
    assert relay.permits[ask(desk, PLAIN).permit][2] is None


def test_one_that_is_not_connected_gets_no_permit() -> None:
    desk, _ = desk_of()
    with pytest.raises(RemoteError, match="not connected with this node"):
        ask(desk, AWAY)
    assert desk.permit_own(AWAY).next_port == MEMBERS[AWAY].port  # for itself this node gets a session first
    with pytest.raises(RemoteError, match="knows no member"):
        desk.permit_own(PeerId("nobody"))


def test_a_client_has_little_forwarded_and_only_to_where_nobody_could_dial() -> None:
    desk, _ = desk_of()
    permit = ask(desk, INNER, Role.CLIENT)
    assert (permit.byte_budget, permit.bytes_per_s) == (WAN.client_bytes, WAN.client_bytes_s)
    with pytest.raises(RemoteError, match="clients dial members"):
        ask(desk, PLAIN, Role.CLIENT)
    slow, _ = desk_of(relay_gbps=0.001, relay_budget_bytes=1000)
    permit = ask(slow, INNER, Role.CLIENT)
    assert permit.byte_budget == 1000
    assert permit.bytes_per_s == pytest.approx(125_000)


def test_a_box_that_forwards_nothing_for_others_does_so_for_itself() -> None:
    desk, relay = desk_of(relay_gbps=0.0)
    with pytest.raises(RemoteError, match="forwards nothing for others"):
        ask(desk, INNER)
    permit = desk.permit_own(INNER)
    assert relay.permits[permit.permit][2] is not None
    desk.keep({INNER})
    assert permit.permit in relay.permits
    desk.keep(set())
    assert permit.permit not in relay.permits
