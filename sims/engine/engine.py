"""One replica's engine, iteration by iteration: continuous batching, chunked prefill, KV memory,
preemption.

    engine = Engine(times, SimEngineSettings(), kv_tokens=100_000)
    engine.submit(sequence, now)
    while engine.wake_at < inf:
        signals = engine.advance(engine.wake_at)

The rules are those of vLLM's scheduler, first come first served, but for prompts that are cached and only to be sent,
which go first: the prompts under way leave them the few tokens that they need. A step decodes one token for every
decoding sequence and spends what is left of the token budget on prompts, in order of arrival; the
last of them may get a chunk only. A prompt is admitted when the KV of all of it fits, and then has
all of those blocks. When a decoding sequence needs a block and none is free, the one that joined
last is preempted: it loses all of its blocks, goes to the front of the queue, and computes prompt
and tokens again. With a prefix cache, what of an admitted prompt is cached is not computed; what is
computed of prompts stays cached until others need its room.

Steps that only decode are taken in one go, up to the next one in which something could change: a
sequence ends, memory is full, or a sequence arrives that can be admitted. For a fixed batch their
times are an arithmetic series (`DecodeLine.run_s`), and each sequence takes a block every
`block_tokens` steps, so both have closed forms.

Without chunked prefill (`SimEngineSettings.chunked_prefill`) a step computes prompts or decodes, as
vLLM 0.6.0 does by default: prompts first, each whole, as many as may be admitted and fit the
budget; nothing decodes beside them. A hundredth of the blocks is kept from prompts then.

In a pipeline of n stages, prompts follow each other through the stages (`prefill_interval_s`);
beside decoding, a step is one round of the n batches in flight, and each of them may prefill within
a token budget of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from math import ceil, inf, sqrt
from typing import Final, final

from ...coordinator.costs.rounds import round_s
from ...coordinator.costs.step_times import DecodeLine, StepTimes
from .prefill_steps import PrefillStep, PromptChunk, add_up, announce_prefill
from .prompt_cache import PromptCache
from .sequence import DecodeBatch, Sequence
from .values import EngineCounts, EngineSignal, SignalKind, SimEngineError, SimEngineSettings, StepRecord

_ROUNDING: Final = 1e-9
"""Share of a step by which a moment may miss the step's boundary and still be on it."""

_WATERMARK: Final = 0.01
"""Share of the blocks that vLLM 0.6.0 keeps from prompts while anything decodes, for what decodes."""


