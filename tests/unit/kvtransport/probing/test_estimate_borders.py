"""Borders of what is believed of a link: samples just allowed, weights up to one, and what each observation resets."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, sqrt

import msgspec
import pytest

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.estimates import (
    BurstSample,
    EstimateSettings,
    HistoryEntry,
    LinkEstimator,
    SampleKind,
    TransferSample,
)
from p2pserve.kvtransport.probing.figures import LinkFigures, Source, one_stream_gbps, prior

GUESS = prior(100, 0.2, 5.0)
WIDE = 64  # streams that no window holds up at the rates here
MAX_BYTES = 1 << 50


def burst(gbps: float, *, streams: int = WIDE, stable: bool = True) -> BurstSample:
    return BurstSample(bytes=1, seconds=1.0, streams=streams, gbps=gbps, stable=stable)


def moved(gbps: float, seconds: float = 1.0, *, streams: int = WIDE, limited: bool = True) -> TransferSample:
    return TransferSample(bytes=round(gbps * 1.25e8 * seconds), seconds=seconds, streams=streams, link_limited=limited)


def fed(*bursts: BurstSample, guess: LinkFigures = GUESS) -> LinkEstimator:
    link = LinkEstimator(guess)
    for each in bursts:
        link.on_burst(each, now=0.0)
    return link


def spread(factor: float) -> float:
    """What lowers a confidence whose two samples, of the same weight, are so far from their mean."""
    return 1.0 + log(factor) ** 2 / 0.25


class TestSamples:
    TRANSFER = {"bytes": 1, "seconds": 1.0, "streams": 1, "link_limited": True}  # noqa: RUF012
    BURST = {"bytes": 1, "seconds": 1.0, "streams": 1, "gbps": 1.0}  # noqa: RUF012

    @pytest.mark.parametrize(("field", "value"), [("bytes", MAX_BYTES), ("seconds", 1e-9), ("streams", 256)])
    def test_a_transfer_just_allowed(self, field: str, value: float) -> None:
        sample = msgspec.convert({**self.TRANSFER, field: value}, TransferSample)
        assert getattr(sample, field) == value

    @pytest.mark.parametrize(
        ("field", "value"),
        [("bytes", 0), ("bytes", MAX_BYTES + 1), ("seconds", 0.0), ("seconds", inf), ("streams", 0), ("streams", 257)],
    )
    def test_a_transfer_that_cannot_be(self, field: str, value: float) -> None:
        with pytest.raises(FiguresError, match=f"sample.{field} is {value}"):
            TransferSample(**{**self.TRANSFER, field: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("bytes", 0),
            ("bytes", MAX_BYTES),
            ("seconds", 0.0),
            ("streams", 64),
            ("gbps", 0.0),
            ("per_stream_gbps", (0.0,) * 64),
        ],
    )
    def test_a_burst_just_allowed(self, field: str, value: object) -> None:
        assert getattr(BurstSample(**{**self.BURST, field: value}), field) == value  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("bytes", -1),
            ("bytes", MAX_BYTES + 1),
            ("seconds", -0.5),
            ("seconds", inf),
            ("streams", 0),
            ("streams", 65),
            ("gbps", -0.5),
            ("per_stream_gbps", (1.0,) * 65),
            ("per_stream_gbps", (-1.0,)),
        ],
    )
    def test_a_burst_that_cannot_be(self, field: str, value: object) -> None:
        with pytest.raises(FiguresError, match="burst"):
            BurstSample(**{**self.BURST, field: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("rtt_s", [0.0, -0.1, inf])
    def test_a_ping_that_cannot_be(self, rtt_s: float) -> None:
        with pytest.raises(FiguresError, match=r"ping\.rtt_s is"):
            LinkEstimator(GUESS).on_ping(rtt_s, now=0.0)


class TestLightSamples:
    """A burst that did not settle weighs 1: that is evidence as well."""

    def test_two_are_averaged_and_their_spread_lowers_the_confidence(self) -> None:
        found = fed(burst(1.0, stable=False), burst(1.21, stable=False)).figures(0.0)
        assert found.capacity_gbps == pytest.approx(1.1)
        assert found.rate_confidence == pytest.approx(2 / 3 / spread(1.1))

    def test_one_that_contradicts_it_is_not_believed(self) -> None:
        found = fed(burst(1.0, stable=False), burst(0.4, stable=False)).figures(0.0)
        assert found.capacity_gbps == pytest.approx(1.0)

    @pytest.mark.parametrize("stable", [True, False])
    def test_a_lower_bound_below_what_was_measured_says_nothing(self, stable: bool) -> None:
        link = fed(burst(2.0, stable=stable))
        link.on_transfer(moved(0.5, limited=False), now=0.0)
        assert link.figures(0.0).capacity_gbps == pytest.approx(2.0)
        assert not link.figures(0.0).capacity_is_floor


class TestWeights:
    def test_the_confidence_of_two_samples(self) -> None:
        assert fed(burst(1.0), burst(1.21)).figures(0.0).rate_confidence == pytest.approx(6 / 7 / spread(1.1))

    def test_what_has_faded_does_not_fade_again(self) -> None:
        link = LinkEstimator(GUESS, EstimateSettings(half_life_s=100.0))
        for now in (0.0, 100.0, 200.0):
            link.on_burst(burst(1.0), now=now)
        weight = 3 / 4 + 3 / 2 + 3
        assert link.figures(200.0).rate_confidence == pytest.approx(weight / (weight + 1))

    @pytest.mark.parametrize(("factor", "believed"), [(1.38, True), (1.40, False)])
    def test_samples_that_spread_allow_for_two_and_a_half_times_as_much(self, factor: float, believed: bool) -> None:
        # The two are a factor sqrt(1.3) from their mean: 1.3 ** 1.25 is 1.388.
        link = fed(burst(1.0), burst(1.3))
        link.on_burst(burst(sqrt(1.3) * factor), now=0.0)
        assert (link.figures(0.0).capacity_gbps > 1.2) is believed

    @pytest.mark.parametrize(("factor", "believed"), [(2.95, True), (3.05, False)])
    def test_but_never_for_more_than_three_times_the_mean(self, factor: float, believed: bool) -> None:
        link = fed(burst(0.25), burst(0.5), burst(1.0), burst(2.0))  # the last three replace the first
        assert link.figures(0.0).capacity_gbps == pytest.approx(1.0)
        link.on_burst(burst(factor), now=0.0)
        assert (link.figures(0.0).capacity_gbps > 1.1) is believed


class TestBounds:
    def test_a_bound_above_what_was_guessed_is_a_floor_however_small(self) -> None:
        link = LinkEstimator(prior(100, 0.1, 0.2))
        link.on_transfer(moved(0.5, limited=False), now=0.0)
        found = link.figures(0.0)
        assert found.capacity_gbps == pytest.approx(0.5)
        assert found.capacity_is_floor
        assert found.rate_confidence == pytest.approx(2 / 3)

    def test_a_floor_is_no_less_sure_than_the_guess_that_it_exceeds(self) -> None:
        link = LinkEstimator(msgspec.structs.replace(prior(100, 0.1, 0.2), rate_confidence=0.75))
        link.on_transfer(moved(0.5, limited=False), now=0.0)
        assert link.figures(0.0).rate_confidence == 0.75

    def test_a_higher_bound_is_averaged_with_what_was_measured(self) -> None:
        link = fed(burst(2.0))
        link.on_transfer(moved(2.5, limited=False), now=0.0)
        found = link.figures(0.0)
        assert found.capacity_gbps == pytest.approx((2.0**3 * 2.5**2) ** (1 / 5))
        assert not found.capacity_is_floor

    def test_a_measurement_replaces_a_floor(self) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(moved(7.0, limited=False), now=0.0)
        link.on_burst(burst(6.0), now=0.0)
        found = link.figures(0.0)
        assert found.capacity_gbps == pytest.approx(6.0)
        assert not found.capacity_is_floor
        assert found.rate_confidence == pytest.approx(3 / 4)

    @pytest.mark.parametrize(("each", "believed"), [(0.1, one_stream_gbps(0.1)), (0.3, 0.3)])
    def test_one_stream_carries_its_window_or_what_was_seen_if_that_is_more(self, each: float, believed: float) -> None:
        link = LinkEstimator(GUESS)
        link.on_ping(0.1, now=0.0)
        link.on_transfer(moved(4 * each, streams=4, limited=False), now=0.0)
        assert link.figures(0.0).one_stream_gbps == pytest.approx(believed)

    def test_one_stream_that_was_measured_is_averaged_and_its_change_noted(self) -> None:
        link = fed(burst(0.1, streams=1), burst(0.121, streams=1))
        assert link.figures(0.0).one_stream_gbps == pytest.approx(0.11)
        for _ in range(2):
            link.on_burst(burst(0.04, streams=1), now=0.0)
        assert link.figures(0.0).one_stream_gbps == pytest.approx(0.04)
        changes = [each.value for each in link.history() if each.kind is SampleKind.CHANGED]
        assert changes == pytest.approx([0.04, 0.04]), "of one stream, and of the capacity"

    def test_stretches_add_up(self) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(moved(1.0, 0.25), now=1.0)
        link.on_transfer(moved(3.0, 0.25), now=1.25)
        found = link.figures(1.25)
        assert found.capacity_gbps == pytest.approx(2.0)
        assert not found.capacity_is_floor
        assert found.rate_confidence == pytest.approx(1 / 2), "half a second weighs 1"

    def test_stretches_of_other_streams_do_not(self) -> None:
        link = LinkEstimator(GUESS)
        link.on_transfer(moved(1.0, 0.25), now=1.0)
        link.on_transfer(moved(1.0, 0.25, streams=WIDE - 1), now=1.25)
        assert link.figures(1.25).source is Source.PRIOR

    def test_how_short_is_too_short_follows_the_measured_round_trip(self) -> None:
        link = LinkEstimator(GUESS)
        link.on_ping(0.02, now=0.0)
        link.on_transfer(moved(1.0, 0.25), now=1.0)
        assert link.figures(1.0).source is Source.MEASURED


class TestPings:
    def test_one_ping_is_half_believed_and_none_as_the_guess_is(self) -> None:
        link = LinkEstimator(GUESS)
        assert link.figures(0.0).rtt_confidence == 0.2
        link.on_ping(0.1, now=0.0)
        assert link.figures(0.0).rtt_confidence == pytest.approx(0.5)

    def test_jitter_follows_a_quarter_of_each_difference(self) -> None:
        link = LinkEstimator(GUESS)
        for rtt_s in (0.1, 0.12):
            link.on_ping(rtt_s, now=0.0)
        assert link.figures(0.0).jitter_s == pytest.approx(0.02 / 4)

    @pytest.mark.parametrize(("later", "least"), [(300.0, 0.1), (300.5, 0.11)])
    def test_the_least_round_trip_counts_for_its_window(self, later: float, least: float) -> None:
        for heard_again in (True, False):
            link = LinkEstimator(GUESS)
            link.on_ping(0.1, now=0.0)
            link.on_ping(0.11, now=later if heard_again else 200.0)
            assert link.figures(later).rtt_min_s == least

    def test_another_path_through_the_internet_makes_the_least_and_one_stream_unknown(self) -> None:
        link = fed(burst(0.05, streams=1))
        for rtt_s in (0.1, 0.05, 0.05, 0.05):
            link.on_ping(rtt_s, now=0.0)
        before = link.figures(0.0)
        assert (before.rtt_s, before.rtt_min_s) == pytest.approx((0.05, 0.05))
        for _ in range(3):
            link.on_ping(0.2, now=0.0)
        after = link.figures(0.0)
        assert (after.rtt_s, after.rtt_min_s) == pytest.approx((0.2, 0.2))
        latest = link.history()[-1]
        assert latest.kind is SampleKind.CHANGED
        assert latest.value == pytest.approx(0.2)

    def test_what_is_lost_is_recorded_and_until_then_guessed(self) -> None:
        link = LinkEstimator(msgspec.structs.replace(GUESS, loss=0.25))
        assert link.figures(0.0).loss == 0.25
        link.on_ping(None, now=3.0)
        assert link.figures(3.0).loss == 1.0
        assert link.history() == (HistoryEntry(3.0, SampleKind.LOST_PING, 0.0),)


def ping(link: LinkEstimator) -> None:
    link.on_ping(0.1, now=1.0)


def transfer(link: LinkEstimator) -> None:
    link.on_transfer(moved(1.0), now=1.0)


def whole_burst(link: LinkEstimator) -> None:
    link.on_burst(burst(1.0), now=1.0)


@pytest.mark.parametrize("event", [ping, transfer, whole_burst])
def test_a_sign_of_life_takes_back_all_failures_and_is_news(event: Callable[[LinkEstimator], None]) -> None:
    link = LinkEstimator(GUESS)
    first = link.stable_figures(0.0)
    for _ in range(3):
        link.on_unreachable(now=0.0)
    assert not link.stable_figures(0.0).reachable
    event(link)
    assert link.stable_figures(1.0).reachable
    assert link.stable_figures(1.0) != first
    for _ in range(2):
        link.on_unreachable(now=1.0)
        assert link.figures(1.0).reachable, "three in a row again"
    assert [each.value for each in link.history() if each.kind is SampleKind.UNREACHABLE] == [1, 2, 3, 1, 2]


def test_a_long_reason_is_cut_to_what_figures_may_have() -> None:
    link = LinkEstimator(prior(100, 0.2, 5.0, reason="x" * 200))
    link.on_ping(0.1, now=0.0)
    reason = link.figures(0.0).reason
    assert len(reason) == 200
    assert reason.startswith("round trip measured, capacity of prior: x")


def test_a_clock_that_went_back_makes_no_negative_age() -> None:
    link = LinkEstimator(GUESS)
    link.on_transfer(moved(7.0, limited=False), now=10.0)
    assert link.figures(5.0).reason == "never held up by the link; 1 measured rates, the last 0 s ago"
