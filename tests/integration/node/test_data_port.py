"""Bulk connections at the node's port: each goes to whom its first bytes name, and strangers get no further."""

import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import trio

from p2pserve.bootstrap import Address, PeerId, RemoteError, Role
from p2pserve.bootstrap.errors import Unreachable
from p2pserve.bootstrap.streams.strangers import Origin
from p2pserve.kvtransport.errors import TicketError
from p2pserve.kvtransport.link.relay import Relay
from p2pserve.kvtransport.probing.burst import BurstGate
from p2pserve.kvtransport.probing.burst_ticket import (
    BURST_HELLO_BYTES,
    BURST_MAGIC,
    issue_burst,
    pack_hello,
    parse_hello,
)
from p2pserve.kvtransport.probing.figures import BoxFigures
from p2pserve.kvtransport.wire.channel import LINK_HELLO_BYTES, LINK_MAGIC, LinkHello, parse_link_hello
from p2pserve.kvtransport.wire.channel import LinkRole as LinkRole
from p2pserve.kvtransport.wire.permits import RELAY_HELLO_BYTES, RELAY_MAGIC, Permit
from p2pserve.node import messages
from p2pserve.node.links.data_port import DataPort, RelayDesk
from p2pserve.node.settings import WAN, BoxLinkSettings, NodeTuning
from p2pserve.node.testing import MemoryExchange

pytestmark = pytest.mark.beside

LINK_HELLO = LinkHello(b"l" * 16, b"n" * 16, LinkRole.SENDER).pack()
BURST = issue_burst(streams=2, seconds=1.0, max_bytes=1000, rtt_s=0.01, random=random.Random(1).randbytes)


PATIENT = replace(WAN, hello_s=60.0)  # nobody is hung up on because this machine was busy with something else


@dataclass
class Takers:
    """In place of relay, prober and worker: what has been handed to each."""

    relayed: list[socket.socket] = field(default_factory=list)
    attached: list[tuple[bytes, bytes, socket.socket]] = field(default_factory=list)
    gates: dict[bytes, BurstGate] = field(default_factory=dict)
    hosts_engine: bool = True
    tuning: NodeTuning = PATIENT

    def attach_relay(self, hello: bytes, connection: socket.socket) -> bool:
        self.relayed.append(connection)
        return True

    def attach_burst(self, hello: bytes, connection: socket.socket) -> bool:
        burst = parse_hello(hello)
        gate = self.gates.get(burst.burst)
        if gate is not None:
            gate.attach(connection, burst)
        return gate is not None

    def attach(self, hello: bytes, connection: socket.socket) -> bool:
        self.attached.append((parse_link_hello(hello).link, hello, connection))
        return True


SOMEWHERE = Origin("192.0.2.1")


@asynccontextmanager
async def open_port(takers: Takers) -> AsyncIterator[DataPort]:
    async with trio.open_nursery() as nursery:
        port = DataPort(nursery, takers.tuning)
        port.open_door(RELAY_MAGIC, RELAY_HELLO_BYTES, takers.attach_relay)
        port.open_door(BURST_MAGIC, BURST_HELLO_BYTES, takers.attach_burst)
        if takers.hosts_engine:
            port.open_door(LINK_MAGIC, LINK_HELLO_BYTES, takers.attach)
        yield port
        nursery.cancel_scope.cancel()


def play(scenario: Callable[[DataPort, Takers], Coroutine[Any, Any, None]], takers: Takers | None = None) -> None:
    async def main() -> None:
        found = takers or Takers()
        with trio.fail_after(60):
            async with open_port(found) as port:
                await scenario(port, found)
        for connection in (*found.relayed, *(each for _, _, each in found.attached)):
            connection.close()

    trio.run(main)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (threads and kernels give no notice)
        await trio.sleep(0.002)


async def hung_up(far: socket.socket) -> None:
    """Wait until the port has closed its end."""
    far.setblocking(False)
    await trio.lowlevel.wait_readable(far)
    with far:
        try:
            assert far.recv(1) == b""
        except ConnectionResetError:
            pass  # with bytes of ours unread


