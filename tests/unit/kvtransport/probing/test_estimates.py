"""Figures of links and boxes, what is believed of a link after samples, and what is inferred of links unmeasured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.estimates import (
    BurstSample,
    EstimateSettings,
    LinkEstimator,
    SampleKind,
    TransferSample,
)
from p2pserve.kvtransport.probing.figures import (
    BoxFigures,
    LinkFigures,
    Source,
    one_stream_gbps,
    prior,
    rate_gbps,
    streams_for,
)
from p2pserve.kvtransport.probing.sites import infer

ATLANTIC = prior(90, 0.23, 1.5, reason="class:transatlantic")


def burst(gbps: float, streams: int = 16, *, stable: bool = True) -> BurstSample:
    return BurstSample(bytes=int(gbps * 1.25e8), seconds=1.0, streams=streams, gbps=gbps, stable=stable)


def transfer(gbps: float, streams: int = 16, *, limited: bool = True, seconds: float = 1.0) -> TransferSample:
    size = int(gbps * 1.25e8 * seconds)
    return TransferSample(bytes=size, seconds=seconds, streams=streams, link_limited=limited)


class TestFormulas:
    @pytest.mark.parametrize(
        ("gbps", "rtt_ms", "streams"), [(1, 100, 5), (5, 150, 38), (0.1, 1, 1), (40, 0.2, 1), (100, 300, 64)]
    )
    def test_streams_for(self, gbps: float, rtt_ms: float, streams: int) -> None:
        assert streams_for(gbps, rtt_ms / 1e3) == streams

    def test_more_streams_where_one_was_measured_to_carry_less(self) -> None:
        assert streams_for(1.0, 0.1, single_gbps=0.1) == 10
        assert streams_for(1.0, 0.1, single_gbps=0.9) == 5

    def test_window_model_meets_the_measured_figures(self) -> None:
        # One stream over 1 Gb/s at 100 ms moved 0.225 Gb/s, four 0.90, sixteen 0.995.
        link = LinkFigures(rtt_s=0.1, one_stream_gbps=one_stream_gbps(0.1), capacity_gbps=1.0)
        assert rate_gbps(link, 1) == pytest.approx(0.225, rel=0.15)
        assert rate_gbps(link, 4) == pytest.approx(0.90, rel=0.15)
        assert rate_gbps(link, 16) == pytest.approx(0.995, rel=0.15)

    @given(st.floats(0.001, 100), st.floats(1e-4, 0.5))
    def test_that_many_streams_carry_the_target_or_there_are_no_more(self, gbps: float, rtt_s: float) -> None:
        streams = streams_for(gbps, rtt_s)
        assert 1 <= streams <= 64
        assert streams * one_stream_gbps(rtt_s) >= gbps or streams == 64


class TestValues:
    def test_travel_as_messagepack(self) -> None:
        figures = LinkEstimator(ATLANTIC).figures(0.0)
        data = msgspec.msgpack.encode(figures)
        assert msgspec.msgpack.decode(data, type=LinkFigures) == figures
        assert len(data) < 512

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("rtt_s", -1.0, "link.rtt_s is -1.0"),
            ("rtt_s", math.nan, "link.rtt_s is nan"),
            ("loss", 1.1, "link.loss"),
            ("capacity_gbps", math.inf, "link.capacity_gbps is inf"),
            ("one_stream_gbps", -0.1, "link.one_stream_gbps"),
            ("usd_per_gb", -1.0, "link.usd_per_gb"),
            ("rate_confidence", 1.5, "link.rate_confidence"),
            ("reason", "x" * 201, "link.reason has 201"),
        ],
    )
    def test_bad_link_figures(self, field: str, value: object, message: str) -> None:
        good: dict[str, Any] = {"rtt_s": 0.1, "one_stream_gbps": 0.2, "capacity_gbps": 1.0}
        with pytest.raises(FiguresError, match=message):
            LinkFigures(**{**good, field: value})

    @pytest.mark.parametrize("field", ["up_gbps", "down_gbps", "relay_gbps", "up_usd_per_gb", "relay_budget_bytes"])
    def test_bad_box_figures(self, field: str) -> None:
        bad: dict[str, Any] = {field: -1}
        with pytest.raises(FiguresError, match=f"box.{field} is -1"):
            BoxFigures(**bad)

    def test_a_pair_carries_what_both_boxes_can(self) -> None:
        assert ATLANTIC.bounded(1.0, 0.2).capacity_gbps == 0.2
        assert ATLANTIC.bounded(1.0, 0.2).one_stream_gbps == 0.2
        assert ATLANTIC.bounded(None, None) == ATLANTIC


class TestRoundTrip:
    def test_nothing_measured_is_the_prior(self) -> None:
        figures = LinkEstimator(ATLANTIC).figures(5.0)
        assert figures.source is Source.PRIOR
        assert (figures.rtt_s, figures.capacity_gbps, figures.reason) == (0.09, 1.5, "class:transatlantic")

    def test_pings_give_the_round_trip_and_what_one_stream_carries(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(20):
            link.on_ping(0.150 + 0.002 * (i % 2), now=i)
        figures = link.figures(20.0)
        assert figures.rtt_s == pytest.approx(0.151, abs=0.001)
        assert figures.rtt_min_s == 0.150
        assert figures.jitter_s == pytest.approx(0.001, abs=0.0007)
        assert figures.one_stream_gbps == pytest.approx(one_stream_gbps(0.151), rel=0.02)
        assert figures.source is Source.INFERRED  # its capacity still is a guess
        assert "class:transatlantic" in figures.reason
        assert figures.rtt_confidence > 0.9 > 0.5 > figures.rate_confidence

    def test_one_slow_ping_is_not_believed_three_are(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(10):
            link.on_ping(0.1, now=i)
        link.on_ping(0.4, now=10)
        assert link.figures(10).rtt_s == pytest.approx(0.1)
        link.on_ping(0.4, now=11)
        link.on_ping(0.4, now=12)
        assert link.figures(12).rtt_s == pytest.approx(0.4)
        assert link.figures(12).rtt_min_s == 0.4
        assert SampleKind.CHANGED in {entry.kind for entry in link.history()}

    def test_loss_fades(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(100):
            link.on_ping(None if i < 50 and i % 5 == 0 else 0.1, now=float(i))
        assert 0.01 < link.figures(100).loss < 0.1
        for i in range(100, 700):
            link.on_ping(0.1, now=float(i))
        assert link.figures(700).loss < 1e-3

    def test_the_least_round_trip_is_forgotten_after_its_window(self) -> None:
        link = LinkEstimator(ATLANTIC, EstimateSettings(rtt_window_s=100))
        link.on_ping(0.09, now=0)
        for i in range(1, 30):
            link.on_ping(0.1, now=10.0 * i)
        assert link.figures(290).rtt_min_s == 0.1

    @pytest.mark.parametrize("rtt_s", [0.0, -1.0, math.nan, math.inf])
    def test_bad_ping(self, rtt_s: float) -> None:
        with pytest.raises(FiguresError, match=r"ping\.rtt_s"):
            LinkEstimator(ATLANTIC).on_ping(rtt_s, now=0)


class TestRates:
    def test_a_burst_measures_the_capacity(self) -> None:
        link = LinkEstimator(ATLANTIC)
        link.on_burst(burst(0.9), now=0)
        figures = link.figures(0)
        assert figures.capacity_gbps == pytest.approx(0.9)
        assert figures.source is Source.MEASURED
        assert figures.rate_confidence == pytest.approx(0.75)

    def test_confidence_grows_with_samples_fades_with_age_and_falls_with_spread(self) -> None:
        steady, noisy = LinkEstimator(ATLANTIC), LinkEstimator(ATLANTIC)
        seen: list[float] = []
        for i in range(6):
            steady.on_transfer(transfer(1.0), now=float(i))
            noisy.on_transfer(transfer(1.0 if i % 2 else 0.76), now=float(i))
            seen.append(steady.figures(float(i)).rate_confidence)
        assert seen == sorted(seen)
        assert noisy.figures(5).rate_confidence < steady.figures(5).rate_confidence
        assert steady.figures(605).rate_confidence < seen[-1]
        assert steady.figures(86_400).rate_confidence < 0.01
        assert steady.figures(86_400).capacity_gbps == pytest.approx(1.0)  # still the best guess

    def test_a_single_slow_transfer_is_not_believed_and_two_are(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(20):
            link.on_transfer(transfer(1.0), now=float(i))
        sure = link.figures(20).rate_confidence
        link.on_transfer(transfer(0.1), now=20)
        assert link.figures(20).capacity_gbps == pytest.approx(1.0)
        assert link.figures(20).rate_confidence < sure  # but it raises a doubt
        link.on_transfer(transfer(0.1), now=21)
        assert link.figures(21).capacity_gbps == pytest.approx(0.1)

    def test_a_slow_transfer_between_good_ones_changes_nothing(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(40):
            link.on_transfer(transfer(0.1 if i % 4 == 3 else 1.0), now=float(i))
        assert link.figures(40).capacity_gbps == pytest.approx(1.0)

    def test_getting_better_needs_one_more(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(5):
            link.on_transfer(transfer(0.2, streams=16), now=float(i))
        for i in range(2):
            link.on_transfer(transfer(1.0), now=5.0 + i)
        assert link.figures(7).capacity_gbps == pytest.approx(0.2)
        link.on_transfer(transfer(1.0), now=7)
        assert link.figures(7).capacity_gbps == pytest.approx(1.0)

    def test_drift_is_followed_by_decay(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(200):
            link.on_transfer(transfer(1.0 * 0.995**i), now=60.0 * i)
        assert link.figures(12_000).capacity_gbps == pytest.approx(0.995**199, rel=0.1)

    def test_what_the_link_did_not_hold_up_is_a_lower_bound(self) -> None:
        link = LinkEstimator(prior(90, 0.23, 0.5))
        link.on_transfer(transfer(0.2, limited=False), now=0)
        assert link.figures(0).capacity_gbps == 0.5  # nothing learnt
        link.on_transfer(transfer(0.8, limited=False), now=1)
        figures = link.figures(1)
        assert figures.capacity_gbps == pytest.approx(0.8)
        assert figures.capacity_is_floor
        link.on_transfer(transfer(0.3, limited=False), now=2)
        assert link.figures(2).capacity_gbps == pytest.approx(0.8)
        link.on_burst(burst(1.1), now=3)  # the first real measurement goes before any bound
        assert link.figures(3).capacity_gbps == pytest.approx(1.1)
        assert not link.figures(3).capacity_is_floor

    def test_one_stream_tells_its_window_and_not_the_capacity(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(4):
            link.on_ping(0.1, now=i)
            link.on_transfer(transfer(0.21, streams=1), now=float(i))
        figures = link.figures(4)
        assert figures.one_stream_gbps == pytest.approx(0.21)
        assert figures.capacity_gbps == 1.5

    def test_windows_that_hold_n_streams_up_are_known_from_their_sum(self) -> None:
        link = LinkEstimator(prior(100, 0.2, 0.5))
        link.on_ping(0.1, now=0)
        link.on_burst(burst(0.8, streams=4), now=1)
        figures = link.figures(1)
        assert figures.one_stream_gbps == pytest.approx(0.2)
        assert figures.capacity_gbps == pytest.approx(0.8)
        assert figures.capacity_is_floor

    def test_another_round_trip_ends_what_was_known_of_one_stream(self) -> None:
        link = LinkEstimator(ATLANTIC)
        link.on_ping(0.05, now=0)
        link.on_transfer(transfer(0.4, streams=1), now=0)
        for i in range(3):
            link.on_ping(0.2, now=1.0 + i)
        assert link.figures(4).one_stream_gbps == pytest.approx(one_stream_gbps(0.2))

    def test_too_short_to_tell(self) -> None:
        link = LinkEstimator(ATLANTIC)
        short = TransferSample(bytes=500_000, seconds=0.2, streams=8, link_limited=True)
        assert not link.on_transfer(short, now=0)
        assert not link.on_transfer(transfer(0.1, seconds=0.2), now=10)  # under three round trips
        assert link.figures(10).source is Source.PRIOR

    def test_a_short_transfer_that_the_link_did_not_hold_up_shows_what_the_link_carries_at_least(self) -> None:
        link = LinkEstimator(ATLANTIC)
        link.on_transfer(
            TransferSample(bytes=12_500_000, seconds=0.1, streams=8, link_limited=False), now=0
        )  # fmt: skip
        figures = link.figures(0)
        assert figures.source is Source.MEASURED
        assert figures.reason.startswith("never held up by the link")

    def test_stretches_of_one_transfer_join_until_they_tell(self) -> None:
        link = LinkEstimator(ATLANTIC)
        assert not link.on_transfer(transfer(0.8, seconds=0.2), now=0.2)
        assert link.on_transfer(transfer(1.0, seconds=0.2), now=0.4)
        assert link.figures(0.4).capacity_gbps == pytest.approx(0.9)
        link.on_transfer(transfer(0.8, seconds=0.2), now=0.6)
        link.on_transfer(transfer(0.8, seconds=0.2, streams=3), now=0.8)  # not the same connections
        link.on_transfer(transfer(0.8, seconds=0.2), now=9.0)  # nor the same time
        assert "1 measured" in link.figures(9).reason

    def test_unreachable_after_three_failures_until_something_gets_through(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(3):
            assert link.figures(i).reachable
            link.on_unreachable(now=i)
        assert not link.figures(3).reachable
        link.on_ping(0.1, now=4)
        assert link.figures(4).reachable
        for i in range(3):
            link.on_burst(burst(0.0), now=5.0 + i)
        assert not link.figures(8).reachable

    def test_history_is_kept_and_bounded(self) -> None:
        link = LinkEstimator(ATLANTIC, EstimateSettings(history=10))
        for i in range(30):
            link.on_ping(0.1, now=i)
        assert [entry.at for entry in link.history()] == list(range(20, 30))

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["ping", "lost", "transfer", "burst", "dead"]),
                st.floats(1e-4, 50.0),
                st.integers(1, 64),
                st.booleans(),
                st.floats(0.0, 1000.0),
            ),
            max_size=60,
        )
    )
    def test_whatever_comes_the_figures_can_be_meant(self, events: list[tuple[str, float, int, bool, float]]) -> None:
        link = LinkEstimator(ATLANTIC)
        now = 0.0
        for kind, value, streams, flag, wait in events:
            now += wait
            if kind in {"ping", "lost"}:
                link.on_ping(value / 50.0 if kind == "ping" else None, now=now)
            elif kind == "transfer":
                link.on_transfer(transfer(value, streams, limited=flag), now=now)
            elif kind == "burst":
                link.on_burst(burst(value, streams, stable=flag), now=now)
            else:
                link.on_unreachable(now=now)
            figures = link.figures(now)  # validates itself
            assert 0.0 < figures.one_stream_gbps <= figures.capacity_gbps
            assert link.stable_figures(now).alike(figures, 0.1)

    def test_settled_figures_are_the_same_object_until_they_are_news(self) -> None:
        link = LinkEstimator(ATLANTIC)
        for i in range(30):
            link.on_ping(0.1, now=i)
            link.on_burst(burst(1.0), now=i)
        before = link.stable_figures(30)
        link.on_ping(0.101, now=31)
        link.on_burst(burst(1.02), now=31)
        assert link.stable_figures(31) is before
        assert link.stable_figures(40) is before
        link.on_burst(burst(0.3), now=41)
        link.on_burst(burst(0.3), now=42)  # nobody has asked between the two
        assert link.stable_figures(42).capacity_gbps == pytest.approx(0.3)
        for _ in range(3):
            link.on_unreachable(now=43)
        assert not link.stable_figures(43).reachable

    def test_settled_figures_fade_and_follow_a_drift(self) -> None:
        link = LinkEstimator(ATLANTIC)
        link.on_burst(burst(1.0), now=0)
        sure = link.stable_figures(0).rate_confidence
        assert link.stable_figures(3600).rate_confidence < sure / 2
        for i in range(200):
            link.on_burst(burst(1.0 - 0.003 * i), now=4000 + 60 * i)
            assert link.stable_figures(4000 + 60 * i).capacity_gbps == pytest.approx(
                link.figures(4000 + 60 * i).capacity_gbps, rel=0.12
            )

    def test_what_a_link_may_carry_beyond_and_costs_is_news(self) -> None:
        figures = LinkEstimator(ATLANTIC).figures(0.0)
        assert figures.alike(msgspec.structs.replace(figures, rtt_s=1.05 * figures.rtt_s), 0.1)
        for field, value in (("capacity_is_floor", True), ("usd_per_gb", 0.02), ("reachable", False), ("rtt_s", 0.2)):
            assert not figures.alike(msgspec.structs.replace(figures, **{field: value}), 0.1)

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: TransferSample(bytes=0, seconds=1, streams=1, link_limited=True), r"sample\.bytes"),
            (lambda: TransferSample(bytes=1, seconds=0, streams=1, link_limited=True), r"sample\.seconds"),
            (lambda: TransferSample(bytes=1, seconds=1, streams=0, link_limited=True), r"sample\.streams"),
            (lambda: BurstSample(bytes=1, seconds=1, streams=65, gbps=1), r"burst\.streams"),
            (lambda: BurstSample(bytes=1, seconds=1, streams=1, gbps=math.nan), "figure of nan"),
            (lambda: EstimateSettings(half_life_s=0), r"estimates\.half_life_s"),
            (lambda: EstimateSettings(slow_in_a_row=0), r"estimates\.slow_in_a_row"),
        ],
    )
    def test_bad_samples(self, build: Any, message: str) -> None:
        with pytest.raises(FiguresError, match=message):
            build()


class TestInference:
    SITES: Mapping[str, str] = {"a1": "paris", "a2": "paris", "a3": "paris", "b1": "nyc", "b2": "nyc", "c1": "tokyo"}

    @staticmethod
    def measured(rtt_s: float, gbps: float, confidence: float = 0.9) -> LinkFigures:
        return LinkFigures(rtt_s=rtt_s, one_stream_gbps=0.2, capacity_gbps=gbps, rate_confidence=confidence)

    def test_fills_in_from_the_same_sites_and_says_so(self) -> None:
        known = {("a1", "b1"): self.measured(0.09, 1.0), ("a2", "b1"): self.measured(0.11, 1.2)}
        filled = infer(known, self.SITES, {"b2": BoxFigures(down_gbps=0.5)}, [("a3", "b1"), ("a3", "b2"), ("a1", "b1")])
        assert set(filled) == {("a3", "b1"), ("a3", "b2")}  # what is measured stays as it is
        one = filled["a3", "b1"]
        assert one.rtt_s == pytest.approx(0.1)
        assert one.capacity_gbps == pytest.approx(1.1)
        assert one.source is Source.INFERRED
        assert one.reason == "median of 2 measured links from paris to nyc"
        assert one.rate_confidence < 0.6
        assert filled["a3", "b2"].capacity_gbps == 0.5  # its own cap

    def test_the_reverse_direction_is_believed_less(self) -> None:
        known = {("a1", "b1"): self.measured(0.09, 1.0)}
        filled = infer(known, self.SITES, {}, [("a2", "b2"), ("b2", "a2")])
        assert filled["b2", "a2"].rate_confidence < filled["a2", "b2"].rate_confidence
        assert "reverse" in filled["b2", "a2"].reason

    def test_links_that_disagree_are_believed_less(self) -> None:
        alike = {("a1", "b1"): self.measured(0.09, 1.0), ("a2", "b1"): self.measured(0.09, 1.0)}
        apart = {("a1", "b1"): self.measured(0.09, 0.2), ("a2", "b1"): self.measured(0.09, 2.0)}
        wanted = [("a3", "b2")]
        sure, unsure = infer(alike, self.SITES, {}, wanted), infer(apart, self.SITES, {}, wanted)
        assert unsure["a3", "b2"].rate_confidence < 0.7 * sure["a3", "b2"].rate_confidence

    def test_nothing_is_made_of_nothing(self) -> None:
        known = {
            ("a1", "b1"): ATLANTIC,  # a guess is no ground for another
            ("a2", "b1"): msgspec.structs.replace(self.measured(0.09, 1.0), reachable=False),
        }
        assert infer(known, self.SITES, {}, [("a3", "b2"), ("a1", "c1"), ("a1", "stranger")]) == {}
