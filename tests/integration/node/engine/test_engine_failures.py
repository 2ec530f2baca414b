"""Real engine processes: KV that does not come, or not in time, is computed; nothing of it is left behind."""

import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import trio

from p2pserve.kvtransport.wire.dial_path import DialPath as KvPath
from p2pserve.node.engine import protocol

from .devices import BLOCK, require_devices
from .kv_engines import accepted, delivered, engines, forward, listening, prompt_of, pumping, tcp_pair


@pytest.mark.parametrize("how", ["stalled", "slow"])
def test_kv_that_comes_too_slowly_is_computed_as_far_as_it_is_missing(
    engine_channels: list[int], random_model: Path, how: str
) -> None:
    """Long before its deadline: as soon as computing the rest is clearly sooner."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            await decode_.generate(prompt_of(300, seed=1))  # it knows how fast it is
            prompt = prompt_of(300)
            with listening(deadline_s=300.0) as (way, listener):
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=replace(way, pace_bytes_s=0 if how == "stalled" else 40_000))
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                decode_.attach(hello, far)
                with near, connection, pumping(near, connection):
                    if how == "stalled":  # one block of 128 tokens in all 4 layers, and something of the next
                        await trio.to_thread.run_sync(forward, connection, near, 800 << 10)
                        result = await decode_.finished(request)
                    else:
                        with pumping(connection, near):
                            result = await decode_.finished(request)
                await prefill.until(lambda: way.key in prefill.reports)
            assert "computing the rest takes" in prefill.reports[way.key].reason
            kept = BLOCK if how == "stalled" else 0
            await decode_.until(lambda: decode_.prefilled == 300 + 300 - kept)
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


def test_an_engine_whose_worker_is_killed_ends(engine_channels: list[int], random_model: Path) -> None:
    require_devices(2)

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start(tp=2)
            await engine.generate(prompt_of(5))
            assert engine.link is not None
            assert engine.link.ready is not None
            main_process = psutil.Process(engine.link.ready.pid)
            workers = [child for child in main_process.children() if child.name() != "python"]
            request = engine.submit(prompt_of(9), count=400)
            await engine.until(lambda: request in engine.results)
            workers[0].kill()
            with trio.fail_after(60):
                assert "status 1" in await engine.link.wait_gone()
            for worker in workers:
                await trio.to_thread.run_sync(worker.wait, 30)

    trio.run(main)


# In float32 a block of 128 tokens takes 128 KiB in each of 4 layers: a layer and a bit; all of a block and a bit.
@pytest.mark.parametrize("limit", [140 << 10, 800 << 10], ids=["first block", "second block"])
@pytest.mark.parametrize("how", ["cut", "aborted", "link closed"])
def test_a_broken_transfer_is_computed_again(
    engine_channels: list[int], random_model: Path, how: str, limit: int
) -> None:
    """The connection ends in the middle of a layer and nobody answers any more, or it stalls there until the gateway
    gives the prefill up, or until its node is lost."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            await decode_.generate(prompt_of(5))
            free = decode_.free
            prompt = prompt_of(300)
            with listening(deadline_s=2.0 if how == "cut" else 30.0) as (way, listener):
                transfer = way.ticket.transfer
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=way)
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                decode_.attach(hello, far)
                listener.close()  # nobody answers when it is dialled again
                with near, connection, pumping(near, connection):
                    await trio.to_thread.run_sync(forward, connection, near, limit)
                    if how == "cut":
                        near.close()
                        connection.close()
                    elif how == "aborted":
                        await trio.sleep(0.2)
                        decode_.send(protocol.AbortTransfer(transfer=transfer, reason="the prefill node was lost"))
                    else:
                        decode_.send(protocol.CloseLink(link=way.link.link, reason="the prefill node was lost"))
                    result = await decode_.finished(request)
                    await prefill.until(lambda: way.key in prefill.reports)
                assert not prefill.reports[way.key].delivered
            assert result.tokens == (await prefill.generate(prompt)).tokens
            await decode_.until(lambda: decode_.free == free)

    trio.run(main)


