"""An engine process that several services share, in virtual time: they step one at a time, by a turn order.

    engine = SharedEngine({"chat": SharedService(times, block_bytes, profile)}, make_order, settings, kv_bytes=10**10)
    engine.submit("chat", sequence, now)
    while engine.wake_at < inf:
        signals = engine.advance(engine.wake_at)

It is used as `Engine` is, and takes the same sequences, settings and step times; who steps is decided by the code that
live engines run (`coordinator/sharing`). An iteration prefills or decodes, for one service, within the limits of a
batch. A prompt is admitted when the KV of all of it fits, and longer ones are computed in chunks, between which
others may have their turn. All services have one budget of KV bytes, given out in blocks of each. Paused requests keep
their blocks; where there are not enough, those that come last in the order lose theirs, and compute prompt and tokens
again. A prompt for which there is no room keeps prompts behind it in the order waiting, so that it gets some. Weights
of all services stay in the GPUs' memory; changing from one to another costs no time.

Every iteration is simulated by itself. There are no pipelines, prefix caches or KV transfers here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import final

from ...coordinator.costs.step_times import StepTimes, chunk_pairs
from ...coordinator.plan import Phase
from ...coordinator.sharing.evictions import RoomWanted, plan_evictions
from ...coordinator.sharing.kv_shares import KvShares
from ...coordinator.sharing.service_profile import ServiceProfile
from ...coordinator.sharing.turn_queue import TurnOrder, TurnQueue
from ...coordinator.sharing.values import SharedRequest, Turn
from .sequence import Sequence
from .values import EngineCounts, EngineSignal, SignalKind, SimEngineError, SimEngineSettings, StepRecord


@dataclass(frozen=True, slots=True)
class SharedService:
    """A service of a shared engine: its step times on the engine's GPUs, the bytes of a token's KV, and what is known
    of its requests, which the engine changes as they end."""

    times: StepTimes
    token_bytes: int
    profile: ServiceProfile


@final
class SharedEngine:
    """See the module. To be advanced at `wake_at`; infinite: there is nothing to do."""

    def __init__(
        self,
        services: Mapping[str, SharedService],
        make_order: Callable[[Mapping[str, ServiceProfile]], TurnOrder],
        settings: SimEngineSettings,
        *,
        kv_bytes: int,
        record: Callable[[StepRecord], None] | None = None,
    ) -> None:
        profiles = {name: service.profile for name, service in services.items()}
        self.settings = settings
        self.counts = EngineCounts()
        self.wake_at = inf
        self.queue = TurnQueue(make_order(profiles), profiles)
        self.shares = KvShares(kv_bytes, self._need)
        self._services = dict(services)
        for name in services:
            self.shares.open_service(name, self._block_bytes(name))
        self._record = record
        self._sequences: dict[SharedRequest, Sequence] = {}
        self._turn: Turn | None = None  # the iteration under way
        self._began = 0.0
        self._chunks: dict[SharedRequest, int] = {}  # tokens of prompts in it
        self._evicted: list[SharedRequest] = []  # while a turn is chosen: their blocks are free already
        self._requests_left, self._tokens_left = 0, 0  # of the turn that is being chosen
        self._is_blocked = False  # a prompt has no room: no others are admitted in that turn

    def __repr__(self) -> str:
        return f"<SharedEngine {self.queue!r}, {self.shares!r}>"

    @property
    def outstanding(self) -> int:
        """Open requests."""
        return len(self._sequences)

    def can_fit(self, service: str, sequence: Sequence) -> bool:
        """Whether its KV would fit here if it were alone."""
        return self._blocks_of(sequence.known + max(0, sequence.left - 1)) <= self.shares.budget // self._block_bytes(
            service
        )

    def times_of(self, service: str) -> StepTimes:
        """Its step times on these GPUs."""
        return self._services[service].times

    def kv_tokens_of(self, service: str) -> int:
        """Room for its KV, where no other has any."""
        return self.shares.budget // self._services[service].token_bytes

    def submit(self, service: str, sequence: Sequence, now: float) -> None:
        """Take it into the queue. Raises SimEngineError for one that never fits."""
        if not self.can_fit(service, sequence):
            raise SimEngineError(f"{sequence!r} of {service} needs more KV than there is: {self.shares!r}")
        request = self.queue.add(sequence, service, sequence.known, now)
        self._sequences[request] = sequence
        if self._turn is None:
            self.wake_at = now

    def advance(self, now: float) -> list[EngineSignal]:
        """End the iteration that ends at `now`, and begin the next one if there is anything to do."""
        signals: list[EngineSignal] = []
        if self._turn is not None and self.wake_at <= now:
            self._end_step(self._turn, now, signals)
        if self._turn is None:
            self._begin_step(now)
        return signals

    def stop(self) -> list[Sequence]:
        """The box has failed: all its sequences, as of the last token."""
        self.wake_at = inf
        return list(self._sequences.values())

    def take(self, request: SharedRequest) -> bool:
        """See `TurnRoom`: for `queue`, while it chooses a turn."""
        if not self._requests_left or request in self._evicted:
            return False
        sequence = self._sequences[request]
        if request.phase is Phase.PREFILL:
            tokens = min(self._tokens_left, sequence.known - sequence.computed)
            if not tokens or (self._is_blocked and not sequence.blocks):
                return False
            if not self._reserve(request, sequence, sequence.known):
                self._is_blocked = True
                return False
            self._chunks[request] = tokens
            self._tokens_left -= tokens
        elif not self._reserve(request, sequence, sequence.computed + 1):
            return False
        self._requests_left -= 1
        return True

    def check_integrity(self) -> None:
        """Every request is in the queue once, and every byte is free or held by one that is here. Raises
        SimEngineError."""
        self.shares.check()
        held = dict.fromkeys(self._services, 0)
        for request, sequence in self._sequences.items():
            held[request.service] += self._held_bytes(request)
            if request.holds_kv != bool(sequence.blocks):
                raise SimEngineError(f"{request!r} has {sequence.blocks} blocks")
        if held != self.shares.used:
            raise SimEngineError(f"requests hold {held} bytes; {self.shares.used} are given out")
        if {*self.queue.requests.values()} != self._sequences.keys():
            raise SimEngineError(f"{len(self._sequences)} requests are here, {len(self.queue.requests)} in the queue")

    # What goes on

    def _begin_step(self, now: float) -> None:
        self.wake_at = inf
        turn = self._choose(now)
        while turn is None and self.queue.requests:
            # Whoever holds KV waits for more, and none may take it from another: who came last loses it.
            victim = self.queue.find_last_holder()
            if victim is None:
                raise SimEngineError(f"nobody can step: {self!r}")
            self._free_blocks(victim)
            self._lose_kv(victim)
            turn = self._choose(now)
        if turn is None:
            return
        self._turn, self._began = turn, now
        self.wake_at = now + self._step_s(turn)

    def _choose(self, now: float) -> Turn | None:
        self._requests_left, self._tokens_left = self.settings.max_sequences, self.settings.max_batched_tokens
        self._chunks.clear()
        self._is_blocked = False
        turn = self.queue.choose(now, self)
        for request in self._evicted:
            self._lose_kv(request)
        self._evicted.clear()
        return turn

    def _step_s(self, turn: Turn) -> float:
        times = self._services[turn.service].times
        if turn.phase is Phase.DECODE:
            context = sum(self._sequences[request].computed for request in turn.requests)
            return times.decode_line(len(turn.requests)).step_s(context)
        pairs = sum(chunk_pairs(self._sequences[request].computed, tokens) for request, tokens in self._chunks.items())
        return times.prefill_s(sum(self._chunks.values()), pairs)

    def _end_step(self, turn: Turn, now: float, signals: list[EngineSignal]) -> None:
        seconds, tokens = now - self._began, sum(self._chunks.values())
        self._turn = None
        self.queue.charge(turn, seconds, now, tokens)
        counts, prefills = self.counts, turn.phase is Phase.PREFILL
        counts.steps += 1
        if prefills:
            counts.prefill_s += seconds
            counts.prompt_tokens += tokens
        else:
            counts.decode_s += seconds
        if self._record is not None:
            decoding = 0 if prefills else len(turn.requests)
            self._record(StepRecord(self._began, now, turn.phase.value, tokens, decoding, 1))
        for request in turn.requests:
            sequence = self._sequences[request]
            sequence.computed += self._chunks[request] if prefills else 1
            if sequence.computed == sequence.known:
                self._generate_token(request, sequence, now, signals)

    def _generate_token(
        self, request: SharedRequest, sequence: Sequence, now: float, signals: list[EngineSignal]
    ) -> None:
        """All of its tokens have KV, so there is one more."""
        sequence.known += 1
        sequence.left -= 1
        self.counts.output_tokens += 1
        if sequence.fresh:
            sequence.fresh = False
            signals.append(EngineSignal(SignalKind.FIRST_TOKEN, sequence, now))
        if sequence.left > 0:
            if request.phase is Phase.PREFILL:
                self.queue.begin_decode(request)
            return
        self._free_blocks(request)
        sequence.blocks = 0
        del self._sequences[request]
        self.queue.finish(request, sequence.known - request.prompt_tokens)
        signals.append(EngineSignal(SignalKind.DONE, sequence, now))

    # Memory

    def _reserve(self, request: SharedRequest, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the KV of so many tokens."""
        wanted = self._blocks_of(tokens) - sequence.blocks
        if wanted > 0:
            size = wanted * self._block_bytes(request.service)
            if not self.shares.fits(size) and not self._make_room(request, size):
                return False
            self.shares.take(request.service, size)
            sequence.blocks += wanted
            self.queue.hold_kv(request)
        return True

    def _make_room(self, asker: SharedRequest, size: int) -> bool:
        """Evict as many as it takes, or nobody."""
        wanted = RoomWanted(asker.service, size - self.shares.free, asker)
        victims = plan_evictions(
            self.queue, self.shares, wanted, lambda _, victims: sum(map(self._held_bytes, victims))
        )
        for each in victims or ():
            self._free_blocks(each)
        self._evicted += victims or ()
        return victims is not None

    def _held_bytes(self, request: SharedRequest) -> int:
        return self._sequences[request].blocks * self._block_bytes(request.service)

    def _need(self, service: str) -> float:
        return self.queue.need_tokens(service) * self._services[service].token_bytes

    def _lose_kv(self, request: SharedRequest) -> None:
        """Its blocks are free already."""
        sequence = self._sequences[request]
        sequence.blocks = sequence.computed = 0
        self.counts.preemptions += 1
        self.queue.lose_kv(request)

    def _free_blocks(self, request: SharedRequest) -> None:
        self.shares.release(request.service, self._held_bytes(request))

    def _block_bytes(self, service: str) -> int:
        return self._services[service].token_bytes * self.settings.block_tokens

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_tokens)
