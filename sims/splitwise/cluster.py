"""A cluster of Splitwise machines in virtual time: what passes between them, as events of an
`EventQueue`.

The policies are `sims.policies.pools`, and what a machine does is in `machine.py`. A KV cache moves
when its prompt is done, at a rate that it shares with no other; where the other side has no memory
for it, it tries again every second.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Protocol

import numpy as np

from ...coordinator.routing.interface import ReplicaLoads, RequestFacts, RoutingPolicy
from ..events import EventQueue, Scheduled
from ..records import Trace
from .machine import Machine, MachineTask

RETRY_S = 1.0


class RunStopped(Exception):
    """A run has been ended before its last event."""


class RunWatch(Protocol):
    """Is told how requests fare while a run goes on. Seconds are counted from their arrival."""

    def note_first_token(self, request: int, ttft_s: float) -> None:
        """A request has its first token. Raises RunStopped."""
        ...

    def note_last_token(self, request: int, ttft_s: float, e2e_s: float) -> None:
        """A request has its last token. Raises RunStopped."""
        ...


class SplitwiseCluster:
    """Machines for one trace. `kv_token_s`: to move the KV of one token; `kv_tokens`: what the
    policy may reserve on each, where that is not all that it has memory for. `watch` is told of
    every first and last token, and may end the run by raising `RunStopped`."""

    def __init__(
        self,
        trace: Trace,
        machines: Sequence[Machine],
        policy: RoutingPolicy,
        *,
        kv_token_s: float,
        kv_tokens: float | None = None,
        watch: RunWatch | None = None,
    ) -> None:
        # Plain lists: an element of an array costs three times as much to read.
        self.arrival: list[float] = trace.arrival_s.tolist()
        self.prompt: list[int] = trace.prompt.tolist()
        self.output: list[int] = trace.output.tolist()
        self.first_token = [nan] * len(trace)
        self.last_token = [nan] * len(trace)
        self.kv_token_s = kv_token_s
        self.policy = policy
        self._watch = watch
        self.boxes = [
            _Box(self, number, machine, machine.kv_capacity if kv_tokens is None else kv_tokens)
            for number, machine in enumerate(machines)
        ]
        self.decodes_on = [0] * len(trace)
        self.overtaken = 0  # events of runs that were cut short: they are passed over
        self.retrying = 0  # KV caches that wait for memory
        self.ended_at = 0.0
        self._loads = ReplicaLoads(str(number) for number in range(len(machines)))
        self._rng = np.random.default_rng(0)  # no policy of Splitwise draws lots
        self._queue = EventQueue()

    def run(self) -> int:
        """Let everything happen; returns how many events that took."""
        self._queue.push(self.arrival[0], _TraceFeed(self))
        self._queue.run()
        return self._queue.happened - self.overtaken

    @property
    def is_stuck(self) -> bool:
        """Whether everything waits for memory, so that none will ever be released."""
        return self.retrying == len(self._queue)

    def place(self, request: int, now: float) -> list[Scheduled]:
        """Choose the request's machines, and give it to the first."""
        prompt, steps = self.prompt[request], self.output[request] - 1
        for each in self.boxes:
            each.tell(self._loads)
        facts = RequestFacts(prompt, output_tokens=steps + 1)
        route = self.policy.choose(facts, self._loads, now=now, rng=self._rng)
        decode = self.decodes_on[request] = int(route.decode)
        prefill = decode if route.prefill is None else int(route.prefill)
        box = self.boxes[prefill]
        box.prompt_tokens += prompt
        self.boxes[decode].decodes += 1
        self.boxes[decode].kv_reserved += prompt + steps + 1
        if prefill != decode:
            box.kv_reserved += prompt + 1
        due = box.watch(box.machine.arrive(MachineTask(request, now, prompt=prompt), now))
        if decode == prefill and steps:
            due += box.watch(box.machine.arrive(MachineTask(request, now, steps=steps), now, follows=True))
        return due

    def prompt_done(self, request: int, prefill: int, now: float) -> list[Scheduled]:
        """The first token is there; the KV cache moves if the rest is made elsewhere."""
        self.first_token[request] = now
        if self._watch is not None:
            self._watch.note_first_token(request, now - self.arrival[request])
        self.boxes[prefill].prompt_tokens -= self.prompt[request]
        decode = self.decodes_on[request]
        if self.output[request] == 1:
            self.boxes[prefill].machine.release(self.prompt[request] + 1)
            if decode != prefill:
                self.boxes[prefill].kv_reserved -= self.prompt[request] + 1
            self.request_done(request, now)
        elif decode != prefill:
            return _Transfer(self, request, self.boxes[prefill], self.boxes[decode]).happen(now)
        return []

    def request_done(self, request: int, now: float) -> None:
        """The last token is there."""
        decode = self.decodes_on[request]
        self.last_token[request] = now
        self.boxes[decode].decodes -= 1
        self.boxes[decode].kv_reserved -= self.prompt[request] + self.output[request]
        if self._watch is not None:
            arrival = self.arrival[request]
            self._watch.note_last_token(request, self.first_token[request] - arrival, now - arrival)


