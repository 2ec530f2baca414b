"""The policy `splitwise`: pools that follow from reports, for one gateway and for four."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from p2pserve.coordinator import Load, NoRoute, Pairing, Phase, Plan, PolicyError, Replica, Route, Router, Stage
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.coordinator.routing.splitwise import find_borrowed

LIMIT = 1000
SETTINGS = RoutingSettings(policy="splitwise", max_pending_tokens=LIMIT, answer_tokens=100)


def a_plan(phases: dict[str, Phase], pairs: list[tuple[str, str]]) -> Plan:
    return Plan(
        epoch=1,
        version=1,
        service="s",
        codec="kv4",
        why=(),
        replicas=tuple(
            Replica(id=name, phase=phase, stages=(Stage(peer=f"box-{name}", tp=1, first_layer=0, last_layer=4),))
            for name, phase in phases.items()
        ),
        pairings=tuple(Pairing(prefill=a, decode=b, weight=1 / len(pairs)) for a, b in pairs),
    )


PLAN = a_plan(
    {"p": Phase.PREFILL, "q": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE},
    [("p", "d"), ("p", "e"), ("q", "d"), ("q", "e")],
)


def load(replica: str, tokens: int = 0, requests: int = 0, decodes: int = 0, free: int = 10_000) -> Load:
    return Load(replica=replica, outstanding=requests, prefill_tokens=tokens, kv_free_tokens=free, decodes=decodes)


def a_router(*busy: Load, plan: Plan = PLAN) -> Router:
    router = Router(plan, SETTINGS)
    told = {item.replica: item for item in busy}
    router.report(told.get(item.id, load(item.id)) for item in plan.replicas)
    return router


def pair(prefill: str, decode: str, tokens: int = 300) -> Route:
    return Route(prefill=prefill, decode=decode, split=tokens)


def both(replica: str) -> Route:
    return Route(prefill=None, decode=replica)


def test_each_side_goes_to_its_shortest_queue() -> None:
    assert a_router().route(300) == pair("p", "d")
    assert a_router(load("p", 500, 1), load("d", 0, 3, 3)).route(300) == pair("q", "e")
    assert a_router(load("d", 0, 2, 2), load("e", 0, 2, 2, free=20_000)).route(300) == pair("p", "e")


def test_a_long_queue_of_prompts_borrows_a_token_machine_and_one_within_the_limit_does_not() -> None:
    full = [load("p", 701, 2), load("q", 900, 2)]
    assert a_router(*full, load("d", 0, 9, 9)).route(300) == both("e")
    assert a_router(load("p", 700, 2), full[1]).route(300) == pair("p", "d")
    assert a_router(*full).route(299) == pair("p", "d", 299)
    # an idle machine takes a prompt of any length
    assert a_router().route(5 * LIMIT) == pair("p", "d", 5 * LIMIT)


def test_a_borrowed_machine_is_asked_before_another_one_is_borrowed() -> None:
    full = [load("p", 900, 2), load("q", 900, 2)]
    borrowed = load("e", 400, 3, 3)
    assert a_router(*full, borrowed).route(300) == both("e")
    assert a_router(*full, load("e", 800, 3, 3)).route(300) == both("d"), "its queue is beyond the limit as well"


def test_a_borrowed_token_machine_gets_no_answers_of_others_until_its_prompts_are_computed() -> None:
    assert a_router(load("d", 400, 3, 3), load("e", 0, 8, 8)).route(300) == pair("p", "e")
    # a token to compute for each request whose KV comes from elsewhere makes no mixed machine of it
    assert a_router(load("d", 3, 3, 3), load("e", 0, 8, 8)).route(300) == pair("p", "d")


def test_full_memory_of_token_machines_borrows_a_prompt_machine_until_it_decodes_nothing() -> None:
    full = [load("d", 0, 9, 9, free=399), load("e", 0, 9, 9, free=399)]
    assert a_router(*full).route(300) == both("p")
    assert a_router(*full, load("p", 0, 1, 1)).route(300) == both("p"), "it is in the mixed pool: the first to be asked"
    assert a_router(load("p", 0, 1, 1)).route(300) == pair("q", "d"), "no prompts of others while it decodes"
    assert a_router(load("p", 0, 1, 0)).route(300) == pair("p", "d"), "at home: it has ended what it decoded"


def test_the_length_of_an_answer_counts_where_it_is_known() -> None:
    router = a_router(load("d", free=500), load("e", 0, 5, 5, free=2000))
    assert router.route(300) == pair("p", "d"), "100 tokens are supposed"
    assert router.route(300, output_tokens=200) == pair("p", "d")
    assert router.route(300, output_tokens=201) == pair("p", "e")


def test_pairs_are_those_of_the_plan() -> None:
    plan = a_plan(
        {name: item.phase for name, item in zip("pqde", PLAN.replicas, strict=True)}, [("p", "d"), ("q", "e")]
    )
    assert a_router(load("d", 0, 7, 7), plan=plan).route(300) == pair("p", "d")
    assert a_router(load("d", 0, 7, 7, free=10), plan=plan).route(300) == pair("q", "e")


def test_where_all_are_full_the_shortest_queue_of_all_takes_it() -> None:
    full = [load(name, 900 + place, 1, 1) for place, name in enumerate("qpde")]
    assert a_router(*full).route(300) == both("q")
    full[0] = load("q", 900, 1, 1, free=10)
    assert a_router(*full).route(300) == both("p"), "the one without memory last"


def test_a_mixed_replica_helps_out_and_serves_alone() -> None:
    phases = {item.id: item.phase for item in PLAN.replicas}
    plan = a_plan({**phases, "m": Phase.MIXED}, [("p", "d"), ("m", "m")])
    assert a_router(plan=plan).route(300) == pair("p", "d")
    assert a_router(load("p", 900, 1), load("q", 900, 1), plan=plan).route(300) == both("m")
    alone = a_plan({"m": Phase.MIXED, "n": Phase.MIXED}, [("m", "m"), ("n", "n")])
    assert a_router(load("m", 50, 1, 1), plan=alone).route(300) == both("n")


def test_what_is_excluded_gets_nothing_and_who_is_silent_is_taken_for_busy() -> None:
    router = a_router()
    assert router.route(300, frozenset({"box-p", "d"})) == pair("q", "e")
    assert router.route(300, frozenset({"p", "q"})) == both("d")
    assert router.route(300, frozenset({"d", "e"})) == both("p")
    with pytest.raises(NoRoute, match="no box can take a request for s"):
        router.route(300, frozenset("pqde"))
    router.report([load("q", 200, 1), load("d", 0, 2, 2), load("e", 0, 1, 1)])
    assert router.route(300) == pair("p", "e"), "as busy as q, and named first"
    router.report([load("q"), load("d"), load("e")])
    assert router.route(300) == pair("p", "d")


def test_limits_that_cannot_be() -> None:
    with pytest.raises(PolicyError, match=r"routing\.max_pending_tokens and routing\.answer_tokens"):
        RoutingSettings(max_pending_tokens=0)
    with pytest.raises(PolicyError, match="must be at least 1"):
        RoutingSettings(answer_tokens=0)


class Fleet:
    """Machines that compute `speed` prompt tokens a second, and gateways that hear of others' requests once a second,
    and of their own at once."""

    def __init__(self, gateways: int, speed: int = 800) -> None:
        self.routers = [Router(PLAN, SETTINGS) for _ in range(gateways)]
        self.speed = speed
        self.tokens = Counter[str]()
        self.answers: dict[str, list[int]] = {name: [] for name in "pqde"}  # seconds that each goes on for
        self.own: list[Counter[str]] = []
        self.report()

    def report(self) -> None:
        self.told = {name: (self.tokens[name], len(self.answers[name])) for name in "pqde"}
        self.own = [Counter() for _ in self.routers]

    def place(self, gateway: int, tokens: int = 300, seconds: int = 3) -> Route:
        own = self.own[gateway]
        loads = [
            msgspec.structs.replace(
                load(name, ahead + own[name], decodes + (own[name] > 0), decodes), sent_tokens=own[name]
            )
            for name, (ahead, decodes) in self.told.items()
        ]
        self.routers[gateway].report(loads, gateways=float(len(self.routers)))
        route = self.routers[gateway].route(tokens)
        first = route.prefill or route.decode
        own[first] += tokens
        self.tokens[first] += tokens
        self.answers[route.decode].append(seconds)
        return route

    def pass_second(self) -> None:
        for name in "pqde":
            self.tokens[name] = max(0, self.tokens[name] - self.speed)
            self.answers[name] = [left - 1 for left in self.answers[name] if left > 1]
        self.report()


@pytest.mark.parametrize("gateways", [1, 4])
def test_gateways_agree_on_the_pools_and_send_borrowed_machines_home(gateways: int) -> None:
    fleet = Fleet(gateways)
    burst = [fleet.place(number % gateways) for number in range(12)]
    assert {route.decode for route in burst if route.prefill is None}, "within the first second"
    fleet.pass_second()
    burst += [fleet.place(number % gateways) for number in range(12)]
    alone = {route.decode for route in burst if route.prefill is None}
    assert alone <= set("de"), "prompts queue: only token machines are borrowed"
    assert alone
    first = Counter(route.prefill or route.decode for route in burst)
    assert max(first.values()) <= 24 / 4 * 2, "a second of what others do is not known, and no machine drowns in it"
    fleet.pass_second()
    heard = set()
    for router in fleet.routers:
        router.report(load(name, ahead, decodes, decodes) for name, (ahead, decodes) in fleet.told.items())
        heard.add(router.route(300))
    assert len(heard) == 1, "after a report all gateways see the same pools"
    for _ in range(10):
        fleet.pass_second()
    assert {fleet.place(number % gateways).prefill for number in range(gateways)} <= {"p", "q"}


def test_what_this_gateway_has_sent_since_the_report_counts_once_for_each_gateway() -> None:
    busy = [msgspec.structs.replace(load(name, 300, 1), sent_tokens=300) for name in "pq"]
    assert a_router(*busy).route(300) == pair("p", "d"), "one gateway: 600 tokens"
    router = a_router()
    router.report([*busy, load("d"), load("e")], gateways=4.0)
    assert router.route(300) == both("d"), "four: about 1,500"
    router.report([load("p", 700, 2), load("q", 700, 2), load("d"), load("e")], gateways=4.0)
    assert router.route(300).prefill in ("p", "q"), "of what was reported nothing is guessed"


def test_gateways_that_hear_the_same_do_not_all_choose_the_same() -> None:
    """Between equal ones the first counts where there is one gateway; several draw lots."""
    alone, several = a_router(), a_router()
    several.report([load(name) for name in "pqde"], gateways=4.0)
    assert {alone.route(300) for _ in range(20)} == {pair("p", "d")}
    assert {several.route(300) for _ in range(40)} == {pair(one, two) for one in "pq" for two in "de"}
    several.report([load("p", 10, 1), load("q"), load("d", 0, 2, 2), load("e")], gateways=4.0)
    assert {several.route(300) for _ in range(20)} == {pair("q", "e")}, "a shorter queue counts before the lot"


def test_who_is_borrowed_is_told_by_the_reports_alone() -> None:
    router = a_router(load("p", 0, 1, 1), load("q", 900, 2), load("d", 400, 3, 3), load("e", 3, 3, 3))
    assert find_borrowed(PLAN, router.loads).tolist() == [True, False, True, False]
    assert not find_borrowed(PLAN, a_router().loads).any()
    silent = Router(PLAN, SETTINGS)
    assert not find_borrowed(PLAN, silent.loads).any()


@pytest.mark.parametrize("gateways", [1, 4])
def test_under_a_load_that_prompt_machines_carry_nobody_is_borrowed(gateways: int) -> None:
    """No flapping: without queues beyond the limit the pools stay as the plan has them."""
    fleet = Fleet(gateways)
    for _ in range(20):
        routes = [fleet.place(number % gateways) for number in range(4)]
        assert all(route.prefill is not None for route in routes)
        fleet.pass_second()