def come(
    port: DataPort, said: bytes, magic: bytes | None = None, origin: Origin = SOMEWHERE
) -> tuple[socket.socket, socket.socket]:
    """A connection that says this; the listener has peeked at its magic."""
    near, far = socket.socketpair()
    far.sendall(said)
    port.accept(near, said[:8] if magic is None else magic, origin)
    return near, far


def test_a_connection_of_a_link_goes_to_the_engine_with_its_hello() -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        _, far = come(port, LINK_HELLO + b"and more")
        await until(lambda: takers.attached)
        ((link, hello, connection),) = takers.attached
        assert (link, hello) == (b"l" * 16, LINK_HELLO)
        assert connection.getblocking()
        assert connection.recv(100) == b"and more"  # not a byte of what follows is lost
        far.close()

    play(scenario)


def test_a_hello_may_come_byte_by_byte() -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        near, far = socket.socketpair()
        far.sendall(LINK_HELLO[:8])
        port.accept(near, LINK_MAGIC, SOMEWHERE)
        for byte in LINK_HELLO[8:]:
            await trio.sleep(0.001)
            assert takers.attached == []
            far.sendall(bytes([byte]))
        await until(lambda: takers.attached)
        assert takers.attached[0][1] == LINK_HELLO
        far.close()

    play(scenario)


def test_a_connection_of_a_relay_comes_with_its_hello() -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        near, far = come(port, RELAY_MAGIC + bytes(RELAY_HELLO_BYTES - len(RELAY_MAGIC)) + b"whatever")
        await until(lambda: takers.relayed)
        assert takers.relayed == [near]
        assert near.recv(100) == b"whatever"
        far.close()

    play(scenario)


def test_a_connection_of_a_burst_goes_to_its_gate() -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        gate = takers.gates[BURST.burst] = BurstGate(BURST)
        fars = [come(port, pack_hello(BURST, index))[1] for index in range(2)]
        await until(lambda: gate.is_complete)
        # The same one again, one that proves nothing, and one that nobody knows of.
        for said in (
            pack_hello(BURST, 0),
            pack_hello(BURST, 1)[:-1] + b"?",
            pack_hello(issue_burst(streams=1, seconds=1, max_bytes=1, rtt_s=0, random=random.Random(2).randbytes), 0),
        ):
            await hung_up(come(port, said)[1])
        assert gate.is_complete
        gate.close()
        for far in fars:
            far.close()

    play(scenario)


@pytest.mark.parametrize(
    ("said", "magic"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(64), None),
        (bytes(64), None),
        (LINK_HELLO[:-1] + b"\x07", None),  # reserved bytes
        (LINK_HELLO[:40] + b"\x09" + LINK_HELLO[41:], None),  # neither end of a link
        (BURST_MAGIC + b"\xff" * 64, None),
        (LINK_HELLO.replace(LINK_MAGIC, b"p2pKV/9\n"), None),
        (b"something else entirely, and long enough to be read as it", LINK_MAGIC),
    ],
)
def test_garbage_is_hung_up_on_and_harms_nobody(said: bytes, magic: bytes | None) -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        await hung_up(come(port, said, magic)[1])
        assert not takers.attached
        assert not takers.relayed
        _, far = come(port, LINK_HELLO)
        await until(lambda: takers.attached)
        far.close()
        assert "undecided=0" in repr(port)

    play(scenario)


@pytest.mark.parametrize("said", [LINK_MAGIC, LINK_HELLO[:-1], BURST_MAGIC])
def test_a_hello_that_ends_too_early_is_hung_up_on(said: bytes) -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        _, far = come(port, said)
        far.shutdown(socket.SHUT_WR)
        await hung_up(far)
        assert takers.attached == []
        assert "undecided=0" in repr(port)

    play(scenario)


