"""Large plans on their way through a network of nodes in memory, on a virtual clock."""

import random
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256

import trio
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, Role
from p2pserve.node.methods import PLAN_PIECE
from p2pserve.node.planning.messages import PLAN_PIECE_BYTES, PlanManifest, PlanPiece, PlanPieceQuery
from p2pserve.node.planning.plan_exchange import PlanExchange
from p2pserve.node.settings import WAN
from p2pserve.node.testing import MemoryExchange

LEADER = PeerId("leader")


def manifest_of(payload: bytes, version: int = 1) -> PlanManifest:
    return PlanManifest(epoch=1, version=version, service="s", size=len(payload), digest=sha256(payload).digest())


PAYLOAD = random.Random(1).randbytes(3 * PLAN_PIECE_BYTES + 7)
MANIFEST = manifest_of(PAYLOAD)


class World:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.exchange = MemoryExchange(latency_s=0.05)
        self.nursery = nursery
        self.got: dict[PeerId, tuple[PlanManifest, bytes]] = {}

    def add(self, name: str) -> PlanExchange:
        peer = PeerId(name)

        def got(manifest: PlanManifest, payload: bytes) -> None:
            self.got[peer] = manifest, payload

        return PlanExchange(
            self.exchange.join(peer), nursery=self.nursery, rng=random.Random(name), tuning=WAN, on_bytes=got
        )

    def liar(self, name: str, answer: Callable[[PlanPieceQuery], PlanPiece]) -> None:
        async def on_query(peer: PeerId, role: Role, body: PlanPieceQuery) -> PlanPiece:
            return answer(body)

        self.exchange.join(PeerId(name)).handle(PLAN_PIECE, on_query)

    def pieces_of(self, name: str) -> int:
        return sum(peer == name for peer, _ in self.exchange.asked_of(PLAN_PIECE))


async def pass_time(seconds: float) -> None:
    """On the virtual clock."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def play(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await scenario(World(nursery))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_plan_comes_in_pieces() -> None:
    async def scenario(world: World) -> None:
        leader, node = world.add(LEADER), world.add("node")
        leader.hold(MANIFEST.digest, PAYLOAD)
        node.want(MANIFEST, LEADER)
        node.want(MANIFEST, LEADER)
        await pass_time(1)
        assert world.got == {PeerId("node"): (MANIFEST, PAYLOAD)}
        assert world.pieces_of(LEADER) == 4

    play(scenario)


def test_it_spreads_from_node_to_node() -> None:
    async def scenario(world: World) -> None:
        leader = world.add(LEADER)
        nodes = {f"node {number}": world.add(f"node {number}") for number in range(200)}
        leader.hold(MANIFEST.digest, PAYLOAD)
        for node in nodes.values():
            node.want(MANIFEST, LEADER)
        await pass_time(60)
        assert set(world.got) == set(nodes)
        assert {payload for _, payload in world.got.values()} == {PAYLOAD}
        served = sum(query.offset > 0 for peer, query in world.exchange.asked_of(PLAN_PIECE) if peer == LEADER)
        assert served < 200 * 3 / 2, "most got it from others"

    play(scenario)


def test_who_gives_other_bytes_is_not_asked_again() -> None:
    async def scenario(world: World) -> None:
        node = world.add("node")
        world.liar(LEADER, lambda query: PlanPiece(holders=("liar", "honest", "nobody")))
        world.liar("liar", lambda query: PlanPiece(data=bytes(PLAN_PIECE_BYTES)))
        node.want(MANIFEST, LEADER)
        await pass_time(60)
        assert world.got == {}
        assert world.pieces_of("liar") == 4
        world.add("honest").hold(MANIFEST.digest, PAYLOAD)
        await pass_time(20)
        assert world.got == {PeerId("node"): (MANIFEST, PAYLOAD)}
        assert world.pieces_of("liar") == 4

    play(scenario)


def test_who_gives_a_byte_at_a_time_keeps_nobody_from_the_plan() -> None:
    async def scenario(world: World) -> None:
        world.liar("slow", lambda query: PlanPiece(data=PAYLOAD[query.offset : query.offset + 1]))
        world.liar(LEADER, lambda query: PlanPiece(holders=("slow", "honest")))
        world.add("honest").hold(MANIFEST.digest, PAYLOAD)
        world.add("node").want(MANIFEST, LEADER)
        await pass_time(20)
        assert world.got == {PeerId("node"): (MANIFEST, PAYLOAD)}
        assert world.pieces_of("slow") <= 1

    play(scenario)


def test_pieces_without_end_and_holders_without_number_are_given_up() -> None:
    async def scenario(world: World) -> None:
        node = world.add("node")
        count = iter(range(10**9))
        world.liar(LEADER, lambda query: PlanPiece(data=b"x", holders=tuple(f"h{next(count)}" for _ in range(8))))
        node.want(manifest_of(b"y" * 100), LEADER)
        await pass_time(120)
        assert world.got == {}
        assert len({peer for peer, _ in world.exchange.asked_of(PLAN_PIECE)}) <= 33

    play(scenario)


def test_a_newer_plan_ends_the_fetching_of_an_older_one() -> None:
    async def scenario(world: World) -> None:
        leader, node = world.add(LEADER), world.add("node")
        newer = PAYLOAD[::-1]
        leader.hold(MANIFEST.digest, PAYLOAD)
        leader.hold(manifest_of(newer, 2).digest, newer)
        node.want(MANIFEST, LEADER)
        await pass_time(0.12)
        node.want(manifest_of(newer, 2), LEADER)
        await pass_time(5)
        assert world.got == {PeerId("node"): (manifest_of(newer, 2), newer)}
        node.want(None, LEADER)

    play(scenario)


def test_few_are_served_at_once_and_a_turn_that_is_not_used_is_lost() -> None:
    async def scenario(world: World) -> None:
        leader = world.add(LEADER)
        leader.hold(MANIFEST.digest, PAYLOAD)
        ask = partial(leader.on_query, role=Role.WORKER, body=PlanPieceQuery(digest=MANIFEST.digest, offset=0))
        given = [(await ask(PeerId(f"n{number}"))).data for number in range(WAN.plan_turns + 1)]
        assert [bool(data) for data in given] == [True] * WAN.plan_turns + [False]
        await pass_time(WAN.plan_turn_s)
        assert (await ask(PeerId("late"))).data == PAYLOAD[:PLAN_PIECE_BYTES]
        beyond = PlanPieceQuery(digest=MANIFEST.digest, offset=len(PAYLOAD))
        assert (await leader.on_query(PeerId("late"), Role.WORKER, beyond)).data == b""
        unknown = PlanPieceQuery(digest=bytes(32), offset=0)
        assert (await leader.on_query(PeerId("late"), Role.WORKER, unknown)).data == b""

    play(scenario)
