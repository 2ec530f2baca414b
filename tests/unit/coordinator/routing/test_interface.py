"""The contract between a router and its policies, and what it takes to add one."""

from __future__ import annotations

import numpy as np
import pytest

from p2pserve.coordinator import (
    Load,
    LoadError,
    NoRoute,
    Pairing,
    Phase,
    Plan,
    PolicyError,
    Replica,
    Route,
    Router,
    Stage,
)
from p2pserve.coordinator.routing.interface import ReplicaLoads, RequestFacts, RoutingPolicy, RoutingSettings
from p2pserve.coordinator.routing.policies import NETWORK_POLICIES

PLAN = Plan(
    epoch=1,
    version=1,
    service="s",
    codec="kv4",
    why=(),
    replicas=tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=4),))
        for name, phase in (("p", Phase.PREFILL), ("d", Phase.DECODE), ("e", Phase.DECODE))
    ),
    pairings=(Pairing(prefill="p", decode="d", weight=0.5), Pairing(prefill="p", decode="e", weight=0.5)),
)


class MostMemory(RoutingPolicy):
    """All of a policy that somebody might add: the decode replica with the most memory, by lot where nobody knows."""

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        self.plan, self.settings = plan, settings
        self.seen: list[tuple[RequestFacts, float]] = []

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        self.seen.append((request, now))
        names = [item.id for item in self.plan.in_phase(Phase.DECODE) if item.id not in request.excluded]
        if not names:
            raise NoRoute("nobody decodes")
        if all(loads.is_silent[loads.index[name]] for name in names):
            return Route.between("p", names[int(rng.integers(len(names)))], request.prompt_tokens)
        best = max(names, key=lambda name: float(loads.kv_free_tokens[loads.index[name]]))
        return Route.between("p", best, request.prompt_tokens)


def router(seed: int = 0) -> Router:
    policies = {**NETWORK_POLICIES, "most-memory": MostMemory}
    return Router(PLAN, RoutingSettings(policy="most-memory"), policies=policies, rng=np.random.default_rng(seed))


def load(replica: str, free: int) -> Load:
    return Load(replica=replica, outstanding=0, prefill_tokens=0, kv_free_tokens=free)


def test_a_policy_is_a_class_and_an_entry() -> None:
    found = router()
    found.report([load("d", 10), load("e", 20), load("nobody", 99)])
    assert found.route(7) == Route(prefill="p", decode="e", split=7)
    found.report([load("d", 10), load("e", 5)])
    assert found.route(7).decode == "d"
    assert found.route(7, frozenset({"d"})).decode == "e"
    with pytest.raises(NoRoute, match="nobody decodes"):
        found.route(7, frozenset({"d", "e"}))


def test_a_policy_is_told_the_request_the_moment_and_the_settings() -> None:
    made: list[MostMemory] = []

    def make(plan: Plan, settings: RoutingSettings) -> MostMemory:
        made.append(MostMemory(plan, settings))
        return made[-1]

    settings = RoutingSettings(policy="mine", free_share=3.0)
    found = Router(PLAN, settings, policies={"mine": make})
    found.route(7, frozenset({"d"}), now=12.5)
    assert made[0].seen == [(RequestFacts(7, frozenset({"d"}), None), 12.5)]
    assert made[0].settings is settings
    assert made[0].plan is found.plan is PLAN


def test_lots_are_drawn_from_the_routers_randomness_alone() -> None:
    def drawn(seed: int) -> list[str]:
        found = router(seed)
        return [found.route(1).decode for _ in range(20)]

    assert drawn(1) == drawn(1)
    assert set(drawn(1)) == {"d", "e"}
    assert drawn(1) != drawn(2)


def test_the_live_state_has_the_latest_of_each_replica_and_no_more() -> None:
    loads = ReplicaLoads(["a", "b"])
    assert loads.is_silent.tolist() == [True, True]
    assert np.isinf(loads.kv_free_tokens).all()
    loads.note("b", 3, 400, 50, waiting=2)
    assert loads.is_silent.tolist() == [True, False]
    figures = (loads.outstanding, loads.prefill_tokens, loads.kv_free_tokens, loads.waiting)
    assert [column[1] for column in figures] == [3, 400, 50, 2]
    loads.note("b", 1, 0, 60)
    assert [column[1] for column in figures] == [1, 0, 60, 0]
    loads.forget()
    assert loads.is_silent.all()
    assert np.isinf(loads.kv_free_tokens).all()
    with pytest.raises(KeyError):
        loads.note("c", 0, 0, 0)


def test_a_report_replaces_all_earlier_ones() -> None:
    found = router()
    found.report([load("d", 10), load("e", 20)])
    found.report([load("d", 10)])
    assert found.loads.is_silent.tolist() == [True, False, True]


def test_one_replica_for_both_sides_splits_nothing() -> None:
    assert Route.between("m", "m", 5) == Route(prefill=None, decode="m", split=0)
    assert Route.between("p", "d", 5) == Route(prefill="p", decode="d", split=5)


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(PolicyError, match="remembered_requests is 0"):
        RoutingSettings(remembered_requests=0)
    with pytest.raises(PolicyError, match=r"free_share is 0\.5"):
        RoutingSettings(free_share=0.5)
    with pytest.raises(PolicyError, match="free_share is nan"):
        RoutingSettings(free_share=float("nan"))
    assert RoutingSettings(free_share=1.0, remembered_requests=1).policy == "predicted"


def test_most_policies_have_no_use_for_a_replica_that_has_drained() -> None:
    router().loads.note("d", 0, 0, 0)
    assert MostMemory(PLAN, RoutingSettings()).on_drained(0) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(("free_share", "thin"), [(1.0, 0.02), (5.0, 0.10)])
def test_a_higher_free_share_lets_thin_links_have_more(free_share: float, thin: float) -> None:
    shares = {("p", "d"): 0.98, ("p", "e"): 0.02}
    plan = Plan(
        epoch=1, version=1, service="s", codec="kv4", why=(), replicas=PLAN.replicas,
        pairings=tuple(Pairing(prefill=a, decode=b, weight=weight) for (a, b), weight in shares.items()),
    )  # fmt: skip
    found = Router(plan, RoutingSettings(free_share=free_share))
    found.report(
        [Load(replica="d", outstanding=400, prefill_tokens=0, kv_free_tokens=10**6), load("p", 10**6), load("e", 10**6)]
    )
    sent = [found.route(100).decode for _ in range(1000)].count("e") / 1000
    assert sent == pytest.approx(thin, abs=0.05)


@pytest.mark.parametrize("figures", [(-1, 0, 9), (0, -1, 9), (9, 0, -1)])
def test_a_figure_that_cannot_be_is_refused_whatever_the_others_are(figures: tuple[int, int, int]) -> None:
    outstanding, prefill_tokens, kv_free_tokens = figures
    with pytest.raises(LoadError, match="load of p has a negative figure"):
        Load(replica="p", outstanding=outstanding, prefill_tokens=prefill_tokens, kv_free_tokens=kv_free_tokens)
    assert Load(replica="p", outstanding=0, prefill_tokens=0, kv_free_tokens=0).replica == "p"
