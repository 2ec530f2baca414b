"""What nodes that have joined tell their owners, from two networks in memory on a virtual clock."""

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Bootstrap, Identity, NetworkKey, PeerId, RemoteError, Role
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.testing import MemoryNetwork
from p2pserve.coordinator import Demand
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.names import name_of
from p2pserve.node import messages, methods
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.catalogue.desk import CatalogueDesk
from p2pserve.node.joined import MAX_TOKENS_S, Joined
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.observing.queries import MetricsQuery
from p2pserve.node.observing.values import Served
from p2pserve.node.settings import NodeSettings
from p2pserve.node.showing import Showing

HARDWARE = Hardware(cores=1, memory_gib=1.0, processor="x")
NOW = 1_750_000_000.0
ADDRESSES = (Address("10.0.0.1", 4001), Address("10.0.0.2", 4001))


def model(service: str) -> ModelInfo:
    return ModelInfo(
        service=service,
        shape=ModelShape(
            name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
        ),
        max_model_len=512,
        weights=WeightSizes(layers=(1000,) * 4, embeddings=500, head=500),
    )


@dataclass
class Member:
    """A node that has joined, and what its owner was told."""

    joined: Joined
    said: list[str] = field(default_factory=list)
    desk: CatalogueDesk | None = None

    def serve(self, service: str, demand: Demand | None = None) -> None:
        advert = messages.Advert(hardware=HARDWARE, draining=False, model=model(service), demand=demand)
        self.joined.publish(messages.ADVERT, advert)

    def look(self) -> None:
        self.joined.view.update(self.joined.network.entries(messages.ADVERT))
        self.joined.follow()

    def warned(self) -> list[str]:
        return [line for line in self.said if line.startswith("warning")]


async def join_both(
    stack: AsyncExitStack,
    second: Role = Role.WORKER,
    token_role: Role | None = None,
    key: NetworkKey | None = None,
) -> tuple[Member, Member]:
    memory, key = MemoryNetwork(), key or NetworkKey.generate()
    identities = [Identity.generate() for _ in ADDRESSES]
    first = Bootstrap(ADDRESSES[0].host, ADDRESSES[0].port, identities[0].peer_id)
    members = []
    for identity, address, role in zip(identities, ADDRESSES, (Role.WORKER, second), strict=True):
        known = () if address is ADDRESSES[0] else (first,)
        network = Network(
            transport=memory.transport(identity, address),
            identity=identity,
            token=key.issue(known, token_role or role if known else role, NOW + 1e6, lead=role is Role.WORKER),
            network_key_public=key.public,
            role=role,
            announce=address,
            bootstraps=known,
            rng=random.Random(1),
            clock=lambda: NOW,
        )
        await stack.enter_async_context(network)
        said: list[str] = []
        members.append(Member(Joined(network, NodeSettings(home=Path("/"), listen=address), said.append), said))
    with trio.move_on_after(5):
        await trio.sleep_forever()
    return members[0], members[1]


def test_members_are_said_dialled_and_shown() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, two = await join_both(stack)
            other = two.joined.own
            one.look()
            assert f"joined: {name_of(other)}" in one.said
            assert one.joined.address_of(other) == ADDRESSES[1]
            assert one.joined.address_of(PeerId("nobody")) is None
            (neighbour,) = one.joined.neighbours()
            assert neighbour.peer == other
            status = await two.joined.network.request(one.joined.own, methods.STATUS, messages.StatusQuery(), 5)
            assert status.answered_by == one.joined.own
            assert {node.peer for node in status.nodes} == {one.joined.own, other}
            one.look()
            assert one.said.count(f"joined: {name_of(other)}") == 1

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_member_that_nobody_can_dial_is_told_of_as_such() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, two = await join_both(stack)
            other, moved = two.joined.own, Address("192.0.2.9", 9)
            one.look()
            assert (one.joined.can_dial(other), one.joined.is_closed(other)) == (True, False)
            two.joined.network.move_to(moved, closed=True)
            with trio.move_on_after(5):
                await trio.sleep_forever()
            one.look()
            two.look()
            assert (one.joined.can_dial(other), one.joined.is_closed(other)) == (False, True)
            assert two.joined.is_closed(other)
            assert one.joined.address_of(other) == moved
            assert other in one.joined.present
            assert one.joined.relays_to(other) == []  # but for itself, which needs none
            assert two.joined.relays_to(PeerId("third")) == [one.joined.own]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_status_says_what_boxes_write_and_how_long_others_are_gone() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, two = await join_both(stack)
            other = two.joined.own
            for second in range(4):
                served = Served(decoded_tokens=50 * second)
                two.joined.publish(messages.ADVERT, messages.Advert(hardware=HARDWARE, draining=False, served=served))
                with trio.move_on_after(2.0):
                    await trio.sleep_forever()
                one.look()
            found = {node.peer: node for node in one.joined.status().nodes}
            assert found[other].tokens_s == pytest.approx(25.0, rel=0.1)
            assert (found[other].gone_s, found[one.joined.own].tokens_s) == (None, None)
            boast = messages.Advert(hardware=HARDWARE, draining=False, served=Served(decoded_tokens=1 << 48))
            two.joined.publish(messages.ADVERT, boast)
            with trio.move_on_after(2.0):
                await trio.sleep_forever()
            one.look()
            status = await two.joined.network.request(one.joined.own, methods.STATUS, messages.StatusQuery(), 5)
            assert {node.peer: node.tokens_s for node in status.nodes}[other] == MAX_TOKENS_S
            await two.joined.network.leave()
            with trio.move_on_after(20.0):
                await trio.sleep_forever()
            (gone,) = [node for node in one.joined.status().nodes if node.peer == other]
            assert gone.state == "left"
            assert gone.gone_s == pytest.approx(20.0, abs=2.0)

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("role", "token_role", "is_told"),
    [
        (Role.WORKER, Role.WORKER, False),
        (Role.CLIENT, Role.CLIENT, False),
        (Role.CLIENT, Role.ADMIN, True),
        (Role.ADMIN, Role.ADMIN, True),
    ],
)
def test_what_keys_have_cost_is_told_to_admins_and_to_the_node_itself(
    role: Role, token_role: Role, is_told: bool
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, two = await join_both(stack, role, token_role)
            one.joined.key_usd = lambda: {"alice": 0.5}
            Showing(one.joined, None, lambda: NOW)
            for asker, told in ((two, {"alice": 0.5} if is_told else {}), (one, {"alice": 0.5})):
                network = asker.joined.network
                status = await network.request(one.joined.own, methods.STATUS, messages.StatusQuery(), 5)
                assert status.key_usd == told
                if role is Role.CLIENT and token_role is Role.CLIENT and asker is two:
                    with pytest.raises(RemoteError, match="clients may not call 'metrics'"):
                        await network.request(one.joined.own, methods.METRICS, MetricsQuery(), 5)
                    continue
                page = await network.request(one.joined.own, methods.METRICS, MetricsQuery(), 5)
                assert ('p2pserve:key_cost_usd_total{key="alice"} 0.5' in page.text) == bool(told)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_what_is_too_large_to_be_gossiped_is_said() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, _ = await join_both(stack)

            class Large(msgspec.Struct):
                text: str

            one.joined.publish("large", Large("x" * (1 << 17)))
            assert any(line.startswith("the large was not published") for line in one.said)

    trio.run(main, clock=MockClock(autojump_threshold=0))
