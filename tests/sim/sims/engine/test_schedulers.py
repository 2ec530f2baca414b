"""The simulator's scheduler against the emulated engine's, step by step on random requests.

Both follow vLLM. The emulated engine schedules every step anew; the simulator takes many at once in
closed form. They compute the same tokens in the same steps, except in two situations, in which the
simulator is the simpler one:

- It gives a prompt all of its blocks when the prompt is admitted, the engine chunk by chunk. So they
  differ from the first preemption on when prompts are computed in chunks.
- What is left of a prompt whose KV has been transferred in part is computed after the prompts under way;
  the engine computes it before any that wait. So they differ when it has to wait for tokens.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import NamedTuple

import pytest

from p2pserve.node.engine.emulated.batching import BatchedRequest, Batcher
from p2pserve.sims.engine.engine import Engine
from p2pserve.sims.engine.sequence import Sequence
from p2pserve.sims.engine.values import EngineSignal, SignalKind, SimEngineSettings, StepRecord

from ....linear_times import LinearTimes

BLOCK_SIZES = (1, 4, 16)
PLENTY = 2000


class Asked(NamedTuple):
    """A request: the step it arrives at, its lengths, and how much of the prompt's KV is transferred to here."""

    step: int
    prompt: int
    answer: int
    external: int = 0


class Step(NamedTuple):
    """Tokens computed in a step, and the requests that got their first and their last token in it."""

    tokens: int
    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass
class Load:
    """Random requests, and an engine that holds each of them alone."""

    asked: list[Asked]
    blocks: int
    block_size: int
    budget: int
    places: int
    transfer_steps: int = 0


