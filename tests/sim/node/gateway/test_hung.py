"""Nodes that do not answer, though their connections are there."""

from collections.abc import Callable
from functools import partial

from p2pserve.bootstrap import Role
from p2pserve.node import messages

from .world import ANSWER, D2, STEP_S, D, P, elapse, figures_of, open_world, text_of, virtually


def test_an_answer_goes_on_elsewhere_when_its_decode_node_hangs() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = ["hang:5"]
            name = await world.ask()
            await elapse(20 * STEP_S)
            assert len(world.tokens(name)) == 5
            world.gateway.peer_hung(D, True)
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            assert world.text(name) == text_of(12)
            figures = figures_of(world.chunks[name][-1])
            assert (figures.attempts, figures.decode_node) == (2, D2)
            assert figures.recovered == ("decode node vivid-boar: it did not answer",)
            assert D in world.sent("request.stop")

    virtually(main)


def test_nothing_is_lost_by_a_false_alarm_where_nobody_else_is() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            name = await world.ask()
            await elapse(4 * STEP_S)
            world.gateway.peer_hung(D, True)
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            assert figures_of(world.chunks[name][-1]).attempts == 1

    virtually(main)


def test_the_decode_node_computes_the_prompt_when_the_prefill_node_hangs() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["silent"]
            name = await world.ask()
            await elapse(10 * STEP_S)
            world.gateway.peer_hung(P, True)
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            figures = figures_of(world.chunks[name][-1])
            assert (figures.attempts, figures.recovered) == (1, ("prefill node summer-sheep: it did not answer",))

    virtually(main)


def test_new_requests_avoid_a_node_that_hangs_until_it_answers() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.gateway.peer_hung(D, True)
            decoded = {figures_of(await world.answer()).decode_node for _ in range(4)}
            assert decoded == {D2}
            world.gateway.peer_hung(D, False)
            decoded = {figures_of(await world.answer()).decode_node for _ in range(4)}
            assert D in decoded

    virtually(main)


def test_a_head_that_says_so_of_its_replica_counts_as_hung_until_it_says_otherwise_or_is_lost() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            over = messages.ReplicaHung(hung=False)
            endings: tuple[Callable[[], None], ...] = (
                partial(world.gateway.on_replica_hung, D, Role.WORKER, over),
                partial(world.gateway.peer_lost, D),
            )
            for ends_it in endings:
                world.gateway.on_replica_hung(D, Role.WORKER, messages.ReplicaHung(hung=True))
                world.gateway.peer_hung(D, True)
                world.gateway.peer_hung(D, False)  # it answers; but its replica does not get on
                assert {figures_of(await world.answer()).decode_node for _ in range(4)} == {D2}
                ends_it()
                assert D in {figures_of(await world.answer()).decode_node for _ in range(4)}

    virtually(main)
