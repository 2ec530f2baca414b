"""A network of real nodes: requests go where their prefixes are, and answers are the same."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.coordinator import Phase

from ...conftest import Answer, Cluster, open_cluster

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

EMULATED: dict[str, Any] = {"backend": "emulated", "emulate": "1xL4", "kv_cache_mib": None}
MIXED = (Phase.MIXED,)


async def ask(network: Cluster, prompt: str, gateway: int = 0) -> Answer:
    answer = await network.client.generate(network.nodes[gateway].peer, prompt, max_tokens=8, ignore_eos=True)
    assert (answer.finish, answer.error) == ("length", "")
    return answer


def served_by(answer: Answer) -> str:
    assert answer.figures is not None
    return answer.figures.decode_node


async def converse(network: Cluster, prompts: list[str], turns: int) -> list[list[Answer]]:
    """Conversations, each turn of them with all before it; both gateways take them in turn. All begin at the same
    time."""
    gateway = [network.nodes[0].peer]
    first = await network.ask_all(prompts, gateways=gateway, max_tokens=8, ignore_eos=True)
    found, texts = [[answer] for answer in first], list(prompts)
    await ask(network, "x", 1)  # a gateway asks what replicas hold from its first request on
    await trio.sleep(1.5)
    for turn in range(1, turns):
        for number, text in enumerate(texts):
            texts[number] = text + found[number][-1].text + f"\n# and then {turn}\n" * 6
            found[number].append(await ask(network, texts[number], turn % 2))
        await trio.sleep(1.5)  # so that gateways have heard of it
    return found


def check_where_they_went(found: list[list[Answer]]) -> None:
    """After its first turn a conversation stays where its prefix is, whichever gateway it comes to."""
    for conversation in found:
        assert len({served_by(answer) for answer in conversation}) == 1
        for before, answer in pairwise(conversation):
            assert answer.figures is not None
            assert answer.figures.cached_tokens >= before.prompt_tokens - 128


def test_conversations_go_on_at_emulated_engines_that_hold_their_prefixes(tmp_path: Path) -> None:
    async def main() -> None:
        prompts = [f"# file {number}\n" + f"value_{number} = {number}\n" * 60 for number in range(4)]
        async with open_cluster(None, tmp_path, "qwen2-7b", 2, knobs=(EMULATED, EMULATED), phases=MIXED) as network:
            await network.wait_plan(2)
            found = await converse(network, prompts, 3)
            check_where_they_went(found)
            # These engines take as long as GPUs would, so that the later ones find the first box busy.
            assert len({served_by(conversation[0]) for conversation in found}) == 2
            status = await network.status()
            cached = [
                node.advert.served.cached_tokens
                for node in status.nodes
                if node.advert is not None and node.advert.served is not None
            ]
            assert sum(cached) > 0

    trio.run(main)


def test_conversations_go_on_at_vllm_engines_that_hold_their_prefixes(
    engine_channels: list[int], tmp_path: Path
) -> None:
    async def main() -> None:
        prompts = [f"# file {number}\n" + f"value_{number} = {number}\n" * 40 for number in range(2)]
        async with open_cluster(engine_channels, tmp_path, "bundled", 2, phases=MIXED) as network:
            await network.wait_plan(2)
            found = await converse(network, prompts, 3)
            check_where_they_went(found)
            for conversation, prompt in zip(found, prompts, strict=True):
                again = await ask(network, prompt)
                assert again.figures is not None
                assert again.figures.cached_tokens > 0
                assert again.tokens == conversation[0].tokens

    trio.run(main)
