"""Two vLLM engines of different models in one process: each does what one with a process of its own does."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.node.engine.protocol import KvSlice
from p2pserve.node.engine.settings import Sharing

from ....conftest import make_random_model
from ..devices import BLOCK
from ..kv_engines import Engine, Result, Way, accepted, delivered, engines, listening, prompt_of

LENGTHS = (1, 40, 127, 128, 129, 300)
SMALL: dict[str, Any] = {"max_batched_tokens": 256, "max_requests": 4}  # steps have no room for all requests
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
    """Until all of its blocks are free again."""
    await engine.until(lambda: engine.stats is not None and engine.stats.running == 0 and engine.free == free)


def test_two_models_asked_at_once_answer_as_alone(
    engine_channels: list[int], random_model: Path, other_model: Path
) -> None:
    """Many requests of both, with more of each than a step has room for; then one leaves, comes back, and the other
    has gone on meanwhile."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            alone = {"one": await start(), "other": await start(model=str(other_model))}
            shared = await start_shared(start, other_model, **SMALL)
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
            back = await start(model=str(other_model), sharing=Sharing(service="other"), **SMALL)
            assert pid_of(back) == pid
            for each, request in zip(asked, requests, strict=True):
                if each[0] == "one":
                    await check(stays, request, each)
                else:
                    await check(back, back.submit(each[1]), each)

    trio.run(main)


def test_requests_that_lose_their_kv_are_answered(
    engine_channels: list[int], random_model: Path, other_model: Path
) -> None:
    """Memory for three of eight answers: all come, and every block is free again."""

    async def main() -> None:
        async with engines(engine_channels, random_model, kv_cache_mib=8) as start:
            shared = await start_shared(start, other_model)
            free = {}
            for name, engine in shared.items():
                await engine.generate(prompt_of(1, 99))
                free[name] = engine.free
            blocks = free["one"] // BLOCK
            requests = [
                (engine, engine.submit(prompt_of(60, seed), count=BLOCK * 3))
                for engine in shared.values()
                for seed in range(2 * blocks // 3)
            ]
            for engine, request in requests:
                with trio.fail_after(100):
                    await engine.until(lambda: request in engine.results and engine.results[request].finish != "")  # noqa: B023
                assert len(engine.results[request].tokens) == BLOCK * 3
            for name, engine in shared.items():
                await await_idle(engine, free[name])
            assert sum(each.preemptions for each in shared["one"].iterations) > 0

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
