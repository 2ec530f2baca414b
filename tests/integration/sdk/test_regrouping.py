"""Boxes that could each hold the model join into a pipeline and part again while clients ask: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.errors import RemoteError
from p2pserve.coordinator import Phase, Plan, Stage
from p2pserve.coordinator.plan import GroupStages
from p2pserve.node import methods
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.text import TextModel
from p2pserve.node.planning.messages import RegroupOrder

from ..conftest import WAIT_LIMIT_S, Answer, Cluster, open_client, open_cluster
from ..node.engine.answers.answers import prompts, regrets

pytestmark = [pytest.mark.beside, pytest.mark.timeout(500)]

TOKENS = 24
MIXED = (Phase.MIXED,)
EMULATED = {"backend": "emulated", "emulate": "1xL4", "kv_cache_mib": None}
OTHER = {**EMULATED, "emulate": "1xA40"}
CLOSE = 1e-3
"""Logits that stages on one processor may differ by, as their sums are in another order."""


def group(layers: int, *peers: str) -> GroupStages:
    """These boxes with equal shares of the layers."""
    share = layers // len(peers)
    return tuple(
        Stage(peer=peer, tp=1, first_layer=number * share, last_layer=(number + 1) * share)
        for number, peer in enumerate(peers)
    )


async def wait_plan(network: Cluster, holds: Callable[[Plan], bool]) -> Plan:
    """Wait until the plan is no longer on its way to another, and this holds of it, and all its boxes are ready."""
    with trio.move_on_after(WAIT_LIMIT_S):
        while True:
            status = await network.status()
            engines = [node.advert.engine for node in status.nodes if node.advert is not None and node.advert.model]
            ready = all(engine is not None and engine.state == "ready" for engine in engines)
            if status.plan is not None and status.plan.regrouping is None and ready and holds(status.plan):
                return status.plan
            await trio.sleep(0.1)
    raise AssertionError("\n".join(["the plan has not come:", repr(status.plan), *network.said]))


async def wait_loading_beside(network: Cluster, *peers: str) -> None:
    """Wait until boxes load their next part beside what they serve."""
    with trio.fail_after(WAIT_LIMIT_S):
        while True:
            status = await network.status()
            engines = [node.advert.engine for node in status.nodes if node.peer in peers and node.advert is not None]
            under_way = status.plan.regrouping if status.plan is not None else None
            if under_way is not None and all(engine is not None and engine.beside.stages for engine in engines):
                assert under_way.beside
                assert {engine.state for engine in engines if engine is not None} == {"ready"}
                return
            await trio.sleep(0.05)


async def regroup(network: Cluster, *groups: GroupStages) -> None:
    """Tell the coordinator as an admin."""
    status = await network.status()
    assert status.plan is not None
    assert status.coordinator is not None
    coordinator = PeerId(status.coordinator)
    order = RegroupOrder(service=status.plan.service, groups=groups, before=1.0, after=2.0, reload_s=10.0)
    with pytest.raises(RemoteError, match="clients may not"):
        await network.client.network.request(coordinator, methods.PLAN_REGROUP, order, 10)
    async with open_client(network.bootstrap, "admin") as admin:
        begun = await admin.network.request(coordinator, methods.PLAN_REGROUP, order, 10)
        assert begun.steps == 1


@asynccontextmanager
async def keep_asking(network: Cluster, gateway: PeerId, asked: list[str], answers: list[tuple[str, Answer]]) -> Any:
    """Ask one after the other, in turn, as long as the body runs; the last answer is waited for."""
    is_over = False

    async def ask() -> None:
        while not is_over:
            prompt = asked[len(answers) % len(asked)]
            answer = await network.client.generate(gateway, prompt, max_tokens=TOKENS, deadline_s=WAIT_LIMIT_S)
            answers.append((prompt, answer))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        yield
        is_over = True


async def wait_answer(answers: list[tuple[str, Answer]], box: str) -> None:
    """Wait until a request that comes from now on has been answered by a box."""
    before = len(answers)
    while True:
        if any(answer.figures is not None and answer.figures.decode_node == box for _, answer in answers[before:]):
            return
        await trio.sleep(0.1)


def test_two_boxes_join_and_part_while_a_third_and_they_themselves_are_asked(cluster: Any, tmp_path: Path) -> None:
    text = TextModel(BUNDLED)
    answers: list[tuple[str, Answer]] = []

    async def main() -> None:
        async with cluster(tmp_path, "bundled", 3, phases=MIXED) as network:
            one, two, third = (node.peer for node in network.nodes)
            alone, together = {(one,), (two,), (third,)}, {(one, two), (third,)}
            await network.wait_plan(3)
            await wait_plan(network, lambda plan: {replica.peers for replica in plan.replicas} == alone)
            starts = await count_starts(network, third)
            async with keep_asking(network, third, prompts(text, (5, 64, 129)), answers):
                await regroup(network, group(8, one, two))
                await wait_loading_beside(network, one, two)  # on a CPU there is memory for two engines
                joined = await wait_plan(network, lambda plan: {each.peers for each in plan.replicas} == together)
                await wait_answer(answers, one)
                await regroup(network, group(8, one), group(8, two))
                parted = await wait_plan(network, lambda plan: {each.peers for each in plan.replicas} == alone)
            assert joined.number < parted.number
            assert await count_starts(network, third) == starts

    trio.run(main)
    assert {answer.error for _, answer in answers} == {""}
    for prompt, answer in answers:
        assert len(answer.tokens) == TOKENS
        assert max(regrets(BUNDLED, text.encode(prompt), answer.tokens)) < CLOSE


async def count_starts(network: Cluster, peer: str) -> int:
    status = await network.status()
    (engine,) = [node.advert.engine for node in status.nodes if node.peer == peer and node.advert is not None]
    assert engine is not None
    return engine.starts


@pytest.mark.parametrize("boxes", [2, 3])
def test_boxes_that_cannot_join_say_why_and_serve_as_before(boxes: int, tmp_path: Path) -> None:
    """Emulated stages have the same cards, and say so where they have not. Requests wait where there is no third
    box."""
    answers: list[tuple[str, Answer]] = []

    async def main() -> None:
        knobs = (EMULATED, OTHER, EMULATED)[:boxes]
        async with open_cluster(None, tmp_path, "qwen2-7b", boxes, knobs=knobs, phases=MIXED) as network:
            one, two = (node.peer for node in network.nodes[:2])
            await network.wait_plan(boxes)
            version = (await wait_plan(network, lambda plan: len(plan.replicas) == boxes)).version
            async with keep_asking(network, network.nodes[-1].peer, ["def fibonacci(n):"], answers):
                await regroup(network, group(28, one, two))
                plan = await wait_plan(network, lambda plan: plan.version > version and len(plan.replicas) == boxes)
            assert any("emulated stages have the same cards" in line for line in plan.why)

    trio.run(main)
    assert answers
    assert {(answer.error, len(answer.tokens)) for _, answer in answers} == {("", TOKENS)}
