"""A node's log in memory: what it takes, what it gives to whom, and how it goes on."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest

from p2pserve.node.observing.event_log import KEPT, MAX_PAGE_BYTES, EventLog, describe
from p2pserve.node.observing.queries import EventPage, EventQuery
from p2pserve.node.observing.values import MAX_EVENTS, EventKind, NodeEvent

from .logs import event


def log_of(count: int) -> EventLog:
    log = EventLog("here", lambda: 5.0)
    for number in range(count):
        log.record(EventKind.LINK_MEASURED, peer=f"p{number}", gbps=1.0)
    return log


def numbers(page: EventPage) -> list[int]:
    return [each.number for each in page.events]


def test_events_are_numbered_and_timed() -> None:
    page = log_of(2).select(EventQuery())
    assert [(each.number, each.time, each.node, each.peer) for each in page.events] == [
        (1, 5.0, "here", "p0"),
        (2, 5.0, "here", "p1"),
    ]
    assert (page.reached, page.now) == (2, 5.0)


def test_a_log_goes_on_where_an_earlier_run_ended() -> None:
    log = EventLog("here", lambda: 5.0, [event(41, 1.0, "here", EventKind.ENGINE_STATE)])
    log.record(EventKind.ENGINE_STATE, state="ready")
    assert numbers(log.select(EventQuery())) == [41, 42]


def test_old_events_are_forgotten() -> None:
    log = log_of(KEPT + 10)
    assert len(log.events) == KEPT
    assert log.events[0].number == 11


def test_without_a_number_the_latest_come_and_with_one_those_after_it() -> None:
    log = log_of(10)
    assert numbers(log.select(EventQuery(limit=3))) == [8, 9, 10]
    page = log.select(EventQuery(after=2, limit=3))
    assert (numbers(page), page.reached) == ([3, 4, 5], 5)
    assert numbers(log.select(EventQuery(after=10))) == []


def test_what_is_left_out_is_not_passed_over() -> None:
    log = log_of(3)
    log.record(EventKind.ENGINE_STATE, state="ready")
    page = log.select(EventQuery(after=1, kinds=("engine",), limit=1))
    assert (numbers(page), page.reached) == ([4], 4)
    assert log.select(EventQuery(after=4, kinds=("engine",))).reached == 4


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (EventQuery(kinds=("engine",)), [1]),
        (EventQuery(kinds=("engine.state", "request")), [1, 2, 3]),
        (EventQuery(kinds=("engin",)), []),
        (EventQuery(request="r1"), [2, 3]),
        (EventQuery(request="mine"), [2]),
        (EventQuery(request="r1", kinds=("engine",)), []),
    ],
)
def test_events_are_chosen_by_kind_group_and_request(query: EventQuery, found: list[int]) -> None:
    log = EventLog("here", lambda: 5.0)
    log.record(EventKind.ENGINE_STATE, state="ready")
    log.record(EventKind.REQUEST_BEGUN, request="r1", peer="client", client_request="mine")
    log.record(EventKind.REQUEST_ENDED, request="r1", finish="stop")
    assert numbers(log.select(query)) == found
    assert log.requests_of("client") == {"r1"}
    assert log.requests_of("other") == set()


def test_an_answer_has_bounds_and_says_where_to_go_on() -> None:
    log = EventLog("here", lambda: 5.0)
    for _ in range(MAX_EVENTS):
        log.record(EventKind.PLAN_FOLLOWED, why="x" * 2000, more="y" * 2000)
    page = log.select(EventQuery(after=1))
    assert len(msgspec.msgpack.encode(page)) < MAX_PAGE_BYTES + 4096
    assert 0 < len(page.events) < MAX_EVENTS - 1
    assert page.reached == page.events[-1].number
    following = log.select(EventQuery(after=page.reached))
    assert following.events[0].number == page.reached + 1
    assert log.select(EventQuery()).events[-1].number == MAX_EVENTS


def test_facts_are_what_every_reader_takes() -> None:
    log = EventLog("here", lambda: 5.0)
    log.record(
        EventKind.LINK_MEASURED,
        nothing=None,
        text="x" * 5000,
        nan=math.nan,
        endless=math.inf,
        big=10**30,
        yes=True,
        low=-1,
    )
    facts = log.events[0].facts
    assert facts.keys() == {"text", "big", "yes", "low"}
    assert facts["yes"] is True
    data = msgspec.msgpack.encode(log.events[0])
    assert msgspec.msgpack.decode(data, type=NodeEvent) == log.events[0]


def test_a_kind_of_a_newer_release_is_read() -> None:
    data = msgspec.msgpack.encode({"number": 1, "time": 1.0, "node": "n", "kind": "moon.risen", "new": [1]})
    assert msgspec.msgpack.decode(data, type=NodeEvent).kind == "moon.risen"


def test_the_log_of_the_process_has_a_line_with_the_id(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "p2pserve.events"):
        EventLog("here", lambda: 5.0).record(EventKind.REQUEST_ENDED, request="r1", error="two words", ttft_s=0.25)
    assert caplog.messages == ["request.ended request=r1 error='two words' ttft_s=0.25"]


def test_values_are_told_plainly() -> None:
    shown = describe(event(1, 1.0, "n", EventKind.ENGINE_STATE, request="", peer="p", on=True, text="", many=3))
    assert shown == "engine.state peer=p on=yes text='' many=3"


def test_whoever_follows_hears_each_event() -> None:
    log, heard = EventLog("here", lambda: 5.0), list[NodeEvent]()
    log.followers.append(heard.append)
    log.record(EventKind.ENGINE_STATE, state="ready")
    assert [each.kind for each in heard] == ["engine.state"]
    assert "1 events" in repr(log)
