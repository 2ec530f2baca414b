"""Routes by predicted times: which replicas, whether a prompt is split, and what nobody can make of it."""

from collections import Counter
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator import NoRoute, Pairing, Phase, Plan, Replica, Router, RoutingSettings, Stage
from p2pserve.coordinator.plan import Deadlines
from p2pserve.coordinator.profile import PhaseCost, ReplicaProfile
from p2pserve.coordinator.routing.interface import WorkBeside
from p2pserve.coordinator.routing.predicted import PredictedTimes

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
SETTINGS = RoutingSettings(policy="predicted")


def plan_of(phases: dict[str, Phase], weights: dict[tuple[str, str], float] | None = None, stages: int = 1) -> Plan:
    def stage(name: str, number: int) -> Stage:
        first = 4 * number // stages
        peer = name if number == 0 else f"{name}-{number}"
        return Stage(peer=peer, tp=1, first_layer=first, last_layer=4 * (number + 1) // stages)

    replicas = tuple(
        Replica(id=name, phase=phase, stages=tuple(stage(name, number) for number in range(stages)))
        for name, phase in phases.items()
    )
    if weights is None:
        ends = [
            (one.id, other.id)
            for one, other in product(replicas, replicas)
            if one.prefills and other.decodes and (one is other or M not in (one.phase, other.phase))
        ]
        weights = {end: 1.0 / len(ends) for end in ends}
    pairings = tuple(Pairing(prefill=p, decode=d, weight=weight) for (p, d), weight in weights.items())
    return Plan(epoch=1, version=1, service="llama", replicas=replicas, pairings=pairings, codec="kv4", why=())


def profile(slower: float = 1.0, kv_tokens: int = 100_000) -> ReplicaProfile:
    return ReplicaProfile(
        prefill=PhaseCost(token_s=1e-4 * slower, step_s=0.01 * slower),
        decode=PhaseCost(token_s=1e-7 * slower, request_s=1e-5 * slower, step_s=0.02 * slower),
        kv_tokens=kv_tokens,
    )


def router_of(plan: Plan, profiles: dict[str, ReplicaProfile] | None = None, **settings: str) -> Router:
    """One that has heard that all replicas are idle."""
    router = Router(plan, RoutingSettings(policy="predicted", **settings))  # type: ignore[arg-type]
    for replica in plan.replicas:
        note(router, replica.id)
        router.loads.profiles[router.loads.index[replica.id]] = (profiles or {}).get(replica.id, profile())
    return router


def note(router: Router, replica: str, requests: int = 0, tokens: int = 0, free: float = 100_000) -> None:
    router.loads.note(replica, requests, tokens, free, decodes=requests)


TWO = plan_of({"a": M, "b": M})
PAIR = plan_of({"p": P, "d": D})
PAIRS = plan_of({"p1": P, "p2": P, "d1": D, "d2": D})


def test_of_idle_replicas_the_fastest_is_taken() -> None:
    assert router_of(TWO, {"b": profile(0.5)}).route(500).decode == "b"
    assert router_of(TWO, {"a": profile(0.5)}).route(500).decode == "a"


def test_what_a_prompts_length_costs_counts_whichever_constant_a_fit_has_it_in() -> None:
    """A box whose prompts came one at a time may have all of it in `length_s`: it does not compute for nothing."""
    slower = msgspec.structs.replace(profile(), prefill=PhaseCost(length_s=1.5e-4, step_s=0.01))
    router = router_of(TWO, {"a": slower})
    assert router.route(4000).decode == "b"
    note(router, "b", 1, 3000)
    note(router, "a", 1, 3000)
    assert router.route(4000).decode == "b"
    note(router, "b", 1, 30_000)
    assert router.route(4000).decode == "a"


def test_what_is_cached_of_a_prompt_takes_no_time() -> None:
    router = router_of(TWO)
    assert router.route(8000).decode == "a"
    assert router.route(8000, cached_tokens={"b": 7000}).decode == "b"
    assert router.route(8000, cached_tokens={"a": 7000, "b": 6000}).decode == "a"
    note(router, "b", tokens=20_000)
    assert router.route(8000, cached_tokens={"b": 7000}).decode == "b"  # it leaves room for others
    note(router, "b", tokens=80_000)
    assert router.route(8000, cached_tokens={"b": 7000}).decode == "a"


@pytest.mark.parametrize("load", [{"tokens": 50_000}, {"requests": 200}, {"free": 100}])
def test_a_fast_replica_is_left_for_a_slow_one_while_it_has_much_to_do(load: dict[str, int]) -> None:
    router = router_of(TWO, {"b": profile(0.9)})
    assert router.route(500).decode == "b"
    note(router, "b", **load)
    assert router.route(500).decode == "a"


def test_a_replica_that_cannot_hold_a_prompt_is_the_last_to_be_taken() -> None:
    router = router_of(TWO, {"b": profile(0.1, kv_tokens=300)})
    note(router, "a", requests=500, tokens=500_000)
    assert router.route(500).decode == "a"
    assert router.route(200).decode == "b"
    assert router.route(500, frozenset({"a"})).decode == "b"  # the engine says why


def test_a_long_prompt_goes_where_there_is_room_for_its_kv_beside_what_decodes() -> None:
    plan = plan_of({"p": P, "fast": D, "slow": D}, {("p", "fast"): 0.98, ("p", "slow"): 0.02})
    router = router_of(plan, {"fast": profile(kv_tokens=20_000), "slow": profile(3.0)})
    note(router, "fast", requests=15, free=4000)
    for _ in range(100):
        assert router.route(1000, output_tokens=100).decode == "fast"
    assert router.route(9500, output_tokens=100).decode == "slow"
    note(router, "fast", requests=2, free=4000)  # two that are longer than most
    assert router.route(9500, output_tokens=100).decode == "slow"
    note(router, "fast", requests=2, free=17_800)
    assert router.route(9500, output_tokens=100).decode == "fast"


def test_both_sides_of_a_pair_are_chosen() -> None:
    router = router_of(PAIRS)
    note(router, "p1", tokens=20_000)
    note(router, "d2", requests=250)
    route = router.route(500)
    assert (route.prefill, route.decode) == ("p2", "d1")


def test_queues_decide_while_no_times_are_known() -> None:
    router, plain = Router(TWO, SETTINGS), Router(TWO)
    for each in (router, plain):
        note(each, "a", requests=3, tokens=900)
        note(each, "b", requests=1, tokens=100)
    assert router.route(500) == plain.route(500)


def test_a_replica_whose_times_are_not_known_counts_as_the_slowest() -> None:
    plan = plan_of({"a": M, "b": M, "c": M})
    router = router_of(plan, {"a": profile(2.0), "b": profile(1.5)})
    router.loads.profiles[router.loads.index["c"]] = None
    assert router.route(500).decode == "b"
    note(router, "b", tokens=100_000)
    assert router.route(500).decode == "a"


def test_who_has_reported_nothing_counts_as_busy_as_the_busiest() -> None:
    router = router_of(TWO, {"a": profile(), "b": profile(0.9)})
    note(router, "a", requests=100, tokens=10_000)
    router.loads.is_silent[router.loads.index["b"]] = True
    assert router.route(500).decode == "b"  # both the same, and it is faster


def test_queues_of_pipelines_get_shorter_by_several_prompts_at_once() -> None:
    plan = plan_of({"a": M, "b": M}, stages=4)
    long = plan.replicas[0]
    short = msgspec.structs.replace(
        plan.replicas[1], stages=(msgspec.structs.replace(plan.replicas[1].stages[0], last_layer=4),)
    )
    router = router_of(msgspec.structs.replace(plan, replicas=(long, short)))
    note(router, "a", tokens=20_000)
    note(router, "b", tokens=15_000)
    assert router.route(500).decode == "a"


@pytest.mark.parametrize(("stages", "taken"), [(1, "b"), (4, "a")])
def test_a_pipeline_decodes_in_as_many_batches_as_it_has_stages(stages: int, taken: str) -> None:
    """Of steps that compute prompts of 1,000 tokens for answers of 100, a batch has room for 46 answers."""
    both = (plan_of({"a": M}, stages=stages).replicas[0], plan_of({"b": M}).replicas[0])
    replicas = tuple(msgspec.structs.replace(each, step_tokens=512) for each in both)
    router = router_of(msgspec.structs.replace(TWO, replicas=replicas))
    note(router, "a", requests=80)
    note(router, "b", requests=60)
    assert router.route(1000, output_tokens=100).decode == taken


def test_requests_are_shared_by_speed_under_load() -> None:
    router = router_of(TWO, {"b": profile(2.0)})
    had: Counter[str] = Counter()
    for number in range(900):
        had[router.route(500, request=number).decode] += 1
        for name in "ab":
            note(router, name, requests=had[name], tokens=500 * had[name])
    assert 1.2 < had["a"] / had["b"] < 2.5


def test_requests_that_decode_slow_down_those_that_come() -> None:
    """Where many decode, one that is 1.3 times as slow and empty is taken for what the request adds to all."""
    router = router_of(TWO, {"b": profile(1.3)})
    assert router.route(500).decode == "a"
    note(router, "a", requests=60)
    assert router.route(500).decode == "b"


def test_long_prompts_go_where_prompts_are_fast_though_many_decode_there() -> None:
    fast = ReplicaProfile(
        prefill=PhaseCost(token_s=1e-5, step_s=0.01),
        decode=PhaseCost(token_s=1e-8, request_s=1e-4, step_s=0.02),
        kv_tokens=1_000_000,
    )
    router = router_of(TWO, {"b": fast})
    note(router, "b", requests=60)
    assert [router.route(prompt).decode for prompt in (100, 8_000)] == ["a", "b"]


def test_several_gateways_that_hear_the_same_do_not_all_go_to_one_replica() -> None:
    router = router_of(plan_of(dict.fromkeys("abcd", M)))
    assert {router.route(500, now=100.0 * each).decode for each in range(50)} == {"a"}
    router.loads.gateways = 4.0
    assert {router.route(500, now=100.0 * each).decode for each in range(50, 100)} == {"a", "b", "c", "d"}


def test_answers_are_not_generated_where_many_prompts_are_computed_for_others() -> None:
    plan = plan_of({"a": M, "b": M, "d": D}, {("a", "d"): 0.8, ("a", "a"): 0.1, ("b", "b"): 0.1})
    router = router_of(msgspec.structs.replace(plan, deadlines=Deadlines(tpot_s=0.1)), {"b": profile(1.2)})
    assert router.route(500, exclude=frozenset({"d"})).decode == "a"
    for each in range(40):  # all of them have been computed since, 0.8 s of work in each second
        assert router.route(8000, exclude=frozenset({"b"}), now=each / 2.0).prefill in ("a", None)
    assert router.route(500, exclude=frozenset({"d"}), now=20.0).decode == "b"
    assert router.route(500, exclude=frozenset({"d"}), now=200.0).decode == "a"


# ---- replicas that do what is not of their phase ----------------------------------------------------------


def test_a_decode_replica_takes_a_prompt_whole_where_prompts_wait_for_long() -> None:
    router = router_of(PAIR)
    note(router, "p", tokens=1_000)
    assert router.route(500).prefill == "p"
    note(router, "p", tokens=100_000)
    route = router.route(500)
    assert (route.prefill, route.decode) == (None, "d")


def test_a_prefill_replica_decodes_where_the_other_side_has_no_room() -> None:
    router = router_of(PAIR)
    note(router, "d", requests=2_000, free=0)
    route = router.route(500)
    assert (route.prefill, route.decode) == (None, "p")


@pytest.mark.parametrize(("ttft_s", "tpot_s", "lends"), [(0.1, 1.0, True), (1e4, 1.0, False), (0.1, 0.01, False)])
def test_by_its_deadlines_a_plan_says_whether_that_is_needed_and_bearable(
    ttft_s: float, tpot_s: float, lends: bool
) -> None:
    router = router_of(msgspec.structs.replace(PAIR, deadlines=Deadlines(ttft_s=ttft_s, tpot_s=tpot_s)))
    note(router, "p", tokens=100_000)
    assert (router.route(500).prefill is None) is lends


# ---- deadlines --------------------------------------------------------------------------------------------


def slow_and_fast() -> Router:
    """`slow` is idle, and decodes at 60 ms a token; `fast` at 20 ms, behind 3 s of prompts. Answers had to come to
    their end within 12 s."""
    plan = plan_of({"fast": M, "slow": M})
    deadlines = Deadlines(ttft_s=8.0, tpot_s=0.2, e2e_s=12.0)
    router = router_of(msgspec.structs.replace(plan, deadlines=deadlines), {"slow": profile(3.0)})
    note(router, "fast", tokens=30_000)
    return router


def answer(router: Router, tokens: int, times: int = 600) -> None:
    for number in range(times):
        router.route(1, request=number)
        router.end_request(number, tokens)


@pytest.mark.parametrize(("tokens", "decodes"), [(350, "fast"), (5, "slow")])
def test_with_deadlines_long_answers_go_where_they_end_in_time(tokens: int, decodes: str) -> None:
    router = slow_and_fast()
    answer(router, tokens)
    assert router.route(500).decode == decodes


def test_without_deadlines_the_first_token_counts() -> None:
    plan = msgspec.structs.replace(slow_and_fast().plan, deadlines=Deadlines())
    router = router_of(plan, {"slow": profile(3.0)})
    note(router, "fast", tokens=30_000)
    answer(router, 350)
    assert router.route(500).decode == "slow"


def test_how_long_answers_are_is_known_under_the_next_plan() -> None:
    router = slow_and_fast()
    answer(router, 5)
    again = Router(router.plan, SETTINGS, earlier=router)
    assert isinstance(again.policy, PredictedTimes)
    assert again.policy.tail.share_beyond(np.array([50.0])) < 0.1


@given(st.floats(0.0, 1e12), st.floats(0.0, 1e12), st.floats(0.0, 1e12), st.integers(0, 10**9))
def test_any_deadlines_have_a_route(ttft_s: float, tpot_s: float, e2e_s: float, tokens: int) -> None:
    deadlines = Deadlines(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)
    router = router_of(msgspec.structs.replace(PAIR, deadlines=deadlines))
    note(router, "p", tokens=tokens)
    with np.errstate(all="raise", under="ignore"):
        assert router.route(500).decode in ("p", "d")


def test_a_prompt_that_a_replica_holds_goes_there_with_deadlines_as_well() -> None:
    plan = msgspec.structs.replace(plan_of({"a": M, "b": M}), deadlines=Deadlines(ttft_s=8.0, tpot_s=0.2, e2e_s=12.0))
    router = router_of(plan)
    note(router, "b", tokens=1_000)
    assert router.route(500).decode == "a"
    assert router.route(500, cached_tokens={"b": 480}).decode == "b"


@pytest.mark.parametrize(("tokens", "decodes"), [(350, "fast"), (60, "slow")])
def test_but_not_where_its_answer_would_come_too_late(tokens: int, decodes: str) -> None:
    router = slow_and_fast()
    note(router, "fast", tokens=10_000)
    answer(router, tokens)
    assert router.route(500).decode == "fast"
    assert router.route(500, cached_tokens={"slow": 480}).decode == decodes


# ---- splits -----------------------------------------------------------------------------------------------


def test_a_prompt_is_shared_where_that_is_sooner() -> None:
    router = router_of(PAIR, {"p": profile(3.0)})
    route = router.route(2000)
    assert (route.splits_there, route.split) == (True, 2000)
    note(router, "d", requests=20, tokens=200_000)
    assert not router.route(2000).splits_there  # the decode replica has enough to do


def test_pipelines_do_not_share_prompts() -> None:
    plan = plan_of({"p": P, "d": D}, stages=2)
    assert not router_of(plan, {"p": profile(3.0)}).route(2000).splits_there


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "shares"),
    [(0.0, 0.0, True), (100.0, 1.0, False), (0.1, 1.0, True), (0.1, 0.01, False)],
)
def test_a_plan_with_deadlines_shares_prompts_where_that_is_needed_and_bearable(
    ttft_s: float, tpot_s: float, shares: bool
) -> None:
    plan = msgspec.structs.replace(PAIR, deadlines=Deadlines(ttft_s=ttft_s, tpot_s=tpot_s))
    assert router_of(plan, {"p": profile(3.0)}).route(2000).splits_there is shares


