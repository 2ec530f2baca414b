"""A box that ends at a time that it has told: it leaves by itself before, and the others know."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.node.agent import run_node
from p2pserve.node.settings import NodeSettings

from ..conftest import KNOBS, LOOPBACK, WAIT_LIMIT_S, open_cluster

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

EMULATED: dict[str, Any] = {"backend": "emulated", "emulate": "1xL4", "kv_cache_mib": None}
LIFE_S = 20.0


def test_a_box_leaves_before_it_ends_and_plans_are_made_without_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_cluster(None, tmp_path, "qwen2-7b", 1, knobs=(EMULATED,)) as network:
            await network.wait_plan(1)
            stop, ends_at, said = trio.Event(), time.time() + LIFE_S, list[str]()
            settings = NodeSettings(
                home=tmp_path / "spot", listen=LOOPBACK, bootstrap=network.bootstrap.tokens["leader"],
                model="qwen2-7b", codec="raw", engine=replace(KNOBS, **EMULATED), drain_s=3.0, ends_at=ends_at,
            )  # fmt: skip

            async def run(task_status: trio.TaskStatus[Any]) -> None:
                await run_node(settings, say=said.append, stop=stop, task_status=task_status)

            async with trio.open_nursery() as nursery:
                spot = await nursery.start(run)
                told, planned = [], set[str]()
                with trio.fail_after(WAIT_LIMIT_S):
                    while not stop.is_set():  # which the node itself does
                        status = await network.status()
                        before = time.time()
                        adverts = {node.peer: node.advert for node in status.nodes}
                        advert = adverts.get(spot.peer)
                        if advert is not None and advert.engine is not None and advert.ends_in_s is not None:
                            told.append((advert.ends_in_s, ends_at - before))
                        planned.update(status.plan.peers if status.plan is not None else ())
                        await trio.sleep(0.3)
                assert time.time() < ends_at
            assert told
            assert all(ends_in_s <= truly_s + 1.5 for ends_in_s, truly_s in told)  # an advert is told once a second
            assert spot.peer not in planned
            assert any("about to end" in line for line in said)
            assert any(line.startswith("joined: ") for line in said)
            assert not any(line.startswith("gone: ") for line in said)  # it is this box that has left
            answer = await network.client.generate(network.nodes[0].peer, "x", max_tokens=4)
            assert (answer.finish, answer.error) == ("length", "")

    trio.run(main)
