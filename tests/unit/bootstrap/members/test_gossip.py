"""One exchange of gossip between two nodes in memory: what is swapped, what is pushed, who is blamed."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Bootstrap, Identity, Network, NetworkKey, NetworkSettings, Role
from p2pserve.bootstrap.testing import MemoryConnection, MemoryNetwork

KEY = NetworkKey(b"n" * 32)
ANN, BOB, CAT = sorted((Identity(bytes([seed]) * 32) for seed in (1, 2, 3)), key=lambda each: each.peer_id)
PORTS = {ANN.peer_id: 4001, BOB.peer_id: 4002, CAT.peer_id: 4003}


@dataclass
class Air:
    """Networks in memory. Gossip comes every `gossip_s`, so that a test sees what a push does alone."""

    memory: MemoryNetwork
    settings: NetworkSettings

    def build(
        self, who: Identity, ask: Identity | None = None, role: Role = Role.WORKER, *, started_at: float = 1000.0
    ) -> Network:
        address = Address("192.0.2.1", PORTS[who.peer_id])
        return Network(
            transport=self.memory.transport(who, address),
            identity=who,
            token=KEY.issue((), role, 1e6),
            network_key_public=KEY.public,
            role=role,
            announce=address,
            bootstraps=() if ask is None else (Bootstrap("192.0.2.1", PORTS[ask.peer_id], ask.peer_id),),
            rng=random.Random(1),
            clock=lambda: started_at + trio.current_time(),
            settings=self.settings,
        )


def fill(end: MemoryConnection) -> None:
    """Send notices that nobody handles until there is no room for another one."""
    while True:
        end.send_nowait(b"\x93\xa1n\xa1x\xc0")


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


@asynccontextmanager
async def two(gossip_s: float = 1.0, role: Role = Role.WORKER) -> AsyncIterator[tuple[Air, Network, Network]]:
    air = Air(MemoryNetwork(latency_s=0.01), NetworkSettings(gossip_s=gossip_s))
    async with air.build(ANN) as ann, air.build(BOB, ANN, role) as bob:
        await elapse(0.5)
        yield air, ann, bob


def simulate(main: object) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def test_what_is_published_is_pushed_without_waiting_for_gossip() -> None:
    async def main() -> None:
        async with two(gossip_s=1e6) as (_, ann, bob):
            ann.publish("load", b"1")
            await elapse(0.02)
            assert bob.entries("load") == {ann.peer_id: b"1"}

    simulate(main)


def test_who_joins_hears_at_once_what_was_published_before() -> None:
    async def main() -> None:
        async with two(gossip_s=1e6) as (air, ann, bob):
            ann.publish("load", b"1")
            bob.publish("load", b"2")
            async with air.build(CAT, ANN) as cat:
                assert cat.entries("load")[ann.peer_id] == b"1"
                await elapse(0.1)
                assert cat.entries("load") == {ann.peer_id: b"1", bob.peer_id: b"2"}

    simulate(main)


@pytest.mark.parametrize(("gossip_s", "heard"), [(1.0, True), (1e6, False)])
def test_gossip_repairs_what_a_push_has_missed(gossip_s: float, heard: bool) -> None:
    """The queue to a peer is full when something is pushed to it."""

    async def main() -> None:
        async with two(gossip_s) as (air, ann, bob):
            end = air.memory.end_of(ann.peer_id, bob.peer_id)
            air.memory.block(ann.peer_id, bob.peer_id)
            with pytest.raises(trio.WouldBlock):
                fill(end)
            ann.publish("load", b"1")
            air.memory.heal()
            await elapse(5)
            assert bob.entries("load") == ({ann.peer_id: b"1"} if heard else {})

    simulate(main)


def test_both_sides_learn_in_one_exchange() -> None:
    async def main() -> None:
        async with two(gossip_s=1e6) as (air, ann, bob):
            air.memory.partition([ann.peer_id], [bob.peer_id])
            await elapse(20)
            assert ann.connected() == frozenset()
            ann.publish("load", b"1")
            bob.publish("load", b"2")
            air.memory.heal()
            await elapse(40)
            assert ann.entries("load") == bob.entries("load") == {ann.peer_id: b"1", bob.peer_id: b"2"}

    simulate(main)


def test_what_a_client_publishes_is_not_told_and_nobody_is_blamed() -> None:
    async def main() -> None:
        async with two(role=Role.CLIENT) as (_, ann, client):
            client.publish("load", b"2")
            ann.publish("load", b"1")
            await elapse(5)
            assert ann.entries("load") == {ann.peer_id: b"1"}
            assert client.entries("load") == {ann.peer_id: b"1", client.peer_id: b"2"}
            assert ann.statistics().entries_forged == client.statistics().entries_forged == 0

    simulate(main)


def test_an_older_life_with_a_higher_number_is_outlived_and_the_new_number_told() -> None:
    """As after a clock went back: the others still hold the entries of the life before."""

    async def main() -> None:
        air = Air(MemoryNetwork(latency_s=0.01), NetworkSettings())
        async with air.build(ANN) as ann:
            async with air.build(BOB, ANN, started_at=9000.0) as late:
                late.publish("load", b"old")
                await elapse(1)
            await elapse(1)
            async with air.build(BOB, ANN) as bob:
                bob.publish("load", b"new")
                await elapse(3)
                assert ann.entries("load") == {bob.peer_id: b"new"}
                (life,) = [member.incarnation for member in ann.members() if member.peer_id == bob.peer_id]
                assert life > 9_000_000

    simulate(main)
