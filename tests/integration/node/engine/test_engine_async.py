"""Engines that schedule a step while the one before it is under way, as they do on GPUs: the same answers as without,
and whatever may happen to a request or its KV, also with a batch in flight."""

from __future__ import annotations

import json
import queue
import random
import secrets
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.wire.tickets import LinkTicket
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials.trial import Trial, TrialAnswer, TrialEngine, open_trial

from ...conftest import WAIT_LIMIT_S

pytestmark = pytest.mark.timeout(300)

BLOCK = 128  # positions, on a CPU
COUNT = 12
CACHE_MIB, BLOCKS = 5, 10  # of the engine that decodes


def prompt_of(length: int, seed: str = "") -> tuple[int, ...]:
    """Noise that starts differently for each length and seed, so that no prompt is another's prefix."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(1, 4096) for _ in range(length))


@dataclass
class Engines:
    """One engine without asynchronous scheduling, and two with it, the first of which hands KV over to the second."""

    plain: TrialEngine
    prefill: TrialEngine
    decode: TrialEngine
    trial: Trial
    config: protocol.EngineConfig
    link: LinkTicket  # from `prefill` to `decode`

    async def alone(self, prompt: tuple[int, ...], count: int = COUNT, **sampling: Any) -> list[int]:
        """What is answered without asynchronous scheduling."""
        return (await self.plain.answer(self.plain.submit(prompt, count, **sampling))).tokens

    def ends(
        self, pacing: protocol.WantedSendMode = "auto", deadline_s: float = WAIT_LIMIT_S
    ) -> tuple[protocol.Outlet, protocol.Inlet]:
        """Of one transfer between the two."""
        (outlet,), (inlet,) = self.trial.transfer_ends(self.link, "raw", self.decode.ready, pacing=pacing)
        ticket = msgspec.structs.replace(outlet.ticket, deadline_s=deadline_s)
        return msgspec.structs.replace(outlet, ticket=ticket), msgspec.structs.replace(inlet, ticket=ticket)

    async def transfer_prompt(
        self,
        prompt: tuple[int, ...],
        pacing: protocol.WantedSendMode,
        *,
        part: int | None = None,
        count: int = COUNT,
        **sampling: Any,
    ) -> TrialAnswer:
        """Prefill `part` of the prompt, or all of it, at the one and go on at the other."""
        part = len(prompt) if part is None else part
        outlet, inlet = self.ends(pacing)
        request = self.decode.submit(prompt, count, receive=(inlet,), receive_tokens=part, **sampling)
        first = self.prefill.submit(prompt[:part], 1, send=(outlet,))
        answer = await self.decode.answer(request)
        await self.prefill.answer(first)
        await self.prefill.report(outlet.ticket.transfer)
        return answer

    async def transfer_to_workers(
        self, receiver: TrialEngine, links: list[LinkTicket], prompt: tuple[int, ...]
    ) -> TrialAnswer:
        """The same for an engine of two workers, which have a KV head each."""
        (whole,), _ = self.trial.transfer_ends(links[0], "raw", receiver.ready)
        send, receive = [], []
        for tp, link in enumerate(links):
            ticket = msgspec.structs.replace(whole.ticket, link=link.link)
            part = msgspec.structs.replace(whole.slice, first_head=tp, last_head=tp + 1)
            send.append(msgspec.structs.replace(whole, slice=part, ticket=ticket, link=link))
            receive.append(protocol.Inlet(rank=protocol.WorkerRank(tp=tp), slice=part, ticket=ticket, link=link))
        request = receiver.submit(prompt, COUNT, receive=tuple(receive), receive_tokens=len(prompt))
        first = self.prefill.submit(prompt, 1, send=tuple(send))
        answer = await receiver.answer(request)
        await self.prefill.answer(first)
        return answer

    async def check_blocks(self) -> None:
        """The cache has room for ten blocks: without those of requests that have ended this would wait for ever."""
        prompts = [prompt_of(380, secrets.token_hex(4)) for _ in range(3)]
        requests = [self.decode.submit(prompt, COUNT) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            assert (await self.decode.answer(request)).tokens == await self.alone(prompt)


Body = Callable[[Engines], Awaitable[None]]


@pytest.fixture(scope="module")
def run(engine_channels: list[int], random_model: Path) -> Iterator[Callable[[Body], None]]:
    """Runs a body with the engines, which are the same for all tests here, in a thread of their own."""
    bodies: queue.SimpleQueue[Body | None] = queue.SimpleQueue()
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    async def main() -> None:
        config = protocol.EngineConfig(model=str(random_model), kv_cache_mib=64, max_batched_tokens=BLOCK)
        ahead = msgspec.structs.replace(config, async_scheduling=True)
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            await server.wait_ready()
            with trio.fail_after(WAIT_LIMIT_S):
                plain, prefill = await trial.start(config), await trial.start(ahead)
                decode = await trial.start(msgspec.structs.replace(ahead, kv_cache_mib=CACHE_MIB))
            engines = Engines(plain, prefill, decode, trial, ahead, trial.join(decode))
            while (body := await trio.to_thread.run_sync(bodies.get)) is not None:
                try:
                    with trio.fail_after(WAIT_LIMIT_S):
                        await body(engines)
                    ends.put(None)
                except BaseException as error:
                    ends.put(error)
                    raise

    def serve() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            ends.put(error)

    def play(body: Body) -> None:
        bodies.put(body)
        error = ends.get(timeout=3 * WAIT_LIMIT_S)
        if error is not None:
            raise error

    thread = threading.Thread(target=serve)
    thread.start()
    yield play
    bodies.put(None)
    thread.join()


def test_the_scheduler_is_ahead_where_that_was_asked_for_but_not_with_stages(run: Callable[[Body], None]) -> None:
    """Two workers of one box answer the same, alone and with KV from elsewhere; stages do, too, without it."""

    async def body(engines: Engines) -> None:
        assert not engines.plain.ready.async_scheduling
        assert engines.prefill.ready.async_scheduling
        assert engines.decode.ready.async_scheduling
        pair = await engines.trial.start(msgspec.structs.replace(engines.config, tp=2))
        head, _ = await engines.trial.start_stages(engines.config, (3, 1))
        assert pair.ready.async_scheduling
        assert not head.ready.async_scheduling
        links = [engines.trial.join(pair) for _ in range(2)]
        for length in (1, 129, 300):
            prompt = prompt_of(length, "workers")
            expected = await engines.alone(prompt)
            handed = await engines.transfer_to_workers(pair, links, prompt)
            assert handed.tokens == expected
            assert handed.cached >= length - 1
            for engine in (pair, head):
                assert (await engine.generate(prompt, COUNT)).tokens == expected
        for engine in (pair, head):
            engine.stop()

    run(body)


def test_answers_are_the_same(run: Callable[[Body], None]) -> None:
    """Beside each other, of prompts that are read in one step and in several, drawn with a seed and not; again,
    when their blocks are cached."""

    async def body(engines: Engines) -> None:
        asked: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
            (prompt_of(length, str(number)), 1 + 7 * number, {"temperature": 1.0, "seed": number} if number % 2 else {})
            for number, length in enumerate((1, 127, 128, 129, 256, 300, 400, 64))
        ]
        expected = [await engines.alone(prompt, count, **sampling) for prompt, count, sampling in asked]
        assert len(set(expected[5])) > len(expected[5]) / 2  # drawn: not one token again and again
        for engine in (engines.prefill, engines.decode, engines.prefill):
            requests = [engine.submit(prompt, count, **sampling) for prompt, count, sampling in asked]
            assert [(await engine.answer(request)).tokens for request in requests] == expected

    run(body)


@pytest.mark.parametrize("pacing", ["layerwise", "serialised"])
def test_kv_is_transferred(run: Callable[[Body], None], pacing: protocol.WantedSendMode) -> None:
    """Around the ends of blocks and of steps, all of a prompt and parts of it; again, beside cached blocks."""

    async def body(engines: Engines) -> None:
        for length, part in ((1, 1), (127, 127), (128, 128), (129, 129), (300, 300), (300, 17), (300, 128), (300, 299)):
            prompt = prompt_of(length, f"{pacing} {part}")
            expected = await engines.alone(prompt)
            for again in (False, True):
                answer = await engines.transfer_prompt(prompt, pacing, part=part)
                assert answer.tokens == expected, f"{part} of {length} tokens, {again=}"
                assert answer.cached >= min(part, length - 1)

    run(body)


def test_requests_that_lose_their_blocks_are_computed_again(run: Callable[[Body], None]) -> None:
    """More of them at once than the cache has room for; the blocks of those that are preempted may be in use by a batch
    that is under way."""

    async def body(engines: Engines) -> None:
        prompts = [prompt_of(250, f"preempted {number}") for number in range(5)]
        sampling: list[dict[str, Any]] = [{"temperature": float(number % 2), "seed": number} for number in range(5)]
        answers: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            answer = await engines.transfer_prompt(prompts[number], "auto", count=100, **sampling[number])
            answers[number] = answer.tokens

        engines.decode.iterations.clear()
        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(ask, number)
        for number, prompt in enumerate(prompts):
            assert answers[number] == await engines.alone(prompt, 100, **sampling[number])
        assert sum(each.preemptions for each in engines.decode.iterations) > 0

    run(body)


def test_an_answer_goes_on_from_a_token_that_was_told(run: Callable[[Body], None]) -> None:
    """Before its KV has come, after that, and without any; whatever token this engine would have written."""

    async def body(engines: Engines) -> None:
        assert engines.decode.link is not None
        for length in (1, 128, 129, 300):
            for when in ("after", "before", "instead"):
                prompt = prompt_of(length, f"told {when}")
                outlet, inlet = engines.ends()
                request = engines.decode.submit(
                    prompt, COUNT, receive=(inlet,), receive_tokens=length, awaits_first_token=True
                )
                transfer = outlet.ticket.transfer
                if when == "instead":
                    token = 77
                    engines.decode.send_first_token(request, token)
                    engines.decode.link.send(protocol.AbortTransfer(transfer=transfer, reason="the sender is gone"))
                else:
                    first = engines.prefill.submit(prompt, 1, send=(outlet,))
                    token = (await engines.alone(prompt, 1))[0] ^ 1
                    if when == "before":
                        engines.decode.send_first_token(request, token)
                    await engines.prefill.answer(first)
                    await engines.prefill.report(transfer)
                    if when == "after":
                        await engines.decode.generate(prompt_of(9, f"{length}"), COUNT)  # it had time for a dozen steps
                        assert request not in engines.decode.answers
                        engines.decode.send_first_token(request, token)
                answer = await engines.decode.answer(request)
                assert answer.tokens == [token, *await engines.alone((*prompt, token), COUNT - 1)], f"{when} {length}"

    run(body)


@pytest.mark.parametrize("when", ["waiting", "loading", "here", "answering"])
def test_a_cancelled_request_gives_its_blocks_back(run: Callable[[Body], None], when: str) -> None:
    """Nothing of its KV is there, some of it, all of it but its first token, or it is in the middle of its answer, with
    a batch under way that writes into its blocks."""

    async def body(engines: Engines) -> None:
        engine = engines.decode
        assert engine.link is not None
        for number in range(2 * BLOCKS // 3):
            prompt = prompt_of(300, f"cancelled {when} {number}")
            outlet, inlet = engines.ends()
            told = when == "here"
            request = engine.submit(prompt, 200, receive=(inlet,), receive_tokens=300, awaits_first_token=told)
            if when != "waiting":
                first = engines.prefill.submit(prompt, 1, send=(outlet,))
                if when == "loading":
                    await engines.prefill.answer(first)
                else:
                    await engines.prefill.report(outlet.ticket.transfer)
            if when == "answering":
                await begun(engine, request)
            engine.link.send(protocol.Cancel(request=request))
        await engines.check_blocks()

    run(body)


def test_kv_that_is_given_up_is_computed(run: Callable[[Body], None]) -> None:
    """By its receiver's node, or because its deadline has passed; others are being answered meanwhile."""

    async def body(engines: Engines) -> None:
        assert engines.decode.link is not None
        for number, how in enumerate(("abort", "deadline", "abort", "deadline")):
            prompt = prompt_of(300, f"given up {number}")
            other = prompt_of(50, f"meanwhile {number}")
            outlet, inlet = engines.ends(deadline_s=0.3 if how == "deadline" else WAIT_LIMIT_S)
            answering = engines.decode.submit(other, 100)
            request = engines.decode.submit(prompt, COUNT, receive=(inlet,), receive_tokens=300)
            if how == "abort":
                transfer = outlet.ticket.transfer
                engines.decode.link.send(protocol.AbortTransfer(transfer=transfer, reason="the prefill node was lost"))
            assert (await engines.decode.answer(request)).tokens == await engines.alone(prompt)
            assert (await engines.decode.answer(answering)).tokens == await engines.alone(other, 100)
        await engines.check_blocks()

    run(body)


