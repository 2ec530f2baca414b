"""Routes: tables for each preference, properties for exclusion and for the shares of the plan."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator import (
    Load,
    LoadError,
    NoRoute,
    Pairing,
    Phase,
    Plan,
    Replica,
    Route,
    Router,
    RoutingSettings,
    Stage,
)

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def plan_of(phases: dict[str, Phase], weights: dict[tuple[str, str], float]) -> Plan:
    replicas = tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=4),))
        for name, phase in phases.items()
    )
    pairings = tuple(Pairing(prefill=p, decode=d, weight=weight) for (p, d), weight in weights.items())
    return Plan(epoch=2, version=5, service="llama", replicas=replicas, pairings=pairings, codec="kv4", why=())


def load(replica: str, requests: int = 0, to_prefill: int = 0, free: int = 10_000) -> Load:
    return Load(replica=replica, outstanding=requests, prefill_tokens=to_prefill, kv_free_tokens=free)


def route_once(
    plan: Plan, loads: Iterable[Load], *, prompt_tokens: int, exclude: frozenset[str] = frozenset()
) -> Route:
    """One question to a new router that has heard `loads`."""
    router = Router(plan)
    router.report(loads)
    return router.route(prompt_tokens, exclude)


TWO_BY_TWO = plan_of(
    {"p1": P, "p2": P, "d1": D, "d2": D},
    {("p1", "d1"): 0.3, ("p1", "d2"): 0.3, ("p2", "d1"): 0.2, ("p2", "d2"): 0.2},
)
WITH_MIXED = plan_of({"p": P, "d": D, "m": M}, {("p", "d"): 0.6, ("m", "m"): 0.4})
TWO_PAIRS = plan_of({"p1": P, "p2": P, "d1": D, "d2": D}, {("p1", "d1"): 0.5, ("p2", "d2"): 0.5})
ALONE = plan_of({"m": M}, {("m", "m"): 1.0})


@pytest.mark.parametrize(
    ("plan", "loads", "exclude", "expected"),
    [
        (ALONE, [], "", (None, "m")),
        (TWO_BY_TWO, [], "", ("p1", "d1")),  # idle: by share, then by id
        (TWO_BY_TWO, [load("p1", 1, 300), load("p2")], "", ("p2", "d1")),  # p1 has the longer queue
        (TWO_BY_TWO, [load("p1", 1, 400), load("p2", 9, 200)], "", ("p2", "d1")),  # by tokens
        (TWO_BY_TWO, [load("d1", 2), load("d2")], "", ("p1", "d2")),
        (TWO_BY_TWO, [load("d1"), load("d2", free=10)], "", ("p1", "d1")),
        (TWO_BY_TWO, [load("d1", 9), load("d2", free=10)], "", ("p1", "d1")),  # no room is worse than a queue
        (TWO_BY_TWO, [load("p1", 2, 500)], "", ("p1", "d1")),  # p2, d1, d2 are silent: as busy as p1
        (TWO_BY_TWO, [], "p1", ("p2", "d1")),
        (TWO_BY_TWO, [], "p1 d1", ("p2", "d2")),
        (TWO_BY_TWO, [load("d1", 3), load("d2")], "p1 p2", (None, "d2")),  # decode alone
        (TWO_BY_TWO, [load("p1", 3, 300), load("p2")], "d1 d2", (None, "p2")),  # prefill alone
        (TWO_BY_TWO, [], "p1 p2 d1", (None, "d2")),
        (WITH_MIXED, [load("p"), load("d"), load("m", 9, 900)], "", ("p", "d")),
        (WITH_MIXED, [load("p", 9, 900), load("d", 9), load("m")], "", (None, "m")),
        (TWO_PAIRS, [load("p1", 1, 100), load("p2"), load("d1", 20), load("d2", 22)], "", ("p2", "d2")),  # p2 is free
        (
            TWO_PAIRS,
            [load("p1", 1, 100), load("p2"), load("d1"), load("d2", 40)],
            "",
            ("p1", "d1"),
        ),  # but d2 is too busy
        (WITH_MIXED, [], "d", (None, "m")),  # mixed before a prefill box
        (WITH_MIXED, [], "d m", (None, "p")),
    ],
)
def test_routes(plan: Plan, loads: list[Load], exclude: str, expected: tuple[str | None, str]) -> None:
    found = route_once(plan, loads, prompt_tokens=100, exclude=frozenset(exclude.split()))
    assert (found.prefill, found.decode) == expected


def test_no_route_says_so_in_one_line() -> None:
    with pytest.raises(NoRoute) as caught:
        route_once(ALONE, [], prompt_tokens=1, exclude=frozenset({"m", "x"}))
    text = str(caught.value)
    assert text == "no box can take a request for llama: all 1 replicas of plan 2.5 are excluded (m, x)"


def test_a_replica_is_as_busy_as_it_reports_and_goes_with_its_first_lost_box() -> None:
    stages = (
        Stage(peer="a", tp=1, first_layer=0, last_layer=2),
        Stage(peer="b", tp=1, first_layer=2, last_layer=4),
    )
    long = Replica(id="ab", phase=M, stages=stages)
    short = Replica(id="c", phase=M, stages=(Stage(peer="c", tp=1, first_layer=0, last_layer=4),))
    pairings = tuple(Pairing(prefill=item, decode=item, weight=0.5) for item in ("ab", "c"))
    plan = Plan(epoch=1, version=1, service="s", replicas=(long, short), pairings=pairings, codec="raw", why=())
    assert route_once(plan, [load("ab", 3), load("c", 2)], prompt_tokens=1).decode == "c"
    assert route_once(plan, [load("ab", free=1), load("c", 2)], prompt_tokens=10).decode == "c"
    other_stage = load("b", 5, free=0)  # it schedules nothing itself
    assert route_once(plan, [load("ab"), other_stage, load("c", 2)], prompt_tokens=10).decode == "ab"
    found = route_once(plan, [load("ab"), load("b"), load("c", 2)], prompt_tokens=1, exclude=frozenset("b"))
    assert found == Route(prefill=None, decode="c")


def test_a_pair_without_weight_is_not_used() -> None:
    plan = plan_of({"p1": P, "p2": P, "d1": D, "d2": D}, {("p1", "d1"): 0.5, ("p2", "d2"): 0.5, ("p1", "d2"): 0.0})
    assert route_once(plan, [], prompt_tokens=1, exclude=frozenset({"d1", "p2"})) == Route(prefill=None, decode="d2")


@pytest.mark.parametrize("field", ["requests", "to_prefill", "free"])
def test_a_load_counts_things(field: str) -> None:
    with pytest.raises(LoadError, match="negative"):
        load("a", **{field: -1})
    with pytest.raises(LoadError, match="replica"):
        load("")


def test_a_prompt_has_a_length() -> None:
    with pytest.raises(ValueError, match="prompt_tokens"):
        route_once(ALONE, [], prompt_tokens=-1)


def test_shares_follow_the_plan_when_nothing_finishes() -> None:
    running: Counter[str] = Counter({"p1": 0, "p2": 0, "d1": 0, "d2": 0})
    for _ in range(200):
        loads = [load(peer, count, count) for peer, count in running.items()]
        found = route_once(TWO_BY_TWO, loads, prompt_tokens=1)
        assert found.prefill is not None
        running.update([found.prefill, found.decode])
    assert running["p1"] == pytest.approx(120, abs=10)
    assert running["d1"] == pytest.approx(100, abs=10)


@given(st.integers(1, 5000), st.floats(min_value=1e-9, max_value=1.0))
def test_the_split_is_a_share_of_the_prompt_in_whole_tokens(tokens: int, share: float) -> None:
    plan = plan_of({"p": P, "d": D}, {("p", "d"): 1.0})
    pairing = Pairing(prefill="p", decode="d", weight=1.0, prefill_share=share)
    found = route_once(msgspec.structs.replace(plan, pairings=(pairing,)), [], prompt_tokens=tokens)
    assert found.prefill == "p"
    assert 1 <= found.split <= tokens
    assert share * tokens <= found.split + 1e-6 * tokens
    assert found.split - 1 < share * tokens
    assert route_once(plan, [], prompt_tokens=tokens).split == tokens  # all of it, unless the plan says otherwise


def test_a_replica_that_reads_the_whole_prompt_itself_splits_nothing() -> None:
    assert route_once(ALONE, [], prompt_tokens=9).split == 0
    assert route_once(TWO_BY_TWO, [], prompt_tokens=9, exclude=frozenset({"p1", "p2"})).split == 0


counts = st.integers(min_value=0, max_value=50)
peers = st.sampled_from(["p1", "p2", "d1", "d2", "p", "d", "m", "stranger"])
reports = st.lists(
    st.builds(load, peers, counts, st.integers(0, 9000), st.integers(0, 300)), unique_by=lambda item: item.replica
)
plans = st.sampled_from([ALONE, TWO_BY_TWO, WITH_MIXED])


@given(plans, reports, st.frozensets(peers), st.integers(0, 400))
def test_excluded_boxes_are_never_used(plan: Plan, loads: list[Load], exclude: frozenset[str], tokens: int) -> None:
    try:
        found = route_once(plan, loads, prompt_tokens=tokens, exclude=exclude)
    except NoRoute:
        assert set(plan.peers) <= exclude
        return
    assert found.decode in set(plan.peers) - exclude
    assert found.prefill is None or found.prefill in set(plan.peers) - exclude
    assert found.prefill != found.decode
    assert route_once(plan, loads[::-1], prompt_tokens=tokens, exclude=exclude) == found


def plainly(
    plan: Plan,
    loads: list[Load],
    tokens: int,
    exclude: frozenset[str],
    sent: dict[tuple[str, str], float],
    settings: RoutingSettings,
    mean: float,
) -> tuple[str, str] | None:
    """The rule as one would say it: all candidates of the best kind that has any, the least of them. `sent`: how many
    of the latest requests each took; `mean`: tokens of their prompts, with this one's."""
    usable = {item.id: item for item in plan.replicas if exclude.isdisjoint(item.peers)}
    told = {load.replica: load for load in loads if load.replica in usable}
    busiest = max((load.outstanding for load in told.values()), default=0)
    longest = max((load.prefill_tokens for load in told.values()), default=0)
    requests = {name: 1 + (told[name].outstanding if name in told else busiest) for name in usable}
    to_prefill = {name: mean + (told[name].prefill_tokens if name in told else longest) for name in usable}
    unfit = {name: name in told and told[name].kv_free_tokens < tokens for name in usable}
    routes = {
        (pair.prefill, pair.decode): pair.weight
        for pair in plan.pairings
        if pair.weight and pair.prefill in usable and pair.decode in usable
    }
    for kinds in ((D, M), (P,)):
        routes = routes or {
            (name, name): sum(pair.weight for pair in plan.pairings if name in (pair.prefill, pair.decode))
            for name in usable
            if usable[name].phase in kinds
        }

    def beside_mean(queue: Mapping[str, float], end: int, name: str) -> float:
        share = sum(weight for route, weight in routes.items() if route[end] == name) / sum(routes.values())
        return queue[name] / share / sum(queue[other] for other in {route[end] for route in routes})

    latest = max(sum(sent.get(pair, 0.0) for pair in routes), settings.remembered_requests / 4)

    def beyond(pair: tuple[str, str]) -> float:
        if pair[0] == pair[1]:
            return 0.0
        return max(0.0, sent.get(pair, 0.0) / latest / (routes[pair] / sum(routes.values())) - settings.free_share)

    ranked = [
        (
            unfit[prefiller] + unfit[decoder],
            round(
                beside_mean(to_prefill, 0, prefiller)
                + beside_mean(requests, 1, decoder)
                + beyond((prefiller, decoder)),
                9,
            ),
            (prefiller, decoder),
        )
        for prefiller, decoder in routes
    ]
    return min(ranked)[2] if ranked else None


