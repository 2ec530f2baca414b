"""The numbers behind what is believed of a link: weights, doubts, bounds, and when figures count as unchanged."""

from __future__ import annotations

from math import sqrt

import msgspec
import pytest

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
    bytes_per_s,
    gbps_of,
    one_stream_gbps,
    prior,
    rate_gbps,
    streams_for,
)
from p2pserve.kvtransport.probing.sites import infer

GUESS = prior(100, 0.2, 5.0)
WIDE = 64  # streams that no window holds up at the rates here


def burst(gbps: float, streams: int = WIDE, *, stable: bool = True) -> BurstSample:
    return BurstSample(bytes=1, seconds=1.0, streams=streams, gbps=gbps, stable=stable)


def moved(gbps: float, seconds: float = 1.0, streams: int = WIDE, *, limited: bool = True) -> TransferSample:
    return TransferSample(bytes=int(gbps * 1.25e8 * seconds), seconds=seconds, streams=streams, link_limited=limited)


def fed(*samples: float, settings: EstimateSettings | None = None) -> LinkEstimator:
    """Bursts at one moment."""
    link = LinkEstimator(GUESS, settings)
    for gbps in samples:
        link.on_burst(burst(gbps), now=0.0)
    return link


class TestWeights:
    @pytest.mark.parametrize(("stable", "confidence"), [(True, 3 / 4), (False, 1 / 2)])
    def test_a_settled_burst_weighs_three_times_as_much(self, stable: bool, confidence: float) -> None:
        link = LinkEstimator(GUESS)
        link.on_burst(burst(1.0, stable=stable), now=0.0)
        assert link.figures(0.0).rate_confidence == pytest.approx(confidence)

    @pytest.mark.parametrize(("seconds", "weight"), [(0.4, 0.8), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0), (60.0, 2.0)])
    def test_a_transfer_weighs_by_its_length_within_bounds(self, seconds: float, weight: float) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(moved(1.0, seconds), now=0.0)
        assert link.figures(0.0).rate_confidence == pytest.approx(weight / (weight + 1))

    def test_a_short_one_weighs_a_quarter_at_least(self) -> None:
        link = LinkEstimator(prior(1, 0.2, 5.0))
        link.on_transfer(moved(1.0, 0.06), now=0.0)
        assert link.figures(0.0).rate_confidence == pytest.approx(0.25 / 1.25)

    def test_half_is_left_after_the_half_life(self) -> None:
        link = fed(1.0, settings=EstimateSettings(half_life_s=100.0))
        assert link.figures(100.0).rate_confidence == pytest.approx(1.5 / 2.5)
        assert link.figures(200.0).rate_confidence == pytest.approx(0.75 / 1.75)
        assert link.figures(-5.0).rate_confidence == pytest.approx(0.75), "a clock that goes back changes nothing"

    def test_the_mean_is_that_of_the_logarithms(self) -> None:
        assert fed(1.0, 1.21).figures(0.0).capacity_gbps == pytest.approx(sqrt(1.21))

    def test_later_samples_weigh_more_than_faded_ones(self) -> None:
        link = fed(1.0, settings=EstimateSettings(half_life_s=100.0))
        link.on_burst(burst(1.2), now=100.0)
        assert link.figures(100.0).capacity_gbps == pytest.approx(1.2 ** (2 / 3))


