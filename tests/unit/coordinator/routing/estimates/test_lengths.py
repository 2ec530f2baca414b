"""Guesses of how long answers will be: drawn as in the paper, and learned from what has ended."""

import numpy as np
import pytest

from p2pserve.coordinator.demand_meter import azure_lengths
from p2pserve.coordinator.routing.estimates.lengths import (
    SAMPLE,
    AnswerTail,
    LearnedLengths,
    SampledLengths,
    make_predictor,
)
from p2pserve.coordinator.routing.interface import LENGTH_PREDICTORS

CONVERSATIONS = azure_lengths("conversation")[1]


def test_predictors_are_made_by_name() -> None:
    kinds = [type(make_predictor(name)) for name in LENGTH_PREDICTORS]
    assert kinds == [LearnedLengths, SampledLengths]


def test_samples_are_drawn_from_the_normal_distribution_of_a_sample() -> None:
    predictor = SampledLengths((100, 300))
    rng = np.random.default_rng(5)
    drawn = [predictor.predict(10, rng) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(200.0, rel=0.05)
    assert min(drawn) >= 1.0
    again = np.random.default_rng(5)
    assert [SampledLengths((100, 300)).predict(999, again)] == drawn[:1]


def test_the_sample_is_what_was_answered_lately() -> None:
    predictor, rng = SampledLengths(), np.random.default_rng(0)
    assert np.mean([predictor.predict(1, rng) for _ in range(4000)]) == pytest.approx(CONVERSATIONS.mean(), rel=0.3)
    for _ in range(3):
        predictor.record(1, 900)
    assert np.std([predictor.predict(1, rng) for _ in range(100)]) > 1.0  # three are too few to go by
    for _ in range(SAMPLE):
        predictor.record(1, 40)
    assert {predictor.predict(1, rng) for _ in range(10)} == {40.0}


def test_answers_to_like_prompts_are_learned() -> None:
    predictor, rng = LearnedLengths(), np.random.default_rng(0)
    assert predictor.predict(100, rng) == pytest.approx(CONVERSATIONS.mean())
    for _ in range(400):
        predictor.record(100, 20)
        predictor.record(3000, 400)
    assert predictor.predict(100, rng) == pytest.approx(20.0, rel=0.25)
    assert predictor.predict(3000, rng) == pytest.approx(400.0, rel=0.05)
    assert predictor.predict(9, rng) == pytest.approx(210.0, rel=0.05)  # of no kind that was seen: the mean of all


def test_one_odd_answer_does_not_speak_for_its_kind_and_old_ones_fade() -> None:
    predictor, rng = LearnedLengths(), np.random.default_rng(0)
    for _ in range(100):
        predictor.record(100, 50)
    predictor.record(5000, 4000)
    assert predictor.predict(5000, rng) < 1000.0
    for _ in range(4 * SAMPLE):
        predictor.record(100, 500)
    assert predictor.predict(100, rng) == pytest.approx(500.0, rel=0.05)


def test_an_answer_has_a_token() -> None:
    predictor, rng = LearnedLengths(), np.random.default_rng(0)
    for _ in range(SAMPLE):
        predictor.record(0, 0)
    assert predictor.predict(0, rng) == 1.0


def test_the_tail_is_of_the_latest_answers() -> None:
    tail = AnswerTail()
    conversations = tail.share_beyond(np.array([100.0, 1000.0]))
    assert conversations == pytest.approx([np.mean(CONVERSATIONS > 100), np.mean(CONVERSATIONS > 1000)], abs=0.15)
    for tokens in [10, 10, 10, 1000] * SAMPLE:
        tail.record(tokens)
    assert tail.share_beyond(np.array([-5.0, 0.0, 1.0, 100.0, 1e4, 1e9])) == pytest.approx(
        [1.0, 1.0, 1.0, 0.25, 0.0, 0.0], abs=0.01
    )
