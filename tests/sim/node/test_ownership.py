"""The node of the box with a network's key: it tells what commands change, and renews its members."""

from pathlib import Path

import pytest
import trio

from p2pserve.bootstrap import Bootstrap, Identity, NetworkKey, NetworkSettings
from p2pserve.bootstrap.trust.catalogue import Wish
from p2pserve.bootstrap.trust.orders import Orders, SignedOrders, read_orders
from p2pserve.node.ownership import Ownership

NOW = 1e9
HERE = Bootstrap("203.0.113.7", 4001, Identity(b"p" * 32).peer_id)


class FakeNetwork:
    """Of one node, in which ``boxes`` are."""

    def __init__(self, owner: Ownership, boxes: dict[str, set[str]]) -> None:
        self.orders = Orders()
        self.boxes = boxes
        self._key = owner.key.public
        self._told = trio.Event()

    def order(self, orders: SignedOrders) -> None:
        read = read_orders(orders, self._key)
        assert read is not None
        assert read.number > self.orders.number
        self.orders = read
        self._told.set()
        self._told = trio.Event()

    def boxes_by_certificate(self) -> dict[str, set[str]]:
        return self.boxes

    async def next_orders(self) -> Orders:
        with trio.fail_after(30.0):
            await self._told.wait()
        return self.orders


def test_a_node_that_runs_tells_what_commands_change_and_renews_members(tmp_path: Path) -> None:
    owner = Ownership(tmp_path, NetworkKey.load_or_create(tmp_path), pytest.fail)
    owner.take_greetings(HERE, (), NOW)
    token = owner.create(Wish(expires_at=NOW + 90), NOW)
    other = owner.create(Wish(expires_at=NOW + 9000), NOW)
    now = NOW

    async def main() -> None:
        nonlocal now
        network = FakeNetwork(owner, {token.id: {"a"}})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.follow, network, lambda: now, NetworkSettings(catalogue_s=0.001))
            Ownership.open(owner.home).revoke(other.id)
            assert (await network.next_orders()).revoked == (other.id,)
            now = NOW + 61
            assert (await network.next_orders()).renewed[token.id].peers == ("a",)
            assert owner.read().orders == network.orders
            # Another catalogue of the same key was followed meanwhile: nothing of it is forgotten.
            network.orders = Orders(9, ("f" * 16,), {})
            told = await network.next_orders()
            assert (told.number, set(told.revoked), set(told.renewed)) == (10, {other.id, "f" * 16}, {token.id})
            nursery.cancel_scope.cancel()

    trio.run(main)
