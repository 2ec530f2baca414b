"""The policy of Xiong et al., section 4: equations by hand, hooks, and its state with one gateway and with four."""

from __future__ import annotations

from collections import Counter
from math import exp, expm1

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
    RoutingSettings,
    Stage,
)
from p2pserve.coordinator.profile import ReplicaProfile
from p2pserve.coordinator.routing.estimates.lengths import LengthPredictor
from p2pserve.coordinator.routing.hetero import MinMaxWorkload
from p2pserve.coordinator.routing.interface import ReplicaLoads, RequestFacts, RequestId
from p2pserve.coordinator.routing.plan_and_queues import PlanAndQueues
from p2pserve.coordinator.routing.router import Router

PROMPT, OUTPUT = 100, 50
SLOW = ReplicaProfile(
    prefill=PhaseCost(token_s=0.001, request_s=0.002, length_s=0.003, step_s=0.004),
    decode=PhaseCost(token_s=0.0001, request_s=0.0002, length_s=0.0003, step_s=0.0004),
    kv_tokens=600,
)
# Equation 5: of 150 tokens each, 4 fit. Equation 3: 0.4 + 0.008 + 0.3 + 0.004 s. Equation 4: the sum over k = 1..50 of
# 0.0007 (100 + k) + 0.0012, so 0.0007 (5000 + 1275) + 0.06 s. Equation 6: a fourth of both.
SLOW_S = (0.712 + 4.4525) / 4
FAST = ReplicaProfile(
    prefill=PhaseCost(token_s=0.0001), decode=PhaseCost(step_s=0.01, request_s=0.001), kv_tokens=15_000
)
FAST_S = (0.0001 * 100 * 100 + 50 * (0.01 + 0.001 * 100)) / 100


class Fixed(LengthPredictor):
    """All answers are as long as each other."""

    def __init__(self, output: float = OUTPUT) -> None:
        self.output = output
        self.heard: list[tuple[int, int]] = []

    def predict(self, prompt_tokens: int, rng: np.random.Generator) -> float:
        return self.output

    def record(self, prompt_tokens: int, output_tokens: int) -> None:
        self.heard.append((prompt_tokens, output_tokens))


def plan_of(**phases: Phase) -> Plan:
    replicas = tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=f"box-{name}", tp=1, first_layer=0, last_layer=4),))
        for name, phase in phases.items()
    )
    first = next(item.id for item in replicas if item.prefills)
    last = next(item.id for item in replicas if item.decodes)
    pairings = (Pairing(prefill=first, decode=last, weight=1.0),)
    return Plan(epoch=1, version=1, service="s", replicas=replicas, pairings=pairings, codec="raw", why=())


def mixed(**profiles: ReplicaProfile | None) -> tuple[Plan, ReplicaLoads]:
    """Replicas that do both, nothing on them."""
    loads = ReplicaLoads(profiles)
    loads.profiles = list(profiles.values())
    return plan_of(**dict.fromkeys(profiles, Phase.MIXED)), loads


def policy_of(plan: Plan, theta: float = 2.0, output: float = OUTPUT) -> MinMaxWorkload:
    policy = MinMaxWorkload(plan, RoutingSettings(policy="hetero", kv_pressure=theta))
    policy.open.predictor = Fixed(output)
    return policy


def route(
    policy: MinMaxWorkload, loads: ReplicaLoads, request: RequestId | None = None, *exclude: str, prompt: int = PROMPT
) -> Route:
    facts = RequestFacts(prompt, frozenset(exclude), id=request)
    return policy.choose(facts, loads, now=0.0, rng=np.random.default_rng(0))


def test_the_times_of_a_batch_are_equations_3_and_4() -> None:
    prefill_s, decode_s = SLOW.batch_s(4, PROMPT, OUTPUT)
    assert prefill_s == pytest.approx(0.712)
    step_by_step = sum(SLOW.decode.seconds(4, PROMPT + k) for k in range(1, OUTPUT + 1))
    assert decode_s == pytest.approx(step_by_step) == pytest.approx(4.4525)