def test_a_sender_that_is_cancelled_tells_the_receiver(run: Callable[[Body], None]) -> None:
    """With a chunk of its prompt under way; the rest is computed where the answer is."""

    async def body(engines: Engines) -> None:
        assert engines.prefill.link is not None
        prompt = prompt_of(400, "cancelled sender")
        outlet, inlet = engines.ends("layerwise")
        busy = [engines.prefill.submit(prompt_of(400, f"busy {number}"), 30) for number in range(3)]
        request = engines.decode.submit(prompt, COUNT, receive=(inlet,), receive_tokens=400)
        sending = engines.prefill.submit(prompt, 1, send=(outlet,))
        engines.prefill.link.send(protocol.Cancel(request=sending))
        assert (await engines.decode.answer(request)).tokens == await engines.alone(prompt)
        with pytest.raises(TransferError):
            await engines.prefill.report(outlet.ticket.transfer)
        for each in busy:
            assert (await engines.prefill.answer(each)).finish == "length"

    run(body)


async def begun(engine: TrialEngine, request: str) -> None:
    """Wait for the first token of an answer."""
    await engine.until(lambda: request in engine.answers)


async def ended(engine: TrialEngine, request: str) -> TrialAnswer:
    """An answer, however it ends."""
    await engine.until(lambda: request in engine.answers and engine.answers[request].finish != "")
    return engine.answers.pop(request)


