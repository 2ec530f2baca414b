"""How long bytes take over one path or two, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.kvtransport.routing.costs import path_usd_per_gb, transfer_usd
from p2pserve.kvtransport.routing.prediction import ArrivalCurve, arrival_curve, striped_seconds

MB = 1_000_000


class TestPrediction:
    def test_warm_is_alpha_plus_bytes_over_beta(self) -> None:
        assert arrival_curve(1e8, 0.1, warm=True).seconds_for(5e7) == pytest.approx(0.1 + 0.5)

    def test_cold_pays_handshakes_and_slow_start(self) -> None:
        warm, cold = arrival_curve(1.25e8, 0.1, warm=True), arrival_curve(1.25e8, 0.1, warm=False)
        extra = cold.seconds_for(1e8) - warm.seconds_for(1e8)
        # Two round trips of handshake; from 14 kB to 2.6 MB per stream takes 7.5 doublings, most of them in vain.
        assert 0.2 + 0.5 < extra < 0.2 + 0.75

    @given(st.floats(1e4, 1e10), st.floats(1e-5, 0.5), st.booleans(), st.floats(1, 1e10))
    def test_time_and_bytes_are_inverse(self, rate: float, rtt: float, warm: bool, size: float) -> None:
        shape = arrival_curve(rate, rtt, warm=warm)
        assert shape.bytes_by(shape.seconds_for(size)) == pytest.approx(size, rel=1e-3, abs=1e-3 * rate * rtt)

    @given(
        st.floats(1e4, 1e10), st.floats(1, 4), st.floats(1e-5, 0.5), st.floats(1, 4), st.booleans(), st.floats(1, 1e10)
    )
    def test_a_better_path_is_never_slower(
        self, rate: float, faster: float, rtt: float, longer: float, warm: bool, size: float
    ) -> None:
        worse = arrival_curve(rate, rtt * longer, warm=warm).seconds_for(size)
        assert arrival_curve(rate * faster, rtt, warm=warm).seconds_for(size) <= worse * (1 + 1e-9)

    @settings(max_examples=60)
    @given(
        st.tuples(st.floats(1e5, 1e9), st.floats(1e-4, 0.3)),
        st.tuples(st.floats(1e5, 1e9), st.floats(1e-4, 0.3)),
        st.floats(1e4, 1e9),
        st.floats(1e5, 2e9),
        st.booleans(),
    )
    def test_two_paths(
        self, one: tuple[float, float], two: tuple[float, float], size: float, cap: float, warm: bool
    ) -> None:
        first, second = (arrival_curve(rate, rtt, warm=warm) for rate, rtt in (one, two))
        seconds = striped_seconds(first, second, size, cap)
        assert seconds == striped_seconds(second, first, size, cap)
        assert seconds >= size / cap
        best = min(first.seconds_for(size), second.seconds_for(size))
        assert seconds <= max(best, min(first.start_s, second.start_s) + size / cap) * (1 + 1e-9)
        assert first.bytes_by(seconds) + second.bytes_by(seconds) >= size * (1 - 1e-6)

    def test_two_paths_that_are_warm_carry_the_sum_of_their_rates(self) -> None:
        one, two = arrival_curve(3e8, 0.1, warm=True), arrival_curve(1e8, 0.3, warm=True)
        # 20 MB per 0.1 s of the first path's head start, then both: 3e8 (t - 0.1) + 1e8 (t - 0.3) bytes
        assert striped_seconds(one, two, 5.4e8, inf) == pytest.approx((5.4e8 + 0.3e8 + 0.3e8) / 4e8, rel=1e-6)
        assert striped_seconds(one, two, 5.4e8, 2e8) == pytest.approx(0.1 + 5.4e8 / 2e8, rel=1e-6)
        assert striped_seconds(one, two, 3e7, inf) == pytest.approx(0.2)  # over before the second path begins

    def test_a_cold_path_by_hand(self) -> None:
        """Three round trips until the first byte; the first round trip's rate an eighth of the last's."""
        window = 8 * 14_480.0
        cold = arrival_curve(window, 1.0, warm=False)
        assert cold == ArrivalCurve(3.0, 1.0, window / 8, window)
        assert cold.steady_s == 6.0, "three doublings"
        grown = window * 7 / 8 / log(2)  # the integral of a rate that doubles each second, from an eighth on
        assert cold.bytes_by(3.0) == 0.0
        assert cold.bytes_by(4.0) == pytest.approx(grown / 7)
        assert cold.bytes_by(6.0) == pytest.approx(grown)
        assert cold.bytes_by(7.5) == pytest.approx(grown + 1.5 * window)
        assert cold.seconds_for(grown / 7) == pytest.approx(4.0)
        assert cold.seconds_for(grown) == pytest.approx(6.0)
        assert cold.seconds_for(grown + 1.5 * window) == pytest.approx(7.5)

    def test_a_path_below_its_first_window_has_no_slow_start(self) -> None:
        assert arrival_curve(1000.0, 1.0, warm=False) == ArrivalCurve(3.0, 1.0, 1000.0, 1000.0)
        assert arrival_curve(1000.0, 0.0, warm=False) == ArrivalCurve(0.0, 0.0, 1000.0, 1000.0)
        assert arrival_curve(0.0, 1.0, warm=False) == ArrivalCurve(1.0, 1.0, 0.0, 0.0)

    def test_a_window_bounds_what_a_stream_grows_to(self) -> None:
        fast = arrival_curve(1e9, 1.0, warm=False)
        assert fast.first == pytest.approx(1e9 * 14_480 / 2.6e6)

    def test_two_cold_paths_that_end_while_they_grow(self) -> None:
        """Alike, so that each brings half."""
        cold = arrival_curve(1e6, 1.0, warm=False)
        for size in (1e4, 1e5, 1e6):
            assert striped_seconds(cold, cold, 2 * size, inf) == pytest.approx(cold.seconds_for(size), rel=1e-6)

    def test_a_second_path_that_moves_nothing_is_no_help(self) -> None:
        good, dead = arrival_curve(1e6, 1.0, warm=True), ArrivalCurve(1.0, 1.0, 0.0, 0.0)
        assert striped_seconds(good, dead, 1e6, inf) == pytest.approx(2.0)
        assert striped_seconds(dead, dead, 1.0, inf) == inf
        assert striped_seconds(good, good, 1e6, 0.0) == inf

    def test_a_path_that_moves_nothing(self) -> None:
        assert ArrivalCurve(0.1, 0.1, 0.0, 0.0).seconds_for(1) == inf


class TestCosts:
    BOXES: Mapping[str, BoxFigures] = {
        "a": BoxFigures(up_usd_per_gb=0.02, down_usd_per_gb=0.001),
        "b": BoxFigures(up_usd_per_gb=0.5, down_usd_per_gb=0.01),
        "r": BoxFigures(up_usd_per_gb=0.04, down_usd_per_gb=0.003),
    }

    def test_relayed_bytes_are_billed_four_times(self) -> None:
        cost = transfer_usd(self.BOXES, {}, ("a", "b"), {None: 10**9, "r": 10**9})
        assert cost == pytest.approx((0.02 + 0.01) + (0.02 + 0.003 + 0.04 + 0.01))

    def test_every_byte_sent_is_paid_for(self) -> None:
        assert transfer_usd(self.BOXES, {}, ("a", "b"), {None: 2 * 10**9}) == pytest.approx(0.06)
        assert transfer_usd(self.BOXES, {}, ("a", "b"), {}) == 0.0

    def test_a_price_of_the_link_goes_before_those_of_its_boxes(self) -> None:
        free = {("a", "b"): LinkFigures(rtt_s=0.001, one_stream_gbps=1, capacity_gbps=1, usd_per_gb=0.0)}
        assert path_usd_per_gb(self.BOXES, free, ("a", "b")) == 0.0
        assert path_usd_per_gb(self.BOXES, {}, ("a", "b")) == pytest.approx(0.03)
        assert path_usd_per_gb(self.BOXES, {}, ("a", "stranger")) == pytest.approx(0.02)
