"""What both ends of a link do alike: connections and their figures, confirmations, pings, silence, leases and ends."""

from __future__ import annotations

import pytest

from p2pserve.kvtransport.errors import KVProtocolError, TransferError
from p2pserve.kvtransport.link.receiving import MIN_WINDOW_BYTES, ReceiveMachine
from p2pserve.kvtransport.link.sending import SendMachine
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.transfers import CloseConnection, LinkEnded, TransferEnded
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.signals import Abort, Ack, Credit, Goodbye, Ping, Pong

SETTINGS = LinkSettings(chunk_bytes=4096, ping_s=1000.0, hedge_s=500.0, silence_s=4.0, grace_s=8.0)
A = b"a" * 16


def sender(settings: LinkSettings = SETTINGS, lease_s: float = 1e6) -> SendMachine:
    return SendMachine(settings, lease_s, 0.0)


def busy(machine: SendMachine, number: int, size: int = 100, now: float = 0.0) -> None:
    """A transfer with something to send, and credit for it."""
    machine.open(A, 1e6, now)
    machine.receive(number, Credit(A, 1 << 30, 0), now)
    machine.push(A, KVFrame(0, 0, 1, 0, 1, 0, 0, 64, bytes(size)), now)


def drain(machine: SendMachine, number: int, now: float) -> list[object]:
    found: list[object] = []
    while (signal := machine.next_signal(number, now)) is not None:
        found.append(signal)
    return found