def test_a_stranger_that_says_nothing_more_is_not_waited_for() -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        for said in (LINK_MAGIC, LINK_HELLO[:-1]):
            await hung_up(come(port, said)[1])
        assert takers.attached == []

    play(scenario, Takers(tuning=replace(WAN, hello_s=0.05)))


def test_those_that_say_nothing_more_make_room_for_those_that_do() -> None:
    limits = WAN.pending_hellos

    async def scenario(port: DataPort, takers: Takers) -> None:
        fars = [come(port, LINK_MAGIC)[1] for _ in range(2 * limits.each)]
        await until(lambda: f"undecided={limits.each}" in repr(port))
        for _ in range(3):
            _, far = come(port, LINK_HELLO)
            fars.append(far)
        _, far = come(port, LINK_HELLO, origin=Origin("192.0.2.2"))
        await until(lambda: len(takers.attached) == 4)
        for each in (far, *fars):
            each.close()

    play(scenario)


def test_a_node_without_an_engine_takes_no_links_and_relays() -> None:
    async def scenario(port: DataPort, takers: Takers) -> None:
        await hung_up(come(port, LINK_HELLO)[1])
        near, far = come(port, RELAY_MAGIC + bytes(RELAY_HELLO_BYTES - len(RELAY_MAGIC)))
        await until(lambda: takers.relayed)
        assert takers.relayed == [near]
        far.close()

    play(scenario, Takers(hosts_engine=False))


# ---- the relay's desk ---------------------------------------------------------------------------------------

PEER, TARGET, STRANGER = PeerId("asker"), PeerId("target"), PeerId("stranger")
OWN = "192.0.2.1"
MEMBERS = {
    TARGET: Address("192.0.2.5", 7005),
    PeerId("nowhere"): Address("192.0.2.6", 0),
    PeerId("within"): Address("127.0.0.1", 22),
    PeerId("elsewhere"): Address("192.0.2.9", 7009),
    **{PeerId(f"target {number}"): Address("192.0.2.5", 8000 + number) for number in range(4096)},
}
NOT_THERE = {PeerId("elsewhere")}


class Admitted:
    """In place of a relay: the permits that it was told of, and has not revoked."""

    def __init__(self) -> None:
        self.permits: list[Permit] = []
        self.full = False

    def admit(self, permit: Permit, owner: str) -> None:
        if self.full:
            raise TicketError("4096 permits are in use: none can be added")
        self.permits.append(permit)

    def revoke(self, permit: bytes) -> None:
        self.permits = [each for each in self.permits if each.permit != permit]


@dataclass
class Dials:
    """In place of dialling: who has proved its key where."""

    made: list[PeerId] = field(default_factory=list)

    async def prove(self, peer: PeerId, address: Address, is_allowed: Callable[[str], bool]) -> Address:
        if not is_allowed(address.host):
            raise Unreachable("it may not be dialled for others")
        self.made.append(peer)
        await trio.lowlevel.checkpoint()
        if peer in NOT_THERE:
            raise Unreachable("somebody else answers there")
        return address


def desk_of(
    dials: Dials | None = None, own: str = OWN, private: bool = False, **box: Any
) -> tuple[RelayDesk, Admitted]:
    relay = Admitted()
    messenger = MemoryExchange().join(PeerId("relay"))
    links = BoxLinkSettings(box=BoxFigures(**box), relay_private=private)
    prove = (dials or Dials()).prove
    desk = RelayDesk(cast(Relay, relay), links, messenger=messenger, where=MEMBERS.get, prove=prove, own=own)
    return desk, relay


def ask(desk: RelayDesk, target: str, asker: PeerId = PEER) -> Permit:
    async def main() -> messages.RelayOpened:
        return await desk.on_open(asker, Role.WORKER, messages.RelayOpen(target=target))

    return trio.run(main).permit


