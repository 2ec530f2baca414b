"""An engine that does not get on with its requests, while it gives signs of life and its agent answers."""

from pathlib import Path

import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Phase
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node.engine import protocol
from p2pserve.node.replica.worker import Worker

from ...conftest import WAIT_LIMIT_S, Answer, Cluster, open_cluster

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

KNOBS = {"backend": "emulated", "emulate": "1xL4", "kv_cache_mib": None}
PROMPTS = [f"def function_{number}(n):" for number in range(6)]
TOKENS = 150
STALL_S = 3.0


def silence(monkeypatch: pytest.MonkeyPatch, silent: set[PeerId]) -> None:
    """From now on no token leaves the engines of these boxes; all else that they say does."""
    hear = Worker.on_engine_message

    def hear_without_tokens(worker: Worker, message: protocol.FromEngine) -> None:
        if isinstance(message, protocol.Step) and worker._messenger.peer_id in silent:
            message = msgspec.structs.replace(message, outputs=())
        hear(worker, message)

    monkeypatch.setattr(Worker, "on_engine_message", hear_without_tokens)


def test_answers_go_on_at_another_box_without_a_token_that_is_lost_or_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent: set[PeerId] = set()
    silence(monkeypatch, silent)

    async def ask(network: Cluster) -> list[Answer]:
        """All prompts of the second node's gateway; the first one's engine says nothing more once it has begun."""
        first, second = (node.peer for node in network.nodes)

        async def silence_first(count: int) -> None:
            if count >= 5:
                silent.add(first)

        answers: dict[str, Answer] = {}

        async def stream(prompt: str) -> None:
            answers[prompt] = await network.client.generate(
                second, prompt, on_tokens=silence_first, max_tokens=TOKENS, deadline_s=WAIT_LIMIT_S
            )

        async with trio.open_nursery() as nursery:
            for prompt in PROMPTS:
                nursery.start_soon(stream, prompt)
        return [answers[prompt] for prompt in PROMPTS]

    async def main() -> None:
        settings = RequestSettings(stall_floor_s=STALL_S)
        async with open_cluster(
            None, tmp_path, "qwen2-7b", 2, knobs=(KNOBS,) * 2, phases=(Phase.MIXED,), requests=settings
        ) as network:
            first, second = (node.peer for node in network.nodes)
            await network.wait_plan(2)
            right = await network.ask_all(PROMPTS, gateways=[second], max_tokens=TOKENS, deadline_s=WAIT_LIMIT_S)
            answers = await ask(network)
            assert [answer.error for answer in answers] == [""] * len(PROMPTS)
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
            moved = [answer.figures for answer in answers if answer.figures is not None and answer.figures.attempts > 1]
            assert moved, "the first box had none of them"
            assert {figures.decode_node for figures in moved} == {second}
            assert all("it stalled for" in line for figures in moved for line in figures.recovered)
            # Its agent lives, and says that its engine is ready.
            status = await network.client.status(first)
            (advert,) = [node.advert for node in status.nodes if node.peer == first]
            assert advert is not None
            assert (advert.hung, advert.engine is not None and advert.engine.state) == (False, "ready")
            # What comes now avoids it.
            (answer,) = await network.ask_all(PROMPTS[:1], gateways=[second], max_tokens=8, deadline_s=WAIT_LIMIT_S)
            assert answer.figures is not None
            assert (answer.figures.decode_node, answer.figures.attempts) == (second, 1)

    trio.run(main)
