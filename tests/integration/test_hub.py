"""Transfers and links inside an engine process: what has arrived is neither lost nor made up, whoever comes first, and
every outgoing transfer is reported once, however it ends.
"""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
import torch

from p2pserve.kernels.codec import Codec, encode, wire_dtype
from p2pserve.kvtransport.channel import LINK_HELLO_BYTES, LinkHello
from p2pserve.kvtransport.dialling import Path
from p2pserve.kvtransport.endpoint import Endpoint
from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.frames import KVFrame
from p2pserve.kvtransport.receiving import MIN_WINDOW_BYTES
from p2pserve.kvtransport.send_link import Outgoing as SendingEnd
from p2pserve.kvtransport.sockets import read_link_hello
from p2pserve.kvtransport.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node.engine import outgoing as sending
from p2pserve.node.engine.device import CpuDevice
from p2pserve.node.engine.hub import TransferHub
from p2pserve.node.engine.incoming import Incoming, LayerPiece
from p2pserve.node.engine.layout import Shard
from p2pserve.node.engine.outgoing import LayerCopy, Outgoing
from p2pserve.node.engine.protocol import (
    CloseLink,
    Inlet,
    LinkReport,
    Outlet,
    SetPaths,
    Slice,
    TransferReport,
)

pytestmark = pytest.mark.beside

LAYERS, HEADS, HEAD_DIM = 2, 2, 64
SHARD = Shard(layers=range(LAYERS), heads=range(HEADS), head_dim=HEAD_DIM, dtype=torch.float32)
ALL = Slice(first_layer=0, last_layer=LAYERS, first_head=0, last_head=HEADS)
LINK = issue_link(600.0, random.Random(1).randbytes)
TOKENS = 8
LIMIT = 4 << 20
PATIENCE_S = 30.0  # for what comes at once, unless the machine is very busy


def ticket_of(seed: int = 0, *, codec: str = "raw", deadline_s: float = 60.0) -> TransferTicket:
    return issue_transfer(LINK.link, codec, deadline_s, random.Random(seed).randbytes)


TICKET = ticket_of()


@dataclass
class Reports:
    """What a hub tells its agent."""

    ends: list[TransferReport] = field(default_factory=list)
    links: list[LinkReport] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, report: TransferReport | LinkReport) -> None:
        with self._news:
            self.ends.append(report) if isinstance(report, TransferReport) else self.links.append(report)
            self._news.notify_all()

    def until(self, condition: Callable[[], object], timeout: float = PATIENCE_S) -> None:
        with self._news:
            assert self._news.wait_for(condition, timeout), (self.ends, self.links)

    def end(self, ticket: TransferTicket) -> TransferReport:
        """Of a transfer, once it has been reported."""
        self.until(lambda: any(report.transfer == ticket.transfer for report in self.ends))
        (found,) = [report for report in self.ends if report.transfer == ticket.transfer]
        return found


def make_hub(reports: Reports | None = None, *, limit: int = LIMIT, grace_s: float = 10.0) -> TransferHub:
    hub = TransferHub(SHARD, limit, (reports or Reports()).tell)
    hub._endpoint.settings = replace(hub._endpoint.settings, grace_s=grace_s)
    return hub


