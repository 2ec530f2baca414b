"""Real engine processes: KV that came from another engine is the KV that this one would have computed."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from p2pserve.kernels.codec import decode, torch_dtype
from p2pserve.kernels.codecs import codec_from_wire
from p2pserve.kernels.format import dtype_from_wire
from p2pserve.kvtransport.link.endpoint import Endpoint
from p2pserve.kvtransport.wire.channel import parse_link_hello
from p2pserve.node.engine import protocol

from .devices import BLOCK, require_devices
from .kv_engines import (
    COUNT,
    Engine,
    Way,
    accepted,
    delivered,
    engines,
    listening,
    prompt_of,
    transfer_prompt,
    ways_between,
)

LENGTHS = (1, 2, 127, 128, 129, 255, 256, 257, 300)


def test_transferred_kv_gives_the_same_tokens(engine_channels: list[int], random_model: Path) -> None:
    """Around block boundaries and over several chunks of a prefill; twice, the second time beside cached blocks."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            for length in LENGTHS:
                prompt = prompt_of(length)
                first = await transfer_prompt(prefill, decode_, prompt)
                expected = await prefill.generate(prompt)
                assert first.tokens == expected.tokens, f"prompt of {length} tokens"
                assert len(first.tokens) == COUNT
                assert first.cached >= length - 1, f"prompt of {length} tokens was computed again"
                again = await transfer_prompt(prefill, decode_, prompt)
                assert again.tokens == expected.tokens, f"second prompt of {length} tokens"

    trio.run(main)


def test_workers_that_share_heads_exchange_their_parts(engine_channels: list[int], random_model: Path) -> None:
    """One worker to two, two to one, and two to two."""
    require_devices(2)

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            one, two, other = await start(), await start(tp=2), await start(tp=2)
            for source, source_tp, target, target_tp in ((one, 1, two, 2), (two, 2, one, 1), (two, 2, other, 2)):
                for length in (1, 129, 300):
                    prompt = prompt_of(length, seed=10 * source_tp + target_tp)
                    with socket.create_server(("127.0.0.1", 0)) as listener:
                        ways = ways_between(source_tp, target_tp, listener.getsockname()[1])
                        assert len(ways) == 2
                        request = target.submit(prompt, receive=ways)
                        source.submit(prompt, send=ways)
                        for _ in ways:
                            target.attach(*await accepted(listener))
                        result = await target.finished(request)
                        for way in ways:
                            await delivered(source, target, way, request)
                            assert source.reports[way.key].raw_bytes == length * 4 * 2 * 64 * 4  # one head
                    assert result.cached >= length - 1
                    fresh = target if source is one else one
                    assert result.tokens == (await fresh.generate(prompt)).tokens

    trio.run(main)


# Of a prompt of 300 in blocks of 32 there and 128 here: none of a block, part of one, around its end, all but a little.
PARTS = (1, 17, 77, 127, 128, 130, 200, 256, 299, 300)


def test_any_part_of_a_prompt_may_be_transferred_and_what_is_there_already_is_not_sent(
    engine_channels: list[int], random_model: Path
) -> None:
    """Whatever the blocks on both sides; the rest is computed here. Again, the blocks that are cached stay at home."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(block_size=32), await start()
            with listening() as (way, listener):
                for number, part in enumerate(PARTS):
                    prompt = prompt_of(300, seed=part)
                    for again in (False, True):
                        way = way.again()
                        request = decode_.submit(prompt, receive=way, receive_tokens=part)
                        prefill.submit(prompt[:part], send=way)
                        if not number and not again:
                            decode_.attach(*await accepted(listener))
                        if again and part <= 2 * BLOCK:  # the whole prompt's blocks were cached when it was answered
                            result = await decode_.finished(request)
                            assert (await prefill.report(way)).raw_bytes == 0
                        else:
                            result = await delivered(prefill, decode_, way, request)
                            sent = part - 2 * BLOCK if again else part
                            assert prefill.reports[way.key].raw_bytes == sent * 4 * 2 * 2 * 64 * 4
                        assert result.tokens == (await prefill.generate(prompt)).tokens, f"{part} of 300, {again=}"
                        assert result.cached >= min(part, 299)

    trio.run(main)


def test_engines_change_roles_while_they_serve(engine_channels: list[int], random_model: Path) -> None:
    """Each prefills for the other, decodes for it and serves alone, all at the same time: nothing is loaded again, and
    no request is dropped."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            pair = await start(), await start()
            prompts = [prompt_of(length, seed=7) for length in (9, 140, 300, 64, 200, 33, 256, 129)]
            asked: list[tuple[Engine, str]] = []
            links: list[Way] = []
            with ExitStack() as stack:
                for role, prompt in enumerate(prompts):
                    prefill, decode_ = pair if role % 2 else pair[::-1]
                    asked.append((prefill, prefill.submit(prompt, count=48)))  # alone, meanwhile
                    way, listener = stack.enter_context(listening())
                    links.append(way)
                    asked.append((decode_, decode_.submit(prompt, receive=way, count=48)))
                    prefill.submit(prompt, send=way)
                    decode_.attach(*await accepted(listener))
                results = [await engine.finished(request) for engine, request in asked]
                for role, way in enumerate(links):
                    assert (await pair[1 - role % 2].report(way)).delivered
            for alone, handed in zip(results[::2], results[1::2], strict=True):
                assert alone.finish == handed.finish == "length"
                assert alone.tokens == handed.tokens
                assert len(alone.tokens) == 48

    trio.run(main)


