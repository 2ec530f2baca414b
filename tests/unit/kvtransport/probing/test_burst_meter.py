"""What a burst has shown, bin by bin: the arithmetic of its steady part, by hand."""

from __future__ import annotations

import pytest

from p2pserve.kvtransport.probing.burst_meter import BIN_S, BurstMeter
from p2pserve.kvtransport.probing.figures import gbps_of

SHORT = 0.001  # a round trip of less than a bin


def filled(bins: list[tuple[int, ...]], rtt_s: float = SHORT) -> tuple[BurstMeter, float]:
    """Bytes of each stream, in the middle of each bin; and the moment at which the last of these bins is over."""
    meter = BurstMeter(len(bins[0]), rtt_s)
    meter.add(0, 0, 0.0)
    for number, sizes in enumerate(bins):
        for stream, size in enumerate(sizes):
            meter.add(stream, size, (number + 0.5) * BIN_S)
    return meter, (len(bins) + 0.01) * BIN_S


def rate(size: float) -> float:
    """Gb/s of so many bytes per bin."""
    return gbps_of(size, BIN_S)


def test_the_steady_part_is_what_counts_for_each_stream() -> None:
    ramp = [(10, 0), (20, 0), (40, 0), (80, 0)]
    meter, now = filled([*ramp, *[(300, 100)] * 12])
    sample = meter.sample(now, "time")
    assert sample.gbps == pytest.approx(rate(400))
    assert sample.per_stream_gbps == pytest.approx((rate(300), rate(100)))
    assert (sample.bytes, sample.streams, sample.ended) == (150 + 12 * 400, 2, "time")
    assert sample.seconds == pytest.approx(now)
    assert meter.last_at == pytest.approx(15.5 * BIN_S)


@pytest.mark.parametrize(("bins", "stable"), [(7, False), (8, True)])
def test_four_bins_for_each_half_are_enough(bins: int, stable: bool) -> None:
    meter, now = filled([(100,)] * bins)
    assert meter.is_stable(now) is stable
    assert meter.sample(now, "").stable is stable


@pytest.mark.parametrize(("early", "stable"), [(91, True), (89, False), (109, True), (111, False)])
def test_two_halves_that_differ_by_more_than_a_tenth_are_not_stable(early: int, stable: bool) -> None:
    meter, now = filled([*[(early,)] * 6, *[(100,)] * 6])
    assert meter.is_stable(now) is stable


def test_silence_is_not_stable_and_counts() -> None:
    meter, _ = filled([(100,)] * 4)
    late = 40.01 * BIN_S
    assert not meter.is_stable(late)
    assert meter.sample(late, "").gbps == pytest.approx(rate(10)), "400 bytes in 40 bins"


@pytest.mark.parametrize(("first", "counted"), [(39, 100.0), (40, (40 + 11 * 100) / 12)])
def test_slow_start_is_over_when_four_bins_have_85_of_a_hundred(first: int, counted: float) -> None:
    """40 and three times 100 are 85 of a hundred of four times 100."""
    meter, now = filled([(first,), *[(100,)] * 11])
    assert meter.sample(now, "").gbps == pytest.approx(rate(counted))


@pytest.mark.parametrize(("rtt_bins", "bins", "counted"), [(3.0, 10, 9), (2.5, 9, 8), (3.0, 5, 3)])
def test_only_whole_round_trips_count(rtt_bins: float, bins: int, counted: int) -> None:
    """The latest of them: what came before is left out."""
    meter, now = filled([*[(130,)] * (bins - counted), *[(100,)] * counted], rtt_bins * BIN_S)
    assert meter.sample(now, "").gbps == pytest.approx(rate(100))


def test_what_comes_before_the_first_byte_counts_with_it() -> None:
    meter = BurstMeter(1, SHORT)
    assert meter.seconds(5.0) == 0.0
    meter.add(0, 10, 1.0)
    meter.add(0, 20, 0.5)
    assert (meter.last_at, meter.bytes) == (1.0, 30)
    assert meter.seconds(0.5) == 0.0
    assert meter.seconds(1.25) == 0.25


def test_over_within_a_bin_each_stream_has_its_own_rate() -> None:
    meter = BurstMeter(2, SHORT)
    meter.add(0, 1000, 1.0)
    meter.add(1, 3000, 1.0 + BIN_S / 2)
    sample = meter.sample(1.0 + BIN_S / 2, "")
    assert sample.per_stream_gbps == pytest.approx((gbps_of(1000, BIN_S / 2), gbps_of(3000, BIN_S / 2)))
