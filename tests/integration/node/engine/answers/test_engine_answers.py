"""Answers of real engines to real prompts, held against `transformers` and against vLLM alone.

What is compared is how far each token is behind the best one in float32 logits. So 16-bit engines and KV in 4 bits are
held to the same text: where the model is undecided they may choose otherwise, elsewhere they may not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials.trial import Trial, TrialAnswer, TrialEngine, open_trial
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.text import TextModel

from ....conftest import WAIT_LIMIT_S
from ..devices import SETTINGS
from .answers import prompts, regrets

pytestmark = pytest.mark.timeout(300)

COUNT = 24
LENGTHS = (64, 300, 500)
# Logits. On a CPU the worst tokens were 0.11 behind with kv4, and 3.3 with the KV of another prompt.
MARGINS = {("float32", "raw"): 0.01, ("float32", "kv4"): 0.5, ("bfloat16", "raw"): 0.5, ("bfloat16", "kv4"): 1.0}
KEPT_MARGIN = 1.0  # from 16 bits to 8 and back: the worst was 0.08 and 0.47 behind with raw, 0.43 and 0.55 with kv4
SLOW_BYTES_S = 500_000  # a second for what a test breaks off after a part of it

Body = Callable[[Trial, protocol.EngineConfig], Awaitable[None]]


@pytest.fixture
def dtype() -> str:
    """What the engines compute in; `tests/gpu` has others."""
    return "float32"


@pytest.fixture
def run(engine_channels: list[int], dtype: str) -> Callable[[Body], None]:
    """Runs a body with a trial of its own."""

    async def main(body: Body) -> None:
        settings = {**SETTINGS, "dtype": dtype}
        config = protocol.EngineConfig(
            model=str(BUNDLED), kv_cache_mib=64, max_batched_tokens=128, max_requests=8, **settings
        )
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            await server.wait_ready()
            with trio.fail_after(2 * WAIT_LIMIT_S):
                await body(trial, config)

    return lambda body: trio.run(main, body)


def asked(skip: int = 0) -> list[list[int]]:
    """Prompts of Python; with another `skip`, others."""
    text = TextModel(BUNDLED)
    return [list(text.encode(prompt)) for prompt in prompts(text, LENGTHS, skip=skip)]


def worst(prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How far the worst token of an answer is behind the best one, in logits."""
    assert len(tokens) == COUNT
    return max(regrets(BUNDLED, prompt, tokens))


async def transfer_prompt(
    prefill: TrialEngine, decode: TrialEngine, prompt: list[int], handed: int, ends: tuple[Any, Any]
) -> TrialAnswer:
    """The first `handed` positions of a prompt from one engine to the other, which answers."""
    send, receive = ends
    request = decode.submit(prompt, COUNT, receive=receive, receive_tokens=handed)
    prefill.submit(prompt[:handed], 1, send=send)
    answer = await decode.answer(request)
    await prefill.report(send[0].ticket.transfer)
    assert answer.cached >= min(handed, len(prompt) - 1)
    return answer


def test_kv_goes_between_engines_that_keep_it_in_8_bits_and_in_16(run: Callable[[Body], None], dtype: str) -> None:
    """Either way. In the same room there are four times as many tokens as in float32 and twice as many as in bfloat16,
    and the answers are those of the model as far as 8 bits let it."""
    if not torch.cuda.is_available() and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps KV in fp8 only on CPUs with AVX-512")

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        wide = await trial.start(config)
        narrow = await trial.start(msgspec.structs.replace(config, kv_cache_dtype="fp8"))
        assert narrow.ready.kv_tokens == pytest.approx(
            {"bfloat16": 2, "float32": 4}[dtype] * wide.ready.kv_tokens, rel=0.02
        )
        for prefill, decode in ((wide, narrow), (narrow, wide)):
            link = trial.join(decode)
            for number, codec in enumerate(("raw", "kv4")):
                for prompt in asked(skip=700 * number):
                    ends = trial.transfer_ends(link, codec, decode.ready)
                    answer = await transfer_prompt(prefill, decode, prompt, len(prompt), ends)
                    assert worst(prompt, answer.tokens) <= KEPT_MARGIN, f"{codec}, {len(prompt)} tokens"

    run(body)


