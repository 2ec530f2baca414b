"""When requests have what: chances against samples of what is assumed, and how several deadlines go together."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pserve.coordinator.planning.lower.queueing import DecodeTimes, KVDelays, PrefillTimes, RequestTimes
from p2pserve.coordinator.planning.model.length_classes import Classes, classify_lengths
from p2pserve.coordinator.planning.model.workload import Slo, Workload

SAMPLES = 200_000
ONE, NONE = np.ones((1, 1)), np.zeros(1)
Sample = NDArray[np.float64]


def classes(*outputs: int) -> Classes:
    workload = Workload(name="w", prompts=np.full(len(outputs), 100), outputs=np.array(outputs), rate=1.0)
    return classify_lengths(workload, prompts=1, outputs=[])


def times(output: int = 11, *, early: bool = False, stalled: float = 0.3, busy: float = 0.0) -> RequestTimes:
    """Prefill of 0.4 s; ten gaps of 0.05 or 0.15 s; KV that takes 0.1 s, and 0.5 s more where others send."""
    return RequestTimes(
        classes(output),
        PrefillTimes(0.4 * ONE, 0.1 * ONE, NONE + 0.5, NONE + 0.3),
        DecodeTimes(NONE + 0.08, 0.05 * ONE, 0.15 * ONE, 0.01 * ONE, NONE + stalled, NONE),
        KVDelays(0.1 * ONE, NONE + busy, 0.5 * ONE),
        0.2 * ONE,
        NONE + early,
        NONE + 0.02 * early,
    )


def draw(*, early: bool = False, stalled: float = 0.3, busy: float = 0.0) -> tuple[Sample, Sample, Sample]:
    """The time to the first token without KV and admission, from token to token, and of KV on its way."""
    rng = np.random.default_rng(4)
    waits = np.where(rng.random(SAMPLES) < 0.5, rng.exponential(0.3, SAMPLES), 0.0)
    prefill = rng.normal(0.4, 0.1, SAMPLES) + waits
    tpot = np.where(rng.random(SAMPLES) < stalled, 0.15, 0.05) + rng.normal(0.0, 0.01, SAMPLES)
    kv = 0.1 + np.where(rng.random(SAMPLES) < busy, rng.exponential(0.5, SAMPLES), 0.0)
    return prefill, tpot, kv


@pytest.mark.parametrize("deadline", [0.5, 0.7, 1.0, 1.5])
def test_a_first_token_waits_in_the_queue_and_for_room(deadline: float) -> None:
    prefill, _, _ = draw()
    assert times().first_token_within(deadline)[0, 0] == pytest.approx((prefill + 0.2 <= deadline).mean(), abs=5e-3)


@pytest.mark.parametrize("deadline", [0.7, 1.0, 1.5])
def test_a_first_token_behind_the_kv_waits_for_that_and_for_a_step(deadline: float) -> None:
    prefill, _, _ = draw()
    expected = (prefill + 0.2 + 0.1 + 0.02 <= deadline).mean()
    assert times(early=True).first_token_within(deadline)[0, 0] == pytest.approx(expected, abs=5e-3)


def test_what_gateway_and_replicas_say_to_each_other_comes_on_top() -> None:
    far = replace(times(), control_s=NONE + 0.25)
    assert far.first_token_within(1.25) == pytest.approx(times().first_token_within(1.0))
    assert far.end_within(2.25) == pytest.approx(times().end_within(2.0))
    assert far.pace_within(0.1) == pytest.approx(times().pace_within(0.1))


def test_kv_that_varies_spreads_a_first_token_behind_it() -> None:
    prefill, _, kv = draw(busy=0.4)
    late = times(early=True, busy=0.4)
    assert late.first_token_within(2.0)[0, 0] == pytest.approx((prefill + 0.22 + kv <= 2.0).mean(), abs=0.03)
    assert late.first_token_within(2.0)[0, 0] < times(early=True).first_token_within(2.0)[0, 0]
    assert times(busy=0.4).first_token_within(0.9)[0, 0] == times().first_token_within(0.9)[0, 0]


@pytest.mark.parametrize("stalled", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("deadline", [0.075, 0.085, 0.12, 0.185])
def test_the_pace_is_one_of_two_and_kv_and_admission_count_as_gaps(stalled: float, deadline: float) -> None:
    _, tpot, _ = draw(stalled=stalled)
    expected = (tpot + (0.1 + 0.2) / 10 <= deadline).mean()
    assert times(stalled=stalled).pace_within(deadline)[0, 0] == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("deadline", [0.055, 0.1, 0.155])
def test_where_the_first_token_waits_the_pace_does_not(deadline: float) -> None:
    _, tpot, _ = draw()
    expected = (tpot <= deadline).mean()
    assert times(early=True).pace_within(deadline)[0, 0] == pytest.approx(expected, abs=5e-3)


def test_an_answer_of_one_token_has_no_pace_and_ends_with_it() -> None:
    one, two = times(output=1), times(output=2)
    assert one.pace_within(0.0)[0, 0] == 1.0
    assert two.pace_within(0.0)[0, 0] < 0.01
    prefill, _, _ = draw()
    assert one.end_within(1.0)[0, 0] == pytest.approx((prefill + 0.2 + 0.1 <= 1.0).mean(), abs=5e-3)


@pytest.mark.parametrize("busy", [0.0, 0.4])
@pytest.mark.parametrize("stalled", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("deadline", [1.0, 1.6, 2.2, 3.0])
def test_the_end_comes_after_all_of_it(deadline: float, stalled: float, busy: float) -> None:
    """All but the wait is taken for one normal time, with the mean and the variance of the sum."""
    prefill, tpot, kv = draw(stalled=stalled, busy=busy)
    rest = np.random.default_rng(9).normal((kv + 10 * tpot).mean(), (kv + 10 * tpot).std(), SAMPLES)
    expected = (prefill + 0.2 + rest <= deadline).mean()
    assert times(stalled=stalled, busy=busy).end_within(deadline)[0, 0] == pytest.approx(expected, abs=6e-3)


def test_lengths_that_vary_within_a_class_spread_the_end() -> None:
    alike, varied = times(), times()
    varied = RequestTimes(
        classes(1, 21), varied.prefilling, varied.decoding, varied.sending, varied.admit_s, varied.early, varied.step_s
    )
    assert float(varied.classes.output[0]) == float(alike.classes.output[0]) == 11.0
    assert varied.end_within(2.5)[0, 0] < alike.end_within(2.5)[0, 0] - 0.05
    assert varied.end_within(1.0)[0, 0] > alike.end_within(1.0)[0, 0]


def test_deadlines_together() -> None:
    found = times()
    first, pace, end = found.first_token_within(1.0), found.pace_within(0.1), found.end_within(1.6)
    assert found.share_in_time(Slo()).tolist() == [1.0]
    assert found.share_in_time(Slo(ttft_s=1.0))[0] == pytest.approx(first[0, 0])
    assert found.share_in_time(Slo(tpot_s=0.1))[0] == pytest.approx(pace[0, 0])
    assert found.share_in_time(Slo(e2e_s=1.6))[0] == pytest.approx(end[0, 0])
    both = first[0, 0] * pace[0, 0]
    assert found.share_in_time(Slo(ttft_s=1.0, tpot_s=0.1))[0] == pytest.approx(both)
    assert end[0, 0] < both < 1.0
    assert found.share_in_time(Slo(ttft_s=1.0, tpot_s=0.1, e2e_s=1.6))[0] == pytest.approx(end[0, 0])
    assert found.share_in_time(Slo(ttft_s=1.0, tpot_s=0.1, e2e_s=inf))[0] == pytest.approx(both)


def test_classes_count_by_their_shares() -> None:
    one = times()
    two = classify_lengths(
        Workload(name="w", prompts=np.array([1, 1, 1, 1]), outputs=np.array([1, 11, 11, 11]), rate=1.0),
        prompts=1, outputs=[0.25],
    )  # fmt: skip
    assert two.share.tolist() == [0.25, 0.75]
    wide = np.ones((1, 2))
    found = RequestTimes(
        two, PrefillTimes(0.4 * wide, 0.1 * wide, NONE + 0.5, NONE + 0.3),
        DecodeTimes(NONE + 0.08, 0.05 * wide, 0.15 * wide, 0.01 * wide, NONE + 0.3, NONE),
        KVDelays(0.1 * wide, NONE, 0.5 * wide), 0.2 * wide, NONE, NONE,
    )  # fmt: skip
    paced = float(one.pace_within(0.1)[0, 0])
    assert found.share_in_time(Slo(tpot_s=0.1))[0] == pytest.approx(0.25 + 0.75 * paced)


def test_the_mean_and_the_variance_of_kv_are_by_class() -> None:
    quiet, shared = (KVDelays(0.1 * np.ones((1, 2)), NONE + busy, np.array([[0.5, 1.0]])) for busy in (0.0, 0.4))
    assert quiet.mean_s.tolist() == [[0.1, 0.1]]
    assert quiet.variance.tolist() == [[0.0, 0.0]]
    assert shared.mean_s[0] == pytest.approx([0.3, 0.5])
    # a chance p of an exponential of mean m has a variance of p (2 - p) m^2
    assert shared.variance[0] == pytest.approx([0.4 * 1.6 * 0.25, 0.4 * 1.6])