def test_requests_that_lose_their_blocks_are_computed_again(engine_channels: list[int], random_model: Path) -> None:
    """More requests than the cache has room for: those whose KV has come are preempted like any other."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start(kv_cache_mib=5)  # ten blocks
            prompts = [prompt_of(250, seed=seed) for seed in range(5)]
            with listening() as (way, listener):
                ways = [way.again() for _ in prompts]
                asked = [decode_.submit(p, receive=w, count=100) for p, w in zip(prompts, ways, strict=True)]
                for prompt, each in zip(prompts, ways, strict=True):
                    prefill.submit(prompt, send=each)
                decode_.attach(*await accepted(listener))
                results = [await decode_.finished(request) for request in asked]
            for prompt, result in zip(prompts, results, strict=True):
                assert result.tokens == (await prefill.generate(prompt, count=100)).tokens
            assert sum(each.preemptions for each in decode_.iterations) > 0

    trio.run(main)


def test_kv_that_the_prefix_cache_has_is_not_waited_for(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            prompt = prompt_of(300)
            expected = await engine.generate(prompt)
            free = engine.free
            with listening(deadline_s=60) as (way, _), trio.fail_after(10):
                result = await engine.finished(engine.submit(prompt, receive=way, receive_tokens=200))
            assert result.tokens == expected.tokens
            assert engine.free == free

    trio.run(main)


def test_a_connection_that_comes_before_its_request_is_used(engine_channels: list[int], random_model: Path) -> None:
    """The agent may be faster than an engine in the middle of a step."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompt = prompt_of(200)
            with listening() as (way, listener):
                prefill.submit(prompt, send=way)
                decode_.attach(*await accepted(listener))
                await decode_.generate(prompt_of(5))  # its engine has had time to look
                result = await delivered(prefill, decode_, way, decode_.submit(prompt, receive=way))
            assert result.cached >= len(prompt) - 1
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


