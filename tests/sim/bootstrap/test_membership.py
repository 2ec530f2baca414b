"""Whole networks in memory on a virtual clock: join, late join, kill, leave, restart, partitions, strangers."""

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import (
    Address,
    Bootstrap,
    Identity,
    JoinToken,
    MemberState,
    MemoryNetwork,
    Network,
    NetworkKey,
    PeerId,
    PeerLost,
    PortInUse,
    Refused,
    RemoteError,
    RequestTimeout,
    Role,
    TokenError,
    Unreachable,
)
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.bootstrap.members.election import CLAIM_KIND, encode_claim
from p2pserve.bootstrap.members.entries import MEMBER_KIND, MemberRecord, sign_entry
from p2pserve.bootstrap.methods import EVERYONE, MEMBERS, Method, Notice
from p2pserve.bootstrap.streams.control import Hello, Rejected, decode_greeting, encode_greeting, encode_notice
from p2pserve.bootstrap.streams.memory import MemoryConnection
from p2pserve.bootstrap.streams.transport import Connection

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

    def token(self, role: Role = Role.WORKER, *, expires_at: float = 1e6, key: NetworkKey = KEY) -> str:
        return key.issue((self.bootstrap(),), role, expires_at)

    def build(self, index: int, *, role: Role = Role.WORKER, token: str | None = None, alone: bool = False) -> Network:
        address = Address("192.0.2.1", 4000 + index)
        network = Network(
            transport=self.air.transport(PEOPLE[index], address),
            identity=PEOPLE[index],
            token=token or self.token(role),
            network_key_public=KEY.public,
            role=role,
            announce=address,
            bootstraps=() if alone else (self.bootstrap(),),
            rng=random.Random(self.seed * 100 + index),
            clock=lambda: 1000.0 + trio.current_time(),
        )

        async def echo(peer: PeerId, role: Role, body: Echo) -> Echo:
            return Echo(f"{body.text} from {role.value}")

        network.handle(asking("echo", EVERYONE), echo)
        return network

    async def start(self, index: int, **options: object) -> Network:
        """Start a node and wait until it has joined; node 0 is the bootstrap."""
        network = self.build(index, alone=index == 0, **options)  # type: ignore[arg-type]
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


def test_five_join_and_agree() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(5):
                await w.start(index)
            await elapse(5)
            w.check_agreement(range(5))
            w.check_full_mesh()
            rtts = [member.rtt_s for member in w.nodes[3].members() if member.peer_id != PEOPLE[3].peer_id]
            assert rtts == [pytest.approx(0.04)] * 4

    simulate(main)


def test_a_late_joiner_sees_everything_at_once() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(60)
            before = trio.current_time()
            await w.start(4)
            await elapse(0.3)
            assert w.names(4) == set(range(5))
            assert trio.current_time() - before < 1.0
            await elapse(3)
            w.check_agreement(range(5))
            w.check_full_mesh()

    simulate(main)


def test_what_is_published_arrives_within_a_latency() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            revision = w.nodes[3].revision
            w.nodes[1].publish("load", b"7")
            assert w.nodes[1].entries("load") == {PEOPLE[1].peer_id: b"7"}
            before = trio.current_time()
            await w.nodes[3].wait_changed(revision)
            assert trio.current_time() - before == pytest.approx(0.02)
            assert w.nodes[3].entries("load") == {PEOPLE[1].peer_id: b"7"}

    simulate(main)


def test_a_killed_node_is_noticed_at_once_and_the_coordinator_replaced() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(5):
                await w.start(index)
            await elapse(5)
            leader = w.nodes[0].coordinator
            assert leader is not None
            victim = next(index for index, person in enumerate(PEOPLE) if person.peer_id == leader[0])
            lost: list[PeerId] = []
            survivors = [index for index in range(5) if index != victim]
            w.nodes[survivors[0]].on_peer_lost(lost.append)
            w.kill(victim)
            await elapse(0.2)
            assert lost == [PEOPLE[victim].peer_id]
            assert victim not in w.names(survivors[0])
            await elapse(3)
            w.check_agreement(survivors)
            after = w.nodes[survivors[0]].coordinator
            assert after is not None
            assert after[1] == leader[1] + 1

    simulate(main)


