"""A run of a demo: it ends in time, and on Ctrl-C with everything that it has started."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ..errors import DemoFailed

Result = TypeVar("Result")


async def run_in_time(
    run: Callable[[], Awaitable[Result]], timeout_s: float, *, say: Callable[[str], None], explain: Callable[[], str]
) -> Result | None:
    """Run to the end; None when interrupted. Raises DemoFailed with what `explain` says when time runs out, and what
    `run` raises."""
    result: Result | None = None
    interrupted = False
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal interrupted
                async for _ in signals:
                    if not interrupted:
                        interrupted = True
                        say("interrupted: ending everything that was started")
                        nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            with trio.move_on_after(timeout_s) as limit:
                result = await run()
            if limit.cancelled_caught:
                raise DemoFailed(explain())
            nursery.cancel_scope.cancel()
    return None if interrupted else result
