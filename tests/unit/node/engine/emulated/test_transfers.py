"""What an emulated engine gives to its links, and when; the links are made up."""

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from p2pserve.kvtransport.errors import TransferAborted
from p2pserve.kvtransport.link.sending import SendProgress
from p2pserve.kvtransport.link.transfers import EndState
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket
from p2pserve.node.engine import protocol
from p2pserve.node.engine.emulated.transfers import ComputedSpan, EmulatedSend, EmulatedTransfers

LAYERS, HEADS, HEAD_DIM = 3, 2, 64
LINK = LinkTicket(link=b"l" * 16, secret=b"s" * 32, lease_s=600.0)
TICKET = TransferTicket(transfer=b"t" * 16, link=LINK.link, codec="raw", deadline_s=30.0)
ALL = protocol.KvSlice(first_layer=0, last_layer=LAYERS, first_head=0, last_head=HEADS)
OUTLET = protocol.Outlet(slice=ALL, ticket=TICKET, link=LINK, paths=(), gbps=1.0, rtt_s=0.01)


def until(condition: Callable[[], bool]) -> None:
    """A sender's thread has got so far."""
    pause = threading.Event()
    for _ in range(20_000):
        if condition():
            return
        pause.wait(0.0005)
    raise AssertionError("the sender does not go on")


class FakeEnd:
    """The sending end of a transfer: keeps its frames. While `gate` is not set, the link has no room for more."""

    def __init__(self, on_end: Callable[[Any, EndState], None]) -> None:
        self.first = 0
        self.place, self.gate, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.gate.set()
        self.frames: list[KVFrame] = []
        self.finished: list[int] = []
        self.state = EndState("open")
        self._on_end = on_end

    def wait_for_credit(self, timeout: float) -> int:
        assert self.place.wait(timeout)
        if self.state.name == "failed":
            raise TransferAborted(self.state.reason)
        return self.first

    def send(self, frame: KVFrame, *, release: None, timeout: float) -> None:
        self.frames.append(frame)
        assert self.gate.wait(timeout)

    def finish(self, tokens: int) -> None:
        self.finished.append(tokens)
        self.state = EndState("delivered")
        self.ended.set()

    def wait(self, timeout: float) -> EndState:
        assert self.ended.wait(timeout)
        return self.state

    def abort(self, reason: str) -> None:
        if self.state.name == "open":
            self.state = EndState("failed", reason)
            self.ended.set()
            self.place.set()
            self._on_end(self, self.state)

    def progress(self) -> SendProgress:
        return SendProgress(len(self.frames), 0, 0, 0, {}, None, None, None, 0.0)


class Bench:
    """A sender and its link."""

    def __init__(self) -> None:
        self.reports: list[protocol.TransferReport] = []
        self.reported = threading.Event()
        self.ends: list[FakeEnd] = []
        self.sender = EmulatedSend(OUTLET, cast("Any", self), (LAYERS, HEAD_DIM), self._report)
        (self.end,) = self.ends

    def _report(self, report: protocol.TransferReport) -> None:
        self.reports.append(report)
        self.reported.set()

    def open(self, ticket: TransferTicket, on_end: Callable[[Any, EndState], None]) -> FakeEnd:
        assert ticket == TICKET
        self.ends.append(FakeEnd(on_end))
        return self.ends[-1]

    @staticmethod
    def wire_bytes(size: int) -> int:
        return size

    def send_span(self, first: int, last: int, *, final: bool = False) -> None:
        """These positions have just been computed."""
        now = time.monotonic()
        self.sender.send_span(ComputedSpan(first, last, now, now, final))

    def sent(self) -> list[tuple[int, int, int]]:
        """Layer, first position and the one behind the last of each frame."""
        return [(frame.layer, frame.start, frame.end) for frame in self.end.frames]


def test_nothing_is_queued_before_the_receiver_has_a_place() -> None:
    bench = Bench()
    bench.send_span(0, 8)
    bench.send_span(8, 12, final=True)
    until(lambda: bench.sender.progress().blocked_s > 0.0)  # the network must know why nothing moves
    assert bench.sent() == []
    bench.end.first = 5
    bench.end.place.set()
    assert bench.reported.wait(10.0)
    assert bench.sent() == [(layer, 5, 8) for layer in range(LAYERS)] + [(layer, 8, 12) for layer in range(LAYERS)]
    (report,) = bench.reports
    assert report.delivered
    assert report.raw_bytes == 7 * LAYERS * 2 * HEADS * HEAD_DIM * 2
    assert report.span_s >= report.visible_s >= report.blocked_s > 0.0
    assert bench.end.finished == [12]


def test_a_transfer_that_is_given_up_while_it_waits_for_a_place_ends() -> None:
    bench = Bench()
    bench.send_span(0, 8, final=True)
    bench.sender.abort("the client has gone")
    assert bench.reported.wait(10.0)
    assert [(report.delivered, report.reason) for report in bench.reports] == [(False, "the client has gone")]
    assert bench.sent() == []


def test_what_is_withdrawn_is_sent_when_it_has_been_computed_again_and_nothing_twice() -> None:
    """A receiver refuses a transfer that repeats positions."""
    bench = Bench()
    bench.end.place.set()
    bench.end.gate.clear()
    bench.send_span(0, 8)
    bench.send_span(8, 12, final=True)
    until(lambda: len(bench.end.frames) == 1)  # layer 0 of the first span is on its way
    bench.sender.withdraw()
    bench.end.gate.set()
    bench.send_span(0, 6)
    until(lambda: len(bench.end.frames) == LAYERS)
    assert bench.sent() == [(0, 0, 8), (1, 0, 6), (2, 0, 6)]
    assert bench.end.finished == []
    bench.send_span(6, 12, final=True)
    assert bench.reported.wait(10.0)
    assert bench.sent()[LAYERS:] == [(0, 8, 12), (1, 6, 12), (2, 6, 12)]
    assert bench.reports[0].delivered
    assert bench.end.finished == [12]


@pytest.mark.parametrize("count", [1, 3])
def test_the_end_of_all_that_is_sent_of_a_prompt_is_told_once(count: int) -> None:
    reports: list[object] = []
    ended: list[str] = []
    transfers = EmulatedTransfers(layers=LAYERS, head_dim=HEAD_DIM, limit_bytes=1 << 20, report=reports.append)
    other = msgspec.structs.replace(TICKET, link=b"o" * 16)  # cannot be opened: that is no ticket for this link
    transfers.send([msgspec.structs.replace(OUTLET, ticket=other)] * count, lambda: ended.append("all"))
    assert ended == ["all"]
    assert len(reports) == count
    transfers.endpoint.close("the test is over")


def test_the_end_is_told_when_the_last_of_several_links_has_ended() -> None:
    ended = threading.Event()
    reported: list[protocol.TransferReport | protocol.LinkReport] = []
    transfers = EmulatedTransfers(layers=LAYERS, head_dim=HEAD_DIM, limit_bytes=1 << 20, report=reported.append)
    second = msgspec.structs.replace(LINK, link=b"m" * 16)
    ticket = msgspec.structs.replace(TICKET, link=second.link)
    both = (OUTLET, msgspec.structs.replace(OUTLET, link=second, ticket=ticket))
    transfers.send(both, ended.set)
    senders = {sender.outlet.link.link: sender for sender in transfers.outgoing(TICKET.transfer)}
    senders[LINK.link].abort("one link is lost")
    until(lambda: len(transfers.outgoing(TICKET.transfer)) == 1)
    assert not ended.is_set()
    senders[second.link].abort("so is the other")
    assert ended.wait(10.0)
    transfers.endpoint.close("the test is over")
