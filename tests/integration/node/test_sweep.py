"""A node measures its engine before it serves, and follows it when it throttles: real engine processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from p2pserve.coordinator.calibration import told_costs
from p2pserve.coordinator.capacity import KvCodec
from p2pserve.coordinator.network_problem import build_network_problem
from p2pserve.node.messages import Advert
from p2pserve.node.view import NetworkView

from ..conftest import WAIT_LIMIT_S, Cluster, OpenCluster, open_cluster

EMULATED: dict[str, Any] = {"backend": "emulated", "emulate": "1xA100-SXM4-80GB", "kv_cache_mib": None}
SLOWER = 1.5


async def wait_advert(cluster: Cluster, holds: Callable[[Advert], bool]) -> Advert:
    """Of the first node, once it holds."""
    with trio.move_on_after(WAIT_LIMIT_S):
        while True:
            status = await cluster.status()
            advert = next(node.advert for node in status.nodes if node.peer == cluster.nodes[0].peer)
            if advert is not None and holds(advert):
                return advert
            await trio.sleep(0.05)
    raise AssertionError("\n".join(["it never held:", *cluster.said]))


def decode_s(advert: Advert) -> float:
    """What a node says of a decode step."""
    cost = told_costs(advert.profile).decode
    return cost.seconds(4, 64) if cost is not None else 0.0


def test_a_vllm_engine_is_measured_before_it_serves(cluster: OpenCluster, tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "bundled", 1, knobs=({"sweep_s": 10.0},)) as found:
            await found.wait_plan(1)
            advert = await wait_advert(found, lambda advert: advert.profile is not None)
            profile = advert.profile
            assert profile is not None
            assert profile.prefill is not None
            assert profile.decode is not None
            # All sizes were tried, so that requests can be told from tokens and steps.
            assert profile.decode.cost.request_s > 0.0
            assert profile.prefill.cost.token_s > 0.0
            assert advert.served is not None
            assert (advert.served.prefilled_tokens, advert.served.decoded_tokens) == (0, 0), "nobody has asked yet"
            answer = await found.client.generate(found.nodes[0].peer, "def fibonacci(n):", max_tokens=8)
            assert len(answer.tokens) == 8

    trio.run(main)


def test_an_engine_that_throttles_is_followed(tmp_path: Path) -> None:
    """Its steps take longer while it serves: all boxes hear of it, and plans are made by it."""

    async def main() -> None:
        knobs = EMULATED | {"sweep_s": 5.0, "emulate_throttle": (12.0, SLOWER)}
        async with open_cluster(None, tmp_path, "llama3-8b", 1, knobs=(knobs,)) as found:
            await found.wait_plan(1)
            before = decode_s(await wait_advert(found, lambda advert: decode_s(advert) > 0.0))
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(ask, found)
                await wait_advert(found, lambda advert: decode_s(advert) > 0.5 * (1.0 + SLOWER) * before)
                nursery.cancel_scope.cancel()
            assert any("times as long as before" in line for line in found.said)
            view = NetworkView.of_status(await found.status())
            (service,) = view.services()
            problem = build_network_problem(
                view.boxes(service), view.links(), view.demands(service).values(),
                service=service, codec=KvCodec("raw", 16.0), previous=view.plan,
            )  # fmt: skip
            assert problem is not None
            assert any("counts by its engine's own steps" in line for line in problem.why)

    async def ask(found: Cluster) -> None:
        while True:
            await found.client.generate(found.nodes[0].peer, "def fibonacci(n):", max_tokens=200)

    trio.run(main)
