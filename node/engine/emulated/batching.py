"""Continuous batching with chunked prefill and preemption, as vLLM does it: who computes what in
each step.

Pure: no clock, no sockets. A request has `known` tokens, its prompt and those it has generated; the
step that computes the last of them generates one more. KV memory is counted in blocks. A request
whose KV is being sent keeps its blocks after its end, until the transfer has ended. A step is
filled in this order:

1. Running requests, oldest first. When blocks run out the youngest is preempted: it loses all of
   its own and is computed again later. The only one left takes the blocks of waiting requests that
   have received KV.
2. Waiting requests, oldest first, while the token budget and the places last, all known tokens of
   the next one fit, and none has just been preempted. One whose KV another engine computes gets its
   blocks, if enough are left for the prompts that others still have to compute, and waits until the
   KV has come. Then it is before all that have none. The others begin behind what is in the prefix
   cache of their prompts. A prompt that is only to be sent, and cached but for a block at most, waits
   for no other of these. Prompts of 1 leave answers that are under way their tokens, and both kinds
   the tokens that they lack, where these are a block at most.

The simulator (`sims/engine`) takes many steps at once in closed form and therefore has a scheduler
of its own; a test runs both on random requests and compares them step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, final

from ....coordinator.costs.step_times import StepTimes, chunk_pairs
from ....coordinator.prefixes.block_cache import BlockCache
from .memory import KvBlocks, OwnBlocks


@dataclass(slots=True, eq=False)
class BatchedRequest:
    """A request. The KV of the first `external` of `prompt` tokens comes from another engine."""

    request: str
    prompt: int
    max_tokens: int
    external: int = 0
    sends_kv: bool = False  # its KV is being sent: its blocks stay until `Batcher.release_sent`
    generated: int = 0
    computed: int = 0  # tokens whose KV is here
    blocks: int = 0  # beside those of the prefix cache
    received: int = 0  # external tokens whose KV has come
    prefix: tuple[int, ...] = ()  # the names of its prompt's blocks
    shared: list[int] = field(default_factory=list)  # those of them in the prefix cache that it uses
    cached: int = 0  # tokens that were in the prefix cache, when it was admitted or, before, when it came

    @property
    def known(self) -> int:
        """Tokens so far: the prompt and those generated."""
        return self.prompt + self.generated

    @property
    def is_done(self) -> bool:
        """Whether it has generated all its tokens."""
        return self.generated >= self.max_tokens

    @property
    def holds_kv(self) -> bool:
        """Whether it has blocks, of its own or of the prefix cache."""
        return bool(self.blocks or self.shared)


class ScheduledTokens(NamedTuple):
    """What a step computes of a request: `tokens` tokens from position `first` on."""

    sequence: BatchedRequest
    first: int
    tokens: int

    @property
    def generates(self) -> bool:
        """Whether the step generates a token of it."""
        return self.first + self.tokens == self.sequence.known


class Batch(NamedTuple):
    """One step: what is computed; who got blocks (`admitted`) or lost them (`preempted`)."""

    scheduled: tuple[ScheduledTokens, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]


def step_s(times: StepTimes, scheduled: tuple[ScheduledTokens, ...]) -> float:
    """Modelled seconds of a step."""
    tokens = requests = context = 0
    pairs = 0.0
    for _, first, count in scheduled:
        if count == 1:
            requests, context = requests + 1, context + first
        else:
            tokens, pairs = tokens + count, pairs + chunk_pairs(first, count)
    if not tokens:
        return times.decode_line(requests).step_s(context)
    return times.mixed_s(tokens, pairs, requests, context) if requests else times.prefill_s(tokens, pairs)


@final
class Batcher:
    """An engine with these KV blocks; a step has at most `max_tokens` and `max_requests`. `prefixes`: of prompts that
    have been computed."""

    def __init__(
        self,
        *,
        blocks: KvBlocks | int,
        block_size: int,
        max_tokens: int,
        max_requests: int,
        prefixes: BlockCache | None = None,
    ) -> None:
        self.memory = OwnBlocks(blocks) if isinstance(blocks, int) else blocks
        self.block_size = block_size
        self._max_tokens = self._step_tokens = max_tokens
        self._max_requests = max_requests
        self._prefixes = prefixes if prefixes is not None else BlockCache()
        self._running: list[BatchedRequest] = []
        self._waiting: deque[BatchedRequest] = deque()
        self._awaiting_kv: dict[str, BatchedRequest] = {}  # have blocks, and wait for external KV
        self._sending: set[BatchedRequest] = set()  # have ended; their KV is still being sent
        self._places = self._tokens_left = self._reserved = 0  # of the turn that is chosen

    def __repr__(self) -> str:
        counts = f"{self.running} running, {self.waiting} waiting, {len(self._sending)} sending"
        return f"<Batcher {counts}, {self.memory}>"

    @property
    def running(self) -> int:
        """Requests that are computed in every step."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that are not computed yet, or not at present."""
        return len(self._waiting) + len(self._awaiting_kv)

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens to be computed here, of the requests that have not generated any token."""
        everyone = (*self._running, *self._awaiting_kv.values(), *self._waiting)
        return sum(
            sequence.prompt - max(sequence.external, sequence.cached) for sequence in everyone if not sequence.generated
        )

    @property
    def decodes(self) -> int:
        """Requests whose answers are generated here."""
        return sum(not sequence.sends_kv for sequence in (*self._running, *self._awaiting_kv.values(), *self._waiting))

    @property
    def free_tokens(self) -> int:
        """Tokens for which there are free blocks."""
        return self.memory.free * self.block_size

    def limit_step(self, tokens: int) -> None:
        """Lower a step's token budget, at least one per decoding request; 0 restores it."""
        self._step_tokens = min(self._max_tokens, max(tokens, self._max_requests)) if tokens else self._max_tokens

    def add(self, sequence: BatchedRequest) -> None:
        """Queue a new request."""
        if not sequence.external:
            sequence.cached = self._prefixes.find(self._usable(sequence)).blocks * self.block_size
        if self._is_cached_send(sequence):
            self._put_first(sequence)  # another engine waits for it, and there is hardly anything to compute
        else:
            self._waiting.append(sequence)

    def remove(self, request: str) -> None:
        """Forget a request in any state, or one that is not known; KV that is sent stays."""
        held = [*self._running, *self._awaiting_kv.values(), *self._waiting]
        found = next((each for each in held if each.request == request), None)
        if found is None:
            return
        if found in self._running:
            self._running.remove(found)
        elif self._awaiting_kv.pop(request, None) is None:
            self._waiting.remove(found)
        self._finish(found)

    def release_sent(self, sequence: BatchedRequest) -> None:
        """The transfer of its KV has ended; its blocks are free once the request has ended."""
        sequence.sends_kv = False
        if sequence in self._sending:
            self._sending.remove(sequence)
            self._release(sequence)

    def receive_kv(self, request: str, tokens: int) -> None:
        """The KV of the first `tokens` has come, and no more; without blocks, none is kept."""
        sequence = self._awaiting_kv.pop(request, None)
        if sequence is None:
            sequence = next((each for each in self._waiting if each.request == request), None)
            if sequence is not None:
                sequence.external = 0
            return
        sequence.external, sequence.received = 0, tokens
        # A token is generated by computing the one before it, so the last token is computed even if its KV has come.
        sequence.computed = min(tokens, sequence.known - 1)
        self._put_first(sequence)

    def schedule(self) -> Batch:
        """Make up the next step; nothing is scheduled in it when nothing can be computed now."""
        budget = self._step_tokens
        left = budget - sum(sequence.known - sequence.computed == 1 for sequence in self._running)
        left = max(1, left // 2, left - self._count_next_tokens())  # for prompts under way
        scheduled: list[ScheduledTokens] = []
        preempted: list[str] = []
        at = 0
        while at < len(self._running) and budget:
            sequence = self._running[at]
            lacks = sequence.known - sequence.computed
            count = min(budget, lacks, left if lacks > 1 else 1)
            if not count:
                at += 1
                continue
            while not self._reserve(sequence, sequence.computed + count):
                alone = self._running[-1] is sequence
                loser = self._reclaim_from_waiting() if alone else None
                loser = loser or self._preempt()
                preempted.append(loser.request)
                if loser is sequence:
                    break
            else:
                scheduled.append(ScheduledTokens(sequence, sequence.computed, count))
                budget -= count
                left -= count if lacks > 1 else 0
                at += 1
        admitted = self._admit(scheduled, budget) if not preempted else ()
        return Batch(tuple(scheduled), admitted, tuple(preempted))

    def begin_choice(self) -> None:
        """A turn is chosen: all of a step is free. What is cached may have been overwritten by another engine."""
        self._places = self._max_requests - len(self._running)
        self._tokens_left, self._reserved = self._step_tokens, 0
        self._prefixes.shrink(self.memory.free)

    def take(self, sequence: BatchedRequest, make_room: Callable[[int], bool]) -> bool:
        """Whether there is room for it in that turn, which it has then. `make_room`: have so many more blocks be free,
        or none."""
        runs = sequence in self._running
        if self._tokens_left <= 0 or not (runs or self._places > 0):
            return False
        tokens = min(self._tokens_left, sequence.known - sequence.computed)
        positions = sequence.computed + tokens if runs else sequence.known
        missing = self._blocks(positions) - sequence.blocks - len(sequence.shared)
        while missing > 0 and (lacking := self._reserved + missing - self.memory.free) > 0:
            if not make_room(lacking):
                return False
        self._places -= not runs
        self._reserved += max(0, missing)
        self._tokens_left -= tokens
        return True

    def can_lose_kv(self, sequence: BatchedRequest) -> bool:
        """Whether it holds any; that of one that waits for KV is being written."""
        return sequence.holds_kv and sequence.request not in self._awaiting_kv

    def count_freed(self, sequences: Iterable[BatchedRequest]) -> int:
        """Blocks that are free without the KV of all of these."""
        losing = [each for each in sequences if self.can_lose_kv(each)]
        shared = self._prefixes.count_unused_without(each.shared for each in losing)
        return sum(each.blocks for each in losing) + shared

    def evict(self, sequence: BatchedRequest) -> None:
        """It is computed again, in a later turn."""
        self._release(sequence)
        sequence.computed = 0
        if sequence in self._running:
            self._running.remove(sequence)
            self._put_first(sequence)

    def schedule_turn(self, turn: Sequence[BatchedRequest]) -> Batch:
        """Make up a step of these alone, in this order; who waits for KV is admitted as ever. Others keep what they
        have: when blocks run out, the last of the turn is preempted."""
        chosen = {id(sequence) for sequence in turn}
        running, waiting = {id(each) for each in self._running}, self._waiting
        paused = [each for each in self._running if id(each) not in chosen]
        self._running = [each for each in turn if id(each) in running]
        first = [each for each in turn if id(each) not in running]
        self._waiting = deque([*first, *(each for each in waiting if each.external)])
        most, self._max_requests = self._max_requests, self._max_requests - len(paused)
        batch = self.schedule()
        self._max_requests = most
        self._running += paused
        self._waiting += (each for each in waiting if not each.external and id(each) not in chosen)
        return batch

    def complete(self, batch: Batch) -> list[BatchedRequest]:
        """The step is computed: returns who has generated a token; who is done is removed."""
        generated = []
        for entry in batch.scheduled:
            sequence = entry.sequence
            generates = entry.generates  # asked before `computed` and `known` change
            sequence.computed = entry.first + entry.tokens
            if entry.first < sequence.prompt <= sequence.computed:
                added = self._prefixes.insert(self._usable(sequence), len(sequence.shared))
                sequence.shared += added
                sequence.blocks -= len(added)
            if generates:
                sequence.generated += 1
                generated.append(sequence)
                if sequence.is_done:
                    self._running.remove(sequence)
                    self._finish(sequence)
        return generated

    def check_integrity(self) -> None:
        """Raises AssertionError where blocks are lost, held twice or too few for a KV."""
        held = [*self._running, *self._awaiting_kv.values(), *self._waiting, *self._sending]
        taken = self._prefixes.used + sum(sequence.blocks for sequence in held)
        if taken != self.memory.used or self._prefixes.unused > self.memory.free:
            raise AssertionError(f"{self!r}, and {taken} are held; {self._prefixes!r}")
        for sequence in held:
            if sequence.computed > (sequence.blocks + len(sequence.shared)) * self.block_size:
                raise AssertionError(f"{sequence} has more KV than room for it")

    # ---- inside ---------------------------------------------------------------------------------------------

    def _admit(self, scheduled: list[ScheduledTokens], budget: int) -> tuple[str, ...]:
        admitted = []
        while self._waiting and len(self._running) < self._max_requests:
            sequence = self._waiting[0]
            if not (budget or sequence.external):
                break
            self._use_cached(sequence)
            count = min(budget, sequence.known - sequence.computed)
            positions = sequence.external or sequence.computed + count
            if not (self._can_admit(sequence) and self._reserve(sequence, positions)):
                if not sequence.blocks:  # what is cached may be overwritten while it waits
                    self._release(sequence)
                    sequence.computed = 0
                break
            if sequence.external:
                self._awaiting_kv[sequence.request] = self._waiting.popleft()
                admitted.append(sequence.request)
                continue
            self._running.append(self._waiting.popleft())
            scheduled.append(ScheduledTokens(sequence, sequence.computed, count))
            budget -= count
        return tuple(admitted)

    def _usable(self, sequence: BatchedRequest) -> tuple[int, ...]:
        """The blocks of its prompt that it need not compute where they are cached: the last token it always does."""
        return sequence.prefix[: (sequence.known - 1) // self.block_size]

    def _is_cached_send(self, sequence: BatchedRequest) -> bool:
        return sequence.sends_kv and 0 < sequence.cached >= sequence.known - self.block_size

    def _put_first(self, sequence: BatchedRequest) -> None:
        """Before all that wait but those with KV, as in vLLM's queues."""
        self._waiting.insert(sum(1 for _ in takewhile(lambda each: each.holds_kv, self._waiting)), sequence)

    def _count_next_tokens(self) -> int:
        """That those at the head of the queue lack, as long as each lacks a block at most."""
        lacking = 0
        for sequence in self._waiting:
            if sequence.external:  # takes no tokens
                continue
            lacks = sequence.known - (sequence.computed or sequence.cached)
            if lacks > self.block_size or not (sequence.holds_kv or self._is_cached_send(sequence)):
                break
            lacking += lacks
        return lacking

    def _use_cached(self, sequence: BatchedRequest) -> None:
        """It begins behind what is cached of its prompt, unless it has KV already or is to be given some."""
        if sequence.external or sequence.computed:
            return
        names = self._usable(sequence)
        found = self._prefixes.find(names)
        self._prefixes.use(names[: found.blocks])
        self.memory.take(found.unused)
        sequence.shared = list(names[: found.blocks])
        sequence.computed = sequence.cached = found.blocks * self.block_size

    def _can_admit(self, sequence: BatchedRequest) -> bool:
        """Whether the blocks for all known tokens of a request are free, as vLLM requires."""
        missing = self._missing_blocks(sequence)
        if missing > self.memory.free or (sequence.external and not self.memory.leaves_floors(missing)):
            return False
        # A request that waits for KV is not preempted, so the prompts that others are in the middle of must keep enough
        # blocks to be finished: else two could wait for each other.
        unfinished = (each for each in (*self._running, *self._awaiting_kv.values()) if each.known - each.computed > 1)
        return not sequence.external or self._blocks(sequence.external) <= self.memory.free - sum(
            map(self._missing_blocks, unfinished)
        )

    def _reclaim_from_waiting(self) -> BatchedRequest | None:
        """Take the blocks of the last waiting request with any; None if none has."""
        holder = next((each for each in reversed(self._waiting) if each.holds_kv), None)
        if holder is not None:
            self._release(holder)
            holder.computed = 0
        return holder

    def _preempt(self) -> BatchedRequest:
        """Take the blocks of the youngest running request; it is computed again."""
        youngest = self._running.pop()
        self._release(youngest)
        youngest.computed = 0
        self._put_first(youngest)
        return youngest

    def _reserve(self, sequence: BatchedRequest, positions: int) -> bool:
        """Take blocks for so many tokens of it; False if too few are free."""
        more = self._blocks(positions) - sequence.blocks - len(sequence.shared)
        if more > self.memory.free:
            return False
        if more > 0:
            self.memory.take(more)
            sequence.blocks += more
            self._prefixes.shrink(self.memory.free)
        return True

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _missing_blocks(self, sequence: BatchedRequest) -> int:
        """Blocks for its known tokens that it does not have yet."""
        return self._blocks(sequence.known) - sequence.blocks - len(sequence.shared)

    def _finish(self, sequence: BatchedRequest) -> None:
        """A request has ended; KV that is being sent stays, as with vLLM's delayed free."""
        if sequence.sends_kv and sequence.holds_kv:
            self._sending.add(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: BatchedRequest) -> None:
        self.memory.give(sequence.blocks + self._prefixes.leave(sequence.shared))
        sequence.blocks, sequence.shared = 0, []
