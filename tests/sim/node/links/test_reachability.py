"""Being dialled back, in virtual time: what a node then announces, and what its owner hears."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, NetworkError, PeerId, RemoteError, Role, Unreachable
from p2pserve.bootstrap.addresses import AnnouncedBy, FoundAddress
from p2pserve.node.links.messages import DialBack, DialledBack
from p2pserve.node.links.reachability import Announcing, DialBackDesk, Reachability
from p2pserve.node.methods import DIAL_BACK
from p2pserve.node.settings import WAN
from p2pserve.node.testing import MemoryExchange

ME, ONE, TWO = PeerId("me"), PeerId("one"), PeerId("two")
LISTEN = Address("0.0.0.0", 4002)
OWN, OUTSIDE = Address("10.0.0.7", 4002), Address("198.51.100.7", 4002)
PRIVATE = FoundAddress(OWN, AnnouncedBy.INTERFACE)


@dataclass
class Surroundings:
    """A node, and two members that can dial what is in `open`."""

    nursery: trio.Nursery
    open: set[Address] = field(default_factory=set)
    told: Address = OWN
    closed: bool = False
    found: FoundAddress | NetworkError = PRIVATE
    seen: str | None = "10.0.0.7"
    said: list[str] = field(default_factory=list)
    dialled: list[Address] = field(default_factory=list)
    connected: list[PeerId] = field(default_factory=lambda: [ONE, TWO])

    def __post_init__(self) -> None:
        self.exchange = MemoryExchange(latency_s=0.01)
        for peer in (ONE, TWO):
            DialBackDesk(
                messenger=self.exchange.join(peer),
                where=lambda peer: self.told,
                seen_host=lambda peer: self.seen,
                prove=self._prove,
            )
        self.node = Reachability(
            messenger=self.exchange.join(ME),
            announcing=Announcing(self._move_to, lambda: (self.told, self.closed)),
            find=self._find,
            listen=LISTEN,
            boxes=lambda: {peer: f"203.0.113.{number}" for number, peer in enumerate(self.connected)},
            say=self.said.append,
        )
        self.nursery.start_soon(self.node.run)

    def _move_to(self, address: Address, closed: bool) -> None:
        self.told, self.closed = address, closed

    def _find(self) -> FoundAddress:
        if isinstance(self.found, NetworkError):
            raise self.found
        return self.found

    async def _prove(self, peer: PeerId, address: Address, is_allowed: Callable[[str], bool]) -> Address:
        if not is_allowed(address.host):
            raise Unreachable("it may not be dialled for others")
        self.dialled.append(address)
        if address not in self.open:
            raise Unreachable(f"cannot reach a member at {address}: connection refused; check the address")
        return address


def play(scenario: Callable[[Surroundings], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await scenario(Surroundings(nursery))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def elapse(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def test_a_node_that_is_met_says_nothing() -> None:
    async def scenario(world: Surroundings) -> None:
        world.open = {OWN}
        await elapse(60.0)
        assert (world.told, world.closed, world.said) == (OWN, False, [])
        assert world.dialled == [OWN]  # and is not dialled time and again

    play(scenario)


def test_a_node_that_nobody_meets_tells_everybody_and_its_owner_once_and_is_met_later() -> None:
    async def scenario(world: Surroundings) -> None:
        await elapse(60.0)
        assert (world.told, world.closed) == (OWN, True)
        [line] = world.said
        assert "10.0.0.7:4002 (connection refused)" in line
        await elapse(2 * WAN.reach_s)
        assert len(world.said) == 1
        world.open = {OWN}
        await elapse(2 * WAN.reach_s)
        assert (world.told, world.closed) == (OWN, False)
        assert world.said[1:] == [f"others reach this node at {OWN} now"]

    play(scenario)


def test_the_address_that_others_see_is_announced_where_it_leads_here() -> None:
    async def scenario(world: Surroundings) -> None:
        world.seen, world.open = OUTSIDE.host, {OUTSIDE}
        await elapse(60.0)
        assert (world.told, world.closed) == (OUTSIDE, False)
        assert OWN not in world.dialled  # a private one, and not where the question came from
        assert str(OUTSIDE) in world.said[0]
        await elapse(3 * WAN.reach_s)
        assert (world.told, len(world.said)) == (OUTSIDE, 1)

    play(scenario)


def test_where_it_does_not_lead_here_the_own_one_stays_announced() -> None:
    async def scenario(world: Surroundings) -> None:
        world.seen = OUTSIDE.host
        await elapse(60.0)
        assert (world.told, world.closed) == (OWN, True)
        assert "forward TCP port 4002 of 198.51.100.7" in world.said[0]

    play(scenario)


def test_another_address_of_the_box_is_followed_and_asked_about() -> None:
    async def scenario(world: Surroundings) -> None:
        world.open = {OWN}
        await elapse(60.0)
        other = Address("10.0.0.8", 4002)
        world.found, world.seen, world.open = FoundAddress(other, AnnouncedBy.INTERFACE), other.host, {other}
        await elapse(2 * WAN.address_s)
        assert (world.told, world.closed) == (other, False)
        assert "10.0.0.8:4002 now, and no longer at 10.0.0.7:4002" in world.said[0]
        world.found = Unreachable("no interface")
        await elapse(2 * WAN.address_s)
        assert world.told == other

    play(scenario)


def test_lost_sessions_are_a_reason_to_ask_again() -> None:
    async def scenario(world: Surroundings) -> None:
        world.open = {OWN}
        await elapse(60.0)
        world.open = set()
        world.node.on_peer_lost(ONE)
        await elapse(100.0)
        assert world.closed

    play(scenario)


def test_members_of_an_earlier_release_say_nothing_and_nothing_follows() -> None:
    async def scenario(world: Surroundings) -> None:
        def refuse(sent: object) -> None:
            raise RemoteError("unknown_method", "this node does not answer 'dial.back'")

        world.exchange.before = refuse
        await elapse(3 * WAN.reach_s)
        assert (world.told, world.closed, world.said) == (OWN, False, [])

    play(scenario)


def test_a_node_that_is_alone_asks_once_it_is_not() -> None:
    async def scenario(world: Surroundings) -> None:
        world.connected = []
        await elapse(60.0)
        assert world.dialled == []
        world.connected = [ONE]
        await elapse(2 * WAN.address_s)
        assert world.dialled == [OWN]

    play(scenario)


async def ask(world: Surroundings, address: Address = OWN) -> DialledBack:
    body = DialBack(host=address.host, port=address.port)
    return await world.exchange.join(TWO).request(ONE, DIAL_BACK, body, 30.0)


def test_nobody_is_dialled_often_nor_where_it_does_not_say_it_is() -> None:
    async def scenario(world: Surroundings) -> None:
        world.connected = []
        for _ in range(4):
            await ask(world)
        with pytest.raises(RemoteError, match="too often"):
            await ask(world)
        assert len(world.dialled) == 4
        await elapse(60.0)
        with pytest.raises(RemoteError, match="does not announce"):
            await ask(world, OUTSIDE)
        assert len(world.dialled) == 4

    play(scenario)


def test_why_is_told_to_whom_comes_from_there_alone() -> None:
    async def scenario(world: Surroundings) -> None:
        world.connected, world.told, world.seen = [], Address("8.8.8.8", 53), "9.9.9.9"
        found = await ask(world, world.told)
        assert (found.met, found.why, found.seen) == (False, "", "9.9.9.9")
        world.told, world.seen = OUTSIDE, OUTSIDE.host
        assert "refused" in (await ask(world, OUTSIDE)).why

    play(scenario)


def test_a_client_may_have_its_own_address_dialled_alone() -> None:
    async def scenario(world: Surroundings) -> None:
        world.connected, world.told, world.seen = [], Address("8.8.8.8", 53), "9.9.9.9"
        client = world.exchange.join(PeerId("client"), Role.CLIENT)
        await client.request(ONE, DIAL_BACK, DialBack(host="8.8.8.8", port=53), 30.0)
        assert world.dialled == []

    play(scenario)
