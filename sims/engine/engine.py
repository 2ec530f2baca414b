"""One replica's engine, iteration by iteration: continuous batching, chunked prefill, KV memory, preemption.

    engine = Engine(times, EngineSettings(), kv_tokens=100_000)
    engine.submit(sequence, now)
    while engine.wake_at < inf:
        signals = engine.advance(engine.wake_at)

The rules are those of vLLM's scheduler, first come first served. A step gives every decoding sequence one token, and
what is left of the token budget to prompts, in order of arrival; the last of them may get a part. A prompt is admitted
when the KV of all of it fits. When a decoding sequence needs a block and none is free, the one that joined last loses
all of its blocks, goes to the front of the queue, and computes prompt and tokens again.

Steps in which only decoding goes on are taken in one go, up to the next one in which something could change: a
sequence ends, memory is full, or somebody comes who can be admitted. At a fixed batch their times are an arithmetic
series (`DecodeLine.run_s`), and each sequence takes a block every `block_tokens` steps, so both have closed forms.

In a pipeline of n stages, prompts follow each other through the stages (`prefill_interval_s`); beside decoding, a step
is one round of the n batches in flight, and each of them may read prompts within a token budget of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from math import ceil, inf, sqrt
from typing import Final, NamedTuple, final

from ...coordinator.costs.rounds import Chunk, round_s
from ...coordinator.costs.step_times import DecodeLine, StepTimes, chunk_pairs
from .sequence import DecodeBatch, Sequence
from .values import EngineCounts, EngineSettings, EngineSignal, SignalKind, SimEngineError, StepRecord

__all__ = ["Engine"]

_ROUNDING: Final = 1e-9
"""Share of a step by which a moment may miss the step's boundary and still be on it."""


class _PromptChunk(NamedTuple):
    """So many tokens of a prompt behind `start` that were read before."""

    sequence: Sequence
    start: int
    tokens: int


class _PrefillStep(NamedTuple):
    """On its way through the stages, out at `end`."""

    end: float
    chunks: list[_PromptChunk]


