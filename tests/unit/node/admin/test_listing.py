"""Lists, page by page: filters, cursors, boxes by any of their names, and what of an event log is new."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from p2pserve.coordinator.names import name_of
from p2pserve.node.admin.listing import (
    CursorError,
    EventFilter,
    LinkFilter,
    cut_page,
    event_key,
    find_news,
    select_events,
    select_links,
    select_nodes,
    select_requests,
    skip_seen,
)
from p2pserve.node.admin.naming import UnknownBox, find_box, label_of, short_id
from p2pserve.node.dev.showcase import Showcase
from p2pserve.node.observing.summaries import summarise_links
from p2pserve.node.observing.values import NodeEvent

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def network() -> Showcase:
    return Showcase(8, lambda: NOW, per_site=3)


def test_pages_hold_every_item_once() -> None:
    items, seen, after = [f"i{number}" for number in range(7)], list[str](), None
    while True:
        page = cut_page(items, str, limit=3, after=after)
        seen += page.data
        after = page.last_id
        if not page.has_more:
            break
    assert seen == items
    assert (page.first_id, page.last_id) == ("i6", "i6")


def test_a_page_of_nothing() -> None:
    page = cut_page(list[str](), str, limit=3, after=None)
    assert (page.data, page.has_more, page.first_id, page.last_id) == ((), False, None, None)


def test_a_cursor_that_is_gone_is_told() -> None:
    with pytest.raises(CursorError, match=r"after: i9 is not in this list \(any more\); begin again without it"):
        cut_page(["i1"], str, limit=3, after="i9")


def test_a_box_is_found_by_each_of_its_names(network: Showcase) -> None:
    nodes = network.look(NOW).nodes
    node = nodes[3]
    for name in (node.id, node.name, node.id[-6:], short_id(node.id)):
        assert find_box(nodes, name) is node


def test_a_box_that_is_not_there_or_not_the_only_one(network: Showcase) -> None:
    nodes = network.look(NOW).nodes
    with pytest.raises(UnknownBox, match="source: no box is called nobody; there are amber-otter, brave-otter"):
        find_box(nodes, "nobody", "source")
    with pytest.raises(UnknownBox, match="no box is called"):
        find_box(nodes, "..")  # too short to be an ending
    twins = [replace(nodes[0], name=""), replace(nodes[1], name="", id=f"x{nodes[0].id}")]
    with pytest.raises(UnknownBox, match="2 boxes are called"):
        find_box(twins, nodes[0].id[-6:])
    with pytest.raises(UnknownBox, match="there are none at all"):
        find_box([], "a-box")


def test_a_box_without_a_name_is_called_by_that_of_its_id(network: Showcase) -> None:
    node = replace(network.look(NOW).nodes[0], name="")
    assert label_of(node) == name_of(node.id)
    assert short_id("key-1") == "key-1"


def test_nodes_fit_all_that_is_asked(network: Showcase) -> None:
    nodes = network.look(NOW).nodes
    assert select_nodes(nodes) == list(nodes)
    found = select_nodes(nodes, site="us-east", phase="decode")
    assert {(node.site, node.phase) for node in found} == {("us-east", "decode")}
    assert select_nodes(nodes, state="dead") == []


def test_links_fit_all_that_is_asked(network: Showcase) -> None:
    nodes, links = network.look(NOW).nodes, summarise_links(network.status(NOW), NOW)
    assert len(select_links(links, nodes, LinkFilter())) == 8 * 7
    one = select_links(links, nodes, LinkFilter(source="amber-otter", target="brave-otter"))
    assert [(link.source, link.target) for link in one] == [(nodes[0].id, nodes[1].id)]
    slow = select_links(links, nodes, LinkFilter(max_gbps=1.0))
    assert slow
    assert all(link.gbps <= 1.0 for link in slow)
    assert len(slow) + len(select_links(links, nodes, LinkFilter(min_gbps=1.0000001))) == 56
    assert len(select_links(links, nodes, LinkFilter(site="us-east"))) == 3 * 2 + 2 * 3 * 5
    with pytest.raises(UnknownBox, match="target: no box"):
        select_links(links, nodes, LinkFilter(target="nobody"))


def test_requests_of_a_box_are_those_in_which_it_had_a_part(network: Showcase) -> None:
    requests = network.look(NOW).requests
    peer = network.peers[3]
    found = select_requests(requests, node=peer)
    assert found
    assert all(peer in (each.gateway, each.prefill, each.decode) for each in found)
    assert all(each.state == "error" for each in select_requests(requests, state="error"))
    assert select_requests(requests, service="another model") == []


def event(number: int, kind: str = "request.begun", time: float = 1.0, **more: Any) -> NodeEvent:
    return NodeEvent(number=number, time=time, node="a", kind=kind, **more)


def test_events_by_kind_group_box_and_request() -> None:
    events = [
        event(1),
        event(2, "request.ended", request="r"),
        event(3, "member.dead", peer="b"),
        event(4, "requests.x"),
    ]

    def numbers(**asked: str) -> list[int]:
        return [each.number for each in select_events(events, EventFilter(**asked))]

    assert numbers(kind="request") == [1, 2]
    assert numbers(kind="request.ended") == [2]
    assert numbers(node="b") == [3]
    assert numbers(node="a") == [1, 2, 3, 4]
    assert numbers(request="r") == [2]


def test_what_is_new_of_a_log() -> None:
    before = [event(1), event(2)]
    assert find_news(before, [event(2), event(3)]) == [event(3)]
    again = [event(1, time=time.time())]
    assert find_news(before, again) == again  # the box was started anew, and its numbers with it


def test_a_follower_goes_on_where_it_was() -> None:
    events = [event(1), event(2), event(3)]
    assert skip_seen(events, event_key(events[1])) == [events[2]]
    assert skip_seen(events, "a:99") == events