def test_a_leaver_is_gone_at_once_and_marked_as_left() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            await w.nodes[3].leave()
            await elapse(0.1)
            states = {member.peer_id: member.state for member in w.nodes[1].members()}
            assert states[PEOPLE[3].peer_id] is MemberState.LEFT
            assert w.names(1) == {0, 1, 2}
            assert w.nodes[3].connected() == frozenset()
            await elapse(30)
            assert PEOPLE[3].peer_id not in w.nodes[1].connected()

    simulate(main)


def test_a_restart_keeps_its_id_and_forgets_its_past() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            w.nodes[2].publish("load", b"past")
            await elapse(5)
            w.kill(2)
            await elapse(0.05)
            await w.start(2)
            await elapse(5)
            w.check_agreement(range(4))
            w.check_full_mesh()
            assert w.nodes[1].entries("load") == {}

    simulate(main)


def test_the_bootstrap_may_die_and_come_back() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            w.kill(0)
            await elapse(5)
            w.check_agreement([1, 2, 3])
            await elapse(120)
            await w.start(0)
            await elapse(45)  # the others redial it every 30 s for ever
            w.check_agreement(range(4))
            w.check_full_mesh()

    simulate(main)


def test_a_silent_link_is_noticed_by_timeouts() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index)
            await elapse(5)
            w.air.partition([PEOPLE[2].peer_id], [PEOPLE[0].peer_id, PEOPLE[1].peer_id])
            await elapse(4.5)
            states = {member.peer_id: member.state for member in w.nodes[0].members()}
            assert states[PEOPLE[2].peer_id] is MemberState.SUSPECT
            await elapse(4.5)
            states = {member.peer_id: member.state for member in w.nodes[0].members()}
            assert states[PEOPLE[2].peer_id] is MemberState.DEAD

    simulate(main)


def test_one_broken_link_kills_nobody() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(4):
                await w.start(index)
            await elapse(5)
            w.air.block(PEOPLE[1].peer_id, PEOPLE[2].peer_id)
            await elapse(60)
            w.check_agreement(range(4))
            assert PEOPLE[2].peer_id not in w.nodes[1].connected()

    simulate(main)


