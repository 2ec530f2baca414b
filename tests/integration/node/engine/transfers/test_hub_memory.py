"""What the sending end of a transfer holds: credit, host memory, and the blocks of its prompt."""

from __future__ import annotations

import random
import threading

import pytest

from p2pserve.kvtransport.wire.tickets import issue_link
from p2pserve.node.engine.settings import TRANSFER_DEFAULTS
from p2pserve.node.engine.transfers.host_buffer import SHARE
from p2pserve.node.engine.transfers.hub import TransferMemory

from .hubs import (
    LAYERS,
    LINK,
    ROW_BYTES,
    TICKET,
    TOKENS,
    WAIT_LIMIT_S,
    Read,
    TwoHubs,
    assert_nothing_is_held,
    blocks_for,
    inlet_of,
    listening,
    make_hub,
    outlet_of,
    path_to_nowhere,
    slots_of,
    started,
    ticket_of,
    two_hubs,
    until,
    wait_for,
)

SMALL = 1 << 20  # a host buffer for four windows of 256 positions
WINDOW_TOKENS = 256
STALLED = TransferMemory(host_bytes=SMALL, staged_bytes=WINDOW_TOKENS * ROW_BYTES)  # takes one window, then no more


def test_nothing_is_read_before_the_receiver_has_a_place_for_it() -> None:
    """The link tells all the same how much waits; and falls silent when nothing does."""
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(start=False)
        hubs.announce(outgoing)
        size = LAYERS * TOKENS * ROW_BYTES
        hubs.reports.until(
            lambda: any(report.blocked and report.waiting_bytes >= size for report in hubs.reports.links)
        )
        assert hubs.cache.reads == []
        assert hubs.sender.memory_in_use.host_bytes == 0
        assert not outgoing.is_granted
        progress = outgoing.progress()
        assert (progress.frames, progress.bytes_queued, progress.bytes_acknowledged) == (0, size, 0)
        told = hubs.reports.links[-1]
        assert (told.link, told.transfers) == (LINK.link, 1)
        assert [path.label for path in told.paths] == ["direct"]
        hubs.receiver.start(incoming, 0, slots_of)
        wait_for(incoming, pieces=LAYERS)
        hubs.reports.until(
            lambda: (
                (last := hubs.reports.links[-1]).paths[0].bytes_acknowledged > 0
                and last.waiting_bytes == 0
                and not last.blocked
            )
        )
        hubs.prefill_done(outgoing)
        assert hubs.receive(outgoing, incoming).delivered
        said = len(hubs.reports.links)
        threading.Event().wait(3 * TRANSFER_DEFAULTS.report_s)
        assert len(hubs.reports.links) <= said + 1  # one may have been under way


def test_a_link_without_a_connection_is_not_blocked_by_its_receiver() -> None:
    """It is the path that leads nowhere: another one must be found."""
    with two_hubs() as hubs, path_to_nowhere() as nowhere:
        started(hubs.receiver)
        hubs.sender.send(outlet_of(nowhere), TOKENS)
        (outgoing,) = hubs.sender.outgoing(TICKET.transfer)
        hubs.announce(outgoing)
        hubs.reports.until(lambda: len(hubs.reports.links) >= 3)
        assert not any(report.blocked for report in hubs.reports.links)
        assert hubs.reports.links[-1].waiting_bytes == LAYERS * TOKENS * ROW_BYTES
        assert hubs.cache.reads == []


def test_what_the_receiver_has_already_is_neither_read_nor_sent() -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(start=False)
        hubs.receiver.start(incoming, 6, slots_of)
        report = hubs.finish(outgoing, incoming, first=6)
        assert report.delivered
        assert report.raw_bytes == hubs.cache.bytes_read == LAYERS * 2 * ROW_BYTES  # two of eight positions
        assert incoming.progress() == (1.0, 2)


def test_a_link_that_cannot_keep_up_holds_its_transfer_back_and_gives_nothing_up() -> None:
    """The cache is read as far as the host buffer has room for it; when the receiver goes on, all is delivered."""
    tokens = 4096
    with two_hubs(tokens=tokens, host_bytes=SMALL, receiver=STALLED) as hubs:
        outgoing, incoming = hubs.open()
        ahead: list[int] = []

        def measure(read: Read) -> None:
            assert hubs.sender.memory_in_use.host_bytes <= SMALL
            ahead.append(hubs.cache.bytes_read + read.nbytes - outgoing.progress().bytes_acknowledged)

        hubs.cache.on_read = measure
        hubs.announce(outgoing)
        hubs.prefill_done(outgoing)
        hubs.reports.until(
            lambda: any(
                report.blocked and report.waiting_bytes and any(path.bytes_acknowledged for path in report.paths)
                for report in hubs.reports.links
            )
        )
        assert hubs.reports.ends == []
        assert 0 < hubs.cache.bytes_read < LAYERS * tokens * ROW_BYTES
        assert hubs.receive(outgoing, incoming).delivered
        assert len(ahead) == LAYERS * tokens // WINDOW_TOKENS
        assert max(ahead) <= SMALL
        assert_nothing_is_held(hubs.sender)