class TestDoubts:
    @pytest.mark.parametrize(("factor", "believed"), [(1.34, True), (1.36, False)])
    def test_what_is_still_of_the_same_kind(self, factor: float, believed: bool) -> None:
        for ratio in (factor, 1 / factor):
            value = fed(1.0, ratio).figures(0.0).capacity_gbps
            assert (value == pytest.approx(1.0)) is not believed

    def test_samples_that_spread_allow_for_more(self) -> None:
        wide = fed(1.0, 1.3, 1.0, 1.3, 1.0, 1.3)
        before = wide.figures(0.0).capacity_gbps
        wide.on_burst(burst(1.0 / 1.2), now=0.0)
        assert wide.figures(0.0).capacity_gbps < before

    def test_two_slow_ones_are_believed_and_three_fast_ones(self) -> None:
        assert fed(1.0, 0.4).figures(0.0).capacity_gbps == pytest.approx(1.0)
        assert fed(1.0, 0.4, 0.5).figures(0.0).capacity_gbps == pytest.approx(sqrt(0.2))
        assert fed(1.0, 3.0, 3.0).figures(0.0).capacity_gbps == pytest.approx(1.0)
        assert fed(1.0, 3.0, 3.0, 3.0).figures(0.0).capacity_gbps == pytest.approx(3.0)

    def test_how_many_is_a_setting(self) -> None:
        eager = EstimateSettings(slow_in_a_row=1, fast_in_a_row=1)
        assert fed(1.0, 0.4, settings=eager).figures(0.0).capacity_gbps == pytest.approx(0.4)
        assert fed(1.0, 3.0, settings=eager).figures(0.0).capacity_gbps == pytest.approx(3.0)

    def test_a_slow_and_a_fast_one_do_not_agree(self) -> None:
        assert fed(1.0, 0.4, 3.0, 0.4).figures(0.0).capacity_gbps == pytest.approx(1.0)
        assert fed(1.0, 3.0, 3.0, 0.4, 3.0).figures(0.0).capacity_gbps == pytest.approx(1.0)

    def test_one_of_the_old_kind_clears_the_doubt(self) -> None:
        link = fed(1.0, 0.4)
        assert link.figures(0.0).rate_confidence == pytest.approx(0.75 * 0.7)
        link.on_burst(burst(1.0), now=0.0)
        link.on_burst(burst(0.4), now=0.0)
        assert link.figures(0.0).capacity_gbps == pytest.approx(1.0)

    def test_what_replaces_it_has_the_weight_of_its_samples(self) -> None:
        assert fed(1.0, 0.4, 0.4).figures(0.0).rate_confidence == pytest.approx(6 / 7)
        kinds = [entry.kind for entry in fed(1.0, 0.4, 0.4).history()]
        assert kinds.count(SampleKind.CHANGED) == 1


class TestBounds:
    def test_what_the_windows_held_up_tells_one_stream(self) -> None:
        link = LinkEstimator(GUESS)
        each = one_stream_gbps(0.1)
        link.on_transfer(moved(0.86 * each * 4, streams=4), now=0.0)
        assert link.figures(0.0).one_stream_gbps == pytest.approx(0.86 * each)
        assert link.figures(0.0).capacity_gbps == 5.0, "a lower bound, and less than was believed"

    def test_a_little_less_and_it_was_the_link(self) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(moved(0.84 * one_stream_gbps(0.1) * 4, streams=4), now=0.0)
        found = link.figures(0.0)
        assert found.capacity_gbps == pytest.approx(0.84 * one_stream_gbps(0.1) * 4)
        assert not found.capacity_is_floor

    def test_one_stream_on_a_lossy_link_tells_nothing_of_the_capacity(self) -> None:
        for lost, capacity in ((True, 5.0), (False, 0.05)):
            link = LinkEstimator(GUESS)
            for n in range(100):
                link.on_ping(None if lost and n % 50 == 0 else 0.1, now=0.0)
            link.on_transfer(moved(0.05, streams=1), now=0.0)
            assert link.figures(0.0).capacity_gbps == pytest.approx(capacity)

    def test_many_streams_on_a_lossy_link_do(self) -> None:
        link = LinkEstimator(GUESS)
        for n in range(100):
            link.on_ping(None if n % 50 == 0 else 0.1, now=0.0)
        link.on_transfer(moved(0.5, streams=WIDE), now=0.0)
        assert link.figures(0.0).capacity_gbps == pytest.approx(0.5)

    def test_a_bound_below_another_is_no_news(self) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(moved(7.0, limited=False), now=0.0)
        link.on_transfer(moved(6.0, limited=False), now=0.0)
        assert link.figures(0.0).capacity_gbps == pytest.approx(7.0)
        link.on_transfer(moved(9.0, limited=False), now=0.0)
        assert link.figures(0.0).capacity_gbps == pytest.approx(9.0)
        assert link.figures(0.0).capacity_is_floor

    def test_a_measured_capacity_is_not_lowered_by_a_bound(self) -> None:
        link = fed(2.0)
        link.on_transfer(moved(0.5, limited=False), now=0.0)
        assert link.figures(0.0).capacity_gbps == pytest.approx(2.0)
        assert not link.figures(0.0).capacity_is_floor

    def test_one_stream_carries_no_more_than_all_do_now(self) -> None:
        link = fed(2.0)
        link.on_transfer(moved(0.5, streams=1, limited=False), now=0.0)
        for _ in range(2):
            link.on_transfer(moved(0.03), now=0.0)
        assert link.figures(0.0).capacity_gbps == pytest.approx(0.03, rel=1e-3)

    def test_what_waits_before_the_link_is_no_longer_path(self) -> None:
        """A window per second would have carried as much, if the path took a second."""
        link = LinkEstimator(GUESS)
        link.on_ping(0.01, now=0.0)
        for at in (1.0, 2.0):
            link.on_ping(1.0, now=at)
        link.on_transfer(moved(one_stream_gbps(1.0) * 4, 2.0, streams=4), now=3.0)
        assert link.figures(3.0).capacity_gbps == pytest.approx(one_stream_gbps(1.0) * 4, rel=1e-3)
        assert not link.figures(3.0).capacity_is_floor

    def test_no_burst_at_all_counts_as_a_failure(self) -> None:
        link = LinkEstimator(GUESS, EstimateSettings(failures_to_unreachable=2))
        link.on_burst(burst(0.0), now=0.0)
        assert link.figures(0.0).reachable
        link.on_burst(burst(0.0), now=0.0)
        assert not link.figures(0.0).reachable
        link.on_transfer(moved(1.0), now=0.0)
        assert link.figures(0.0).reachable


