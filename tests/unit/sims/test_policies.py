"""Policies that do not look at loads: even shares, phases kept, and nothing that is excluded."""

from collections import Counter

import numpy as np
import pytest

from p2pserve.coordinator import (
    NoRoute,
    Pairing,
    Phase,
    Plan,
    PolicyError,
    Replica,
    Route,
    Router,
    RoutingSettings,
    Stage,
)
from p2pserve.coordinator.routing.policies import NETWORK_POLICIES
from p2pserve.sims.policies import PLAN, POLICIES, RANDOM, ROUND_ROBIN, SHARES

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


def test_simulations_know_the_networks_policies_and_the_default_is_the_plans() -> None:
    assert POLICIES.items() >= NETWORK_POLICIES.items()
    assert RoutingSettings().policy == PLAN
    assert PLAN in NETWORK_POLICIES


def test_a_policy_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(PolicyError, match=r"routing\.policy is 'nearest', none of plan, "):
        Router(THE_PLAN, RoutingSettings(policy="nearest"))
    with pytest.raises(PolicyError, match=r"none of plan, .*shares, random, round-robin"):
        Router(THE_PLAN, RoutingSettings(policy="nearest"), policies=POLICIES)
