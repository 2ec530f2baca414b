"""Policies that do not look at loads: even shares, phases kept, and nothing that is excluded."""

from collections import Counter
from math import exp

import numpy as np
import pytest

from p2pserve.coordinator import (
    NoRoute,
    Pairing,
    Phase,
    PhaseCost,
    Plan,
    PolicyError,
    Replica,
    Route,
    Router,
    RoutingSettings,
    Stage,
)
from p2pserve.coordinator.demand_meter import azure_lengths
from p2pserve.coordinator.profile import ReplicaProfile
from p2pserve.coordinator.routing.policies import NETWORK_POLICIES
from p2pserve.sdk.options import shared
from p2pserve.sims.policies import (
    LEAST_TOKENS,
    MEMORY,
    PLAN,
    POLICIES,
    RANDOM,
    ROUND_ROBIN,
    SHARES,
    SINGLE,
    WEIGHTED_ROUND_ROBIN,
)

PHASES = {"p": Phase.PREFILL, "q": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE, "m": Phase.MIXED}
THE_PLAN = Plan(
    epoch=1,
    version=1,
    service="s",
    codec="kv4",
    why=(),
    replicas=tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=f"box-{name}", tp=1, first_layer=0, last_layer=4),))
        for name, phase in PHASES.items()
    ),
    pairings=tuple(
        Pairing(prefill=a, decode=b, weight=weight)
        for a, b, weight in (("p", "d", 0.5), ("q", "e", 0.3), ("m", "m", 0.2))
    ),
)
EVEN = [RANDOM, ROUND_ROBIN]


def routes(policy: str, count: int, exclude: frozenset[str] = frozenset()) -> list[Route]:
    router = Router(THE_PLAN, RoutingSettings(policy=policy), policies=POLICIES, rng=np.random.default_rng(2))
    router.loads.note("p", 99, 9999, 0)  # of no interest to them
    return [router.route(7, exclude) for _ in range(count)]


@pytest.mark.parametrize("policy", EVEN)
def test_every_replica_has_an_even_share_of_its_side(policy: str) -> None:
    found = routes(policy, 900)
    prefill = Counter(route.prefill or route.decode for route in found)
    assert prefill.keys() == {"p", "q", "m"}
    assert all(250 <= count <= 350 for count in prefill.values())
    decode = Counter(route.decode for route in found)
    assert decode.keys() == {"d", "e", "m"}
    assert decode["d"] == pytest.approx(decode["e"], abs=60)
    assert all(route.split == (7 if route.prefill else 0) for route in found)


@pytest.mark.parametrize("policy", EVEN)
def test_boxes_and_replicas_can_be_excluded(policy: str) -> None:
    ends = {end for route in routes(policy, 100, frozenset({"box-p", "m"})) for end in (route.prefill, route.decode)}
    assert ends == {"q", "d", "e"}
    alone = routes(policy, 20, frozenset({"p", "q", "m"}))
    assert {(route.prefill, route.decode) for route in alone} == {(None, "d"), (None, "e")}
    with pytest.raises(NoRoute, match="no replica is left that decodes"):
        routes(policy, 1, frozenset({"d", "e", "m"}))


def test_a_seed_decides_what_random_is() -> None:
    assert routes(RANDOM, 50) == routes(RANDOM, 50)


def test_shares_are_those_of_the_plan_whatever_the_queues() -> None:
    found = routes(SHARES, 100)
    pairs = Counter((route.prefill or route.decode, route.decode) for route in found)
    assert pairs == {("p", "d"): 50, ("q", "e"): 30, ("m", "m"): 20}
    left = routes(SHARES, 50, frozenset({"p"}))
    assert Counter(route.prefill for route in left) == {"q": 30, None: 20}
    assert routes(SHARES, 1, frozenset({"p", "q", "m"})) == [Route(prefill=None, decode="d")]


@pytest.mark.parametrize("policy", [*EVEN, WEIGHTED_ROUND_ROBIN, SINGLE, MEMORY, LEAST_TOKENS])
def test_boxes_that_are_excluded_get_nothing(policy: str) -> None:
    ends = {end for route in routes(policy, 50, frozenset({"box-p", "m"})) for end in (route.prefill, route.decode)}
    assert ends <= {"q", "d", "e"}
    with pytest.raises(NoRoute):
        routes(policy, 1, frozenset({"p", "q", "d", "e", "m"}))


