"""Transfers out of an engine process: the paged cache is read when the receiver and the link let it, never from blocks
that were withdrawn, and every transfer is reported once, however it ends."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.link.dialling import DialPath
from p2pserve.kvtransport.wire.tickets import TransferTicket, issue_link
from p2pserve.node.engine.protocol import CloseLink, SetLinkPaths
from p2pserve.node.engine.transfers import outgoing as sending
from p2pserve.node.engine.transfers.host_buffer import SHARE
from p2pserve.node.engine.transfers.hub import TransferMemory
from p2pserve.node.engine.transfers.outgoing import Prefilled, PromptSender

from .hubs import (
    HEADS,
    LAYERS,
    LINK,
    PATIENCE_S,
    ROW_BYTES,
    SHARD,
    TICKET,
    TOKENS,
    PagedCache,
    Read,
    Reports,
    TwoHubs,
    assert_arrived_once,
    assert_nothing_is_held,
    blocks_for,
    heads_of,
    inlet_of,
    listening,
    make_hub,
    outlet_of,
    path_to_nowhere,
    receive_rest,
    settled,
    slots_of,
    started,
    ticket_of,
    two_hubs,
    until,
    wait_for,
)

pytestmark = pytest.mark.beside

SMALL = 1 << 20  # a host buffer for four windows of 256 positions
WINDOW_TOKENS = 256
STALLED = TransferMemory(host_bytes=SMALL, staged_bytes=WINDOW_TOKENS * ROW_BYTES)  # takes one window, then no more


def test_a_delivered_transfer_is_reported_with_its_figures() -> None:
    with two_hubs() as hubs:
        report = hubs.finish(*hubs.open())
        assert report.delivered
        assert report.reason == ""
        assert report.link == LINK.link
        assert report.frames == LAYERS
        assert report.raw_bytes == LAYERS * TOKENS * ROW_BYTES
        assert report.raw_bytes < report.wire_bytes < report.raw_bytes + 1000
        assert list(report.paths) == ["direct"]
        assert report.paths["direct"] >= report.raw_bytes
        assert report.resent_bytes == 0
        assert report.mode == "layerwise"
        assert 0 <= report.visible_s <= report.span_s
        assert hubs.sender.outgoing(TICKET.transfer) == ()
        assert_nothing_is_held(hubs.sender)


def test_transfers_of_a_link_share_its_connections() -> None:
    """One after the other, and two at once: nothing is dialled again."""
    with two_hubs(streams=3) as hubs:
        for seed in range(3):
            assert hubs.finish(*hubs.open(ticket_of(seed))).delivered
        one, two = hubs.open(ticket_of(10)), hubs.open(ticket_of(11))
        assert one[0].link is two[0].link
        assert hubs.finish(*two).delivered
        assert hubs.finish(*one).delivered
        assert_nothing_is_held(hubs.sender)
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


def test_layers_that_are_announced_as_they_are_computed_are_sent_once() -> None:
    """In steps of a chunked prefill, some of them announced again when the step ends."""
    with two_hubs(tokens=600) as hubs:
        outgoing, incoming = hubs.open()
        for last in (100, 350, 600):
            for layer in SHARD.layers:
                hubs.announce(outgoing, last, layers=range(layer, layer + 1))
            hubs.announce(outgoing, last, layers=range(SHARD.layers.stop + 3))  # the last three are not of this end
        hubs.prefill_done(outgoing)
        assert hubs.receive(outgoing, incoming).delivered
        assert hubs.cache.bytes_read == LAYERS * 600 * ROW_BYTES


# ---- paths and links ----------------------------------------------------------------------------------------


def test_a_transfer_moves_to_other_paths() -> None:
    """Its first one leads nowhere."""
    with two_hubs() as hubs, path_to_nowhere() as nowhere:
        incoming = started(hubs.receiver)
        hubs.sender.send(outlet_of(nowhere), TOKENS)
        (outgoing,) = hubs.sender.outgoing(TICKET.transfer)
        hubs.sender.carry_out(SetLinkPaths(link=LINK.link, paths=(hubs.listener.path,)))
        report = hubs.finish(outgoing, incoming)
        assert report.delivered
        assert {label for label, size in report.paths.items() if size} == {"direct"}
        # Of a link that is no more: no matter. Nor is it for the end that does not dial.
        hubs.sender.carry_out(SetLinkPaths(link=b"?" * 16, paths=(hubs.listener.path,)))
        hubs.receiver.carry_out(SetLinkPaths(link=LINK.link, paths=(hubs.listener.path,)))


def test_paths_that_are_set_before_the_link_is_open_are_taken() -> None:
    """An agent of a stage may be ahead of the step that opens the link."""
    with two_hubs() as hubs, path_to_nowhere() as nowhere:
        incoming = started(hubs.receiver)
        hubs.sender.carry_out(SetLinkPaths(link=LINK.link, paths=(hubs.listener.path,)))
        hubs.sender.send(outlet_of(nowhere), TOKENS)
        (outgoing,) = hubs.sender.outgoing(TICKET.transfer)
        assert hubs.finish(outgoing, incoming).delivered


def test_a_link_that_is_closed_ends_its_transfers_and_the_next_begins_anew() -> None:
    with two_hubs() as hubs:
        pairs = [hubs.open(ticket_of(seed)) for seed in (1, 2)]
        for outgoing, incoming in pairs:  # both ends know each other
            hubs.announce(outgoing, layers=range(1))
            wait_for(incoming, pieces=1)
        hubs.sender.carry_out(CloseLink(link=LINK.link, reason="the node at the other end is gone"))
        for seed in (1, 2):
            report = hubs.reports.end(ticket_of(seed))
            assert not report.delivered
            assert "the node at the other end is gone" in report.reason
        for _, incoming in pairs:
            assert settled(incoming)
        assert hubs.finish(*hubs.open(ticket_of(3))).delivered
        assert_nothing_is_held(hubs.sender)
    assert len(hubs.reports.ends) == 3


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_a_link_whose_other_end_has_ended_is_made_anew(side: str) -> None:
    """Its lease is over at one end, which the other hears of; both then open it again under the same ticket."""
    with two_hubs() as hubs:
        assert hubs.finish(*hubs.open(ticket_of(1))).delivered
        ended, other = (hubs.receiver, hubs.sender) if side == "receiver" else (hubs.sender, hubs.receiver)
        watched = other._endpoint.link(LINK.link)
        ended._endpoint.forget(LINK.link, "nothing was sent for 600 s")
        assert watched is not None
        until(lambda: watched.ended is not None)
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
    hub.send(outlet_of(DialPath("127.0.0.1", 1), link=other), TOKENS)
    report = reports.end(TICKET)
    assert not report.delivered
    assert "the ticket is for link" in report.reason
    with pytest.raises(TransferError, match="the ticket is for link"):
        hub.expect([inlet_of(link=issue_link(600.0, random.Random(3).randbytes))], TOKENS)
    assert hub.outgoing(TICKET.transfer) == ()
    assert hub.incoming(TICKET.transfer) is None
    hub._endpoint.close()


# ---- credit, memory and blocks ------------------------------------------------------------------------------


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
        assert hubs.sender._source.buffer.held == 0
        assert not outgoing.granted
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
        assert not hubs.sender._sending.is_set()


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
            assert hubs.sender._source.buffer.held <= SMALL
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
        until(lambda: outgoing._held == SMALL - SMALL // SHARE)
        receiver = make_hub()
        with listening(receiver) as listener:
            wanted = started(receiver, inlet_of(ticket, other), tokens=tokens)
            hubs.sender.send(outlet_of(listener.path, ticket=ticket, link=other), tokens)
            (also,) = hubs.sender.outgoing(ticket.transfer)
            hubs.announce(also)
            hubs.prefill_done(also)
            assert hubs.receive(also, wanted).delivered
            receiver._endpoint.close()
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
                assert go_on.wait(PATIENCE_S)

        hubs.cache.on_read = pause
        hubs.announce(outgoing)
        hubs.prefill_done(outgoing)
        assert reading.wait(PATIENCE_S)
        model = threading.Thread(target=outgoing.withdraw)
        model.start()
        until(lambda: outgoing._generation == 1)
        assert model.is_alive()
        go_on.set()
        model.join(PATIENCE_S)
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
        until(lambda: sends.granted)
        for ticket in (ticket_of(1), ticket_of(2), ticket_of(3)):  # the third is not known
            hubs.sender.give_way(ticket.transfer)
        assert "the receiver has no place for it" in hubs.reports.end(ticket_of(1)).reason
        assert hubs.sender.outgoing(ticket_of(1).transfer) == ()
        assert hubs.finish(sends, incoming).delivered
    assert len(hubs.reports.ends) == 2


# ---- ends ---------------------------------------------------------------------------------------------------


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
    with two_hubs(on_news=news.release) as hubs:
        outgoing, incoming = hubs.open(TICKET)
        hubs.announce(outgoing, layers=range(1))
        assert news.acquire(timeout=PATIENCE_S)
        assert incoming.take()
        hubs.receiver.abort(TICKET.transfer, "the request was cancelled")
        assert news.acquire(timeout=PATIENCE_S)
        assert incoming.outcome(0.0)


def test_a_sender_that_nobody_answers_reports_once() -> None:
    """The port is closed: at the deadline the report says so and the transfer is forgotten."""
    reports = Reports()
    ticket = ticket_of(deadline_s=0.3)
    with path_to_nowhere() as nowhere:
        hub = make_hub(reports)
        hub.send(outlet_of(nowhere, ticket=ticket), TOKENS)
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
        hubs.announce(outgoing)  # the engine learns of it only between two steps
        hubs.prefill_done(outgoing)
        outgoing.withdraw()
        outgoing.abort("again")
        assert_nothing_is_held(hubs.sender)
        assert hubs.cache.reads == []  # nothing holds the blocks any more
    assert len(hubs.reports.ends) == 1


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_abort_is_reported_once_whenever_it_comes(when: str) -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open()
        if when != "before":
            hubs.announce(outgoing, layers=range(1))
            wait_for(incoming, pieces=1)
        if when == "after":
            hubs.announce(outgoing)
            hubs.prefill_done(outgoing)
            until(lambda: incoming.outcome(0.0) == "")
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
        assert_nothing_is_held(hubs.sender)
    assert len(hubs.reports.ends) == 1


@pytest.mark.parametrize("how", ["abort", "deadline", "the receiver gives up"])
def test_a_transfer_that_holds_much_gives_it_all_back_when_it_ends(how: str) -> None:
    """Its thread waits for room in the host buffer: it hears of the end there."""
    ticket = ticket_of(deadline_s=1.0 if how == "deadline" else 60.0)
    with two_hubs(tokens=4096, host_bytes=SMALL, receiver=STALLED) as hubs:
        outgoing, _ = hubs.open(ticket)
        hubs.announce(outgoing)
        if how != "deadline":
            until(lambda: outgoing._held == SMALL - SMALL // SHARE)
            (hubs.sender if how == "abort" else hubs.receiver).abort(ticket.transfer, "the client has gone")
        report = hubs.reports.end(ticket)
        assert not report.delivered
        assert how == "deadline" or "the client has gone" in report.reason
        assert report.reason
        assert_nothing_is_held(hubs.sender)
        assert hubs.sender.outgoing(ticket.transfer) == ()
    assert len(hubs.reports.ends) == 1


def test_kv_that_cannot_be_encoded_fails_its_transfer_and_names_the_place() -> None:
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open(ticket := ticket_of(codec="kv4"))
        hubs.cache.spoil(1, 1, float("nan"))
        hubs.announce(outgoing)
        report = hubs.reports.end(ticket)
        assert not report.delivered
        assert "layer 1" in report.reason
        assert "layer 1" in (settled(incoming) or "")
        assert_nothing_is_held(hubs.sender)
    assert len(hubs.reports.ends) == 1


def test_even_a_bug_in_an_encoder_ends_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway and the other engine would wait for the deadline otherwise."""

    def buggy(*args: object, **settings: object) -> None:
        raise ZeroDivisionError("a bug")

    logged: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", logged.append)
    with two_hubs() as hubs:
        outgoing, incoming = hubs.open()
        monkeypatch.setattr(sending, "encode_into", buggy)
        hubs.announce(outgoing)
        report = hubs.reports.end(TICKET)
        assert not report.delivered
        assert "a bug in the sending engine" in report.reason
        assert "a bug in the sending engine" in (settled(incoming) or "")
        assert_nothing_is_held(hubs.sender)
        until(lambda: logged)
    assert [entry.exc_type for entry in logged] == [ZeroDivisionError]
    assert len(hubs.reports.ends) == 1


