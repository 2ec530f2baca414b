"""Two models in one process on one card, with their KV in one pool: the scenarios of
`tests/integration/node/engine/shared/test_shared_engines.py`."""

from __future__ import annotations

from typing import Any

import pytest

from ..integration.node.engine.devices import SETTINGS
from ..integration.node.engine.shared.test_shared_engines import (
    other_model,
    test_a_model_with_many_requests_leaves_room_for_one_of_another,
    test_kv_goes_both_ways_for_both_models_at_once,
    test_models_of_one_size_share_blocks_and_no_prefixes,
    test_requests_that_lose_their_kv_are_answered,
    test_the_model_at_work_is_named_when_the_process_ends,
    test_two_models_asked_at_once_answer_as_alone,
)
from .conftest import FEW_REQUESTS

__all__ = [
    "other_model",
    "test_a_model_with_many_requests_leaves_room_for_one_of_another",
    "test_kv_goes_both_ways_for_both_models_at_once",
    "test_models_of_one_size_share_blocks_and_no_prefixes",
    "test_requests_that_lose_their_kv_are_answered",
    "test_the_model_at_work_is_named_when_the_process_ends",
    "test_two_models_asked_at_once_answer_as_alone",
]

pytestmark = [pytest.mark.usefixtures("few_requests"), pytest.mark.timeout(300)]


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few graphs to capture."""
    chosen: dict[str, Any] = FEW_REQUESTS
    for name, value in chosen.items():
        monkeypatch.setitem(SETTINGS, name, value)