def submitted(engine: TrialEngine, prompt: tuple[int, ...], count: int, deadline_s: float) -> str:
    """A request that ends with a stop token, or at its deadline."""
    assert engine.link is not None
    request = secrets.token_hex(8)
    sampling = protocol.Sampling(max_tokens=count)
    engine.link.send(protocol.Submit(request=request, prompt=prompt, sampling=sampling, deadline_s=deadline_s))
    return request


def test_a_request_ends_at_its_deadline(run: Callable[[Body], None]) -> None:
    async def body(engines: Engines) -> None:
        engine = engines.decode
        for number in range(BLOCKS):
            request = submitted(engine, prompt_of(9, f"late {number}"), 500, 0.03)
            assert (await ended(engine, request)).finish == "deadline"
        await engines.check_blocks()

    run(body)


def test_an_answer_ends_with_its_stop_token(run: Callable[[Body], None], random_model: Path, tmp_path: Path) -> None:
    """Although another token after it is being computed when the scheduler hears of it: nobody sees that one, and the
    blocks are given to others only then."""

    async def body(engines: Engines) -> None:
        prompts = [prompt_of(200 + number, "stop") for number in range(6)]
        expected = [await engines.alone(prompt, 40) for prompt in prompts]
        stop = expected[0][5]
        model = tmp_path / "stops"
        shutil.copytree(random_model, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "eos_token_id": stop}))
        changed = msgspec.structs.replace(engines.config, model=str(model), kv_cache_mib=CACHE_MIB)
        engine = await engines.trial.start(changed)
        assert stop in engine.ready.eos_tokens
        for _ in range(3):
            requests = [submitted(engine, prompt, 40, WAIT_LIMIT_S) for prompt in prompts]
            for request, tokens in zip(requests, expected, strict=True):
                answer = await ended(engine, request)
                ends = next((place for place, token in enumerate(tokens) if token in engine.ready.eos_tokens), None)
                assert answer.tokens == tokens[: None if ends is None else ends + 1]
                assert answer.finish == ("length" if ends is None else "stop")
        engine.stop()

    run(body)


def test_a_step_computes_no_more_than_was_asked_for(run: Callable[[Body], None]) -> None:
    async def body(engines: Engines) -> None:
        engine = engines.prefill
        assert engine.link is not None
        longest = []
        for limit in (64, 0):
            engine.link.send(protocol.LimitSteps(tokens=limit))
            engine.iterations.clear()
            await engine.generate(prompt_of(300, f"limit {limit}"), 1)
            await engine.until(lambda: sum(each.prefill_tokens for each in engine.iterations) >= 299)
            longest.append(max(sample.prefill_tokens for each in engine.iterations for sample in each.samples))
        assert longest == [64, BLOCK]

    run(body)
