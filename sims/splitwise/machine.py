"""One machine of the Splitwise simulator: iteration-level scheduling, first come first served, with
preemption.

A machine holds *tasks*: the prefill of a request, and its decoding. From time to time it selects a
*batch* of them and runs it: one iteration where the batch holds a prompt, else as many as it takes
until the first request has all of its tokens. A task that arrives meanwhile and may join ends such
a run at its next iteration boundary.

A batch is selected in this order, up to 512 tasks and 2,048 tokens (`MachineLimits`; a prompt counts
its length, a decode 1; whatever comes first always fits): tasks passed over 4 times or more, the
oldest first of those passed over as often; prompts; decodes
that were preempted; decodes of the last batch; everything else, by arrival of the request. What the
last batch held and this one does not is preempted: it keeps its memory. KV memory is reserved when
a task first runs: prompt + 1 tokens for a prefill, all of the remaining output for a decode.

The machine is a plain state: it has no clock and no queue of events. A call that starts a run, or
ends one early, says when the run ends now; whoever calls comes back then with `end_run` and
`start`.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import Protocol

from .setups import SetupError


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """What a machine batches (section IV-B), as released if nothing else is said.

    - `requests`: tasks of a batch. More: longer iterations, and fewer of them.
    - `tokens`: of a batch. More: prompts are computed together that gain little by it (on the
      paper's H100 nothing beyond 2,048), and all of them wait for the last; fewer: less of a card
      is used.
    - `preemptions`: how often a task is passed over until it comes before all prompts. More: first
      tokens come sooner, and decodes are held up for longer.
    """

    requests: int = 512
    tokens: int = 2048
    preemptions: int = 4

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise SetupError(f"{name} of a batch: {getattr(self, name)}; it must be at least 1")


AS_RELEASED = MachineLimits()


class IterationTimes(Protocol):
    """Seconds of one iteration."""

    def iteration_s(self, prompt_tokens: int, decodes: int) -> float:
        """Over so many prompt tokens in total, with so many requests that decode."""
        ...


class MachineTask:
    """The prefill or the decoding of one request, on one machine."""

    __slots__ = (
        "arrival",
        "is_prompt",
        "kv_tokens",
        "last_step",
        "preempted",
        "preemptions",
        "request",
        "steps",
        "tokens",
    )

    def __init__(self, request: int, arrival: float, *, prompt: int = 0, steps: int = 0) -> None:
        """A prefill has a `prompt`, a decode has `steps`: one for each token after the first."""
        self.request = request
        self.arrival = arrival
        self.is_prompt = prompt > 0
        self.tokens = prompt or 1  # what it takes of a batch
        self.kv_tokens = prompt + 1 if prompt else steps
        self.steps = steps  # still to go, while it waits
        self.last_step = -1  # the machine's step that makes its last token, while it runs
        self.preemptions = 0  # times that a batch was started without it
        self.preempted = False

    def __repr__(self) -> str:
        return f"<{'prefill' if self.is_prompt else 'decode'} of request {self.request}>"


_urgency = attrgetter("preemptions", "arrival")
_arrival = attrgetter("arrival")


class _Selection:
    """A batch being put together: tasks that join, beside decodes of the last batch that stay."""

    __slots__ = ("joining", "kept", "kv_used", "limits", "tokens")

    def __init__(self, kv_used: int, limits: MachineLimits) -> None:
        self.limits = limits
        self.joining: list[MachineTask] = []
        self.kept = 0
        self.tokens = 0
        self.kv_used = kv_used

    def is_full_for(self, task: MachineTask) -> bool:
        """Whether the limits leave no place for the task; they always leave one for the first."""
        count = len(self.joining) + self.kept
        limits = self.limits
        return count >= limits.requests or (count > 0 and self.tokens + task.tokens > limits.tokens)

    def try_add(self, task: MachineTask, kv_capacity: float) -> bool:
        """Take the task, if there is memory for it; one that was preempted still has its own."""
        if not task.preempted:
            if self.kv_used + task.kv_tokens > kv_capacity:
                return False
            self.kv_used += task.kv_tokens
        self.joining.append(task)
        self.tokens += task.tokens
        return True


class Machine:
    """One machine's waiting and running tasks, and its run. Memory: KV tokens beside weights."""

    def __init__(self, times: IterationTimes, kv_capacity: float, limits: MachineLimits = AS_RELEASED) -> None:
        self._times = times
        self._limits = limits
        self._kv_capacity = kv_capacity
        self._kv_used = 0
        # Waiting. `_queue` has all tasks, by urgency at the moment each came in (which is not kept up to date);
        # `_fronts` the next task of each request, by arrival; `_followers` decodes whose prefill is here and not done.
        self._queue: list[MachineTask] = []
        self._prompts: list[MachineTask] = []
        self._preempted: list[MachineTask] = []
        self._fronts: list[MachineTask] = []
        self._followers: dict[int, MachineTask] = {}
        # Running. `_decodes` is ordered as they joined; decodes that end at a step are in `_ending`, with others that
        # were to end then and have been preempted since.
        self._batch_prompts: list[MachineTask] = []
        self._decodes: dict[MachineTask, None] = {}
        self._batch_tokens = 0
        self._step = 0
        self._ending: dict[int, list[MachineTask]] = {}
        self._ending_steps: list[int] = []
        # The run.
        self._iteration_s = 0.0
        self._run_steps = 0
        self._run_ends = 0.0
        self._run_is_cut = False
        self.busy_s = 0.0
        self.decode_request_s = 0.0
        self.tokens_s: defaultdict[int, float] = defaultdict(
            float
        )  # by tokens of a batch, seconds that it computed such

    def __repr__(self) -> str:
        running = len(self._batch_prompts) + len(self._decodes)
        return f"<Machine: {running} tasks run, {len(self._queue)} wait, {self._kv_used} KV tokens reserved>"

    @property
    def kv_capacity(self) -> float:
        """Tokens of KV that there is memory for, beside the weights."""
        return self._kv_capacity

    @property
    def waits(self) -> bool:
        """Whether tasks wait."""
        return bool(self._queue)

    @property
    def is_drained(self) -> bool:
        """Whether it has nothing to do at all."""
        return not (self._batch_prompts or self._decodes or self._fronts)

    def reserve(self, kv_tokens: int) -> bool:
        """Set memory aside for a KV cache on its way here; False where there is not enough."""
        if self._kv_used + kv_tokens > self._kv_capacity:
            return False
        self._kv_used += kv_tokens
        return True

    def release(self, kv_tokens: int) -> None:
        """Give memory back."""
        self._kv_used -= kv_tokens

    def arrive(self, task: MachineTask, now: float, *, follows: bool = False) -> float | None:
        """Take a task; returns the run's end if it is new. `follows`: behind its prefill."""
        if follows:
            self._followers[task.request] = task
        else:
            insort(self._fronts, task, key=_arrival)
            if task.is_prompt:
                self._prompts.append(task)
        insort(self._queue, task, key=_urgency)
        running = len(self._batch_prompts) + len(self._decodes)
        if not running:
            return self.start(now) if self._kv_used + task.kv_tokens <= self._kv_capacity else None
        if running < self._limits.requests and self._batch_tokens + task.tokens <= self._limits.tokens:
            return self._cut_run(now)
        # A prompt may still push decodes aside, if it fits in a batch at all.
        if task.is_prompt and self._batch_tokens - len(self._decodes) + task.tokens <= self._limits.tokens:
            return self._cut_run(now)
        return None

    def look_again(self, now: float) -> float | None:
        """Memory was released; returns when the run ends, if that is new."""
        if not self._queue:
            return None
        running = len(self._batch_prompts) + len(self._decodes)
        if not running:
            return self.start(now) if self._kv_used + self._queue[0].kv_tokens <= self._kv_capacity else None
        if running < self._limits.requests and self._batch_tokens < self._limits.tokens:
            return self._cut_run(now)
        return None

    def end_run(self) -> list[MachineTask]:
        """The run is over: finished tasks, prefills first. A decode after one comes to the front."""
        self._step += self._run_steps
        seconds = self._iteration_s * self._run_steps
        self.busy_s += seconds
        self.tokens_s[self._batch_tokens] += seconds
        self.decode_request_s += seconds * len(self._decodes)
        done, self._batch_prompts = self._batch_prompts, []
        for task in done:
            follower = self._followers.pop(task.request, None)
            if follower is not None:
                insort(self._fronts, follower, key=_arrival)
        while self._ending_steps and self._ending_steps[0] <= self._step:
            step = heappop(self._ending_steps)
            ended = [task for task in self._ending.pop(step) if task.last_step == step]
            for task in ended:
                del self._decodes[task]
            done += ended
        return done

    def start(self, now: float) -> float | None:
        """Select a batch and run it: when the run ends; None where nothing can run."""
        if self._queue:
            self._select_batch()
        self._run_is_cut = False
        if self._batch_prompts:
            self._run_steps = 1
        elif self._decodes:
            self._run_steps = self._first_ending() - self._step
        else:
            self._batch_tokens = 0
            return None
        decodes = len(self._decodes)
        self._batch_tokens = decodes + sum(task.tokens for task in self._batch_prompts)
        self._iteration_s = self._times.iteration_s(self._batch_tokens - decodes, decodes)
        self._run_ends = now + self._iteration_s * self._run_steps
        return self._run_ends

    def _cut_run(self, now: float) -> float | None:
        """End a run of decodes at the next iteration boundary: when that is."""
        if self._run_is_cut or self._batch_prompts:
            return None
        self._run_is_cut = True
        planned_s = self._iteration_s * self._run_steps
        elapsed_s = now - (self._run_ends - planned_s)
        self._run_steps = min(int(elapsed_s // self._iteration_s) + 1, self._run_steps)
        self._run_ends = now + (self._iteration_s * self._run_steps - elapsed_s)
        return self._run_ends

    def _first_ending(self) -> int:
        """The step that makes the last token of the first decode to end."""
        while True:
            step = self._ending_steps[0]
            if any(task.last_step == step for task in self._ending[step]):
                return step
            heappop(self._ending_steps)
            del self._ending[step]

    def _select_batch(self) -> None:
        """Put the next batch together, preempt what falls out, and count who was passed over."""
        selection = _Selection(self._kv_used, self._limits)
        self._select_overdue(selection)
        self._select_prompts(selection)
        for task in self._preempted:
            if selection.is_full_for(task):
                break
            if task not in selection.joining:
                selection.try_add(task, self._kv_capacity)
        room = min(self._limits.requests - len(selection.joining), self._limits.tokens - selection.tokens)
        selection.kept = max(min(len(self._decodes), room), 0)
        selection.tokens += selection.kept
        # Where decodes drop out there is no place for anything else either.
        if selection.kept == len(self._decodes):
            self._select_others(selection)
        else:
            for task in list(self._decodes)[selection.kept :]:
                self._preempt(task)
        self._kv_used = selection.kv_used
        for task in selection.joining:
            self._admit(task)
        for task in self._fronts:
            task.preemptions += 1

    def _select_overdue(self, selection: _Selection) -> None:
        """Tasks that were passed over too often, as far as the head of the queue has them."""
        for task in self._queue:
            if task.preemptions < self._limits.preemptions or selection.is_full_for(task):
                break
            selection.try_add(task, self._kv_capacity)

    def _select_prompts(self, selection: _Selection) -> None:
        for task in self._prompts:
            if selection.is_full_for(task):
                break
            if task not in selection.joining and not selection.try_add(task, self._kv_capacity):
                break

    def _select_others(self, selection: _Selection) -> None:
        """Select decodes that came from elsewhere or follow a prefill that is done."""
        for task in self._fronts:
            if task in selection.joining:
                continue
            if selection.is_full_for(task) or not selection.try_add(task, self._kv_capacity):
                break

    def _preempt(self, task: MachineTask) -> None:
        """Put a running decode back, with its memory."""
        del self._decodes[task]
        task.steps = task.last_step - self._step
        task.last_step = -1
        task.preempted = True
        self._preempted.append(task)
        insort(self._queue, task, key=_urgency)
        insort(self._fronts, task, key=_arrival)

    def _admit(self, task: MachineTask) -> None:
        """Let a waiting task run."""
        self._queue.remove(task)
        self._fronts.remove(task)
        if task.is_prompt:
            self._prompts.remove(task)
            self._batch_prompts.append(task)
            return
        if task.preempted:
            self._preempted.remove(task)
            task.preempted = False
        self._decodes[task] = None
        task.last_step = self._step + task.steps
        ending = self._ending.get(task.last_step)
        if ending is None:
            self._ending[task.last_step] = [task]
            heappush(self._ending_steps, task.last_step)
        else:
            ending.append(task)
