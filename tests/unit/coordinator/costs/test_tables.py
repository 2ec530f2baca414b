"""Measured tables as step times, against numbers worked out from the files by other means."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.coordinator.costs.step_times import StepTimes, chunk_pairs
from p2pserve.coordinator.costs.tables import (
    DistserveTimes,
    InterpolatedTable,
    SplitwiseTimes,
    TableError,
    helix_layers,
    perf_rows,
)

# Milliseconds at 64, 512, 1500, 8192 prompt tokens; released decode at 1, 64, 512; measured decode at 1, 16, 64.
REFERENCE = {
    ("llama2-70b", "a100-80gb", 8): ((64.6, 93.0, 217.5, 1781.0), (42.6, 42.8, 45.0), (44.9, 50.4, 71.6)),
    ("llama2-70b", "h100-80gb", 8): ((61.4, 53.9, 104.1, 831.5), (31.5, 30.7, 30.6), (29.8, 34.2, 50.2)),
    ("llama2-70b", "h100-80gb-pcap", 8): ((79.9, 70.0, 135.3, 1080.9), (31.5, 30.7, 30.6), (29.8, 34.2, 50.2)),
    ("bloom-176b", "a100-80gb", 8): ((69.9, 174.4, 403.0, 3591.5), (47.5, 47.6, 49.3), (48.8, 57.3, 96.6)),
}


@pytest.mark.parametrize("setup", REFERENCE)
def test_splitwise_times_are_those_of_the_reference(setup: tuple[str, str, int]) -> None:
    prefill, released, measured = REFERENCE[setup]
    times, on_axis = SplitwiseTimes(*setup), SplitwiseTimes(*setup, mode="measured")
    for tokens, ms in zip((64, 512, 1500, 8192), prefill, strict=True):
        assert times.prefill_s(tokens, 0) * 1e3 == pytest.approx(ms, abs=0.051)
        assert on_axis.prefill_s(tokens, 0) == times.prefill_s(tokens, 0)
    for requests, ms in zip((1, 64, 512), released, strict=True):
        assert times.decode_line(requests).step_s(10_000) * 1e3 == pytest.approx(ms, abs=0.051)
    for requests, ms in zip((1, 16, 64), measured, strict=True):
        assert on_axis.decode_line(requests).step_s(10_000) * 1e3 == pytest.approx(ms, abs=0.051)
    assert times.mixed_s(448, 0, 64, 10_000) == pytest.approx(1.1 * times.prefill_s(512, 0))


def test_splitwise_extrapolates_the_batch_but_never_down() -> None:
    eight = SplitwiseTimes("llama2-70b", "h100-80gb", 8, mode="measured")
    grow = eight.decode_line(128).fixed_s - eight.decode_line(64).fixed_s
    assert grow == pytest.approx(2 * (eight.decode_line(64).fixed_s - eight.decode_line(32).fixed_s))
    # With two cards the runs of 64 were cut short, and the table falls there.
    two = SplitwiseTimes("llama2-70b", "a100-80gb", 2, mode="measured")
    assert two.decode_line(5000).fixed_s == two.decode_line(1).fixed_s


def test_all_of_perf_model_is_read() -> None:
    rows = perf_rows()
    assert len(rows) == 1260
    assert {(row.model, row.hardware, row.tp) for row in rows} >= set(REFERENCE)


def test_helix_layers_are_read() -> None:
    layers = helix_layers()
    assert set(layers) == {"a100", "v100", "l4", "l4x2", "t4", "t4x2", "t4x4"}
    assert 60 * layers["a100"].prefill(1000) == pytest.approx(0.300)
    assert layers["a100"].decode(50) == pytest.approx(1.7e-3)


def test_distserve_fits_by_hand() -> None:
    times = DistserveTimes("distserve", "opt-13b", 1)
    two_prompts = 2 * chunk_pairs(0, 500)
    expected_ms = 18.10254647486372 + 0.1019122572698738 * 1000 + 7.122264314252114e-06 * 2 * 500**2
    assert times.prefill_s(1000, two_prompts) * 1e3 == pytest.approx(expected_ms)
    few, many = times.decode_line(94), times.decode_line(95)
    assert few.step_s(1000) * 1e3 == pytest.approx(
        19.934702624895458 + 0.0006269356524350583 * 1000 + 0.03850697740828398 * 94
    )
    assert many.fixed_s * 1e3 == pytest.approx(7.1661889468253595 + 0.15831096191764046 * 95)


def test_a_falling_fit_is_held() -> None:
    times = DistserveTimes("vllm", "opt-66b", 2)  # the one with a negative square
    assert times.prefill_s(100_000, chunk_pairs(0, 100_000)) == times.prefill_s(0, 0) > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SplitwiseTimes("llama2-70b", "a100-80gb", 3), "perf_model.csv has no .*'a100-80gb', 3"),
        (lambda: DistserveTimes("distserve", "opt-13b", 8), "has no .*'opt-13b', 8"),
        (lambda: InterpolatedTable({1: 2.0}), "two points"),
    ],
)
def test_what_was_not_measured_is_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(TableError, match=words):
        make()


SOURCES: tuple[StepTimes, ...] = (
    SplitwiseTimes("llama2-70b", "h100-80gb", 4),
    SplitwiseTimes("bloom-176b", "h100-80gb", 8, mode="measured"),
    DistserveTimes("distserve", "opt-66b", 4),
    DistserveTimes("vllm", "opt-66b", 2),
)


@pytest.mark.parametrize("times", SOURCES, ids=lambda times: times.source)
@settings(deadline=None)
@given(tokens=st.integers(1, 60_000), requests=st.integers(1, 1000), length=st.integers(1, 4000))
def test_every_source_keeps_the_contract(times: StepTimes, tokens: int, requests: int, length: int) -> None:
    pairs = chunk_pairs(0, tokens)
    line = times.decode_line(requests)
    assert times.prefill_s(tokens, pairs) > 0
    assert times.prefill_interval_s(tokens, pairs) == times.prefill_s(tokens, pairs)
    assert line.fixed_s >= 0
    assert line.context_s >= 0
    assert line.step_s(requests * length) > 0
    assert times.mixed_s(tokens, pairs, requests, requests * length) >= times.prefill_s(tokens, pairs)
