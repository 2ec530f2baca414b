"""How transfers end: by delivery, an abort, a deadline or a loss; each is reported once."""

from __future__ import annotations

import threading

import pytest

from p2pserve.node.engine.transfers import outgoing as sending

from .hubs import (
    TICKET,
    TOKENS,
    WAIT_LIMIT_S,
    Reports,
    assert_nothing_is_held,
    make_hub,
    outlet_of,
    path_to_nowhere,
    settled,
    ticket_of,
    two_hubs,
    until,
    wait_for,
)


def test_a_transfer_of_what_is_there_already_has_not_failed() -> None:
    with two_hubs() as hubs:
        hubs.open(TICKET)
        hubs.receiver.decline(TICKET.transfer)
        report = hubs.reports.end(TICKET)
        assert (report.delivered, report.reason, report.raw_bytes) == (True, "", 0)
        assert hubs.receiver.incoming(TICKET.transfer) is None
        hubs.receiver.decline(TICKET.transfer)  # again is no matter


def test_who_receives_says_when_all_is_there_to_take_or_none_will_come() -> None:
    news = threading.Semaphore(0)
    with two_hubs(on_news=news.release) as hubs:
        outgoing, incoming = hubs.open(TICKET)
        hubs.announce(outgoing)
        hubs.prefill_done(outgoing)
        assert news.acquire(timeout=WAIT_LIMIT_S)
        assert incoming.take()
        hubs.receiver.abort(TICKET.transfer, "the request was cancelled")
        assert news.acquire(timeout=WAIT_LIMIT_S)
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
        hub.endpoint.close()
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
            incoming.confirm_applied()
            assert settled(incoming) == ""
        else:
            assert "the client has gone" in (settled(incoming) or "")
        assert_nothing_is_held(hubs.sender)
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
