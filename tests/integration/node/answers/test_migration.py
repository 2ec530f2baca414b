"""A box that leaves in the middle of an answer sends the KV that it has to the box that goes on with it."""

from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.coordinator import Phase
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.text import TextModel

from ...conftest import WAIT_LIMIT_S, Answer, Cluster, open_cluster
from ..engine.answers.answers import prompts, regrets

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

EMULATED: dict[str, Any] = {"backend": "emulated", "emulate": "1xL4", "kv_cache_mib": None}
MIXED = (Phase.MIXED,)
DRAIN_S = 1.5  # a third of it is for migration
LONG_DRAIN_S = 4.0  # of real engines: while others use the cores, half a second is not enough
CLOSE = 1e-3
"""Logits that two engines on one processor may differ by, as their steps have other batches."""


async def lose_in_the_middle(network: Cluster, asked: list[str], tokens: int) -> list[Answer]:
    """The answers to these prompts, while the second box leaves, once it has work, in the order of the prompts."""
    keeps, leaves = network.nodes[0].peer, network.nodes[1].peer
    answers: dict[str, Answer] = {}

    async def ask(prompt: str) -> None:
        answers[prompt] = await network.client.generate(keeps, prompt, max_tokens=tokens, deadline_s=WAIT_LIMIT_S)

    async with trio.open_nursery() as nursery:
        for prompt in asked:
            nursery.start_soon(ask, prompt)
        with trio.fail_after(WAIT_LIMIT_S):
            while not await is_busy(network, leaves):  # noqa: ASYNC110 (asked over the network)
                await trio.sleep(0.02)
        network.stops[1].set()
    return [answers[prompt] for prompt in asked]


async def is_busy(network: Cluster, peer: str) -> bool:
    """Whether a box has told of requests."""
    adverts = {node.peer: node.advert for node in (await network.status()).nodes}
    advert = adverts[peer]
    return advert is not None and advert.stats is not None and advert.stats.running > 0


def check_migrated(network: Cluster, answers: list[Answer], tokens: int) -> None:
    """All are whole, and what the box that left had begun went on with its KV: on a busy machine not each in time."""
    keeps, leaves = network.nodes[0].peer, network.nodes[1].peer
    assert [(answer.error, len(answer.tokens)) for answer in answers] == [("", tokens)] * len(answers)
    moved = [answer.figures for answer in answers if answer.figures is not None and answer.figures.attempts > 1]
    assert moved
    for figures in moved:
        assert "it is about to leave" in figures.recovered[0]
        assert (figures.prefill_node, figures.decode_node) == (leaves, keeps)
    assert any(figures.transfer is not None for figures in moved), [figures.recovered for figures in moved]


def test_answers_of_emulated_engines_go_on_with_the_kv_of_the_box_that_left(tmp_path: Path) -> None:
    async def main() -> None:
        knobs = (EMULATED,) * 2
        async with open_cluster(None, tmp_path, "qwen2-7b", 2, knobs=knobs, phases=MIXED, drain_s=DRAIN_S) as network:
            await network.wait_plan(2)
            asked = [f"request {number}: " + "y " * 40 for number in range(6)]
            check_migrated(network, await lose_in_the_middle(network, asked, 200), 200)

    trio.run(main)


def test_answers_go_on_with_exactly_the_tokens_that_they_would_have_had(cluster: Any, tmp_path: Path) -> None:
    text = TextModel(BUNDLED)
    asked, answers = prompts(text, (60, 90, 120, 150)), list[Answer]()

    async def main() -> None:
        async with cluster(tmp_path, "bundled", 2, phases=MIXED, drain_s=LONG_DRAIN_S) as network:
            await network.wait_plan(2)
            answers.extend(await lose_in_the_middle(network, asked, 600))
            check_migrated(network, answers, 600)

    trio.run(main)
    for prompt, answer in zip(asked, answers, strict=True):
        assert max(regrets(BUNDLED, text.encode(prompt), answer.tokens)) < CLOSE
