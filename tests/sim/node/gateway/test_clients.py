"""What clients are refused, clients that leave, and everything at once."""

import random
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node import messages
from p2pserve.sdk.requests import Replay

from .world import (
    ANSWER,
    CLIENT,
    D2,
    LATENCY_S,
    MODEL,
    P2,
    PROMPT,
    PROMPT_TOKENS,
    SERVICE,
    SOURCE,
    STEP_S,
    D,
    P,
    World,
    elapse,
    open_world,
    text_of,
    virtually,
)

SETTINGS = RequestSettings()


# ---- the client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0.5 * LATENCY_S, 1.5 * LATENCY_S, 2 * LATENCY_S + 0.5 * STEP_S, 0.15])
@pytest.mark.parametrize("how", ["gone", "stops", "does not read"])
def test_a_client_that_leaves_ends_everything(how: str, after: float) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            name = await world.ask(max_tokens=200)
            await elapse(after)
            if how == "stops":
                world.gateway.stop(PeerId("stranger"), Role.CLIENT, messages.StopRequest(request=name))
                assert not world.gateway.idle
                world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
            elif how == "gone":
                world.gateway.peer_lost(CLIENT)
            else:
                world.dead.add(CLIENT)
            await elapse(LATENCY_S + 2 * STEP_S if how != "does not read" else 1.0)
            world.check_nothing_is_left()
            assert name not in world.ended
            assert len(world.tokens()) < 20

    virtually(main)


def test_a_client_that_leaves_while_no_engine_is_there() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.ask()
            await elapse(1)
            world.gateway.peer_lost(CLIENT)
            await elapse(0.1)
            world.check_nothing_is_left()
            assert world.chunks == {}

    virtually(main)


def test_a_stop_string_ends_the_answer_at_the_worker_too() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            last = await world.answer(max_tokens=200, stop=("each in",))
            assert (last.finish, last.error) == ("stop", "")
            assert world.text() == SOURCE[: SOURCE.index("each in")]
            assert len(world.tokens()) < 30
            assert world.sent("request.stop") == [D]

    virtually(main)


def test_a_stop_string_is_found_over_two_engines() -> None:
    async def main() -> None:
        stop = "3.14 🙂\n"
        for fail in range(0, 40, 3):
            async with open_world(P, D, D2) as world:
                world.faults[D] = [f"fail:{fail}"]
                last = await world.answer(max_tokens=200, stop=(stop,))
                assert last.finish == "stop"
                assert world.text() == SOURCE[: SOURCE.index(stop)]
                assert world.tokens() == ANSWER[: len(world.tokens())]

    virtually(main)


# ---- a gateway is lost ------------------------------------------------------------------------------------


@pytest.mark.parametrize("had", [1, 2, 5, 11, 12])
@pytest.mark.parametrize("stop", [(), ("each in",)])
def test_another_gateway_goes_on_where_its_engine_would_have_begun_otherwise(had: int, stop: tuple[str, ...]) -> None:
    """The client sees no token lost, repeated or changed, however the other route rounds."""

    async def main() -> None:
        replay = Replay()
        async with open_world(P, D) as lost:
            name = await lost.ask(stop=stop)
            while len(lost.tokens(name)) < min(had, 12) and name not in lost.ended:
                await elapse(STEP_S / 2)
            for update in lost.chunks[name]:
                replay.take(msgspec.structs.replace(update, finish=None))  # its end is not heard
            lost.gateway.peer_lost(CLIENT)
        async with open_world(D2) as world:
            world.otherwise[D2] = tuple(token ^ 1 for token in ANSWER)
            assert world.otherwise[D2][: len(replay.tokens)] != tuple(replay.tokens)
            body = messages.Generate(request="r", prompt=PROMPT, max_tokens=12, stop=stop)
            continued = messages.ContinueGenerate(generate=body, tokens=tuple(replay.tokens))
            replay.resume()
            await world.gateway.continue_answer(CLIENT, Role.CLIENT, continued)
            await world.settle()
            for update in world.chunks["r"]:
                replay.take(update)
            assert tuple(replay.tokens) == ANSWER[: len(replay.tokens)]
            assert replay.text == (text_of(12) if not stop else SOURCE[: SOURCE.index("each in")])
            assert world.chunks["r"][-1].finish == ("length" if not stop else "stop")
            asked = [body.prompt for _, _, body in world.opened if isinstance(body, messages.DecodeOpen)]
            complete = len(continued.tokens) == 12 or ("each in" in text_of(len(continued.tokens)) and bool(stop))
            assert asked == ([] if complete else [PROMPT_TOKENS + continued.tokens])

    virtually(main)


def test_what_cannot_be_continued() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for tokens, complaint in (
                ((MODEL.shape.vocabulary,), "tokens: 4096 is no token of this model, which has 4096"),
                (ANSWER[:4], "tokens: 4 of the answer are there already; max_tokens is 3"),
            ):
                body = messages.Generate(request="r", prompt=PROMPT, max_tokens=3)
                continued = messages.ContinueGenerate(generate=body, tokens=tokens)
                with pytest.raises(RemoteError) as caught:
                    await world.gateway.continue_answer(CLIENT, Role.CLIENT, continued)
                assert (caught.value.code, caught.value.message) == ("invalid", complaint)

    virtually(main)


