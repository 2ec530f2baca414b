"""How a node gets a connection to another one's port: dialled, called through its own relay, or by a third one's."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, PeerId, RemoteError, Role, Unreachable
from p2pserve.bootstrap.streams.hosts import SMALL_SEGMENT_BYTES
from p2pserve.kvtransport.wire.permits import Permit
from p2pserve.node.links.reach import USUAL, Reach, ReachTimes
from p2pserve.node.messages import RelayOpen, RelayOpened
from p2pserve.node.methods import RELAY_OPEN
from p2pserve.node.settings import WAN
from p2pserve.node.testing import MemoryExchange

ME, PLAIN, INNER, ONE, TWO = (PeerId(name) for name in ("me", "plain", "inner", "one", "two"))
HERE = Address("127.0.0.1", 4002)
MEMBERS = {peer: Address(f"192.0.2.{at}", 4000) for at, peer in enumerate((PLAIN, INNER, ONE, TWO), 1)}


def permit_of(number: int) -> Permit:
    return Permit(bytes([number]) * 16, bytes(32), "10.0.0.2", 4002, 1000, 1e6, 1e9)


@dataclass
class Around:
    """A node whose members answer as `refusing` says."""

    closed: set[PeerId] = field(default_factory=lambda: {INNER})
    refusing: set[PeerId] = field(default_factory=set)
    issued: int = 0

    def __post_init__(self) -> None:
        self.exchange = MemoryExchange(latency_s=0.01)
        for peer in (ONE, TWO):
            self.exchange.join(peer).handle(RELAY_OPEN, self._answer_as(peer))
        self.reach = Reach(
            messenger=self.exchange.join(ME),
            where=MEMBERS.get,
            is_closed=self.closed.__contains__,
            permit_own=lambda peer: self._issue(),
            relays=lambda peer: [ONE, TWO],
            loopback=HERE,
        )

    def _issue(self) -> Permit:
        self.issued += 1
        return permit_of(self.issued)

    def _answer_as(self, relay: PeerId) -> Callable[[PeerId, Role, RelayOpen], Coroutine[Any, Any, RelayOpened]]:
        async def answer(peer: PeerId, role: Role, body: RelayOpen) -> RelayOpened:
            assert body.target == INNER
            if relay in self.refusing:
                raise RemoteError("no-relay", f"{relay} forwards nothing for others")
            return RelayOpened(permit=self._issue())

        return answer

    async def to(self, peer: PeerId) -> tuple[Address, int]:
        """Where to dial, and with which permit; 0: none."""
        path = await self.reach.path_to(peer)
        return Address(path.host, path.port), path.relay.permit[0] if path.relay is not None else 0


def play(scenario: Callable[[Around], Coroutine[Any, Any, None]]) -> None:
    trio.run(scenario, Around(), clock=MockClock(autojump_threshold=0))


def test_who_can_be_dialled_is() -> None:
    async def scenario(world: Around) -> None:
        assert await world.to(PLAIN) == (MEMBERS[PLAIN], 0)
        world.closed.add(ME)
        assert await world.to(PLAIN) == (MEMBERS[PLAIN], 0)
        with pytest.raises(Unreachable, match="no address"):
            await world.to(PeerId("nobody"))

    play(scenario)


def test_who_cannot_is_called_through_the_own_relay_by_one_permit_until_its_end() -> None:
    async def scenario(world: Around) -> None:
        assert await world.to(INNER) == (HERE, 1)
        assert await world.to(INNER) == (HERE, 1)
        with trio.move_on_after(WAN.around_life_s):
            await trio.sleep_forever()
        assert await world.to(INNER) == (HERE, 2)
        world.reach.keep(frozenset({INNER}))
        assert await world.to(INNER) == (HERE, 2)
        world.reach.keep(frozenset())
        assert await world.to(INNER) == (HERE, 3)

    play(scenario)


def test_two_that_cannot_meet_at_a_third_which_is_kept_while_it_is_there() -> None:
    async def scenario(world: Around) -> None:
        world.closed.add(ME)
        assert await world.to(INNER) == (MEMBERS[ONE], 1)
        assert await world.to(INNER) == (MEMBERS[ONE], 1)
        world.refusing.add(ONE)
        world.reach.keep(frozenset({INNER, TWO}))
        assert await world.to(INNER) == (MEMBERS[TWO], 2)
        world.refusing.add(TWO)
        world.reach.keep(frozenset({INNER}))
        with pytest.raises(Unreachable, match=r"one forwards nothing .* \| .*two forwards nothing"):
            await world.to(INNER)

    play(scenario)


def test_a_node_that_can_be_dialled_again_needs_no_third_one() -> None:
    async def scenario(world: Around) -> None:
        world.closed.add(ME)
        assert await world.to(INNER) == (MEMBERS[ONE], 1)
        world.closed.remove(ME)
        assert await world.to(INNER) == (HERE, 2)

    play(scenario)


def test_a_member_that_large_packets_did_not_reach_is_dialled_with_small_segments_for_an_hour() -> None:
    async def scenario(world: Around) -> None:
        assert (await world.reach.path_to(PLAIN)).segment_bytes == 0
        world.reach.note_stuck(PLAIN)
        assert (await world.reach.path_to(PLAIN)).segment_bytes == SMALL_SEGMENT_BYTES
        assert (await world.reach.path_to(ONE)).segment_bytes == 0
        with trio.move_on_after(USUAL.narrow_s + 1.0):
            await trio.sleep_forever()
        assert (await world.reach.path_to(PLAIN)).segment_bytes == 0
        world.reach.note_stuck(PLAIN)
        world.reach.keep(frozenset({ONE}))  # it left, and came back as somebody else, perhaps elsewhere
        assert (await world.reach.path_to(PLAIN)).segment_bytes == 0

    play(scenario)


def test_clients_have_the_times_of_nodes() -> None:
    assert ReachTimes(WAN.ask_s, WAN.around_life_s, WAN.permit_margin_s) == USUAL
