"""Which plans nodes follow, in whole networks in memory on a virtual clock: of whom, when, and after a restart."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Bootstrap, Identity, NetworkKey, Role
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.members.states import Tell
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.state_file import StateFile
from p2pserve.bootstrap.streams.control import encode_body, encode_notice
from p2pserve.bootstrap.testing import MemoryNetwork
from p2pserve.bootstrap.trust.entries import sign_entry
from p2pserve.coordinator import Phase, Plan
from p2pserve.coordinator.plan import Pairing, Replica, Stage
from p2pserve.node.adverts import plans_of
from p2pserve.node.joined import Joined
from p2pserve.node.messages import PLAN
from p2pserve.node.planning.manifest import PLAN_RULES, describe_plan
from p2pserve.node.planning.messages import PLAN_BUNDLE, PlanBundle, PlanManifest
from p2pserve.node.planning.plan_file import PlanFile
from p2pserve.node.settings import NodeSettings
from p2pserve.node.view import NetworkView

NOW = 1_750_000_000.0
KEY = NetworkKey(b"p" * 32)
PEOPLE = [Identity(bytes([seed]) * 32) for seed in range(1, 5)]
LEADER, ONE, TWO, UNTRUSTED = range(4)


def address_of(index: int) -> Address:
    return Address("192.0.2.1", 4000 + index)


def plan(epoch: int, version: int = 1, why: tuple[str, ...] = (), service: str = "tiny") -> Plan:
    peer = PEOPLE[LEADER].peer_id
    return Plan(
        epoch=epoch,
        version=version,
        service=service,
        replicas=(Replica(id=peer, phase=Phase.MIXED, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=4),)),),
        pairings=(Pairing(prefill=peer, decode=peer, weight=1.0),),
        codec="raw",
        why=why,
    )


@dataclass
class World:
    air: MemoryNetwork
    nursery: trio.Nursery
    homes: Path | None = None
    nodes: dict[int, Joined] = field(default_factory=dict)
    scopes: dict[int, trio.CancelScope] = field(default_factory=dict)

    async def start(self, *indices: int) -> None:
        for index in indices:
            await self.nursery.start(self._live, index)
        await elapse(6)

    async def _live(self, index: int, task_status: trio.TaskStatus[None]) -> None:
        first = (Bootstrap("192.0.2.1", 4000, PEOPLE[0].peer_id),)
        home = None if self.homes is None else self.homes / str(index)
        network = Network(
            transport=self.air.transport(PEOPLE[index], address_of(index)),
            identity=PEOPLE[index],
            token=KEY.issue(first, Role.WORKER, NOW + 1e6, lead=index == LEADER),
            network_key_public=KEY.public,
            role=Role.WORKER,
            announce=address_of(index),
            bootstraps=() if index == LEADER else first,
            state_file=None if home is None else StateFile(home, KEY.public),
            rng=random.Random(index),
            rules=PLAN_RULES,
            clock=lambda: NOW + trio.current_time(),
        )
        with trio.CancelScope() as self.scopes[index]:
            async with network:
                settings = NodeSettings(home=Path("/"), listen=address_of(index))
                kept = None if home is None else PlanFile(home, KEY.public, print)
                followed = () if kept is None else kept.load()
                node = self.nodes[index] = Joined(network, settings, lambda line: None, followed)
                if kept is not None:
                    self.nursery.start_soon(kept.keep, node.view)
                task_status.started()
                while True:
                    node.follow()
                    await elapse(0.1)

    def kill(self, index: int) -> None:
        self.air.kill(PEOPLE[index].peer_id)
        self.scopes.pop(index).cancel()
        del self.nodes[index]

    def publish(self, made: Plan) -> PlanManifest:
        manifest, _ = describe_plan(made)
        self.nodes[LEADER].publish(PLAN, manifest)
        return manifest

    def publish_beside(self, *made: Plan, serial: int = 1) -> None:
        """Plans of other services."""
        manifests = tuple(describe_plan(each)[0] for each in made)
        self.nodes[LEADER].publish(PLAN_BUNDLE, PlanBundle(epoch=self.epoch, serial=serial, manifests=manifests))

    @property
    def epoch(self) -> int:
        leader = self.nodes[LEADER].network.coordinator
        assert leader is not None
        assert leader[0] == PEOPLE[LEADER].peer_id
        return leader[1]

    @property
    def followed(self) -> dict[int, Plan | None]:
        return {index: node.view.plan for index, node in self.nodes.items()}

    @property
    def numbers(self) -> dict[int, dict[str, tuple[int, int]]]:
        """Of the plans that each node follows, by service."""
        return {
            index: {service: each.number for service, each in node.view.plans.items()}
            for index, node in self.nodes.items()
        }

    def say(self, index: int, kind: str, version: int, payload: bytes) -> None:
        """To all others, in its name, past its own node."""
        me = self.nodes[index].network
        (life,) = [member.incarnation for member in me.members() if member.peer_id == me.peer_id]
        entry = sign_entry(PEOPLE[index], kind, life, version, payload)
        for other in set(self.nodes) - {index}:
            end = self.air.end_of(me.peer_id, PEOPLE[other].peer_id)
            end.send_nowait(encode_notice("p2p.tell", encode_body(Tell((entry,)))))


async def elapse(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def play(scenario: Callable[[World], Awaitable[None]], homes: Path | None = None) -> None:
    @asynccontextmanager
    async def world() -> AsyncIterator[World]:
        async with trio.open_nursery() as nursery:
            yield World(MemoryNetwork(latency_s=0.02), nursery, homes)
            nursery.cancel_scope.cancel()

    async def main() -> None:
        async with world() as w:
            await scenario(w)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_what_the_coordinator_publishes_is_followed_by_all_and_by_itself() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE, TWO)
        made = plan(w.epoch)
        w.publish(made)
        await elapse(2)
        assert w.followed == dict.fromkeys((LEADER, ONE, TWO), made)

    play(scenario)


def test_what_could_not_be_published_is_followed_by_nobody() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE)
        made = plan(w.epoch)
        w.publish(made)
        w.nodes[LEADER].publish(PLAN, _Large(made=plan(w.epoch, 2)))
        await elapse(2)
        assert w.followed == dict.fromkeys((LEADER, ONE), made)

    play(scenario)


def test_who_publishes_two_plans_under_one_number_is_expelled() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE, TWO)
        epoch = w.epoch
        made = plan(epoch)
        w.publish(made)
        await elapse(1)
        w.publish(plan(epoch, why=("another",)))
        await elapse(5)
        for index in (ONE, TWO):
            assert PEOPLE[LEADER].peer_id not in w.nodes[index].network.connected()
            assert w.nodes[index].network.coordinator is None
            assert w.followed[index] == made
        await elapse(120)
        assert PEOPLE[LEADER].peer_id not in w.nodes[ONE].network.connected()

    play(scenario)


def test_a_new_plan_under_a_new_number_is_no_lie() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE)
        for version in range(1, 6):
            w.publish(plan(w.epoch, version))
            await elapse(1)
        assert w.followed == dict.fromkeys((LEADER, ONE), plan(w.epoch, 5))

    play(scenario)


def test_who_may_not_lead_and_claims_the_next_epoch_with_a_plan_is_followed_by_nobody() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE, UNTRUSTED)
        epoch, made = w.epoch, plan(w.epoch)
        w.publish(made)
        await elapse(2)
        for junk in (b"\xc1 junk", msgspec.msgpack.encode(describe_plan(plan(epoch + 1))[0])):
            version = 1000 + len(junk)
            w.say(UNTRUSTED, PLAN, version, junk)
            w.say(UNTRUSTED, CLAIM_KIND, version + 1, encode_claim(epoch + 1))
            await elapse(5)
            assert w.epoch == epoch
            assert {w.followed[LEADER], w.followed[ONE]} == {made}
            assert w.nodes[ONE].network.coordinator == w.nodes[LEADER].network.coordinator

    play(scenario)


def test_who_claims_twice_under_one_version_is_expelled_and_the_plan_stays() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE, UNTRUSTED)
        epoch, made = w.epoch, plan(w.epoch)
        w.publish(made)
        await elapse(2)
        for claimed in (epoch + 1, epoch + 2):
            w.say(UNTRUSTED, CLAIM_KIND, 1000, encode_claim(claimed))
        await elapse(5)
        for index in (LEADER, ONE):
            assert PEOPLE[UNTRUSTED].peer_id not in w.nodes[index].network.connected()
            assert w.followed[index] == made
        assert w.epoch == epoch

    play(scenario)


def test_a_whole_network_that_restarts_follows_no_older_plan(tmp_path: Path) -> None:
    numbers: list[tuple[int, int]] = []

    async def run(w: World, *, makes_plans: bool) -> None:
        await w.start(LEADER, ONE, TWO)
        if makes_plans:
            numbers.append((w.epoch, 2))
            w.publish(plan(w.epoch, 1))
            await elapse(1)
            w.publish(plan(w.epoch, 2))
        await elapse(12)
        followed = [each.number for each in w.followed.values() if each is not None]
        assert followed == [numbers[-1]] * 3
        for index in (TWO, ONE, LEADER):
            w.kill(index)

    async def with_plans(w: World) -> None:
        await run(w, makes_plans=True)

    async def without(w: World) -> None:
        await run(w, makes_plans=False)

    for scenario in (with_plans, without, with_plans, without):
        play(scenario, tmp_path)
    assert numbers[1] > numbers[0], "a new coordinator's plans are newer than those before"


def test_a_network_that_has_lost_its_state_but_not_a_plan_comes_to_a_new_one(tmp_path: Path) -> None:
    async def keep(made: Plan) -> None:
        with trio.move_on_after(1):
            await PlanFile(tmp_path / str(ONE), KEY.public, print).keep(NetworkView(plans={made.service: made}))

    async def scenario(w: World) -> None:
        await keep(plan(900))
        await w.start(LEADER, ONE)
        made = plan(w.epoch)
        w.publish(made)
        await elapse(2)
        assert w.followed == dict.fromkeys((LEADER, ONE), made)

    play(scenario, tmp_path)


def test_each_node_follows_the_plan_of_every_service_and_one_that_joins_later_does() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE)
        epoch = w.epoch
        w.publish(plan(epoch, 1))
        w.publish_beside(plan(epoch, 2, service="other"), plan(epoch, 3, service="third"))
        await w.start(TWO)
        expected = {"tiny": (epoch, 1), "other": (epoch, 2), "third": (epoch, 3)}
        assert w.numbers == dict.fromkeys((LEADER, ONE, TWO), expected)
        w.publish_beside(plan(epoch, 4, service="other"), plan(epoch, 3, service="third"), serial=2)
        await elapse(2)
        assert w.numbers == dict.fromkeys((LEADER, ONE, TWO), expected | {"other": (epoch, 4)})
        statuses = [node.status() for node in w.nodes.values()]
        assert all({each.service for each in plans_of(status)} == expected.keys() for status in statuses)

    play(scenario)


def test_who_publishes_two_bundles_under_one_number_is_expelled() -> None:
    async def scenario(w: World) -> None:
        await w.start(LEADER, ONE, TWO)
        epoch = w.epoch
        w.publish(plan(epoch, 1))
        for version in (2, 3):
            w.publish_beside(plan(epoch, version, service="other"))
            await elapse(3)
        for index in (ONE, TWO):
            assert PEOPLE[LEADER].peer_id not in w.nodes[index].network.connected()
            assert w.numbers[index] == {"tiny": (epoch, 1), "other": (epoch, 2)}

    play(scenario)


def test_plans_of_all_services_outlive_a_restart_of_the_whole_network(tmp_path: Path) -> None:
    followed: list[dict[str, tuple[int, int]]] = []

    async def first(w: World) -> None:
        await w.start(LEADER, ONE, TWO)
        w.publish(plan(w.epoch, 1))
        w.publish_beside(plan(w.epoch, 2, service="other"))
        await elapse(12)
        followed.append(w.numbers[ONE])

    async def second(w: World) -> None:
        await w.start(LEADER, ONE, TWO)
        await elapse(12)
        assert w.numbers == dict.fromkeys((LEADER, ONE, TWO), followed[0])

    play(first, tmp_path)
    assert followed[0].keys() == {"tiny", "other"}
    play(second, tmp_path)


class _Large(msgspec.Struct):
    made: Plan
    text: str = "x" * (1 << 17)
