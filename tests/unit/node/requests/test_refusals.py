"""What a gateway has refused: by class from the start, and how often lately."""

import pytest

from p2pserve.coordinator.requests.admission import CLASS_LABELS, PriorityClass
from p2pserve.node.requests.refusals import MEMORY_S, RefusalCounts


def test_refusals_are_counted_by_class_and_their_rate_is_of_late() -> None:
    refused = RefusalCounts()
    assert refused.total == dict.fromkeys(CLASS_LABELS, 0)
    assert refused.per_s(0.0) == 0.0
    for number in range(1000):
        refused.note(PriorityClass.BATCH if number % 4 else PriorityClass.URGENT, 0.1 * number)
    assert refused.total == {"urgent": 250, "normal": 0, "batch": 750}
    assert refused.per_s(100.0) == pytest.approx(10.0, rel=0.1)
    assert 0.0 < refused.per_s(100.0 + MEMORY_S) < 5.0
    assert refused.per_s(100.0 + 60.0 * MEMORY_S) == 0.0  # and not a tiny figure for ever
