"""Transfers inside an engine process: what has arrived is neither lost nor made up, whoever comes first."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from p2pserve.kernels.codec import Codec, encode, wire_dtype
from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.messages import KVFrame
from p2pserve.kvtransport.stream import SendStream
from p2pserve.kvtransport.testing import ticket_for_tests
from p2pserve.node.engine.protocol import TransferReport
from p2pserve.node.engine.transfers import MAX_EARLY, Geometry, Incoming, TransferHub

GEOMETRY = Geometry(layers=2, heads=2, head_dim=64, dtype=torch.float32)
TICKET = ticket_for_tests()
TOKENS = 8


def unexpected(report: TransferReport) -> None:
    raise AssertionError(f"nothing is being sent here: {report}")


def make_hub() -> TransferHub:
    return TransferHub(GEOMETRY, 1 << 20, unexpected)


def frame(layer: int, start: int, tokens: int) -> KVFrame:
    """KV whose every value tells its layer."""
    values = torch.full((tokens, GEOMETRY.heads, GEOMETRY.head_dim), float(layer + 1))
    dtype = wire_dtype(values.dtype)
    payload = encode(Codec.RAW, values, -values, start=start, layer=layer)
    return KVFrame(
        layer=layer,
        head_first=0,
        head_last=GEOMETRY.heads,
        start=start,
        tokens=tokens,
        codec=Codec.RAW.wire,
        dtype=dtype.wire,
        head_dim=GEOMETRY.head_dim,
        payload=payload,
    )


def wait_for(incoming: Incoming, *, layers: int) -> None:
    """Until this many layers are in the inbox, or it has failed."""
    with incoming._room:
        for _ in range(2000):  # nobody is woken for a new piece: the engine looks between two steps
            if len(incoming._inbox) >= layers or incoming._failure:
                return
            incoming._room.wait(0.005)
    raise AssertionError("nothing arrived")


@contextmanager
def connected(hub: TransferHub) -> Iterator[SendStream]:
    """The sender's end of a connection that the hub has been given."""
    near, far = socket.socketpair()
    hub.attach(TICKET.transfer, far)
    with SendStream(near, TICKET, timeout=5) as stream:
        yield stream


def settled(incoming: Incoming) -> str | None:
    """Its outcome, once its thread has ended."""
    for thread in threading.enumerate():
        if thread.name == f"kv-receive-{TICKET.transfer.hex()[:8]}":
            thread.join(5)
    return incoming.outcome(0.0)


@pytest.mark.parametrize("order", ["request first", "connection first"])
def test_a_connection_may_come_before_its_request(order: str) -> None:
    """The request waits for the engine thread, which may be in the middle of a long step."""
    hub = make_hub()
    if order == "request first":
        hub.expect(TICKET, TOKENS)
    with connected(hub) as sender:
        hub.expect(TICKET, TOKENS) if order == "connection first" else None
        incoming = hub.incoming(TICKET.transfer)
        assert incoming is not None
        for layer in range(GEOMETRY.layers):
            sender.send(frame(layer, 0, TOKENS))
        wait_for(incoming, layers=2)
        pieces = {piece.layer: piece for piece in incoming.take()}
        incoming.applied()
        sender.finish(TOKENS)
        assert str(sender.state) == "delivered"
    assert sorted(pieces) == [0, 1]
    assert all(torch.equal(piece.k, -piece.v) and piece.k[0, 0, 0] == layer + 1 for layer, piece in pieces.items())
    assert settled(incoming) == ""


def test_early_connections_are_bounded_and_one_per_transfer() -> None:
    hub = make_hub()
    pairs = [socket.socketpair() for _ in range(MAX_EARLY + 2)]
    transfers = [TICKET.transfer, TICKET.transfer, *(bytes([i]) * 16 for i in range(MAX_EARLY))]
    for transfer, (_, far) in zip(transfers, pairs, strict=True):
        hub.attach(transfer, far)
    closed = [i for i, (_, far) in enumerate(pairs) if far.fileno() == -1]
    assert closed == [0, 1]  # the second of one transfer at once, the oldest of all when there was no more room
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_second_connection_of_a_transfer_is_closed() -> None:
    hub = make_hub()
    hub.expect(TICKET, TOKENS)
    with connected(hub):
        near, far = socket.socketpair()
        hub.attach(TICKET.transfer, far)
        with near:
            near.settimeout(1)
            assert near.recv(1) == b""
        hub.abort(TICKET.transfer, "enough")


def test_what_arrived_before_an_abort_is_still_there_to_be_written() -> None:
    """`arrived_tokens` counts it: blocks that are counted but never written would hold another request's KV."""
    hub = make_hub()
    hub.expect(TICKET, TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    with connected(hub) as sender:
        for layer in range(GEOMETRY.layers):
            sender.send(frame(layer, 0, 4))
        wait_for(incoming, layers=2)
        hub.abort(TICKET.transfer, "the prefill node was lost")
        assert incoming.outcome(0.0) == "the prefill node was lost"
        taken = {piece.layer: piece.start + len(piece.k) for piece in incoming.take()}
        assert min(taken.get(layer, 0) for layer in range(GEOMETRY.layers)) == incoming.arrived_tokens() == 4


def test_what_a_cut_connection_leaves_counts_as_far_as_all_layers_have_it() -> None:
    hub = make_hub()
    hub.expect(TICKET, TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    with connected(hub) as sender:
        sender.send(frame(0, 0, TOKENS))
        sender.send(frame(1, 0, 3))
        wait_for(incoming, layers=2)
    assert settled(incoming)
    assert incoming.arrived_tokens() == 3
    assert len(incoming.take()) == 2


@pytest.mark.parametrize(("layers", "tokens"), [(1, TOKENS), (2, TOKENS - 1)])
def test_an_end_that_comes_too_early_is_a_failure_at_both_ends(layers: int, tokens: int) -> None:
    """An answer from KV of which a layer or a position is missing would be wrong without a sign of it."""
    hub = make_hub()
    hub.expect(TICKET, TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    with connected(hub) as sender:
        for layer in range(layers):
            sender.send(frame(layer, 0, tokens))
        with pytest.raises(TransferError):
            sender.finish(tokens)
    assert "ended after" in (settled(incoming) or "")


@pytest.mark.parametrize("start", [2 * TOKENS, 4])
def test_positions_that_nobody_asked_for_are_a_failure(start: int) -> None:
    hub = make_hub()
    hub.expect(TICKET, TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    with connected(hub) as sender:
        sender.send(frame(0, start, TOKENS))
        assert settled(incoming)
    assert incoming.take() == []


def test_no_kv_before_the_deadline_is_a_failure() -> None:
    hub = make_hub()
    hub.expect(TICKET, TOKENS)
    incoming = hub.incoming(TICKET.transfer)
    assert incoming is not None
    assert incoming.outcome(incoming._expires_at) is None
    assert "deadline" in (incoming.outcome(incoming._expires_at + 0.001) or "")


def test_a_sender_that_nobody_answers_reports_once() -> None:
    """The port is closed: the report says so and the transfer is forgotten."""
    reports: list[TransferReport] = []
    told = threading.Event()

    def note(report: TransferReport) -> None:
        reports.append(report)
        told.set()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can be there
        hub = TransferHub(GEOMETRY, 1 << 20, note)
        hub.send(ticket_for_tests(port=taken.getsockname()[1]))
        assert told.wait(5)
    hub.abort(TICKET.transfer, "late")
    assert [(report.delivered, bool(report.reason)) for report in reports] == [(False, True)]
    assert hub.outgoing(TICKET.transfer) is None
