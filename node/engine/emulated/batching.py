"""Which request computes how many positions in each step: continuous batching with chunked prefill, as vLLM does it.

Pure: no clock, no sockets. A request has `known` tokens, its prompt and what it has written; once the KV of all of them
is there, the step writes one more. KV memory is counted in blocks; those of a request whose KV is being sent stay in
use after its end, until its transfer has ended. Each step is filled in this order:

1. running requests, oldest first. Where blocks run out the youngest loses all of its own and starts again later; the
   only one left takes those of requests that wait with KV from elsewhere;
2. waiting requests, oldest first, as long as the token budget and the places last, all known tokens of the next one
   fit, and none has just lost its blocks. One whose KV comes from another engine gets its blocks, if those that others
   still need for their prompts are left, and waits aside until it has come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, final

from ....coordinator.costs.step_times import StepTimes, chunk_pairs
from ....coordinator.profile import StepSample

__all__ = ["Batch", "BatchedRequest", "Batcher", "ScheduledTokens", "step_s"]


@dataclass(slots=True, eq=False)
class BatchedRequest:
    """A request: `prompt` tokens, of which the KV of the first `external` comes from elsewhere, and at most `wanted` to
    be written."""

    request: str
    prompt: int
    wanted: int
    external: int = 0
    sends: bool = False  # its KV is being sent to another engine: its blocks stay until `Batcher.sent`
    written: int = 0
    computed: int = 0  # positions whose KV is here
    blocks: int = 0
    arrived: int = 0  # of the external positions

    @property
    def known(self) -> int:
        """Tokens so far."""
        return self.prompt + self.written

    @property
    def done(self) -> bool:
        """Whether it has all its tokens."""
        return self.written >= self.wanted


class ScheduledTokens(NamedTuple):
    """What a step computes of a request: `tokens` positions from `first` on."""

    sequence: BatchedRequest
    first: int
    tokens: int

    @property
    def writes(self) -> bool:
        """Whether the step writes a token of it."""
        return self.first + self.tokens == self.sequence.known


class Batch(NamedTuple):
    """One step, and what came about while it was made up: `admitted` requests now have room for KV from elsewhere,
    `preempted` ones have lost theirs."""

    pieces: tuple[ScheduledTokens, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]

    def sample(self, seconds: float) -> StepSample:
        """What it computes; one position of a request counts as decoding."""
        chunks = [piece.tokens for piece in self.pieces if piece.tokens > 1]
        contexts = [piece.first for piece in self.pieces if piece.tokens == 1]
        return StepSample(
            seconds=seconds,
            prefill_requests=len(chunks),
            prefill_tokens=sum(chunks),
            decode_requests=len(contexts),
            decode_context=sum(contexts),
        )


def step_s(times: StepTimes, pieces: tuple[ScheduledTokens, ...]) -> float:
    """How long a step over these takes."""
    tokens = requests = context = 0
    pairs = 0.0
    for _, first, count in pieces:
        if count == 1:
            requests, context = requests + 1, context + first
        else:
            tokens, pairs = tokens + count, pairs + chunk_pairs(first, count)
    if not tokens:
        return times.decode_line(requests).step_s(context)
    return times.mixed_s(tokens, pairs, requests, context) if requests else times.prefill_s(tokens, pairs)


@final
class Batcher:
    """All requests of an engine with so many blocks of KV memory.

    `max_tokens` are computed in a step, for at most `max_requests` requests.
    """

    def __init__(self, *, blocks: int, block_size: int, max_tokens: int, max_requests: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._max_tokens = self._step_tokens = max_tokens
        self._max_requests = max_requests
        self._free = blocks
        self._running: list[BatchedRequest] = []
        self._waiting: deque[BatchedRequest] = deque()
        self._aside: dict[str, BatchedRequest] = {}  # they have blocks, and wait for KV
        self._sending: set[BatchedRequest] = set()  # they are over, and have blocks whose KV is being sent

    def __repr__(self) -> str:
        counts = f"{self.running} running, {self.waiting} waiting, {len(self._sending)} sending"
        return f"<Batcher {counts}, {self._free}/{self.blocks} blocks free>"

    @property
    def running(self) -> int:
        """Requests that compute in every step."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that do not yet, or not at present."""
        return len(self._waiting) + len(self._aside)

    @property
    def unread_tokens(self) -> int:
        """Of prompts that are to be read here, as long as nothing is written."""
        everyone = (*self._running, *self._aside.values(), *self._waiting)
        return sum(sequence.prompt - sequence.external for sequence in everyone if not sequence.written)

    @property
    def free_tokens(self) -> int:
        """Positions for which there are free blocks."""
        return self._free * self.block_size

    def limit(self, tokens: int) -> None:
        """A step computes so many at most, but no fewer than may decode at once; 0: as many as at first."""
        self._step_tokens = min(self._max_tokens, max(tokens, self._max_requests)) if tokens else self._max_tokens

    def add(self, sequence: BatchedRequest) -> None:
        """A new request."""
        self._waiting.append(sequence)

    def remove(self, request: str) -> None:
        """Forget a request, whatever its state; one that is not known is no matter. KV that is being sent stays."""
        held = [*self._running, *self._aside.values(), *self._waiting]
        found = next((each for each in held if each.request == request), None)
        if found is None:
            return
        if found in self._running:
            self._running.remove(found)
        elif self._aside.pop(request, None) is None:
            self._waiting.remove(found)
        self._end(found)

    def sent(self, sequence: BatchedRequest) -> None:
        """The transfer of its KV has ended, in whatever way: its blocks are free as soon as it is over."""
        sequence.sends = False
        if sequence in self._sending:
            self._sending.remove(sequence)
            self._release(sequence)

    def arrived(self, request: str, tokens: int) -> None:
        """The KV of the first `tokens` positions has come for a request, and no more will: none of it for one that has
        no room yet."""
        sequence = self._aside.pop(request, None)
        if sequence is None:
            sequence = next((each for each in self._waiting if each.request == request), None)
            if sequence is not None:
                sequence.external = 0
            return
        sequence.external, sequence.arrived = 0, tokens
        # Something must be computed for a token to be written, so of a whole prompt the last position is.
        sequence.computed = min(tokens, sequence.known - 1)
        self._waiting.appendleft(sequence)

    def next(self) -> Batch:
        """The next step. It has no pieces when nothing can be computed now."""
        budget = self._step_tokens
        pieces: list[ScheduledTokens] = []
        preempted: list[str] = []
        at = 0
        while at < len(self._running) and budget:
            sequence = self._running[at]
            count = min(budget, sequence.known - sequence.computed)
            while not self._reserve(sequence, sequence.computed + count):
                alone = self._running[-1] is sequence
                loser = self._take_back(sequence) if alone else None
                loser = loser or self._preempt()
                preempted.append(loser.request)
                if loser is sequence:
                    break
            else:
                pieces.append(ScheduledTokens(sequence, sequence.computed, count))
                budget -= count
                at += 1
        admitted = self._admit(pieces, budget) if not preempted else ()
        return Batch(tuple(pieces), admitted, tuple(preempted))

    def complete(self, batch: Batch) -> list[BatchedRequest]:
        """The step has been computed; returns the requests that have written a token. Those that are done are gone."""
        wrote = []
        for piece in batch.pieces:
            sequence = piece.sequence
            writes = piece.writes
            sequence.computed = piece.first + piece.tokens
            if writes:
                sequence.written += 1
                wrote.append(sequence)
                if sequence.done:
                    self._running.remove(sequence)
                    self._end(sequence)
        return wrote

    def check_integrity(self) -> None:
        """Every block is free or held once, and whoever holds KV has the blocks for it."""
        held = [*self._running, *self._aside.values(), *self._waiting, *self._sending]
        if self._free + sum(sequence.blocks for sequence in held) != self.blocks:
            raise AssertionError(f"{self!r}, and {sum(sequence.blocks for sequence in held)} are held")
        for sequence in held:
            if sequence.computed > sequence.blocks * self.block_size:
                raise AssertionError(f"{sequence} has more KV than room for it")

    # ---- inside ---------------------------------------------------------------------------------------------

    def _admit(self, pieces: list[ScheduledTokens], budget: int) -> tuple[str, ...]:
        admitted = []
        while self._waiting and budget and len(self._running) < self._max_requests:
            sequence = self._waiting[0]
            count = min(budget, sequence.known - sequence.computed)
            positions = sequence.external or sequence.computed + count
            if not (self._fits(sequence) and self._reserve(sequence, positions)):
                break
            if sequence.external:
                self._aside[sequence.request] = self._waiting.popleft()
                admitted.append(sequence.request)
                continue
            self._running.append(self._waiting.popleft())
            pieces.append(ScheduledTokens(sequence, sequence.computed, count))
            budget -= count
        return tuple(admitted)

    def _fits(self, sequence: BatchedRequest) -> bool:
        """Whether there are blocks for all that a waiting request knows; so says vLLM, although it takes them chunk by
        chunk. What waits for KV computes nothing meanwhile and is not preempted: others must not miss its blocks."""
        if self._missing(sequence) > self._free:
            return False
        unread = (each for each in (*self._running, *self._aside.values()) if each.known - each.computed > 1)
        return not sequence.external or self._blocks(sequence.external) <= self._free - sum(map(self._missing, unread))

    def _take_back(self, sequence: BatchedRequest) -> BatchedRequest | None:
        """Have the last of the other waiting requests that has KV lose it. None: none has any."""
        holder = next((each for each in reversed(self._waiting) if each.blocks and each is not sequence), None)
        if holder is not None:
            self._release(holder)
            holder.computed = 0
        return holder

    def _preempt(self) -> BatchedRequest:
        """Take the blocks of the youngest running request; it will compute everything again."""
        youngest = self._running.pop()
        self._release(youngest)
        youngest.computed = 0
        self._waiting.appendleft(youngest)
        return youngest

    def _reserve(self, sequence: BatchedRequest, positions: int) -> bool:
        """Have blocks for so many positions; False, and nothing changed, when there are too few."""
        more = self._blocks(positions) - sequence.blocks
        if more > self._free:
            return False
        if more > 0:
            self._free -= more
            sequence.blocks += more
        return True

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _missing(self, sequence: BatchedRequest) -> int:
        """Blocks that it has not, of those for all it knows."""
        return self._blocks(sequence.known) - sequence.blocks

    def _end(self, sequence: BatchedRequest) -> None:
        """It is over; KV that is being sent stays, as with vLLM's delayed free."""
        if sequence.sends and sequence.blocks:
            self._sending.add(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: BatchedRequest) -> None:
        self._free += sequence.blocks
        sequence.blocks = 0