# ---- parts of one prompt ------------------------------------------------------------------------------------

LINKS = [issue_link(600.0, random.Random(seed).randbytes) for seed in (4, 5)]
TICKETS = [TransferTicket(transfer=b"t" * 16, link=link.link, codec="raw", deadline_s=60.0) for link in LINKS]
PARTS = [heads_of(0, 1), heads_of(1, 2)]


def test_heads_that_come_from_two_senders_are_told_apart_and_all_awaited() -> None:
    """Each on a link of its own: the prompt is complete when both are, and what both have counts as prefix."""
    reports, hub = Reports(), make_hub()
    senders = []
    for part in PARTS:
        shard = replace(SHARD, heads=part.heads)
        cache = PagedCache(blocks=len(blocks_for(TOKENS)), shard=shard)
        cache.fill(blocks_for(TOKENS), TOKENS)
        senders.append(make_hub(reports, cache=cache, shard=shard))
    with listening(hub) as listener:
        incoming = started(hub, *map(inlet_of, TICKETS, LINKS, PARTS))
        ends: list[PromptSender] = []
        for sender, ticket, link, part in zip(senders, TICKETS, LINKS, PARTS, strict=True):
            sender.send(outlet_of(listener.path, ticket=ticket, link=link, part=part), TOKENS)
            ends += sender.outgoing(ticket.transfer)
        for number, end in enumerate(ends):
            mark = senders[number]._source.device.mark()
            end.announce_layers(SHARD.layers, Prefilled(blocks_for(TOKENS), TOKENS, mark))
            end.prefill_done(TOKENS, mark)
            wait_for(incoming, pieces=(number + 1) * LAYERS)
            assert incoming.progress() == ((0.5, 0) if number == 0 else (1.0, TOKENS))
        pieces = receive_rest(incoming)
        assert sorted((each.layer, each.head) for each in pieces) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert_arrived_once(pieces, TOKENS)
        incoming.applied()
        reports.until(lambda: len(reports.ends) == len(PARTS))
        assert all(report.delivered for report in reports.ends)
        for each in (hub, *senders):
            each._endpoint.close()