class TestConfirmations:
    def test_what_was_dealt_with_is_said_once(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        assert machine.next_signal(number, 0.0) is None
        machine.receive(number, Credit(A, 1, 0), 0.0)
        machine.receive(number, Credit(A, 2, 0), 0.0)
        assert machine.next_signal(number, 0.0) == Ack(2, 0)
        assert machine.next_signal(number, 0.0) is None

    def test_bytes_alone_are_confirmed_when_they_are_many_and_not_too_often(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        machine.note_heard(number, (1 << 17) - 1, 1.0)
        assert machine.next_signal(number, 1.0) is None
        machine.note_heard(number, 1, 1.0)
        assert machine.next_signal(number, 1.0) == Ack(0, 1 << 17)
        machine.note_heard(number, 1 << 17, 1.01)
        assert machine.next_signal(number, 1.049) is None
        assert machine.next_signal(number, 1.05) == Ack(0, 1 << 18)

    @pytest.mark.parametrize(("now", "said"), [(0.049, None), (0.05, Ack(0, 1 << 17))])
    def test_the_first_bytes_are_confirmed_after_a_twentieth_of_a_second(self, now: float, said: Ack | None) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        machine.note_heard(number, 1 << 17, 0.0)
        assert machine.next_signal(number, now) == said

    def test_pings_and_answers_are_not_counted_among_what_is_confirmed(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        machine.receive(number, Ping(4), 0.0)
        machine.receive(number, Pong(9), 0.0)
        assert drain(machine, number, 0.0) == [Pong(4)]

    def test_a_flood_of_pings_is_refused(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        for token in range(16):
            machine.receive(number, Ping(token), 0.0)
        with pytest.raises(KVProtocolError, match="faster than they can be answered"):
            machine.receive(number, Ping(16), 0.0)
        assert drain(machine, number, 0.0) == [Pong(token) for token in range(16)]


class TestFigures:
    def test_the_round_trip_is_the_latest(self) -> None:
        machine = sender(LinkSettings(ping_s=1.0))
        number = machine.add_connection("direct", 0.0)
        for sent, back in ((1.0, 1.25), (3.0, 3.5)):
            (ping,) = drain(machine, number, sent)
            assert isinstance(ping, Ping)
            machine.receive(number, Pong(ping.token), back)
            machine.receive(number, Pong(ping.token), back + 9.0)
        one = machine.path_statistics(4.0)["direct"]
        assert (one.label, one.rtt_s) == ("direct", 0.5)

    def test_the_rate_is_what_the_peer_has_read_lately(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        for n in range(1, 5):
            machine.receive(number, Ack(0, 1000 * n), float(n))
        one = machine.path_statistics(4.0)["direct"]
        assert one.rate_bytes_s == 1000.0
        machine.receive(number, Ack(0, 10), 4.0)
        assert machine.path_statistics(4.0)["direct"].rate_bytes_s == 1000.0, "a count that goes back is no news"
        assert machine.path_statistics(6.0)["direct"].rate_bytes_s == 0.0

    def test_the_rate_of_a_young_connection(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 10.0)
        assert machine.path_statistics(10.0)["direct"].rate_bytes_s == 0.0
        machine.receive(number, Ack(0, 100), 10.5)
        assert machine.path_statistics(10.5)["direct"].rate_bytes_s == 200.0
        assert machine.path_statistics(12.0)["direct"].rate_bytes_s == 50.0
        sudden = machine.add_connection("sudden", 20.0)
        machine.receive(sudden, Ack(0, 100), 20.0)
        found = machine.path_statistics(20.0)["sudden"].rate_bytes_s
        assert found == pytest.approx(2000.0), "in no less than a twentieth of a second"

    def test_what_is_in_flight_and_what_has_arrived(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        busy(machine, number, 5000)
        drain(machine, number, 0.0)
        one = machine.path_statistics(0.0)["direct"]
        assert (one.bytes_in_flight, one.bytes_acknowledged) == (5000, 0)
        machine.receive(number, Ack(1, 0), 1.0)
        one = machine.path_statistics(1.0)["direct"]
        assert (one.bytes_in_flight, one.bytes_acknowledged) == (904, 4096)

    def test_a_path_sums_its_connections_dead_ones_included(self) -> None:
        machine = sender(LinkSettings(chunk_bytes=4096, ping_s=1.0))
        first, second, _ = (machine.add_connection(label, 0.0) for label in ("direct", "direct", "relay"))
        busy(machine, first, 3 * 4096)
        drain(machine, first, 0.0)
        machine.receive(first, Ack(1, 0), 0.5)
        for number, back in ((first, 1.5), (second, 1.25)):
            token = next(s for s in drain(machine, number, 1.0) if isinstance(s, Ping)).token
            machine.receive(number, Pong(token), back)
        before = machine.path_statistics(1.5)
        assert (before["direct"].connections, before["direct"].rtt_s) == (2, 0.25)
        assert before["relay"].rtt_s is None
        machine.remove_connection(first, 2.0)
        after = machine.path_statistics(2.0)
        assert after["direct"].connections == 1
        assert after["direct"].bytes_acknowledged == before["direct"].bytes_acknowledged == 4096

    def test_a_peer_that_invents_labels_is_not_remembered_for_each(self) -> None:
        machine = sender()
        for n in range(100):
            machine.remove_connection(machine.add_connection(f"label-{n}", 0.0), 0.0)
        assert len(machine.path_statistics(0.0)) == 65, "64 and one for all others"


class TestSilence:
    def test_it_counts_from_when_there_is_something_to_answer(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        busy(machine, number, now=100.0)
        drain(machine, number, 100.0)
        assert machine.wake_at(100.0) == 104.0
        machine.take_events()
        machine.tick(103.9)
        assert not machine.has_events
        machine.tick(104.0)
        assert CloseConnection(number, "nothing heard for 4 s", is_stuck=True) in machine.take_events()
        assert machine.connections == {}

    def test_stuck_is_what_has_had_no_answer_for_half_of_it_though_the_peer_still_speaks(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        busy(machine, number, now=10.0)
        assert not machine.is_stuck(number, 50.0)  # nothing was sent
        drain(machine, number, 50.0)
        machine.receive(number, Ping(1), 51.9)
        assert not machine.is_stuck(number, 51.9)
        assert machine.is_stuck(number, 52.0)
        machine.receive(number, Ack(1, 100), 52.0)
        assert not machine.is_stuck(number, 60.0)
        assert not machine.is_stuck(99, 60.0)

    def test_a_ping_without_an_answer_is_stuck_as_well(self) -> None:
        machine = sender(LinkSettings(ping_s=1.0, silence_s=4.0))
        number = machine.add_connection("direct", 0.0)
        assert Ping(1) in drain(machine, number, 1.0)
        assert not machine.is_stuck(number, 2.9)
        assert machine.is_stuck(number, 3.0)
        machine.receive(number, Pong(1), 3.0)
        machine.retire(number, "its path is no longer used", 3.5)
        assert machine.take_events() == [CloseConnection(number, "its path is no longer used", is_stuck=False)]

    def test_any_byte_breaks_it(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        busy(machine, number)
        drain(machine, number, 0.0)
        machine.note_heard(number, 1, 3.0)
        machine.tick(6.9)
        assert number in machine.connections
        machine.tick(7.0)
        assert number not in machine.connections

    def test_unknown_connections_are_no_matter(self) -> None:
        machine = sender()
        machine.note_heard(7, 1, 0.0)
        machine.receive(7, Credit(A, 1, 0), 0.0)
        machine.remove_connection(7, 0.0)
        machine.retire(7, "gone", 0.0)
        assert machine.next_signal(7, 0.0) is None
        assert machine.take_events() == []


class TestGrace:
    def test_a_transfer_without_any_connection_fails_after_it(self) -> None:
        machine = sender()
        number = machine.add_connection("direct", 0.0)
        machine.open(A, 1e6, 0.0)
        machine.remove_connection(number, 10.0)
        machine.tick(17.9)
        assert machine.take_events() == []
        machine.tick(18.0)
        (ended,) = machine.take_events()
        assert isinstance(ended, TransferEnded)
        assert str(ended.state) == "failed(no connection for 8 s)"

    def test_one_that_has_just_begun_has_as_long(self) -> None:
        machine = sender()
        machine.open(A, 1e6, 5.0)
        machine.tick(12.9)
        assert machine.take_events() == []
        machine.tick(13.0)
        assert len(machine.take_events()) == 1

    def test_a_connection_in_time_saves_it(self) -> None:
        machine = sender()
        machine.open(A, 1e6, 0.0)
        machine.add_connection("direct", 7.9)
        machine.tick(50.0)
        assert machine.take_events() == []


class TestLease:
    def test_an_unused_link_ends_at_its_moment(self) -> None:
        machine = sender(lease_s=30.0)
        machine.tick(29.9)
        assert machine.ended is None
        machine.tick(30.0)
        assert machine.take_events() == [LinkEnded("the link's lease of 30 s without a transfer is over")]

    def test_a_transfer_renews_it(self) -> None:
        machine = sender(lease_s=30.0)
        machine.open(A, 1e6, 0.0)
        machine.add_connection("direct", 0.0)
        machine.tick(25.0)
        machine.abort(A, "enough")
        machine.tick(54.9)
        assert machine.ended is None
        machine.tick(55.0)
        assert machine.ended is not None


class TestTheEnd:
    def test_open_transfers_fail_and_each_connection_says_goodbye_once(self) -> None:
        machine = sender()
        one, two = machine.add_connection("a", 0.0), machine.add_connection("b", 0.0)
        machine.open(A, 1e6, 0.0)
        machine.close("the engine stops")
        ended, over = machine.take_events()
        assert isinstance(ended, TransferEnded)
        assert str(ended.state) == "failed(the engine stops)"
        assert over == LinkEnded("the engine stops")
        for number in (one, two):
            assert drain(machine, number, 0.0) == [Goodbye("the engine stops")]
        machine.close("again")
        assert machine.ended == "the engine stops"
        assert machine.take_events() == []

    @pytest.mark.parametrize(("reason", "told"), [("", ""), ("bye", ": bye")])
    def test_a_goodbye_ends_this_side_too(self, reason: str, told: str) -> None:
        machine = sender()
        number = machine.add_connection("a", 0.0)
        machine.receive(number, Goodbye(reason), 0.0)
        assert machine.ended == f"the other side closed the link{told}"
        with pytest.raises(TransferError, match="the other side closed the link"):
            machine.open(A, 1.0, 0.0)

    def test_a_violation_is_told_as_such(self) -> None:
        machine = sender()
        machine.end_for_violation(KVProtocolError("nonsense"))
        assert machine.ended == "protocol violation by the other side: nonsense"

    def test_nothing_is_heard_any_more(self) -> None:
        machine = sender()
        number = machine.add_connection("a", 0.0)
        machine.close()
        machine.take_events()
        machine.receive(number, Credit(A, 5, 0), 0.0)
        machine.tick(1e9)
        assert machine.take_events() == []

    def test_the_representation_says_how_it_stands(self) -> None:
        machine = sender()
        machine.add_connection("a", 0.0)
        machine.open(A, 1e6, 0.0)
        assert repr(machine) == "<SendMachine open connections=1 transfers=1>"
        machine.close("bye")
        assert repr(machine).startswith("<SendMachine bye ")
        assert repr(ReceiveMachine(SETTINGS, 1.0, 0.0)) == "<ReceiveMachine open connections=0 transfers=0>"


class TestBothEnds:
    def test_an_abort_and_its_answer_cross(self) -> None:
        """Each end gives up before it hears of the other: each transfer ends once, and neither is surprised."""
        here, there = sender(), ReceiveMachine(SETTINGS, 1e6, 0.0)
        one, two = here.add_connection("a", 0.0), there.add_connection("a", 0.0)
        here.open(A, 1e6, 0.0)
        there.expect(A, 1e6, 0.0)
        there.grant(A, MIN_WINDOW_BYTES)
        here.abort(A, "mine")
        there.abort(A, "theirs")
        for signal in drain(here, one, 0.0):
            assert isinstance(signal, Abort)
            there.receive(two, signal, 0.0)
        while (signal := there.next_signal(two, 0.0)) is not None:
            here.receive(one, signal, 0.0)
        for machine, reason in ((here, "mine"), (there, "theirs")):
            (ended,) = machine.take_events()
            assert isinstance(ended, TransferEnded)
            assert ended.state.reason == reason
            machine.forget(A)
            assert len(machine.transfers) == 0
