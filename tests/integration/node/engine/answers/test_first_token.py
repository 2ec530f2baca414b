"""An answer that one engine begins, having prefilled it, and another goes on with."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.kvtransport.wire.tickets import LinkTicket
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials.trial import Trial, TrialAnswer, TrialEngine, open_trial

from ....conftest import WAIT_LIMIT_S
from ..devices import SETTINGS

pytestmark = pytest.mark.timeout(300)

LAYERS = 4  # of the random model
COUNT = 12
LENGTHS = (1, 127, 128, 129, 255, 256, 300)  # a block has 128 positions


def prompt_of(length: int, seed: str = "") -> tuple[int, ...]:
    """Noise that starts differently for each length and seed, so that no prompt is another's prefix."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(1, 4096) for _ in range(length))


Outlets = tuple[protocol.Outlet, ...]
Inlets = tuple[protocol.Inlet, ...]


@dataclass
class Pair:
    """Two engines, of which the second may have several stages, and the links from the first to each of those."""

    prefill: TrialEngine
    decode: TrialEngine
    trial: Trial
    partition: tuple[int, ...]
    links: list[LinkTicket]

    def ends(self) -> tuple[Outlets, Inlets]:
        """Of one transfer."""
        (whole,), _ = self.trial.transfer_ends(self.links[0], "raw", self.decode.ready)
        send, receive, layer = [], [], 0
        for stage, (link, layers) in enumerate(zip(self.links, self.partition, strict=True)):
            ticket = msgspec.structs.replace(whole.ticket, link=link.link)
            part = msgspec.structs.replace(whole.slice, first_layer=layer, last_layer=layer + layers)
            send.append(msgspec.structs.replace(whole, slice=part, ticket=ticket, link=link))
            receive.append(protocol.Inlet(rank=protocol.WorkerRank(stage=stage), slice=part, ticket=ticket, link=link))
            layer += layers
        return tuple(send), tuple(receive)

    def receive(
        self, prompt: tuple[int, ...], deadline_s: float = WAIT_LIMIT_S, **sampling: Any
    ) -> tuple[str, Outlets]:
        """A request that is to be told its first token, and the sending ends of its KV."""
        send, inlets = self.ends()
        receive = tuple(
            msgspec.structs.replace(inlet, ticket=msgspec.structs.replace(inlet.ticket, deadline_s=deadline_s))
            for inlet in inlets
        )
        request = self.decode.submit(
            prompt, COUNT, receive=receive, receive_tokens=len(prompt), awaits_first_token=True, **sampling
        )
        return request, send

    async def begin(self, prompt: tuple[int, ...], send: Outlets, **sampling: Any) -> int:
        """Prefill the prompt and decode the first token; returns it when all KV is at the other engine."""
        first = await self.prefill.answer(self.prefill.submit(prompt, 1, send=send, **sampling))
        await self.prefill.report(send[0].ticket.transfer)
        (token,) = first.tokens
        return token

    async def transfer_prompt(self, prompt: tuple[int, ...], **sampling: Any) -> TrialAnswer:
        """The whole of it."""
        request, send = self.receive(prompt, **sampling)
        self.decode.send_first_token(request, await self.begin(prompt, send, **sampling))
        return await self.decode.answer(request)

    async def alone(self, prompt: tuple[int, ...], count: int = COUNT, **sampling: Any) -> list[int]:
        """What one engine answers."""
        return (await self.prefill.answer(self.prefill.submit(prompt, count, **sampling))).tokens


Body = Callable[[Pair], Awaitable[None]]


@pytest.fixture
def run(engine_channels: list[int], random_model: Path) -> Callable[..., None]:
    """Runs a body with two engines; the second may be a replica of several stages."""

    async def main(body: Body, partition: tuple[int, ...], cache_mib: int) -> None:
        config = protocol.EngineConfig(
            model=str(random_model), kv_cache_mib=cache_mib, max_batched_tokens=128, **SETTINGS
        )
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            await server.wait_ready()
            with trio.fail_after(WAIT_LIMIT_S):
                prefill = await trial.start(config)
                stages = (
                    await trial.start_stages(config, partition) if len(partition) > 1 else [await trial.start(config)]
                )
                await body(Pair(prefill, stages[0], trial, partition, [trial.join(stage) for stage in stages]))

    return lambda body, partition=(LAYERS,), cache_mib=64: trio.run(main, body, partition, cache_mib)


@pytest.mark.parametrize("partition", [(LAYERS,), (3, 1)])
def test_a_seed_gives_the_same_answer_wherever_it_is_computed(
    run: Callable[..., None], partition: tuple[int, ...]
) -> None:
    """By one engine, after a transfer, by another one from the middle on, and beside others. A batch reads 128 tokens,
    so that the prompt is read in parts."""

    async def body(pair: Pair) -> None:
        prompt = prompt_of(300)
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7}
        expected = await pair.alone(prompt, **sampling)
        assert expected != await pair.alone(prompt, temperature=1.0, seed=8)
        assert len(set(expected)) > COUNT / 2  # drawn from 4,096 tokens: not with the same numbers again and again
        assert (await pair.transfer_prompt(prompt, **sampling)).tokens == expected
        for done in (1, 5, COUNT - 1):
            others = [pair.decode.submit(prompt_of(20, str(n)), COUNT, temperature=1.0, seed=n) for n in range(3)]
            rest = pair.decode.submit((*prompt, *expected[:done]), COUNT - done, **sampling)
            assert (await pair.decode.answer(rest)).tokens == expected[done:]
            for other in others:
                await pair.decode.answer(other)

    run(body, partition)


