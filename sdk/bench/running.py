"""Sends the requests of a benchmark through the SDK, and keeps what became of each."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import trio

from ..batches import Outcome
from ..client import AsyncClient
from ..errors import ClientError
from .load import BenchLoad
from .report import Ended

Ask = Callable[[int, float], Awaitable[None]]
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class BenchRun:
    """What has ended so far, how many were sent, for how long in seconds, and whether somebody ended it."""

    ended: list[Ended] = field(default_factory=list)
    sent: int = 0
    span_s: float = 0.0
    interrupted: bool = False


async def run_load(
    client: AsyncClient, load: BenchLoad, deadline_s: float, advance: Callable[[Outcome], None]
) -> BenchRun:
    """Send all requests and wait for their ends, or until a signal; each end is told to `advance`."""
    run, began = BenchRun(), trio.current_time()

    async def ask(row: int, at: float) -> None:
        run.sent += 1
        ended, outcome = await _ask(client, load, row, at, deadline_s)
        run.ended.append(ended)
        run.span_s = trio.current_time() - began
        advance(outcome)

    with trio.open_signal_receiver(*_SIGNALS) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                async for _ in signals:
                    run.interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await (_send_at_moments if load.concurrency is None else _send_in_turn)(load, ask, began)
            nursery.cancel_scope.cancel()
    return run


async def _send_at_moments(load: BenchLoad, ask: Ask, began: float) -> None:
    """Each at its moment. Times count from there: what is sent late was waited for."""
    async with trio.open_nursery() as nursery:
        for row, arrival_s in enumerate(load.trace.arrival_s):
            await trio.sleep_until(began + float(arrival_s))
            nursery.start_soon(ask, row, began + float(arrival_s))


async def _send_in_turn(load: BenchLoad, ask: Ask, began: float) -> None:
    """So many at a time."""
    rows = count()

    async def work() -> None:
        while (row := next(rows)) < len(load.trace):
            await ask(row, trio.current_time())

    async with trio.open_nursery() as nursery:
        for _ in range(min(load.concurrency or 1, len(load.trace))):
            nursery.start_soon(work)


async def _ask(client: AsyncClient, load: BenchLoad, row: int, at: float, deadline_s: float) -> tuple[Ended, Outcome]:
    """One request to its end, with times in seconds from `at`."""
    first_s: float | None = None
    prompt, output = load.prompt(row), int(load.trace.output[row])
    try:
        stream = client.generate(
            stream=True, prompt_token_ids=prompt, max_tokens=output, ignore_eos=True, service=load.service,
            deadline_s=deadline_s, detokenize=False,
        )  # fmt: skip
        async with aclosing(stream):
            async for delta in stream:
                if delta.tokens and first_s is None:
                    first_s = trio.current_time() - at
        answer = stream.result
    except ClientError as error:
        return Ended(row=row, failure=type(error).__name__, reason=str(error)), error
    last_s = trio.current_time() - at
    return Ended.of(row, answer, first_s if first_s is not None else last_s, last_s), answer