@pytest.mark.parametrize(
    ("settings", "busiest"),
    [
        (RoutingSettings(), 4),
        (RoutingSettings(remembered_requests=8, free_share=1.0), 1),
        (RoutingSettings(remembered_requests=2, free_share=1.2), 0),
    ],
)
def test_a_router_decides_as_the_rule_says_whatever_it_heard_before(settings: RoutingSettings, busiest: int) -> None:
    rng = random.Random(5)
    names = ["p1", "p2", "d1", "d2", "p", "d", "m", "stranger"]
    for plan in (ALONE, TWO_BY_TWO, WITH_MIXED):
        router, sent = Router(plan, settings), dict[tuple[str, str], float]()
        routed, mean = 0, 0.0
        for _ in range(200):
            told = rng.sample(names, rng.randint(0, len(names)))
            loads = [
                load(name, rng.randint(0, busiest), rng.randint(0, 250 * busiest), rng.choice((0, 100, 200)))
                for name in told
            ]
            exclude = frozenset(rng.sample(names, rng.choice((0, 0, 1, 2, 3))))
            tokens = rng.choice((1, 150, 250))
            router.report(loads)
            counted = min(routed + 1, settings.remembered_requests)
            with_this = mean + (tokens - mean) / counted
            expected = plainly(plan, loads, tokens, exclude, sent, settings, with_this)
            if expected is None:
                with pytest.raises(NoRoute):
                    router.route(tokens, exclude)
            else:
                found, routed, mean = router.route(tokens, exclude), counted, with_this
                assert (found.prefill or found.decode, found.decode) == expected
                sent = {pair: times * (1 - 1 / settings.remembered_requests) for pair, times in sent.items()}
                sent[expected] = sent.get(expected, 0.0) + 1.0


