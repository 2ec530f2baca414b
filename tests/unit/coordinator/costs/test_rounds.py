"""Rounds of pipelines that decode and prefill at once, added up by hand, and the chunks that deadlines allow."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.costs.rounds import TOKEN_BUDGETS, PrefillChunk, choose_token_budget, equal_rounds_s, round_s

from ....linear_times import LinearTimes

PIPELINE = LinearTimes(token=0.4, request=1.0, context=0.01, interval_share=0.25)


def test_one_stage_takes_as_long_as_its_step() -> None:
    assert round_s(PIPELINE, 1, [PrefillChunk(5, 0.0)], 3, 100.0) == pytest.approx(5 * 0.4 + 3.0 + 1.0)


def test_a_single_chunk_holds_up_the_whole_round() -> None:
    # its batch takes 9 * 0.4 s through all stages, and the others cannot pass it
    assert round_s(PIPELINE, 4, [PrefillChunk(9, 0.0)], 4, 0.0) == pytest.approx(9 * 0.4 + 4.0)


def test_with_a_chunk_in_every_batch_the_slowest_stage_counts() -> None:
    # four batches of 40 tokens and one that decodes, at a quarter of 0.4 s each
    slowest = 4 * 41 * 0.1
    assert slowest < 40 * 0.4 + 4.0
    assert round_s(PIPELINE, 4, [PrefillChunk(40, 0.0)] * 4, 4, 0.0) == pytest.approx(40 * 0.4 + 4.0)
    # where nobody decodes much, only the chunks take time
    light = LinearTimes(token=0.4, request=0.01, interval_share=0.5)
    assert round_s(light, 4, [PrefillChunk(40, 0.0)] * 4, 4, 0.0) == pytest.approx(4 * 41 * 0.2)


def test_two_chunks_for_four_batches_leave_two_that_only_decode() -> None:
    slow = LinearTimes(token=0.1, request=10.0, interval_share=1.0)
    assert round_s(slow, 4, [PrefillChunk(400, 0.0)] * 2, 4, 0.0) == pytest.approx(2 * 401 * 0.1 + 0.5 * 40.0)


def test_the_chunk_is_the_largest_that_the_deadline_allows() -> None:
    times = LinearTimes(step=0.02, token=1e-4)
    taken = {tokens: 0.02 + (tokens - 4) * 1e-4 for tokens in TOKEN_BUDGETS}
    assert choose_token_budget(times, 1, inf) == TOKEN_BUDGETS[0]
    for tokens in TOKEN_BUDGETS:
        assert choose_token_budget(times, 1, taken[tokens] / 0.7 + 1e-9) == tokens
    assert choose_token_budget(times, 1, 1e-3) == TOKEN_BUDGETS[-1]


def test_a_pipeline_reads_less_at_a_time() -> None:
    times = LinearTimes(step=0.02, token=1e-4, interval_share=0.5)
    assert choose_token_budget(times, 1, 0.33) == 2048
    # four chunks of 764 at half of 0.0964 s are 0.193 s; of 1,020 they are 0.244 s, and 0.7 of the deadline is 0.231 s
    assert choose_token_budget(times, 4, 0.33) == 768


@given(
    stages=st.integers(1, 5), tokens=st.integers(1, 500), requests=st.integers(1, 40), context=st.integers(0, 5000),
    share=st.floats(0.1, 1.0),
)  # fmt: skip
def test_rounds_with_equal_chunks_are_rounds(
    stages: int, tokens: int, requests: int, context: int, share: float
) -> None:
    times = LinearTimes(step=0.1, token=0.01, pair=1e-4, request=0.05, context=1e-3, interval_share=share)
    chunk = PrefillChunk(tokens, tokens * 2.5)
    found = equal_rounds_s(times, stages, chunk, requests, context)
    assert len(found) == stages
    assert found == pytest.approx(
        [round_s(times, stages, [chunk] * many, requests, context) for many in range(1, stages + 1)]
    )


def test_unlike_chunks_each_take_the_slowest_stage_their_own_time() -> None:
    times = LinearTimes(token=0.1, request=1.0, context=0.01)
    chunks = [PrefillChunk(100, 0.0), PrefillChunk(300, 0.0)]
    # each beside one of four requests; two batches of four only decode, and all wait for the context of 50 tokens
    assert round_s(times, 4, chunks, 4, 50.0) == pytest.approx(10.1 + 30.1 + 0.5 * 4.0 + 0.5)


def test_fewer_requests_than_stages_are_fewer_batches() -> None:
    times = LinearTimes(token=0.1, request=1.0)
    assert round_s(times, 4, [PrefillChunk(1000, 0.0)], 2, 0.0) == pytest.approx(102.0)
    # two requests in two batches: with two chunks, no batch is left that only decodes
    assert round_s(times, 4, [PrefillChunk(1000, 0.0)] * 2, 2, 0.0) == pytest.approx(200.0)


def test_the_budget_counts_the_context_of_all_who_decode() -> None:
    """Four of them in each of two batches, of 1,024 tokens each, at 10 us a token: 0.08 s of the 0.7 of a deadline."""
    times = LinearTimes(token=1e-4, context=1e-5)
    full = {tokens: 0.08192 + (tokens - 4) * 1e-4 for tokens in TOKEN_BUDGETS}
    assert choose_token_budget(times, 1, (0.04096 + 2044 * 1e-4) / 0.7 + 1e-9) == 2048
    for tokens in TOKEN_BUDGETS[:3]:
        both = 0.08192 + 2 * tokens * 1e-4  # both batches, each with what its four decode
        assert both > full[tokens]
        assert choose_token_budget(times, 2, both / 0.7 + 1e-9) == tokens
        assert choose_token_budget(times, 2, both / 0.7 - 1e-3) < tokens
