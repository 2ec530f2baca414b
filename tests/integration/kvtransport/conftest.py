"""What the tests of links over real sockets share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from .pairs import Pair, open_files


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two endpoints; afterwards every thread and file descriptor that they made must be gone."""
    gc.collect()
    threads, files = set(threading.enumerate()), open_files()
    made = Pair()
    yield made
    made.sender.check_integrity()
    made.receiver.check_integrity()
    made.close()
    assert made.sender.budget.held == 0
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    gc.collect()
    assert open_files() <= files