def test_a_receiver_that_has_stopped_taking_does_not_hold_up_those_of_others() -> None:
    tokens = 4096
    other = issue_link(600.0, random.Random(9).randbytes)
    ticket = ticket_of(7, link=other)
    with two_hubs(tokens=tokens, host_bytes=SMALL, receiver=STALLED) as hubs:
        outgoing, stalled = hubs.open()
        hubs.announce(outgoing)
        until(lambda: hubs.sender.memory_in_use.host_bytes == SMALL - SMALL // SHARE)
        receiver = make_hub()
        with listening(receiver) as listener:
            wanted = started(receiver, inlet_of(ticket, other), tokens=tokens)
            hubs.sender.send(outlet_of(listener.path, ticket=ticket, link=other), tokens)
            (also,) = hubs.sender.outgoing(ticket.transfer)
            hubs.announce(also)
            hubs.prefill_done(also)
            assert hubs.receive(also, wanted).delivered
            receiver.endpoint.close()
        assert stalled.outcome(0.0) is None
        hubs.prefill_done(outgoing)
        assert hubs.receive(outgoing, stalled).delivered
        assert_nothing_is_held(hubs.sender)


def lose_blocks(hubs: TwoHubs) -> int:
    """The prompt's blocks go to another request, and it is computed again in others. Returns the first of those."""
    old = blocks_for(hubs.tokens)
    hubs.cache.reuse(old)
    hubs.cache.fill(blocks_for(hubs.tokens, len(old)), hubs.tokens)
    return len(old)


def test_blocks_that_are_withdrawn_in_the_middle_of_a_window_are_not_read_any_more() -> None:
    """The window that is being read is waited for. What it has read counts, the rest comes from other blocks, and an
    end that was announced before is void."""
    tokens = 4 * WINDOW_TOKENS
    with two_hubs(tokens=tokens, host_bytes=SMALL) as hubs:
        outgoing, incoming = hubs.open()
        reading, go_on = threading.Event(), threading.Event()

        def pause(read: Read) -> None:
            if read.first == WINDOW_TOKENS and not reading.is_set():
                reading.set()
                assert go_on.wait(WAIT_LIMIT_S)

        hubs.cache.on_read = pause
        hubs.announce(outgoing)
        hubs.prefill_done(outgoing)
        assert reading.wait(WAIT_LIMIT_S)
        model = threading.Thread(target=outgoing.withdraw)
        model.start()
        until(lambda: outgoing.withdrawals == 1)
        assert model.is_alive()
        go_on.set()
        model.join(WAIT_LIMIT_S)
        assert not model.is_alive()
        assert [(read.layer, read.last) for read in hubs.cache.reads] == [(0, WINDOW_TOKENS), (0, 2 * WINDOW_TOKENS)]
        new = lose_blocks(hubs)
        hubs.announce(outgoing, first_block=new)
        until(lambda: hubs.cache.bytes_read == LAYERS * tokens * ROW_BYTES)
        assert {read.block_ids[0] for read in hubs.cache.reads[2:]} == {new}
        wait_for(incoming, pieces=LAYERS * tokens // WINDOW_TOKENS)
        assert (incoming.outcome(0.0), hubs.reports.ends) == (None, [])  # the end has not been said
        hubs.prefill_done(outgoing)
        assert hubs.receive(outgoing, incoming).delivered
        assert_nothing_is_held(hubs.sender)


@pytest.mark.parametrize("when", ["before credit", "after all was read"])
def test_a_prompt_that_is_computed_again_is_delivered_once(when: str) -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(start=when != "before credit")
        hubs.announce(outgoing)
        hubs.prefill_done(outgoing)
        if when != "before credit":
            until(lambda: incoming.outcome(0.0) == "")
        outgoing.withdraw()
        new = lose_blocks(hubs)
        hubs.announce(outgoing, first_block=new)
        hubs.prefill_done(outgoing)
        hubs.receiver.start(incoming, 0, slots_of)
        assert hubs.receive(outgoing, incoming).delivered
        assert {read.block_ids[0] for read in hubs.cache.reads} == {new if when == "before credit" else 0}
        assert len(hubs.cache.reads) == LAYERS


def test_a_transfer_without_credit_gives_way_and_one_that_has_it_does_not() -> None:
    with two_hubs() as hubs:
        _, (sends, incoming) = hubs.open(ticket_of(1), start=False), hubs.open(ticket_of(2))
        until(lambda: sends.is_granted)
        for ticket in (ticket_of(1), ticket_of(2), ticket_of(3)):  # the third is not known
            hubs.sender.abort_unless_granted(ticket.transfer)
        assert "the receiver has no place for it" in hubs.reports.end(ticket_of(1)).reason
        assert hubs.sender.outgoing(ticket_of(1).transfer) == ()
        assert hubs.finish(sends, incoming).delivered
    assert len(hubs.reports.ends) == 2


@pytest.mark.parametrize("how", ["abort", "deadline", "the receiver gives up"])
def test_a_transfer_that_holds_much_gives_it_all_back_when_it_ends(how: str) -> None:
    """Its thread waits for room in the host buffer: it hears of the end there."""
    ticket = ticket_of(deadline_s=1.0 if how == "deadline" else 60.0)
    with two_hubs(tokens=4096, host_bytes=SMALL, receiver=STALLED) as hubs:
        outgoing, _ = hubs.open(ticket)
        hubs.announce(outgoing)
        if how != "deadline":
            until(lambda: hubs.sender.memory_in_use.host_bytes == SMALL - SMALL // SHARE)
            (hubs.sender if how == "abort" else hubs.receiver).abort(ticket.transfer, "the client has gone")
        report = hubs.reports.end(ticket)
        assert not report.delivered
        assert how == "deadline" or "the client has gone" in report.reason
        assert report.reason
        assert_nothing_is_held(hubs.sender)
        assert hubs.sender.outgoing(ticket.transfer) == ()
    assert len(hubs.reports.ends) == 1