def test_the_answer_goes_on_without_computing_anything_twice(run: Callable[..., None]) -> None:
    """Around block boundaries; twice, the second time beside cached blocks."""

    async def body(pair: Pair) -> None:
        for length in LENGTHS:
            prompt = prompt_of(length)
            expected = await pair.alone(prompt)
            for again in (False, True):
                answer = await pair.transfer_prompt(prompt)
                assert answer.tokens == expected, f"a prompt of {length} tokens, {again=}"
                assert answer.cached == length
        # Each step computed one position, and none of them the prompt's last.
        steps = 2 * len(LENGTHS) * (COUNT - 1)

        def done() -> int:
            return sum(each.decode_tokens for each in pair.decode.iterations)

        await pair.decode.until(lambda: done() >= steps)  # they are told ten times a second
        assert done() == steps
        many = [pair.receive(prompt_of(300, str(seed))) for seed in range(6)]
        for seed, (request, send) in enumerate(many):
            pair.decode.send_first_token(request, await pair.begin(prompt_of(300, str(seed)), send))
        for seed, (request, _) in enumerate(many):
            assert (await pair.decode.answer(request)).tokens == await pair.alone(prompt_of(300, str(seed)))

    run(body)


def test_what_was_told_counts_and_not_what_this_engine_would_have_written(run: Callable[..., None]) -> None:
    async def body(pair: Pair) -> None:
        for length in (5, 127, 300):
            prompt = prompt_of(length)
            request, send = pair.receive(prompt)
            other = (await pair.begin(prompt, send)) ^ 1
            pair.decode.send_first_token(request, other)
            answer = await pair.decode.answer(request)
            assert answer.tokens == [other, *await pair.alone((*prompt, other), COUNT - 1)]
        # Told before any KV has come, and although none ever will
        prompt = prompt_of(200)
        request, send = pair.receive(prompt)
        pair.decode.send_first_token(request, 77)
        assert pair.decode.link is not None
        pair.decode.link.send(protocol.AbortTransfer(transfer=send[0].ticket.transfer, reason="the sender is gone"))
        assert (await pair.decode.answer(request)).tokens == [77, *await pair.alone((*prompt, 77), COUNT - 1)]

    run(body)


def test_a_request_whose_kv_is_here_waits_for_its_first_token(run: Callable[..., None]) -> None:
    """Until it is told, or that none will be; what cannot be a token counts as none."""

    async def body(pair: Pair) -> None:
        assert pair.decode.link is not None
        for word in ("token", "abort", "no token"):
            prompt = prompt_of(200, word)
            request, send = pair.receive(prompt)
            token = await pair.begin(prompt, send)
            await pair.decode.generate(prompt_of(9, word), COUNT)  # it had time for a dozen steps
            assert request not in pair.decode.answers
            if word == "abort":
                transfer = send[0].ticket.transfer
                pair.decode.link.send(protocol.AbortTransfer(transfer=transfer, reason="there is no first token"))
            else:
                pair.decode.send_first_token(request, token if word == "token" else 1 << 20)
            answer = await pair.decode.answer(request)
            assert answer.tokens == await pair.alone(prompt)

    run(body)


def test_a_request_whose_kv_does_not_come_begins_by_itself(run: Callable[..., None]) -> None:
    async def body(pair: Pair) -> None:
        prompt = prompt_of(200)
        request, _ = pair.receive(prompt, deadline_s=0.3)  # which nobody sends
        answer = await pair.decode.answer(request)
        assert answer.tokens == await pair.alone(prompt)
        pair.decode.send_first_token(request, 5)  # too late for anything
        assert (await pair.decode.generate(prompt, COUNT)).tokens == answer.tokens

    run(body)


@pytest.mark.parametrize("here", [True, False])
def test_one_that_is_cancelled_while_it_waits_leaves_its_blocks_to_others(run: Callable[..., None], here: bool) -> None:
    async def body(pair: Pair) -> None:
        assert pair.decode.link is not None
        for seed in range(5):  # each takes three of ten blocks
            prompt = prompt_of(300, str(seed))
            request, send = pair.receive(prompt)
            if here:
                await pair.begin(prompt, send)
            pair.decode.link.send(protocol.Cancel(request=request))
        prompt = prompt_of(300, "after")
        assert (await pair.transfer_prompt(prompt)).tokens == await pair.alone(prompt)

    run(body, cache_mib=5)


def test_a_replica_of_several_stages_goes_on_from_a_token_that_it_was_told(run: Callable[..., None]) -> None:
    async def body(pair: Pair) -> None:
        for length in (1, 128, 200):
            prompt = prompt_of(length)
            assert (await pair.transfer_prompt(prompt)).tokens == await pair.alone(prompt)

    run(body, (1, 3))
