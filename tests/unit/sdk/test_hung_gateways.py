"""Gateways that answer no pings: they are waited for as long as another one would take to get as far."""

from __future__ import annotations

import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.node.messages import Generate, Generating

from .client_world import COMPLETE, WORDS, Gateway, in_virtual_time, let_pass, request, whole, world

FIRST_S = 6.0  # until the first token
LAST_S = 60.0  # until the others


async def slow(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
    """The first word after FIRST_S, the others after LAST_S."""

    async def speak() -> None:
        await let_pass(FIRST_S)
        gateway.say(client, body, WORDS[0], 1)
        await let_pass(LAST_S - FIRST_S)
        for number, word in list(enumerate(WORDS, start=1))[1:]:
            gateway.say(client, body, word, number)
        gateway.say(client, body, "", finish="length")

    gateway.nursery.start_soon(speak)
    return Generating(service="m-1", prompt_tokens=3)


@pytest.mark.parametrize(
    ("hung_at", "answers_at", "ends_at"),
    [
        (10.0, 15.0, LAST_S),  # back before the time of a first token is over
        (10.0, None, 10.0 + FIRST_S),
        (2.0, 3.0, LAST_S),  # without a token yet: as long as it has taken
        (2.0, None, 4.0),
        (0.0, None, 0.0),  # nothing is lost
    ],
)
def test_a_gateway_that_hangs_is_waited_for_as_long_as_its_first_token_took(
    hung_at: float, answers_at: float | None, ends_at: float
) -> None:
    async def main() -> None:
        async with world(slow, whole) as (made, session), trio.open_nursery() as nursery:
            peer = made.gateways[0].network.peer_id
            began = trio.current_time()

            async def hang() -> None:
                await let_pass(hung_at + 0.01)  # it has taken the request
                session._on_hung(peer, True)
                if answers_at is not None:
                    await let_pass(answers_at - hung_at)
                    session._on_hung(peer, False)

            nursery.start_soon(hang)
            answer = await session.generate(request(deadline_s=200.0), lambda delta: None)
            assert answer == COMPLETE
            assert trio.current_time() - began == pytest.approx(ends_at, abs=0.5)
            assert len(made.gateways[1].asked) + len(made.gateways[1].continued) == (ends_at < LAST_S)
            if ends_at < LAST_S:
                await made.gateways[0].was_stopped.wait()

    in_virtual_time(main)


def test_one_that_says_something_does_not_hang() -> None:
    """Its first token comes while it is taken to hang: nobody else is asked."""

    async def main() -> None:
        async with world(slow, whole) as (made, session), trio.open_nursery() as nursery:
            peer = made.gateways[0].network.peer_id

            async def hang() -> None:
                await let_pass(FIRST_S - 1.0)
                session._on_hung(peer, True)

            nursery.start_soon(hang)
            await session.generate(request(deadline_s=200.0), lambda delta: None)
            assert not made.gateways[1].asked + made.gateways[1].continued

    in_virtual_time(main)
