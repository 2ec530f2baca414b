"""The policy `splitwise`: pools that follow from reports, for one gateway and for four."""

from __future__ import annotations

import msgspec
import pytest

from p2pserve.coordinator import Load, NoRoute, Pairing, Phase, Plan, PolicyError, Replica, Route, Router, Stage
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.coordinator.routing.pools import MOST_REFUSALS, PoolClaim, PoolState, Work
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


def choose(
    router: Router, tokens: int, exclude: frozenset[str] = frozenset(), *, output_tokens: int | None = None
) -> Route:
    """Without what its replicas are asked."""
    return msgspec.structs.replace(router.route(tokens, exclude, output_tokens=output_tokens), claims=())


def pair(prefill: str, decode: str, tokens: int = 300) -> Route:
    return Route(prefill=prefill, decode=decode, split=tokens)


def both(replica: str) -> Route:
    return Route(prefill=None, decode=replica)


def test_each_side_goes_to_its_shortest_queue() -> None:
    assert choose(a_router(), 300) == pair("p", "d")
    assert choose(a_router(load("p", 500, 1), load("d", 0, 3, 3)), 300) == pair("q", "e")
    assert choose(a_router(load("d", 0, 2, 2), load("e", 0, 2, 2, free=20_000)), 300) == pair("p", "e")


def test_a_long_queue_of_prompts_borrows_a_token_machine_and_one_within_the_limit_does_not() -> None:
    full = [load("p", 701, 2), load("q", 900, 2)]
    assert choose(a_router(*full, load("d", 0, 9, 9)), 300) == both("e")
    assert choose(a_router(load("p", 700, 2), full[1]), 300) == pair("p", "d")
    assert choose(a_router(*full), 299) == pair("p", "d", 299)
    # an idle machine takes a prompt of any length
    assert choose(a_router(), 5 * LIMIT) == pair("p", "d", 5 * LIMIT)


def test_a_borrowed_machine_is_asked_before_another_one_is_borrowed() -> None:
    full = [load("p", 900, 2), load("q", 900, 2)]
    borrowed = load("e", 400, 3, 3)
    assert choose(a_router(*full, borrowed), 300) == both("e")
    assert choose(a_router(*full, load("e", 800, 3, 3)), 300) == both("d"), "its queue is beyond the limit as well"


def test_a_borrowed_token_machine_gets_no_answers_of_others_until_its_prompts_are_computed() -> None:
    assert choose(a_router(load("d", 400, 3, 3), load("e", 0, 8, 8)), 300) == pair("p", "e")
    # a token to compute for each request whose KV comes from elsewhere makes no mixed machine of it
    assert choose(a_router(load("d", 3, 3, 3), load("e", 0, 8, 8)), 300) == pair("p", "d")


def test_full_memory_of_token_machines_borrows_a_prompt_machine_until_it_decodes_nothing() -> None:
    full = [load("d", 0, 9, 9, free=399), load("e", 0, 9, 9, free=399)]
    assert choose(a_router(*full), 300) == both("p")
    assert choose(a_router(*full, load("p", 0, 1, 1)), 300) == both("p"), (
        "it is in the mixed pool: the first to be asked"
    )
    assert choose(a_router(load("p", 0, 1, 1)), 300) == pair("q", "d"), "no prompts of others while it decodes"
    assert choose(a_router(load("p", 0, 1, 0)), 300) == pair("p", "d"), "at home: it has ended what it decoded"


def test_the_length_of_an_answer_counts_where_it_is_known() -> None:
    router = a_router(load("d", free=500), load("e", 0, 5, 5, free=2000))
    assert choose(router, 300) == pair("p", "d"), "100 tokens are supposed"
    assert choose(router, 300, output_tokens=200) == pair("p", "d")
    assert choose(router, 300, output_tokens=201) == pair("p", "e")


