"""Real vLLM engines: which prefixes they say they hold, and whose requests share them."""

from pathlib import Path

import trio

from p2pserve.coordinator.prefixes.naming import prefix_names

from .devices import BLOCK
from .kv_engines import accepted, delivered, engines, listening, prompt_of


def test_an_engine_says_which_prefixes_it_holds(engine_channels: list[int], random_model: Path) -> None:
    """By names that a gateway computes from tokens alone; and what has come from another box it holds as well."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine, other = await start(), await start()
            prompt, salted = prompt_of(300), prompt_of(300, seed=1)
            fresh = await engine.generate(prompt)
            await engine.generate(salted, cache_salt="alice")
            expected = {*prefix_names(prompt, BLOCK), *prefix_names(salted, BLOCK, "alice")}
            await engine.until(lambda: engine.held >= expected)
            assert len(expected) == 4
            again = await engine.generate(prompt)
            assert again.tokens == fresh.tokens
            assert again.cached == 2 * BLOCK
            with listening() as (way, listener):
                request = other.submit(prompt, receive=way)
                engine.submit(prompt, send=way)
                other.attach(*await accepted(listener))
                received = await delivered(engine, other, way, request)
            assert received.tokens == fresh.tokens
            await other.until(lambda: other.held >= set(prefix_names(prompt, BLOCK)))

    trio.run(main)


def test_requests_of_other_salts_share_nothing_and_get_the_same_answers(
    engine_channels: list[int], random_model: Path
) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine, prompt = await start(), prompt_of(300)
            found = [await engine.generate(prompt, cache_salt=salt) for salt in ("", "alice", "bob", "alice", "")]
            assert [each.cached for each in found] == [0, 0, 0, 2 * BLOCK, 2 * BLOCK]
            assert {tuple(each.tokens) for each in found} == {tuple(found[0].tokens)}

    trio.run(main)


def test_what_is_overwritten_is_not_held_any_more(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model, kv_cache_mib=4) as start:
            engine, prompt = await start(), prompt_of(300)
            await engine.generate(prompt)
            await engine.until(lambda: engine.held >= set(prefix_names(prompt, BLOCK)))
            assert engine.link is not None
            assert engine.link.ready is not None
            for seed in range(1, engine.link.ready.kv_tokens // BLOCK):
                await engine.generate(prompt_of(300, seed=seed))
            await engine.until(lambda: not engine.held & set(prefix_names(prompt, BLOCK)))
            assert len(engine.held) <= engine.link.ready.kv_tokens // BLOCK
            assert (await engine.generate(prompt)).cached == 0

    trio.run(main)


def test_what_is_cached_does_not_count_as_to_be_computed(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model, max_requests=1) as start:
            engine, prompt = await start(), prompt_of(300)
            await engine.generate(prompt)
            engine.submit(prompt_of(9), count=100)
            engine.submit(prompt, count=1)
            await engine.until(lambda: engine.stats is not None and engine.stats.pending_prefill_tokens > 0)
            assert engine.stats is not None
            assert engine.stats.pending_prefill_tokens <= 9 + 300 - 2 * BLOCK

    trio.run(main)


def test_what_is_cached_and_only_to_be_sent_waits_for_no_prompt(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine, other = await start(), await start()
            prompt = prompt_of(300)
            fresh = await engine.generate(prompt)
            with listening() as (way, listener):
                received = other.submit(prompt, receive=way, receive_tokens=2 * BLOCK + 1)
                # With a step of one block, these take all of it eight times.
                long = [engine.submit(prompt_of(500, seed), count=2) for seed in (1, 2)]
                sent = engine.submit(prompt[: 2 * BLOCK + 1], send=way)
                other.attach(*await accepted(listener))
                result = await delivered(engine, other, way, received)
                for each in long:
                    assert len((await engine.finished(each)).tokens) == 2
            order = [request for request in engine.results if request in (sent, *long)]  # by their first tokens
            assert order == [sent, *long]
            assert engine.results[sent].cached == 2 * BLOCK
            assert result.tokens == fresh.tokens

    trio.run(main)
