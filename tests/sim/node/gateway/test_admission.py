"""Requests at a gateway that has more than its engines can do: which class is refused, and when it may come back."""

from contextlib import suppress
from math import inf
from typing import Any

import pytest

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.coordinator.requests.admission import AdmissionSettings, ClassRules, PriorityClass
from p2pserve.node import messages
from p2pserve.node.settings import ClientLimits

from .world import ANSWER, CLIENT, PROMPT, D, World, elapse, open_world, virtually

HOG = PeerId("hog")
RULES = {
    PriorityClass.URGENT: ClassRules(lateness=0.0, least_s=2.0, weight=16.0),
    PriorityClass.NORMAL: ClassRules(lateness=0.0, least_s=10.0, weight=4.0),
    PriorityClass.BATCH: ClassRules(lateness=0.0, least_s=inf, weight=1.0, queue_share=0.5, cost=4.0),
}
LIMITS = ClientLimits(requests=1000, admission=AdmissionSettings(rules=RULES))


async def overload(world: World, client: PeerId = HOG) -> None:
    """One request at a time, and far more than a minute's work; so long that the gateway has seen how slow that is."""
    world.set_engine(D, places=1)
    for _ in range(250):
        await world.ask(client)
    await elapse(15.0)


async def refusal(world: World, client: PeerId = HOG, **settings: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await world.ask(client, **settings)
    assert caught.value.code == "busy"
    return caught.value


def test_what_would_begin_too_late_is_refused_with_the_time_in_which_the_queue_is_short_enough() -> None:
    async def main() -> None:
        async with open_world(D, limits=LIMITS) as world:
            await overload(world)
            error = await refusal(world)
            assert error.message.startswith("busy: its first token would take ")
            assert "and normal requests may wait 10 s; try again in" in error.message
            assert error.retry_after_s is not None
            assert error.retry_after_s > 10.0
            await elapse(1.1 * error.retry_after_s)  # rates are estimates
            await world.ask(HOG)
            assert world.gateway.refused.total == {"urgent": 0, "normal": 1, "batch": 0}
            world.gateway.peer_lost(HOG)

    virtually(main)


def test_batch_requests_wait_and_urgent_ones_go_first() -> None:
    async def main() -> None:
        async with open_world(D, limits=LIMITS) as world:
            await overload(world, CLIENT)
            batch = await world.ask(priority=7)
            urgent = await world.ask(priority=-7)
            await elapse(1.0)
            assert urgent in world.ended
            assert batch not in world.ended
            world.gateway.peer_lost(CLIENT)

    virtually(main)


def test_another_client_does_not_wait_for_a_flood() -> None:
    async def main() -> None:
        async with open_world(D, limits=LIMITS) as world:
            await overload(world)
            for _ in range(3):
                name = await world.ask(CLIENT)
                await elapse(1.0)
                assert name in world.ended
            world.gateway.peer_lost(HOG)

    virtually(main)


def test_a_request_whose_deadline_comes_before_its_turn_is_refused_at_once() -> None:
    async def main() -> None:
        async with open_world(D, limits=LIMITS) as world:
            await overload(world)
            error = await refusal(world, deadline_s=0.5, priority=1)
            assert "and its deadline is 0.5 s" in error.message
            world.gateway.peer_lost(HOG)

    virtually(main)


def test_an_answer_that_goes_on_here_is_not_refused_for_the_queue() -> None:
    async def main() -> None:
        async with open_world(D, limits=LIMITS) as world:
            await overload(world)
            body = messages.Generate(request="r", prompt=PROMPT, max_tokens=20)
            continued = messages.ContinueGenerate(generate=body, tokens=ANSWER[:5])
            await world.gateway.continue_answer(HOG, Role.CLIENT, continued)
            world.gateway.peer_lost(HOG)

    virtually(main)


def test_without_an_engine_nobody_is_refused_for_a_queue() -> None:
    async def main() -> None:
        async with open_world(D, limits=LIMITS) as world:
            await overload(world)
            world.set_engine(D, "restarting", starts=2)
            await world.ask(HOG)
            world.gateway.peer_lost(HOG)
            world.set_engine(D, places=1, starts=2)

    virtually(main)


def test_who_takes_what_it_is_told_for_an_answer_is_served_in_the_end() -> None:
    """A client of one batch request beside a flood of urgent ones of many clients: refused or not, it has its answer
    within a bound."""

    async def main() -> None:
        async with open_world(D, limits=LIMITS) as world:
            world.set_engine(D, places=1)
            name, served = None, False
            for second in range(60):
                for number in range(10):  # more than twice what can be served
                    with suppress(RemoteError):
                        await world.ask(PeerId(f"hog{number}"), priority=-1)
                if name is None and second >= 10:
                    name = await world.ask(CLIENT, priority=1)
                await elapse(1.0)
                served = name in world.ended
                if served:
                    break
            assert served
            for number in range(10):
                world.gateway.peer_lost(PeerId(f"hog{number}"))

    virtually(main)
