"""The sending end of a worker: what is announced is sent once, on the paths and links that the agent names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.tickets import TransferTicket, issue_link
from p2pserve.node.engine.protocol import CloseLink, SetLinkPaths
from p2pserve.node.engine.transfers.outgoing import Prefilled, PromptSender
from p2pserve.node.engine.vllm.device import CpuDevice

from .hubs import (
    HEADS,
    LAYERS,
    LINK,
    ROW_BYTES,
    SHARD,
    TICKET,
    TOKENS,
    PagedCache,
    Reports,
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
    started,
    ticket_of,
    two_hubs,
    until,
    wait_for,
)

pytestmark = pytest.mark.beside


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
        assert len(hubs.sender.endpoint.statistics()) == 1
    assert len(hubs.reports.ends) == 5


def test_how_layers_leave_is_decided_when_the_first_is_computed() -> None:
    """Of two prompts that come together, the second is sent by what the first has shown."""
    with two_hubs() as hubs:
        one, two = hubs.open(ticket_of(1)), hubs.open(ticket_of(2))
        assert hubs.finish(*one).mode == "layerwise"
        hubs.sender.pacer.on_hold_up("raw", TOKENS, 1, 0.0)
        hubs.sender.pacer.on_prefill([one[0].pacing], TOKENS, 10.0)
        assert hubs.finish(*two).mode == "serialised"


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
        watched = other.endpoint.link(LINK.link)
        ended.endpoint.forget(LINK.link, "nothing was sent for 600 s")
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
    hub.endpoint.close()


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
            mark = CpuDevice().mark()
            end.announce_layers(SHARD.layers, Prefilled(blocks_for(TOKENS), TOKENS, mark))
            end.prefill_done(TOKENS, mark)
            wait_for(incoming, pieces=(number + 1) * LAYERS)
            assert incoming.progress() == ((0.5, 0) if number == 0 else (1.0, TOKENS))
        pieces = receive_rest(incoming)
        assert sorted((each.layer, each.head) for each in pieces) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert_arrived_once(pieces, TOKENS)
        incoming.confirm_applied()
        reports.until(lambda: len(reports.ends) == len(PARTS))
        assert all(report.delivered for report in reports.ends)
        for each in (hub, *senders):
            each.endpoint.close()


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
        mark = CpuDevice().mark()
        outgoing.announce_layers(SHARD.layers, Prefilled(blocks_for(TOKENS), TOKENS, mark))
        outgoing.prefill_done(TOKENS, mark)
        pieces = receive_rest(incoming)
        assert [(each.head, each.k.shape) for each in pieces] == [(0, (TOKENS, 1, SHARD.head_dim))] * LAYERS
        assert all((each.k[:, 0, 0] % 1 == 1 / 4).all() for each in pieces)  # head 1
        incoming.confirm_applied()
        report = reports.end(TICKET)
        assert report.delivered
        assert report.raw_bytes == LAYERS * TOKENS * ROW_BYTES // HEADS
        for each in (hub, sender):
            each.endpoint.close()


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
            each.endpoint.close()


def test_a_part_that_this_worker_does_not_hold_is_not_sent() -> None:
    reports = Reports()
    hub = make_hub(reports)
    hub.send(outlet_of(DialPath("127.0.0.1", 1), part=heads_of(1, 3)), TOKENS)
    assert "is not held by this worker" in reports.end(TICKET).reason
    assert hub.outgoing(TICKET.transfer) == ()
