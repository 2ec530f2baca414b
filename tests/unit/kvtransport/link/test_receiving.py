"""The receiving end of a link by itself: what it accepts, what it refuses, and what it tells the sender."""

from __future__ import annotations

import pytest

from p2pserve.kvtransport.errors import KVProtocolError, TransferError
from p2pserve.kvtransport.link.receiving import MIN_WINDOW_BYTES, ReceiveMachine, ReceiveProgress
from p2pserve.kvtransport.link.sending import FRAME_CHARGE, MAX_FRAMES_AHEAD
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.transfers import EndState, FrameReady, TransferComplete, TransferEnded
from p2pserve.kvtransport.wire.frames import MAX_PAYLOAD_BYTES, KVFrame
from p2pserve.kvtransport.wire.signals import Abort, Ack, Chunk, Credit, End, Result, Signal, frame_header

SETTINGS = LinkSettings(ping_s=1000.0, hedge_s=2.0, silence_s=500.0)
A, B = b"a" * 16, b"b" * 16
GRID = 12
STEP = 1 << GRID
HEADER = frame_header(KVFrame(0, 0, 1, 0, 1, 0, 0, 64, b"x"))
MIB = 1 << 20


def chunk(frame: int = 0, offset: int = 0, total: int = 100, *, key: bytes = A, grid: int = GRID) -> Chunk:
    return Chunk(key, frame, offset, total, grid, HEADER, min(1 << grid, total - offset))


class Receiver:
    """A machine with connections, and what it reported."""

    def __init__(self, connections: int = 1) -> None:
        self.machine = ReceiveMachine(SETTINGS, 1e6, 0.0)
        self.numbers = [self.machine.add_connection(f"path-{n}", 0.0) for n in range(connections)]
        self.ready: list[FrameReady] = []
        self.complete: list[TransferComplete] = []
        self.ended: list[TransferEnded] = []

    def expect(self, key: bytes = A, window: int = MIN_WINDOW_BYTES, first: int = 0) -> None:
        self.machine.expect(key, 1e5, 0.0)
        if window:
            self.machine.grant(key, window, first)
            self.say_all()

    def take(self, signal: Chunk, at: int = 0, now: float = 0.0, fill: int = 7) -> bool:
        """Decrypt a chunk where it belongs. False if it has no place."""
        placement = self.machine.place_chunk(self.numbers[at], signal, now)
        if placement is None:
            self.machine.skip_chunk(self.numbers[at])
            return False
        placement.into[:] = bytes([fill]) * len(placement.into)
        self.machine.finish_chunk(self.numbers[at], placement, now)
        self.collect()
        return True

    def receive(self, signal: Signal, at: int = 0) -> None:
        self.machine.receive(self.numbers[at], signal, 0.0)
        self.collect()

    def collect(self) -> None:
        for event in self.machine.take_events():
            match event:
                case FrameReady():
                    self.ready.append(event)
                case TransferComplete():
                    self.complete.append(event)
                case TransferEnded():
                    self.ended.append(event)
                case _:
                    raise AssertionError(f"{event} does not come from a receiver")

    def say_all(self, at: int = 0, now: float = 0.0) -> list[Signal]:
        """All but confirmations."""
        found: list[Signal] = []
        while (signal := self.machine.next_signal(self.numbers[at], now)) is not None:
            if not isinstance(signal, Ack):
                found.append(signal)
        return found

    def progress(self, key: bytes = A) -> ReceiveProgress:
        found = self.machine.progress(key)
        assert found is not None
        return found