# ---- prices, links, lengths -------------------------------------------------------------------------------


def test_of_equals_the_cheaper_is_taken_and_of_others_the_sooner() -> None:
    router = router_of(TWO, {"b": profile(1.01)})
    router.loads.usd_per_hour[:] = [2.0, 1.0]
    assert router.route(500).decode == "b"
    note(router, "b", requests=20, tokens=5_000)
    assert router.route(500).decode == "a"


def test_a_thin_link_is_not_given_more_than_the_plan_says_while_all_are_idle() -> None:
    weights = {("p1", "d1"): 0.49, ("p2", "d2"): 0.49, ("p1", "d2"): 0.01, ("p2", "d1"): 0.01}
    router = router_of(plan_of({"p1": P, "p2": P, "d1": D, "d2": D}, weights), {"d2": profile(0.9)})
    had = Counter((route.prefill, route.decode) for route in (router.route(500) for _ in range(400)))
    assert had["p1", "d2"] + had["p2", "d1"] < 0.2 * 400
    assert min(had["p1", "d1"], had["p2", "d2"]) > 0.1 * 400


def test_the_lengths_of_answers_are_learned_and_outlive_the_plan() -> None:
    router = router_of(TWO)
    for number in range(64):
        router.route(500, request=number)
        router.end_request(number, 7)
    policy = router.policy
    assert isinstance(policy, PredictedTimes)
    assert not policy.prompts
    follows = Router(plan_of({"a": M}), SETTINGS, earlier=router).policy
    assert isinstance(follows, PredictedTimes)
    assert follows.lengths.predict(500, np.random.default_rng(0)) < 40
    assert follows.mean_prompt == pytest.approx(500)


