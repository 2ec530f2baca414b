"""What the latest requests say of a network, and the tiles that show it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from p2pserve.coordinator.plan import Deadlines
from p2pserve.node.dashboard.statistics import BUCKETS, WINDOW_S, is_in_time, measure_traffic, percentiles
from p2pserve.node.dashboard.tiles import Tile, make_tiles
from p2pserve.node.dashboard.view import View
from p2pserve.node.observing.values import Cost, RequestSummary

from .networks import NOW, empty_view, network, view_of, with_nodes

DEADLINES = Deadlines(ttft_s=1.0, tpot_s=0.1)


def request(age: float = 10.0, **more: Any) -> RequestSummary:
    """One that ended `age` seconds ago and took a second."""
    fields: dict[str, Any] = {
        "state": "stop", "prompt_tokens": 100, "completion_tokens": 60, "ttft_s": 0.4, "tpot_s": 0.01, "e2e_s": 1.0,
    } | more  # fmt: skip
    return RequestSummary(id="r", gateway="a", arrived=NOW - age - 1.0, **fields)


def tiles(view: View) -> dict[str, Tile]:
    return {tile.label: tile for tile in make_tiles(view)}


def test_rates_are_of_the_last_minute() -> None:
    found = measure_traffic([request(10)] * 30 + [request(70)] * 5, Deadlines(), NOW)
    assert (found.requests_s, found.tokens_s, found.ended) == (0.5, 30.0, 35)


def test_what_runs_or_is_long_over_does_not_count() -> None:
    running = request(0, state="answering", e2e_s=None, tpot_s=None, completion_tokens=None)
    found = measure_traffic([running, request(WINDOW_S + 1)], DEADLINES, NOW)
    assert (found.ended, found.failed, found.in_time) == (0, 0, None)
    assert found.ttft.p50 is None


def test_percentiles_are_values_that_occurred() -> None:
    found = percentiles([float(number) for number in range(100)])
    assert (found.p50, found.p95, found.p99) == (50.0, 95.0, 99.0)
    assert percentiles([7.0, None]).p99 == 7.0


def test_in_time_are_those_that_met_all_deadlines() -> None:
    requests = [request(), request(ttft_s=1.1), request(tpot_s=0.2), request(state="error"), request(state="cancelled")]
    found = measure_traffic(requests, DEADLINES, NOW)
    assert (found.in_time, found.failed) == (0.25, 1)
    assert measure_traffic(requests, Deadlines(), NOW).in_time is None


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, True), ({"ttft_s": 1.0}, True), ({"ttft_s": 1.01}, False), ({"e2e_s": 9.0}, True), ({"tpot_s": None}, True)],
)
def test_a_deadline_is_met_up_to_its_end(changes: dict[str, Any], kept: bool) -> None:
    assert is_in_time(request(**changes), DEADLINES) is kept


def test_a_million_tokens_cost_what_their_requests_did() -> None:
    found = measure_traffic([request(cost=Cost(box_usd=0.00012, traffic_usd=0.00004))] * 3, Deadlines(), NOW)
    assert found.usd_per_million == pytest.approx(1.0)
    assert measure_traffic([request()], Deadlines(), NOW).usd_per_million is None


def test_a_course_is_the_median_of_each_part() -> None:
    part = WINDOW_S / BUCKETS
    requests = [request(0.5), request(part + 1, ttft_s=3.0), request(part + 2, ttft_s=5.0)]
    found = measure_traffic(requests, Deadlines(), NOW)
    assert found.ttft_course[-2:] == (5.0, 0.4)
    assert set(found.ttft_course[:-2]) == {None}


def test_tiles_of_a_network() -> None:
    view = view_of(network(8))
    found = tiles(view)
    assert found["Boxes"].value == "8"
    assert found["Boxes"].detail == "5 decode · 3 prefill"
    assert found["Boxes"].tone == ""
    assert found["First token"].value.endswith("ms")
    assert found["First token"].spark.startswith("M")
    assert found["Cost"].value.startswith("$10.22")
    assert "per million tokens" in found["Cost"].detail


def test_flows_and_tokens_are_the_networks() -> None:
    view = view_of(network(8), flows={("a", "b"): 1.5, ("b", "c"): 0.5}, tokens_s=84.0)
    found = tiles(view)
    assert found["KV between boxes"].value.startswith("2")
    assert found["Tokens out"].value.startswith("84")
    assert found["Tokens out"].hint == "what all boxes decode"


def test_tiles_of_nothing_say_so() -> None:
    found = tiles(empty_view())
    assert found["Boxes"].value == "0"
    assert found["Boxes"].tone == "bad"
    assert found["First token"].value == found["KV between boxes"].value == "–"
    assert found["In time"].detail == "no deadlines are set"
    assert found["Cost"].detail == "tell a box's price with --usd-per-hour"


def test_what_somebody_should_look_at_stands_out() -> None:
    view = view_of(network(8))
    gone = with_nodes(view, state="dead")
    assert tiles(gone)["Boxes"].tone == "bad"
    assert "8 gone" in tiles(gone)["Boxes"].detail
    assert tiles(with_nodes(view, engine_state="loading"))["Boxes"].tone == "bad"
    late = tuple(replace(each, ttft_s=9.0) for each in view.snapshot.requests)
    assert tiles(View(snapshot=replace(view.snapshot, requests=late)))["In time"].tone == "bad"
    unpriced = with_nodes(view, usd_per_hour=0.0)
    assert tiles(unpriced)["Cost"].value == "–"
