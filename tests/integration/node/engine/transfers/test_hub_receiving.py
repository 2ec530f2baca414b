"""Transfers into an engine process: what has arrived is neither lost nor made up, whoever comes first, and what waits
stays within its bounds."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch

from p2pserve.kernels.codec import encode, wire_dtype
from p2pserve.kernels.raw import RAW
from p2pserve.kvtransport.link.endpoint import Endpoint
from p2pserve.kvtransport.link.receiving import MIN_WINDOW_BYTES
from p2pserve.kvtransport.link.send_link import OutgoingTransfer as SendingEnd
from p2pserve.kvtransport.link.send_link import SendLink
from p2pserve.kvtransport.wire.channel import LINK_HELLO_BYTES
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.tickets import TransferTicket
from p2pserve.node.engine.protocol import CloseLink
from p2pserve.node.engine.settings import TransferSettings
from p2pserve.node.engine.transfers.hub import TransferHub, transfer_memory
from p2pserve.node.engine.transfers.incoming import LayerKv
from p2pserve.node.engine.vllm.device import DeviceKind

from .hubs import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    LINK,
    ROW_BYTES,
    SHARD,
    TICKET,
    TOKENS,
    WAIT_LIMIT_S,
    Listener,
    assert_arrived_once,
    expected,
    expected_keys,
    inlet_of,
    listening,
    make_hub,
    receive_rest,
    settled,
    slots_of,
    started,
    take_all,
    ticket_of,
    until,
    wait_for,
)

pytestmark = pytest.mark.beside


def frame(layer: int, start: int, tokens: int) -> KVFrame:
    keys = expected_keys(layer, start, start + tokens)
    return KVFrame(
        layer=layer,
        head_first=0,
        head_last=HEADS,
        start=start,
        tokens=tokens,
        codec=RAW.wire,
        dtype=wire_dtype(keys.dtype).wire,
        head_dim=HEAD_DIM,
        payload=encode(RAW, keys, -keys, start=start, layer=layer),
    )


@dataclass
class Sender:
    """The far end of the link that a hub receives on."""

    endpoint: Endpoint
    link: SendLink
    listener: Listener

    def open(self, ticket: TransferTicket = TICKET) -> SendingEnd:
        return self.link.open(ticket)


@contextmanager
def connected(hub: TransferHub) -> Iterator[Sender]:
    with listening(hub) as listener, Endpoint() as endpoint:
        yield Sender(endpoint, endpoint.open_sender(LINK, [listener.path]), listener)
    hub.endpoint.close("the test is over")


def send_all(end: SendingEnd, tokens: int = TOKENS, layers: int = LAYERS) -> None:
    for layer in range(layers):
        end.send(frame(layer, 0, tokens))
    end.finish(tokens)


@pytest.mark.parametrize("order", ["request first", "connection first"])
def test_a_connection_may_come_before_its_request(order: str) -> None:
    """The request waits for the engine thread, which may be in the middle of a long step."""
    hub = make_hub()
    if order == "request first":
        started(hub)
    with connected(hub) as sender:
        end = sender.open()
        until(lambda: order == "request first" or sender.listener.accepted)
        incoming = hub.incoming(TICKET.transfer) or started(hub)
        send_all(end)
        pieces = receive_rest(incoming)
        assert end.state.name == "open"  # nothing is delivered before the engine has written it
        incoming.confirm_applied()
        assert str(end.wait(WAIT_LIMIT_S)) == "delivered"
        assert sender.listener.accepted == 1
    assert_arrived_once(pieces, TOKENS)
    assert settled(incoming) == ""


@pytest.mark.parametrize("room", ["enough", "short"])
def test_the_engine_is_told_when_all_has_come_or_much(room: str) -> None:
    """It makes steps then, which keep the threads that decode from the interpreter."""
    told: list[int] = []
    staged = TOKENS * ROW_BYTES * (2 * LAYERS if room == "enough" else 2) + 1
    hub = make_hub(staged_bytes=staged, on_news=lambda: told.append(incoming.waiting_pieces))
    incoming = started(hub)
    with connected(hub) as sender:
        end = sender.open()
        end.send(frame(0, 0, TOKENS))
        wait_for(incoming, pieces=1)
        end.send(frame(1, 0, TOKENS))
        wait_for(incoming, pieces=2)
        until(lambda: told or room == "enough")
        assert told == ([] if room == "enough" else [2])
        end.finish(TOKENS)
        until(lambda: incoming.outcome(0.0) is not None)
        until(lambda: told)
        assert told == ([2] if room == "enough" else [2, 2])
        assert len(take_all(incoming)) == LAYERS
        incoming.confirm_applied()
        assert str(end.wait(WAIT_LIMIT_S)) == "delivered"


def test_nothing_comes_before_the_engine_has_blocks() -> None:
    hub = make_hub()
    incoming = expected(hub)
    with connected(hub) as sender:
        end = sender.open()
        send_all(end)
        until(lambda: sender.endpoint.statistics()[0].paths)
        assert end.wait(0.1).name == "open"
        assert end.progress().bytes_acknowledged == 0
        assert incoming.take() is None
        assert not incoming.waiting_pieces
        hub.start(incoming, 0, slots_of)
        wait_for(incoming, pieces=2)
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
        end = sender.open()
        for layer in range(LAYERS):
            end.send(frame(layer, 0, 4))
        wait_for(incoming, pieces=2)
        hub.abort(TICKET.transfer, "the prefill node was lost")
        assert incoming.outcome(0.0) == "the prefill node was lost"
        taken = {piece.layer: piece.start + len(piece.k) for piece in take_all(incoming)}
        assert min(taken.get(layer, 0) for layer in range(LAYERS)) == incoming.progress()[1] == 4
        assert "the prefill node was lost" in end.wait(WAIT_LIMIT_S).reason


@pytest.mark.parametrize("how", ["cut", "hung up", "link closed"])
def test_what_a_broken_link_leaves_counts_as_far_as_all_layers_have_it(how: str) -> None:
    hub = make_hub(grace_s=0.3)
    incoming = started(hub)
    with connected(hub) as sender:
        end = sender.open()
        end.send(frame(0, 0, TOKENS))
        end.send(frame(1, 0, 3))
        wait_for(incoming, pieces=2)
        if how == "cut":
            sender.link.set_paths([])
            sender.listener.cut()
        elif how == "hung up":
            sender.endpoint.close("leaving")
        else:
            hub.carry_out(CloseLink(link=LINK.link, reason="the node at the other end is gone"))
        assert settled(incoming)
    assert incoming.progress()[1] == 3
    assert len(take_all(incoming)) == 2


def test_a_connection_that_is_cut_is_dialled_again_and_nothing_is_lost() -> None:
    hub = make_hub()
    incoming = started(hub)
    with connected(hub) as sender:
        end = sender.open()
        end.send(frame(0, 0, TOKENS))
        wait_for(incoming, pieces=1)
        sender.listener.cut()
        end.send(frame(1, 0, TOKENS))
        end.finish(TOKENS)
        assert_arrived_once(receive_rest(incoming), TOKENS)
        incoming.confirm_applied()
        assert str(end.wait(WAIT_LIMIT_S)) == "delivered"
        assert sender.listener.accepted >= 2


@pytest.mark.parametrize(("layers", "tokens"), [(1, TOKENS), (2, TOKENS - 1)])
def test_an_end_that_comes_too_early_is_a_failure_at_both_ends(layers: int, tokens: int) -> None:
    """An answer from KV of which a layer or a position is missing would be wrong without a sign of it."""
    hub = make_hub()
    incoming = started(hub)
    with connected(hub) as sender:
        end = sender.open()
        send_all(end, tokens, layers)
        assert end.wait(WAIT_LIMIT_S).name == "failed"
    assert "ended after" in (settled(incoming) or "")


@pytest.mark.parametrize("start", [2 * TOKENS, 4])
def test_positions_that_nobody_asked_for_are_a_failure(start: int) -> None:
    hub = make_hub()
    incoming = started(hub)
    with connected(hub) as sender:
        sender.open().send(frame(0, start, TOKENS))
        assert settled(incoming)
    assert incoming.take() is None
    assert hub.memory_in_use.staged_bytes == 0


def test_kv_of_another_model_is_a_failure() -> None:
    hub = make_hub(shard=replace(SHARD, head_dim=128))
    incoming = started(hub)
    with connected(hub) as sender:
        end = sender.open()
        end.send(frame(0, 0, TOKENS))
        assert "head_dim 64 for a model of head_dim 128" in (settled(incoming) or "")
        assert "head_dim" in end.wait(WAIT_LIMIT_S).reason
    assert hub.memory_in_use.staged_bytes == 0


def test_what_was_cut_before_the_receiver_spoke_is_taken_as_far_as_it_is_wanted() -> None:
    hub = make_hub()
    incoming = expected(hub)
    with connected(hub) as sender:
        end = sender.open()
        for layer in range(LAYERS):
            end.send(frame(layer, 0, 4))
            end.send(frame(layer, 4, TOKENS - 4))
        end.finish(TOKENS)
        hub.start(incoming, 6, slots_of)
        assert_arrived_once(receive_rest(incoming), TOKENS, first=6)
        assert incoming.progress() == (1.0, 2)
        incoming.confirm_applied()
        assert str(end.wait(WAIT_LIMIT_S)) == "delivered"
    assert hub.memory_in_use.staged_bytes == 0


def test_no_kv_before_the_deadline_is_a_failure() -> None:
    incoming = expected(make_hub())
    assert incoming.outcome(incoming.deadline) is None
    assert "deadline" in (incoming.outcome(incoming.deadline + 0.001) or "")


@pytest.mark.parametrize("ended", ["link closed", "aborted"])
def test_an_engine_that_has_blocks_too_late_is_told_so(ended: str) -> None:
    """`start` runs in the engine's thread: it must not raise there."""
    hub = make_hub()
    incoming = expected(hub)
    if ended == "aborted":
        hub.abort(TICKET.transfer, "stopped")
    else:
        link = hub.endpoint.link(LINK.link)
        assert link is not None
        hub.carry_out(CloseLink(link=LINK.link, reason="gone"))
        until(lambda: link.ended is not None)
    hub.start(incoming, 0, slots_of)
    assert settled(incoming)


