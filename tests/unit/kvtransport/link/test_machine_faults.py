"""What ends links and transfers before their time: violations, damage, leases, and any schedule of mishaps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import KVProtocolError, TransferError
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.wire.channel import LinkRole
from p2pserve.kvtransport.wire.signals import Ack, Chunk, Credit, End, Result, frame_header

from .simulated import SimulatedLink, SimulatedWire
from .transfers import SMALL, WINDOW, assert_intact, frame, states, transfer


def test_closing_a_link_fails_what_is_open_at_both_ends() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect(rate=1e5)
    key = transfer(link, 1, [500_000])
    link.run(0.1)
    link.sender.close("the engine stops")
    link.run(0.2)
    assert states(link, key) == (
        "failed(the engine stops)",
        "failed(the other side closed the link: the engine stops)",
    )
    with pytest.raises(TransferError, match="the engine stops"):
        link.sender.open(b"n" * 16, 60, link.now)


def test_an_unused_link_ends_with_its_lease() -> None:
    link = SimulatedLink(settings=SMALL, lease_s=3.0)
    link.connect()
    link.run(2.0)
    key = transfer(link, 1, [10])
    link.run(2.9)
    assert states(link, key) == ("delivered", "delivered")
    assert link.sender.ended is None
    link.run(0.3)
    assert "lease" in str(link.sender.ended)


def test_an_idle_link_stays_alive_and_knows_its_round_trip() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect(delay=0.05)
    link.run(5.0)
    assert len(link.wires) == 1
    rtt = link.sender.path_statistics(link.now)["direct"].rtt_s
    assert rtt is not None
    assert 0.1 <= rtt < 0.11


def violations() -> list[tuple[LinkRole, list[object]]]:
    """What a peer may not say, though it holds the keys: who is told, and the signals."""
    key, other = b"k" * 16, b"o" * 16
    header = frame_header(frame(0, b"x"))
    bad = b"\xff" * 18
    return [
        (LinkRole.RECEIVER, [Chunk(other, 0, 0, 10, 12, header, 10)]),
        (LinkRole.RECEIVER, [Chunk(key, 0, 0, 10, 12, bad, 10)]),
        (LinkRole.RECEIVER, [Chunk(key, 0, 0, 5000, 12, header, 4096), Chunk(key, 0, 4096, 5001, 12, header, 905)]),
        (LinkRole.RECEIVER, [Chunk(key, 1 << 20, 0, 10, 12, header, 10)]),
        (LinkRole.RECEIVER, [Chunk(key, n, 0, 8_000_000, 12, header, 4096) for n in range(4)]),
        (LinkRole.RECEIVER, [End(key, 1, 2), End(key, 1, 3)]),
        (LinkRole.RECEIVER, [End(key, 1, 1), Chunk(key, 1, 0, 10, 12, header, 10)]),
        (LinkRole.RECEIVER, [Chunk(key, 5, 0, 10, 12, header, 10), End(key, 1, 1)]),
        (LinkRole.RECEIVER, [End(other, 1, 1)]),
        (LinkRole.RECEIVER, [Credit(key, 5, 0)]),
        (LinkRole.RECEIVER, [Ack(1000, 0)]),
        (LinkRole.SENDER, [Result(key, True, "")]),
        (LinkRole.SENDER, [Ack(1000, 0)]),
        (LinkRole.SENDER, [End(key, 1, 1)]),
    ]


@pytest.mark.parametrize(("victim", "signals"), violations())
def test_a_peer_that_breaks_the_rules_ends_the_link(victim: LinkRole, signals: list[Chunk | End | Ack]) -> None:
    link = SimulatedLink(settings=SMALL)
    wire = link.connect()
    link.receiver.expect(b"k" * 16, 60, 0)
    link.receiver.grant(b"k" * 16, WINDOW)
    link.sender.open(b"k" * 16, 60, 0)
    link.run(0.02)
    lie(link, wire, LinkRole(1 - victim), signals)
    link.run(0.02)
    assert "protocol violation" in str(link.machine(victim).ended)
    assert str(link.ends[victim, b"k" * 16][0]).startswith("failed(protocol violation")
    link.check()


def lie(link: SimulatedLink, wire: SimulatedWire, role: LinkRole, signals: list[Chunk | End | Ack]) -> None:
    """Signals that the machine of `role` never said, validly sealed."""
    for signal in signals:
        payload = memoryview(bytes(signal.length)) if isinstance(signal, Chunk) else None
        wire.flying[role].append((0.0, bytes(wire.channels[role].seal(signal, payload))))


def test_damaged_bytes_cost_the_connection_and_not_the_link() -> None:
    link = SimulatedLink(settings=SMALL)
    wires = [link.connect(), link.connect()]
    sizes = [100_000] * 3
    key = transfer(link, 1, sizes)
    link.run(0.01)
    at, data = wires[0].flying[LinkRole.SENDER][0]
    wires[0].flying[LinkRole.SENDER][0] = (at, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    link.run_until_ended(1)
    assert wires[0] not in link.wires
    assert states(link, key) == ("delivered", "delivered")
    assert_intact(link, key, sizes)


def test_calls_that_cannot_be_meant() -> None:
    link = SimulatedLink(settings=SMALL)
    link.sender.open(b"a" * 16, 60, 0)
    with pytest.raises(KVProtocolError, match="used before"):
        link.sender.open(b"a" * 16, 60, 0)
    link.receiver.expect(b"a" * 16, 60, 0)
    with pytest.raises(KVProtocolError, match="used before"):
        link.receiver.expect(b"a" * 16, 60, 0)
    with pytest.raises(ValueError, match="window of 10 bytes"):
        link.receiver.grant(b"a" * 16, 10)
    with pytest.raises(KVProtocolError, match="waiting cannot be acknowledged"):
        link.receiver.acknowledge(b"a" * 16)
    link.sender.finish(b"a" * 16, 1)
    with pytest.raises(KVProtocolError, match="after the end"):
        link.sender.push(b"a" * 16, frame(0, b"x"), 0)
    with pytest.raises(ValueError, match="chunk_bytes"):
        LinkSettings(chunk_bytes=5000)
    with pytest.raises(ValueError, match="silence_s"):
        LinkSettings(silence_s=0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    wires=st.integers(1, 5),
    sizes=st.lists(st.lists(st.integers(1, 60_000), max_size=6), min_size=1, max_size=5),
    mishaps=st.lists(st.sampled_from(["kill", "stall", "flip", "abort", "connect"]), max_size=8),
)
def test_any_schedule_ends_every_transfer_once(
    seed: int, wires: int, sizes: list[list[int]], mishaps: list[str]
) -> None:
    """Whatever happens to connections: each end of each transfer settles once, frames arrive unharmed and once, and
    nothing is delivered at the sender that is not at the receiver."""
    link = SimulatedLink(seed, SMALL)
    chance = link.random
    for _ in range(wires):
        link.connect(rate=chance.choice([1e5, 1e6, 1e7]), delay=chance.choice([0.0, 0.002, 0.05]))
    keys = [transfer(link, n + 1, each, deadline=5.0) for n, each in enumerate(sizes)]
    aborted = False
    for mishap in mishaps:
        link.run(chance.uniform(0.001, 0.1))
        wire = chance.choice(link.wires) if link.wires else None
        if mishap == "connect" or wire is None:
            link.connect(rate=1e6)
        elif mishap == "kill":
            link.kill(wire)
        elif mishap == "stall":
            wire.stalled = True
        elif mishap == "flip" and wire.flying[LinkRole.SENDER]:
            at, data = wire.flying[LinkRole.SENDER].pop()
            wire.flying[LinkRole.SENDER].append((at, bytes([data[0] ^ 128]) + data[1:]))
        elif mishap == "abort":
            link.machine(chance.choice(list(LinkRole))).abort(chance.choice(keys), "enough")
            aborted = True
    link.connect(rate=1e7)
    link.run_until_ended(len(keys), limit_s=10.0)
    link.check()
    assert len(link.ends) == 2 * len(keys)
    for key, each in zip(keys, sizes, strict=True):
        if "delivered" in states(link, key):
            assert_intact(link, key, each)
        elif not aborted:
            assert "deadline" in states(link, key)[0] + states(link, key)[1]
    assert link.sender.bytes_held == 0