@final
class Engine:
    """See the module. To be advanced at `wake_at`; infinite: there is nothing to do."""

    def __init__(
        self,
        times: StepTimes,
        settings: SimEngineSettings,
        *,
        kv_tokens: int,
        stages: int = 1,
        record: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.times = times
        self.counts = EngineCounts()
        self.wake_at = inf
        self.blocks = kv_tokens // settings.block_tokens
        if self.blocks < 1:
            raise SimEngineError(f"KV memory of {kv_tokens} tokens is less than a block of {settings.block_tokens}")
        self._free = self.blocks
        self._chunked = settings.chunked_prefill  # for good
        if stages > 1 and not self._chunked:
            raise SimEngineError(f"{stages} stages without chunked prefill: that is simulated for one stage only")
        self._reserve = 0 if self._chunked else int(_WATERMARK * self.blocks)  # blocks kept from prompts
        self.prefixes = PromptCache(settings)
        self._block_tokens = settings.block_tokens
        self.settings = settings  # may be replaced between steps
        self._stages = stages
        self._record = record
        self._lines: dict[int, DecodeLine] = {}
        self._queue: deque[Sequence] = deque()  # have no blocks yet, in order of arrival
        self._awaiting_kv: dict[int, Sequence] = {}  # have blocks; their KV is being transferred to here
        self._to_decode: deque[Sequence] = deque()  # have received their KV; they join the next step
        self._to_prefill: deque[Sequence] = deque()  # have blocks, and tokens that no step has computed
        self._prefilling = 0  # sequences in `_to_prefill` or in a step under way
        self._sending: dict[int, Sequence] = {}  # prefilled here; their KV is being transferred from here
        self._in_pipeline: deque[PrefillStep] = deque()
        self._entry_free_at = 0.0  # when the first stage can begin the next prompts
        self._batch = DecodeBatch(settings.block_tokens)
        # The run of decode steps under way: `_run_steps` of them, from `_run_start` to `_run_end` (infinite: none).
        self._run_start, self._run_end, self._run_steps = 0.0, inf, 0
        self._run_line = DecodeLine(0.0, 0.0)
        self._run_chunks: list[PromptChunk] = []

    def __repr__(self) -> str:
        counts = f"{self._batch.size} decode, {self._prefilling} prefill, {len(self._queue)} wait"
        return f"<Engine {counts}, {self._free} blocks>"

    @property
    def free_tokens(self) -> int:
        """KV tokens that there is room for, as of the last step that has ended."""
        return self._free * self.settings.block_tokens

    @property
    def waiting(self) -> int:
        """Requests that have no place in a batch yet."""
        return len(self._queue)

    @property
    def decoding(self) -> int:
        """Requests that decode."""
        return self._batch.size

    @property
    def context_tokens(self) -> int:
        """KV tokens of those, as of the last step that has ended."""
        return self._batch.context

    def change_times(self, times: StepTimes) -> None:
        """Steps that begin from now on take as long as these say."""
        self.times = times
        self._lines.clear()

    def can_fit(self, sequence: Sequence) -> bool:
        """Whether its KV would fit here if it were alone."""
        return self._blocks_of(sequence.known + max(0, sequence.left - 1)) <= self.blocks

    def submit(self, sequence: Sequence, now: float) -> None:
        """Take it into the queue. Raises SimEngineError for one that never fits."""
        if not self.can_fit(sequence):
            raise SimEngineError(f"{sequence!r} needs more KV than the {self.blocks} blocks there are")
        if self._is_cached_send(sequence):
            self._queue.appendleft(sequence)
        else:
            self._queue.append(sequence)
        if sequence.external and len(self._queue) == 1:
            # Blocks can be reserved in the middle of a run, except those that its steps are still going to take.
            spoken_for = self._batch.blocks_for(self._run_steps) if self._run_end != inf else 0
            if self._blocks_wanted(sequence) <= self._free - spoken_for:
                self._admit()
        if self._queue:
            self._wake_earlier(now)

    def receive_kv(self, sequence: Sequence, now: float) -> None:
        """The KV that `sequence` waited for is here. It must have blocks: see `has_blocks_for`."""
        del self._awaiting_kv[sequence.key]
        self._queue_received(sequence)
        self._wake_earlier(now)

    def has_blocks_for(self, sequence: Sequence) -> bool:
        """Whether blocks are reserved for KV that another replica computes."""
        return sequence.key in self._awaiting_kv

    def release_kv(self, sequence: Sequence, now: float) -> None:
        """The KV of a sequence that was prefilled here has been transferred: free its blocks."""
        del self._sending[sequence.key]
        self._free_blocks(sequence)
        self._wake_earlier(now)

    def expect_no_kv(self, sequence: Sequence, now: float) -> None:
        """The KV that `sequence` waited for will not come: all of it is computed here."""
        sequence.external = 0
        if self._awaiting_kv.pop(sequence.key, None) is not None:
            self._free_blocks(sequence)
            self._queue.appendleft(sequence)  # it has had its turn
        self._wake_earlier(now)

    def advance(self, now: float) -> list[EngineSignal]:
        """End the steps that end at `now`, and begin the next one if there is anything to do."""
        signals: list[EngineSignal] = []
        while self._in_pipeline and self._in_pipeline[0].end <= now:
            self._complete_prefill(self._in_pipeline.popleft().chunks, now, signals)
        if self._run_end <= now:
            self._end_run(now, signals)
        if self._run_end == inf:
            self._begin_step(now, signals)
        self._set_wake_at(now)
        return signals

    def stop(self, now: float) -> list[Sequence]:
        """The box has failed: all its sequences, `known` and `left` as of the last token."""
        if self._run_end != inf:
            # A sequence that would get its last token at this very moment does not: nobody has told the gateway.
            self._batch.advance(min(self._count_steps_done(now), self._run_steps - 1))
        decoding = list(self._batch)
        for sequence in decoding:
            self._batch.leave(sequence)
        flying = [chunk.sequence for step in self._in_pipeline for chunk in step.chunks]
        flying += [chunk.sequence for chunk in self._run_chunks]
        rest = (*self._queue, *self._awaiting_kv.values(), *self._to_decode, *self._to_prefill, *self._sending.values())
        self.wake_at = inf
        return list(dict.fromkeys((*decoding, *flying, *rest)))

    def check_integrity(self) -> None:
        """Every block is free or held by a sequence that is here. Raises SimEngineError."""
        flying = [chunk.sequence for step in self._in_pipeline for chunk in step.chunks]
        flying += [chunk.sequence for chunk in self._run_chunks]
        holders = {*self._awaiting_kv.values(), *self._to_decode, *self._to_prefill, *self._sending.values(), *flying}
        held = sum(sequence.blocks for sequence in holders)
        held += sum(self._own_blocks(sequence, sequence.computed + self._batch.step) for sequence in self._batch)
        held += self.prefixes.used_blocks
        if held + self._free != self.blocks or self._free < 0:
            raise SimEngineError(f"{held} blocks are held and {self._free} free; there are {self.blocks}")

    # What goes on

    def _begin_step(self, now: float, signals: list[EngineSignal]) -> None:
        """Begin the next step, if there is anything to do and the first stage is free."""
        batch = self._batch
        if not self._in_pipeline:
            while self._to_decode and batch.size < self.settings.max_sequences:
                batch.join(self._to_decode.popleft())
            if not self._chunked and self._begin_prefill(now, signals):
                return
            # Who has just been preempted must not be admitted again in the same step, and so nobody is.
            preempted = self._preempt_for_decode()
            groups = self._prefill_beside_decode(signals) if self._chunked and not preempted else []
            if batch.size:
                self._begin_run(now, groups, signals, most=1 if preempted else inf)
                return
        if not batch.size and not self._to_decode and self._entry_free_at <= now:
            self._begin_prefill(now, signals)

    def _begin_prefill(self, now: float, signals: list[EngineSignal]) -> bool:
        """Begin a step of prompts alone; False: there is none that can be computed now."""
        chunks = self._fill_step(self.settings.max_batched_tokens, signals)
        if not chunks:
            return False
        tokens, pairs = add_up(chunks)
        end = now + self.times.prefill_s(tokens, pairs)
        if self._in_pipeline:  # a short step cannot overtake a long one
            end = max(end, self._in_pipeline[-1].end)
        self._entry_free_at = min(end, now + self.times.prefill_interval_s(tokens, pairs))
        self._in_pipeline.append(PrefillStep(end, chunks))
        self.counts.prefill_s += self._entry_free_at - now
        self.counts.steps += 1
        signals.extend(announce_prefill(chunks, end))
        if self._record is not None:
            stalled = self._batch.size - len(self._batch.fresh)  # the others have not begun
            self._record(StepRecord(now, end, "prefill", tokens, 0, 1, stalled))
        return True

    def _prefill_beside_decode(self, signals: list[EngineSignal]) -> list[list[PromptChunk]]:
        """Prefill chunks of the next step; each batch in flight has a budget of its own."""
        decoding = self._batch.size
        groups: list[list[PromptChunk]] = []
        own = self._batch.blocks_for(1)  # the decoding sequences take theirs before anybody is admitted
        self._free -= own
        for _ in range(self._stages if decoding else 0):
            group = self._fill_step(self.settings.max_batched_tokens - ceil(decoding / self._stages), signals)
            if not group:
                break
            groups.append(group)
        self._free += own
        return groups

    def _begin_run(self, now: float, groups: list[list[PromptChunk]], signals: list[EngineSignal], most: float) -> None:
        """Begin a step that also prefills, or up to `most` decode steps without a change."""
        batch, requests = self._batch, self._batch.size
        line = self._lines.get(requests)
        if line is None:
            line = self._lines[requests] = self.times.decode_line(requests)
        self._run_line, self._run_start = line, now
        if groups:
            chunks = self._run_chunks = list(chain.from_iterable(groups))
            self._run_steps = 1
            work = [add_up(group) for group in groups]
            self._run_end = first_end = now + round_s(self.times, self._stages, work, requests, batch.context)
            signals.extend(announce_prefill(chunks, self._run_end))
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
                signals.append(EngineSignal(SignalKind.FIRST_TOKEN, sequence, first_end))
            batch.fresh.clear()

    def _end_run(self, now: float, signals: list[EngineSignal]) -> None:
        batch, steps, chunks = self._batch, self._run_steps, self._run_chunks
        requests = batch.size
        counts = self.counts
        self._take_blocks(batch.blocks_for(steps))
        counts.steps += steps
        counts.output_tokens += steps * requests
        if chunks:
            counts.mixed_s += now - self._run_start
        else:
            counts.decode_s += now - self._run_start
        if self._record is not None:
            kind, tokens = ("mixed", add_up(chunks)[0]) if chunks else ("decode", 0)
            self._record(StepRecord(self._run_start, now, kind, tokens, requests, steps))
        for sequence in batch.advance(steps):
            sequence.blocks = self._own_blocks(sequence, sequence.computed)
            self._free_blocks(sequence)
            signals.append(EngineSignal(SignalKind.DONE, sequence, now))
        self._run_end, self._run_chunks = inf, []
        self._complete_prefill(chunks, now, signals)

    def _complete_prefill(self, chunks: list[PromptChunk], now: float, signals: list[EngineSignal]) -> None:
        """Chunks are computed: whole prompts have their first token, or send their KV."""
        for sequence, start, tokens in chunks:
            self.counts.prompt_tokens += tokens
            if start + tokens < sequence.known:
                continue
            self._prefilling -= 1
            self.prefixes.insert(sequence)
            if sequence.sends_kv:
                self._sending[sequence.key] = sequence
                signals.append(EngineSignal(SignalKind.PREFILLED, sequence, now))
                continue
            sequence.known += 1
            sequence.left -= 1
            self.counts.output_tokens += 1
            if sequence.fresh:
                sequence.fresh = False
                signals.append(EngineSignal(SignalKind.FIRST_TOKEN, sequence, now))
            if sequence.left:
                self._batch.join(sequence)
            else:
                self._free_blocks(sequence)
                signals.append(EngineSignal(SignalKind.DONE, sequence, now))

    def _set_wake_at(self, now: float) -> None:
        """When a step ends, or the first stage is free for a prompt that could begin."""
        at = self._run_end
        if self._in_pipeline:
            at = min(at, self._in_pipeline[0].end)
            if self._entry_free_at > now and not self._batch.size and (self._to_prefill or self._queue):
                at = min(at, self._entry_free_at)
        self.wake_at = at

    def _wake_earlier(self, now: float) -> None:
        """A sequence has arrived or blocks are free: the next step may begin earlier."""
        if self._run_end != inf:
            if self._run_steps > 1 and not self._run_chunks:
                self._shorten_run(now)
        elif self._in_pipeline:
            if not self._batch.size and (self._to_prefill or self._queue):
                self.wake_at = min(self.wake_at, max(now, self._entry_free_at))
        else:
            self.wake_at = now

    def _shorten_run(self, now: float) -> None:
        """End the run of decode steps at the next step boundary, if a sequence could join there."""
        steps = min(self._run_steps, max(1, self._count_steps_done(now, up=True)))
        if steps < self._run_steps and self._can_join_after(steps):
            self._run_steps = steps
            boundary = self._run_start + self._run_line.run_s(self._batch.size, self._batch.context, steps)
            self._run_end = self.wake_at = max(now, boundary)  # rounding may put the boundary before `now`

    def _can_join_after(self, steps: int) -> bool:
        if self._to_prefill or (self._to_decode and self._batch.size < self.settings.max_sequences):
            return True
        if not self._queue:
            return False
        head = self._queue[0]
        # Chunks are computed beside the step after those, which takes its blocks first.
        free = self._blocks_for_prompts() - self._batch.blocks_for(steps + self._chunked)
        return self._blocks_wanted(head) <= free and (bool(head.external) or self._has_place())

    def _count_steps_done(self, now: float, *, up: bool = False) -> int:
        """Steps of the run ended by `now`; with `up`, also the one under way. Solves the quadratic
        `run_s(steps) = now - start`."""
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

    # Admission and memory

    def _fill_step(self, budget: int, signals: list[EngineSignal]) -> list[PromptChunk]:
        """Prefill chunks of one step, up to `budget` tokens; admits in order what fits. Without chunked prefill a
        prompt longer than the budget is computed alone: vLLM would refuse it."""
        chunks: list[PromptChunk] = []
        while budget > 0:
            if not self._to_prefill or (self._queue and self._goes_first(self._queue[0])):
                admitted = self._admit()
                if admitted is not None and admitted.external:
                    signals.append(EngineSignal(SignalKind.HAS_ROOM, admitted, 0.0))
                    continue
            if not self._to_prefill:
                break
            sequence = self._to_prefill[0]
            tokens = sequence.known - sequence.computed
            if tokens > budget and self._chunked:
                tokens = budget
            elif tokens > budget and chunks:
                break  # it is the first of the next step
            chunks.append(PromptChunk(sequence, sequence.computed, tokens))
            sequence.computed += tokens
            budget -= tokens
            if sequence.computed == sequence.known:
                self._to_prefill.popleft()
        return chunks

    def _admit(self) -> Sequence | None:
        """Admit the head of the queue and return it; None if there is none that fits."""
        if not self._queue:
            return None
        sequence = self._queue[0]
        if self._blocks_wanted(sequence) > self._blocks_for_prompts() or not (sequence.external or self._has_place()):
            return None
        goes_first = self._is_cached_send(sequence)
        self._queue.popleft()
        self._take_blocks(self.prefixes.use(sequence))
        sequence.blocks = self._blocks_wanted(sequence)
        self._take_blocks(sequence.blocks)
        self.counts.cached_tokens += sequence.cached
        if sequence.external:
            self._awaiting_kv[sequence.key] = sequence
        else:
            (self._to_prefill.appendleft if goes_first else self._to_prefill.append)(sequence)
            self._prefilling += 1
        return sequence

    def _is_cached_send(self, sequence: Sequence) -> bool:
        """Whether another engine waits for KV that is here, but for a block at most."""
        if not sequence.sends_kv:
            return False
        return 0 < self.prefixes.count_cached(sequence) >= sequence.known - self._block_tokens

    def _goes_first(self, sequence: Sequence) -> bool:
        """Whether it takes hardly a token of the prompts that have been admitted."""
        return sequence.external > 0 or self._is_cached_send(sequence)

    def _queue_received(self, sequence: Sequence) -> None:
        """Its KV is here: it decodes next, or first prefills what is left of its prompt."""
        sequence.computed, sequence.external = sequence.external, 0
        self.counts.received_tokens += sequence.computed - sequence.cached
        self.prefixes.insert(sequence)
        if sequence.computed == sequence.known - 1:
            self._to_decode.append(sequence)
        else:
            self._to_prefill.append(sequence)
            self._prefilling += 1

    def _blocks_for_prompts(self) -> int:
        """Free ones that prompts may have: all of them where none is held."""
        return self._free - (self._reserve if self._free < self.blocks else 0)

    def _has_place(self) -> bool:
        return self._batch.size + len(self._to_decode) + self._prefilling < self.settings.max_sequences

    def _preempt_for_decode(self) -> bool:
        """Preempt until the rest have blocks for one step; returns whether any was."""
        batch, preempted = self._batch, False
        while batch.blocks_for(1) > self._free:
            sequence = batch.last_joined()
            batch.leave(sequence)
            sequence.blocks = self._own_blocks(sequence, sequence.computed)
            self._free_blocks(sequence)
            sequence.computed = 0
            self._queue.appendleft(sequence)
            self.counts.preemptions += 1
            preempted = True
        return preempted

    def _take_blocks(self, blocks: int) -> None:
        self._free -= blocks
        held = self.blocks - self._free
        if held > self.counts.peak_blocks:
            self.counts.peak_blocks = held
        self.prefixes.shrink(self._free)

    def _free_blocks(self, sequence: Sequence) -> None:
        self._free += sequence.blocks + self.prefixes.leave(sequence)
        sequence.blocks = 0

    def _own_blocks(self, sequence: Sequence, tokens: int) -> int:
        """Blocks for the KV of so many of its tokens, beside those that belong to the prefix cache."""
        return self._blocks_of(tokens) - self.prefixes.blocks_of_shared(sequence)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_tokens)

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """To be admitted; one that decodes at once takes the next token's block then."""
        pure = 0 < sequence.external >= sequence.known - 1
        return self._blocks_of(sequence.external if pure else sequence.known) - self.prefixes.count_shared(sequence)
