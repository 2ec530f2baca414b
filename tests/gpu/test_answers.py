"""Answers held against `transformers` and vLLM alone, in 16 bits as users compute and in float32: the scenarios of
`tests/integration/node/engine/answers/test_engine_answers.py`, whose fixture `dtype` has more values here."""

from __future__ import annotations

import pytest

from ..integration.node.engine.answers.test_engine_answers import (
    run,
    test_an_engine_that_is_killed_costs_the_other_nothing_but_time,
    test_answers_are_those_of_vllm_alone,
    test_answers_from_kv_of_another_engine_are_those_of_transformers,
    test_kv_goes_between_engines_that_keep_it_in_8_bits_and_in_16,
)

__all__ = [
    "run",
    "test_an_engine_that_is_killed_costs_the_other_nothing_but_time",
    "test_answers_are_those_of_vllm_alone",
    "test_answers_from_kv_of_another_engine_are_those_of_transformers",
    "test_kv_goes_between_engines_that_keep_it_in_8_bits_and_in_16",
]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    """What the engines compute in."""
    return str(request.param)
