"""Query-key pairs and straight lines, counted one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.costs.step_times import DecodeLine, chunk_pairs


@given(start=st.integers(0, 50), tokens=st.integers(0, 50))
def test_a_token_is_paired_with_all_before_it_and_itself(start: int, tokens: int) -> None:
    assert chunk_pairs(start, tokens) == sum(position + 1 for position in range(start, start + tokens))


@given(cut=st.integers(0, 60))
def test_chunks_of_a_prompt_have_the_pairs_of_the_prompt(cut: int) -> None:
    assert chunk_pairs(0, cut) + chunk_pairs(cut, 60 - cut) == chunk_pairs(0, 60)


def test_a_run_of_steps_by_hand() -> None:
    line = DecodeLine(fixed_s=2.0, context_s=0.5)
    assert line.step_s(10) == 7.0
    # contexts of 10, 13 and 16
    assert line.run_s(3, 10, 3) == pytest.approx(7.0 + 8.5 + 10.0)
    assert line.run_s(3, 10, 1) == 7.0
    assert line.run_s(3, 10, 0) == 0.0
