"""The KV of a prompt's beginning comes from the box that holds it to another one, with real engines: the answers are
those of an engine that computes all of the prompt, also where the holder is lost meanwhile."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.bootstrap import PeerId, Role
from p2pserve.coordinator import Phase, RoutingSettings
from p2pserve.coordinator.prefixes import fetching
from p2pserve.node import messages
from p2pserve.node.replica.worker import Worker

from ...conftest import WAIT_LIMIT_S, Answer, Cluster, open_cluster
from ..engine.figures import ATTEMPTS

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

ROUTING = RoutingSettings(policy="plan", prefix_weight=1e-6, prefix_fetch=1e6)
"""Queues alone say where a request goes, and whatever can be fetched is: this model takes no time to compute."""


@pytest.fixture(autouse=True)
def short_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """This model's longest prompt has 512 tokens."""
    monkeypatch.setattr(fetching, "LEAST_TOKENS", 16)


async def ask(network: Cluster, prompt: str, **settings: Any) -> Answer:
    answer = await network.client.generate(
        network.nodes[0].peer, prompt, ignore_eos=True, deadline_s=WAIT_LIMIT_S, **{"max_tokens": 16, **settings}
    )
    assert (answer.finish, answer.error) == ("length", "")
    return answer


@asynccontextmanager
async def open_boxes(channels: list[int], home: Path) -> AsyncIterator[Cluster]:
    """Two boxes that prefill and decode."""
    async with open_cluster(channels, home, "bundled", 2, phases=(Phase.MIXED,), routing=ROUTING) as network:
        await network.wait_plan(2)
        yield network


@asynccontextmanager
async def keep_busy(network: Cluster, prompt: str) -> AsyncIterator[None]:
    """The box that holds this prompt has more to do than the other: where none has, a request goes to the holder."""
    began = trio.Event()

    async def note(count: int) -> None:
        began.set()

    async def ask_for_more() -> None:
        while True:
            await network.client.generate(network.nodes[0].peer, prompt, on_tokens=note, max_tokens=200)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_for_more)
        await began.wait()
        yield
        nursery.cancel_scope.cancel()


async def ask_until_fetched(
    network: Cluster, on_holder: Callable[[str], Awaitable[None]] | None = None
) -> tuple[str, Answer, messages.RequestFigures]:
    """Ask what begins like a prompt that one box alone holds, another prompt each time, until the beginning is to come
    from its holder, which `on_holder` hears of before. It is so once links have been measured."""
    with trio.move_on_after(WAIT_LIMIT_S):
        for number in count():
            prefix = f"# settings {number}\n" + "".join(f"value_{each} = {each}\n" for each in range(40))
            first = await ask(network, prefix)
            assert first.figures is not None
            holder = first.figures.decode_node
            if on_holder is not None:
                await on_holder(holder)
            async with keep_busy(network, prefix):
                prompt = prefix + "\n# and then\n"
                answer = await ask(network, prompt)
                assert answer.figures is not None
                if answer.figures.prefill_node == holder:
                    assert answer.figures.decode_node != holder
                    return prompt, answer, answer.figures
            await trio.sleep(0.5)
    raise AssertionError("no prefix was fetched")


async def ask_alone(network: Cluster, prompt: str) -> Answer:
    """Computed from its first token on: nobody shares a cache with it."""
    answer = await ask(network, prompt, cache_salt="alone")
    assert answer.figures is not None
    assert (answer.figures.prefill_node, answer.figures.cached_tokens) == (None, 0)
    return answer


def test_a_prefix_comes_from_the_box_that_holds_it_and_tokens_are_the_same(
    engine_channels: list[int], tmp_path: Path
) -> None:
    async def fetch(home: Path) -> bool:
        """Whether the KV came in time: on a busy machine it may be computed instead."""
        async with open_boxes(engine_channels, home) as network:
            prompt, answer, figures = await ask_until_fetched(network)
            assert answer.tokens == (await ask_alone(network, prompt)).tokens
            if not answer.undisturbed:
                return False
            assert figures.codec == "raw"
            assert figures.transfer is not None
            assert figures.transfer.wire_bytes >= figures.transfer.raw_bytes > 0
            assert 0.8 * answer.prompt_tokens < figures.cached_tokens < answer.prompt_tokens
            return True

    async def main() -> None:
        for number in range(ATTEMPTS):
            if await fetch(tmp_path / str(number)):
                return
        raise AssertionError("no KV came in time")

    trio.run(main)


def test_what_a_lost_box_does_not_send_is_computed_and_tokens_are_the_same(
    engine_channels: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed: dict[PeerId, int] = {}  # the processes of engines that end when they have been asked for a prefix
    open_prefill = Worker.open_prefill

    async def open_and_end(worker: Worker, gateway: PeerId, role: Role, body: messages.PrefillOpen) -> messages.Opened:
        pid = doomed.pop(worker._messenger.peer_id, None)
        if pid is None:
            return await open_prefill(worker, gateway, role, body)
        os.kill(pid, signal.SIGSTOP)  # so that it sends nothing
        opened = await open_prefill(worker, gateway, role, body)
        os.kill(pid, signal.SIGKILL)
        return opened

    monkeypatch.setattr(Worker, "open_prefill", open_and_end)

    async def main() -> None:
        async with open_boxes(engine_channels, tmp_path) as network:

            async def doom(holder: str) -> None:
                doomed.clear()
                doomed[PeerId(holder)] = await network.engine_pid(holder)

            prompt, answer, figures = await ask_until_fetched(network, doom)
            assert not doomed
            assert any("prefill node" in line for line in figures.recovered), figures.recovered
            assert (figures.attempts, figures.transfer) == (1, None)
            assert answer.tokens == (await ask_alone(network, prompt)).tokens

    trio.run(main)
