"""What serving costs: shares add up to the time in which a box has requests, and prices are by the hour."""

from __future__ import annotations

import random

import pytest

from p2pserve.node.observing.costs import ShareClock, price_request, usd_per_million


def test_one_request_alone_is_billed_all_of_the_time() -> None:
    clock = ShareClock()
    clock.advance(10.0, 0)
    begun = clock.advance(20.0, 0)  # nobody is billed for the time before
    assert clock.advance(25.0, 1) - begun == 5.0


def test_requests_share_the_time_that_they_are_there_together() -> None:
    clock = ShareClock()
    first = clock.advance(0.0, 0)
    second = clock.advance(4.0, 1)  # the other was alone until now
    ended = clock.advance(10.0, 2)
    assert ended - first == 7.0
    assert ended - second == 3.0


def test_shares_add_up_to_the_time_in_which_there_were_any() -> None:
    rng, clock, now, busy = random.Random(3), ShareClock(), 0.0, 0.0
    present: list[float] = []
    billed = 0.0
    for _ in range(500):
        step = rng.uniform(0.0, 2.0)
        now += step
        busy += step if present else 0.0
        shares = clock.advance(now, len(present))
        if present and rng.random() < 0.5:
            billed += shares - present.pop(rng.randrange(len(present)))
        else:
            present.append(shares)
    billed += sum(clock.shares_s - since for since in present)
    assert billed == pytest.approx(busy)


def test_a_clock_that_goes_back_bills_nothing() -> None:
    clock = ShareClock()
    clock.advance(10.0, 0)
    assert clock.advance(5.0, 1) == 0.0


def test_a_request_pays_for_all_boxes_of_its_replicas_and_for_traffic() -> None:
    prices = {"a": 3.6, "b": 7.2, "c": 0.0}
    cost = price_request([(("a", "b"), 10.0), (("a",), 5.0), (("c",), 99.0)], lambda box: prices[box], 0.5)
    assert cost.by_node == pytest.approx({"a": 0.015, "b": 0.02, "c": 0.0})
    assert cost.box_usd == pytest.approx(0.035)
    assert cost.usd == pytest.approx(0.535)


def test_a_million_tokens() -> None:
    assert usd_per_million(3.6, 1000.0) == pytest.approx(1.0)
    assert usd_per_million(3.6, 0.0) is None
