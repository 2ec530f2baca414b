"""Replicas at work, and the requests that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, final

from ..coordinator.plan import Replica
from ..coordinator.requests import OpenDecode, RequestMachine, Tokens
from .engine.engine import Engine
from .engine.sequence import Sequence
from .engine.values import SimEngineError
from .events import Scheduled
from .kv_transfers import KVTransfer
from .results.outcomes import ReplicaOutcome

__all__ = ["NEVER", "Assignment", "SimReplica", "SimRequest", "Split"]

NEVER: Final = -1.0
Woke = Callable[["SimReplica", float], list[Scheduled]]
"""What happens when a replica wants to go on, and what follows from it."""


@final
class SimReplica:
    """A replica at work. As an event, it is its engine's alarm."""

    __slots__ = (
        "_woke", "alarm", "engine", "lost", "number", "outstanding", "replica", "service", "stranded", "unread"
    )  # fmt: skip

    def __init__(self, number: int, service: int, replica: Replica, engine: Engine, woke: Woke) -> None:
        self.number = number
        self.service = service
        self.replica = replica
        self.engine = engine
        self.alarm = NEVER  # the moment at which the queue wakes it next
        self.outstanding = 0
        self.unread = 0  # tokens of their prompts
        self.lost = False  # with one of its boxes
        self.stranded: list[Assignment] = []  # that it had then, or was given before that was noticed
        self._woke = woke

    def happen(self, now: float) -> Iterable[Scheduled]:
        """Its engine wants to go on, unless it has changed its mind since."""
        if self.engine.wake_at != now:
            return ()
        self.alarm = NEVER
        return self._woke(self, now)

    def check_integrity(self) -> None:
        """Nothing is left when all requests have ended. Raises SimEngineError."""
        self.engine.check_integrity()
        if self.outstanding or self.unread:
            raise SimEngineError(
                f"{self.replica.id} is left with {self.outstanding} requests, {self.unread} tokens to read"
            )

    def outcome(self, service: str) -> ReplicaOutcome:
        """What it has done."""
        return ReplicaOutcome(
            id=self.replica.id,
            service=service,
            phase=self.replica.phase,
            boxes=self.replica.peers,
            times=self.engine.times.source,
            tally=self.engine.tally,
            blocks=self.engine.blocks,
        )


@final
class SimRequest:
    """A request of a trace, from its arrival to its end: the `Answer` of its machine, with counts for tokens."""

    __slots__ = ("assignment", "count", "finish", "left", "machine", "prompt", "row", "service")

    def __init__(self, service: int, row: int, prompt: int, output: int) -> None:
        self.service = service
        self.row = row
        self.prompt = prompt
        self.count = 0
        self.left = output
        self.finish: str | None = None
        self.machine: RequestMachine
        self.assignment: Assignment | None = None  # of the latest attempt

    def take(self, tokens: Tokens, finish: str | None) -> None:
        """There are more tokens. Nobody looks at them."""
        taken = min(len(tokens), self.left)
        self.count += taken
        self.left -= taken
        self.finish = finish if self.left else "length"


class Split(NamedTuple):
    """The prefill side of a request that has one, until its KV has landed."""

    replica: SimReplica
    sequence: Sequence
    transfer: KVTransfer


@final
class Assignment:
    """One attempt at a request, with its decode side. `unread` tokens of the prompt are for that to compute, until it
    has a token."""

    __slots__ = (
        "decode", "first_at", "first_token", "opening", "prefill_number", "request", "sequence", "split", "start",
        "submitted", "unread",
    )  # fmt: skip

    def __init__(self, request: SimRequest, opening: OpenDecode, decode: SimReplica, key: int) -> None:
        known, left = request.prompt + request.count, request.left
        self.request = request
        self.opening = opening
        self.decode = decode
        self.prefill_number = decode.number
        self.split: Split | None = None
        self.start = request.count  # tokens of the answer that were there before
        self.first_at: float | None = None  # when there is one more here; it may lie ahead by a step
        self.submitted = False
        if opening.first_token:  # comes from the prefill side, before the KV is here
            self.sequence = Sequence(key, known + 1, left - 1, fresh=False, incoming=known)
        else:  # the last token of the prompt is computed here in any case
            incoming = min(opening.split, known - 1)
            self.sequence = Sequence(key, known, left, fresh=not self.start, incoming=incoming)
        self.unread = self.sequence.known - self.sequence.incoming

    @property
    def awaits_first_token(self) -> bool:
        """Whether the prefill side has yet to sample it."""
        return self.opening.first_token and self.request.count == self.start

    @property
    def tokens(self) -> range:
        """Those of the answer that this attempt has."""
        request = self.request
        end = request.count + request.left - self.sequence.left
        return range(self.start, end - self.awaits_first_token)

    def begin(self, now: float) -> None:
        """The decode side has it to do now."""
        self.submitted = True
        self.decode.outstanding += 1
        self.decode.unread += self.unread
        self.decode.engine.submit(self.sequence, now)

    def go_without_kv(self, now: float) -> None:
        """The decode side computes all of the prompt."""
        sequence = self.sequence
        if self.awaits_first_token:  # nor will that come
            sequence.known -= 1
            sequence.left += 1
            sequence.fresh = not self.start
        if not self.submitted:
            sequence.incoming, self.unread = 0, sequence.known
            self.begin(now)
            return
        self.decode.unread += sequence.known - self.unread
        self.unread = sequence.known
        self.decode.engine.expect_no_kv(sequence, now)

    def computed(self) -> None:
        """The decode side has nothing left of the prompt to compute."""
        self.decode.unread -= self.unread
        self.unread = 0

    def ended(self) -> None:
        """The decode side has no more to do with it."""
        self.computed()
        self.decode.outstanding -= 1
