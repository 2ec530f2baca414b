"""Two vLLM engines of different models in one process: each does what one with a process of its own does."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.node.engine import protocol
from p2pserve.node.engine.protocol import KvSlice
from p2pserve.node.engine.settings import Sharing

from ....conftest import make_random_model
from ..devices import BLOCK
from ..kv_engines import Engine, Result, Way, accepted, delivered, engines, listening, prompt_of

LENGTHS = (1, 40, 127, 128, 129, 300)
SMALL: dict[str, Any] = {"max_batched_tokens": 256, "max_requests": 4}  # steps have no room for all requests
AHEAD: dict[str, Any] = {"async_scheduling": True}  # as on a GPU: on a CPU it gains nothing, but works
LONG = 3 * BLOCK  # tokens of answers that take their time
HEADS = {"one": (4, 2), "other": (3, 1)}  # layers and KV heads
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another geometry than `random_model`."""
    folder = tmp_path_factory.mktemp("other")
    return make_random_model(folder, hidden_size=192, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1)


async def start_shared(start: Any, other_model: Path, **settings: Any) -> dict[str, Engine]:
    """Both models in one process, by service."""
    one = await start(sharing=Sharing(service="one"), **settings)
    other = await start(model=str(other_model), sharing=Sharing(service="other"), **settings)
    assert pid_of(one) == pid_of(other)
    return {"one": one, "other": other}


def pid_of(engine: Engine) -> int:
    assert engine.link is not None
    assert engine.link.ready is not None
    return engine.link.ready.pid


async def await_idle(engine: Engine, free: int) -> None:
    """Until all blocks are free again."""
    await engine.until(lambda: engine.stats is not None and engine.stats.running == 0 and engine.free == free)


@pytest.mark.parametrize("settings", [SMALL, SMALL | AHEAD], ids=["steps", "ahead"])
def test_two_models_asked_at_once_answer_as_alone(
    engine_channels: list[int], random_model: Path, other_model: Path, settings: dict[str, Any]
) -> None:
    """Many requests of both, with more of each than a step has room for; then one leaves, comes back, and the other
    has gone on meanwhile."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            alone = {"one": await start(), "other": await start(model=str(other_model))}
            shared = await start_shared(start, other_model, **settings)
            asked = [(name, prompt_of(length, seed)) for name in shared for length in LENGTHS for seed in range(2)]
            expected = {each: (await alone[each[0]].generate(each[1])).tokens for each in asked}

            async def check(engine: Engine, request: str, each: tuple[str, tuple[int, ...]]) -> None:
                assert (await engine.finished(request)).tokens == expected[each], f"{each[0]}, {len(each[1])} tokens"

            requests = [shared[name].submit(prompt) for name, prompt in asked]
            for each, request in zip(asked, requests, strict=True):
                await check(shared[each[0]], request, each)
            stays, pid = shared["one"], pid_of(shared["one"])
            requests = [shared[name].submit(prompt) for name, prompt in asked]
            assert shared["other"].link is not None
            shared["other"].link.close()
            back = await start(model=str(other_model), sharing=Sharing(service="other"), **settings)
            assert pid_of(back) == pid
            for each, request in zip(asked, requests, strict=True):
                if each[0] == "one":
                    await check(stays, request, each)
                else:
                    await check(back, back.submit(each[1]), each)

    trio.run(main)


@pytest.mark.parametrize("settings", [{}, AHEAD], ids=["steps", "ahead"])
def test_requests_that_lose_their_kv_are_answered(
    engine_channels: list[int], random_model: Path, other_model: Path, settings: dict[str, Any]
) -> None:
    """Memory for a third of the answers of both models: they are those of engines of their own, and every block is free
    again. When one model leaves, the other has all of the memory."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            alone = {"one": await start(), "other": await start(model=str(other_model))}
            shared = await start_shared(start, other_model, kv_cache_mib=8, **settings)
            asked = [(name, prompt_of(60, seed)) for name in shared for seed in range(10)]
            expected = [alone[name].submit(prompt, count=LONG, deadline_s=280) for name, prompt in asked]
            requests = [shared[name].submit(prompt, count=LONG, deadline_s=280) for name, prompt in asked]
            for (name, _), request, same in zip(asked, requests, expected, strict=True):
                tokens = (await ended(shared[name], request)).tokens
                assert tokens == (await ended(alone[name], same)).tokens
                assert len(tokens) == LONG
            for engine in shared.values():
                assert sum(each.preemptions for each in engine.iterations) > 0
                assert engine.link is not None
                assert engine.link.ready is not None
                await await_idle(engine, engine.link.ready.kv_tokens)
            await shared["one"].generate(prompt_of(60, 99))
            assert shared["other"].link is not None
            shared["other"].link.close()
            await shared["one"].until(lambda: shared["one"].stats is not None and shared["one"].stats.kv_quota == 1.0)

    trio.run(main)