def test_idle_ends_of_a_thin_link_do_not_fill_it() -> None:
    shares = {("p1", "d1"): 0.49, ("p2", "d2"): 0.49, ("p1", "d2"): 0.02}
    router = Router(plan_of({"p1": P, "p2": P, "d1": D, "d2": D}, shares))
    router.report([load("p1"), load("d2"), load("p2", 5, 5000), load("d1", 5)])
    found = [router.route(1000) for _ in range(1000)]
    thin = sum((one.prefill, one.decode) == ("p1", "d2") for one in found)
    assert 20 <= thin <= 80
    assert router.route(1000, frozenset({"p2", "d1"})).decode == "d2"  # the only one left takes them all


def test_a_note_changes_one_replica_alone() -> None:
    router = Router(TWO_BY_TWO)
    router.report([load("p1"), load("p2"), load("d1"), load("d2")])
    assert router.route(1).decode == "d1"
    router.loads.note("d1", 5, 0, 10_000)
    assert router.route(1) == Route(prefill="p1", decode="d2", split=1)
    router.loads.note("d2", 0, 0, 0)  # the prompt would have to wait there
    assert router.route(1).decode == "d1"


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_prompt_counts_for_one_token_at_least(tokens: int) -> None:
    """1 over a quarter of the requests is 4; 3 more, over three quarters, 5.3."""
    plan = plan_of({"p1": P, "p2": P, "d": D}, {("p1", "d"): 0.25, ("p2", "d"): 0.75})
    assert route_once(plan, [load("p1"), load("p2", 0, 3), load("d")], prompt_tokens=tokens).prefill == "p1"
    assert route_once(plan, [load("p1"), load("p2", 0, 1), load("d")], prompt_tokens=tokens).prefill == "p2"