def test_a_device_without_memory_left_fails_the_transfer_at_once() -> None:
    """Not at its deadline: until then the prompt would wait for KV that nobody decodes."""

    def find_slots(first: int, last: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hub = make_hub()
    incoming = expected(hub)
    hub.start(incoming, 0, find_slots)
    with connected(hub) as sender:
        end = sender.open()
        end.send(frame(0, 0, TOKENS))
        assert "CUDA out of memory" in end.wait(WAIT_LIMIT_S).reason
        assert settled(incoming) == "CUDA out of memory"
    assert hub.memory_in_use.staged_bytes == 0


# ---- bounds -------------------------------------------------------------------------------------------------


def test_what_is_decoded_takes_little_of_a_gpu_whatever_the_box_has() -> None:
    much = 1 << 30
    assert transfer_memory(much, "cpu", TransferSettings()).staged_bytes == much
    assert transfer_memory(much, "cuda", TransferSettings()).staged_bytes == TransferSettings().gpu_staged_bytes
    assert transfer_memory(1 << 20, "cuda", TransferSettings()).staged_bytes == 1 << 20
    assert {transfer_memory(much, kind, TransferSettings()).host_bytes for kind in get_args(DeviceKind)} == {much}


def test_what_all_transfers_may_send_ahead_stays_within_the_host_memory() -> None:
    """A transfer has a quarter of it, or what others have left; a chunk it has always, or it could never come."""
    limit = 8 << 20
    hub = make_hub(host_bytes=limit)
    incoming = [started(hub, inlet_of(ticket_of(seed))) for seed in range(6)]
    assert [each.window_bytes for each in incoming] == [limit // 4] * 4 + [MIN_WINDOW_BYTES] * 2
    for each in incoming[:2]:
        hub.abort(each.transfer, "the request was cancelled")
        hub.close_incoming(each.transfer)
    late = started(hub, inlet_of(ticket_of(6)))
    windows = [each.window_bytes for each in (*incoming[2:], late)]
    assert late.window_bytes > MIN_WINDOW_BYTES
    assert sum(windows) == limit
    hub.start(late, 0, slots_of)  # again is no matter
    assert windows == [each.window_bytes for each in (*incoming[2:], late)]
    hub.endpoint.close()


def test_a_small_staging_area_holds_what_it_may_and_stops_nothing() -> None:
    """The engine takes nothing for a while: what waits decoded stays within the bound, of all transfers together, and
    all of it comes in time."""
    tokens = 256
    limit = tokens * ROW_BYTES * 3 // 2  # one layer at a time
    hub = make_hub(host_bytes=1 << 20, staged_bytes=limit)
    tickets = [ticket_of(seed) for seed in range(3)]
    incoming = [started(hub, inlet_of(ticket), tokens=tokens) for ticket in tickets]
    arrived: dict[bytes, list[LayerKv]] = {each.transfer: [] for each in incoming}
    with connected(hub) as sender:
        ends = [sender.open(ticket) for ticket in tickets]
        for end in ends:
            send_all(end, tokens)
        for _ in itertools.repeat(None, LAYERS * len(ends)):
            until(lambda: any(each.waiting_pieces for each in incoming))
            assert sum(each.waiting_pieces for each in incoming) * tokens * ROW_BYTES <= limit
            assert hub.memory_in_use.staged_bytes <= limit
            (full,) = [each for each in incoming if each.waiting_pieces]
            piece = full.take()
            assert piece is not None
            arrived[full.transfer].append(piece)
        for each, end in zip(incoming, ends, strict=True):
            assert_arrived_once(arrived[each.transfer], tokens)
            until(lambda: each.outcome(0.0) == "")  # noqa: B023 (it is waited for here)
            each.confirm_applied()
            assert str(end.wait(WAIT_LIMIT_S)) == "delivered"
    assert hub.memory_in_use.staged_bytes == 0


def test_what_nobody_takes_any_more_gives_its_room_to_others() -> None:
    tokens = 256
    hub = make_hub(staged_bytes=tokens * ROW_BYTES)
    one, two = ticket_of(1), ticket_of(2)
    given_up = started(hub, inlet_of(one), tokens=tokens)
    with connected(hub) as sender:
        send_all(sender.open(one), tokens)
        wait_for(given_up, pieces=1)
        wanted = started(hub, inlet_of(two), tokens=tokens)
        send_all(sender.open(two), tokens)
        hub.abort(one.transfer, "the request was cancelled")
        hub.close_incoming(one.transfer)
        assert_arrived_once(receive_rest(wanted), tokens)
        assert settled(given_up) == "the request was cancelled"
    assert not given_up.waiting_pieces
    assert hub.memory_in_use.staged_bytes == 0