@dataclass
class Listener:
    """What an agent does with the connections of a link: reads whose each is and hands it over."""

    path: Path
    accepted: int = 0
    sockets: list[socket.socket] = field(default_factory=list)

    def cut(self) -> None:
        """The connections end in the middle of whatever they carry."""
        for sock in self.sockets:
            with suppress(OSError):  # it has gone already
                sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def listening(attach: Callable[[LinkHello, socket.socket], None], streams: int = 1) -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = Listener(Path("127.0.0.1", server.getsockname()[1], streams=streams))

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                hello = read_link_hello(sock, PATIENCE_S)
                found.accepted += 1
                found.sockets.append(sock.dup())
                attach(hello, sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield found
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        for sock in found.sockets:
            sock.close()


def into(hub: TransferHub) -> Callable[[LinkHello, socket.socket], None]:
    return lambda hello, sock: hub.attach(hello.pack(), sock)


def outlet_of(*paths: Path, ticket: TransferTicket = TICKET, link: LinkTicket = LINK, part: Slice = ALL) -> Outlet:
    return Outlet(slice=part, ticket=ticket, link=link, paths=paths, gbps=1.0, rtt_s=0.001)


def inlet_of(ticket: TransferTicket = TICKET, link: LinkTicket = LINK, part: Slice = ALL) -> Inlet:
    return Inlet(slice=part, ticket=ticket, link=link)


def values(layer: int, tokens: int) -> torch.Tensor:
    """KV whose every value tells its layer."""
    return torch.full((tokens, HEADS, HEAD_DIM), float(layer + 1))


def piece(layer: int, start: int, tokens: int) -> LayerCopy:
    return LayerCopy(layer, start, CpuDevice().to_host(values(layer, tokens), -values(layer, tokens)))


def frame(layer: int, start: int, tokens: int) -> KVFrame:
    filled = values(layer, tokens)
    return KVFrame(
        layer=layer,
        head_first=0,
        head_last=HEADS,
        start=start,
        tokens=tokens,
        codec=Codec.RAW.wire,
        dtype=wire_dtype(filled.dtype).wire,
        head_dim=HEAD_DIM,
        payload=encode(Codec.RAW, filled, -filled, start=start, layer=layer),
    )


def wait_for(incoming: Incoming, *, layers: int) -> None:
    """Until this many layers are in the inbox, or it has failed."""
    deadline = time.monotonic() + PATIENCE_S
    with incoming._room:
        while len(incoming._inbox) < layers and not incoming._failure:
            assert time.monotonic() < deadline, "nothing arrived"
            incoming._room.wait(0.005)  # nobody is woken for a new piece: the engine looks between two steps


@dataclass
class Sender:
    """The far end of the link that a hub receives on."""

    endpoint: Endpoint
    end: SendingEnd
    listener: Listener


@contextmanager
def connected(hub: TransferHub, ticket: TransferTicket = TICKET) -> Iterator[Sender]:
    with listening(into(hub)) as listener, Endpoint() as endpoint:
        yield Sender(endpoint, endpoint.sending(LINK, [listener.path]).open(ticket), listener)


def started(hub: TransferHub, ticket: TransferTicket = TICKET) -> Incoming:
    """A receiving end whose engine has blocks."""
    hub.expect([inlet_of(ticket)], TOKENS)
    incoming = hub.incoming(ticket.transfer)
    assert incoming is not None
    incoming.start(0)
    return incoming


def settled(incoming: Incoming) -> str | None:
    """Its outcome, once its thread has ended."""
    for thread in threading.enumerate():
        if thread.name == f"kv-decode-{incoming.transfer.hex()[:8]}":
            thread.join(PATIENCE_S)
    return incoming.outcome(0.0)


# ---- receiving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["request first", "connection first"])
def test_a_connection_may_come_before_its_request(order: str) -> None:
    """The request waits for the engine thread, which may be in the middle of a long step."""
    hub = make_hub()
    if order == "request first":
        started(hub)
    with connected(hub) as sender:
        while order == "connection first" and not sender.listener.accepted:
            time.sleep(0.001)
        incoming = hub.incoming(TICKET.transfer) or started(hub)
        for layer in range(LAYERS):
            sender.end.send(frame(layer, 0, TOKENS))
        sender.end.finish(TOKENS)
        wait_for(incoming, layers=2)
        pieces = {piece.layer: piece for piece in incoming.take()}
        assert sender.end.state.name == "open"  # nothing is delivered before the engine has written it
        incoming.applied()
        assert str(sender.end.wait(PATIENCE_S)) == "delivered"
        assert sender.listener.accepted == 1
    assert sorted(pieces) == [0, 1]
    assert all(torch.equal(piece.k, -piece.v) and piece.k[0, 0, 0] == layer + 1 for layer, piece in pieces.items())
    assert settled(incoming) == ""


def test_nothing_comes_before_the_engine_has_blocks() -> None:
    hub = make_hub()
    hub.expect([inlet_of()], TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    with connected(hub) as sender:
        for layer in range(LAYERS):
            sender.end.send(frame(layer, 0, TOKENS))
        sender.end.finish(TOKENS)
        while not sender.endpoint.statistics()[0].connections:
            time.sleep(0.001)
        assert sender.end.wait(0.1).name == "open"
        assert sender.end.progress().bytes_acknowledged == 0
        assert incoming.take() == []
        incoming.start(0)
        wait_for(incoming, layers=2)
        hub.abort(TICKET.transfer, "enough")


def test_a_hello_that_is_none_closes_its_connection() -> None:
    hub = make_hub()
    for hello in (b"", b"x" * LINK_HELLO_BYTES, b"p2pKV/2\n"):
        near, far = socket.socketpair()
        hub.attach(hello, far)
        assert far.fileno() == -1
        near.close()


def test_what_arrived_before_an_abort_is_still_there_to_be_written() -> None:
    """`progress` counts it: blocks that are counted but never written would hold another request's KV."""
    hub = make_hub()
    incoming = started(hub)
    with connected(hub) as sender:
        for layer in range(LAYERS):
            sender.end.send(frame(layer, 0, 4))
        wait_for(incoming, layers=2)
        hub.abort(TICKET.transfer, "the prefill node was lost")
        assert incoming.outcome(0.0) == "the prefill node was lost"
        taken = {piece.layer: piece.start + len(piece.k) for piece in incoming.take()}
        assert min(taken.get(layer, 0) for layer in range(LAYERS)) == incoming.progress()[1] == 4
        assert "the prefill node was lost" in sender.end.wait(PATIENCE_S).reason


@pytest.mark.parametrize("how", ["cut", "hung up", "link closed"])
def test_what_a_broken_link_leaves_counts_as_far_as_all_layers_have_it(how: str) -> None:
    hub = make_hub(grace_s=0.3)
    incoming = started(hub)
    with connected(hub) as sender:
        sender.end.send(frame(0, 0, TOKENS))
        sender.end.send(frame(1, 0, 3))
        wait_for(incoming, layers=2)
        if how == "cut":
            sender.end._link.set_paths([])
            sender.listener.cut()
        elif how == "hung up":
            sender.endpoint.close("leaving")
        else:
            hub.carry_out(CloseLink(link=LINK.link, reason="the node at the other end is gone"))
        assert settled(incoming)
    assert incoming.progress()[1] == 3
    assert len(incoming.take()) == 2


def test_a_connection_that_is_cut_is_dialled_again_and_nothing_is_lost() -> None:
    hub = make_hub()
    incoming = started(hub)
    with connected(hub) as sender:
        sender.end.send(frame(0, 0, TOKENS))
        wait_for(incoming, layers=1)
        sender.listener.cut()
        sender.end.send(frame(1, 0, TOKENS))
        sender.end.finish(TOKENS)
        wait_for(incoming, layers=2)
        assert sorted(piece.layer for piece in incoming.take()) == [0, 1]
        incoming.applied()
        assert str(sender.end.wait(PATIENCE_S)) == "delivered"
        assert sender.listener.accepted >= 2


@pytest.mark.parametrize(("layers", "tokens"), [(1, TOKENS), (2, TOKENS - 1)])
def test_an_end_that_comes_too_early_is_a_failure_at_both_ends(layers: int, tokens: int) -> None:
    """An answer from KV of which a layer or a position is missing would be wrong without a sign of it."""
    hub = make_hub()
    incoming = started(hub)
    with connected(hub) as sender:
        for layer in range(layers):
            sender.end.send(frame(layer, 0, tokens))
        sender.end.finish(tokens)
        assert sender.end.wait(PATIENCE_S).name == "failed"
    assert "ended after" in (settled(incoming) or "")


@pytest.mark.parametrize("start", [2 * TOKENS, 4])
def test_positions_that_nobody_asked_for_are_a_failure(start: int) -> None:
    hub = make_hub()
    incoming = started(hub)
    with connected(hub) as sender:
        sender.end.send(frame(0, start, TOKENS))
        assert settled(incoming)
    assert incoming.take() == []


def test_kv_of_another_model_is_a_failure() -> None:
    hub = TransferHub(replace(SHARD, head_dim=128), LIMIT, Reports().tell)
    incoming = started(hub)
    with connected(hub) as sender:
        sender.end.send(frame(0, 0, TOKENS))
        assert "head_dim 64 for a model of head_dim 128" in (settled(incoming) or "")
        assert "head_dim" in sender.end.wait(PATIENCE_S).reason


def test_no_kv_before_the_deadline_is_a_failure() -> None:
    hub = make_hub()
    hub.expect([inlet_of()], TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    assert incoming.outcome(incoming._expires_at) is None
    assert "deadline" in (incoming.outcome(incoming._expires_at + 0.001) or "")


@pytest.mark.parametrize("ended", ["link closed", "aborted"])
def test_an_engine_that_has_blocks_too_late_is_told_so(ended: str) -> None:
    """`start` runs in the engine's thread: it must not raise there."""
    hub = make_hub()
    hub.expect([inlet_of()], TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    if ended == "aborted":
        hub.abort(TICKET.transfer, "stopped")
    else:
        hub.carry_out(CloseLink(link=LINK.link, reason="gone"))
        assert incoming._ends[0][1].wait(PATIENCE_S).name == "failed"
    incoming.start(0)
    assert settled(incoming)


def test_a_small_buffer_holds_what_it_may_and_stops_nothing() -> None:
    """The engine takes nothing for a while: what waits decoded stays within the bound, and all of it comes in time."""
    tokens, layers, limit = 256, 8, 300_000  # a layer has 262,144 bytes: one at a time
    hub = TransferHub(replace(SHARD, layers=range(layers)), limit, Reports().tell)
    assert limit < MIN_WINDOW_BYTES
    hub.expect([inlet_of(part=Slice(first_layer=0, last_layer=layers, first_head=0, last_head=HEADS))], tokens)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    incoming.start(0)
    with connected(hub) as sender:
        for layer in range(layers):
            sender.end.send(frame(layer, 0, tokens))
        sender.end.finish(tokens)
        wait_for(incoming, layers=1)
        arrived: list[LayerPiece] = []
        while len(arrived) < layers:
            wait_for(incoming, layers=1)
            assert incoming._held <= limit
            arrived += incoming.take()
        incoming.applied()
        assert str(sender.end.wait(PATIENCE_S)) == "delivered"
    assert sorted(piece.layer for piece in arrived) == list(range(layers))


# ---- sending ------------------------------------------------------------------------------------------------


@dataclass
class TwoHubs:
    """A sending and a receiving engine's hubs."""

    sender: TransferHub
    receiver: TransferHub
    listener: Listener
    reports: Reports

    def open(self, ticket: TransferTicket = TICKET, *, start: bool = True) -> tuple[Outgoing, Incoming]:
        self.receiver.expect([inlet_of(ticket)], TOKENS)
        incoming = self.receiver.incoming(ticket.transfer)
        assert incoming is not None
        if start:
            incoming.start(0)
        self.sender.send(outlet_of(self.listener.path, ticket=ticket), TOKENS)
        (outgoing,) = self.sender.outgoing(ticket.transfer)
        return outgoing, incoming

    def finish(self, outgoing: Outgoing, incoming: Incoming) -> TransferReport:
        """Both engines do their part."""
        for layer in range(LAYERS):
            outgoing.push(piece(layer, 0, TOKENS))
        outgoing.prefill_done(TOKENS, time.monotonic())
        wait_for(incoming, layers=LAYERS)
        incoming.take()
        incoming.applied()
        return self.reports.end(outgoing.ticket)


@contextmanager
def two_hubs(streams: int = 1, limit: int = LIMIT) -> Iterator[TwoHubs]:
    reports = Reports()
    sender, receiver = make_hub(reports, limit=limit), make_hub()
    with listening(into(receiver), streams) as listener:
        try:
            yield TwoHubs(sender, receiver, listener, reports)
        finally:
            for hub in (sender, receiver):
                hub._endpoint.close("the test is over")


def test_a_delivered_transfer_is_reported_with_its_figures() -> None:
    with two_hubs() as hubs:
        report = hubs.finish(*hubs.open())
        assert report.delivered
        assert report.reason == ""
        assert report.link == LINK.link
        assert report.frames == LAYERS
        assert report.raw_bytes == LAYERS * 2 * TOKENS * HEADS * HEAD_DIM * 4
        assert report.raw_bytes < report.wire_bytes < report.raw_bytes + 1000
        assert list(report.paths) == ["direct"]
        assert report.paths["direct"] >= report.raw_bytes
        assert report.resent_bytes == 0
        assert report.mode == "layerwise"
        assert 0 <= report.visible_s <= report.span_s
        assert hubs.sender.outgoing(TICKET.transfer) == ()
        assert hubs.sender._budget._held == 0
        hubs.sender._endpoint.check_integrity()


def test_transfers_of_a_link_share_its_connections() -> None:
    """One after the other, and two at once: nothing is dialled again."""
    with two_hubs(streams=3) as hubs:
        for seed in range(3):
            assert hubs.finish(*hubs.open(ticket_of(seed))).delivered
        one, two = hubs.open(ticket_of(10)), hubs.open(ticket_of(11))
        assert one[0].link is two[0].link
        assert hubs.finish(*two).delivered
        assert hubs.finish(*one).delivered
        hubs.sender._endpoint.check_integrity()
        assert hubs.listener.accepted <= 3
        assert len(hubs.sender._endpoint.statistics()) == 1
    assert len(hubs.reports.ends) == 5


def test_one_of_two_transfers_of_a_link_may_fail_alone() -> None:
    with two_hubs() as hubs:
        one, two = hubs.open(ticket_of(1)), hubs.open(ticket_of(2))
        hubs.receiver.abort(ticket_of(1).transfer, "the request was cancelled")
        assert "the request was cancelled" in hubs.reports.end(ticket_of(1)).reason
        assert hubs.finish(*two).delivered
    assert one[1].outcome(0.0) == "the request was cancelled"


def test_a_transfer_moves_to_other_paths() -> None:
    """Its first one leads nowhere."""
    with two_hubs() as hubs, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can be there
        nowhere = Path("127.0.0.1", taken.getsockname()[1], label="nowhere")
        incoming = started(hubs.receiver)
        hubs.sender.send(outlet_of(nowhere), TOKENS)
        (outgoing,) = hubs.sender.outgoing(TICKET.transfer)
        hubs.sender.carry_out(SetPaths(link=LINK.link, paths=(hubs.listener.path,)))
        report = hubs.finish(outgoing, incoming)
        assert report.delivered
        assert {label for label, size in report.paths.items() if size} == {"direct"}
        hubs.sender.carry_out(
            SetPaths(link=b"?" * 16, paths=(hubs.listener.path,))
        )  # of a link that is no more: no matter
        hubs.receiver.carry_out(
            SetPaths(link=LINK.link, paths=(hubs.listener.path,))
        )  # nor is it for the end that does not dial


def test_paths_that_are_set_before_the_link_is_open_are_taken() -> None:
    """An agent of a stage may be ahead of the step that opens the link."""
    with two_hubs() as hubs, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        incoming = started(hubs.receiver)
        hubs.sender.carry_out(SetPaths(link=LINK.link, paths=(hubs.listener.path,)))
        hubs.sender.send(outlet_of(Path("127.0.0.1", taken.getsockname()[1], label="nowhere")), TOKENS)
        (outgoing,) = hubs.sender.outgoing(TICKET.transfer)
        assert hubs.finish(outgoing, incoming).delivered


def test_a_transfer_of_what_is_there_already_has_not_failed() -> None:
    with two_hubs() as hubs:
        hubs.open(TICKET)
        hubs.receiver.decline(TICKET.transfer)
        report = hubs.reports.end(TICKET)
        assert (report.delivered, report.reason, report.raw_bytes) == (True, "", 0)
        assert hubs.receiver.incoming(TICKET.transfer) is None
        hubs.receiver.decline(TICKET.transfer)  # again is no matter


def test_who_receives_says_when_there_is_something_to_take() -> None:
    news = threading.Semaphore(0)
    with two_hubs() as hubs:
        hubs.receiver._on_news = news.release
        outgoing, incoming = hubs.open(TICKET)
        outgoing.push(piece(0, 0, TOKENS))
        assert news.acquire(timeout=PATIENCE_S)
        assert incoming.take()
        hubs.receiver.abort(TICKET.transfer, "the request was cancelled")
        assert news.acquire(timeout=PATIENCE_S)
        assert incoming.outcome(0.0)


def test_a_link_that_is_closed_ends_its_transfers_and_the_next_begins_anew() -> None:
    with two_hubs() as hubs:
        pairs = [hubs.open(ticket_of(seed)) for seed in (1, 2)]
        for outgoing, incoming in pairs:  # both ends know each other
            outgoing.push(piece(0, 0, TOKENS))
            wait_for(incoming, layers=1)
        hubs.sender.carry_out(CloseLink(link=LINK.link, reason="the node at the other end is gone"))
        for seed in (1, 2):
            report = hubs.reports.end(ticket_of(seed))
            assert not report.delivered
            assert "the node at the other end is gone" in report.reason
        for _, incoming in pairs:
            assert settled(incoming)
        assert hubs.finish(*hubs.open(ticket_of(3))).delivered
    assert len(hubs.reports.ends) == 3
    assert hubs.sender._budget._held == 0


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_a_link_whose_other_end_has_ended_is_made_anew(side: str) -> None:
    """Its lease is over at one end, which the other hears of; both then open it again under the same ticket."""
    with two_hubs() as hubs:
        assert hubs.finish(*hubs.open(ticket_of(1))).delivered
        ended, other = (hubs.receiver, hubs.sender) if side == "receiver" else (hubs.sender, hubs.receiver)
        watched = other._endpoint.link(LINK.link)
        ended._endpoint.forget(LINK.link, "nothing was sent for 600 s")
        assert watched is not None
        while watched.ended is None:
            time.sleep(0.005)
        assert hubs.finish(*hubs.open(ticket_of(2))).delivered


def test_a_ticket_serves_once() -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open()
        hubs.sender.send(outlet_of(hubs.listener.path), TOKENS)
        assert "has been used before" in hubs.reports.end(TICKET).reason
        with pytest.raises(TransferError):
            hubs.receiver.expect([inlet_of()], TOKENS)
        hubs.reports.ends.clear()
        assert hubs.finish(outgoing, incoming).delivered


def test_a_ticket_of_another_link_opens_nothing() -> None:
    other = issue_link(600.0, random.Random(2).randbytes)
    reports = Reports()
    hub = make_hub(reports)
    hub.send(outlet_of(Path("127.0.0.1", 1), link=other), TOKENS)
    report = reports.end(TICKET)
    assert not report.delivered
    assert "the ticket is for link" in report.reason
    with pytest.raises(TransferError, match="the ticket is for link"):
        hub.expect([inlet_of(link=issue_link(600.0, random.Random(3).randbytes))], TOKENS)
    assert hub.outgoing(TICKET.transfer) == ()
    assert hub.incoming(TICKET.transfer) is None
    hub._endpoint.close()


def test_a_sender_that_nobody_answers_reports_once() -> None:
    """The port is closed: at the deadline the report says so and the transfer is forgotten."""
    reports = Reports()
    ticket = ticket_of(deadline_s=0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hub = make_hub(reports)
        hub.send(outlet_of(Path("127.0.0.1", taken.getsockname()[1]), ticket=ticket), TOKENS)
        report = reports.end(ticket)  # although its prefill has not begun
        hub.abort(ticket.transfer, "late")
        hub._endpoint.close()
    assert not report.delivered
    assert report.reason
    assert len(reports.ends) == 1
    assert hub.outgoing(ticket.transfer) == ()


def test_what_the_receiver_gives_up_is_reported_before_its_prefill_begins() -> None:
    """The prompt may wait in the engine's queue for long; its gateway wants to know now."""
    with two_hubs() as hubs:
        outgoing, _ = hubs.open()
        hubs.receiver.abort(TICKET.transfer, "the request was cancelled")
        assert "the request was cancelled" in hubs.reports.end(TICKET).reason
        for layer in range(LAYERS):  # the engine learns of it only between two steps
            outgoing.push(piece(layer, 0, TOKENS))
        outgoing.prefill_done(TOKENS, time.monotonic())
        outgoing.abort("again")
        assert hubs.sender._budget._held == 0
    assert len(hubs.reports.ends) == 1


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_abort_is_reported_once_whenever_it_comes(when: str) -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open()
        if when != "before":
            outgoing.push(piece(0, 0, TOKENS))
        if when == "after":
            outgoing.push(piece(1, 0, TOKENS))
            outgoing.prefill_done(TOKENS, time.monotonic())
            wait_for(incoming, layers=2)
        hubs.sender.abort(TICKET.transfer, "the client has gone")
        report = hubs.reports.end(TICKET)
        assert not report.delivered
        assert report.reason == "the client has gone"
        if when == "after":  # all of it is there, and may be used
            assert incoming.outcome(0.0) == ""
            incoming.applied()
            assert settled(incoming) == ""
        else:
            assert "the client has gone" in (settled(incoming) or "")
        assert hubs.sender._budget._held == 0
    assert len(hubs.reports.ends) == 1


def test_a_link_that_cannot_keep_up_costs_the_transfer_and_not_the_engine() -> None:
    """`push` returns at once although nothing moves, and what is held stays within the bound."""
    one = piece(0, 0, TOKENS)
    with two_hubs(limit=3 * one.values.nbytes) as hubs:
        outgoing, _ = hubs.open(start=False)
        for layer in range(64):
            outgoing.push(piece(layer % 2, 0, TOKENS))
            assert hubs.sender._budget._held <= 3 * one.values.nbytes
        report = hubs.reports.end(TICKET)
        assert not report.delivered
        assert "the send buffer is full" in report.reason
        assert hubs.sender._budget._held == 0
    assert len(hubs.reports.ends) == 1


def test_kv_that_cannot_be_encoded_fails_its_transfer_and_names_the_place() -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(ticket := ticket_of(codec="kv4"))
        bad = values(1, TOKENS)
        bad[3, 1, 5] = float("nan")
        outgoing.push(LayerCopy(1, 0, CpuDevice().to_host(bad, values(1, TOKENS))))
        report = hubs.reports.end(ticket)
        assert not report.delivered
        assert "layer 1" in report.reason
        assert "layer 1" in (settled(incoming) or "")
        assert hubs.sender._budget._held == 0


def test_even_a_bug_in_an_encoder_ends_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway and the other engine would wait for the deadline otherwise."""

    def buggy(*args: object, **settings: object) -> None:
        raise ZeroDivisionError("a bug")

    logged: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", logged.append)
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open()
        monkeypatch.setattr(sending, "encode", buggy)
        outgoing.push(piece(0, 0, TOKENS))
        report = hubs.reports.end(TICKET)
        assert not report.delivered
        assert "a bug in the sending engine" in report.reason
        assert "a bug in the sending engine" in (settled(incoming) or "")
        assert hubs.sender._budget._held == 0
    assert [entry.exc_type for entry in logged] == [ZeroDivisionError]


def test_a_link_with_open_transfers_tells_how_it_gets_on_and_then_falls_silent() -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(start=False)
        for layer in range(LAYERS):
            outgoing.push(piece(layer, 0, TOKENS))
        size = outgoing.link.wire_bytes(0) + 2 * TOKENS * HEADS * HEAD_DIM * 4
        hubs.reports.until(
            lambda: any(report.blocked and report.waiting_bytes >= 2 * size for report in hubs.reports.links)
        )
        told = hubs.reports.links[-1]
        assert (told.link, told.transfers) == (LINK.link, 1)
        assert [path.label for path in told.paths] == ["direct"]
        assert told.paths[0].bytes_acknowledged == 0
        incoming.start(0)
        outgoing.prefill_done(TOKENS, time.monotonic())
        wait_for(incoming, layers=2)
        hubs.reports.until(
            lambda: (
                (last := hubs.reports.links[-1]).paths[0].bytes_acknowledged > 0
                and last.waiting_bytes == 0
                and not last.blocked
            )
        )
        incoming.take()
        incoming.applied()
        assert hubs.reports.end(TICKET).delivered
        assert not hubs.sender._sending.is_set()


# ---- parts of one prompt ------------------------------------------------------------------------------------


def heads_of(first: int, last: int) -> Slice:
    return Slice(first_layer=0, last_layer=LAYERS, first_head=first, last_head=last)


def test_what_the_receiver_has_already_is_not_sent() -> None:
    """It says so before anything leaves, and the rest is all that is encoded."""
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(start=False)
        incoming.start(6)
        report = hubs.finish(outgoing, incoming)
        assert report.delivered
        assert outgoing.first == 6
        assert report.raw_bytes == LAYERS * 2 * 2 * HEADS * HEAD_DIM * 4  # two of eight positions
        assert incoming.progress() == (1.0, 2)


def test_what_was_encoded_before_the_receiver_spoke_is_taken_as_far_as_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "CREDIT_WAIT_S", 0.0)
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(start=False)
        for layer in range(LAYERS):
            outgoing.push(piece(layer, 0, 4))
            outgoing.push(piece(layer, 4, TOKENS - 4))
        outgoing.prefill_done(TOKENS, time.monotonic())
        hubs.reports.until(lambda: any(report.waiting_bytes for report in hubs.reports.links))
        while outgoing.progress().frames < 2 * LAYERS:
            time.sleep(0.001)
        incoming.start(6)
        wait_for(incoming, layers=LAYERS)
        assert [(each.start, len(each.k)) for each in incoming.take()] == [(6, 2)] * LAYERS
        incoming.applied()
        assert hubs.reports.end(TICKET).delivered


def test_heads_that_come_from_two_senders_are_told_apart_and_all_awaited() -> None:
    """Each on a link of its own: the prompt is complete when both are, and what both have counts as prefix."""
    links = [issue_link(600.0, random.Random(seed).randbytes) for seed in (4, 5)]
    tickets = [TransferTicket(transfer=b"t" * 16, link=link.link, codec="raw", deadline_s=60.0) for link in links]
    parts = [heads_of(0, 1), heads_of(1, 2)]
    reports, hub = Reports(), make_hub()
    senders = [TransferHub(replace(SHARD, heads=part.heads), LIMIT, reports.tell) for part in parts]
    with listening(into(hub)) as listener:
        hub.expect([inlet_of(*each) for each in zip(tickets, links, parts, strict=True)], TOKENS)
        incoming = hub.incoming(b"t" * 16)
        assert incoming is not None
        incoming.start(0)
        ends: list[Outgoing] = []
        for sender, ticket, link, part in zip(senders, tickets, links, parts, strict=True):
            sender.send(outlet_of(listener.path, ticket=ticket, link=link, part=part), TOKENS)
            ends += sender.outgoing(ticket.transfer)
        for number, end in enumerate(ends):
            for layer in range(LAYERS):
                kv = values(layer, TOKENS)[:, :1] + 10 * number
                end.push(LayerCopy(layer, 0, CpuDevice().to_host(kv, -kv)))
            end.prefill_done(TOKENS, time.monotonic())
            wait_for(incoming, layers=(number + 1) * LAYERS)
            assert incoming.progress() == ((0.5, 0) if number == 0 else (1.0, TOKENS))
        pieces = incoming.take()
        assert sorted((each.layer, each.head) for each in pieces) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert all(each.k[0, 0, 0] == each.layer + 1 + 10 * each.head for each in pieces)
        incoming.applied()
        reports.until(lambda: len(reports.ends) == 2)
        assert all(report.delivered for report in reports.ends)
        for each in (hub, *senders):
            each._endpoint.close()


def test_one_sender_that_fails_ends_it_for_the_other() -> None:
    links = [issue_link(600.0, random.Random(seed).randbytes) for seed in (4, 5)]
    tickets = [TransferTicket(transfer=b"t" * 16, link=link.link, codec="raw", deadline_s=60.0) for link in links]
    parts = [heads_of(0, 1), heads_of(1, 2)]
    reports, sender, hub = Reports(), make_hub(), make_hub()
    sender._report = reports.tell
    with listening(into(hub)) as listener:
        hub.expect([inlet_of(*each) for each in zip(tickets, links, parts, strict=True)], TOKENS)
        incoming = hub.incoming(b"t" * 16)
        assert incoming is not None
        incoming.start(0)
        for ticket, link, part in zip(tickets, links, parts, strict=True):
            sender.send(outlet_of(listener.path, ticket=ticket, link=link, part=part), TOKENS)
        sender.outgoing(b"t" * 16)[0].abort("its worker is gone")
        reports.until(lambda: len(reports.ends) == 2)
        assert all("its worker is gone" in report.reason for report in reports.ends)
        assert "its worker is gone" in (settled(incoming) or "")
        for each in (hub, sender):
            each._endpoint.close()


def test_a_part_that_this_worker_does_not_hold_is_not_sent() -> None:
    reports = Reports()
    hub = make_hub(reports)
    hub.send(outlet_of(Path("127.0.0.1", 1), part=heads_of(1, 3)), TOKENS)
    assert "is not held by this worker" in reports.end(TICKET).reason
    assert hub.outgoing(TICKET.transfer) == ()