def test_alone_replicas_count_as_the_plan_says_and_one_without_a_share_as_the_least() -> None:
    """Idle ones are asked by their shares: 0.1, 0.3, 0.6 and, as the least, 0.1."""
    pairs = {("p1", "d1"): 0.1, ("p2", "d2"): 0.3, ("p1", "d3"): 0.6, ("p1", "d4"): 0.0}
    plan = plan_of({"p1": P, "p2": P, "d1": D, "d2": D, "d3": D, "d4": D}, pairs)
    alone = frozenset({"p1", "p2"})
    idle = {name: load(name) for name in ("d1", "d2", "d3", "d4")}
    order = []
    for _ in range(4):
        found = route_once(plan, idle.values(), prompt_tokens=1, exclude=alone)
        order.append(found.decode)
        idle[found.decode] = load(found.decode, 99, 99)
    assert order == ["d3", "d2", "d1", "d4"]


def test_requests_go_elsewhere_when_a_link_has_had_its_share() -> None:
    """Of four requests at least, half are the share of either: after three the first has had more, and then both are
    weighed by what they had of late."""
    router = Router(TWO_PAIRS, RoutingSettings(remembered_requests=16, free_share=1.0))
    router.report([load(name) for name in ("p1", "p2", "d1", "d2")])
    assert [router.route(1).prefill for _ in range(7)] == ["p1"] * 3 + ["p2"] * 3 + ["p1"]