def test_a_request_adds_its_share_of_an_ideal_batch() -> None:
    plan, loads = mixed(a=SLOW)
    policy = policy_of(plan)
    route(policy, loads, 1)
    assert policy.open.at("a").workload == pytest.approx(SLOW_S)
    # Equations 7 and 8: 150 of 600 tokens are spoken for now.
    route(policy, loads, 2)
    assert policy.open.at("a").workload == pytest.approx(SLOW_S * (1 + exp(2.0 * 0.25)))
    for each in range(3, 8):
        route(policy, loads, each)
    # More is sent here than fits: six others are 1.5 KV caches.
    before = sum(exp(2.0 * 0.25 * number) for number in range(7))
    assert policy.open.at("a").workload == pytest.approx(SLOW_S * before)


def test_without_pressure_the_kv_that_is_spoken_for_does_not_matter() -> None:
    plan, loads = mixed(a=SLOW)
    policy = policy_of(plan, theta=0.0)
    for each in range(10):
        route(policy, loads, each)
    assert policy.open.at("a").workload == pytest.approx(10 * SLOW_S)


def test_the_first_request_goes_to_the_fast_replica() -> None:
    """As printed, algorithm 2 starts the least load at 0, is never below it, and always takes the first instance."""
    plan, loads = mixed(slow=SLOW, fast=FAST)
    assert route(policy_of(plan), loads, 1).decode == "fast"


def test_the_most_loaded_replica_has_as_little_as_can_be() -> None:
    plan, loads = mixed(slow=SLOW, fast=FAST)
    policy, expected = policy_of(plan), Counter[str]()
    slow = fast = 0.0
    for number in range(60):
        to_slow = SLOW_S * exp(2.0 * expected["slow"] * 150 / 600)
        to_fast = FAST_S * exp(2.0 * expected["fast"] * 150 / 15_000)
        chosen = "slow" if max(slow + to_slow, fast) < max(slow, fast + to_fast) else "fast"
        slow, fast = (slow + to_slow, fast) if chosen == "slow" else (slow, fast + to_fast)
        expected[chosen] += 1
        assert route(policy, loads, number).decode == chosen
    assert 0 < expected["slow"] < expected["fast"]


def test_behind_one_loaded_replica_the_others_are_not_filled_up_one_by_one() -> None:
    plan, loads = mixed(a=FAST, b=FAST, c=FAST)
    policy = policy_of(plan)
    for each in range(9):
        route(policy, loads, f"long {each}", "b", "c")
    found = Counter(route(policy, loads, each).decode for each in range(8))
    assert found == {"b": 4, "c": 4}


def test_at_its_end_a_request_takes_off_what_it_had_added_whatever_the_order() -> None:
    plan, loads = mixed(slow=SLOW, fast=FAST)
    policy = policy_of(plan)
    for each in range(40):
        route(policy, loads, each)
    for each in np.random.default_rng(1).permutation(40).tolist():
        policy.on_end(each, 7)
        policy.on_end(each, 7)  # told twice, or never routed: nothing happens
    for name in ("slow", "fast"):
        load = policy.open.at(name)
        assert (load.requests, load.workload, load.tokens) == (0, 0.0, 0.0)


def test_only_whole_answers_teach_how_long_answers_are() -> None:
    plan, loads = mixed(a=FAST)
    policy, predictor = policy_of(plan), Fixed()
    policy.open.predictor = predictor
    route(policy, loads, 1)
    route(policy, loads, 2)
    policy.on_end(1, 33)
    policy.on_end(2, None)
    assert predictor.heard == [(PROMPT, 33)]


def test_a_request_that_begins_again_counts_once() -> None:
    plan, loads = mixed(a=FAST, b=FAST)
    policy = policy_of(plan)
    first = route(policy, loads, 1).decode
    second = route(policy, loads, 1, first).decode
    assert first != second
    assert policy.open.at(first).requests == 0
    assert policy.open.at(second).requests == 1


def test_the_answer_is_taken_to_be_no_longer_than_its_client_wants() -> None:
    plan, loads = mixed(a=SLOW)
    policy = policy_of(plan, output=5000.0)
    facts = RequestFacts(PROMPT, id=1, max_output_tokens=OUTPUT)
    policy.choose(facts, loads, now=0.0, rng=np.random.default_rng(0))
    assert policy.open.at("a").workload == pytest.approx(SLOW_S)


