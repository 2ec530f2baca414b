"""How long requests may finish on a box that leaves."""

from pathlib import Path

import pytest

from p2pserve.bootstrap import Address
from p2pserve.node.agent import LEAVE_S, drain_seconds
from p2pserve.node.settings import NodeSettings

HOME, LISTEN = Path("unused"), Address("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("ends_at", "drain_s"),
    [
        (None, 30.0),
        (5000.0, 30.0),  # far off: as long as ever
        (1010.0 + LEAVE_S, 10.0),
        (1000.0, 0.0),
        (10.0, 0.0),
    ],
)
def test_requests_may_finish_until_the_box_ends_and_not_longer(ends_at: float | None, drain_s: float) -> None:
    settings = NodeSettings(home=HOME, listen=LISTEN, drain_s=30.0, ends_at=ends_at)
    assert drain_seconds(settings, 1000.0) == drain_s