async def refusal(world: World, client: PeerId = CLIENT, **settings: Any) -> RemoteError:
    fields = {"request": "x", "prompt": PROMPT, **settings}
    with pytest.raises(RemoteError) as caught:
        await world.gateway.generate(client, Role.CLIENT, messages.Generate(**fields))
    return caught.value


def test_what_a_gateway_refuses() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for settings, field_name in (
                ({"max_tokens": 0}, "max_tokens"),
                ({"max_tokens": 512}, "max_tokens"),
                ({"prompt": ""}, "prompt"),
                ({"prompt": SOURCE * 10}, "prompt"),
                ({"service": "another"}, "service"),
            ):
                error = await refusal(world, **settings)
                assert error.code == "invalid"
                assert error.message.startswith(f"{field_name}: ")
            assert world.gateway.idle
            await world.ask(service="tiny")
            await world.ask(service=SERVICE)
            error = await refusal(world, request="r1")
            assert (error.code, error.message[:9]) == ("invalid", "request: ")
            other = messages.Generate(request="r1", prompt=PROMPT, max_tokens=1)
            await world.gateway.generate(PeerId("another"), Role.CLIENT, other)  # ids are a client's own
            await world.settle()

    virtually(main)


def test_an_engine_with_less_room_sets_the_limit() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            advert = world.view.adverts[D]
            assert advert.engine is not None
            small = messages.EngineAdvert(state="ready", max_model_len=50, tflops=1.0, memory_gbps=1.0, starts=1)
            world.view.adverts[D] = messages.Advert(hardware=advert.hardware, draining=False, model=MODEL, engine=small)
            error = await refusal(world, max_tokens=60)
            assert "this model holds 50" in error.message

    virtually(main)


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            name = await world.ask()
            await elapse(LATENCY_S)
            world.gateway.drain()
            assert (await refusal(world)).code == "draining"
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            assert world.chunks[name][-1].finish == "length"
            world.gateway.resume()
            again = await world.ask()
            await world.settle()
            assert world.tokens(again) == ANSWER[:12]

    virtually(main)


# ---- all at once ------------------------------------------------------------------------------------------


async def chaos(world: World, rng: random.Random, until: float) -> None:
    """Engines die and restart, nodes leave and come back."""
    peers = [P, P2, D, D2]
    while trio.current_time() < until:
        await elapse(rng.uniform(0.2, 1.5))
        peer = rng.choice(peers)
        if peer in world.dead:
            world.dead.discard(peer)
            world.set_engine(peer, starts=1)
        elif rng.random() < 0.3 and len(world.dead) < 3:
            world.lose(peer)
        elif world.state_of(peer) == "ready":
            world.engine_lost(peer)
        else:
            world.set_engine(peer, starts=world.view.starts(peer) + 1)
    for peer in peers:
        world.dead.discard(peer)
        world.set_engine(peer, starts=world.view.starts(peer) + 1)


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_whatever_fails(seed: int) -> None:
    """Random failures over 150 requests: one last chunk each, and the tokens are those of the
    script, in order."""
    rng = random.Random(seed)
    count = 150

    async def main() -> None:
        async with open_world(P, P2, D, D2) as world:
            world.burst = lambda: rng.randint(1, 3)
            world.nursery.start_soon(chaos, world, rng, 40.0)
            asked: dict[str, tuple[int, float]] = {}
            left = set()
            for _ in range(count):
                await elapse(rng.uniform(0, 0.4))
                if rng.random() < 0.2:
                    peer = rng.choice([P, P2])
                    world.faults[peer].append(
                        rng.choice(["refuse", "timeout", "fail", "silent", "gone", "lost", "late-fail", "late-gone"])
                    )
                if rng.random() < 0.2:
                    fault = rng.choice(["refuse", "timeout", "lost", "fail", "gone", "hang", "wide", "other", "alone"])
                    at = f":{rng.randint(1, 9)}" if fault in ("fail", "gone", "hang", "wide") else ""
                    world.faults[rng.choice([D, D2])].append(fault + at)
                wanted, deadline = rng.randint(1, 60), rng.choice([2.0, 20.0, 60.0])
                name = await world.ask(max_tokens=wanted, deadline_s=deadline)
                asked[name] = (wanted, trio.current_time() + deadline)
                if rng.random() < 0.05:
                    await elapse(rng.uniform(0, 0.2))
                    world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
                    left.add(name)
            await world.settle()
            complete = 0
            for name, (wanted, deadline) in asked.items():
                tokens = world.tokens(name)
                assert tokens == ANSWER[: len(tokens)]
                finals = [chunk for chunk in world.chunks[name] if chunk.finish is not None]
                if not finals:
                    assert name in left
                    continue
                (last,) = finals
                assert world.ended[name] <= deadline + 1e-6
                assert (last.finish == "error") == bool(last.error)
                if last.finish == "length":
                    complete += 1
                    assert len(tokens) == wanted
                    assert world.text(name) == text_of(wanted)
                else:
                    assert last.error.startswith(("deadline: ", "no engine is left", "given up: "))
            assert complete > count / 2
            assert any(
                figures.figures.attempts > 1 for chunks in world.chunks.values() if (figures := chunks[-1]).figures
            )

    virtually(main)