class TestGrants:
    def test_the_first_credit_is_the_window(self) -> None:
        receiver = Receiver()
        receiver.machine.expect(A, 1e5, 0.0)
        assert receiver.say_all() == []
        receiver.machine.grant(A, 3 * MIB, first=40)
        assert receiver.say_all() == [Credit(A, 3 * MIB, 40)]

    def test_it_may_be_raised_and_not_lowered_and_the_first_position_stays(self) -> None:
        receiver = Receiver()
        receiver.expect(window=4 * MIB, first=40)
        receiver.machine.grant(A, 2 * MIB, first=80)
        assert receiver.say_all() == []
        receiver.machine.grant(A, 8 * MIB, first=90)
        assert receiver.say_all() == [Credit(A, 8 * MIB, 40)]

    def test_a_window_holds_a_chunk_at_least(self) -> None:
        assert MIN_WINDOW_BYTES == MIB + FRAME_CHARGE
        receiver = Receiver()
        receiver.machine.expect(A, 1e5, 0.0)
        receiver.machine.grant(A, MIN_WINDOW_BYTES)
        with pytest.raises(ValueError, match=f"a window of {MIN_WINDOW_BYTES - 1} bytes"):
            receiver.machine.grant(A, MIN_WINDOW_BYTES - 1)

    def test_nothing_is_granted_to_what_has_ended(self) -> None:
        receiver = Receiver()
        receiver.expect(window=0)
        receiver.machine.abort(A, "no blocks")
        receiver.machine.grant(A, MIB * 2)
        assert receiver.say_all() == [Result(A, False, "no blocks")]

    def test_the_limit_is_told_by_eighths_of_the_window(self) -> None:
        window = 64 * MIB
        receiver = Receiver()
        receiver.expect(window=window)
        for number in range(9):
            assert receiver.take(chunk(number, total=MIB - FRAME_CHARGE, grid=20))
        for number in range(7):
            receiver.machine.consume(A, number)
        assert receiver.say_all() == [], "seven of sixty-four: less than an eighth"
        receiver.machine.consume(A, 7)
        assert receiver.say_all() == [Credit(A, window + 8 * MIB, 0)]

    def test_a_sender_that_could_starve_is_told_at_once(self) -> None:
        receiver = Receiver()
        receiver.expect(window=2 * MIN_WINDOW_BYTES)
        assert receiver.take(chunk(0, total=MIB, grid=20))
        assert receiver.take(chunk(1, total=50))
        receiver.machine.consume(A, 1)
        assert receiver.say_all() == [], "what waits here will tell it later"
        receiver.machine.consume(A, 0)
        charges = MIB + FRAME_CHARGE + 50 + FRAME_CHARGE
        assert receiver.say_all() == [Credit(A, 2 * MIN_WINDOW_BYTES + charges, 0)]

    @pytest.mark.parametrize(("charge", "told"), [(7.5 * MIB, False), (8 * MIB - 1, False), (8 * MIB, True)])
    def test_an_eighth_is_told_to_the_byte(self, charge: float, told: bool) -> None:
        receiver = Receiver()
        receiver.expect(window=64 * MIB)
        total = int(charge) - FRAME_CHARGE
        for offset in range(0, total, MIB):
            assert receiver.take(chunk(0, offset, total, grid=20))
        receiver.machine.consume(A, 0)
        assert bool(receiver.say_all()) is told

    @pytest.mark.parametrize(("size", "told"), [(976, False), (977, True)])
    def test_a_sender_that_has_left_what_its_next_chunk_needs_does_not_starve(self, size: int, told: bool) -> None:
        receiver = Receiver()
        receiver.expect(window=MIN_WINDOW_BYTES + 976 + FRAME_CHARGE)
        receiver.take(chunk(0, total=size))
        receiver.machine.consume(A, 0)
        assert bool(receiver.say_all()) is told

    def test_a_frame_larger_than_the_window_widens_it(self) -> None:
        receiver = Receiver()
        receiver.expect()
        total = 3 * MIB
        assert receiver.take(chunk(total=total, grid=20))
        assert receiver.say_all() == [Credit(A, total + FRAME_CHARGE, 0)]

    def test_a_lost_credit_is_said_again_as_it_is_by_then(self) -> None:
        receiver = Receiver(2)
        receiver.machine.expect(A, 1e5, 0.0)
        receiver.machine.grant(A, 2 * MIB)
        assert receiver.say_all(0) == [Credit(A, 2 * MIB, 0)]
        receiver.machine.grant(A, 4 * MIB)
        receiver.machine.remove_connection(receiver.numbers[0], 0.0)
        assert receiver.say_all(1) == [Credit(A, 4 * MIB, 0)]

    def test_no_credit_is_said_of_what_has_ended(self) -> None:
        receiver = Receiver()
        receiver.machine.expect(A, 1e5, 0.0)
        receiver.machine.grant(A, 2 * MIB)
        receiver.machine.abort(A, "enough")
        assert receiver.say_all() == [Result(A, False, "enough")]


