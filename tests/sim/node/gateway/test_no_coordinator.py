"""A gateway whose coordinator is gone goes on by the last plan, by what boxes report, and by who is lost: nodes that
have joined a network in memory, with its membership and election, a gateway on one of them, on a virtual clock."""

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from p2pserve.bootstrap import Address, Bootstrap, Identity, NetworkKey, PeerId, Role
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.testing import MemoryNetwork
from p2pserve.coordinator import Pairing, Phase, Plan, Replica, RoutingSettings, Stage
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node import messages, methods
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.joined import Joined
from p2pserve.node.planning.manifest import PLAN_RULES, describe_plan
from p2pserve.node.requests.gateway import Gateway
from p2pserve.node.settings import ClientLimits, NodeSettings

from .world import ANSWER, MODEL, PROMPT, PROMPT_TOKENS, SERVICE, STEP_S, TEXT, elapse, virtually

KEY = NetworkKey(b"g" * 32)
PEOPLE = [Identity(bytes([seed]) * 32) for seed in range(1, 6)]
LEADER, GATE, *BOXES = range(5)
TOKENS = 12
NOW = 1_750_000_000.0
PLAN_S = 3.0  # until all follow a new plan
LOST_S = 20.0  # until all know that a member that says nothing is dead
BUSY = EngineStats(running=30, waiting=30, kv_usage=0.5, kv_free_tokens=5_000, pending_prefill_tokens=5_000, decodes=30)
IDLE = EngineStats(running=0, waiting=0, kv_usage=0.0, kv_free_tokens=10_000)


def peer_of(index: int) -> PeerId:
    return PEOPLE[index].peer_id


def plan_of_boxes(epoch: int) -> Plan:
    """Each box serves alone."""
    peers = [peer_of(index) for index in BOXES]
    stages = {peer: (Stage(peer=peer, tp=1, first_layer=0, last_layer=4),) for peer in peers}
    return Plan(
        epoch=epoch,
        version=1,
        service=SERVICE,
        replicas=tuple(Replica(id=peer, phase=Phase.MIXED, stages=stages[peer]) for peer in peers),
        pairings=tuple(Pairing(prefill=peer, decode=peer, weight=1 / len(peers)) for peer in peers),
        codec="raw",
        why=(),
    )


