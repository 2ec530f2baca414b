"""The sending end of a link by itself: what it may send, in which order, and what it does about silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pserve.kvtransport.errors import KVProtocolError
from p2pserve.kvtransport.link.sending import FRAME_CHARGE, MAX_FRAMES_AHEAD, SendMachine, SendProgress
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.transfers import LinkEvent, Released, TransferEnded, TransferGranted
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.signals import Abort, Ack, Chunk, Credit, End, Ping, Result, Signal

CHUNK = 4096
SETTINGS = LinkSettings(chunk_bytes=CHUNK, ping_s=1000.0, hedge_s=2.0, silence_s=500.0, grace_s=500.0)
A, B = b"a" * 16, b"b" * 16
PLENTY = 1 << 40


def frame(size: int, layer: int = 0) -> KVFrame:
    return KVFrame(layer, 0, 1, 0, 1, 0, 0, 64, bytes([layer + 1]) * size)


class Sender:
    """A machine with connections, and what it said on each."""

    def __init__(self, connections: int = 1, settings: LinkSettings = SETTINGS) -> None:
        self.machine = SendMachine(settings, 1e6, 0.0)
        self.numbers = [self.machine.add_connection(f"path-{n}", 0.0) for n in range(connections)]
        self.released: list[int] = []
        self.events: list[LinkEvent] = []

    def open(self, key: bytes = A, credit: int = PLENTY, deadline: float = 1e6) -> None:
        self.machine.open(key, deadline, 0.0)
        if credit:
            self.receive(Credit(key, credit, 0))

    def push(self, size: int, key: bytes = A, now: float = 0.0, layer: int = 0) -> bool:
        number = len(self.released)
        return self.machine.push(key, frame(size, layer), now, lambda: self.released.append(number))

    def receive(self, signal: Signal, at: int = 0, now: float = 0.0) -> None:
        self.machine.receive(self.numbers[at], signal, now)

    def say(self, at: int = 0, now: float = 0.0) -> Signal | None:
        """The next signal, but for confirmations of what was received."""
        signal = self.machine.next_signal(self.numbers[at], now)
        return self.say(at, now) if isinstance(signal, Ack) else signal

    def say_all(self, at: int = 0, now: float = 0.0) -> list[Signal]:
        found = []
        while (signal := self.say(at, now)) is not None:
            found.append(signal)
        return found

    def settle(self) -> None:
        for event in self.machine.take_events():
            self.events.append(event)
            if isinstance(event, Released):
                event.release()

    def progress(self, key: bytes = A, now: float = 0.0) -> SendProgress:
        found = self.machine.progress(key, now)
        assert found is not None
        return found


def offsets(signals: list[Signal]) -> list[tuple[int, int, int]]:
    """(frame, offset, length) of chunks."""
    return [(s.frame, s.offset, s.length) for s in signals if isinstance(s, Chunk)]


class TestCredit:
    def test_the_charge_is_the_payload_and_a_fee_for_each_frame(self) -> None:
        assert FRAME_CHARGE == 1024
        for credit, sent in ((FRAME_CHARGE + 99, []), (FRAME_CHARGE + 100, [(0, 0, 100)])):
            sender = Sender()
            sender.open(credit=credit)
            sender.push(100)
            assert offsets(sender.say_all()) == sent

    def test_the_fee_is_paid_with_the_first_chunk_alone(self) -> None:
        sender = Sender()
        sender.open(credit=FRAME_CHARGE + 2 * CHUNK - 1)
        sender.push(2 * CHUNK)
        assert offsets(sender.say_all()) == [(0, 0, CHUNK)]
        sender.receive(Credit(A, FRAME_CHARGE + 2 * CHUNK, 0))
        assert offsets(sender.say_all()) == [(0, CHUNK, CHUNK)]

    def test_a_lower_limit_takes_nothing_back(self) -> None:
        sender = Sender()
        sender.open(credit=FRAME_CHARGE + 100)
        sender.receive(Credit(A, 1, 0))
        sender.push(100)
        assert offsets(sender.say_all()) == [(0, 0, 100)]

    def test_the_first_credit_is_reported_with_the_first_position_wanted(self) -> None:
        sender = Sender()
        sender.machine.open(A, 1e6, 0.0)
        sender.receive(Credit(A, 10, 7))
        sender.receive(Credit(A, 20, 9))
        sender.settle()
        assert sender.events == [TransferGranted(A, 7)]

    def test_credit_that_came_before_the_transfer_counts(self) -> None:
        sender = Sender()
        sender.receive(Credit(A, FRAME_CHARGE + 100, 3))
        sender.receive(Credit(A, 5, 0))
        sender.machine.open(A, 1e6, 0.0)
        sender.push(100)
        assert offsets(sender.say_all()) == [(0, 0, 100)]
        sender.settle()
        assert sender.events == [TransferGranted(A, 3)]

    def test_a_resent_chunk_is_not_charged_again(self) -> None:
        sender = Sender()
        sender.open(credit=FRAME_CHARGE + 100)
        sender.push(100)
        assert sender.say() is not None
        sender.machine.remove_connection(sender.numbers[0], 0.0)
        sender.numbers[0] = sender.machine.add_connection("again", 0.0)
        assert offsets(sender.say_all()) == [(0, 0, 100)]
        sender.machine.check_integrity()

    def test_frames_may_be_so_far_ahead_of_the_oldest_unconfirmed_one(self) -> None:
        assert MAX_FRAMES_AHEAD == 65_536
        sender = Sender()
        sender.open()
        one = frame(1)
        for _ in range(MAX_FRAMES_AHEAD + 1):
            sender.machine.push(A, one, 0.0)
        sent = offsets(sender.say_all())
        assert (len(sent), sent[-1][0]) == (MAX_FRAMES_AHEAD, MAX_FRAMES_AHEAD - 1)
        sender.receive(Ack(1, 0))
        assert offsets(sender.say_all()) == [(MAX_FRAMES_AHEAD, 0, 1)]


class TestTurns:
    def test_each_transfer_has_a_chunk_per_round_whatever_its_frames(self) -> None:
        sender = Sender()
        sender.open(A)
        sender.open(B)
        sender.push(3 * CHUNK, A)
        for _ in range(4):
            sender.push(CHUNK // 4, B)
        sender.push(CHUNK, B)
        said = [(s.transfer, s.length) for s in sender.say_all() if isinstance(s, Chunk)]
        assert said[:6] == [(A, CHUNK), (B, CHUNK // 4), (B, CHUNK // 4), (B, CHUNK // 4), (B, CHUNK // 4), (A, CHUNK)]
        assert said[6:] == [(B, CHUNK), (A, CHUNK)]

    def test_the_last_chunk_of_a_frame_is_what_is_left(self) -> None:
        sender = Sender()
        sender.open()
        sender.push(CHUNK + 1)
        first, second = sender.say_all()
        assert isinstance(first, Chunk)
        assert isinstance(second, Chunk)
        assert (first.offset, first.length, first.total, first.grid) == (0, CHUNK, CHUNK + 1, 12)
        assert (second.offset, second.length) == (CHUNK, 1)

    def test_the_payload_is_that_of_the_chunk(self) -> None:
        sender = Sender()
        sender.open()
        data = bytes(range(256)) * 17
        sender.machine.push(A, KVFrame(0, 0, 1, 0, 1, 0, 0, 64, data), 0.0)
        read = b""
        while sender.say() is not None:
            read += sender.machine.payload(sender.numbers[0])
        assert read == data

    def test_what_is_lost_goes_before_what_is_new(self) -> None:
        sender = Sender(2)
        sender.open()
        sender.push(2 * CHUNK)
        sender.say(0)
        sender.machine.remove_connection(sender.numbers[0], 0.0)
        assert offsets(sender.say_all(1)) == [(0, 0, CHUNK), (0, CHUNK, CHUNK)]
        assert sender.progress().bytes_resent == sender.machine.bytes_resent == CHUNK


class TestConfirmation:
    def test_memory_is_released_with_the_last_chunk_of_its_frame(self) -> None:
        sender = Sender()
        sender.open()
        sender.push(CHUNK + 10)
        sender.say_all()
        sender.receive(Ack(1, 0), now=5.0)
        sender.settle()
        assert sender.released == []
        assert sender.machine.bytes_held == CHUNK + 10
        assert sender.progress().bytes_acknowledged == CHUNK
        sender.receive(Ack(2, 0), now=6.0)
        sender.settle()
        assert sender.released == [0]
        assert sender.machine.bytes_held == 0
        progress = sender.progress()
        assert (progress.frames, progress.bytes_queued, progress.bytes_acknowledged) == (1, CHUNK + 10, CHUNK + 10)
        assert progress.bytes_by_path == {"path-0": CHUNK + 10}
        assert (progress.first_push_at, progress.first_sent_at, progress.last_acknowledged_at) == (0.0, 0.0, 6.0)

    def test_the_second_copy_of_a_chunk_counts_for_nothing(self) -> None:
        sender = Sender(2)
        sender.open()
        sender.push(100)
        sender.say(0)
        assert offsets(sender.say_all(1, now=2.0)) == [(0, 0, 100)]
        sender.receive(Ack(1, 0), at=1, now=2.5)
        sender.receive(Ack(1, 0), at=0, now=3.0)
        progress = sender.progress()
        assert progress.bytes_acknowledged == 100
        assert progress.bytes_by_path == {"path-1": 100}
        assert progress.last_acknowledged_at == 2.5

    def test_more_than_was_sent_cannot_be_confirmed(self) -> None:
        sender = Sender()
        sender.open()
        sender.push(100)
        sender.say()
        with pytest.raises(KVProtocolError, match="2 records confirmed of 1 sent"):
            sender.receive(Ack(2, 0))

    def test_delivery_confirms_what_connections_have_not(self) -> None:
        sender = Sender()
        sender.open()
        sender.push(100)
        sender.machine.finish(A, 1)
        assert [type(s) for s in sender.say_all()] == [Chunk, End]
        sender.receive(Result(A, True, ""), now=4.0)
        sender.settle()
        assert sender.released == [0]
        assert sender.progress().bytes_acknowledged == 100
        (ended,) = [event for event in sender.events if isinstance(event, TransferEnded)]
        assert ended.state.name == "delivered"
        sender.machine.check_integrity()

    def test_nothing_is_delivered_before_its_end_was_said(self) -> None:
        sender = Sender()
        sender.open()
        sender.push(100)
        sender.say_all()
        with pytest.raises(KVProtocolError, match="moving cannot be acknowledged"):
            sender.receive(Result(A, True, ""))
        assert sender.progress().bytes_acknowledged == 0


class TestOvertaking:
    def test_an_idle_connection_takes_what_another_has_had_for_the_hedge(self) -> None:
        sender = Sender(2)
        sender.open()
        sender.push(100)
        sender.say(0, now=1.0)
        assert sender.say_all(1, now=2.99) == []
        assert offsets(sender.say_all(1, now=3.0)) == [(0, 0, 100)]
        assert sender.progress().bytes_resent == 100

    def test_the_one_that_waits_longest_is_taken_first_and_once(self) -> None:
        sender = Sender(4)
        sender.open()
        for layer in range(2):
            sender.push(100, layer=layer)
        assert offsets([s for s in [sender.say(1, now=0.5)] if s]) == [(0, 0, 100)]
        assert offsets([s for s in [sender.say(0, now=1.0)] if s]) == [(1, 0, 100)]
        assert offsets(sender.say_all(2, now=10.0)) == [(0, 0, 100), (1, 0, 100)]
        assert sender.say_all(3, now=20.0) == [], "a third copy helps nobody"

    def test_what_has_arrived_is_not_taken(self) -> None:
        sender = Sender(3)
        sender.open()
        sender.push(100, layer=0)
        sender.push(100, layer=1)
        sender.say(0, now=0.0)
        sender.say(0, now=0.0)
        assert offsets([s for s in [sender.say(1, now=2.0)] if s]) == [(0, 0, 100)]
        sender.receive(Ack(1, 0), at=1, now=2.0)
        assert offsets(sender.say_all(2, now=2.0)) == [(1, 0, 100)]

    def test_a_connection_does_not_overtake_itself(self) -> None:
        sender = Sender(1)
        sender.open()
        sender.push(100)
        sender.say(0)
        assert sender.say_all(0, now=100.0) == []

    def test_one_lost_copy_of_two_is_not_sent_again(self) -> None:
        sender = Sender(3)
        sender.open()
        sender.push(100)
        sender.say(0)
        sender.say(1, now=2.0)
        sender.machine.remove_connection(sender.numbers[0], 2.0)
        assert sender.say_all(2, now=2.0) == []
        sender.machine.remove_connection(sender.numbers[1], 2.0)
        assert offsets(sender.say_all(2, now=2.0)) == [(0, 0, 100)]

    def test_it_wakes_for_that_only_when_there_are_two_and_something_is_under_way(self) -> None:
        for connections, sent, expected in ((1, True, 500.0), (2, False, 1000.0), (2, True, 1.0)):
            sender = Sender(connections)
            sender.open()
            if sent:
                sender.push(100)
                sender.say(0)
            assert sender.machine.wake_at(0.0) == expected


class TestEnds:
    def test_the_end_is_said_after_the_last_chunk_was_cut(self) -> None:
        sender = Sender()
        sender.open(credit=FRAME_CHARGE + CHUNK)
        sender.push(2 * CHUNK)
        sender.machine.finish(A, 77)
        assert [type(s) for s in sender.say_all()] == [Chunk]
        sender.receive(Credit(A, PLENTY, 0))
        assert sender.say_all()[-1] == End(A, 77, 1)

    def test_the_end_is_not_said_before_the_receiver_is_there(self) -> None:
        sender = Sender()
        sender.open(credit=0)
        sender.machine.finish(A, 5)
        assert sender.say_all() == []
        sender.receive(Credit(A, 1, 0))
        assert sender.say_all() == [End(A, 5, 0)]

    def test_a_second_finish_changes_nothing(self) -> None:
        sender = Sender()
        sender.open()
        sender.machine.finish(A, 5)
        sender.machine.finish(A, 6)
        assert sender.say_all() == [End(A, 5, 0)]

    def test_a_late_word_is_said_once_more_on_a_connection_that_is_not_late(self) -> None:
        sender = Sender(2)
        sender.open()
        sender.machine.finish(A, 5)
        assert sender.say_all(0) == [End(A, 5, 0)]
        sender.machine.tick(1.99)
        assert sender.say_all(1, now=1.99) == []
        sender.machine.tick(2.0)
        assert sender.say_all(0, now=2.0) == [], "the connection that is late is not trusted with it"
        assert sender.say_all(1, now=2.0) == [End(A, 5, 0)]
        sender.machine.tick(3.99)
        assert sender.say_all(1, now=3.99) == [], "not again before the copy is late as well"

    def test_a_word_whose_connection_died_is_said_again(self) -> None:
        sender = Sender(2)
        sender.open()
        sender.machine.abort(A, "enough")
        assert sender.say_all(0) == [Abort(A, "enough")]
        sender.machine.remove_connection(sender.numbers[0], 0.0)
        assert sender.say_all(1) == [Abort(A, "enough")]
        sender.receive(Ack(1, 0), at=1)
        sender.machine.remove_connection(sender.numbers[1], 0.0)
        sender.numbers.append(sender.machine.add_connection("later", 0.0))
        assert sender.say_all(2) == [], "it has been confirmed"

    def test_the_end_of_a_transfer_that_failed_is_not_said_again(self) -> None:
        sender = Sender(2)
        sender.open()
        sender.machine.finish(A, 5)
        sender.say_all(0)
        sender.receive(Result(A, False, "no"))
        sender.machine.remove_connection(sender.numbers[0], 0.0)
        assert sender.say_all(1) == []

    def test_nothing_is_taken_after_an_end(self) -> None:
        sender = Sender()
        sender.open()
        sender.machine.abort(A, "enough")
        assert not sender.push(10)
        assert sender.released == []
        sender.machine.finish(A, 1)
        assert sender.say_all() == [Abort(A, "enough")]
        assert sender.machine.bytes_held == 0

    @pytest.mark.parametrize(
        "end",
        [lambda s: s.machine.abort(A, "x"), lambda s: s.receive(Result(A, False, "x")), lambda s: s.machine.close()],
    )
    def test_every_end_lets_go_of_everything(self, end: Callable[[Sender], None]) -> None:
        sender = Sender()
        sender.open()
        sender.push(3 * CHUNK)
        sender.push(10)
        sender.say()
        end(sender)
        sender.settle()
        assert len(sender.released) == 2
        assert sender.machine.bytes_held == 0
        sender.machine.check_integrity()

    def test_a_deadline_counts_to_the_moment(self) -> None:
        sender = Sender()
        sender.open(deadline=10.0)
        assert sender.machine.wake_at(9.5) == 10.0
        sender.machine.tick(9.99)
        sender.settle()
        assert not [event for event in sender.events if isinstance(event, TransferEnded)]
        sender.machine.tick(10.0)
        sender.settle()
        assert [str(event.state) for event in sender.events if isinstance(event, TransferEnded)] == [
            "failed(the deadline of the ticket has passed)"
        ]


class TestWaiting:
    def test_the_time_without_credit_counts_from_when_there_was_more_to_send(self) -> None:
        sender = Sender()
        sender.open(credit=FRAME_CHARGE + 100)
        sender.push(100, now=1.0)
        sender.say_all(now=1.0)
        sender.push(100, now=3.0)
        assert sender.progress(now=8.0).blocked_s == 5.0
        sender.receive(Credit(A, 2 * (FRAME_CHARGE + 100), 0), now=9.0)
        assert sender.progress(now=20.0).blocked_s == 6.0
        assert len(sender.say_all(now=9.0)) == 1

    def test_waiting_for_the_first_credit_is_not_counted(self) -> None:
        sender = Sender()
        sender.open(credit=0)
        sender.push(100, now=1.0)
        assert sender.progress(now=8.0).blocked_s == 0.0

    def test_a_silent_connection_with_something_to_answer_is_closed(self) -> None:
        sender = Sender(1, LinkSettings(silence_s=3.0, ping_s=1000.0, hedge_s=2.0))
        sender.open()
        sender.machine.tick(50.0)
        assert sender.machine.connections, "it owes nothing"
        sender.push(10)
        sender.say(0, now=60.0)
        sender.machine.tick(62.9)
        assert sender.machine.connections
        sender.machine.tick(63.0)
        assert not sender.machine.connections

    def test_pings_go_out_at_their_interval_and_measure(self) -> None:
        sender = Sender(1, LinkSettings(ping_s=1.0))
        assert sender.say(now=0.99) is None
        assert sender.say(now=1.0) == Ping(1)
        assert sender.say(now=1.5) is None
        assert sender.say(now=2.0) == Ping(2)