def mixed_plan(**gpus: int) -> Plan:
    """Replicas that do both, of so many GPUs."""
    replicas = tuple(
        Replica(id=name, phase=Phase.MIXED, stages=(Stage(peer=name, tp=tp, first_layer=0, last_layer=4),))
        for name, tp in gpus.items()
    )
    pairings = tuple(Pairing(prefill=name, decode=name, weight=1 / len(gpus)) for name in gpus)
    return Plan(epoch=1, version=1, service="s", codec="kv4", why=(), replicas=replicas, pairings=pairings)


def test_in_turn_by_weights_follows_gpus_and_keeps_phases() -> None:
    router = Router(mixed_plan(four=4, one=1), RoutingSettings(policy=WEIGHTED_ROUND_ROBIN), policies=POLICIES)
    found = [router.route(7).decode for _ in range(50)]
    assert Counter(found) == {"four": 40, "one": 10}
    assert Counter(found[:5]) == {"four": 4, "one": 1}  # not one after the other
    sides = routes(WEIGHTED_ROUND_ROBIN, 90)
    assert Counter(route.prefill or route.decode for route in sides) == {"p": 30, "q": 30, "m": 30}


def test_one_alone_gets_all_while_it_may_be_used() -> None:
    router = Router(mixed_plan(big=4, small=1), RoutingSettings(policy=SINGLE), policies=POLICIES)
    assert {router.route(7).decode for _ in range(9)} == {"big"}
    assert router.route(7, frozenset({"big"})).decode == "small"
    assert set(routes(SINGLE, 9)) == {Route(prefill="p", decode="d", split=7)}


def unequal_router(policy: str) -> Router:
    """The replica with more memory is slower by far."""
    router = Router(mixed_plan(big=4, small=1), RoutingSettings(policy=policy), policies=POLICIES)
    fast, slow = PhaseCost(token_s=1e-6, step_s=1e-5), PhaseCost(token_s=1e-3, step_s=1e-2)
    router.loads.profiles = [
        ReplicaProfile(prefill=slow, decode=slow, kv_tokens=40_000),
        ReplicaProfile(prefill=fast, decode=fast, kv_tokens=10_000),
    ]
    return router


def test_by_memory_alone_requests_follow_the_kv_that_is_spoken_for() -> None:
    router, expected = unequal_router(MEMORY), Counter[str]()
    tokens = 700 + float(azure_lengths("conversation")[1].mean())
    loads, room = {"big": 0.0, "small": 0.0}, {"big": 40_000, "small": 10_000}
    for number in range(60):
        after = {name: loads[name] + exp(2.0 * expected[name] * tokens / room[name]) for name in loads}
        chosen = min(after, key=lambda name: after[name])
        loads[chosen], expected[chosen] = after[chosen], expected[chosen] + 1
        assert router.route(700, request=number).decode == chosen
    assert expected["big"] > 2 * expected["small"]


def test_fewest_tokens_looks_neither_at_speed_nor_at_memory() -> None:
    router = unequal_router(LEAST_TOKENS)
    found = Counter(router.route(700, request=number).decode for number in range(40))
    assert found == {"big": 20, "small": 20}
    assert router.route(2000, request="long").decode == "big"
    assert [router.route(700, request=f"after {number}").decode for number in range(2)] == ["small", "small"]


def test_the_command_line_offers_what_there_is() -> None:
    assert set(shared.NETWORK_POLICIES) == set(NETWORK_POLICIES)
    assert set(shared.SIMULATED_POLICIES) == set(POLICIES)


def test_simulations_know_the_networks_policies_and_its_default() -> None:
    assert POLICIES.items() >= NETWORK_POLICIES.items()
    assert RoutingSettings().policy in NETWORK_POLICIES
    assert PLAN in NETWORK_POLICIES


KNOWN = "predicted, plan, hetero, splitwise, cronus, round-robin, least-tokens"


def test_a_policy_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(PolicyError, match=f"routing.policy is 'nearest', none of {KNOWN}$"):
        Router(THE_PLAN, RoutingSettings(policy="nearest"))
    with pytest.raises(PolicyError, match=f"none of {KNOWN}, shares, random, weighted-round-robin, "):
        Router(THE_PLAN, RoutingSettings(policy="nearest"), policies=POLICIES)