class TestFrames:
    def test_chunks_come_to_lie_where_they_belong(self) -> None:
        receiver = Receiver()
        receiver.expect()
        total = 2 * STEP + 10
        for offset, fill in ((2 * STEP, 3), (0, 1), (STEP, 2)):
            assert receiver.ready == []
            assert receiver.take(chunk(0, offset, total), fill=fill)
        (ready,) = receiver.ready
        assert bytes(ready.payload) == b"\1" * STEP + b"\2" * STEP + b"\3" * 10
        assert (ready.transfer, ready.frame, ready.header) == (A, 0, HEADER)

    def test_what_has_come_is_counted(self) -> None:
        receiver = Receiver(2)
        receiver.expect()
        receiver.take(chunk(0, 0, STEP + 5), at=0, now=3.0)
        receiver.take(chunk(0, STEP, STEP + 5), at=1, now=4.0)
        receiver.take(chunk(1, 0, 100), at=1, now=5.0)
        progress = receiver.progress()
        assert (progress.frames, progress.bytes_received, progress.bytes_repeated) == (2, STEP + 105, 0)
        assert progress.bytes_by_path == {"path-0": STEP, "path-1": 105}
        assert (progress.first_byte_at, progress.last_byte_at) == (3.0, 5.0)
        assert receiver.machine.bytes_held == STEP + 105
        receiver.machine.consume(A, 0)
        assert receiver.machine.bytes_held == 100

    def test_a_chunk_that_comes_twice_is_skipped_and_counted(self) -> None:
        receiver = Receiver()
        receiver.expect()
        assert receiver.take(chunk(0, 0, 2 * STEP))
        assert not receiver.take(chunk(0, 0, 2 * STEP))
        assert receiver.progress().bytes_repeated == STEP
        assert receiver.take(chunk(0, STEP, 2 * STEP))
        assert not receiver.take(chunk(0, STEP, 2 * STEP))
        assert receiver.progress().bytes_repeated == 2 * STEP
        assert len(receiver.ready) == 1

    def test_a_frame_that_was_consumed_does_not_come_back(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.take(chunk(1))
        receiver.machine.consume(A, 1)
        assert not receiver.take(chunk(1)), "it came before frame 0 did"
        receiver.take(chunk(0))
        assert not receiver.take(chunk(0))
        assert not receiver.take(chunk(1))
        assert len(receiver.ready) == 2

    def test_consuming_twice_or_what_never_came_is_harmless(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.take(chunk(0))
        assert receiver.machine.consume(A, 0) is not None
        assert receiver.machine.consume(A, 0) is None
        assert receiver.machine.consume(A, 9) is None
        assert receiver.machine.consume(B, 0) is None

    def test_a_chunk_that_does_not_open_may_come_again(self) -> None:
        receiver = Receiver()
        receiver.expect()
        placement = receiver.machine.place_chunk(receiver.numbers[0], chunk(0), 0.0)
        assert placement is not None
        receiver.machine.reject_chunk(placement)
        assert receiver.take(chunk(0))
        assert len(receiver.ready) == 1

    def test_one_that_does_not_open_after_its_copy_was_skipped_ends_the_transfer(self) -> None:
        receiver = Receiver(2)
        receiver.expect()
        placement = receiver.machine.place_chunk(receiver.numbers[0], chunk(0), 0.0)
        assert placement is not None
        assert not receiver.take(chunk(0), at=1), "its place is taken"
        receiver.machine.reject_chunk(placement)
        receiver.collect()
        assert [str(each.state) for each in receiver.ended] == ["failed(frame 0 was damaged in flight, twice)"]

    def test_a_copy_of_what_has_opened_does_no_harm(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.take(chunk(0, 0, 2 * STEP))
        assert not receiver.take(chunk(0, 0, 2 * STEP))
        placement = receiver.machine.place_chunk(receiver.numbers[0], chunk(0, STEP, 2 * STEP), 0.0)
        assert placement is not None
        receiver.machine.reject_chunk(placement)
        receiver.collect()
        assert receiver.ended == []

    def test_chunks_of_what_has_ended_are_skipped_and_confirmed(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.machine.abort(A, "enough")
        assert not receiver.take(chunk(0))
        receiver.machine.forget(A)
        assert not receiver.take(chunk(1))
        assert receiver.machine.next_signal(receiver.numbers[0], 0.0) == Ack(2, 0)

    def test_nothing_is_placed_for_a_connection_that_is_gone_but_what_it_brought_counts(self) -> None:
        receiver = Receiver()
        receiver.expect()
        placement = receiver.machine.place_chunk(receiver.numbers[0], chunk(0), 0.0)
        assert placement is not None
        receiver.machine.remove_connection(receiver.numbers[0], 0.0)
        assert receiver.machine.place_chunk(receiver.numbers[0], chunk(1), 0.0) is None
        receiver.machine.finish_chunk(receiver.numbers[0], placement, 0.0)
        receiver.machine.skip_chunk(receiver.numbers[0])
        receiver.collect()
        assert [event.frame for event in receiver.ready] == [0]
        assert receiver.progress().bytes_by_path == {"": 100}

    def test_nothing_is_placed_once_the_link_is_over(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.machine.close("bye")
        assert receiver.machine.place_chunk(receiver.numbers[0], chunk(0), 0.0) is None
        with pytest.raises(TransferError, match="bye"):
            receiver.machine.expect(B, 1e5, 0.0)


class TestLimits:
    def refused(self, receiver: Receiver, signal: Chunk, match: str) -> None:
        with pytest.raises(KVProtocolError, match=match):
            receiver.machine.place_chunk(receiver.numbers[0], signal, 0.0)

    def test_chunks_of_nobody_and_without_credit(self) -> None:
        receiver = Receiver()
        self.refused(receiver, chunk(), "no credit")
        receiver.expect(window=0)
        self.refused(receiver, chunk(), "overruns the credit of 0 bytes")

    def test_the_last_frame_may_reach_beyond_the_limit_by_a_frame(self) -> None:
        receiver = Receiver()
        receiver.expect(window=MIN_WINDOW_BYTES)
        assert receiver.take(chunk(0, total=MIB, grid=20)), "the limit is used up"
        assert receiver.take(chunk(1, total=MAX_PAYLOAD_BYTES, grid=20)), "its rest waits for more credit"
        self.refused(receiver, chunk(2, total=1), "frame 2 overruns the credit")
        receiver.machine.check_integrity()

    def test_a_limit_that_was_not_told_counts_for_nothing(self) -> None:
        receiver = Receiver()
        receiver.expect(window=MIN_WINDOW_BYTES)
        receiver.take(chunk(0, total=MIB, grid=20))
        receiver.take(chunk(1, total=MAX_PAYLOAD_BYTES, grid=20))
        receiver.machine.consume(A, 0)
        self.refused(receiver, chunk(2, total=1), "overruns")
        receiver.say_all()
        assert receiver.take(chunk(2, total=1))

    def test_frames_may_be_so_far_ahead(self) -> None:
        receiver = Receiver()
        receiver.expect(window=64 * MIB)
        assert receiver.take(chunk(MAX_FRAMES_AHEAD - 1))
        self.refused(receiver, chunk(MAX_FRAMES_AHEAD), "while frame 0 has not arrived")
        receiver.take(chunk(0))
        assert receiver.take(chunk(MAX_FRAMES_AHEAD))

    @pytest.mark.parametrize(
        "changed", [{"total": 101}, {"grid": 13}, {"header": bytes([1]) + HEADER[1:]}], ids=["total", "grid", "header"]
    )
    def test_a_frame_is_described_in_one_way(self, changed: dict[str, object]) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.machine.place_chunk(receiver.numbers[0], chunk(0), 0.0)
        self.refused(receiver, Chunk(**{**chunk(0)._asdict(), **changed}), "described twice")

    def test_nothing_comes_after_the_last_frame(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.receive(End(A, 1, 2))
        assert receiver.take(chunk(1))
        self.refused(receiver, chunk(2), "frame 2 of a transfer of 2")


class TestEnds:
    def test_complete_when_the_end_and_every_frame_have_come(self) -> None:
        for end_first in (True, False):
            receiver = Receiver()
            receiver.expect()
            if end_first:
                receiver.receive(End(A, 9, 2))
            receiver.take(chunk(1))
            assert receiver.complete == []
            receiver.take(chunk(0))
            if not end_first:
                receiver.receive(End(A, 9, 2))
            receiver.receive(End(A, 9, 2))
            assert receiver.complete == [TransferComplete(A, 9, 2)], "once"

    @pytest.mark.parametrize("frames", [0, 1])
    def test_an_end_before_what_has_come_already(self, frames: int) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.take(chunk(0, 0, 2 * STEP) if frames == 0 else chunk(1))
        with pytest.raises(KVProtocolError, match=f"the end of {frames} frames after frame {frames}"):
            receiver.receive(End(A, 1, frames))

    def test_an_end_before_what_is_whole_already(self) -> None:
        receiver = Receiver()
        receiver.expect()
        for number in range(2):
            receiver.take(chunk(number))
        with pytest.raises(KVProtocolError, match="the end of 1 frames after frame 1"):
            receiver.receive(End(A, 1, 1))

    def test_two_ends_must_agree(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.receive(End(A, 1, 2))
        with pytest.raises(KVProtocolError, match="ends twice"):
            receiver.receive(End(A, 2, 2))

    def test_the_end_of_nobody_and_of_what_is_over(self) -> None:
        receiver = Receiver()
        with pytest.raises(KVProtocolError, match="no credit"):
            receiver.receive(End(A, 1, 0))
        receiver.expect(B)
        receiver.machine.abort(B, "enough")
        receiver.machine.forget(B)
        receiver.receive(End(B, 1, 0))
        assert len(receiver.ended) == 1

    def test_an_end_without_any_grant_is_refused(self) -> None:
        receiver = Receiver()
        receiver.expect(window=0)
        with pytest.raises(KVProtocolError, match="waiting cannot be completed"):
            receiver.receive(End(A, 1, 0))

    def test_only_what_is_complete_is_acknowledged(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.receive(End(A, 1, 1))
        with pytest.raises(KVProtocolError, match="moving cannot be acknowledged"):
            receiver.machine.acknowledge(A)
        receiver.take(chunk(0))
        receiver.machine.acknowledge(A)
        receiver.collect()
        assert receiver.ended == [TransferEnded(A, EndState("delivered"))]
        assert Result(A, True, "") in receiver.say_all()
        receiver.machine.acknowledge(A)
        receiver.machine.abort(A, "too late")
        receiver.collect()
        assert len(receiver.ended) == 1

    def test_what_waits_outlives_the_end(self) -> None:
        receiver = Receiver()
        receiver.expect()
        receiver.take(chunk(0))
        receiver.machine.place_chunk(receiver.numbers[0], chunk(1, 0, 5000), 0.0)
        receiver.machine.abort(A, "enough")
        assert receiver.machine.bytes_held == 100, "what is half there is given up, what is whole may be in use"
        assert receiver.machine.consume(A, 0) is not None
        assert receiver.machine.bytes_held == 0
        receiver.machine.check_integrity()

    def test_a_result_is_said_until_it_is_confirmed(self) -> None:
        receiver = Receiver(2)
        receiver.expect()
        receiver.machine.abort(A, "no blocks")
        assert receiver.say_all(0) == [Result(A, False, "no blocks")]
        receiver.machine.forget(A)
        receiver.machine.tick(2.0)
        assert receiver.say_all(1, now=2.0) == [Result(A, False, "no blocks")]
        receiver.machine.receive(receiver.numbers[1], Ack(1, 0), 2.5)
        receiver.machine.remove_connection(receiver.numbers[0], 3.0)
        assert receiver.say_all(1, now=3.0) == []

    def test_an_abort_that_comes_first_meets_its_transfer(self) -> None:
        receiver = Receiver()
        receiver.receive(Abort(A, "never mind"))
        receiver.expect(window=0)
        receiver.collect()
        assert [str(each.state) for each in receiver.ended] == ["failed(the other side gave up: never mind)"]
        assert receiver.say_all() == [], "the sender knows"

    @pytest.mark.parametrize("signal", [Credit(A, 1, 0), Result(A, True, "")])
    def test_a_sender_does_not_say_what_receivers_say(self, signal: Signal) -> None:
        receiver = Receiver()
        receiver.expect()
        with pytest.raises(KVProtocolError, match="does not come from a sender"):
            receiver.receive(signal)
