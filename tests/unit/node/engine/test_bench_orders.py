"""What the bench of turn orders asks for, and what it makes of the answers."""

from __future__ import annotations

import random
import statistics

import pytest

from p2pserve.node.engine.dev.bench_orders import (
    SERVICES,
    OrdersPair,
    ServedRequest,
    draw_requests,
    figures_of,
    report_orders,
)

ALONE = {"bundled-prose": 0.2, "bundled": 2.0}


def pair(load: float, fcfs: float, db: float) -> OrdersPair:
    """One request of each service, of so many times its time alone."""
    runs = {
        order: figures_of([ServedRequest(service, times * alone, 0.1) for service, alone in ALONE.items()], ALONE)
        for order, times in (("fcfs", fcfs), ("db", db))
    }
    return OrdersPair(load=load, alone_s=ALONE, runs=runs)


def test_requests_come_at_the_rates_and_in_the_lengths_that_are_said() -> None:
    drawn = draw_requests(random.Random(1), {"bundled-prose": 40.0, "bundled": 4.0}, 100.0)
    assert [each.at for each in drawn] == sorted(each.at for each in drawn)
    assert 0.0 < drawn[0].at < drawn[-1].at < 100.0
    for service, rate in (("bundled-prose", 40.0), ("bundled", 4.0)):
        own, asked = [each for each in drawn if each.service == service], SERVICES[service]
        assert len(own) == pytest.approx(100.0 * rate, rel=0.15)
        assert statistics.fmean(each.answer for each in own) == pytest.approx(asked.answer, rel=0.1)
        assert max(each.answer for each in own) <= asked.most
        assert {len(each.prompt) for each in own} <= {*range(asked.prompt[0], asked.prompt[1] + 1)}
    assert drawn == draw_requests(random.Random(1), {"bundled-prose": 40.0, "bundled": 4.0}, 100.0)


def test_a_latency_is_normalized_by_its_service_alone() -> None:
    served = [ServedRequest("bundled-prose", 0.2, 0.1)] * 98
    served += [ServedRequest("bundled-prose", 1.0, 0.9), ServedRequest("bundled", 6.0, 0.5)]
    figures = figures_of(served, ALONE)
    assert figures.requests == 100
    assert figures.normalized == pytest.approx((98 * 1.0 + 5.0 + 3.0) / 100)
    assert figures.p99 == pytest.approx(3.0)  # one of 100 is above
    assert figures.p99_s == pytest.approx(1.0)
    assert figures.service_normalized == pytest.approx({"bundled-prose": (98 * 1.0 + 5.0) / 99, "bundled": 3.0})
    assert figures.service_p99_s == pytest.approx({"bundled-prose": 1.0, "bundled": 6.0})
    assert figures.service_ttft_s["bundled"] == 0.5


def test_orders_are_compared_pair_by_pair_at_each_load() -> None:
    report = report_orders([pair(0.5, 2.0, 1.0), pair(1.0, 9.0, 3.0), pair(0.5, 3.0, 2.0), pair(0.5, 8.0, 2.0)])
    assert report.order_latency_ratio == pytest.approx({"0.5": 2.0, "1": 3.0})
    assert report.order_p99_ratio == pytest.approx({"0.5": 2.0, "1": 3.0})
    lines = report.describe().splitlines()
    assert len(lines) == 1 + 2 * 3
    assert max(map(len, lines)) <= 120
    assert lines[3].strip() == "fcfs over db: 2.00 times the latency, 2.00 the P99"


def test_a_run_without_requests_of_a_service_has_no_figures_of_it() -> None:
    figures = figures_of([ServedRequest("bundled", 2.0, 0.1)], ALONE)
    assert (figures.normalized, set(figures.service_p99_s)) == (1.0, {"bundled"})
    runs = {"fcfs": figures, "db": figures}
    assert "bundled-prose" not in report_orders([OrdersPair(load=1.0, alone_s=ALONE, runs=runs)]).describe()
