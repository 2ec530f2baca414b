"""A download in a thread, whose progress is told on the event loop, and which ends when nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import trio

from .errors import ModelError
from .progress import DownloadProgress, ProgressLine, Report

Found = TypeVar("Found")


async def run_download(fetch: Callable[[Report], Found], say: Callable[[str], None]) -> Found:
    """What `fetch` returns, which runs in a thread; `say` hears of each percent. Where this is cancelled, the download
    ends with its next bytes, and what has come stays."""
    token = trio.lowlevel.current_trio_token()
    line, told = ProgressLine(0.0), -1
    called_off = False

    def report(progress: DownloadProgress) -> None:
        nonlocal told
        if called_off:
            raise ModelError("the download has been called off")
        if progress.percent != told:
            told = progress.percent
            text = line.line(progress, time.monotonic())
            if text is not None:
                token.run_sync_soon(say, f"downloads {text}")

    try:
        return await trio.to_thread.run_sync(fetch, report, abandon_on_cancel=True)
    finally:
        called_off = True
