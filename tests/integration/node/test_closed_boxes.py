"""Boxes whose port nobody can dial are full members: they announce addresses at which nobody listens, and serve."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Phase

from ..conftest import WAIT_LIMIT_S, Cluster, open_cluster

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

KNOBS = ({"backend": "emulated", "emulate": "2xL4", "kv_cache_mib": None},) * 2


@pytest.fixture
def nowhere() -> Iterator[Sequence[str]]:
    """Two addresses of this machine at which nobody listens, and nobody will while the test runs."""
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.socket()) for _ in range(2)]
        for port in ports:
            port.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]


async def wait_closed(network: Cluster, count: int) -> None:
    """Until so many owners have been told that nobody can dial their boxes."""
    with trio.fail_after(WAIT_LIMIT_S):
        while sum("others cannot dial this node" in line for line in network.said) < count:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def ask(network: Cluster, gateway: Phase) -> None:
    """Ask prompts until the KV of one has gone from the box that prefills to the one that decodes: on a busy machine
    one of them may not answer for a while, and the other does all."""
    status = await network.wait_plan(2)
    assert status.plan is not None
    heads = {replica.phase: PeerId(replica.head) for replica in status.plan.replicas}
    moved = 0
    for letters in ("xyz", "uvw", "rst"):
        prompts = [f" {letter}" * 300 for letter in letters]
        attempts = await network.ask_until_undisturbed(
            partial(_one_of, prompts), gateways=[heads[gateway]], max_tokens=30
        )
        ((_, answer),) = attempts[-1]
        assert len(answer.tokens) == 30
        assert answer.figures is not None
        moved = answer.figures.transfer.raw_bytes if answer.figures.transfer is not None else 0
        if moved:
            break
    assert moved > 0


def _one_of(prompts: Sequence[str], number: int) -> list[str]:
    return [prompts[number]]


def run(home: Path, announce: Sequence[str | None], closed: int, gateway: Phase) -> None:
    async def main() -> None:
        async with open_cluster(None, home, "qwen2-7b", 2, codec="kv4", knobs=KNOBS, announce=announce) as network:
            await wait_closed(network, closed)
            await ask(network, gateway)

    trio.run(main)


@pytest.mark.parametrize("gateway", [Phase.PREFILL, Phase.DECODE])
def test_a_box_that_nobody_can_dial_is_asked_to_dial_and_decodes(
    tmp_path: Path, nowhere: Sequence[str], gateway: Phase
) -> None:
    run(tmp_path, [None, nowhere[0]], 1, gateway)


def test_two_boxes_that_nobody_can_dial_serve_together_over_a_third(tmp_path: Path, nowhere: Sequence[str]) -> None:
    run(tmp_path, nowhere, 2, Phase.PREFILL)
