"""The self-test with real engines: passes with the vLLM that is installed, and notices KV that is not the prompt's."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import trio

from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials import selftest
from p2pserve.node.engine.trials.selftest import SelfTestResult, run_selftest
from p2pserve.node.engine.trials.trial import PromptCut, Trial, TrialAnswer, TrialEngine


async def verdict_of(channel: int) -> SelfTestResult:
    async with open_fork_server(log=None, threads=1, channel=channel) as server:
        return await run_selftest(server)


def test_this_vllm_works(engine_channels: list[int]) -> None:
    verdict = trio.run(verdict_of, engine_channels.pop())
    assert verdict.passed, verdict.reason
    assert verdict.reason == ""
    assert verdict.versions.vllm.startswith(selftest.PINNED)


def test_the_fork_server_has_one_thread(engine_channels: list[int]) -> None:
    """A fork has the locks of all threads and only one of them: what it imports must have started none."""

    async def main() -> int:
        async with open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server:
            await server.wait_ready()
            servers = [
                process
                for process in psutil.Process().children()
                if "p2pserve.node.engine.forkserver" in process.cmdline()
            ]
            assert len(servers) == 1
            return int(servers[0].num_threads())

    assert trio.run(main) == 1


def test_kv_of_another_prompt_is_noticed(engine_channels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    transfer_prompt = Trial.transfer_prompt

    async def of_another(
        trial: Trial, prefill: TrialEngine, decode: TrialEngine, cut: PromptCut, **named: Any
    ) -> TrialAnswer:
        submit = prefill.submit
        monkeypatch.setattr(prefill, "submit", lambda tokens, *more, **named: submit(tokens[::-1], *more, **named))
        return await transfer_prompt(trial, prefill, decode, cut, **named)

    monkeypatch.setattr(Trial, "transfer_prompt", of_another)
    verdict = trio.run(verdict_of, engine_channels.pop())
    assert not verdict.passed
    assert verdict.reason.startswith("transferring KV (layerwise): token ")