# ---- gateways -------------------------------------------------------------------------------------------------


def test_what_other_gateways_have_there_counts_as_ones_own_latest() -> None:
    plan, loads = mixed(a=SLOW, b=SLOW)
    policy = policy_of(plan)
    route(policy, loads, 1, "b")
    loads.note("a", 5, 0, 0)  # this gateway's, and four others
    pressure = 2.0 * 5 * 150 / 600
    rising = expm1(pressure) / pressure  # the mean of e^x while they came one by one
    load_of_a, load_of_b = SLOW_S * (1 + 4 * rising + exp(pressure)), 0.0
    taken = 0
    while (more := load_of_b + SLOW_S * exp(2.0 * taken * 150 / 600)) < load_of_a:
        taken, load_of_b = taken + 1, more
    assert taken == 6
    found = [route(policy, loads, each).decode for each in range(2, 9)]
    assert found == ["b"] * 6 + ["a"]


@pytest.mark.parametrize("gateways", [1, 4])
def test_gateways_share_replicas_by_speed_though_they_hear_each_other_late(gateways: int) -> None:
    """Requests come to gateways in turn; each is told how many requests replicas have only after every 32."""
    plan, loads = mixed(slow=SLOW, fast=FAST, fast2=FAST)
    policies = [policy_of(plan) for _ in range(gateways)]
    views = [ReplicaLoads(loads.ids) for _ in policies]
    running: list[tuple[int, str]] = []
    routed, told = Counter[str](), Counter[str]()
    own = [Counter[str]() for _ in policies]
    for number in range(640):
        at = number % gateways
        for name in loads.ids:  # its own at once, the others' as told
            views[at].note(name, max(own[at][name], told[name]), 0, 0)
        views[at].profiles = loads.profiles
        decode = route(policies[at], views[at], number).decode
        running.append((number, decode))
        routed[decode] += 1
        own[at][decode] += 1
        if len(running) > 64:
            done, replica = running.pop(0)
            policies[done % gateways].on_end(done, OUTPUT)
            own[done % gateways][replica] -= 1
        if number % 32 == 31:
            told = Counter(replica for _, replica in running)
    shares = {name: routed[name] / 640 for name in loads.ids}
    assert shares["fast"] == pytest.approx(shares["fast2"], abs=0.05)
    assert 0.0 < shares["slow"] < 0.2
    total = sum(policy.open.at(name).requests for policy in policies for name in loads.ids)
    assert total == len(running)


def test_a_plan_that_follows_keeps_the_loads_of_requests_that_have_not_ended() -> None:
    plan, loads = mixed(slow=SLOW, fast=FAST)
    settings = RoutingSettings(policy="hetero")
    first = Router(plan, settings)
    first.loads.profiles = list(loads.profiles)
    for each in range(8):
        first.route(PROMPT, frozenset({"slow"}), request=each)
    second = Router(plan_of(slow=Phase.MIXED, fast=Phase.MIXED, new=Phase.MIXED), settings, earlier=first)
    policy = second.policy
    assert isinstance(policy, MinMaxWorkload)
    assert policy.open.at("fast").requests == 8
    for each in range(8):
        second.end_request(each, OUTPUT)
    assert policy.open.at("fast").requests == 0


def test_a_policy_that_takes_the_place_of_another_kind_begins_anew() -> None:
    plan, _ = mixed(a=FAST)
    policy = policy_of(plan)
    policy.take_over(PlanAndQueues(plan, RoutingSettings()))
    assert policy.open.at("a").requests == 0
    assert repr(policy) == "<MinMaxWorkload <OpenRequests >>"


# ---- what a plan may be ---------------------------------------------------------------------------------------


