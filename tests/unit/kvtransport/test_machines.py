"""The machines of a link, both ends over connections in virtual time: loss, resumption, credit, fairness, ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import KVProtocolError, TransferError
from p2pserve.kvtransport.link.receiving import MIN_WINDOW_BYTES, ReceiveMachine
from p2pserve.kvtransport.link.sending import FRAME_CHARGE, SendMachine
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.simulated import SimulatedLink, SimulatedWire
from p2pserve.kvtransport.link.transfers import FrameReady
from p2pserve.kvtransport.wire.channel import LinkRole
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.signals import Ack, Chunk, Credit, End, Result, frame_header

SMALL = LinkSettings(chunk_bytes=4096, silence_s=1.0, grace_s=2.0, ping_s=0.2, hedge_s=0.3)
WINDOW = 2 * MIN_WINDOW_BYTES


def frame(layer: int, payload: bytes) -> KVFrame:
    return KVFrame(layer, 0, 1, 0, 1, 0, 0, 64, payload)


def transfer(link: SimulatedLink, name: int, sizes: list[int], *, deadline: float = 60.0) -> bytes:
    """Open at both ends, push everything, finish."""
    key = bytes([name]) * 16
    link.receiver.expect(key, link.now + deadline, link.now)
    link.receiver.grant(key, WINDOW)
    link.sender.open(key, link.now + deadline, link.now)
    for layer, size in enumerate(sizes):
        link.sender.push(key, frame(layer, random.Random(layer).randbytes(size)), link.now, lambda: None)
    link.sender.finish(key, 1)
    return key


def states(link: SimulatedLink, key: bytes) -> tuple[str, str]:
    return tuple(str(link.ends.get((role, key), ["open"])[0]) for role in LinkRole)  # type: ignore[return-value]


def assert_intact(link: SimulatedLink, key: bytes, sizes: list[int]) -> None:
    found = {frame.layer: payload for frame, payload in link.arrived.get(key, [])}
    assert len(link.arrived.get(key, [])) == len(sizes), "a frame came twice or not at all"
    assert all(found[layer] == random.Random(layer).randbytes(size) for layer, size in enumerate(sizes))


def test_a_transfer_is_delivered_and_everything_is_released() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect()
    sizes = [1, 4096, 4097, 100_000]
    key = transfer(link, 1, sizes)
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")
    assert_intact(link, key, sizes)
    assert link.released == len(sizes)
    assert link.sender.bytes_held == 0
    link.check()


def test_a_transfer_without_frames_is_delivered() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect()
    key = transfer(link, 1, [])
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")


@pytest.mark.parametrize("when", ["before the credit was used up", "after that"])
def test_waiting_for_more_credit_is_counted_whenever_the_frame_came(when: str) -> None:
    link = SimulatedLink(settings=SMALL)
    link.consume = False
    link.connect()
    key = b"a" * 16
    link.receiver.expect(key, 60, 0)
    link.receiver.grant(key, MIN_WINDOW_BYTES)
    link.sender.open(key, 60, 0)
    sizes = [MIN_WINDOW_BYTES - FRAME_CHARGE, 10_000]
    first, second = (frame(layer, random.Random(layer).randbytes(size)) for layer, size in enumerate(sizes))
    link.sender.push(key, first, link.now)
    if when == "after that":
        link.run(1.0)
    link.sender.push(key, second, link.now)
    link.run(1.0)
    begun = link.sender.progress(key, link.now)
    assert begun is not None
    assert begun.bytes_acknowledged == sizes[0]
    link.run(1.0)
    later = link.sender.progress(key, link.now)
    assert later is not None
    assert later.blocked_s - begun.blocked_s == pytest.approx(1.0, abs=0.01)
    link.receiver.grant(key, 4 * MIN_WINDOW_BYTES)
    link.run(1.0)
    done = link.sender.progress(key, link.now)
    assert done is not None
    assert done.bytes_acknowledged == sum(sizes)
    assert done.blocked_s == pytest.approx(later.blocked_s, abs=0.1)


def test_nothing_is_sent_without_credit() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect()
    link.receiver.expect(b"a" * 16, 60, 0)
    link.sender.open(b"a" * 16, 60, 0)
    link.sender.push(b"a" * 16, frame(0, b"x" * 10_000), 0)
    link.run(1.0)
    progress = link.sender.progress(b"a" * 16, link.now)
    assert progress is not None
    assert progress.bytes_acknowledged == 0
    assert progress.blocked_s == 0, "blocked counts from when a connection asked for it"
    assert not link.arrived
    link.receiver.grant(b"a" * 16, WINDOW)
    link.run(1.0)
    assert len(link.arrived[b"a" * 16]) == 1


def test_what_is_not_consumed_holds_the_sender_back() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect(rate=1e8)
    link.consume = False
    sizes = [100_000] * 60
    key = transfer(link, 1, sizes)
    link.run(2.0)
    charged = sum(size + FRAME_CHARGE for size in sizes[: len(link.arrived[key])])
    assert WINDOW - 110_000 < charged <= WINDOW
    assert link.receiver.bytes_held <= WINDOW + 100_000, "the last frame may be there in part"
    for index in range(len(link.arrived[key])):
        link.receiver.consume(key, index)
    link.consume = True
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")
    assert_intact(link, key, sizes)


def credits_said(sizes: list[int], window: int, chunk_bytes: int) -> int:
    """How often the receiver tells its limit until all frames have arrived, each consumed as soon as it is whole."""
    key, now, said = bytes(16), 0.0, 0
    machine_settings = LinkSettings(chunk_bytes=chunk_bytes)
    sender, receiver = SendMachine(machine_settings, 60.0, now), ReceiveMachine(machine_settings, 60.0, now)
    there, here = sender.add_connection("", now), receiver.add_connection("", now)
    receiver.expect(key, 60.0, now)
    receiver.grant(key, window)
    sender.open(key, 60.0, now)
    for size in sizes:
        sender.push(key, frame(0, bytes(size)), now)
    moving = True
    while moving:
        moving = False
        while (signal := receiver.next_signal(here, now)) is not None:
            said += isinstance(signal, Credit)
            sender.receive(there, signal, now)
            moving = True
        while (signal := sender.next_signal(there, now)) is not None:
            moving = True
            if isinstance(signal, Chunk):
                placement = receiver.place_chunk(here, signal, now)
                assert placement is not None
                receiver.finish_chunk(here, placement, now)
            else:
                receiver.receive(here, signal, now)
            for event in receiver.take_events():
                assert isinstance(event, FrameReady)
                receiver.consume(key, event.frame)
    progress = receiver.progress(key)
    assert progress is not None
    assert progress.frames == len(sizes), "the sender starves"
    return said


def test_credit_is_told_by_eighths_of_the_window() -> None:
    window = 32 << 20
    assert credits_said([256 << 10] * 512, window, 1 << 18) <= 2 + (128 << 20) // (window // 8)


@given(
    st.lists(st.integers(1, 2 * MIN_WINDOW_BYTES), min_size=1, max_size=12),
    st.integers(MIN_WINDOW_BYTES, 3 * MIN_WINDOW_BYTES),
    st.sampled_from([1 << 18, 1 << 20]),
)
@settings(max_examples=30, deadline=None)
def test_a_sender_never_starves_for_a_limit_that_is_kept_back(sizes: list[int], window: int, chunk_bytes: int) -> None:
    credits_said(sizes, window, chunk_bytes)


def test_a_frame_larger_than_the_window_still_arrives() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect(rate=1e9)
    sizes = [3 * WINDOW, 10, 3 * WINDOW]
    key = transfer(link, 1, sizes)
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")
    assert_intact(link, key, sizes)


def test_work_is_shared_in_proportion_to_what_connections_carry() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect("direct", rate=3e6)
    link.connect("relay", rate=1e6)
    key = transfer(link, 1, [500_000] * 4)
    link.run_until_ended(1)
    progress = link.sender.progress(key, link.now)
    assert progress is not None
    assert 2.5 < progress.bytes_by_path["direct"] / progress.bytes_by_path["relay"] < 3.5
    assert link.now < 1.2 * 2e6 / 4e6


def test_chunks_of_a_dead_connection_go_to_the_others() -> None:
    link = SimulatedLink(settings=SMALL)
    wires = [link.connect() for _ in range(3)]
    sizes = [200_000] * 5
    key = transfer(link, 1, sizes)
    link.run(0.02)
    link.kill(wires[0])
    link.run(0.02)
    link.kill(wires[1])
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")
    assert_intact(link, key, sizes)
    assert link.sender.bytes_resent > 0
    link.check()


def test_a_transfer_outlives_all_its_connections_within_the_grace() -> None:
    link = SimulatedLink(settings=SMALL)
    wire = link.connect()
    sizes = [200_000] * 2
    key = transfer(link, 1, sizes)
    link.run(0.01)
    link.kill(wire)
    link.run(SMALL.grace_s * 0.9)
    assert states(link, key) == ("open", "open")
    link.connect()
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")


def test_without_a_connection_for_the_grace_a_transfer_fails() -> None:
    link = SimulatedLink(settings=SMALL)
    wire = link.connect()
    key = transfer(link, 1, [200_000])
    link.run(0.01)
    link.kill(wire)
    link.run(SMALL.grace_s + 0.5)
    assert states(link, key) == ("failed(no connection for 2 s)",) * 2
    assert link.sender.bytes_held == 0
    link.check()


def test_a_stalled_connection_is_overtaken_and_buried() -> None:
    link = SimulatedLink(settings=SMALL)
    stuck, _ = link.connect(), link.connect()
    key = transfer(link, 1, [400_000])
    link.run(0.010)
    stuck.stalled = True
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")
    assert link.now < SMALL.silence_s, "an idle connection takes over what another has had for too long"
    assert link.sender.bytes_resent > 0
    link.run(1.5)
    assert stuck not in link.wires


def test_retired_connections_give_their_chunks_back() -> None:
    link = SimulatedLink(settings=SMALL)
    slow = link.connect("direct", rate=1e4)
    key = transfer(link, 1, [100_000])
    link.run(0.05)
    link.connect("relay", rate=1e7)
    link.sender.retire(slow.numbers[LinkRole.SENDER], "its path is no longer used", link.now)
    link.run_until_ended(1)
    assert states(link, key) == ("delivered", "delivered")
    progress = link.sender.progress(key, link.now)
    assert progress is not None
    assert progress.bytes_by_path["relay"] > 90_000
    assert link.now < 0.5


@pytest.mark.parametrize("side", list(LinkRole))
def test_an_abort_reaches_the_other_side_with_its_reason(side: LinkRole) -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect(rate=1e6)
    key = transfer(link, 1, [500_000])
    link.run(0.05)
    link.machine(side).abort(key, "the client went away")
    link.run(0.1)
    here, there = link.ends[side, key], link.ends[LinkRole(1 - side), key]
    assert [str(state) for state in here] == ["failed(the client went away)"]
    assert [str(state) for state in there] == ["failed(the other side gave up: the client went away)"]
    assert link.sender.bytes_held == 0
    link.run(2)
    link.check()


def test_an_abort_before_the_other_side_knows_the_transfer() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect()
    link.sender.open(b"a" * 16, 60, 0)
    link.sender.abort(b"a" * 16, "never mind")
    link.receiver.expect(b"b" * 16, 60, 0)
    link.receiver.abort(b"b" * 16, "no blocks")
    link.run(0.1)
    link.receiver.expect(b"a" * 16, 60, link.now)
    link.sender.open(b"b" * 16, 60, link.now)
    link.settle()
    assert str(link.ends[LinkRole.RECEIVER, b"a" * 16][0]) == "failed(the other side gave up: never mind)"
    assert str(link.ends[LinkRole.SENDER, b"b" * 16][0]) == "failed(the other side gave up: no blocks)"


@pytest.mark.parametrize("late", list(LinkRole))
def test_the_deadline_of_either_side_ends_both(late: LinkRole) -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect(rate=1e5)
    key = b"d" * 16
    link.receiver.expect(key, 0.5 if late is LinkRole.RECEIVER else 60, 0)
    link.receiver.grant(key, WINDOW)
    link.sender.open(key, 0.5 if late is LinkRole.SENDER else 60, 0)
    link.sender.push(key, frame(0, bytes(1_000_000)), 0)
    link.run(0.7)
    assert str(link.ends[late, key][0]) == "failed(the deadline of the ticket has passed)"
    assert str(link.ends[LinkRole(1 - late), key][0]).startswith("failed(the other side gave up: the deadline")


def test_32_transfers_share_fairly() -> None:
    link = SimulatedLink(settings=SMALL)
    for _ in range(4):
        link.connect(rate=2e6)
    # Large frames, small frames and everything between: shares are of bytes.
    keys = [transfer(link, n + 1, [400_000 // (n % 4 * 20 + 1)] * (n % 4 * 20 + 1)) for n in range(32)]
    link.run(0.5)
    views = [link.sender.progress(key, link.now) for key in keys]
    done = [view.bytes_acknowledged for view in views if view is not None]
    assert sum(done) > 0.8 * 0.5 * 8e6
    assert max(done) - min(done) <= 4 * SMALL.chunk_bytes + 24_000
    link.run_until_ended(32)
    assert all(states(link, key) == ("delivered", "delivered") for key in keys)


def test_one_that_comes_late_is_served_on_its_first_turn() -> None:
    sender = SendMachine(SMALL, 60.0, 0.0)
    connection = sender.add_connection("", 0.0)

    def open_transfer(key: bytes, size: int) -> None:
        sender.open(key, 60.0, 0.0)
        sender.receive(connection, Credit(key, WINDOW, 0), 0.0)
        sender.push(key, frame(0, bytes(size)), 0.0)

    def turns(count: int) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < count:
            signal = sender.next_signal(connection, 0.0)
            assert signal is not None
            if isinstance(signal, Chunk):
                found.append(signal.transfer)
        return found

    early, late, short = [bytes([n]) * 16 for n in range(8)], b"l" * 16, b"s" * 16
    for key in early:
        open_transfer(key, 100 * SMALL.chunk_bytes)
    turns(20)  # some way into a round
    open_transfer(late, 100 * SMALL.chunk_bytes)
    open_transfer(short, 10)
    first, second = turns(10), turns(9)
    assert set(first) == {*early, late, short}, "each has one chunk of the first ten"
    assert set(second) == {*early, late}


def test_a_transfer_that_cannot_send_does_not_hold_up_the_others() -> None:
    link = SimulatedLink(settings=SMALL)
    link.connect()
    link.receiver.expect(b"a" * 16, 60, 0)
    link.sender.open(b"a" * 16, 60, 0)
    link.sender.push(b"a" * 16, frame(0, bytes(100_000)), 0)
    key = transfer(link, 2, [100_000])
    link.run(0.2)
    assert states(link, key) == ("delivered", "delivered")


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
