"""Prompts are tokenised in place: a virtual clock does not wait for threads."""

from collections.abc import Callable
from typing import Any

import pytest
import trio


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A virtual clock does not wait for threads: prompts are tokenised in place. What would be done
    on threads."""
    done: list[object] = []

    async def run_sync(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        await trio.lowlevel.checkpoint()
        done.append(getattr(function, "func", function))
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    return done