def test_a_long_prompt_goes_where_a_short_one_would() -> None:
    """Queues of 300 and 100 tokens: with a prompt of 100 more, 667 beside 500 over their shares. With all of a long one
    it would be 7,167 beside 10,250, and each long prompt would go to the replica with the larger share."""
    plan = plan_of({"p1": P, "p2": P, "d": D}, {("p1", "d"): 0.6, ("p2", "d"): 0.4})
    router = Router(plan, RoutingSettings(free_share=1e3))  # links are not what this is about
    router.report([load("p1", 0, 300), load("p2", 0, 100), load("d")])
    assert {router.route(100).prefill for _ in range(60)} == {"p2"}
    assert router.route(4000).prefill == "p2"


# ---- prefixes ---------------------------------------------------------------------------------------------

MANY = plan_of(dict.fromkeys("abcd", M), {(name, name): 0.25 for name in "abcd"})


def decode_of(cached: Mapping[str, int], loads: Iterable[Load] = (), *, weight: float = 2.0, tokens: int = 1000) -> str:
    router = Router(MANY, RoutingSettings(prefix_weight=weight))
    router.report([*(load(name) for name in "abcd"), *loads])
    return router.route(tokens, cached_tokens=cached).decode


def test_a_request_goes_where_most_of_its_prompt_is_cached() -> None:
    assert decode_of({}) == "a"
    assert decode_of({"b": 200, "c": 800}) == "c"
    assert decode_of({"c": 800, "nobody": 10_000}) == "c"


def test_unless_too_much_waits_there() -> None:
    assert decode_of({"c": 800}, [load("c", to_prefill=500)]) == "c"
    assert decode_of({"c": 800}, [load("c", to_prefill=5000)]) == "a"


def test_without_a_weight_prefixes_do_not_count() -> None:
    assert decode_of({"c": 800}, weight=0.0) == "a"


def test_what_a_replica_is_said_to_hold_counts_for_no_more_than_the_prompt() -> None:
    """However much a replica claims, it draws no more than one prompt's worth of queue."""
    for claimed in (999, 10**9):
        assert decode_of({"d": claimed}, [load("d", to_prefill=1500)]) == "d"
        assert decode_of({"d": claimed}, [load("d", to_prefill=9000)]) == "a"


def test_a_split_request_goes_where_the_prefill_side_has_its_prefix() -> None:
    router = Router(TWO_BY_TWO, RoutingSettings(prefix_weight=2.0))
    router.report([load(name) for name in ("p1", "p2", "d1", "d2")])
    assert router.route(1000, cached_tokens={"p2": 900}).prefill == "p2"
    assert router.route(1000, cached_tokens={"d2": 900, "p1": 900}).prefill == "p1"


def test_a_route_says_how_much_of_the_prompt_is_found_where_its_beginning_is_computed() -> None:
    router = Router(TWO_BY_TWO, RoutingSettings(prefix_weight=2.0))
    router.report([load(name) for name in ("p1", "p2", "d1", "d2")])
    for cached, found in (({}, 0), ({"p2": 900}, 900), ({"p2": 2000}, 999), ({"d2": 900}, 0)):
        assert router.route(1000, cached_tokens=cached).found == found


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_prefix_weight_that_cannot_be_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="prefix_weight"):
        RoutingSettings(prefix_weight=weight)


def test_what_this_gateway_has_sent_since_a_report_counts_once_for_each_gateway() -> None:
    plan = plan_of({"a": Phase.MIXED, "b": Phase.MIXED}, {("a", "a"): 0.5, ("b", "b"): 0.5})
    loads = [msgspec.structs.replace(load("a", 1, 300), sent_tokens=300), load("b", 2, 500)]

    def route(gateways: float) -> str:
        router = Router(plan)
        router.report(loads, gateways)
        return router.route(100).decode

    assert (route(1.0), route(4.0)) == ("a", "b"), "four gateways have sent about 1,200 to a"
