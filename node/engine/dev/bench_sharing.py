"""What a second model in an engine's process costs the first: `python -m p2pserve.node.engine.bench --sharing-only`.

Three engines of one model take turns: one in a process of its own, one beside a second model that has no requests, and
the same while that model has some all the time. The second is a tiny one with random weights, so that its turns come
often. Figures are medians over the pairs, and all engines are started three times: the same engine may be some per cent
faster in one process than in another.

- shared_idle_ratio: time per token of one request beside a second model without requests, over that of an engine in a
  process of its own.
- shared_busy_ratio: time of the engine's own iterations while the second model decodes between them, over the time
  while it has no requests. The other model's turns are not in it; what they do to caches is.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

import msgspec
import trio

from .. import protocol
from ..agent_side.fork_server import open_fork_server
from ..settings import Sharing
from ..trials.random_model import TINY, make_model
from ..trials.trial import Trial, TrialEngine, open_trial

PROMPT: Final = tuple(range(1, 33))
TOKENS: Final = 129
OTHER_TOKENS: Final = 200  # its prompts and answers fit into 256 positions
OTHER_STREAMS: Final = 4
STARTS: Final = 3


class SharingTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one round: per token alone and beside an idle model, of an iteration beside an idle and a busy
    one."""

    alone: float
    idle: float
    idle_step: float
    busy_step: float


class SharingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, and what they were computed from."""

    shared_idle_ratio: float
    shared_busy_ratio: float
    shared_ms: list[SharingTimes]

    def describe(self) -> str:
        """For people."""
        alone, idle, idle_step, busy_step = (
            statistics.median(getattr(each, name) for each in self.shared_ms)
            for name in ("alone", "idle", "idle_step", "busy_step")
        )
        return "\n".join(
            (
                f"a second model in the process, medians of {len(self.shared_ms)} rounds",
                f"idle  {self.shared_idle_ratio:.3f}  <= 1.01  {idle:.2f} ms a token, alone {alone:.2f}",
                f"busy  {self.shared_busy_ratio:.3f}  <= 1.05  {busy_step:.2f} ms an iteration, idle {idle_step:.2f}",
            )
        )


def measure_sharing(model: str, repeats: int, config: protocol.EngineConfig, folder: Path) -> SharingReport:
    """Start the engines and measure. Raises EngineError or OSError."""
    make_model(folder, TINY)
    return trio.run(_run, model, repeats, config, str(folder))


async def _run(model: str, repeats: int, config: protocol.EngineConfig, tiny: str) -> SharingReport:
    config = msgspec.structs.replace(config, model=model)
    rounds: list[SharingTimes] = []
    for start in range(STARTS):
        more = repeats * (start + 1) // STARTS - len(rounds)
        if more:
            rounds += await _measure_start(more, config, tiny)
    return SharingReport(
        shared_idle_ratio=statistics.median(each.idle / each.alone for each in rounds),
        shared_busy_ratio=statistics.median(each.busy_step / each.idle_step for each in rounds),
        shared_ms=rounds,
    )


async def _measure_start(repeats: int, config: protocol.EngineConfig, tiny: str) -> list[SharingTimes]:
    async with open_fork_server(log=None, threads=config.threads) as server, open_trial(server) as trial:
        alone = await trial.start(config)
        one = await _share(trial, config, "one")
        other = await _share(trial, msgspec.structs.replace(config, model=tiny, kv_cache_mib=16), "other")
        for engine in (alone, one, other):  # what vLLM does at its first request
            await engine.generate(PROMPT, TOKENS)
        return [await _measure(alone, one, other) for _ in range(repeats)]


async def _share(trial: Trial, config: protocol.EngineConfig, service: str) -> TrialEngine:
    return await trial.start(msgspec.structs.replace(config, sharing=Sharing(service=service)))


async def _measure(alone: TrialEngine, one: TrialEngine, other: TrialEngine) -> SharingTimes:
    alone_ms, _ = await _time(alone)
    idle_ms, before_ms = await _time(one)
    async with trio.open_nursery() as nursery:
        for stream in range(OTHER_STREAMS):
            nursery.start_soon(_keep_busy, other, stream)
        await other.until(lambda: other.stats is not None and other.stats.running == OTHER_STREAMS)
        _, busy_step_ms = await _time(one)
        nursery.cancel_scope.cancel()
    await other.until(lambda: other.stats is not None and other.stats.running == 0)
    _, after_ms = await _time(one)  # the busy time takes half a minute, in which the machine may change its pace
    idle_step_ms = (before_ms + after_ms) / 2
    return SharingTimes(alone=alone_ms, idle=idle_ms, idle_step=idle_step_ms, busy_step=busy_step_ms)


async def _time(engine: TrialEngine) -> tuple[float, float]:
    """Milliseconds per token of one request, and of a decode iteration by the engine's own account."""
    engine.iterations.clear()
    answer = await engine.generate(PROMPT, TOKENS)
    await engine.until(lambda: sum(each.steps for each in engine.iterations) >= TOKENS)
    steps = [sample.seconds for each in engine.iterations for sample in each.samples if sample.decode_requests]
    return 1e3 * (answer.last_at - answer.first_at) / (TOKENS - 1), 1e3 * statistics.median(steps)


async def _keep_busy(engine: TrialEngine, stream: int) -> None:
    """One request after the other."""
    number = 0
    while True:
        number += 1
        await engine.generate((stream + 1, number % 500 + 1), OTHER_TOKENS)
