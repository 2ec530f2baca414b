"""Dispatch at random and in turn: even shares, phases kept, and nothing that is excluded."""

from collections import Counter

import numpy as np
import pytest

from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.router import NoRoute, Route, Router
from p2pserve.sims.policies.dispatch import Dispatch, dispatcher

PHASES = {"p": Phase.PREFILL, "q": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE, "m": Phase.MIXED}
PLAN = Plan(
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
BLIND = [Dispatch.RANDOM, Dispatch.IN_TURN]


def routes(kind: Dispatch, count: int, exclude: frozenset[str] = frozenset()) -> list[Route]:
    chosen = dispatcher(PLAN, kind, np.random.default_rng(2))
    chosen.note("p", 99, 9999, 0)  # of no interest to them
    return [chosen.route(7, exclude) for _ in range(count)]


@pytest.mark.parametrize("kind", BLIND)
def test_every_replica_has_an_even_share_of_its_side(kind: Dispatch) -> None:
    found = routes(kind, 900)
    readers = Counter(route.prefill or route.decode for route in found)
    assert readers.keys() == {"p", "q", "m"}
    assert all(250 <= count <= 350 for count in readers.values())
    writers = Counter(route.decode for route in found)
    assert writers.keys() == {"d", "e", "m"}
    assert writers["d"] == pytest.approx(writers["e"], abs=60)
    assert all(route.split == (7 if route.prefill else 0) for route in found)


@pytest.mark.parametrize("kind", BLIND)
def test_boxes_and_replicas_can_be_excluded(kind: Dispatch) -> None:
    ends = {end for route in routes(kind, 100, frozenset({"box-p", "m"})) for end in (route.prefill, route.decode)}
    assert ends == {"q", "d", "e"}
    alone = routes(kind, 20, frozenset({"p", "q", "m"}))
    assert {(route.prefill, route.decode) for route in alone} == {(None, "d"), (None, "e")}
    with pytest.raises(NoRoute, match="no replica is left that decodes"):
        routes(kind, 1, frozenset({"d", "e", "m"}))


def test_a_seed_decides_what_random_is() -> None:
    assert routes(Dispatch.RANDOM, 50) == routes(Dispatch.RANDOM, 50)


def test_shares_are_those_of_the_plan_whatever_the_queues() -> None:
    found = routes(Dispatch.SHARES, 100)
    pairs = Counter((route.prefill or route.decode, route.decode) for route in found)
    assert pairs == {("p", "d"): 50, ("q", "e"): 30, ("m", "m"): 20}
    left = routes(Dispatch.SHARES, 50, frozenset({"p"}))
    assert Counter(route.prefill for route in left) == {"q": 30, None: 20}


def test_the_plans_way_is_the_router() -> None:
    assert isinstance(dispatcher(PLAN, Dispatch.PLAN, np.random.default_rng(0)), Router)
