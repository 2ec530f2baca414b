"""Policy `cronus` with real engines: one computes the first part of each prompt and says how much that is, the other
the rest; the answers are those of one engine alone."""

from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.coordinator import Phase
from p2pserve.coordinator.routing import balancer
from p2pserve.coordinator.routing.balancer import ChunkedPrefillState, ChunkLine, PrefillLine
from p2pserve.coordinator.routing.prefill_slots import SLOTS
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.text import TextModel
from p2pserve.node.replica import splitting
from p2pserve.node.replica.slot_desk import Asked, SlotDesk

from ...conftest import WAIT_LIMIT_S, Answer
from ..engine.answers.answers import prompts, regrets

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

TOKENS = 24
LENGTHS = (2, 60, 140, 200, 280, 340)
CLOSE = 1e-3
"""Logits that two engines on one processor may differ by, as their steps have other batches."""


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each prompt's tokens, and how many of them were computed first."""
    found: list[tuple[int, int]] = []

    def noted(prompt: int, prefill: PrefillLine, chunk: ChunkLine, state: ChunkedPrefillState) -> int:
        split = balancer.choose_split(prompt, prefill, chunk, state)
        found.append((prompt, split))
        return split

    monkeypatch.setattr(splitting, "choose_split", noted)
    return found


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots were used whenever a prefill began."""
    found: list[int] = []
    enter = SlotDesk.enter

    def noted(desk: SlotDesk, request: Asked) -> None:
        enter(desk, request)
        found.append(desk.used)

    monkeypatch.setattr(SlotDesk, "enter", noted)
    return found


def test_answers_are_those_of_one_engine_wherever_the_prefill_replica_splits_the_prompts(
    cluster: Any, tmp_path: Path, splits: list[tuple[int, int]], most: list[int]
) -> None:
    text = TextModel(BUNDLED)
    asked = prompts(text, LENGTHS)
    alone, answers = list[Answer](), list[Answer]()

    async def main() -> None:
        async with cluster(tmp_path / "one", "bundled", 1) as network:
            await network.wait_plan(1)
            alone.extend(await network.ask_all(asked, max_tokens=TOKENS, deadline_s=WAIT_LIMIT_S))
        async with cluster(tmp_path / "two", "bundled", 2, policy="cronus") as network:
            plan = (await network.wait_plan(2)).plan
            prefill, decode = (plan.in_phase(phase)[0].head for phase in (Phase.PREFILL, Phase.DECODE))
            for _ in range(3):  # on a busy machine KV may come too late, and is then computed where it is decoded
                answers[:] = await network.ask_all(asked, max_tokens=TOKENS, deadline_s=WAIT_LIMIT_S)
                check(answers, prefill, decode)

    def check(answers: list[Answer], prefill: str, decode: str) -> None:
        assert [answer.error for answer in answers] == [""] * len(asked)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
        for answer in answers:
            assert answer.figures is not None
            assert (answer.figures.prefill_node, answer.figures.decode_node) == (prefill, decode)

    trio.run(main)
    assert any(answer.undisturbed for answer in answers)
    assert any(1 < split < prompt for prompt, split in splits), splits
    assert max(most) <= SLOTS
    for prompt, answer in zip(asked, answers, strict=True):
        assert max(regrets(BUNDLED, text.encode(prompt), answer.tokens)) < CLOSE
