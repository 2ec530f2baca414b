"""Boxes too small for the model serve it together: real nodes, engines, pipes and KV, and a stage that is killed."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.coordinator import Phase, Replica
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node import messages
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.text import TextModel

from ..conftest import WAIT_LIMIT_S
from ..node.engine.answers.answers import greedy, prompts
from ..node.engine.figures import ATTEMPTS

pytestmark = pytest.mark.timeout(500)

# With 64 MiB of KV cache, in float32: room for 7 layers of the bundled model's 8 and for 2 of them.
LIMITS = ({"memory_gib": 0.088, "tp": 2}, {"memory_gib": 0.073})
PHASES = (Phase.PREFILL, Phase.PREFILL, Phase.DECODE)
TOKENS = 24


async def wait_engines(network: Any, state: str, peers: list[str]) -> messages.Status:
    """Wait until the engines of these nodes say this of themselves."""
    with trio.fail_after(WAIT_LIMIT_S):
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
    told: list[tuple[str, int, list[int]]] = []  # prompt, how many tokens, which

    async def main() -> None:
        async with cluster(tmp_path, "bundled", 3, knobs=LIMITS, phases=PHASES) as network:
            small = [node.peer for node in network.nodes[:2]]
            await network.wait_plan(2)
            status = await wait_engines(network, "ready", [node.peer for node in network.nodes])
            replica = spanning(status)
            found = [(stage.peer, stage.layers, stage.tp) for stage in replica.stages]
            assert found == [(small[0], 6, 2), (small[1], 2, 1)]
            gateway = network.nodes[2].peer
            attempts = await network.ask_until_undisturbed(
                lambda skip: prompts(text, (5, 129, 400), skip=skip), gateways=[gateway], max_tokens=TOKENS
            )
            told.extend((prompt, TOKENS, answer.tokens) for prompt, answer in itertools.chain(*attempts))
            for prompt, answer in attempts[-1]:
                figures = answer.figures
                assert figures.recovered == ()
                assert {figures.prefill_node, figures.decode_node} == {small[0], gateway}
                assert figures.transfer.raw_bytes == len(text.encode(prompt)) * 8 * 2 * 2 * 64 * 4  # all 8 layers

            asked = [prompt for prompt, _ in attempts[-1]]
            pid = await network.engine_pid(small[1])
            if replica.phase is Phase.PREFILL:
                os.kill(pid, signal.SIGKILL)
            killed = replica.phase is Phase.PREFILL

            async def kill(count: int) -> None:
                nonlocal killed
                if not killed and count >= 3:
                    os.kill(pid, signal.SIGKILL)
                    killed = True

            answer = await network.client.generate(
                gateway, asked[1], max_tokens=100, deadline_s=WAIT_LIMIT_S, on_tokens=kill
            )
            assert killed
            assert answer.error == ""
            told.append((asked[1], 100, answer.tokens))
            # The replica comes back, as it was.
            await network.wait_plan(2)
            status = await wait_engines(network, "ready", small)
            assert spanning(status).stages == replica.stages
            again = await network.client.generate(gateway, asked[0], max_tokens=TOKENS)
            told.append((asked[0], TOKENS, again.tokens))

            # A box of it leaves: the other one waits, and the large one serves alone.
            network.stops[1].set()
            await wait_engines(network, "waiting", small[:1])
            alone = await network.client.generate(gateway, asked[2], max_tokens=TOKENS)
            told.append((asked[2], TOKENS, alone.tokens))
            assert alone.figures.decode_node == gateway

    trio.run(main)
    for prompt, count, tokens in told:
        assert tokens == greedy(BUNDLED, text.encode(prompt), count)


def test_a_stage_that_hangs_is_done_without(cluster: Any, tmp_path: Path) -> None:
    text = TextModel(BUNDLED)
    told: list[tuple[str, list[int]]] = []

    async def main() -> None:
        async with cluster(tmp_path, "bundled", 3, knobs=LIMITS, phases=PHASES) as network:
            small = [node.peer for node in network.nodes[:2]]
            await network.wait_plan(2)
            await wait_engines(network, "ready", [node.peer for node in network.nodes])
            gateway = network.nodes[2].peer
            attempts = await network.ask_until_undisturbed(
                lambda skip: prompts(text, (129,), skip=skip), gateways=[gateway], max_tokens=TOKENS
            )
            pid = await network.engine_pid(small[1])
            os.kill(pid, signal.SIGSTOP)
            try:
                for prompt in prompts(text, (5, 129), skip=len(attempts)):
                    answer = await network.client.generate(gateway, prompt, max_tokens=TOKENS, deadline_s=WAIT_LIMIT_S)
                    assert answer.error == ""
                    assert answer.figures.decode_node == gateway
                    assert answer.figures.ttft_s < RequestSettings().open_timeout_s
                    told.append((prompt, answer.tokens))
            finally:
                os.kill(pid, signal.SIGCONT)

    trio.run(main)
    for prompt, tokens in told:
        assert tokens == greedy(BUNDLED, text.encode(prompt), TOKENS)


def test_a_box_of_two_workers_and_a_box_of_one_transfer_to_each_other(
    cluster: Any, random_model: Path, tmp_path: Path
) -> None:
    text = TextModel(random_model)
    asked = [prompt for skip in range(ATTEMPTS) for prompt in prompts(text, (5, 300), skip=skip)]
    told: list[list[int]] = []

    async def main() -> None:
        async with cluster(tmp_path, random_model, 2, knobs=({"tp": 2},)) as network:
            status = await network.wait_plan(2)
            assert {stage.tp for replica in status.plan.replicas for stage in replica.stages} == {1, 2}
            undisturbed = 0
            for prompt in asked:
                if undisturbed == 2:
                    break
                answer = await network.client.generate(network.nodes[0].peer, prompt, max_tokens=TOKENS)
                told.append(answer.tokens)
                if not answer.undisturbed:
                    continue
                undisturbed += 1
                assert answer.figures.transfer.raw_bytes == len(text.encode(prompt)) * 4 * 2 * 2 * 64 * 4
            assert undisturbed == 2

    trio.run(main)
    assert told == [greedy(random_model, text.encode(prompt), TOKENS) for prompt in asked[: len(told)]]
