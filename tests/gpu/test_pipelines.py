"""Replicas of several stages: the scenarios of `tests/integration/node/engine/test_pipeline.py`.

Stages of one worker share a card; those of two need two.
"""

from __future__ import annotations

import pytest

from ..integration.node.engine.test_pipeline import (
    known,
    model,
    run,
    test_a_lost_stage_ends_the_replica,
    test_kv_goes_from_each_worker_to_the_workers_that_need_it,
    test_tokens_are_those_of_one_engine,
)

__all__ = [
    "known",
    "model",
    "run",
    "test_a_lost_stage_ends_the_replica",
    "test_kv_goes_from_each_worker_to_the_workers_that_need_it",
    "test_tokens_are_those_of_one_engine",
]

pytestmark = pytest.mark.timeout(300)
