"""Gateways that route by predicted times, and ask a replica for a place where there are several of them."""

from __future__ import annotations

from p2pserve.coordinator import Phase, Plan, Route, Router
from p2pserve.coordinator.routing.pools import MOST_REFUSALS, PoolClaim, PoolState, Work
from p2pserve.coordinator.routing.predicted import PredictedTimes

from .test_predicted import PAIRS, TWO, D, M, P, plan_of, router_of

SENT = 2000  # tokens of prompts that this gateway has sent everywhere since the last reports
FEW = 300  # so few that replicas of another phase are not lent


def among_four(plan: Plan = TWO, round_trip_s: float = 0.0, sent: int = SENT) -> Router:
    """A gateway of four, by whose reports every replica has some prompts to compute."""
    router = router_of(plan)
    router.loads.gateways = 4.0
    router.loads.round_trip_s[:] = round_trip_s
    for replica in plan.replicas:
        router.loads.note(replica.id, 2, sent, 100_000, decodes=0, sent_tokens=sent)
    return router


def refuse(router: Router, claim: PoolClaim, tokens: int, answers: dict[PoolClaim, bool]) -> None:
    """The replica has so many tokens of prompts to compute."""
    state = PoolState(pool=claim.pool, requests=9, prefill_tokens=tokens, kv_free_tokens=90_000, decodes=0)
    router.loads.told[router.loads.index[claim.replica]] = state
    answers[claim] = False


def test_a_lone_gateway_asks_nobody_and_one_of_several_who_computes_the_prompt() -> None:
    alone = among_four()
    alone.loads.gateways = 1.0
    assert alone.route(500, request="a").claims == ()
    (claim,) = among_four().route(500, request="a").claims
    assert (claim.work, claim.pool, claim.prompt_tokens) == (Work.BOTH, M, 500)
    assert claim.most_ahead == 4 * SENT, "others are taken for as busy"
    route = among_four(PAIRS, sent=FEW).route(500, request="a")
    (claim,) = route.claims
    assert (claim.replica, claim.work, claim.pool) == (route.prefill, Work.PROMPT, P)


def test_what_is_cached_does_not_count_as_to_be_computed() -> None:
    (claim,) = among_four().route(500, request="a", cached_tokens={"a": 400, "b": 400}).claims
    assert claim.prompt_tokens == 100


def test_nobody_is_asked_over_links_that_take_as_long_as_there_is_to_win() -> None:
    """8,000 tokens at 10,000 a second, which count twice."""
    assert among_four(round_trip_s=0.2).route(500, request="a").claims
    assert not among_four(round_trip_s=0.5).route(500, request="a").claims


def test_after_a_refusal_the_replica_counts_as_it_has_said_and_is_not_asked_again() -> None:
    router, answers = among_four(), dict[PoolClaim, bool]()
    first = router.route(500, request="a").claims[0]
    other = {"a": "b", "b": "a"}[first.replica]
    refuse(router, first, 4 * SENT + 1000, answers)
    (second,) = router.route(500, request="a", answers=answers).claims
    assert second.replica == other
    refuse(router, second, 20 * SENT, answers)
    assert router.route(500, request="a", answers=answers) == Route(prefill=None, decode=first.replica)
    assert {router.route(500, request=number).decode for number in range(8)} == {first.replica}, "it knows by now"


def test_a_replica_that_says_that_it_has_less_than_was_guessed_is_taken_for_that() -> None:
    """For this request; for others its report counts, and the guess."""
    router, answers = among_four(), dict[PoolClaim, bool]()
    claim = PoolClaim(replica="b", work=Work.BOTH, pool=M, prompt_tokens=500, most_ahead=0)
    refuse(router, claim, 100, answers)
    assert router.route(500, request="a", answers=answers) == Route(prefill=None, decode="b")


def test_a_request_is_refused_a_bounded_number_of_times() -> None:
    plan = plan_of({f"r{number}": M for number in range(9)})
    router, answers = among_four(plan), dict[PoolClaim, bool]()
    while claims := router.route(500, request="a", answers=answers).claims:
        refuse(router, claims[0], 20 * SENT, answers)
    assert len({claim.replica for claim in answers}) == len(answers) == MOST_REFUSALS


def test_an_answer_about_a_replica_that_is_not_in_the_plan_is_no_matter() -> None:
    claim = PoolClaim(replica="gone", work=Work.BOTH, pool=Phase.MIXED, prompt_tokens=500, most_ahead=0)
    assert among_four().route(500, request="a", answers={claim: False}).decode in ("a", "b")


def test_a_route_that_was_refused_counts_for_no_share_and_no_prompt() -> None:
    plan = plan_of({"p": P, "d": D, "e": D}, {("p", "d"): 0.5, ("p", "e"): 0.5})
    router, other = among_four(plan, sent=FEW), among_four(plan, sent=FEW)
    assert isinstance(router.policy, PredictedTimes)
    assert isinstance(other.policy, PredictedTimes)
    answers = dict[PoolClaim, bool]()
    refuse(router, router.route(500, request="a").claims[0], 4 * FEW + 100, answers)
    assert router.policy._computed.sum() == 500
    router.route(500, request="a", answers=answers)
    other.route(500, request="a")
    assert router.policy._computed.sum() == other.policy._computed.sum() == 500
    assert router.policy.routed == other.policy.routed == 1
    router.end_request("a", 5)
    assert not router.policy._asked
