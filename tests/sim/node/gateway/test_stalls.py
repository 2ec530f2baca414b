"""Nodes that answer, and do not get on with a request."""

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node.observing.values import EventKind
from p2pserve.node.requests.routes import STALL_DAMPING

from .world import ANSWER, CLIENT, D2, D, P, World, elapse, figures_of, open_world, text_of, virtually

SETTINGS = RequestSettings()
LIMIT_S = SETTINGS.stall_floor_s


def watch_stalls(world: World) -> list[PeerId]:
    """Whom the gateway calls stalled, to its node and in its log."""
    told: list[PeerId] = []
    logged: list[str] = []

    def record(kind: EventKind, *, peer: str = "", **facts: object) -> None:
        if kind is EventKind.MEMBER_STALLED:
            logged.append(peer)
            assert logged == [*told, peer]

    world.gateway.record = record
    world.gateway.on_member_stalled = told.append
    return told


@pytest.mark.parametrize("after", [0, 5])
def test_an_answer_goes_on_elsewhere_when_its_decode_node_says_nothing_more(after: int) -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            stalled = watch_stalls(world)
            world.faults[D] = [f"silent:{after}"]
            name = await world.ask()
            await elapse(LIMIT_S - 1.0)
            assert len(world.tokens(name)) == max(1, after), "the prefill node has told the first"
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            assert world.text(name) == text_of(12)
            figures = figures_of(world.chunks[name][-1])
            assert (figures.attempts, figures.decode_node) == (2, D2)
            assert figures.recovered == ("decode node vivid-boar: it stalled for 15 s",)
            assert D in world.sent("request.stop")
            assert stalled == [D]

    virtually(main)


def test_the_decode_node_computes_the_prompt_when_the_prefill_node_says_nothing() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            stalled = watch_stalls(world)
            world.faults[P] = ["silent"]
            figures = figures_of(await world.answer())
            assert world.tokens() == ANSWER[:12]
            assert (figures.attempts, figures.recovered) == (1, ("prefill node summer-sheep: it stalled for 15 s",))
            assert stalled == [P]

    virtually(main)


def test_nothing_is_moved_where_nobody_else_is() -> None:
    """And the client hears all the time that its request is under way."""

    async def main() -> None:
        async with open_world(D) as world:
            stalled = watch_stalls(world)
            world.faults[D] = ["silent:3"]
            last = await world.answer(deadline_s=50.0)
            assert last.error == "deadline: the answer was not complete after 50.0 s"
            assert world.tokens() == ANSWER[:3]
            assert stalled == [D]
            said = [chunk for chunk in world.chunks["r1"] if chunk.finish is None]
            assert len([chunk for chunk in said if not chunk.tokens]) == 50.0 // SETTINGS.news_s - 1

    virtually(main)


def test_several_requests_at_a_node_that_stalls_are_one_fault_and_new_ones_avoid_it_for_a_while() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            stalled = watch_stalls(world)
            world.faults[D] = ["silent:2"] * 4
            names = [await world.ask(deadline_s=300.0) for _ in range(4)]
            await world.settle()
            assert [world.tokens(name) for name in names] == [ANSWER[:12]] * 4
            assert stalled == [D]
            decoded = {figures_of(await world.answer()).decode_node for _ in range(4)}
            assert decoded == {D2}
            world.faults[D].clear()
            await elapse(STALL_DAMPING.held_for_s(1.0))
            decoded = {figures_of(await world.answer()).decode_node for _ in range(4)}
            assert D in decoded

    virtually(main)


def test_a_client_that_cannot_be_told_that_its_request_is_under_way_is_gone() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.faults[D] = ["silent:0"]
            await world.ask(deadline_s=300.0)
            world.dead.add(CLIENT)
            await elapse(SETTINGS.news_s + 0.5)
            world.check_nothing_is_left()

    virtually(main)
