"""Keeps one engine process running: first start, restarts with back-off, and giving up with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import final

import trio

from .engine import protocol
from .engine_link import EngineLink, EngineStartError, ForkServer, open_fork_server
from .messages import EngineAdvert
from .worker import Worker

MAX_FAILURES = 5
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 300.0  # an engine that ran this long has earned a clean slate


def backoff_s(failures: int) -> float:
    """Pause before the start that follows the n-th failure in a row."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** max(0, failures - 1))


@final
class Supervisor:
    """Runs the engine of a node. `on_change` is called with each new state."""

    def __init__(
        self,
        config: protocol.EngineConfig,
        *,
        worker: Worker,
        log: Path,
        channel: int | None,
        on_change: Callable[[EngineAdvert], None],
    ) -> None:
        self._config = config
        self._worker = worker
        self._log = log
        self._channel = channel
        self._on_change = on_change
        self._starts = 0
        self._ready: protocol.Ready | None = None

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineStartError when the very first start fails: nothing runs yet, and
        the user is watching."""
        failures = 0
        while True:
            channel, self._channel = self._channel, None
            self._report("restarting" if self._starts else "starting")
            async with open_fork_server(log=self._log, threads=self._config.threads, channel=channel) as server:
                failures = await self._run_engines(server, failures)
            if failures > MAX_FAILURES:
                self._report("failed", f"gave up after {failures} failures; see {self._log}")
                await trio.sleep_forever()

    async def _run_engines(self, server: ForkServer, failures: int) -> int:
        """Start engines on one fork server until it is of no use any more; return the failures in a row."""
        while failures <= MAX_FAILURES:
            try:
                link = await server.start_engine(self._config, self._worker.on_engine_message)
            except EngineStartError as error:
                if self._starts == 0:
                    raise
                failures += 1
                self._report("restarting", str(error))
                await trio.sleep(backoff_s(failures))
                return failures
            started = trio.current_time()
            how = await self._serve(link)
            if trio.current_time() - started > HEALTHY_AFTER_S:
                failures = 0
            failures += 1
            self._report("restarting", f"the engine process {how}")
            await trio.sleep(backoff_s(failures))
        return failures

    async def _serve(self, link: EngineLink) -> str:
        self._starts += 1
        self._ready = link.ready
        self._worker.use(link)
        self._report("ready")
        how = await link.wait_gone()
        self._worker.engine_lost(how)
        return how

    def _report(self, state: str, detail: str = "") -> None:
        ready = self._ready
        if ready is None:
            self._on_change(EngineAdvert(state=state, detail=detail, starts=self._starts))
            return
        self._on_change(
            EngineAdvert(
                state=state,
                detail=detail,
                engine=ready.engine,
                device=ready.device,
                dtype=ready.dtype,
                tflops=ready.tflops,
                memory_gbps=ready.memory_gbps,
                kv_tokens=ready.kv_tokens,
                max_model_len=ready.max_model_len,
                starts=self._starts,
                pid=ready.pid if state == "ready" else 0,
            )
        )
