"""A network in memory on a virtual clock, whose nodes can be started, killed and cut off."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, Bootstrap, Identity, Network, NetworkKey, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.methods import EVERYONE, MEMBERS, Method, Notice
from p2pserve.bootstrap.state_file import StateFile
from p2pserve.bootstrap.streams.transport import Transport
from p2pserve.bootstrap.testing import MemoryNetwork

KEY = NetworkKey(b"n" * 32)
# In the order of their peer ids, so that names tell who wins an election.
PEOPLE = sorted((Identity(bytes([seed]) * 32) for seed in range(1, 17)), key=lambda each: each.peer_id)


class Echo(msgspec.Struct, frozen=True):
    text: str


class Wrong(msgspec.Struct, frozen=True):
    number: int


def asking(name: str, callers: frozenset[Role] = MEMBERS) -> Method[Echo, Echo]:
    return Method(name, Echo, Echo, callers)


def telling(name: str) -> Notice[Echo]:
    return Notice(name, Echo)


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


@dataclass
class World:
    """Nodes that can be started and killed, on one in-memory network."""

    air: MemoryNetwork
    nursery: trio.Nursery
    seed: int
    nodes: dict[int, Network] = field(default_factory=dict)
    scopes: dict[int, trio.CancelScope] = field(default_factory=dict)

    def bootstrap(self, index: int = 0) -> Bootstrap:
        return Bootstrap("192.0.2.1", 4000 + index, PEOPLE[index].peer_id)

    def token(
        self, role: Role = Role.WORKER, *, expires_at: float = 1e6, key: NetworkKey = KEY, lead: bool = True
    ) -> str:
        return key.issue((self.bootstrap(),), role, expires_at, lead=lead and role is not Role.CLIENT)

    def build(
        self,
        index: int,
        *,
        role: Role = Role.WORKER,
        token: str | None = None,
        alone: bool = False,
        port: int | None = None,
        ask: tuple[Bootstrap, ...] | None = None,
        remembered: tuple[Bootstrap, ...] = (),
        state_file: StateFile | None = None,
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
        settings: NetworkSettings | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> Network:
        address = Address("192.0.2.1", 4000 + index if port is None else port)
        network = Network(
            transport=wrap(self.air.transport(PEOPLE[index], address)),
            identity=PEOPLE[index],
            token=token or self.token(role),
            network_key_public=KEY.public,
            role=role,
            announce=address,
            bootstraps=() if alone else (self.bootstrap(),) if ask is None else ask,
            remembered=remembered,
            state_file=state_file,
            rng=random.Random(self.seed * 100 + address.port),
            clock=lambda: 1000.0 + trio.current_time(),
            settings=settings or NetworkSettings(),
            say=say,
        )

        async def echo(peer: PeerId, role: Role, body: Echo) -> Echo:
            return Echo(f"{body.text} from {role.value}")

        network.handle(asking("echo", EVERYONE), echo)
        return network

    async def start(self, index: int, **options: object) -> Network:
        """Start a node and wait until it has joined; node 0 is the bootstrap."""
        options.setdefault("alone", index == 0 and "ask" not in options)
        network = self.build(index, **options)  # type: ignore[arg-type]
        await self.nursery.start(self._live, index, network)
        return network

    async def _live(self, index: int, network: Network, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope() as scope:
            async with network:
                self.nodes[index], self.scopes[index] = network, scope
                network.publish("name", str(index).encode())
                task_status.started()
                await trio.sleep_forever()

    def kill(self, index: int) -> None:
        self.air.kill(PEOPLE[index].peer_id)
        self.scopes.pop(index).cancel()
        del self.nodes[index]

    def names(self, index: int) -> set[int]:
        """Who this node sees, by what they published."""
        return {int(name) for name in self.nodes[index].entries("name").values()}

    def check_agreement(self, indices: Iterable[int]) -> None:
        """Everybody sees exactly these and one coordinator among them, and no table contradicts itself."""
        expected = set(indices)
        assert {index: self.names(index) for index in expected} == dict.fromkeys(expected, expected)
        leaders = {self.nodes[index].coordinator for index in expected}
        assert len(leaders) == 1
        leader = leaders.pop()
        assert leader is not None
        assert leader[0] in {PEOPLE[index].peer_id for index in expected}
        for index in expected:
            self.nodes[index].check_integrity()

    def check_full_mesh(self) -> None:
        """Exactly one control stream for each pair."""
        for index, node in self.nodes.items():
            assert node.connected() == {PEOPLE[other].peer_id for other in self.nodes if other != index}
        assert self.air.statistics().connections == len(self.nodes) * (len(self.nodes) - 1) // 2


@asynccontextmanager
async def world(seed: int = 0, *, latency_s: float = 0.02, loss: float = 0.0) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(MemoryNetwork(latency_s=latency_s, loss=loss, rng=random.Random(seed)), nursery, seed)
        nursery.cancel_scope.cancel()


def simulate(main: Callable[[], Awaitable[None]]) -> None:
    async def entry() -> None:
        await main()

    trio.run(entry, clock=MockClock(autojump_threshold=0))