@dataclass
class World:
    """Only LEADER may coordinate; boxes have engines that decode ANSWER, a token a step."""

    nursery: trio.Nursery
    policy: str
    air: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(latency_s=0.01))
    nodes: dict[int, Joined] = field(default_factory=dict)
    scopes: dict[int, trio.CancelScope] = field(default_factory=dict)
    opened: Counter[int] = field(default_factory=Counter)  # requests, by the box that serves them
    answers: dict[str, list[messages.AnswerUpdate]] = field(default_factory=dict)

    async def start(self) -> None:
        """All nodes, with a plan that they follow."""
        for index in range(len(PEOPLE)):
            await self.nursery.start(self._live, index)
        await elapse(6)
        leader = self.nodes[LEADER].network.coordinator
        assert leader is not None
        self.nodes[LEADER].publish(messages.PLAN, describe_plan(plan_of_boxes(leader[1]))[0])
        await elapse(PLAN_S)
        joined = self.nodes[GATE]
        self.gateway = Gateway(
            view=joined.view,
            messenger=joined.network,
            model=MODEL,
            text=TEXT,
            nursery=self.nursery,
            routing=RoutingSettings(policy=self.policy),
            settings=RequestSettings(),
            limits=ClientLimits(),
        )
        joined.network.on_notice(methods.TOKENS, self.gateway.on_tokens)
        joined.network.on_notice(methods.ANSWER, lambda peer, role, body: self.answers[body.request].append(body))
        joined.network.on_peer_lost(self.gateway.peer_lost)
        joined.network.on_hung(self.gateway.peer_hung)
        await elapse(1)

    async def _live(self, index: int, task_status: trio.TaskStatus[None]) -> None:
        first = (Bootstrap("192.0.2.1", 4000, peer_of(LEADER)),)
        address = Address("192.0.2.1", 4000 + index)
        network = Network(
            transport=self.air.transport(PEOPLE[index], address),
            identity=PEOPLE[index],
            token=KEY.issue(first, Role.WORKER, NOW + 1e6, lead=index == LEADER),
            network_key_public=KEY.public,
            role=Role.WORKER,
            announce=address,
            bootstraps=() if index == LEADER else first,
            rng=random.Random(index),
            rules=PLAN_RULES,
            clock=lambda: NOW + trio.current_time(),
        )
        with trio.CancelScope() as self.scopes[index]:
            async with network, trio.open_nursery() as nursery:
                joined = self.nodes[index] = Joined(
                    network, NodeSettings(home=Path("/"), listen=address), lambda line: None
                )
                if index in BOXES:
                    self._serve(index, nursery)
                task_status.started()
                while True:
                    joined.view.update(network.entries(messages.ADVERT))
                    joined.follow()
                    if index == GATE and hasattr(self, "gateway"):
                        self.gateway.network_changed()
                    await elapse(0.1)

    def _serve(self, index: int, nursery: trio.Nursery) -> None:
        network = self.nodes[index].network
        self.report(index, IDLE)

        async def open_decode(peer: PeerId, role: Role, body: messages.DecodeOpen) -> messages.DecodeOpened:
            self.opened[index] += 1
            nursery.start_soon(write, peer, body)
            return messages.DecodeOpened()

        async def write(gateway: PeerId, body: messages.DecodeOpen) -> None:
            done = len(body.prompt) - len(PROMPT_TOKENS)
            for number in range(done, done + body.sampling.max_tokens):
                await elapse(STEP_S)
                finish = "length" if number == done + body.sampling.max_tokens - 1 else None
                told = messages.Tokens(request=body.request, tokens=ANSWER[number : number + 1], finish=finish)
                network.notify(gateway, methods.TOKENS, told)

        network.handle(methods.DECODE_OPEN, open_decode)

    def report(self, index: int, stats: EngineStats) -> None:
        """What a box says of its engine from now on."""
        self.nodes[index].publish(
            messages.ADVERT,
            messages.Advert(
                hardware=Hardware(cores=1, memory_gib=1.0, processor="x"),
                draining=False,
                model=MODEL,
                engine=messages.EngineAdvert(
                    state="ready", tflops=1.0, memory_gbps=10.0, kv_tokens=10_000, starts=1, max_requests=64
                ),
                stats=stats,
            ),
        )

    def kill(self, index: int) -> None:
        self.air.kill(peer_of(index))
        self.scopes.pop(index).cancel()
        del self.nodes[index]

    async def ask(self, count: int) -> Counter[int]:
        """So many requests at once, all of which are answered by the first box that is asked; how many by each."""
        names = await self.begin(count)
        await self.finish(names)
        figures = [self.answers[name][-1].figures for name in names]
        assert [each.attempts for each in figures if each is not None] == [1] * count
        before, self.opened = self.opened, Counter()
        return before

    async def begin(self, count: int) -> list[str]:
        names = [f"r{len(self.answers) + number}" for number in range(count)]
        for name in names:
            self.answers[name] = []
            body = messages.Generate(request=name, prompt=PROMPT, max_tokens=TOKENS, deadline_s=60.0)
            await self.gateway.generate(peer_of(GATE), Role.CLIENT, body)
        return names

    async def finish(self, names: list[str]) -> None:
        """Wait for these answers, which are complete."""
        with trio.fail_after(60):
            while not self.gateway.idle:
                await elapse(0.01)
        for name in names:
            assert self.answers[name][-1].finish == "length", self.answers[name][-1].error
            assert tuple(token for each in self.answers[name] for token in each.tokens) == ANSWER[:TOKENS]


def lose_coordinator(world: World) -> None:
    """It dies, and nobody else may be elected."""
    world.kill(LEADER)


def cut_coordinator_off(world: World) -> None:
    """It goes on, where the others cannot hear it."""
    world.air.partition([peer_of(LEADER)], [peer_of(index) for index in (GATE, *BOXES)])


@pytest.mark.parametrize("policy", ["predicted", "plan"])
@pytest.mark.parametrize("lose", [lose_coordinator, cut_coordinator_off])
def test_a_gateway_without_a_coordinator_goes_on_by_the_last_plan_and_what_it_sees(
    lose: Callable[[World], None], policy: str
) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        gate, (first, second, third) = world.nodes[GATE], BOXES
        last = gate.view.plan_of(SERVICE)
        assert last is not None
        assert set(await world.ask(9)) == {first, second, third}

        lose(world)
        await elapse(LOST_S)
        assert gate.network.coordinator is None
        assert gate.view.plan_of(SERVICE) == last
        asked = await world.ask(9)
        assert set(asked) == {first, second, third}, "by the last plan, which has all of them"

        world.report(first, BUSY)
        await elapse(1)
        assert set(await world.ask(6)) == {second, third}, "not where others' requests wait, as that box reports"
        world.report(first, IDLE)
        await elapse(1)
        assert set(await world.ask(9)) == {first, second, third}

        under_way = await world.begin(9)
        await elapse(5 * STEP_S)
        assert world.opened[third]
        world.kill(third)
        await world.finish(under_way)
        await elapse(LOST_S)
        world.opened.clear()
        assert set(await world.ask(9)) == {first, second}, "a box that has died is not asked any more"
        assert gate.network.coordinator is None
        assert gate.view.plan_of(SERVICE) == last

    play(scenario, policy)


def play(scenario: Callable[[World], Awaitable[None]], policy: str) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await scenario(World(nursery, policy))
            nursery.cancel_scope.cancel()

    virtually(main)
