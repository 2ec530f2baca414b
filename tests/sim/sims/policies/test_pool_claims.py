"""Replicas that gateways ask for a place, in whole simulations with one and four gateways: limits of Splitwise's pools
hold at the replica, a refusal costs a round trip, and nothing is lost with boxes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase, Plan
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.coordinator.routing.pools import PoolClaim, PoolClaims, PoolLimits, PoolState, Work
from p2pserve.sims.engine.values import SimEngineSettings
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import SimResult
from p2pserve.sims.scenario import BoxLost, Change, PlanChange, ReplicaModel, SimSettings
from p2pserve.sims.world import simulate

from ....linear_times import LinearTimes
from ..test_world import cluster_of, plan_of, run_of, trace_of

FAST = 1e9  # bits per second: a token's KV takes 5 us
RTT_S = 0.05
LIMIT = 600
KV_TOKENS = 4096
POOLS = plan_of(
    {"p": Phase.PREFILL, "q": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE},
    {(one, two): 0.25 for one in "pq" for two in "de"},
)


class Told(NamedTuple):
    """One answer of a replica."""

    claim: PoolClaim
    present: PoolState
    accepted: bool
    state: PoolState


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """All answers of replicas."""
    found: list[Told] = []
    answer = PoolClaims.answer

    def noted(
        claims: PoolClaims[Hashable], request: Hashable, claim: PoolClaim, present: PoolState, limits: PoolLimits,
        now: float, gateway: Hashable,
    ) -> tuple[bool, PoolState]:  # fmt: skip
        accepted, state = answer(claims, request, claim, present, limits, now, gateway)
        found.append(Told(claim, present, accepted, state))
        return accepted, state

    monkeypatch.setattr(PoolClaims, "answer", noted)
    return found


def crowd(count: int, *, every_s: float = 0.0) -> Trace:
    rng = np.random.default_rng(5)
    return trace_of(*((every_s * n, int(rng.integers(20, 300)), int(rng.integers(1, 20))) for n in range(count)))


def go(trace: Trace, gateways: str, *changes: Change, policy: str = "splitwise", plan: Plan = POOLS) -> SimResult:
    return simulate(
        cluster_of("pqde" + gateways, bits_s=FAST, rtt_s=RTT_S),
        [run_of(plan, trace)],
        settings=SimSettings(
            engine=SimEngineSettings(max_batched_tokens=64, max_sequences=8),
            routing=RoutingSettings(policy=policy, max_pending_tokens=LIMIT, answer_tokens=20),
            gateways=tuple(gateways),
            report_s=1.0,
        ),
        changes=changes,
        model_of=lambda cluster, service, replica: ReplicaModel(LinearTimes(step=1.0, token=0.02), KV_TOKENS),
    )


def check_all_answered(result: SimResult, trace: Trace) -> None:
    found = result.services[0]
    assert np.isfinite(found.outcomes.e2e_s).all()
    assert len(found.outcomes.e2e_s) == len(trace)


@pytest.mark.parametrize("gateways", ["a", "abcf"])
def test_no_replica_that_is_asked_passes_its_limits(told: list[Told], gateways: str) -> None:
    trace = crowd(60)
    check_all_answered(go(trace, gateways), trace)
    assert any(each.accepted for each in told)
    for claim, present, accepted, state in told:
        if accepted and claim.work is not Work.TOKEN:
            assert present.prefill_tokens == 0 or state.prefill_tokens <= LIMIT or state.requests == 1
        if accepted and claim.work is not Work.PROMPT:
            assert claim.prompt_tokens + 20 <= present.kv_free_tokens
        if not accepted:
            assert state.pool is present.pool


def test_four_gateways_borrow_as_one_does_and_are_corrected(told: list[Told]) -> None:
    """All requests at once: no report says anything of what the others send."""
    trace, borrowed, refusals = crowd(60), dict[str, int](), dict[str, int]()
    for gateways in ("a", "abcf"):
        told.clear()
        found = go(trace, gateways).services[0]
        borrowed[gateways] = int((found.prefill == found.decode).sum())
        refusals[gateways] = sum(not each.accepted for each in told)
        assert refusals[gateways] <= 5 * len(trace)
    assert borrowed["a"] > 0
    assert borrowed["abcf"] == pytest.approx(borrowed["a"], abs=6)
    assert refusals["a"] < refusals["abcf"]


def test_machines_that_were_borrowed_are_at_home_again_before_they_are_idle(told: list[Told]) -> None:
    """A token machine that still decodes, and has no prompt to compute, takes what its own pool gets."""
    trace = trace_of(*((0.0, 200, 40) for _ in range(12)), *((30.0 + n, 20, 2) for n in range(8)))
    check_all_answered(go(trace, "abcf"), trace)
    token = [each for each in told if each.claim.replica in "de"]
    assert any(each.present.pool is Phase.MIXED for each in token)
    last = max(number for number, each in enumerate(token) if each.present.pool is Phase.MIXED)
    assert all(each.claim.work is Work.TOKEN and each.accepted for each in token[last + 1 :])
    assert any(each.present.decodes > 0 for each in token[last + 1 :])


def test_a_lone_request_costs_one_round_trip(told: list[Told]) -> None:
    trace = trace_of((0.0, 200, 4))
    asked, plain = go(trace, "a"), go(trace, "a", policy="plan")
    assert [each.accepted for each in told] == [True, True]
    ttft = [result.services[0].outcomes.ttft_s[0] for result in (asked, plain)]
    assert ttft[0] - ttft[1] == pytest.approx(RTT_S)


def test_without_gateways_of_their_own_nobody_is_refused(told: list[Told]) -> None:
    """Then each knows of all loads, at once."""
    trace = crowd(40, every_s=0.5)
    found = simulate(
        cluster_of("pqde", bits_s=FAST, rtt_s=RTT_S),
        [run_of(POOLS, trace)],
        settings=SimSettings(
            engine=SimEngineSettings(max_batched_tokens=64, max_sequences=8),
            routing=RoutingSettings(policy="splitwise", max_pending_tokens=LIMIT, answer_tokens=20),
        ),
        model_of=lambda cluster, service, replica: ReplicaModel(LinearTimes(step=1.0, token=0.02), KV_TOKENS),
    )
    check_all_answered(found, trace)
    assert told
    assert all(each.accepted for each in told)


def test_by_predicted_times_one_gateway_asks_nobody_and_four_send_less_to_the_same_replica(told: list[Told]) -> None:
    """All requests at once, and no report says anything of what the others send."""
    trace, latest_s = crowd(40), dict[str, float]()
    for gateways in ("a", "abcf"):
        told.clear()
        latest_s[gateways] = float(go(trace, gateways, policy="predicted").services[0].outcomes.ttft_s.max())
        assert bool(told) == (gateways == "abcf")
    for claim, present, accepted, _ in told:
        assert claim.most_ahead is not None
        if accepted:
            assert present.prefill_tokens <= claim.most_ahead
    assert any(not each.accepted for each in told)
    assert latest_s["abcf"] <= 1.2 * latest_s["a"]


@pytest.mark.parametrize("policy", ["splitwise", "predicted"])
@pytest.mark.parametrize("gateways", ["a", "abcf"])
@pytest.mark.parametrize("lost", ["p", "d"])
@pytest.mark.parametrize("at", [0.01, 0.04, 3.0])
def test_who_asks_a_box_that_is_lost_is_served_elsewhere(lost: str, at: float, gateways: str, policy: str) -> None:
    trace = crowd(40, every_s=0.02)
    check_all_answered(go(trace, gateways, BoxLost(at, lost), policy=policy), trace)


@pytest.mark.parametrize("policy", ["splitwise", "predicted"])
@pytest.mark.parametrize("at", [0.01, 0.04, 2.0])
def test_another_plan_while_replicas_are_asked(at: float, policy: str) -> None:
    other = plan_of(dict.fromkeys("pq", Phase.MIXED), {(name, name): 0.5 for name in "pq"}, version=2)
    trace = crowd(30, every_s=0.02)
    check_all_answered(go(trace, "abcf", PlanChange(at, 0, other), policy=policy), trace)