@pytest.mark.parametrize("pacing", ["layerwise", "serialised", "auto"])
def test_a_link_stays_warm_for_the_next_transfer(engine_channels: list[int], random_model: Path, pacing: Any) -> None:
    """One connection serves one after the other and several at once, however the layers leave."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompts = [prompt_of(length, seed=1) for length in (3, 130, 300)]
            with listening() as (way, listener):
                way = replace(way, pacing=pacing)
                request = decode_.submit(prompts[0], receive=way)
                prefill.submit(prompts[0], send=way)
                decode_.attach(*await accepted(listener))
                await delivered(prefill, decode_, way, request)
                listener.close()  # from here on nothing can be dialled
                ways = [way.again() for _ in prompts]
                asked = [decode_.submit(p, receive=w) for p, w in zip(prompts, ways, strict=True)]
                for each, way_ in zip(prompts, ways, strict=True):
                    prefill.submit(each, send=way_)
                for prompt, way_, request in zip(prompts, ways, asked, strict=True):
                    result = await delivered(prefill, decode_, way_, request)
                    assert result.tokens == (await prefill.generate(prompt)).tokens
                    assert result.cached >= len(prompt) - 1
                    report = prefill.reports[way_.key]
                    assert pacing in (report.mode, "auto")
                    assert (
                        report.mode == "layerwise" or report.hidden_fraction == 0.0
                    )  # nothing leaves before its token
                    assert list(report.paths) == ["direct"]
                    assert report.paths["direct"] >= report.raw_bytes == len(prompt) * 4 * 2 * 2 * 64 * 4
            assert {report.link for report in prefill.links} <= {way.link.link}

    trio.run(main)


def test_a_prompt_waits_for_blocks_in_which_kv_is_held(engine_channels: list[int], random_model: Path) -> None:
    """Its receiver has no place for the first one's KV: nothing is given up, and nothing is read in its blocks' place
    until it is called off. The cache has room for one prompt at a time."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(kv_cache_mib=3), await start()
            first, second = prompt_of(300), prompt_of(320)
            expected = [(await decode_.generate(prompt)).tokens for prompt in (first, second)]
            with listening() as (way, _), listening() as (other, listener):
                held = await prefill.finished(prefill.submit(first, send=way))
                assert held.tokens == expected[0][:1]  # nobody waits for the KV to leave
                waiting = prefill.submit(second, send=other)
                receiving = decode_.submit(second, receive=other)
                decode_.attach(*await accepted(listener))
                await prefill.until(lambda: prefill.stats is not None and prefill.stats.waiting == 1)
                await trio.sleep(0.5)
                assert waiting not in prefill.results
                assert way.key not in prefill.reports
                prefill.send(protocol.AbortTransfer(transfer=way.ticket.transfer, reason="nobody wants it"))
                assert (await prefill.report(way)).reason == "nobody wants it"
                result = await delivered(prefill, decode_, other, receiving)
                assert result.tokens == expected[1]
                await prefill.until(lambda: prefill.stats is not None and prefill.stats.kv_usage == 0.0)

    trio.run(main)


async def read_kv(engine: Engine, prompt: tuple[int, ...]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """K and V of every layer, as the engine sends them."""
    parts: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def receive(way: Way, hello: bytes, connection: socket.socket) -> None:
        with Endpoint() as endpoint:
            endpoint.attach(parse_link_hello(hello), connection)
            incoming = endpoint.open_receiver(way.link).expect(way.ticket)
            incoming.grant()
            for frame in incoming:
                parts.setdefault(frame.layer, {})[frame.start] = decode(
                    codec_from_wire(frame.codec),
                    frame.payload,
                    tokens=frame.tokens,
                    heads=frame.head_last,
                    head_dim=frame.head_dim,
                    dtype=torch_dtype(dtype_from_wire(frame.dtype)),
                    start=frame.start,
                    layer=frame.layer,
                )
            incoming.acknowledge()

    with listening() as (way, listener):
        engine.submit(prompt, send=way)
        hello, connection = await accepted(listener)
        await trio.to_thread.run_sync(receive, way, hello, connection)
        await engine.until(lambda: way.key in engine.reports)
        assert engine.reports[way.key].delivered
    layers = {}
    for layer, pieces in parts.items():
        ordered = [pieces[first] for first in sorted(pieces)]
        layers[layer] = (torch.cat([k for k, _ in ordered]), torch.cat([v for _, v in ordered]))
    return layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_reads_back_what_was_written_into_it(
    engine_channels: list[int], random_model: Path, dtype: str
) -> None:
    """Whole blocks that came from another engine leave again bit for bit, in whatever way this backend packs them."""

    async def main() -> None:
        async with engines(engine_channels, random_model, dtype=dtype) as start:
            first, second = await start(), await start()
            prompt = prompt_of(300)
            computed = await read_kv(first, prompt)
            await transfer_prompt(first, second, prompt)
            passed_on = await read_kv(second, prompt)
            assert sorted(computed) == sorted(passed_on) == [0, 1, 2, 3]
            for layer, (k, v) in computed.items():
                assert k.shape == v.shape == (300, 2, 64)
                assert str(k.dtype) == f"torch.{dtype}"
                assert k.abs().sum() > 0
                assert torch.equal(k[: 2 * BLOCK], passed_on[layer][0][: 2 * BLOCK])
                assert torch.equal(v[: 2 * BLOCK], passed_on[layer][1][: 2 * BLOCK])
                assert not torch.equal(k, v)

    trio.run(main)
