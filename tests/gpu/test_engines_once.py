"""More scenarios of `tests/integration/node/engine/test_engine_*.py`, for which one way of scheduling is enough.

What breaks, caches that are read back, and engines of two workers where there are two cards.
"""

from __future__ import annotations

import pytest

from ..integration.node.engine.test_engine_failures import (
    test_a_broken_transfer_is_computed_again,
    test_a_connection_that_is_cut_is_dialled_again,
    test_an_engine_whose_worker_is_killed_ends,
    test_kv_that_does_not_come_is_computed,
)
from ..integration.node.engine.test_engine_transfers import (
    test_a_cache_reads_back_what_was_written_into_it,
    test_workers_that_share_heads_exchange_their_parts,
)

__all__ = [
    "test_a_broken_transfer_is_computed_again",
    "test_a_cache_reads_back_what_was_written_into_it",
    "test_a_connection_that_is_cut_is_dialled_again",
    "test_an_engine_whose_worker_is_killed_ends",
    "test_kv_that_does_not_come_is_computed",
    "test_workers_that_share_heads_exchange_their_parts",
]

pytestmark = pytest.mark.timeout(300)