@final
class Engine:
    """See the module. It wants to be advanced at `wake_at`, which is infinite while nothing goes on."""

    def __init__(
        self,
        times: StepTimes,
        settings: EngineSettings,
        *,
        kv_tokens: int,
        stages: int = 1,
        record: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.times = times
        self.tally = EngineCounts()
        self.wake_at = inf
        self.blocks = kv_tokens // settings.block_tokens
        if self.blocks < 1:
            raise SimEngineError(f"KV memory of {kv_tokens} tokens is less than a block of {settings.block_tokens}")
        self._free = self.blocks
        self.settings = settings  # may be others for the steps to come
        self._stages = stages
        self._record = record
        self._lines: dict[int, DecodeLine] = {}
        self._queue: deque[Sequence] = deque()  # want blocks, in order of arrival
        self._expected: dict[int, Sequence] = {}  # have blocks; KV is on its way here
        self._landed: deque[Sequence] = deque()  # may decode from the next step on
        self._to_read: deque[Sequence] = deque()  # have blocks, and tokens that no step has taken up yet
        self._reading = 0  # sequences to read, or in a step that reads their last tokens
        self._read: dict[int, Sequence] = {}  # are handed over; KV is on its way from here
        self._flight: deque[_PrefillStep] = deque()
        self._entry_free_at = 0.0  # when the first stage can take up the next prompts
        self._batch = DecodeBatch(settings.block_tokens)
        # The steps under way that decode: so many, from `_run_start` to `_run_end` (infinite: there are none).
        self._run_start, self._run_end, self._run_steps = 0.0, inf, 0
        self._run_line = DecodeLine(0.0, 0.0)
        self._run_chunks: list[_PromptChunk] = []

    def __repr__(self) -> str:
        return f"<Engine {self._batch.size} decode, {self._reading} read, {len(self._queue)} wait, {self._free} blocks>"

    @property
    def free_tokens(self) -> int:
        """KV tokens that there is room for, as of the last step that was taken."""
        return self._free * self.settings.block_tokens

    def fits(self, sequence: Sequence) -> bool:
        """Whether it could run here if it were alone."""
        return self._blocks_of(sequence.known + max(0, sequence.left - 1)) <= self.blocks

    def submit(self, sequence: Sequence, now: float) -> None:
        """Take it into the queue. Raises SimEngineError for one that never fits."""
        if not self.fits(sequence):
            raise SimEngineError(f"{sequence!r} needs more KV than the {self.blocks} blocks there are")
        self._queue.append(sequence)
        if sequence.incoming and len(self._queue) == 1:
            # Blocks that the steps under way will not take can be had at once.
            spoken_for = self._batch.blocks_for(self._run_steps) if self._run_end != inf else 0
            if self._blocks_wanted(sequence) <= self._free - spoken_for:
                self._admit()
        if self._queue:
            self._rouse(now)

    def land(self, sequence: Sequence, now: float) -> None:
        """The KV that `sequence` expected is here. Blocks must have been reserved: `expects` says so."""
        del self._expected[sequence.key]
        self._take_in(sequence)
        self._rouse(now)

    def expects(self, sequence: Sequence) -> bool:
        """Whether it has blocks for KV that is to come from elsewhere."""
        return sequence.key in self._expected

    def release(self, sequence: Sequence, now: float) -> None:
        """The KV of a sequence that was read here is not needed here any more."""
        del self._read[sequence.key]
        self._give_back(sequence)
        self._rouse(now)

    def expect_no_kv(self, sequence: Sequence, now: float) -> None:
        """The KV that `sequence` expected will not come: all of it is computed here."""
        sequence.incoming = 0
        if self._expected.pop(sequence.key, None) is not None:
            self._give_back(sequence)
            self._queue.appendleft(sequence)  # it has had its turn
        self._rouse(now)

    def advance(self, now: float) -> list[EngineSignal]:
        """End what ends at `now`, and begin what can begin."""
        signals: list[EngineSignal] = []
        while self._flight and self._flight[0].end <= now:
            self._complete(self._flight.popleft().chunks, now, signals)
        if self._run_end <= now:
            self._end_run(now, signals)
        if self._run_end == inf:
            self._begin(now, signals)
        self._set_alarm(now)
        return signals

    def lose(self, now: float) -> list[Sequence]:
        """The box is gone: all sequences it had, with `known` and `left` as far as they had got by `now`."""
        if self._run_end != inf:
            # Whoever would get their last token at this very moment does not.
            self._batch.advance(min(self._steps_done(now), self._run_steps - 1))
        decoding = list(self._batch)
        for sequence in decoding:
            self._batch.leave(sequence)
        flying = [chunk.sequence for step in self._flight for chunk in step.chunks]
        flying += [chunk.sequence for chunk in self._run_chunks]
        rest = (*self._queue, *self._expected.values(), *self._landed, *self._to_read, *self._read.values())
        self.wake_at = inf
        return list(dict.fromkeys((*decoding, *flying, *rest)))

    def check_integrity(self) -> None:
        """Every block is free or held by a sequence that is here. Raises SimEngineError."""
        flying = [chunk.sequence for step in self._flight for chunk in step.chunks]
        flying += [chunk.sequence for chunk in self._run_chunks]
        holders = {*self._expected.values(), *self._landed, *self._to_read, *self._read.values(), *flying}
        held = sum(sequence.blocks for sequence in holders)
        held += sum(self._blocks_of(sequence.computed + self._batch.step) for sequence in self._batch)
        if held + self._free != self.blocks or self._free < 0:
            raise SimEngineError(f"{held} blocks are held and {self._free} free; there are {self.blocks}")

    # What goes on

    def _begin(self, now: float, signals: list[EngineSignal]) -> None:
        """The next step, if there is anything to do and the stages can take it up."""
        batch = self._batch
        if not self._flight:
            while self._landed and batch.size < self.settings.max_sequences:
                batch.join(self._landed.popleft())
            # Whoever had to make room is not let in again in the same step.
            preempted = self._make_room()
            groups = [] if preempted else self._groups_beside_decode(signals)
            if batch.size:
                self._begin_run(now, groups, signals, most=1 if preempted else inf)
                return
        if not batch.size and not self._landed and self._entry_free_at <= now:
            self._begin_prefill(now, signals)

    def _begin_prefill(self, now: float, signals: list[EngineSignal]) -> None:
        chunks = self._fill(self.settings.max_batched_tokens, signals)
        if not chunks:
            return
        tokens, pairs = _work(chunks)
        end = now + self.times.prefill_s(tokens, pairs)
        if self._flight:  # a short step cannot overtake a long one
            end = max(end, self._flight[-1].end)
        self._entry_free_at = min(end, now + self.times.prefill_interval_s(tokens, pairs))
        self._flight.append(_PrefillStep(end, chunks))
        self.tally.prefill_s += self._entry_free_at - now
        self.tally.steps += 1
        self._tell_reading(chunks, end, signals)
        if self._record is not None:
            self._record(StepRecord(now, end, "prefill", tokens, 0, 1))

    def _groups_beside_decode(self, signals: list[EngineSignal]) -> list[list[_PromptChunk]]:
        """What prompts are read in the next step, by batch in flight: each has a budget of its own."""
        decoding = self._batch.size
        groups: list[list[_PromptChunk]] = []
        own = self._batch.blocks_for(1)  # goes before those of whoever is let in
        self._free -= own
        for _ in range(self._stages if decoding else 0):
            group = self._fill(self.settings.max_batched_tokens - ceil(decoding / self._stages), signals)
            if not group:
                break
            groups.append(group)
        self._free += own
        return groups

    def _begin_run(
        self, now: float, groups: list[list[_PromptChunk]], signals: list[EngineSignal], most: float
    ) -> None:
        """Decode: one step that reads as well, or as many as nothing can change in, and no more than `most`."""
        batch, requests = self._batch, self._batch.size
        line = self._lines.get(requests)
        if line is None:
            line = self._lines[requests] = self.times.decode_line(requests)
        self._run_line, self._run_start = line, now
        if groups:
            chunks = self._run_chunks = list(chain.from_iterable(groups))
            self._run_steps = 1
            work = [_work(group) for group in groups]
            self._run_end = first_end = now + round_s(self.times, self._stages, work, requests, batch.context)
            self._tell_reading(chunks, self._run_end, signals)
        else:
            steps = int(min(most, batch.steps_to_ending()))
            if requests * (steps // self.settings.block_tokens + 1) > self._free:
                steps = min(steps, batch.steps_within(self._free))
            self._run_steps = steps
            self._run_end = now + line.run_s(requests, batch.context, steps)
            first_end = now + line.step_s(batch.context)
        if batch.fresh:
            for sequence in batch.fresh:
                sequence.fresh = False
                signals.append(EngineSignal(SignalKind.FIRST, sequence, first_end))
            batch.fresh.clear()

    def _end_run(self, now: float, signals: list[EngineSignal]) -> None:
        batch, steps, chunks = self._batch, self._run_steps, self._run_chunks
        requests = batch.size
        self._free -= batch.blocks_for(steps)
        self.tally.peak_blocks = max(self.tally.peak_blocks, self.blocks - self._free)
        tally = self.tally
        tally.steps += steps
        tally.written_tokens += steps * requests
        if chunks:
            tally.mixed_s += now - self._run_start
        else:
            tally.decode_s += now - self._run_start
        if self._record is not None:
            kind, tokens = ("mixed", _work(chunks)[0]) if chunks else ("decode", 0)
            self._record(StepRecord(self._run_start, now, kind, tokens, requests, steps))
        for sequence in batch.advance(steps):
            self._free += self._blocks_of(sequence.computed)
            signals.append(EngineSignal(SignalKind.DONE, sequence, now))
        self._run_end, self._run_chunks = inf, []
        self._complete(chunks, now, signals)

    def _complete(self, chunks: list[_PromptChunk], now: float, signals: list[EngineSignal]) -> None:
        """These tokens are read; a prompt that is whole writes its first token, or is handed over."""
        for sequence, start, tokens in chunks:
            self.tally.prompt_tokens += tokens
            if start + tokens < sequence.known:
                continue
            self._reading -= 1
            if sequence.hands_over:
                self._read[sequence.key] = sequence
                signals.append(EngineSignal(SignalKind.READ, sequence, now))
                continue
            sequence.known += 1
            sequence.left -= 1
            self.tally.written_tokens += 1
            if sequence.fresh:
                sequence.fresh = False
                signals.append(EngineSignal(SignalKind.FIRST, sequence, now))
            if sequence.left:
                self._batch.join(sequence)
            else:
                self._give_back(sequence)
                signals.append(EngineSignal(SignalKind.DONE, sequence, now))

    def _set_alarm(self, now: float) -> None:
        """When something ends, or the first stage is free for a prompt that could go in."""
        at = self._run_end
        if self._flight:
            at = min(at, self._flight[0].end)
            if self._entry_free_at > now and not self._batch.size and (self._to_read or self._queue):
                at = min(at, self._entry_free_at)
        self.wake_at = at

    def _rouse(self, now: float) -> None:
        """Something has come in, or memory has become free: the next step may begin earlier than was thought."""
        if self._run_end != inf:
            if self._run_steps > 1 and not self._run_chunks:
                self._shorten_run(now)
        elif self._flight:
            if not self._batch.size and (self._to_read or self._queue):
                self.wake_at = min(self.wake_at, max(now, self._entry_free_at))
        else:
            self.wake_at = now

    def _shorten_run(self, now: float) -> None:
        """End the decode steps under way at the next boundary, if somebody could join there."""
        steps = min(self._run_steps, max(1, self._steps_done(now, up=True)))
        if steps < self._run_steps and self._could_join(steps):
            self._run_steps = steps
            boundary = self._run_start + self._run_line.run_s(self._batch.size, self._batch.context, steps)
            self._run_end = self.wake_at = max(now, boundary)  # it may be this very moment, but for rounding

    def _could_join(self, steps: int) -> bool:
        if self._to_read or (self._landed and self._batch.size < self.settings.max_sequences):
            return True
        if not self._queue:
            return False
        head = self._queue[0]
        free = self._free - self._batch.blocks_for(steps + 1)
        return self._blocks_wanted(head) <= free and (bool(head.incoming) or self._has_seat())

    def _steps_done(self, now: float, *, up: bool = False) -> int:
        """Steps of the run that have ended by `now`; with `up`, those that have when the one under way has ended.

        Solves `run_s(steps) = now - start`, which is a quadratic equation.
        """
        requests, context, line = self._batch.size, self._batch.context, self._run_line
        elapsed = now - self._run_start
        first = line.step_s(context)
        growth = line.context_s * requests / 2.0
        linear = first - growth
        if growth > 0.0:
            steps = (sqrt(linear * linear + 4.0 * growth * elapsed) - linear) / (2.0 * growth)
        else:
            steps = elapsed / first if first > 0.0 else float(self._run_steps)
        return ceil(steps - _ROUNDING) if up else min(self._run_steps, int(steps + _ROUNDING))

    # Who is let in, and memory

    def _fill(self, budget: int, signals: list[EngineSignal]) -> list[_PromptChunk]:
        """Prompts for one step, up to `budget` tokens; lets in who comes next in the queue and fits."""
        chunks: list[_PromptChunk] = []
        while budget > 0:
            if not self._to_read:
                sequence = self._admit()
                if sequence is None:
                    break
                if sequence.incoming:
                    signals.append(EngineSignal(SignalKind.ROOM, sequence, 0.0))
                    continue
            sequence = self._to_read[0]
            tokens = min(budget, sequence.known - sequence.computed)
            chunks.append(_PromptChunk(sequence, sequence.computed, tokens))
            sequence.computed += tokens
            budget -= tokens
            if sequence.computed == sequence.known:
                self._to_read.popleft()
        return chunks

    def _admit(self) -> Sequence | None:
        """Give blocks to the head of the queue; None if there is none, or no room for it."""
        if not self._queue:
            return None
        sequence = self._queue[0]
        wanted = self._blocks_wanted(sequence)
        if wanted > self._free or not (sequence.incoming or self._has_seat()):
            return None
        self._queue.popleft()
        self._free -= wanted
        self.tally.peak_blocks = max(self.tally.peak_blocks, self.blocks - self._free)
        sequence.blocks = wanted
        if sequence.incoming:
            self._expected[sequence.key] = sequence
        else:
            self._to_read.append(sequence)
            self._reading += 1
        return sequence

    def _take_in(self, sequence: Sequence) -> None:
        """Its KV has come: it decodes next, or reads what is left of its prompt first."""
        sequence.computed, sequence.incoming = sequence.incoming, 0
        if sequence.computed == sequence.known - 1:
            self._landed.append(sequence)
        else:
            self._to_read.append(sequence)
            self._reading += 1

    def _has_seat(self) -> bool:
        return self._batch.size + len(self._landed) + self._reading < self.settings.max_sequences

    def _make_room(self) -> bool:
        """Take sequences out until the others have blocks for one step. Returns whether any had to go."""
        batch, preempted = self._batch, False
        while batch.blocks_for(1) > self._free:
            sequence = batch.last_joined()
            batch.leave(sequence)
            sequence.blocks = self._blocks_of(sequence.computed)
            self._give_back(sequence)
            sequence.computed = 0
            self._queue.appendleft(sequence)
            self.tally.preemptions += 1
            preempted = True
        return preempted

    def _give_back(self, sequence: Sequence) -> None:
        self._free += sequence.blocks
        sequence.blocks = 0

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_tokens)

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """To be let in. One that decodes as soon as its KV has come takes the block of its next token then."""
        pure = 0 < sequence.incoming >= sequence.known - 1
        return self._blocks_of(sequence.incoming if pure else sequence.known)

    @staticmethod
    def _tell_reading(chunks: list[_PromptChunk], end: float, signals: list[EngineSignal]) -> None:
        signals.extend(
            EngineSignal(SignalKind.READING, sequence, end, tokens)
            for sequence, _, tokens in chunks
            if sequence.hands_over
        )


def _work(chunks: list[_PromptChunk]) -> Chunk:
    """What one batch reads in a step."""
    tokens = sum(chunk.tokens for chunk in chunks)
    return Chunk(tokens, sum(chunk_pairs(chunk.start, chunk.tokens) for chunk in chunks))