# ---- whatever is said -------------------------------------------------------------------------------------

SECONDS = st.one_of(st.just(0.0), st.floats(0.0, 10.0), st.just(1e6))
COSTS = st.builds(PhaseCost, token_s=SECONDS, request_s=SECONDS, length_s=SECONDS, step_s=SECONDS)
PROFILES = st.none() | st.builds(
    ReplicaProfile, prefill=COSTS, decode=COSTS, kv_tokens=st.sampled_from([0, 1, 1 << 40])
)
LOADS = st.tuples(*[st.sampled_from([0, 1, 1000, 1 << 50])] * 3)


@given(
    st.lists(st.tuples(PROFILES, LOADS), min_size=4, max_size=4),
    st.frozensets(st.sampled_from(["p1", "p2", "d1", "d2", "elsewhere"])),
    st.sampled_from([0, 1, 500, 1 << 20]),
    st.none() | st.sampled_from([1, 1 << 31]),
)
def test_whatever_replicas_say_the_route_is_one_of_the_plan(
    told: list[tuple[ReplicaProfile | None, tuple[int, int, int]]],
    excluded: frozenset[str],
    prompt: int,
    most: int | None,
) -> None:
    router = Router(PAIRS, SETTINGS)
    for name, (each, load) in zip(router.loads.ids, told, strict=True):
        router.loads.profiles[router.loads.index[name]] = each
        note(router, name, *load)
    with np.errstate(all="raise", under="ignore"):
        try:
            route = router.route(prompt, excluded, request="r", max_output_tokens=most)
        except NoRoute:
            assert excluded >= {"p1", "p2", "d1", "d2"}
            return
    assert excluded.isdisjoint({str(route.prefill), route.decode})
    assert {str(route.prefill or route.decode), route.decode} <= {"p1", "p2", "d1", "d2"}
    assert 0 <= route.split <= max(prompt, 1)


def test_turns_of_other_services_on_the_same_gpus_count() -> None:
    router = router_of(TWO)
    assert router.route(500).decode == "a"
    router.loads.note_beside("a", WorkBeside(1, 0))
    assert router.route(500).decode == "b"
    # Its own answers batch with this one, those of others do not.
    note(router, "b", 3)
    assert router.route(500).decode == "b"
    note(router, "b")
    router.loads.note_beside("b", WorkBeside(1, 8000))
    assert router.route(500).decode == "a"


def test_requests_go_where_their_service_is_decoded_rather_than_where_they_would_begin_turns() -> None:
    router = router_of(TWO)
    note(router, "b", 2)
    for replica in ("a", "b"):
        router.loads.note_beside(replica, WorkBeside(2, 0))
    assert router.route(500).decode == "b"