class TestShortTransfers:
    @pytest.mark.parametrize(
        ("size", "seconds", "told"),
        [(999_999, 1.0, False), (1_000_000, 1.0, True), (50_000_000, 0.299, False), (50_000_000, 0.3001, True)],
    )
    def test_how_long_is_long_enough(self, size: int, seconds: float, told: bool) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(TransferSample(bytes=size, seconds=seconds, streams=WIDE, link_limited=True), now=1.0)
        assert (link.figures(1.0).source is Source.MEASURED) is told

    def test_on_a_short_link_a_twentieth_of_a_second_is_enough(self) -> None:
        for seconds, told in ((0.049, False), (0.051, True)):
            link = LinkEstimator(prior(1, 1.0, 5.0))
            link.on_transfer(moved(4.0, seconds), now=1.0)
            assert (link.figures(1.0).source is Source.MEASURED) is told

    def test_long_enough_is_by_the_round_trip_of_a_link_that_is_empty(self) -> None:
        for least_s, told in ((0.1, True), (1.0, False)):
            link = LinkEstimator(prior(1, 1.0, 5.0))
            for rtt_s in (least_s, 1.0, 1.0):
                link.on_ping(rtt_s, now=0.0)
            link.on_transfer(moved(0.1, 0.5), now=1.0)
            assert (link.figures(1.0).source is Source.MEASURED) is told

    @pytest.mark.parametrize(("gap", "joined"), [(0.09, True), (0.11, False)])
    def test_stretches_with_a_short_gap_are_one(self, gap: float, joined: bool) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(moved(2.0, 0.25), now=1.0)
        link.on_transfer(moved(2.0, 0.25), now=1.0 + gap + 0.25)
        assert (link.figures(2.0).source is Source.MEASURED) is joined


class TestUnchangedFigures:
    def test_the_same_object_while_nothing_is_heard(self) -> None:
        link = fed(1.0, settings=EstimateSettings(half_life_s=5.0, stable_s=5.0))
        first = link.stable_figures(0.0)
        assert link.stable_figures(4.99) is first
        assert link.stable_figures(5.0) is not first, "a good part of the confidence has gone"

    def test_how_much_is_news_is_a_setting(self) -> None:
        for within, same in ((0.05, False), (0.2, True)):
            link = fed(1.0, settings=EstimateSettings(stable_within=within))
            first = link.stable_figures(0.0)
            link.on_burst(burst(1.21), now=0.0)
            assert (link.stable_figures(0.0) is first) is same

    def test_a_better_guess_is_news(self) -> None:
        link = LinkEstimator(GUESS)
        first = link.stable_figures(0.0)
        link.set_prior(prior(50, 0.4, 9.0))
        assert link.stable_figures(0.0) is not first
        assert link.stable_figures(0.0).capacity_gbps == 9.0

    @pytest.mark.parametrize("field", ["rtt_s", "one_stream_gbps", "capacity_gbps"])
    def test_each_figure_counts(self, field: str) -> None:
        figures = LinkFigures(rtt_s=1.0, one_stream_gbps=1.0, capacity_gbps=1.0)
        for value, alike in ((0.9, True), (0.89, False), (1.11, True), (1.12, False)):
            assert figures.alike(msgspec.structs.replace(figures, **{field: value}), 0.1) is alike

    def test_confidence_counts_by_its_difference(self) -> None:
        figures = LinkFigures(rtt_s=1.0, one_stream_gbps=1.0, capacity_gbps=1.0, rate_confidence=0.5)
        for value, alike in ((0.6, True), (0.61, False), (0.4, True), (0.39, False)):
            assert figures.alike(msgspec.structs.replace(figures, rate_confidence=value), 0.1 + 1e-9) is alike


