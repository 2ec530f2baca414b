"""One answer a second for all who look, none while nobody does; rates from counters that only grow."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from p2pserve.node.admin import feed as feeding
from p2pserve.node.admin.feed import LINKS_S, SNAPSHOT_S, Feed
from p2pserve.node.admin.source import NetworkSnapshot, SourceError
from p2pserve.node.observing.rates import WINDOW_S, CounterRates
from p2pserve.node.observing.values import LinkSummary, NodeSummary, RequestTrace


class Node:
    """A source that counts how often it is asked; `silent` while it does not answer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = self.asked_links = 0
        self.fault: Exception | None = None
        self.silent = False

    async def snapshot(self) -> NetworkSnapshot:
        self.asked += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.fault is not None:
            raise self.fault
        box = NodeSummary(id="a", role="worker", state="alive", address="", decoded_tokens=int(self.now * 10))
        return NetworkSnapshot(time=self.now, answered_by="a", nodes=(box,))

    async def links(self) -> tuple[LinkSummary, ...]:
        self.asked_links += 1
        sent = int(self.now * 1.25e8)
        link = LinkSummary(source="a", target="b", gbps=1.0, one_stream_gbps=1.0, streams=1, rtt_s=0.01, kv_bytes=sent)
        return (link,)

    async def trace(self, request: str) -> RequestTrace | None:
        if self.silent:
            await asyncio.Event().wait()
        return RequestTrace(id=request)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_many_share_one_answer() -> None:
    async def test() -> None:
        node = Node()
        feed = Feed(node, lambda: node.now)
        found = await asyncio.gather(*(feed.snapshot() for _ in range(50)))
        assert node.asked == 1
        assert all(each is found[0] for each in found)
        node.now += SNAPSHOT_S / 2
        assert await feed.snapshot() is found[0]
        node.now += SNAPSHOT_S
        assert (await feed.snapshot()).time == node.now
        assert (node.asked, node.asked_links) == (2, 0)

    run(test())


def test_links_are_asked_for_less_often() -> None:
    async def test() -> None:
        node = Node()
        feed = Feed(node, lambda: node.now)
        for _ in range(20):
            await feed.links()
            node.now += LINKS_S / 5
        assert node.asked_links == 4

    run(test())


def test_a_fault_is_told_to_all_who_wait_and_not_kept() -> None:
    async def test() -> None:
        node = Node()
        node.fault = SourceError("the node is leaving")
        feed = Feed(node, lambda: node.now)
        found = await asyncio.gather(feed.snapshot(), feed.snapshot(), return_exceptions=True)
        assert [str(each) for each in found] == ["the node is leaving"] * 2
        node.fault = None
        assert (await feed.snapshot()).answered_by == "a"

    run(test())


def test_who_leaves_does_not_take_the_answer_away() -> None:
    async def test() -> None:
        node = Node()
        feed = Feed(node, lambda: node.now)
        leaving, staying = asyncio.create_task(feed.snapshot()), asyncio.create_task(feed.snapshot())
        await asyncio.wait({leaving}, timeout=0)
        leaving.cancel()
        assert (await staying).answered_by == "a"
        assert node.asked == 1

    run(test())


def test_a_silent_node_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        node = Node()
        node.silent = True
        feed = Feed(node, lambda: node.now)
        with pytest.raises(SourceError, match="the node has not answered"):
            await feed.snapshot()
        with pytest.raises(SourceError, match="request: the boxes have not answered"):
            await feed.trace("r")

    monkeypatch.setattr(feeding, "ANSWER_S", 0.0)
    run(test())


def test_flows_and_tokens_are_what_counters_have_grown_by() -> None:
    async def test() -> None:
        node = Node()
        feed = Feed(node, lambda: node.now)
        await feed.snapshot()
        await feed.links()
        assert (feed.tokens_s, feed.flows) == (None, None)
        node.now += LINKS_S
        await feed.snapshot()
        await feed.links()
        assert feed.tokens_s == pytest.approx(10)
        assert feed.flows is not None
        assert feed.flows["a", "b"] == pytest.approx(1.0)

    run(test())


def test_a_counter_that_begins_anew_has_no_rate() -> None:
    rates: CounterRates[str] = CounterRates()
    rates.learn({"a": 100, "b": 10, "gone": 5}, 0.0)
    rates.learn({"a": 1, "b": 30, "new": 7}, 4.0)
    assert rates.rates() == {"b": 5.0}


def test_rates_are_of_lately() -> None:
    rates: CounterRates[str] = CounterRates()
    for second in range(100):
        rates.learn({"a": 0 if second < 50 else 10 * (second - 50)}, float(second))
    assert rates.rates()["a"] == pytest.approx(10, rel=0.05)
    rates.learn({"a": 10**9}, 99.0 + 2 * WINDOW_S)  # nobody has looked meanwhile
    assert rates.rates() == {}


def test_one_moment_makes_no_rate() -> None:
    rates: CounterRates[str] = CounterRates()
    rates.learn({"a": 1}, 0.0)
    rates.learn({"a": 2}, 0.5)
    assert rates.rates() == {}
