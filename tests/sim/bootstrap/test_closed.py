"""Members that nobody can dial: who dials whom then, and how two of them come together."""

from typing import Any, cast

import pytest
import trio

from p2pserve.bootstrap import Address, PeerId, PeerLost, Unreachable
from p2pserve.bootstrap.members.states import MemberState
from p2pserve.bootstrap.streams.transport import Transport
from p2pserve.bootstrap.testing import MemoryConnection

from .worlds import PEOPLE, Echo, World, asking, elapse, simulate, world

CLOSED = {Address("192.0.2.1", 4002), Address("192.0.2.1", 4003)}


class WalledTransport:
    """Its dials to some addresses get no answer; over a connection that is there it reaches everybody."""

    def __init__(self, under: Transport) -> None:
        self._under = under
        self.peer_id, self.identify, self.serve = under.peer_id, under.identify, under.serve

    async def dial(self, address: Address, peer_id: PeerId) -> Any:
        if address in CLOSED:
            await elapse(5.0)
            raise Unreachable(f"cannot reach {peer_id} at {address}: no answer")
        return await self._under.dial(address, peer_id)

    async def dial_over(self, stream: trio.SocketStream, address: Address, peer_id: PeerId) -> Any:
        return await self._under.dial_over(stream, address, peer_id)


class NoStream:
    """In place of a connection over a relay."""

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def start(w: World, index: int, around: list[tuple[int, PeerId]] | None) -> None:
    """A node, which says at once what it would learn from being dialled back. `around`: where its detours are noted."""
    node = await w.start(index, wrap=WalledTransport)

    async def dial_around(peer: PeerId) -> trio.SocketStream:
        if around is None:
            raise Unreachable("no relay leads there")
        around.append((index, peer))
        return cast(trio.SocketStream, NoStream())

    node.go_around_by(dial_around)
    if node.address in CLOSED:
        node.move_to(node.address, closed=True)


def end(w: World, one: int, other: int) -> MemoryConnection:
    return w.air.end_of(PEOPLE[one].peer_id, PEOPLE[other].peer_id)


def test_it_dials_everybody_and_nobody_takes_a_broken_link_for_its_death() -> None:
    async def main() -> None:
        around: list[tuple[int, PeerId]] = []
        async with world() as w:
            for index in range(3):
                await start(w, index, around)
            await elapse(10.0)
            w.check_full_mesh()
            for other in range(2):
                first = end(w, other, 2)
                w.air.drop_connections(PEOPLE[other].peer_id, PEOPLE[2].peer_id)
                for _ in range(30):
                    await elapse(0.1)
                    states = {each.peer_id: each.state for each in w.nodes[other].members()}
                    assert states[PEOPLE[2].peer_id] is not MemberState.DEAD
                assert end(w, other, 2) is not first
            w.check_full_mesh()
            w.check_agreement(range(3))
            assert around == []  # it has dialled them itself

    simulate(main)


def test_two_of_them_come_together_over_others() -> None:
    async def main() -> None:
        around: list[tuple[int, PeerId]] = []
        async with world() as w:
            for index in range(4):
                await start(w, index, around)
            await elapse(20.0)
            w.check_full_mesh()
            w.check_agreement(range(4))
            assert set(around) <= {(2, PEOPLE[3].peer_id), (3, PEOPLE[2].peer_id)}
            assert around
            answer = await w.nodes[2].request(PEOPLE[3].peer_id, asking("echo"), Echo("hello"), 5.0)
            assert answer.text.startswith("hello")

    simulate(main)


def test_where_nobody_brings_them_together_each_is_alive_for_the_other_and_says_why_it_is_not_reached() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await start(w, index, None)
            await elapse(20.0)
            w.check_agreement(range(4))
            assert PEOPLE[3].peer_id not in w.nodes[2].connected()
            states = {each.peer_id: each.state for each in w.nodes[2].members()}
            assert states[PEOPLE[3].peer_id] is MemberState.ALIVE
            with pytest.raises(PeerLost, match="no member brings us together"):
                await w.nodes[2].request(PEOPLE[3].peer_id, asking("echo"), Echo("hello"), 5.0)

    simulate(main)


def test_one_that_can_be_dialled_again_is() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await start(w, index, [])
            await elapse(10.0)
            moved = Address("192.0.2.1", 4900)
            node = w.nodes[2]
            assert {each.is_closed for each in w.nodes[0].members() if each.peer_id == node.peer_id} == {True}
            node.move_to(moved, closed=False)
            await elapse(5.0)
            (seen,) = [each for each in w.nodes[0].members() if each.peer_id == node.peer_id]
            assert (seen.address, seen.is_closed) == (moved, False)

    simulate(main)