@pytest.mark.parametrize("way", ["layerwise", "serialised"])
@pytest.mark.parametrize("codec", ["raw", "kv4"])
def test_answers_from_kv_of_another_engine_are_those_of_transformers(
    run: Callable[[Body], None], dtype: str, codec: str, way: protocol.WantedSendMode
) -> None:
    """All of each prompt, and a part of it that ends within a block. And KV of another prompt would be noticed."""
    margin = MARGINS[dtype, codec]

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        prefill, decode = await trial.start(config), await trial.start(config)
        link = trial.join(decode)
        for number, part in enumerate((1.0, 0.6)):
            for prompt in asked(skip=700 * number):
                ends = trial.transfer_ends(link, codec, decode.ready, pacing=way)
                answer = await transfer_prompt(prefill, decode, prompt, int(part * len(prompt)), ends)
                assert worst(prompt, answer.tokens) <= margin, f"{part} of {len(prompt)} tokens"
        prompt = asked(skip=1400)[1]
        other = random.Random(1).sample(prompt, len(prompt))
        ends = trial.transfer_ends(link, codec, decode.ready, pacing=way)
        request = decode.submit(prompt, COUNT, receive=ends[1], receive_tokens=len(prompt))
        prefill.submit(other, 1, send=ends[0])
        assert worst(prompt, (await decode.answer(request)).tokens) > 2 * margin

    run(body)


def test_answers_are_those_of_vllm_alone(run: Callable[[Body], None], dtype: str) -> None:
    """Asked at the same time. In float32 token for token."""
    ours: list[list[int]] = []
    used: list[protocol.EngineConfig] = []

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        used.append(config)
        engine = await trial.start(config)
        requests = [engine.submit(prompt, COUNT) for prompt in asked()]
        ours.extend([(await engine.answer(request)).tokens for request in requests])

    run(body)
    question = {"config": msgspec.to_builtins(used[0]), "prompts": asked(), "count": COUNT}
    command = [sys.executable, str(Path(__file__).with_name("plain_vllm.py"))]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    alone = json.loads(done.stdout.strip().splitlines()[-1])
    if dtype == "float32":
        assert ours == alone
    for prompt, one, other in zip(asked(), ours, alone, strict=True):
        assert worst(prompt, one) <= MARGINS[dtype, "raw"]
        assert worst(prompt, other) <= MARGINS[dtype, "raw"]


@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_an_engine_that_is_killed_costs_the_other_nothing_but_time(
    run: Callable[[Body], None], dtype: str, killed: str
) -> None:
    """In the middle of a transfer: the decode engine computes what is missing; a prefill engine serves the next one."""
    margin = MARGINS[dtype, "raw"]

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        prefill, decode = await trial.start(config), await trial.start(config)
        prompt = asked()[-1]
        link = trial.join(decode)
        (outlet,), receive = trial.transfer_ends(link, "raw", decode.ready, pacing="serialised")
        slow = msgspec.structs.replace(outlet.paths[0], pace_bytes_s=SLOW_BYTES_S)
        send = (msgspec.structs.replace(outlet, paths=(slow,)),)
        request = decode.submit(prompt, COUNT, receive=receive, receive_tokens=len(prompt))
        await prefill.answer(prefill.submit(prompt, 1, send=send))  # from here on its KV leaves
        await trio.sleep(0.5)
        lost, left = (prefill, decode) if killed == "prefill" else (decode, prefill)
        assert lost.link is not None
        assert left.link is not None
        os.kill(lost.ready.pid, signal.SIGKILL)
        assert "SIGKILL" in await lost.link.wait_gone()
        left.link.send(protocol.CloseLink(link=link.link, reason=f"the {killed} engine is gone"))  # as the agent does
        if killed == "prefill":
            answer = await decode.answer(request)
            assert answer.cached < len(prompt) - 1
            assert worst(prompt, answer.tokens) <= margin
            return
        await prefill.until(lambda: outlet.ticket.transfer in prefill.reports)
        assert not prefill.reports[outlet.ticket.transfer].delivered
        other = await trial.start(config)
        ends = trial.transfer_ends(trial.join(other), "raw", other.ready)
        again = await transfer_prompt(prefill, other, prompt, len(prompt), ends)
        assert worst(prompt, again.tokens) <= margin

    run(body)
