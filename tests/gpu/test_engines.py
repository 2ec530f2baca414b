"""KV handed from one engine to another on one card, with and without asynchronous scheduling: the scenarios of
`tests/integration/node/engine/test_engine_transfers.py` and `test_engine_failures.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ..integration.node.engine.kv_engines import engines, prompt_of
from ..integration.node.engine.test_engine_failures import test_cancelling_gives_all_memory_back
from ..integration.node.engine.test_engine_transfers import (
    test_a_link_stays_warm_for_the_next_transfer,
    test_any_part_of_a_prompt_may_be_transferred_and_what_is_there_already_is_not_sent,
    test_engines_change_roles_while_they_serve,
    test_requests_that_lose_their_blocks_are_computed_again,
    test_transferred_kv_gives_the_same_tokens,
)

__all__ = [
    "test_a_link_stays_warm_for_the_next_transfer",
    "test_any_part_of_a_prompt_may_be_transferred_and_what_is_there_already_is_not_sent",
    "test_cancelling_gives_all_memory_back",
    "test_engines_change_roles_while_they_serve",
    "test_requests_that_lose_their_blocks_are_computed_again",
    "test_transferred_kv_gives_the_same_tokens",
]

pytestmark = [pytest.mark.usefixtures("scheduling"), pytest.mark.timeout(300)]


def test_two_engines_share_one_card(engine_channels: list[int], random_model: Path) -> None:
    """Both compute on the GPU, at the same time, and what the one answers is what the other does."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            pair = await start(), await start()
            for engine in pair:
                assert engine.link is not None
                assert engine.link.ready is not None
                assert engine.link.ready.device == "cuda"
            prompts = [prompt_of(length, seed=3) for length in (9, 140, 300)]
            asked = [[(engine, engine.submit(prompt, count=48)) for prompt in prompts] for engine in pair]
            first, second = [[(await engine.finished(each)).tokens for engine, each in half] for half in asked]
            assert first == second

    trio.run(main)
