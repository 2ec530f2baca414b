"""The Splitwise machine against a second one that is as plain as its rules, and what both do when memory runs out."""

from bisect import insort
from collections.abc import Callable, Sequence
from random import Random
from typing import cast

import numpy as np
import pytest

from p2pserve.coordinator.routing.interface import RoutingPolicy
from p2pserve.sims.policies.pools import SharedPool, SplitPools
from p2pserve.sims.records import Trace
from p2pserve.sims.splitwise.cluster import SplitwiseCluster
from p2pserve.sims.splitwise.machine import Machine, MachineLimits, MachineTask


class Times:
    """Made-up iteration times: a prompt's length counts, and how many decode."""

    def iteration_s(self, prompt_tokens: int, decodes: int) -> float:
        return 0.011 + 0.00023 * prompt_tokens + 0.00037 * decodes


class PlainMachine:
    """The rules, one by one, with nothing kept that can be counted: the specification of `Machine`."""

    def __init__(self, times: Times, kv_capacity: float, limits: MachineLimits) -> None:
        self.times, self.capacity, self.used, self.limits = times, kv_capacity, 0, limits
        self.pool: list[list[MachineTask]] = []  # the tasks of each request, by its arrival
        self.queue: list[MachineTask] = []  # what waits, by urgency as each came
        self.came: list[MachineTask] = []  # what waits, as each came
        self.batch: list[MachineTask] = []
        self.iteration_s, self.run_steps, self.run_ends, self.is_cut = 0.0, 0, 0.0, False

    @property
    def waits(self) -> bool:
        return bool(self.queue)

    @property
    def is_drained(self) -> bool:
        return not self.pool

    @property
    def batch_tokens(self) -> int:
        return sum(task.tokens for task in self.batch)

    def reserve(self, kv_tokens: int) -> bool:
        fits = self.used + kv_tokens <= self.capacity
        self.used += kv_tokens * fits
        return fits

    def release(self, kv_tokens: int) -> None:
        self.used -= kv_tokens

    def arrive(self, task: MachineTask, now: float, *, follows: bool = False) -> float | None:
        known = [tasks for tasks in self.pool if tasks[0].request == task.request]
        assert bool(known) is follows
        if known:
            known[0].append(task)
        else:
            insort(self.pool, [task], key=lambda tasks: tasks[0].arrival)
        self.wait(task)
        if not self.batch:
            return self.start(now) if self.used + task.kv_tokens <= self.capacity else None
        may_join = len(self.batch) < self.limits.requests and self.batch_tokens + task.tokens <= self.limits.tokens
        prompt_tokens = sum(running.tokens for running in self.batch if running.is_prompt)
        may_preempt = task.is_prompt and prompt_tokens + task.tokens <= self.limits.tokens
        return self.cut(now) if may_join or may_preempt else None

    def wait(self, task: MachineTask) -> None:
        insort(self.queue, task, key=lambda waiting: (waiting.preemptions, waiting.arrival))
        self.came.append(task)

    def look_again(self, now: float) -> float | None:
        if not self.queue:
            return None
        if not self.batch:
            return self.start(now) if self.used + self.queue[0].kv_tokens <= self.capacity else None
        return (
            self.cut(now) if len(self.batch) < self.limits.requests and self.batch_tokens < self.limits.tokens else None
        )

    def end_run(self) -> list[MachineTask]:
        for task in self.batch:
            task.steps -= 0 if task.is_prompt else self.run_steps
        done = [task for task in self.batch if task.is_prompt or not task.steps]
        self.batch = [task for task in self.batch if task not in done]
        for task in done:
            for tasks in self.pool:
                if task in tasks:
                    tasks.remove(task)
        self.pool = [tasks for tasks in self.pool if tasks]
        return done

    def start(self, now: float) -> float | None:
        selected = self.select()
        for task in self.batch:
            if task not in selected:
                task.preempted = True
                self.wait(task)
        for task in [task for task in selected if task not in self.batch]:
            self.queue.remove(task)
            self.came.remove(task)
            self.used += 0 if task.preempted else task.kv_tokens
            task.preempted = False
        self.batch = [task for task in self.batch if task in selected] + [
            task for task in selected if task not in self.batch
        ]
        for tasks in self.pool:
            tasks[0].preemptions += tasks[0] not in self.batch
        self.is_cut = False
        if not self.batch:
            return None
        prompts = [task for task in self.batch if task.is_prompt]
        self.run_steps = 1 if prompts else min(task.steps for task in self.batch)
        self.iteration_s = self.times.iteration_s(sum(task.tokens for task in prompts), len(self.batch) - len(prompts))
        self.run_ends = now + self.iteration_s * self.run_steps
        return self.run_ends

    def cut(self, now: float) -> float | None:
        if self.is_cut or any(task.is_prompt for task in self.batch):
            return None
        self.is_cut = True
        elapsed = now - (self.run_ends - self.iteration_s * self.run_steps)
        self.run_steps = min(int(elapsed // self.iteration_s) + 1, self.run_steps)
        self.run_ends = now + (self.iteration_s * self.run_steps - elapsed)
        return self.run_ends

    def select(self) -> list[MachineTask]:
        selected: list[MachineTask] = []
        used = self.used

        def is_full(task: MachineTask) -> bool:
            tokens = sum(chosen.tokens for chosen in selected)
            return len(selected) == self.limits.requests or (
                bool(selected) and tokens + task.tokens > self.limits.tokens
            )

        def add(task: MachineTask) -> bool:
            nonlocal used
            keeps_memory = task.preempted or task in self.batch
            fits = keeps_memory or used + task.kv_tokens <= self.capacity
            if fits:
                used += 0 if keeps_memory else task.kv_tokens
                selected.append(task)
            return fits

        for task in self.queue:
            if task.preemptions < self.limits.preemptions or is_full(task):
                break
            add(task)
        for task in [task for task in self.came if task.is_prompt]:
            if is_full(task) or (task not in selected and not add(task)):
                break
        for task in [task for task in self.came if task.preempted]:
            if is_full(task):
                break
            if task not in selected:
                add(task)
        for task in self.batch:
            if is_full(task):
                break
            add(task)
        for tasks in self.pool:
            if tasks[0] not in selected and (is_full(tasks[0]) or not add(tasks[0])):
                break
        return selected


def a_trace(random: Random, *, requests: int, rate: float, prompt: int, output: int) -> Trace:
    """Poisson arrivals; lengths from 1 to the given ones, mostly short."""
    arrivals = np.cumsum([random.expovariate(rate) for _ in range(requests)])
    return trace_of(
        arrivals.tolist(),
        [1 + int(prompt * random.random() ** 2) for _ in range(requests)],
        [1 + int(output * random.random() ** 2) for _ in range(requests)],
    )


def trace_of(arrivals: Sequence[float], prompts: Sequence[int], outputs: Sequence[int]) -> Trace:
    return Trace(
        ids=np.arange(len(arrivals)),
        arrival_s=np.array(arrivals, np.float64),
        prompt=np.array(prompts, np.int64),
        output=np.array(outputs, np.int64),
        lengths="test",
        arrivals="test",
    )


def shared(machines: int) -> RoutingPolicy:
    return SharedPool()


def split(machines: int) -> RoutingPolicy:
    half = machines // 2
    return SplitPools(range(half), range(half, machines), max_pending=4000)


FEW = MachineLimits(requests=12)  # as released it takes 512, which is long to simulate plainly


@pytest.mark.parametrize(
    ("seed", "limits"), [(0, FEW), (1, FEW), (2, MachineLimits(requests=12, tokens=900, preemptions=1))]
)
@pytest.mark.parametrize("pools", [shared, split])
@pytest.mark.parametrize(
    ("rate", "prompt", "output", "kv_tokens"),
    [
        pytest.param(12.0, 2600, 120, 1e9, id="prompts that preempt everything"),
        pytest.param(25.0, 1800, 150, 4000.0, id="little memory"),
        pytest.param(30.0, 900, 200, 1500.0, id="hardly any memory"),
        pytest.param(60.0, 40, 200, 1e9, id="more requests than a batch holds"),
    ],
)
def test_it_does_what_the_plain_one_does(
    limits: MachineLimits,
    rate: float,
    prompt: int,
    output: int,
    kv_tokens: float,
    pools: Callable[[int], RoutingPolicy],
    seed: int,
) -> None:
    trace = a_trace(Random(seed), requests=100, rate=rate, prompt=prompt, output=output)
    runs = []
    for kind in (Machine, PlainMachine):
        boxes = cast(list[Machine], [kind(Times(), kv_tokens, limits) for _ in range(2)])
        cluster = SplitwiseCluster(trace, boxes, pools(2), kv_tokens=kv_tokens, kv_token_s=1e-5)
        events = cluster.run()
        runs.append((events, cluster.ended_at, cluster.first_token, cluster.last_token))
    np.testing.assert_equal(runs[0], runs[1])


def run_alone(
    trace: Trace, policy: RoutingPolicy, machines: int, kv_tokens: float, *, reserve_up_to: float = 1e9
) -> SplitwiseCluster:
    boxes = [Machine(Times(), kv_tokens) for _ in range(machines)]
    cluster = SplitwiseCluster(trace, boxes, policy, kv_tokens=reserve_up_to, kv_token_s=1e-5)
    cluster.run()
    return cluster


@pytest.mark.parametrize(("pools", "machines"), [(shared, 1), (split, 2)])
def test_an_output_of_one_token_is_done_with_its_prompt(pools: Callable[[int], RoutingPolicy], machines: int) -> None:
    cluster = run_alone(trace_of([0.5, 0.6], [100, 50], [1, 3]), pools(machines), machines, 1e6)
    assert cluster.last_token[0] == cluster.first_token[0] == 0.5 + Times().iteration_s(100, 0)
    assert cluster.last_token[1] > cluster.first_token[1]
    assert all(box.machine.is_drained and "0 KV tokens" in repr(box.machine) for box in cluster.boxes)


def test_a_cache_that_finds_no_memory_waits_a_second() -> None:
    # The first request decodes in nearly all of the memory until it is done; the second's cache does not fit beside it.
    # Neither does its prompt beside the first's, which waits until that has moved.
    cluster = run_alone(trace_of([0.0, 0.0], [60, 60], [40, 2]), split(2), 2, 105.0)
    once = Times().iteration_s(60, 0)
    assert cluster.first_token == pytest.approx([once, once + 60 * 1e-5 + once])
    first, second = (last - first for first, last in zip(cluster.first_token, cluster.last_token, strict=True))
    assert first < 1.0 < second < 1.1


def test_a_cluster_that_is_stuck_ends() -> None:
    # The cache of the first fits beside nothing: neither its own decoding nor another's cache.
    cluster = run_alone(trace_of([0.0, 0.1], [60, 60], [50, 50]), split(2), 2, 100.0)
    assert not np.isnan(cluster.first_token).any()
    assert np.isnan(cluster.last_token).all()


def test_a_prompt_that_no_machine_can_hold_blocks_those_behind_it() -> None:
    cluster = run_alone(trace_of([0.0, 0.1], [500, 10], [5, 5]), shared(1), 1, 100.0)
    assert np.isnan(cluster.first_token).all()