@pytest.mark.parametrize("seed", range(4))
def test_a_partition_heals_to_one_coordinator(seed: int) -> None:
    async def main() -> None:
        async with world(seed, loss=0.02) as w:
            for index in range(6):
                await w.start(index)
            await elapse(5)
            left = random.Random(seed).sample(range(6), 3)
            right = [index for index in range(6) if index not in left]
            w.air.partition([PEOPLE[i].peer_id for i in left], [PEOPLE[i].peer_id for i in right])
            await elapse(30)
            w.check_agreement(left)
            w.check_agreement(right)
            w.air.heal()
            await elapse(50)
            w.check_agreement(range(6))
            w.check_full_mesh()

    simulate(main)


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_converge(seed: int) -> None:
    """Seeded chaos, then calm: whoever is up agrees with everybody else who is up."""

    async def main() -> None:
        rng = random.Random(seed)
        async with world(seed, latency_s=rng.choice([0.001, 0.03, 0.15]), loss=rng.choice([0.0, 0.05])) as w:
            await w.start(0)
            for _ in range(25):
                up, down = sorted(w.nodes), [index for index in range(1, 7) if index not in w.nodes]
                action = rng.choice(["start", "start", "kill", "cut", "partition", "heal", "publish", "wait"])
                if action == "start" and down:
                    w.air.heal()
                    await w.start(rng.choice(down))
                elif action == "kill" and len(up) > 2:
                    w.kill(rng.choice([index for index in up if index != 0]))
                elif action == "cut" and len(up) > 1:
                    one, other = rng.sample(up, 2)
                    w.air.drop_connections(PEOPLE[one].peer_id, PEOPLE[other].peer_id)
                elif action == "partition" and len(up) > 1:
                    side = rng.sample(up, len(up) // 2)
                    w.air.partition([PEOPLE[i].peer_id for i in side], [PEOPLE[i].peer_id for i in up if i not in side])
                elif action == "heal":
                    w.air.heal()
                elif action == "publish":
                    w.nodes[rng.choice(up)].publish("load", rng.randbytes(8))
                await elapse(rng.choice([0.0, 0.01, 0.5, 4.0, 12.0]))
                for node in w.nodes.values():
                    node.check_integrity()
            w.air.heal()
            await elapse(60)
            w.check_agreement(w.nodes)
            w.check_full_mesh()
            loads = [node.entries("load") for node in w.nodes.values()]
            assert all(load == loads[0] for load in loads)

    simulate(main)


def test_sixteen_start_at_the_same_moment() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            async with trio.open_nursery() as nursery:
                for index in range(1, 16):
                    nursery.start_soon(w.start, index)
            await elapse(10)
            w.check_agreement(range(16))
            w.check_full_mesh()

    simulate(main)


# -- who may come in --------------------------------------------------------------------------------------------------

OTHER_KEY = NetworkKey(b"x" * 32)


@pytest.mark.parametrize(
    ("token", "role", "error", "reason"),
    [
        (lambda w: w.token(key=OTHER_KEY), Role.WORKER, TokenError, "another network"),
        (lambda w: w.token(expires_at=900.0), Role.WORKER, TokenError, "expired"),
        (lambda w: w.token(Role.CLIENT), Role.WORKER, TokenError, "for the role 'client'"),
        (lambda w: "nonsense", Role.WORKER, TokenError, "malformed"),
    ],
)
def test_a_bad_token_is_told_before_anything_is_dialled(
    token: Callable[[World], str], role: Role, error: type[Exception], reason: str
) -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            dials = w.air.statistics().dials
            with pytest.raises(error, match=reason):
                await w.start(1, token=token(w), role=role)
            assert w.air.statistics().dials == dials

    simulate(main)


async def knock(w: World, identity: Identity, hello: bytes) -> str:
    """Greet the bootstrap by hand; returns the reason of its refusal."""
    transport = w.air.transport(identity, Address("192.0.2.9", 0))

    async def nobody(connection: Connection) -> None:
        await connection.aclose()

    await w.nursery.start(transport.serve, nobody)
    connection = await transport.dial(Address("192.0.2.1", 4000), PEOPLE[0].peer_id)
    await connection.send(hello)
    answer = decode_greeting(await connection.receive())
    assert isinstance(answer, Rejected)
    with pytest.raises(PeerLost):
        await connection.receive()
    return answer.reason


def hello(identity: Identity, token: str | None, *, version: int = 1, role: Role = Role.WORKER) -> bytes:
    credential = JoinToken.parse(token).credential(identity.peer_id) if token else None
    payload = msgspec.msgpack.encode(MemberRecord(role, "192.0.2.9", 9, credential))
    return encode_greeting(Hello(version, KEY.public, sign_entry(identity, MEMBER_KIND, 1, 1, payload)))


def test_strangers_are_refused_with_the_reason() -> None:
    thief, stranger = PEOPLE[8], PEOPLE[9]

    async def main() -> None:
        async with world() as w:
            await w.start(0)
            stolen = hello(PEOPLE[1], w.token())
            for greeting, reason in (
                (hello(stranger, None), "no join token was shown"),
                (hello(stranger, w.token(key=OTHER_KEY)), "another network"),
                (hello(stranger, w.token(expires_at=900.0)), "expired"),
                (hello(stranger, w.token(Role.CLIENT)), "for the role 'client', not 'worker'"),
                (hello(stranger, w.token(), version=2), "protocol version 2"),
                (stolen, "not its own"),
                (b"\xc1garbage", None),
            ):
                if reason is None:
                    with pytest.raises(PeerLost):
                        await knock(w, thief, greeting)
                else:
                    assert reason in await knock(w, Identity.generate() if greeting is stolen else stranger, greeting)
                w.air.kill(stranger.peer_id)
            assert w.nodes[0].statistics().members == 1
            assert w.nodes[0].statistics().strangers_refused == 7

    simulate(main)


def test_a_stranger_may_send_little() -> None:
    async def main() -> None:
        async with world() as w:
            node = await w.start(0)
            with pytest.raises(PeerLost):
                await knock(w, PEOPLE[8], bytes(200_000))
            assert node.statistics().strangers_refused == 1

    simulate(main)


def test_who_was_let_in_may_say_all_it_has_at_once() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            newcomer = w.build(1)
            for index in range(10):
                newcomer.publish(f"kind{index}", bytes(60_000))
            async with newcomer:
                await elapse(0.2)
                assert len(w.nodes[0].entries("kind9")[newcomer.peer_id]) == 60_000

    simulate(main)


def test_a_dialler_hears_why_it_was_refused() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            await w.nodes[0].leave()
            with pytest.raises(Refused, match="leaving the network; join through another one"):
                await w.start(1)

    simulate(main)


def test_nobody_at_the_bootstrap_address() -> None:
    async def main() -> None:
        async with world() as w:
            before = trio.current_time()
            with pytest.raises(Unreachable, match=r"nobody listens at 192\.0\.2\.1:4000"):
                await w.start(1)
            assert trio.current_time() - before < 7.0

    simulate(main)


def test_the_port_is_taken() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            with pytest.raises(PortInUse, match="in use"):
                await w.start(0)

    simulate(main)


def test_expiry_bounds_joining_and_not_staying() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index, token=w.token(expires_at=1100.0))
            await elapse(200)
            w.air.drop_connections(PEOPLE[1].peer_id, PEOPLE[2].peer_id)
            await elapse(5)
            w.check_agreement(range(3))
            w.check_full_mesh()
            with pytest.raises(TokenError, match="expired"):
                await w.start(3, token=w.token(expires_at=1100.0))

    simulate(main)