class TestSettings:
    @pytest.mark.parametrize("name", ["half_life_s", "rtt_half_life_s", "rtt_window_s"])
    def test_bad_values_are_named(self, name: str) -> None:
        with pytest.raises(FiguresError, match=f"estimates.{name} is 0"):
            EstimateSettings(**{name: 0})

    @pytest.mark.parametrize("name", ["slow_in_a_row", "fast_in_a_row", "failures_to_unreachable", "history"])
    def test_counts_begin_at_one(self, name: str) -> None:
        assert getattr(EstimateSettings(**{name: 1}), name) == 1
        with pytest.raises(FiguresError, match=f"estimates.{name} is 0; it must be at least 1"):
            EstimateSettings(**{name: 0})


class TestFormulas:
    def test_gigabits_and_bytes(self) -> None:
        assert bytes_per_s(8.0) == 1e9
        assert gbps_of(1e9, 2.0) == 4.0

    def test_one_stream_moves_a_window_per_round_trip(self) -> None:
        assert one_stream_gbps(0.1) == pytest.approx(0.208)
        assert one_stream_gbps(0.0) == pytest.approx(2.6e6 * 8e-9 / 1e-6)

    @pytest.mark.parametrize(("single", "streams"), [(None, 5), (0.25, 5), (0.2, 5), (0.19, 6), (0.0, 5)])
    def test_streams_for_a_target(self, single: float | None, streams: int) -> None:
        assert streams_for(1.0, 0.1, single) == streams

    def test_streams_are_bounded(self) -> None:
        assert streams_for(0.0, 0.1) == 1
        assert streams_for(12.8, 0.1) == 64
        assert streams_for(99.0, 0.1) == 64

    def test_n_streams_carry_n_times_one_up_to_the_capacity(self) -> None:
        link = LinkFigures(rtt_s=0.1, one_stream_gbps=0.25, capacity_gbps=1.0)
        assert [rate_gbps(link, n) for n in (1, 3, 4, 5)] == [0.25, 0.75, 1.0, 1.0]

    def test_a_guess_is_little_believed(self) -> None:
        assert (GUESS.source, GUESS.rtt_confidence, GUESS.rate_confidence) == (Source.PRIOR, 0.2, 0.2)
        assert prior(10, 3.0, 2.0).one_stream_gbps == 2.0


class TestInference:
    SITES = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}  # noqa: RUF012

    def known(self, gbps: float, rtt_s: float = 0.1, single: float = 0.2) -> LinkFigures:
        return LinkFigures(rtt_s=rtt_s, one_stream_gbps=single, capacity_gbps=gbps)

    def test_confidence_grows_with_agreement_and_number(self) -> None:
        one = infer({("a1", "b1"): self.known(1.0)}, self.SITES, {}, [("a2", "b2")])["a2", "b2"]
        assert one.rate_confidence == pytest.approx(0.6 * 1 / 2)
        both = {("a1", "b1"): self.known(1.0), ("a1", "b2"): self.known(1.0)}
        two = infer(both, self.SITES, {}, [("a2", "b2")])["a2", "b2"]
        assert two.rate_confidence == pytest.approx(0.6 * 2 / 3)
        apart = {("a1", "b1"): self.known(0.5), ("a1", "b2"): self.known(1.5)}
        wide = infer(apart, self.SITES, {}, [("a2", "b2")])["a2", "b2"]
        assert wide.rate_confidence == pytest.approx(0.6 * 2 / 3 / 2)
        assert wide.capacity_gbps == 1.0

    def test_the_other_direction_is_the_second_choice(self) -> None:
        links = {("a1", "b1"): self.known(1.0), ("b1", "a1"): self.known(3.0)}
        assert infer(links, self.SITES, {}, [("a2", "b2")])["a2", "b2"].capacity_gbps == 1.0
        del links["a1", "b1"]
        found = infer(links, self.SITES, {}, [("a2", "b2")])["a2", "b2"]
        assert (found.capacity_gbps, found.rate_confidence) == pytest.approx((3.0, 0.4 / 2))

    def test_its_own_boxes_bound_it(self) -> None:
        boxes = {"a2": BoxFigures(up_gbps=0.7), "b2": BoxFigures(down_gbps=0.9)}
        found = infer({("a1", "b1"): self.known(1.0)}, self.SITES, boxes, [("a2", "b2"), ("a1", "b2")])
        assert found["a2", "b2"].capacity_gbps == 0.7
        assert found["a1", "b2"].capacity_gbps == 0.9

    def test_where_capacity_held_one_stream_down_the_window_would_allow_more(self) -> None:
        links = {("a1", "b1"): self.known(0.1, 0.1, single=0.1), ("a1", "b2"): self.known(0.1, 0.1, single=0.1)}
        assert infer(links, self.SITES, {}, [("a2", "b2")])["a2", "b2"].one_stream_gbps == pytest.approx(0.1)

    def test_a_link_to_itself_is_a_mistake(self) -> None:
        with pytest.raises(FiguresError, match="from a1 to itself"):
            infer({}, self.SITES, {}, [("a1", "a1")])


