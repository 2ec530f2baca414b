"""Whole networks in memory on a virtual clock: join, late join, kill, leave, restart, partitions."""

import random

import pytest
import trio

from p2pserve.bootstrap import MemberState, PeerId

from .worlds import PEOPLE, elapse, simulate, world


def test_five_join_and_agree() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(5):
                await w.start(index)
            await elapse(5)
            w.check_agreement(range(5))
            w.check_full_mesh()
            rtts = [member.rtt_s for member in w.nodes[3].members() if member.peer_id != PEOPLE[3].peer_id]
            assert rtts == [pytest.approx(0.04)] * 4

    simulate(main)


def test_a_late_joiner_sees_everything_at_once() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(60)
            before = trio.current_time()
            await w.start(4)
            await elapse(0.3)
            assert w.names(4) == set(range(5))
            assert trio.current_time() - before < 1.0
            await elapse(3)
            w.check_agreement(range(5))
            w.check_full_mesh()

    simulate(main)


def test_what_is_published_arrives_within_a_latency() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            revision = w.nodes[3].revision
            w.nodes[1].publish("load", b"7")
            assert w.nodes[1].entries("load") == {PEOPLE[1].peer_id: b"7"}
            before = trio.current_time()
            await w.nodes[3].wait_changed(revision)
            assert trio.current_time() - before == pytest.approx(0.02)
            assert w.nodes[3].entries("load") == {PEOPLE[1].peer_id: b"7"}

    simulate(main)


def test_a_killed_node_is_noticed_at_once_and_the_coordinator_replaced() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(5):
                await w.start(index)
            await elapse(5)
            leader = w.nodes[0].coordinator
            assert leader is not None
            victim = next(index for index, person in enumerate(PEOPLE) if person.peer_id == leader[0])
            lost: list[PeerId] = []
            survivors = [index for index in range(5) if index != victim]
            w.nodes[survivors[0]].on_peer_lost(lost.append)
            w.kill(victim)
            await elapse(0.2)
            assert lost == [PEOPLE[victim].peer_id]
            assert victim not in w.names(survivors[0])
            await elapse(3)
            w.check_agreement(survivors)
            after = w.nodes[survivors[0]].coordinator
            assert after is not None
            assert after[1] == leader[1] + 1

    simulate(main)


def test_a_leaver_is_gone_at_once_and_marked_as_left() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            await w.nodes[3].leave()
            await elapse(0.1)
            states = {member.peer_id: member.state for member in w.nodes[1].members()}
            assert states[PEOPLE[3].peer_id] is MemberState.LEFT
            assert w.names(1) == {0, 1, 2}
            assert w.nodes[3].connected() == frozenset()
            await elapse(30)
            assert PEOPLE[3].peer_id not in w.nodes[1].connected()

    simulate(main)


def test_a_restart_keeps_its_id_and_forgets_its_past() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            w.nodes[2].publish("load", b"past")
            await elapse(5)
            w.kill(2)
            await elapse(0.05)
            await w.start(2)
            await elapse(5)
            w.check_agreement(range(4))
            w.check_full_mesh()
            assert w.nodes[1].entries("load") == {}

    simulate(main)


def test_the_bootstrap_may_die_and_come_back() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            w.kill(0)
            await elapse(5)
            w.check_agreement([1, 2, 3])
            await elapse(120)
            await w.start(0)
            await elapse(3)  # it knows nobody, and the others redial whom their token names every two seconds
            assert w.names(0) == set(range(4))
            await elapse(2)
            w.check_agreement(range(4))
            w.check_full_mesh()

    simulate(main)


def test_a_silent_link_is_noticed_by_timeouts() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index)
            await elapse(5)
            w.air.partition([PEOPLE[2].peer_id], [PEOPLE[0].peer_id, PEOPLE[1].peer_id])
            await elapse(4.5)
            states = {member.peer_id: member.state for member in w.nodes[0].members()}
            assert states[PEOPLE[2].peer_id] is MemberState.SUSPECT
            await elapse(4.5)
            states = {member.peer_id: member.state for member in w.nodes[0].members()}
            assert states[PEOPLE[2].peer_id] is MemberState.DEAD

    simulate(main)


def test_one_broken_link_kills_nobody() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            w.air.block(PEOPLE[1].peer_id, PEOPLE[2].peer_id)
            await elapse(60)
            w.check_agreement(range(4))
            assert PEOPLE[2].peer_id not in w.nodes[1].connected()

    simulate(main)


@pytest.mark.parametrize("seed", range(4))
def test_a_partition_heals_to_one_coordinator(seed: int) -> None:
    async def main() -> None:
        async with world(seed, loss=0.02) as w:
            for index in range(6):
                await w.start(index)
            await elapse(5)
            left = random.Random(seed).sample(range(6), 3)
            right = [index for index in range(6) if index not in left]
            w.air.partition([PEOPLE[i].peer_id for i in left], [PEOPLE[i].peer_id for i in right])
            await elapse(30)
            w.check_agreement(left)
            w.check_agreement(right)
            w.air.heal()
            await elapse(50)
            w.check_agreement(range(6))
            w.check_full_mesh()

    simulate(main)


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_converge(seed: int) -> None:
    """Seeded chaos, then calm: whoever is up agrees with everybody else who is up."""

    async def main() -> None:
        rng = random.Random(seed)
        async with world(seed, latency_s=rng.choice([0.001, 0.03, 0.15]), loss=rng.choice([0.0, 0.05])) as w:
            await w.start(0)
            for _ in range(25):
                up, down = sorted(w.nodes), [index for index in range(1, 7) if index not in w.nodes]
                action = rng.choice(["start", "start", "kill", "cut", "partition", "heal", "publish", "wait"])
                if action == "start" and down:
                    w.air.heal()
                    await w.start(rng.choice(down))
                elif action == "kill" and len(up) > 2:
                    w.kill(rng.choice([index for index in up if index != 0]))
                elif action == "cut" and len(up) > 1:
                    one, other = rng.sample(up, 2)
                    w.air.drop_connections(PEOPLE[one].peer_id, PEOPLE[other].peer_id)
                elif action == "partition" and len(up) > 1:
                    side = rng.sample(up, len(up) // 2)
                    w.air.partition([PEOPLE[i].peer_id for i in side], [PEOPLE[i].peer_id for i in up if i not in side])
                elif action == "heal":
                    w.air.heal()
                elif action == "publish":
                    w.nodes[rng.choice(up)].publish("load", rng.randbytes(8))
                await elapse(rng.choice([0.0, 0.01, 0.5, 4.0, 12.0]))
                for node in w.nodes.values():
                    node.check_integrity()
            w.air.heal()
            await elapse(60)
            w.check_agreement(w.nodes)
            w.check_full_mesh()
            loads = [node.entries("load") for node in w.nodes.values()]
            assert all(load == loads[0] for load in loads)

    simulate(main)


def test_sixteen_start_at_the_same_moment() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            async with trio.open_nursery() as nursery:
                for index in range(1, 16):
                    nursery.start_soon(w.start, index)
            await elapse(10)
            w.check_agreement(range(16))
            w.check_full_mesh()

    simulate(main)


def test_an_error_of_the_block_is_not_wrapped() -> None:
    async def main() -> None:
        async with world() as w:
            with pytest.raises(KeyError, match="mine"):
                async with w.build(0, alone=True):
                    raise KeyError("mine")

    simulate(main)


def test_the_whole_can_be_cancelled_while_it_joins() -> None:
    async def main() -> None:
        async with world() as w:
            with trio.move_on_after(0.1) as scope:
                await w.start(1)
            assert scope.cancelled_caught

    simulate(main)