# -- talking ----------------------------------------------------------------------------------------------------------


def test_requests_and_their_failures(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            peer = other.peer_id

            async def refuse(peer: PeerId, role: Role, body: Echo) -> Echo:
                raise RemoteError("full", "no room for another one")

            async def crash(peer: PeerId, role: Role, body: Echo) -> Echo:
                raise KeyError("a bug")

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep_forever()

            async def huge(peer: PeerId, role: Role, body: Echo) -> Echo:
                return Echo("x" * 5_000_000)

            for name, handler in (("refuse", refuse), ("crash", crash), ("hang", hang), ("huge", huge)):
                other.handle(asking(name), handler)
            assert await one.request(peer, asking("echo"), Echo("a"), 1.0) == Echo("a from worker")
            assert await one.request(one.peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from worker")
            for method, code in (
                ("refuse", "full"),
                ("crash", "internal"),
                ("huge", "too_large"),
                ("missing", "unknown_method"),
            ):
                with pytest.raises(RemoteError) as caught:
                    await one.request(peer, asking(method), Echo("a"), 1.0)
                assert caught.value.code == code
            assert "KeyError: 'a bug'" in caplog.text
            with pytest.raises(RequestTimeout, match="did not answer 'hang' within 1 s"):
                await one.request(peer, asking("hang"), Echo("a"), 1.0)
            with pytest.raises(RemoteError, match="malformed"):
                await one.request(peer, Method("echo", Wrong, Echo), Wrong(1), 1.0)
            with pytest.raises(ProtocolError, match="exceeds 4194304"):
                await one.request(peer, asking("echo"), Echo("x" * 5_000_000), 1.0)
            with pytest.raises(PeerLost, match="not connected"):
                await one.request(PEOPLE[7].peer_id, asking("echo"), Echo("a"), 1.0)
            assert await one.request(peer, asking("echo"), Echo("still here"), 1.0) == Echo("still here from worker")

    with caplog.at_level(logging.ERROR):
        simulate(main)


def test_a_request_in_flight_fails_when_its_peer_dies() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep_forever()

            other.handle(asking("hang"), hang)
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    with pytest.raises(PeerLost, match="was lost"):
                        await one.request(PEOPLE[1].peer_id, asking("hang"), Echo("a"), 100.0)

                nursery.start_soon(ask)
                await elapse(1)
                before = trio.current_time()
                w.kill(1)
            assert trio.current_time() - before < 0.1

    simulate(main)


def test_notices_arrive_in_order_and_a_bad_handler_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world(loss=0.3) as w:
            one, other = await w.start(0), await w.start(1)
            heard: list[str] = []

            def take(peer: PeerId, role: Role, body: Echo) -> None:
                heard.append(body.text)
                if body.text == "7":
                    raise ValueError("a bug")

            other.on_notice(telling("tell"), take)
            for index in range(50):
                one.notify(other.peer_id, telling("tell"), Echo(str(index)))
            await elapse(5)
            assert heard == [str(index) for index in range(50)]
            assert "a bug" in caplog.text
            with pytest.raises(PeerLost):
                one.notify(PEOPLE[9].peer_id, telling("tell"), Echo("a"))

    simulate(main)


def test_a_client_may_only_do_what_clients_may() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index)

            async def secret(peer: PeerId, role: Role, body: Echo) -> Echo:
                return body

            w.nodes[0].handle(asking("secret"), secret)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(5)
            assert await client.request(PEOPLE[0].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from client")
            with pytest.raises(RemoteError, match="clients may not call 'secret'"):
                await client.request(PEOPLE[0].peer_id, asking("secret"), Echo("a"), 1.0)
            assert {int(name) for name in client.entries("name").values()} == {0, 1, 2, 5}
            assert client.coordinator == w.nodes[0].coordinator
            # Those that it did not call know nothing of it, and it can call any of them.
            assert PEOPLE[5].peer_id not in {member.peer_id for member in w.nodes[2].members()}
            assert await client.request(PEOPLE[2].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from client")
            assert all(node.statistics().entries_forged == 0 for node in w.nodes.values())
            assert w.nodes[0].entries("name").keys() == {PEOPLE[index].peer_id for index in range(3)}

    simulate(main)


@pytest.mark.parametrize("how", ["leave", "close", "die"])
def test_a_client_that_goes_is_gone_at_once(how: str) -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(5)
            assert PEOPLE[5].peer_id in {member.peer_id for member in w.nodes[0].members()}
            if how == "leave":
                await client.leave()
            elif how == "close":
                w.scopes[5].cancel()
            else:
                w.kill(5)
            await elapse(0.5)
            assert [member.peer_id for member in w.nodes[0].members()] == [PEOPLE[0].peer_id]
            assert w.nodes[0].statistics().members == 1

    simulate(main)


def test_a_client_that_only_lost_its_connection_comes_back() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(10)
            w.air.drop_connections(PEOPLE[0].peer_id, PEOPLE[5].peer_id)
            await elapse(2)
            states = {member.peer_id: member.state for member in w.nodes[0].members()}
            assert states[PEOPLE[5].peer_id] is MemberState.ALIVE
            assert await client.request(PEOPLE[0].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from client")
            w.nodes[0].check_integrity()

    simulate(main)


def test_a_client_that_claims_leads_nobody_and_is_thrown_out() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(2):
                await w.start(index)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(5)
            before = w.nodes[0].coordinator
            session = client._sessions.by_peer[PEOPLE[0].peer_id]
            for epoch in range(50, 70):
                claim = client._membership.publish(CLAIM_KIND, encode_claim(epoch))
                body = msgspec.msgpack.encode([[claim]])
                session.control.connection.send_nowait(encode_notice("p2p.entries", body))
            await elapse(5)
            assert w.nodes[0].coordinator == w.nodes[1].coordinator == before
            assert w.nodes[0].statistics().entries_forged >= 16
            assert PEOPLE[5].peer_id not in w.nodes[0].connected()

    simulate(main)


def test_garbage_in_an_answer_to_gossip_costs_only_that_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(2):
                await w.start(index)
            await elapse(1)

            async def nonsense(method: str, body: msgspec.Raw) -> bytes:
                return b"\x93\x81\xa1\xff\x92\x01\x80\x80\x90"  # a digest whose origin is no UTF-8

            w.nodes[0]._sessions.by_peer[PEOPLE[1].peer_id].control._serve = nonsense
            await elapse(5)
            assert "answered a digest with nonsense" in caplog.text
            assert await w.nodes[0].request(PEOPLE[1].peer_id, asking("echo"), Echo("a"), 1.0) == Echo("a from worker")

    simulate(main)


@pytest.mark.parametrize("dialler", [0, 1])
def test_a_bug_in_a_session_costs_only_that_session(dialler: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever dialled: node 1 dialled node 0, its bootstrap."""

    async def main() -> None:
        async with world() as w:
            for index in range(2):
                await w.start(index)
            await elapse(6)
            victim, other = w.nodes[dialler], w.nodes[1 - dialler]
            lost: list[PeerId] = []
            victim.on_peer_lost(lost.append)

            def fail(method: str, body: msgspec.Raw) -> None:
                raise KeyError("a bug")

            victim._sessions.by_peer[other.peer_id].control._notice = fail
            other.publish("load", b"1")
            await elapse(5)
            assert lost == [other.peer_id]
            assert victim.entries("load") == {other.peer_id: b"1"}, "connected again, and gossip brought it"
            w.check_full_mesh()
            assert "KeyError: 'a bug'" in caplog.text

    simulate(main)


def test_a_connection_that_only_one_side_lost_is_seen_as_lost_by_both() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            await elapse(20)
            events: list[str] = []
            other.on_notice(telling("tell"), lambda peer, role, body: events.append(body.text))
            one.on_peer_lost(lambda peer: events.append("lost at one"))
            other.on_peer_lost(lambda peer: events.append("lost at other"))

            async def hang(peer: PeerId, role: Role, body: Echo) -> Echo:
                await trio.sleep_forever()

            async def ask() -> None:
                with pytest.raises(PeerLost, match="has lost this connection"):
                    await one.request(other.peer_id, asking("hang"), Echo("a"), 100.0)
                events.append("request failed")

            other.handle(asking("hang"), hang)
            w.nursery.start_soon(ask)
            await elapse(1)
            connection = other._sessions.by_peer[one.peer_id].control.connection
            assert isinstance(connection, MemoryConnection)
            connection.sever("only this side noticed")
            one.notify(other.peer_id, telling("tell"), Echo("into the old stream"))
            await elapse(0.5)
            one.notify(other.peer_id, telling("tell"), Echo("into the new one"))
            await elapse(3)
            assert events == ["lost at other", "lost at one", "request failed", "into the new one"]
            w.check_full_mesh()

    simulate(main)


def test_a_peer_that_does_not_read_gets_no_stream_with_a_gap() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            await elapse(6)
            heard: list[int] = []
            lost: list[PeerId] = []
            within = True
            other.on_notice(telling("tell"), lambda peer, role, body: heard.append(int(body.text)))
            other.on_peer_lost(lost.append)
            one.on_peer_lost(lambda peer: lost.append(peer) if not within else pytest.fail("called within notify"))
            w.air.block(one.peer_id, other.peer_id)
            told: list[int] = []

            def tell(count: int) -> None:
                for number in range(count):
                    one.notify(other.peer_id, telling("tell"), Echo(str(number)))
                    told.append(number)

            with pytest.raises(PeerLost, match="does not read its messages"):
                tell(5000)
            with pytest.raises(PeerLost):
                one.notify(other.peer_id, telling("tell"), Echo("9999"))
            within = False
            await elapse(0.1)
            assert lost == [other.peer_id]
            w.air.heal()
            await elapse(5)
            assert sorted(lost) == sorted([one.peer_id, other.peer_id])
            assert heard == told, "all before the gap, nothing after it"
            one.notify(other.peer_id, telling("tell"), Echo("7"))
            await elapse(0.1)
            assert heard[len(told) :] == [7]
            w.check_full_mesh()

    simulate(main)


def test_a_notice_does_not_overtake_the_request_before_it() -> None:
    async def main() -> None:
        async with world() as w:
            one, other = await w.start(0), await w.start(1)
            heard: list[str] = []

            async def begin(peer: PeerId, role: Role, body: Echo) -> Echo:
                heard.append(f"begin {body.text}")
                await elapse(1)
                return body

            other.handle(asking("begin"), begin)
            other.on_notice(telling("cancel"), lambda peer, role, body: heard.append(f"cancel {body.text}"))
            async with trio.open_nursery() as nursery:
                for index in range(30):
                    nursery.start_soon(one.request, other.peer_id, asking("begin"), Echo(str(index)), 5.0)
                    await trio.lowlevel.checkpoint()
                    await trio.lowlevel.checkpoint()
                    one.notify(other.peer_id, telling("cancel"), Echo(str(index)))
            for index in range(30):
                assert heard.index(f"begin {index}") < heard.index(f"cancel {index}")

    simulate(main)


def test_a_peer_that_sends_garbage_is_disconnected_and_the_rest_goes_on() -> None:
    async def main() -> None:
        async with world() as w:
            for index in range(3):
                await w.start(index)
            await elapse(3)
            session = w.nodes[1]._sessions.by_peer[PEOPLE[0].peer_id]
            for _ in range(20):
                session.control.connection.send_nowait(b"\xc1 nonsense")
            await elapse(0.2)
            assert PEOPLE[1].peer_id not in w.nodes[0].connected()
            await elapse(30)
            assert PEOPLE[1].peer_id not in w.nodes[0].connected(), "banned for a minute"
            assert w.nodes[0].connected() == {PEOPLE[2].peer_id}
            await elapse(90)
            w.check_full_mesh()

    simulate(main)


def test_an_error_of_the_block_is_not_wrapped() -> None:
    async def main() -> None:
        async with world() as w:
            with pytest.raises(KeyError, match="mine"):
                async with w.build(0, alone=True):
                    raise KeyError("mine")

    simulate(main)


def test_the_whole_can_be_cancelled_while_it_joins() -> None:
    async def main() -> None:
        async with world() as w:
            with trio.move_on_after(0.1) as scope:
                await w.start(1)
            assert scope.cancelled_caught

    simulate(main)


def test_two_nodes_with_one_identity_are_told_apart() -> None:
    async def main() -> None:
        async with world() as w:
            await w.start(0)
            assert "two nodes share one identity" in await knock(w, PEOPLE[0], hello(PEOPLE[0], w.token()))

    simulate(main)