class _TraceFeed:
    """The next request of the trace."""

    def __init__(self, cluster: SplitwiseCluster) -> None:
        self._cluster = cluster
        self._next = 0

    def happen(self, now: float) -> list[Scheduled]:
        due = self._cluster.place(self._next, now)
        self._next += 1
        if self._next < len(self._cluster.arrival):
            due.append(Scheduled(self._cluster.arrival[self._next], self))
        return due


class _Box:
    """A machine, its number, and what was sent there: prompt tokens pending, requests decoding, KV
    tokens reserved. As an event, the end of its run."""

    def __init__(self, cluster: SplitwiseCluster, number: int, machine: Machine, kv_tokens: float) -> None:
        self._cluster = cluster
        self._kv_tokens = kv_tokens
        self.number = number
        self.machine = machine
        self.prompt_tokens = 0
        self.decodes = 0
        self.kv_reserved = 0
        self._told: tuple[int, int, int, bool] | None = None
        self._ends_at = nan

    def tell(self, loads: ReplicaLoads) -> None:
        """Bring the live state of this machine up to date."""
        now = (self.decodes, self.prompt_tokens, self.kv_reserved, self.machine.waits)
        if now != self._told:
            self._told = now
            free = self._kv_tokens - self.kv_reserved
            loads.note(str(self.number), self.decodes, self.prompt_tokens, free, waiting=int(self.machine.waits))

    def watch(self, ends_at: float | None) -> list[Scheduled]:
        """The end of a run that started or was cut just now, if one was."""
        if ends_at is None:
            return []
        self._ends_at = ends_at
        return [Scheduled(ends_at, self)]

    def happen(self, now: float) -> list[Scheduled]:
        cluster, machine = self._cluster, self.machine
        if now != self._ends_at:
            cluster.overtaken += 1
            return []
        cluster.ended_at = now
        self._ends_at = nan
        due: list[Scheduled] = []
        for task in machine.end_run():
            if task.is_prompt:
                due += cluster.prompt_done(task.request, self.number, now)
            else:
                machine.release(cluster.prompt[task.request] + cluster.output[task.request])
                cluster.request_done(task.request, now)
        due += self.watch(machine.start(now))
        if machine.is_drained:
            cluster.policy.on_drained(self.number)
        return due


class _Transfer:
    """A KV cache on its way, or waiting for memory to go to."""

    def __init__(self, cluster: SplitwiseCluster, request: int, source: _Box, target: _Box) -> None:
        self._cluster = cluster
        self._request = request
        self._source, self._target = source, target
        self._moves = False
        self._retries = False

    def happen(self, now: float) -> list[Scheduled]:
        cluster, request = self._cluster, self._request
        prompt = cluster.prompt[request]
        if self._moves:
            self._source.machine.release(prompt + 1)
            self._source.kv_reserved -= prompt + 1
            task = MachineTask(request, cluster.arrival[request], steps=cluster.output[request] - 1)
            due = self._target.watch(self._target.machine.arrive(task, now))
            return due + self._source.watch(self._source.machine.look_again(now))
        cluster.retrying -= self._retries
        self._moves = self._target.machine.reserve(prompt + 1)
        if self._moves:
            return [Scheduled(now + prompt * cluster.kv_token_s, self)]
        if self._retries and cluster.is_stuck:
            return []
        self._retries = True
        cluster.retrying += 1
        return [Scheduled(now + RETRY_S, self)]
