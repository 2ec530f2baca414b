"""What the engine's steps were like, told to the agent ten times a second: sums, and a few steps
spread over the time, to which the coordinator fits the profile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar, final

from ...coordinator.prefixes.held import pack_names
from ...coordinator.profile import StepSample
from .protocol import EngineMessage, EngineStats, HeldBlocks, Iterations, NewTokens, Step

INTERVAL_S: Final = 0.1
SAMPLES_KEPT: Final = 4  # of steps with prefill in them, and as many of the others

T = TypeVar("T")


@final
class SpreadSample(Generic[T]):
    """At most `limit` of the values added, evenly spread: whenever there are too many, every other one goes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._every = 1
        self._seen = 0
        self._kept: list[T] = []

    def add(self, value: T) -> None:
        """Keep the value, or not."""
        if self._seen % self._every == 0:
            if len(self._kept) == self._limit:
                del self._kept[1::2]
                self._every *= 2
            if self._seen % self._every == 0:
                self._kept.append(value)
        self._seen += 1

    @property
    def kept(self) -> tuple[T, ...]:
        """In the order in which they were added."""
        return tuple(self._kept)


@final
class StepTotals:
    """Sums over steps, until they are taken."""

    def __init__(self) -> None:
        self._taken_at = 0.0
        self._clear()

    def __repr__(self) -> str:
        return f"<StepTotals of {self._steps} steps>"

    def _clear(self) -> None:
        self._steps = self._preemptions = self._prefill = self._decode = self._context = 0
        self._seconds = self._longest = 0.0
        self._prefills: SpreadSample[StepSample] = SpreadSample(SAMPLES_KEPT)
        self._decodes: SpreadSample[StepSample] = SpreadSample(SAMPLES_KEPT)

    def add(self, step: StepSample, preempted: int) -> None:
        """Count a step, before which so many requests had lost their blocks."""
        self._steps += 1
        self._preemptions += preempted
        self._prefill += step.prefill_tokens
        self._decode += step.decode_requests
        self._context += step.decode_context
        self._seconds += step.seconds
        self._longest = max(self._longest, step.seconds)
        (self._prefills if step.prefill_requests else self._decodes).add(step)

    def take(self, now: float, *, at_once: bool) -> Iterations | None:
        """The sums since last taken; None when too soon (unless `at_once`) or without a step."""
        if not self._steps or not (at_once or now - self._taken_at >= INTERVAL_S):
            return None
        found = Iterations(
            steps=self._steps,
            seconds=self._seconds,
            longest_s=self._longest,
            prefill_tokens=self._prefill,
            decode_tokens=self._decode,
            decode_context=self._context,
            preemptions=self._preemptions,
            samples=self._prefills.kept + self._decodes.kept,
        )
        self._taken_at = now
        self._clear()
        return found


@final
class StepReporter:
    """Tells the agent what steps have added. `send` queues a message to it."""

    def __init__(self, send: Callable[[EngineMessage], None]) -> None:
        self._send = send
        self._reported: EngineStats | None = None

    def report(self, outputs: Sequence[NewTokens], stats: EngineStats, iterations: Iterations | None = None) -> None:
        """Send what is new. That the load has changed is news too, since routes follow it: also when requests have gone
        without a word, and when it goes back to what it was before the last report."""
        if outputs or iterations or stats != self._reported:
            self._reported = stats
            self._send(Step(outputs=tuple(outputs), stats=stats, iterations=iterations))

    def tell_held(self, held: Sequence[int], lost: Sequence[int]) -> None:
        """Tell the names of prefixes that are in the prefix cache, and those that are not any more."""
        if held or lost:
            self._send(HeldBlocks(held=pack_names(held), lost=pack_names(lost)))


@final
class StepMeter:
    """Times the steps of a vLLM scheduler and counts what is in them.

    A step lasts until its output has been taken in, from when the one before it had, or, after a pause, from when it
    was scheduled. So what the loop does between two steps counts: requests wait for it.

    With asynchronous scheduling a step is scheduled while the one before it computes, on the same device, which cannot
    begin it sooner than it has ended the other. The batches of a pipeline are computed at the same time, each by
    another stage (`concurrent`): each lasts from when it was scheduled.
    """

    def __init__(
        self, scheduler: Any, clock: Callable[[], float], on_step: Callable[[StepSample], None], *, concurrent: bool
    ) -> None:
        """`on_step` is told of each step that has ended, unless it computed nothing."""
        self.tally = StepTotals()
        self._clock = clock
        self._on_step = on_step
        self._concurrent = concurrent
        self._in_flight: deque[float] = deque()  # when each began; steps end in the order in which they began
        self._ended: float | None = None
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        # vLLM has a hook for neither; its own statistics know neither context nor single steps.
        scheduler.schedule = self._timed_schedule
        scheduler.update_from_output = self._timed_update

    def pause(self) -> None:
        """The engine has nothing to do, or others compute: the next step begins when it is scheduled."""
        self._ended = None

    def _timed_schedule(self, *arguments: Any, **settings: Any) -> Any:
        alone = not self._in_flight
        self._in_flight.append(self._ended if alone and self._ended is not None else self._clock())
        return self._schedule(*arguments, **settings)

    def _timed_update(self, scheduled: Any, output: Any) -> Any:
        result = self._update(scheduled, output)
        now = self._clock()
        began = self._in_flight.popleft()
        if self._ended is not None and not self._concurrent:
            began = max(began, self._ended)
        if scheduled.total_num_scheduled_tokens:
            computed = count_computed(scheduled)
            counts = scheduled.num_scheduled_tokens.items()
            step = describe_step(((computed[request], tokens) for request, tokens in counts), now - began)
            self.tally.add(step, len(scheduled.preempted_req_ids or ()))
            self._on_step(step)
            self._ended = now
        else:
            self._ended = None  # only KV is awaited
        return result


def count_computed(scheduled: Any) -> dict[str, int]:
    """How many tokens of each request in vLLM's `SchedulerOutput` had been computed before."""
    cached = scheduled.scheduled_cached_reqs
    computed: dict[str, int] = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}


def describe_step(scheduled: Iterable[tuple[int, int]], seconds: float) -> StepSample:
    """The step as a sample for the profiler: of each request, the first position and how many tokens; one token counts
    as decode."""
    chunks, begun, contexts = list[int](), list[int](), list[int]()
    for first, tokens in scheduled:
        if tokens == 1:
            contexts.append(first)
        else:
            chunks.append(tokens)
            begun.append(first)
    return StepSample(
        seconds=seconds,
        prefill_requests=len(chunks),
        prefill_tokens=sum(chunks),
        decode_requests=len(contexts),
        decode_context=sum(contexts),
        prefill_context=sum(begun),
    )
