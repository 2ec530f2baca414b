"""A folder for what vLLM leaves lying about."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Where vLLM puts the rendezvous file that it needs while it starts, and does not remove."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="p2pserve-engine-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