def load(seed: int, *, chunks: bool = False, short: bool = False, external: bool = False) -> Load:
    rng = random.Random(seed)
    block_size = rng.choice(BLOCK_SIZES)
    places = 24 if external else rng.randint(1, 8)
    budget = rng.randint(places + 1, 40) if chunks else PLENTY
    asked = []
    for _ in range(rng.randint(1, 20)):
        prompt = rng.randint(2, 60)
        least = prompt - 1 if chunks else 1  # with chunks, a prompt that comes is whole but for a token
        received = rng.randint(least, prompt - 1) if external and rng.random() < 0.5 else 0
        asked.append(Asked(rng.randint(0, 60), prompt, rng.randint(1, 30), received))
    asked.sort()
    largest = max(-(-(each.prompt + each.answer - 1) // block_size) for each in asked)
    blocks = largest + rng.randint(0, largest) if short else largest * (len(asked) + 1)
    return Load(asked, blocks, block_size, budget, places, rng.randint(1, 6))


class Both:
    """The two engines in lockstep: a step takes a second, and what arrives between two steps is known to both."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.batcher = Batcher(
            blocks=load.blocks, block_size=load.block_size, max_tokens=load.budget, max_requests=load.places
        )
        settings = SimEngineSettings(
            max_batched_tokens=load.budget, max_sequences=load.places, block_tokens=load.block_size
        )
        self.records: list[StepRecord] = []
        self.signals: list[EngineSignal] = []
        self.engine = Engine(
            LinearTimes(step=1.0), settings, kv_tokens=load.blocks * load.block_size, record=self.records.append
        )
        self.sequences: list[Sequence] = []
        self.receiving: dict[int, int] = {}  # request -> the step at which it was admitted
        self.batched: list[Step | None] = []
        self.batcher_preempted = 0
        self.preempted_at: int | None = None  # the first step of either before which a request lost its blocks

    def run(self) -> None:
        for step in count():
            assert step < 5000
            # The simulated engine hears of arrivals in the middle of the step before, if it has one under way.
            now = step - 0.5 if self.engine.wake_at < inf else float(step)
            self._advance(now, before=True)
            self._arrive(step, now)
            self._receive(step, now)
            self._advance(step)
            self.engine.check_integrity()
            self.batched.append(self._batch(step))
            idle = not self.batcher.running and not self.batcher.waiting
            if idle and self.engine.wake_at == inf and len(self.sequences) == len(self.load.asked):
                return

    def _advance(self, now: float, *, before: bool = False) -> None:
        while self.engine.wake_at < now or (self.engine.wake_at == now and not before):
            at = self.engine.wake_at
            self.signals += self.engine.advance(at)
            if self.engine.counts.preemptions and self.preempted_at is None:
                self.preempted_at = round(at)

    def _arrive(self, step: int, now: float) -> None:
        while len(self.sequences) < len(self.load.asked) and self.load.asked[len(self.sequences)].step <= step:
            number = len(self.sequences)
            _, prompt, answer, external = self.load.asked[number]
            self.batcher.add(BatchedRequest(str(number), prompt, answer, external=external))
            self.sequences.append(Sequence(number, prompt, answer, external=external))
            self.engine.submit(self.sequences[-1], now)

    def _receive(self, step: int, now: float) -> None:
        for number, admitted in list(self.receiving.items()):
            if admitted + self.load.transfer_steps <= step and self.engine.has_blocks_for(self.sequences[number]):
                self.batcher.receive_kv(str(number), self.load.asked[number].external)
                self.engine.receive_kv(self.sequences[number], now)
                del self.receiving[number]

    def _batch(self, step: int) -> Step | None:
        batch = self.batcher.schedule()
        self.receiving |= dict.fromkeys(map(int, batch.admitted), step)
        self.batcher_preempted += len(batch.preempted)
        if batch.preempted and self.preempted_at is None:
            self.preempted_at = step
        if not batch.scheduled:
            return None
        generated = self.batcher.complete(batch)
        self.batcher.check_integrity()
        return Step(
            sum(entry.tokens for entry in batch.scheduled),
            tuple(sorted(int(each.request) for each in generated if each.generated == 1)),
            tuple(sorted(int(each.request) for each in generated if each.is_done)),
        )

    def simulated(self) -> list[Step | None]:
        """The simulator's steps, with runs of decode steps taken apart."""
        told: dict[tuple[SignalKind, int], list[int]] = defaultdict(list)
        for signal in self.signals:
            told[signal.kind, round(signal.at) - 1].append(signal.sequence.key)
        steps: list[Step | None] = [None] * len(self.batched)
        for record in self.records:
            for at in range(round(record.start_s), round(record.end_s)):
                first, last = (tuple(sorted(told[kind, at])) for kind in (SignalKind.FIRST_TOKEN, SignalKind.DONE))
                steps[at] = Step(record.prompt_tokens + record.requests, first, last)
        return steps


def both(load: Load) -> Both:
    found = Both(load)
    found.run()
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("chunks", "short"), [(False, False), (False, True), (True, False)])
def test_they_compute_the_same_in_every_step(seed: int, chunks: bool, short: bool) -> None:
    found = both(load(seed, chunks=chunks, short=short))
    assert found.batched == found.simulated()
    assert found.batcher_preempted == found.engine.counts.preemptions


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("chunks", [False, True])
def test_they_do_with_kv_that_is_transferred_to_them(seed: int, chunks: bool) -> None:
    found = both(load(seed, chunks=chunks, external=True))
    assert found.batched == found.simulated()


@pytest.mark.parametrize("seed", range(60))
def test_with_chunks_and_little_memory_they_do_until_somebody_is_preempted(seed: int) -> None:
    found = both(load(seed, chunks=True, short=True))
    same = found.preempted_at if found.preempted_at is not None else len(found.batched)
    assert found.batched[:same] == found.simulated()[:same]


def test_the_loads_have_what_the_tests_are_about() -> None:
    preempted = [both(load(seed, short=True)).preempted_at is not None for seed in range(40)]
    assert 10 <= sum(preempted) < 40
    assert any(each.prompt > chunked.budget for chunked in [load(3, chunks=True)] for each in chunked.asked)
    assert sum(each.external > 0 for seed in range(40) for each in load(seed, external=True).asked) > 100