def test_in_a_plan_with_phases_each_side_is_chosen_by_its_part() -> None:
    plan = plan_of(p=Phase.PREFILL, q=Phase.PREFILL, d=Phase.DECODE, e=Phase.DECODE)
    loads = ReplicaLoads("pqde")
    loads.profiles = [SLOW, FAST, FAST, SLOW]
    policy = policy_of(plan)
    assert route(policy, loads, 1) == Route(prefill="q", decode="d", split=PROMPT)
    loads.note("q", 900, 90_000, 0)  # it would take 9 s more to prefill
    assert route(policy, loads, 2).prefill == "p"
    assert policy.open.at("d").requests == 2
    assert policy.open.at("q").requests == 0


def test_one_that_does_both_competes_with_pairs() -> None:
    plan = plan_of(p=Phase.PREFILL, d=Phase.DECODE, m=Phase.MIXED)
    loads = ReplicaLoads("pdm")
    loads.profiles = [FAST, FAST, SLOW]
    assert route(policy_of(plan), loads, 1) == Route(prefill="p", decode="d", split=PROMPT)
    loads.profiles = [SLOW, SLOW, FAST]
    assert route(policy_of(plan), loads, 1) == Route(prefill=None, decode="m")


@pytest.mark.parametrize(
    ("excluded", "expected"),
    [
        ("p", Route(prefill="m", decode="d", split=PROMPT)),
        ("d", Route(prefill="p", decode="m", split=PROMPT)),
        ("pm", Route(prefill=None, decode="d")),
        ("dm", Route(prefill=None, decode="p")),
        ("pd", Route(prefill=None, decode="m")),
    ],
)
def test_a_side_that_has_nobody_left_is_stood_in_for(excluded: str, expected: Route) -> None:
    plan = plan_of(p=Phase.PREFILL, d=Phase.DECODE, m=Phase.MIXED)
    loads = ReplicaLoads("pdm")
    loads.profiles = [FAST, FAST, FAST]
    loads.note("m", 1, 0, 0)  # a little busier, so that a pair is better where there is one
    assert route(policy_of(plan), loads, 1, *excluded) == expected


def test_boxes_can_be_excluded_and_without_any_there_is_no_route() -> None:
    plan, loads = mixed(slow=SLOW, fast=FAST)
    policy = policy_of(plan)
    assert route(policy, loads, 1, "box-fast").decode == "slow"
    with pytest.raises(NoRoute, match="can take a request for s: all replicas are excluded"):
        route(policy, loads, 1, "fast", "box-slow")
    assert policy.open.at("slow").requests == 1


def test_a_replica_that_has_told_nothing_counts_as_the_slowest() -> None:
    plan, loads = mixed(new=None, slow=SLOW, fast=FAST)
    policy = policy_of(plan, theta=0.0)
    found = Counter(route(policy, loads, each).decode for each in range(400))
    assert found["new"] == pytest.approx(found["slow"], abs=1)
    assert found["fast"] > 5 * found["slow"]


def test_where_no_replica_has_told_anything_all_count_as_equally_fast() -> None:
    plan, loads = mixed(a=None, b=None)
    policy = policy_of(plan)
    assert Counter(route(policy, loads, each).decode for each in range(40)) == {"a": 20, "b": 20}


def test_a_prompt_goes_where_it_fits() -> None:
    plan, loads = mixed(slow=SLOW, fast=FAST)
    policy = policy_of(plan)
    for each in range(30):
        assert route(policy, loads, each, prompt=600).decode == "fast"
    assert route(policy, loads, 99, "fast", prompt=600).decode == "slow"  # the box may know better


def test_thousands_of_requests_at_one_replica_are_still_a_number() -> None:
    plan, loads = mixed(a=SLOW)
    loads.note("a", 10**6, 0, 0)
    policy = policy_of(plan)
    route(policy, loads, 1)
    assert policy.open.at("a").workload == pytest.approx(SLOW_S * exp(200.0))


def test_requests_whose_end_nobody_tells_are_not_kept() -> None:
    plan, loads = mixed(a=FAST)
    policy = policy_of(plan)
    assert route(policy, loads).decode == "a"
    assert policy.open.at("a").requests == 0


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    for theta in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PolicyError, match=f"kv_pressure is {theta}"):
            RoutingSettings(kv_pressure=theta)
    with pytest.raises(PolicyError, match="length_predictor is 'crystal', none of learned, sampled"):
        RoutingSettings(length_predictor="crystal")