class TestCounts:
    def test_the_share_of_lost_pings_fades_with_the_round_trips_half_life(self) -> None:
        link = LinkEstimator(GUESS)
        for rtt_s in (0.1, 0.1, None, 0.1):
            link.on_ping(rtt_s, now=0.0)
        assert link.figures(0.0).loss == pytest.approx(0.25)
        later = link.settings.rtt_half_life_s
        link.on_ping(0.1, now=later)
        assert link.figures(later).loss == pytest.approx(0.5 / 3)

    def test_a_target_is_unreachable_after_so_many_failures_in_a_row(self) -> None:
        link = LinkEstimator(GUESS)
        for _ in range(link.settings.failures_to_unreachable - 1):
            link.on_unreachable(now=0.0)
            assert link.figures(0.0).reachable
        link.on_unreachable(now=0.0)
        assert not link.figures(0.0).reachable
        link.on_ping(0.1, now=1.0)
        assert link.figures(1.0).reachable
        link.on_unreachable(now=2.0)
        assert link.figures(2.0).reachable

    def test_a_reason_counts_the_rates_and_tells_their_age(self) -> None:
        link = fed(1.0, 1.0)
        assert link.figures(7.0).reason == "2 measured rates, the last 7 s ago"


@pytest.mark.parametrize(
    ("stream_gbps", "capacity_gbps", "streams"),
    [
        (0.26, 1.0, 5),  # streams fill their windows until the link is full
        (0.15, 1.0, 7),  # each loses packets: more of them fill it all the same
        (0.05, 1.0, 20),
    ],
)
def test_bursts_end_at_as_many_streams_as_fill_a_far_link(
    stream_gbps: float, capacity_gbps: float, streams: int
) -> None:
    one = LinkEstimator(prior(80.0, 0.26, 0.6))
    for number in range(20):
        figures = one.figures(60.0 * number)
        count = max(4, streams_for(2.0 * figures.capacity_gbps, figures.rtt_s, figures.one_stream_gbps))  # as `probe`
        gbps = min(capacity_gbps, count * stream_gbps)
        sample = BurstSample(bytes=1 << 27, seconds=1.0, streams=count, gbps=gbps)
        one.on_ping(0.08, now=60.0 * number)
        one.on_burst(sample, now=60.0 * number)
    figures = one.figures(1200.0)
    assert figures.capacity_gbps == pytest.approx(capacity_gbps, rel=0.05)
    assert streams <= streams_for(figures.capacity_gbps, figures.rtt_s, figures.one_stream_gbps) <= 1.5 * streams


def test_near_links_are_not_taken_to_need_as_many_streams_as_filled_them() -> None:
    one = LinkEstimator(prior(0.2, 10.0, 10.0))
    one.on_ping(0.0002, now=0.0)
    one.on_burst(BurstSample(bytes=1 << 30, seconds=1.0, streams=4, gbps=10.0), now=0.0)
    figures = one.figures(0.0)
    assert streams_for(figures.capacity_gbps, figures.rtt_s, figures.one_stream_gbps) == 1