def test_a_connection_that_is_cut_is_dialled_again(engine_channels: list[int], random_model: Path) -> None:
    """In the middle of a layer: what was lost is sent again, and nothing is computed twice."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompt = prompt_of(300)
            with listening() as (way, listener):
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=way)
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                decode_.attach(hello, far)
                with near, connection, pumping(near, connection):
                    await trio.to_thread.run_sync(forward, connection, near, 140 << 10)
                decode_.attach(*await accepted(listener))
                result = await delivered(prefill, decode_, way, request)
            assert result.cached >= len(prompt) - 1
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


def test_a_transfer_goes_on_over_other_paths(engine_channels: list[int], random_model: Path) -> None:
    """The first path leads nowhere; the agent names another one."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompt = prompt_of(200)
            with listening() as (way, listener), socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=replace(way, port=nobody.getsockname()[1]))
                await prefill.until(lambda: any(report.waiting_bytes for report in prefill.links))
                other = KvPath("127.0.0.1", way.port, label="other", streams=2)
                prefill.send(protocol.SetLinkPaths(link=way.link.link, paths=(other,)))
                for _ in range(2):
                    decode_.attach(*await accepted(listener))
                result = await delivered(prefill, decode_, way, request)
            report = prefill.reports[way.key]
            assert {label for label, size in report.paths.items() if size} == {"other"}
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


def test_kv_that_does_not_come_is_computed(engine_channels: list[int], random_model: Path) -> None:
    """The ticket's deadline passes; meanwhile another request is served."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            prompt = prompt_of(200)
            with listening(deadline_s=1.0) as (way, _):
                begun = trio.current_time()
                request = engine.submit(prompt, receive=way)
                await engine.generate(prompt_of(5))
                assert trio.current_time() - begun < 1.0
                assert request not in engine.results
                result = await engine.finished(request)
                assert 1.0 <= trio.current_time() - begun < 5.0
            fresh = await start()
            assert result.tokens == (await fresh.generate(prompt)).tokens

    trio.run(main)


def test_cancelling_gives_all_memory_back(engine_channels: list[int], random_model: Path) -> None:
    """While KV is awaited, while it arrives, and while tokens are made."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, engine = await start(), await start()
            expected = await engine.generate(prompt_of(40))
            free = engine.free
            prompt = prompt_of(300)
            with listening() as (way, listener):
                request = engine.submit(prompt, receive=way)
                await engine.until(lambda: engine.free < free)
                engine.send(protocol.Cancel(request=request))
                await engine.until(lambda: engine.free == free)
            with listening() as (way, listener):
                request = engine.submit(prompt, receive=way)
                prefill.submit(prompt, send=way)
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                engine.attach(hello, far)
                with near, connection, pumping(near, connection):
                    await trio.to_thread.run_sync(forward, connection, near, 300 << 10)
                    await engine.until(lambda: engine.free < free)
                    engine.send(protocol.Cancel(request=request))
                    await engine.until(lambda: engine.free == free)
                    await prefill.until(lambda: way.key in prefill.reports)
                    assert not prefill.reports[way.key].delivered
            request = engine.submit(prompt, count=200)
            await engine.until(lambda: request in engine.results)
            engine.send(protocol.Cancel(request=request))
            await engine.until(lambda: engine.free == free)
            assert engine.stats is not None
            assert (engine.stats.running, engine.stats.waiting) == (0, 0)
            assert engine.results[request].finish == ""
            assert (await engine.generate(prompt_of(40))).tokens == expected.tokens

    trio.run(main)


def test_a_request_ends_at_its_deadline(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            await engine.generate(prompt_of(5))
            free = engine.free
            for ticket_s in (None, 30.0):
                with listening(ticket_s or 1.0) as (way, _):
                    receive = way if ticket_s else ()
                    request = engine.submit(prompt_of(9), count=480, deadline_s=0.1, receive=receive)
                    result = await engine.finished(request)
                assert result.finish == "deadline"
                assert len(result.tokens) < 480
                await engine.until(lambda: engine.free == free)
            assert (await engine.generate(prompt_of(9))).finish == "length"

    trio.run(main)


@pytest.mark.parametrize(
    "prompt",
    [(), (1 << 20,), prompt_of(600)],
    ids=["empty", "outside the vocabulary", "too long"],
)
def test_a_request_that_the_engine_refuses_costs_no_other(
    engine_channels: list[int], random_model: Path, prompt: tuple[int, ...]
) -> None:
    """One bad request must not take an engine from everybody, and then the next engine, where it is tried again."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            other = engine.submit(prompt_of(9), count=200)
            with listening() as (way, _):
                refused = [engine.submit(prompt), engine.submit(prompt, receive=way)]
                refused.append(engine.submit(prompt, send=way.again()))
                for request in refused:
                    assert (await engine.finished(request)).finish == "refused"
            assert len((await engine.finished(other)).tokens) == 200

    trio.run(main)
