"""A network of real nodes whose two gateways are both asked: by predicted times each asks a replica for a place before
it sends it a prompt."""

from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.coordinator import Phase
from p2pserve.coordinator.routing.pools import PoolClaim, PoolClaims, PoolLimits, PoolState

from ...conftest import WAIT_LIMIT_S, Answer, Cluster, open_cluster

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

EMULATED: dict[str, Any] = {"backend": "emulated", "emulate": "1xL4", "kv_cache_mib": None}


async def ask_in_turn(network: Cluster, count: int, answers: list[Answer]) -> None:
    """Long prompts that come faster than two cards compute them, of both gateways in turn."""

    async def ask(number: int) -> None:
        prompt = f"# file {len(answers)} {number}\n" + f"value_{number} = {number}\n" * 150
        gateway = network.nodes[number % 2].peer
        answers.append(await network.client.generate(gateway, prompt, max_tokens=8, ignore_eos=True))

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(ask, number)
            await trio.sleep(0.05)


def test_two_gateways_ask_replicas_before_they_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Hashable, PoolClaim, bool]] = []
    answer = PoolClaims.answer

    def noted(
        claims: PoolClaims[Hashable], request: Hashable, claim: PoolClaim, present: PoolState, limits: PoolLimits,
        now: float, gateway: Hashable = None,
    ) -> tuple[bool, PoolState]:  # fmt: skip
        accepted, state = answer(claims, request, claim, present, limits, now, gateway)
        told.append((gateway, claim, accepted))
        return accepted, state

    monkeypatch.setattr(PoolClaims, "answer", noted)

    async def main() -> None:
        answers: list[Answer] = []
        async with open_cluster(
            None, tmp_path, "qwen2-7b", 2, knobs=(EMULATED, EMULATED), phases=(Phase.MIXED,), policy="predicted"
        ) as network:
            await network.wait_plan(2)
            with trio.move_on_after(WAIT_LIMIT_S):
                while len({gateway for gateway, _, accepted in told if accepted}) < 2:
                    await ask_in_turn(network, 20, answers)
            assert {gateway for gateway, _, accepted in told if accepted} == {node.peer for node in network.nodes}
        assert all(claim.most_ahead is not None for _, claim, _ in told)
        assert {(each.finish, each.error) for each in answers} == {("length", "")}
        served = Counter(each.figures.decode_node for each in answers if each.figures is not None)
        assert len(served) == 2
        assert len(answers) == sum(served.values())

    trio.run(main)