def test_pairs_are_those_of_the_plan() -> None:
    plan = a_plan(
        {name: item.phase for name, item in zip("pqde", PLAN.replicas, strict=True)}, [("p", "d"), ("q", "e")]
    )
    assert choose(a_router(load("d", 0, 7, 7), plan=plan), 300) == pair("p", "d")
    assert choose(a_router(load("d", 0, 7, 7, free=10), plan=plan), 300) == pair("q", "e")


def test_where_all_are_full_the_shortest_queue_of_all_takes_it() -> None:
    full = [load(name, 900 + place, 1, 1) for place, name in enumerate("qpde")]
    assert choose(a_router(*full), 300) == both("q")
    full[0] = load("q", 900, 1, 1, free=10)
    assert choose(a_router(*full), 300) == both("p"), "the one without memory last"


def test_a_mixed_replica_helps_out_and_serves_alone() -> None:
    phases = {item.id: item.phase for item in PLAN.replicas}
    plan = a_plan({**phases, "m": Phase.MIXED}, [("p", "d"), ("m", "m")])
    assert choose(a_router(plan=plan), 300) == pair("p", "d")
    assert choose(a_router(load("p", 900, 1), load("q", 900, 1), plan=plan), 300) == both("m")
    alone = a_plan({"m": Phase.MIXED, "n": Phase.MIXED}, [("m", "m"), ("n", "n")])
    assert choose(a_router(load("m", 50, 1, 1), plan=alone), 300) == both("n")


def test_what_is_excluded_gets_nothing_and_who_is_silent_is_taken_for_busy() -> None:
    router = a_router()
    assert choose(router, 300, frozenset({"box-p", "d"})) == pair("q", "e")
    assert choose(router, 300, frozenset({"p", "q"})) == both("d")
    assert choose(router, 300, frozenset({"d", "e"})) == both("p")
    with pytest.raises(NoRoute, match="no box can take a request for s"):
        choose(router, 300, frozenset("pqde"))
    router.report([load("q", 200, 1), load("d", 0, 2, 2), load("e", 0, 1, 1)])
    assert choose(router, 300) == pair("p", "e"), "as busy as q, and named first"
    router.report([load("q"), load("d"), load("e")])
    assert choose(router, 300) == pair("p", "d")


def test_limits_that_cannot_be() -> None:
    with pytest.raises(PolicyError, match=r"routing\.max_pending_tokens and routing\.answer_tokens"):
        RoutingSettings(max_pending_tokens=0)
    with pytest.raises(PolicyError, match="must be at least 1"):
        RoutingSettings(answer_tokens=0)


def test_what_this_gateway_has_sent_since_the_report_counts_once_for_each_gateway_among_those_within_the_limit() -> (
    None
):
    p, q, d, e = load("p", 300, 1), load("q", 450, 1), load("d"), load("e")
    router = a_router()
    router.report([msgspec.structs.replace(p, sent_tokens=100), q, d, e])
    assert choose(router, 300).prefill == "p"
    router.report([msgspec.structs.replace(p, sent_tokens=100), q, d, e], gateways=4.0)
    assert choose(router, 300).prefill == "q", "with others' requests, p has about 600 tokens"
    full = [msgspec.structs.replace(each, prefill_tokens=700, sent_tokens=600) for each in (p, q)]
    router.report([*full, d, e], gateways=4.0)
    assert choose(router, 300).prefill in ("p", "q"), "nobody is borrowed by a guess: the machine knows"


def test_gateways_that_hear_the_same_do_not_all_choose_the_same() -> None:
    """Between equal ones the first counts where there is one gateway; several draw lots."""
    alone, several = a_router(), a_router()
    several.report([load(name) for name in "pqde"], gateways=4.0)
    assert {choose(alone, 300) for _ in range(20)} == {pair("p", "d")}
    assert {choose(several, 300) for _ in range(40)} == {pair(one, two) for one in "pq" for two in "de"}
    several.report([load("p", 10, 1), load("q"), load("d", 0, 2, 2), load("e")], gateways=4.0)
    assert {choose(several, 300) for _ in range(20)} == {pair("q", "e")}, "a shorter queue counts before the lot"


