"""Boxes too small for the model serve it together: real nodes, engines, pipes and KV, and a stage that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.coordinator import Phase, Replica
from p2pserve.node import messages
from p2pserve.node.models import BUNDLED
from p2pserve.node.text import TextModel

from .answers import greedy, prompts

pytestmark = pytest.mark.timeout(240)

# With 64 MiB of KV cache, in float32: room for 7 layers of the bundled model's 8 and for 2 of them.
LIMITS = ({"memory_gib": 0.088, "tp": 2}, {"memory_gib": 0.073})
PHASES = (Phase.PREFILL, Phase.PREFILL, Phase.DECODE)
TOKENS = 24


async def wait_engines(network: Any, state: str, peers: list[str], timeout_s: float = 90) -> messages.Status:
    """Wait until the engines of these nodes say this of themselves."""
    with trio.fail_after(timeout_s):
        while True:
            status: messages.Status = await network.client.status(network.nodes[-1].peer)
            adverts = {node.peer: node.advert for node in status.nodes}
            engines = [advert.engine for peer in peers if (advert := adverts.get(peer)) is not None]
            if [engine.state for engine in engines if engine is not None] == [state] * len(peers):
                return status
            await trio.sleep(0.05)


def spanning(status: messages.Status) -> Replica:
    assert status.plan is not None
    (found,) = [replica for replica in status.plan.replicas if len(replica.stages) > 1]
    return found


def test_two_unequal_boxes_and_a_large_one_serve_together_and_survive_the_loss_of_a_stage(
    cluster: Any, tmp_path: Path
) -> None:
    text = TextModel(BUNDLED)
    asked = prompts(text, (5, 129, 400))
    whole = [
        greedy(BUNDLED, text.encode(prompt), count) for prompt, count in zip(asked, (TOKENS, 100, TOKENS), strict=True)
    ]
    expected = [answer[:TOKENS] for answer in whole]

    async def main() -> None:
        async with cluster(tmp_path, "bundled", 3, knobs=LIMITS, phases=PHASES) as network:
            small = [node.peer for node in network.nodes[:2]]
            await network.wait_plan(2)
            status = await wait_engines(network, "ready", [node.peer for node in network.nodes])
            replica = spanning(status)
            found = [(stage.peer, stage.layers, stage.tp) for stage in replica.stages]
            assert found == [(small[0], 6, 2), (small[1], 2, 1)]
            gateway = network.nodes[2].peer
            answers: list[Any] = [None] * len(asked)

            async def ask(i: int) -> None:
                answers[i] = await network.client.generate(gateway, asked[i], max_tokens=TOKENS)

            async with trio.open_nursery() as nursery:
                for i in range(len(asked)):
                    nursery.start_soon(ask, i)
            for answer, tokens, prompt in zip(answers, expected, asked, strict=True):
                assert answer.tokens == tokens
                figures = answer.figures
                assert figures.recovered == ()
                assert {figures.prefill_node, figures.decode_node} == {small[0], gateway}
                assert figures.transfer.raw_bytes == len(text.encode(prompt)) * 8 * 2 * 2 * 64 * 4  # all 8 layers

            pid = await network.engine_pid(small[1])
            if replica.phase is Phase.PREFILL:
                os.kill(pid, signal.SIGKILL)
            killed = replica.phase is Phase.PREFILL

            async def kill(count: int) -> None:
                nonlocal killed
                if not killed and count >= 3:
                    os.kill(pid, signal.SIGKILL)
                    killed = True

            answer = await network.client.generate(gateway, asked[1], max_tokens=100, deadline_s=90, on_tokens=kill)
            assert killed
            assert answer.error == ""
            assert answer.tokens == whole[1]
            # The replica comes back, as it was.
            await network.wait_plan(2)
            status = await wait_engines(network, "ready", small)
            assert spanning(status).stages == replica.stages
            again = await network.client.generate(gateway, asked[0], max_tokens=TOKENS)
            assert again.tokens == expected[0]

            # A box of it leaves: the other one waits, and the large one serves alone.
            network.stops[1].set()
            await wait_engines(network, "waiting", small[:1])
            alone = await network.client.generate(gateway, asked[2], max_tokens=TOKENS)
            assert alone.tokens == expected[2]
            assert alone.figures.decode_node == gateway

    trio.run(main)


def test_a_box_of_two_workers_and_a_box_of_one_hand_over_to_each_other(
    cluster: Any, random_model: Path, tmp_path: Path
) -> None:
    text = TextModel(random_model)
    asked = prompts(text, (5, 300))
    expected = [greedy(random_model, text.encode(prompt), TOKENS) for prompt in asked]

    async def main() -> None:
        async with cluster(tmp_path, random_model, 2, knobs=({"tp": 2},)) as network:
            status = await network.wait_plan(2)
            assert {stage.tp for replica in status.plan.replicas for stage in replica.stages} == {1, 2}
            for prompt, tokens in zip(asked, expected, strict=True):
                answer = await network.client.generate(network.nodes[0].peer, prompt, max_tokens=TOKENS)
                assert answer.tokens == tokens
                assert answer.figures.recovered == ()
                assert answer.figures.transfer.raw_bytes == len(text.encode(prompt)) * 4 * 2 * 2 * 64 * 4

    trio.run(main)