def test_one_of_a_worker_s_heads_is_sent_without_the_others() -> None:
    """The receiver holds half of what the sender does."""
    reports = Reports()
    cache = PagedCache(blocks=len(blocks_for(TOKENS)))
    cache.fill(blocks_for(TOKENS), TOKENS)
    sender, hub = make_hub(reports, cache=cache), make_hub(shard=replace(SHARD, heads=range(1, HEADS)))
    with listening(hub) as listener:
        incoming = started(hub, inlet_of(part=heads_of(1, HEADS)))
        sender.send(outlet_of(listener.path, part=heads_of(1, HEADS)), TOKENS)
        (outgoing,) = sender.outgoing(TICKET.transfer)
        mark = sender._source.device.mark()
        outgoing.announce_layers(SHARD.layers, Prefilled(blocks_for(TOKENS), TOKENS, mark))
        outgoing.prefill_done(TOKENS, mark)
        pieces = receive_rest(incoming)
        assert [(each.head, each.k.shape) for each in pieces] == [(0, (TOKENS, 1, SHARD.head_dim))] * LAYERS
        assert all((each.k[:, 0, 0] % 1 == 1 / 4).all() for each in pieces)  # head 1
        incoming.applied()
        report = reports.end(TICKET)
        assert report.delivered
        assert report.raw_bytes == LAYERS * TOKENS * ROW_BYTES // HEADS
        for each in (hub, sender):
            each._endpoint.close()


def test_one_sender_that_fails_ends_it_for_the_other() -> None:
    reports, hub = Reports(), make_hub()
    sender = make_hub(reports)
    with listening(hub) as listener:
        incoming = started(hub, *map(inlet_of, TICKETS, LINKS, PARTS))
        for ticket, link, part in zip(TICKETS, LINKS, PARTS, strict=True):
            sender.send(outlet_of(listener.path, ticket=ticket, link=link, part=part), TOKENS)
        sender.outgoing(b"t" * 16)[0].abort("its worker is gone")
        reports.until(lambda: len(reports.ends) == len(PARTS))
        assert all("its worker is gone" in report.reason for report in reports.ends)
        assert "its worker is gone" in (settled(incoming) or "")
        for each in (hub, sender):
            each._endpoint.close()


def test_a_part_that_this_worker_does_not_hold_is_not_sent() -> None:
    reports = Reports()
    hub = make_hub(reports)
    hub.send(outlet_of(DialPath("127.0.0.1", 1), part=heads_of(1, 3)), TOKENS)
    assert "is not held by this worker" in reports.end(TICKET).reason
    assert hub.outgoing(TICKET.transfer) == ()