def test_a_permit_leads_to_a_member_and_within_the_boxs_bounds() -> None:
    desk, relay = desk_of(relay_gbps=0.8, relay_budget_bytes=12345)
    permit = ask(desk, TARGET)
    assert relay.permits == [permit]
    assert (permit.next_host, permit.next_port, permit.byte_budget) == ("192.0.2.5", 7005, 12345)
    assert permit.bytes_per_s == pytest.approx(1e8)
    assert 0 < permit.expires_at - time.monotonic() <= 3600
    other = ask(desk, TARGET)
    assert other.permit != permit.permit
    assert other.secret != permit.secret


def test_a_box_that_says_nothing_of_relaying_relays() -> None:
    desk, _ = desk_of()
    permit = ask(desk, TARGET)
    assert permit.byte_budget > 1 << 39
    assert permit.bytes_per_s > 1e11


@pytest.mark.parametrize(
    ("box", "target", "code"),
    [
        ({}, STRANGER, "unknown-target"),  # nobody makes this box dial wherever it is told
        ({}, "nowhere", "unknown-target"),
        ({}, "within", "unreachable-target"),  # a tunnel into the box
        ({}, "elsewhere", "unreachable-target"),  # or to somebody who has not asked for it
        ({"relay_gbps": 0.0}, TARGET, "no-relay"),
        ({"relay_budget_bytes": 0}, TARGET, "no-relay"),
    ],
)
def test_what_is_not_forwarded_gets_no_permit(box: dict[str, Any], target: str, code: str) -> None:
    desk, relay = desk_of(**box)
    with pytest.raises(RemoteError) as caught:
        ask(desk, target)
    assert caught.value.code == code
    assert relay.permits == []


def test_a_relay_that_is_full_says_so() -> None:
    desk, relay = desk_of()
    relay.full = True
    with pytest.raises(RemoteError) as caught:
        ask(desk, TARGET)
    assert caught.value.code == "busy"
    relay.full = False
    assert ask(desk, TARGET) in relay.permits


def test_the_box_s_owner_may_allow_private_addresses() -> None:
    desk, _ = desk_of(private=True)
    assert ask(desk, "within").next_host == "127.0.0.1"
    desk, _ = desk_of(own="127.0.0.1")
    assert ask(desk, "within").next_port == 22


def test_one_that_asks_4096_times_leaves_permits_to_others() -> None:
    dials = Dials()
    desk, relay = desk_of(dials)

    async def main() -> tuple[Permit, Permit]:
        async def permit(asker: str, target: str) -> Permit:
            return (await desk.on_open(PeerId(asker), Role.WORKER, messages.RelayOpen(target=target))).permit

        first = await permit("other", TARGET)
        for number in range(4096):
            await permit(PEER, f"target {number}")
        for _ in range(4096):
            await permit(PEER, TARGET)
        return first, await permit("third", "target 7")

    others = trio.run(main)
    assert len(relay.permits) <= WAN.permits_each + 3
    assert set(others) <= set(relay.permits)
    assert len(dials.made) == 4097, "what is known is not dialled again"


def test_permits_end_with_their_nodes() -> None:
    desk, relay = desk_of()
    ask(desk, TARGET, PeerId("gone"))
    ask(desk, "target 1")
    kept = ask(desk, TARGET)
    desk.keep({PEER, TARGET})
    assert relay.permits == [kept]
    desk.keep({PEER})
    assert relay.permits == []


def test_an_asker_has_one_address_dialled_at_a_time() -> None:
    dials = Dials()
    desk, relay = desk_of(dials)
    refused = []

    async def one(target: str) -> None:
        try:
            await desk.on_open(PEER, Role.WORKER, messages.RelayOpen(target=target))
        except RemoteError as error:
            refused.append(error.code)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, f"target {number}")

    trio.run(main)
    assert (refused, len(dials.made), len(relay.permits)) == (["busy"] * 49, 1, 1)


def test_hello_sizes_are_those_that_the_engine_reads() -> None:
    assert len(LINK_HELLO) == LINK_HELLO_BYTES <= 64
