"""How much vLLM computes in a step follows the plan while the engine runs."""

import random
from pathlib import Path

import pytest
import trio

from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials.trial import TrialEngine, open_trial

pytestmark = pytest.mark.timeout(120)

STARTED_WITH = 128
FEWEST = 8  # requests that may decode at once


def prompt_of(seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 4096), k=300))


async def longest_step(engine: TrialEngine, prompt: tuple[int, ...], limit: int | None) -> int:
    """Tokens of the prompt that a step has read at most."""
    assert engine.link is not None
    if limit is not None:
        engine.link.send(protocol.LimitSteps(tokens=limit))
    engine.iterations.clear()
    answer = await engine.generate(prompt, 1)
    assert len(answer.tokens) == 1
    await engine.until(lambda: sum(each.prefill_tokens for each in engine.iterations) >= len(prompt) - 1)
    return max(sample.prefill_tokens for each in engine.iterations for sample in each.samples)


def test_a_step_computes_no_more_than_the_plan_wants(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        config = protocol.EngineConfig(
            model=str(random_model), kv_cache_mib=32, max_batched_tokens=STARTED_WITH, max_requests=FEWEST
        )
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            engine = await trial.start(config)
            with trio.fail_after(60):
                found = [
                    await longest_step(engine, prompt_of(seed), limit)
                    for seed, limit in enumerate((None, 32, 1, 4096, 32, 0))
                ]
        assert found == [STARTED_WITH, 32, FEWEST, STARTED_WITH, 32, STARTED_WITH]

    trio.run(main)