def test_who_is_borrowed_is_told_by_the_reports_alone() -> None:
    router = a_router(load("p", 0, 1, 1), load("q", 900, 2), load("d", 400, 3, 3), load("e", 3, 3, 3))
    assert find_borrowed(PLAN, router.loads).tolist() == [True, False, True, False]
    assert not find_borrowed(PLAN, a_router().loads).any()
    silent = Router(PLAN, SETTINGS)
    assert not find_borrowed(PLAN, silent.loads).any()


def claim(replica: str, work: Work, pool: Phase, tokens: int = 300) -> PoolClaim:
    return PoolClaim(replica=replica, work=work, pool=pool, prompt_tokens=tokens)


def test_a_route_says_what_its_replicas_are_asked() -> None:
    p, d = claim("p", Work.PROMPT, Phase.PREFILL), claim("d", Work.TOKEN, Phase.DECODE)
    assert a_router().route(300).claims == (p, d)
    full = [load("p", 900, 2), load("q", 900, 2)]
    assert a_router(*full).route(300).claims == (claim("d", Work.BOTH, Phase.DECODE),), "to be borrowed"
    assert a_router(*full, load("e", 400, 3, 3)).route(300).claims == (claim("e", Work.BOTH, Phase.MIXED),)
    everywhere = [load(name, 900, 1, 1) for name in "pqde"]
    assert a_router(*everywhere).route(300).claims == (), "it has to go somewhere"


def test_who_has_refused_is_not_asked_again_and_who_has_accepted_is_kept() -> None:
    router = a_router(load("q", 100, 1), load("e", 0, 1, 1))
    p, d = router.route(300).claims
    found = router.route(300, answers={p: False, d: True})
    assert found.prefill == "q"
    assert found.claims[1] == d
    found = router.route(300, answers={p: True, d: False})
    assert (found.prefill, found.decode) == ("p", "e")
    # by its own report p is beyond its limit now, with this request in it
    router.report([load("p", 900, 3), load("q"), load("d"), load("e")])
    assert router.route(300, answers={p: True, d: False}).prefill == "p"


def told_as(report: Load, pool: Phase, tokens: int = 0, free: int = 10_000) -> Load:
    """What it has reported, and has answered since."""
    told = PoolState(pool=pool, requests=0, prefill_tokens=tokens, kv_free_tokens=free, decodes=0)
    return msgspec.structs.replace(report, told=told)


def test_a_refusal_corrects_what_the_gateway_takes_the_machine_for() -> None:
    router = a_router()
    router.report([told_as(load("d"), Phase.MIXED), load("e", 0, 9, 9), load("p"), load("q")])
    assert choose(router, 300) == pair("p", "e"), "d says that it is borrowed"
    assert find_borrowed(PLAN, router.loads).tolist() == [False, False, True, False]
    router.report([told_as(load("d", 400, 3, 3), Phase.DECODE), load("e", 0, 9, 9), load("p")])
    assert choose(router, 300).decode == "d", "it is back at home"
    router.report([told_as(load("p"), Phase.PREFILL, 800), load("q", 600, 2), load("d"), load("e")])
    assert choose(router, 300).prefill == "q", "p has no room"
    router.report([load("p"), load("q"), told_as(load("d"), Phase.DECODE, free=300), load("e", 0, 9, 9)])
    assert choose(router, 300).decode == "e", "d has no memory"


def test_tries_are_bounded_and_then_the_shortest_queue_of_all_is_not_asked() -> None:
    router, answers = a_router(), dict[PoolClaim, bool]()
    rounds = 0
    while (route := router.route(300, answers=answers)).claims:
        answers |= dict.fromkeys(route.claims, False)
        rounds += 1
    assert rounds <= MOST_REFUSALS
    assert MOST_REFUSALS <= len(answers) <= MOST_REFUSALS + 1
    assert route == both("p")