def test_a_lone_answer_goes_on_when_another_model_has_had_its_memory(
    engine_channels: list[int], random_model: Path, other_model: Path
) -> None:
    """Its engine runs ahead, and has had no step without it when its KV goes, and when it is computed again."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            alone = await start()
            shared = await start_shared(start, other_model, kv_cache_mib=3, **AHEAD)
            long, short = shared["one"], shared["other"]
            for seed in range(1, 8):  # one whose budget is as long as its answer loses no KV
                expected = alone.submit(prompt_of(60, seed), count=LONG, deadline_s=280)
                request = long.submit(prompt_of(60, seed), count=LONG, deadline_s=280)
                while request not in long.results or not long.results[request].finish:
                    await short.generate(prompt_of(400, 2))
                assert (await ended(long, request)).tokens == (await ended(alone, expected)).tokens
                if any(each.preemptions for each in long.iterations):
                    return
            raise AssertionError("none has lost its KV")

    trio.run(main)


async def ended(engine: Engine, request: str) -> Result:
    """What came of it, which takes its time."""
    with trio.fail_after(200):
        while True:
            with suppress(trio.TooSlowError):
                return await engine.finished(request)


def test_models_of_one_size_share_blocks_and_no_prefixes(
    engine_channels: list[int], random_model: Path, tmp_path: Path
) -> None:
    """Each can have every block, and none finds another's prompt in its cache: not even where both were asked the same,
    one after the other, and the second has had the first one's blocks."""
    twin = make_random_model(tmp_path, intermediate_size=320)

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            alone = {"one": await start(), "other": await start(model=str(twin))}
            shared = await start_shared(start, twin, kv_cache_mib=8)
            blocks = {
                engine.link.ready.kv_tokens // BLOCK for engine in shared.values() if engine.link and engine.link.ready
            }
            assert blocks == {15}
            for seed in range(6):  # more than there is room for
                prompt = prompt_of(400, seed)
                for name, engine in shared.items():
                    result = await engine.generate(prompt)
                    assert result.cached == 0
                    assert result.tokens == (await alone[name].generate(prompt)).tokens
                    again = await engine.generate(prompt)
                    assert (again.cached, again.tokens) == (384, result.tokens)
            # What one has overwritten, the other has forgotten: it knows of no more than there is room for.
            assert len(shared["one"].held) + len(shared["other"].held) <= 15

    trio.run(main)


def test_a_model_with_many_requests_leaves_room_for_one_of_another(
    engine_channels: list[int], random_model: Path, other_model: Path
) -> None:
    """Long answers of one model fill the memory, again and again; a short one of the other comes long before they have
    ended, and with the first tokens that it would have alone."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            alone = await start(model=str(other_model))
            shared = await start_shared(start, other_model, kv_cache_mib=8)
            many, few = shared["one"], shared["other"]
            flood = [many.submit(prompt_of(100, seed), count=LONG) for seed in range(30)]
            await many.until(lambda: many.stats is not None and many.stats.kv_usage > 0.9)
            expected = await alone.generate(prompt_of(300, 7))
            assert (await few.generate(prompt_of(300, 7))).tokens == expected.tokens
            unfinished = [name for name in flood if name not in many.results or not many.results[name].finish]
            assert len(unfinished) > 15
            for request in flood:
                many.send(protocol.Cancel(request=request))
            assert few.link is not None
            assert few.link.ready is not None
            await await_idle(few, few.link.ready.kv_tokens)

    trio.run(main)


def test_kv_goes_both_ways_for_both_models_at_once(
    engine_channels: list[int], random_model: Path, other_model: Path
) -> None:
    """From a process that is shared into another one, and back, while all four engines have prompts of their own."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            here = await start_shared(start, other_model)
            there = {"one": await start(), "other": await start(model=str(other_model))}
            results: dict[str, Result] = {}

            async def send(name: str, source: Engine, target: Engine, seed: int) -> None:
                with listening() as (way, listener):
                    way = of_model(way, name)
                    request = target.submit(prompt_of(300, seed), receive=way)
                    source.submit(prompt_of(300, seed), send=way)
                    target.attach(*await accepted(listener))
                    results[f"{name} {seed}"] = await delivered(source, target, way, request)

            async with trio.open_nursery() as nursery:
                for name in here:
                    nursery.start_soon(send, name, here[name], there[name], 1)
                    nursery.start_soon(send, name, there[name], here[name], 2)
                    nursery.start_soon(here[name].generate, prompt_of(200, 3))
            for name in here:
                for seed in (1, 2):
                    fresh = here[name] if seed == 1 else there[name]
                    result = results[f"{name} {seed}"]
                    assert result.cached >= 299
                    assert result.tokens == (await fresh.generate(prompt_of(300, seed))).tokens, f"{name} {seed}"

    trio.run(main)


def of_model(way: Way, name: str) -> Way:
    """The way for the KV of one of the models."""
    layers, heads = HEADS[name]
    return replace(way, slice=KvSlice(first_layer=0, last_layer=layers, first_head=0, last_head=heads))


def test_the_model_at_work_is_named_when_the_process_ends(
    engine_channels: list[int], random_model: Path, other_model: Path
) -> None:
    """Killed while one model computes, the other hears whose doing it was, and both can be started again."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            for _ in range(5):  # killed between two steps, it was nobody's
                shared = await start_shared(start, other_model)
                one, other = shared["one"].link, shared["other"].link
                assert one is not None
                assert other is not None
                requests = [shared["other"].submit(prompt_of(200, seed), count=200) for seed in range(8)]
                await shared["other"].until(lambda: requests[0] in shared["other"].results)  # noqa: B023
                os.kill(pid_of(shared["other"]), signal.SIGKILL)
                assert "SIGKILL" in await other.wait_gone()
                how = await one.wait_gone()
                assert not other.ended_by_other
                if one.ended_by_other:
                    assert "in the engine of other" in how
                    return
        raise AssertionError("it was nobody's in five attempts")

    trio.run(main)
