"""What a decision costs the gateway of a large network: the processor's time, and what is remembered."""

import gc
import time
import tracemalloc
from collections.abc import Callable
from math import inf

import msgspec
import pytest

from p2pserve.coordinator.dev.route_cases import REPLICAS, make_plan, make_router
from p2pserve.coordinator.plan import Pairing, Plan
from p2pserve.coordinator.routing.router import Router

MOST = 50.0
"""Times as long as Python takes to look at a hundred replicas: 200 us where that takes 4."""
ROUNDS, DECISIONS = 30, 40
IN_FLIGHT = 10
POLICIES = ("plan", "predicted")
"""What gateways follow by default, and what that falls back on."""


def decide(router: Router, count: int, first: int = 0) -> None:
    """Route so many requests; each has ended when ten more have come."""
    for number in range(first, first + count):
        router.route(256 + number % 4096, request=number, now=0.05 * number)
        router.end_request(number - IN_FLIGHT, 64 + number % 512)


def plan_of(replicas: int) -> Plan:
    """Of replicas that do both."""
    plan = make_plan(is_split=False)
    few = plan.replicas[:replicas]
    pairings = tuple(Pairing(prefill=each.id, decode=each.id, weight=1.0 / replicas) for each in few)
    return msgspec.structs.replace(plan, replicas=few, pairings=pairings)


def remembered_bytes(policy: str, plan: Plan, requests: int) -> int:
    """By a router and what it has learned of so many requests; not by the plan itself."""
    decide(make_router(policy, plan), 2 * IN_FLIGHT)  # what is read once for all routers
    gc.collect()
    tracemalloc.start()
    try:
        router = make_router(policy, plan)
        decide(router, requests)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def look_at_all(loads: dict[str, list[float]]) -> str:
    """The replica with the least of some figures, as a policy would choose that knows nothing else."""
    best, least = "", inf
    for replica, (requests, tokens, rate) in loads.items():
        score = requests + tokens / rate if rate > 0.0 else inf
        if score < least:
            best, least = replica, score
    return best


def processor_s(work: Callable[[], object]) -> float:
    """Of one decision, when so many are made one after the other."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / DECISIONS


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_among_a_hundred_replicas_takes_not_much_longer_than_to_look_at_them(policy: str) -> None:
    """The fastest of some rounds of each, in turn: others may want this processor too."""
    router = make_router(policy, make_plan(is_split=False))
    assert len(router.loads.ids) == REPLICAS == 100
    loads = {name: [float(number % 7), 100.0 * number, 5000.0] for number, name in enumerate(router.loads.ids)}
    deciding, looking = [], []
    for number in range(ROUNDS):
        deciding.append(processor_s(lambda first=number * DECISIONS: decide(router, DECISIONS, first)))  # type: ignore[misc]
        looking.append(processor_s(lambda: [look_at_all(loads) for _ in range(DECISIONS)]))
    assert min(deciding) <= MOST * min(looking)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_remembered_does_not_grow_with_requests_and_in_proportion_to_replicas(policy: str) -> None:
    plan = plan_of(REPLICAS)
    few, many = (remembered_bytes(policy, plan, requests) for requests in (1000, 4000))
    assert many <= 1.02 * few
    sizes = [remembered_bytes(policy, plan_of(replicas), 1000) for replicas in (25, 50, 100)]
    assert 0 < sizes[2] - sizes[1] <= 2.2 * (sizes[1] - sizes[0])
