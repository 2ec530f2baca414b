"""How long a request may be where the KV cache has no room for the model's own length."""

import random
from pathlib import Path

import msgspec
import pytest
import trio

from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineStartError
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials.trial import open_trial

pytestmark = pytest.mark.timeout(300)

FULL = 512  # positions of the random model, of 4 KiB in all layers; blocks have 128, and one is always kept back
PARTITION = (1, 3)


def test_a_length_that_was_estimated_is_shortened_in_all_stages_and_one_that_is_wanted_is_not(
    engine_channels: list[int], random_model: Path
) -> None:
    config = protocol.EngineConfig(model=str(random_model), kv_cache_mib=2, max_batched_tokens=256)
    prompt = random.Random(5).choices(range(1, 4096), k=370)

    async def main() -> None:
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            with pytest.raises(EngineStartError, match=f"a request of {FULL} tokens needs .* take --max-model-len 384"):
                await trial.start(config)
            shortened = msgspec.structs.replace(config, shorten_to_fit=True)
            alone = await trial.start(shortened)
            assert alone.ready.max_model_len == 384
            enough = await trial.start(msgspec.structs.replace(shortened, kv_cache_mib=3))
            assert enough.ready.max_model_len == FULL
            estimated = await trial.start(msgspec.structs.replace(shortened, max_model_len=320))
            assert estimated.ready.max_model_len == 320
            stages = await trial.start_stages(shortened, PARTITION)  # 2 MiB are 682 positions of three layers
            assert stages[0].ready.max_model_len == FULL
            short = await trial.start_stages(msgspec.structs.replace(shortened, kv_cache_mib=1), PARTITION)
            assert short[0].ready.max_model_len == 128
            expected = await enough.generate(prompt, 14)
            for engine in (alone, stages[0]):
                assert (await engine.generate(prompt, 14)).tokens == expected.tokens

    trio.run(main)
