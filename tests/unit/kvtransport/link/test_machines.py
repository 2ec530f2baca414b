"""The machines of a link, both ends over connections in virtual time: loss, resumption, credit, fairness, ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.link.receiving import MIN_WINDOW_BYTES, ReceiveMachine
from p2pserve.kvtransport.link.sending import FRAME_CHARGE, SendMachine
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.transfers import FrameReady
from p2pserve.kvtransport.wire.channel import LinkRole
from p2pserve.kvtransport.wire.signals import Chunk, Credit

from .simulated import SimulatedLink
from .transfers import SMALL, WINDOW, assert_intact, frame, states, transfer


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
