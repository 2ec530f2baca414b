"""What replicas answer to claims on their pools, and gateways that route by that: one and four."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import Load, Pairing, Phase, Plan, Replica, Route, Router, Stage
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.coordinator.routing.pools import (
    LEASE_S,
    MOST_CLAIMS,
    PoolClaim,
    PoolClaims,
    PoolLimits,
    PoolState,
    Work,
    is_borrowed,
)

LIMIT, KV = 1000, 10_000
LIMITS = PoolLimits(LIMIT, 100)
SETTINGS = RoutingSettings(policy="splitwise", max_pending_tokens=LIMIT, answer_tokens=100)


def claim(work: Work, pool: Phase, tokens: int = 300, answer: int | None = None) -> PoolClaim:
    return PoolClaim(replica="r", work=work, pool=pool, prompt_tokens=tokens, answer_tokens=answer)


def state(pool: Phase, tokens: int = 0, requests: int = 0, decodes: int = 0, free: int = KV) -> PoolState:
    return PoolState(pool=pool, requests=requests, prefill_tokens=tokens, kv_free_tokens=free, decodes=decodes)


def accepts(asked: PoolClaim, present: PoolState) -> bool:
    return PoolClaims[str]().answer("a", asked, present, LIMITS, 0.0)[0]


@pytest.mark.parametrize(
    ("work", "taken_for", "accepted_in"),
    [
        (Work.PROMPT, Phase.PREFILL, {Phase.PREFILL}),
        (Work.PROMPT, Phase.MIXED, {Phase.PREFILL, Phase.MIXED}),
        (Work.PROMPT, Phase.DECODE, set(Phase)),
        (Work.TOKEN, Phase.DECODE, {Phase.DECODE}),
        (Work.TOKEN, Phase.MIXED, {Phase.DECODE, Phase.MIXED}),
        (Work.TOKEN, Phase.PREFILL, set(Phase)),
        (Work.BOTH, Phase.MIXED, {Phase.MIXED}),
        (Work.BOTH, Phase.DECODE, set(Phase)),
        (Work.BOTH, Phase.PREFILL, set(Phase)),
    ],
)
def test_a_machine_that_is_in_a_pool_asked_later_refuses(work: Work, taken_for: Phase, accepted_in: set[Phase]) -> None:
    assert {pool for pool in Phase if accepts(claim(work, taken_for), state(pool))} == accepted_in


def test_prompts_queue_up_to_the_limit() -> None:
    for work, pool in ((Work.PROMPT, Phase.PREFILL), (Work.BOTH, Phase.MIXED)):
        assert accepts(claim(work, pool), state(pool, 700, 2))
        assert not accepts(claim(work, pool), state(pool, 701, 2))
        assert accepts(claim(work, pool, 5 * LIMIT), state(pool)), "an idle machine takes any"
    assert accepts(claim(Work.TOKEN, Phase.DECODE), state(Phase.DECODE, 5000, 9, 9))


def test_prompt_and_answer_must_find_kv() -> None:
    for work, pool in ((Work.TOKEN, Phase.DECODE), (Work.BOTH, Phase.MIXED)):
        assert accepts(claim(work, pool), state(pool, free=400))
        assert not accepts(claim(work, pool), state(pool, free=399)), "100 tokens are supposed"
        assert accepts(claim(work, pool, answer=99), state(pool, free=399))
    assert accepts(claim(Work.PROMPT, Phase.PREFILL), state(Phase.PREFILL, free=0))


def test_claims_that_were_accepted_count_until_their_requests_are_here_or_do_not_come() -> None:
    claims, asked, present = PoolClaims[str](), claim(Work.PROMPT, Phase.PREFILL, 400), state(Phase.PREFILL, 100, 1)
    assert claims.answer("a", asked, present, LIMITS, 0.0) == (True, state(Phase.PREFILL, 500, 2))
    assert claims.answer("b", asked, present, LIMITS, 0.0) == (True, state(Phase.PREFILL, 900, 3))
    assert claims.answer("c", asked, present, LIMITS, 0.0) == (False, state(Phase.PREFILL, 900, 3))
    assert claims.answer("b", asked, present, LIMITS, 0.0)[0], "who asks again does not stand in its own way"
    claims.leave("a")
    assert claims.answer("c", asked, present, LIMITS, 1.0)[0]
    assert not claims.answer("d", asked, present, LIMITS, 1.0)[0]
    assert not claims.answer("d", asked, present, LIMITS, LEASE_S - 0.01)[0]
    assert claims.answer("d", asked, present, LIMITS, LEASE_S)[0], "b has not come"
    assert len(claims) == 2
    claims.leave("nobody")


def test_kv_of_claims_is_kept_for_them() -> None:
    claims, present = PoolClaims[str](), state(Phase.DECODE, free=1000)
    asked = claim(Work.TOKEN, Phase.DECODE)
    answers = [claims.answer(name, asked, present, LIMITS, 0.0) for name in "abc"]
    assert [accepted for accepted, _ in answers] == [True, True, False]
    assert answers[-1][1] == state(Phase.DECODE, 0, 2, 2, 200)


def test_which_pool_a_machine_is_in_follows_from_its_work_and_from_no_claim() -> None:
    assert is_borrowed(Phase.PREFILL, 1, 0, 1)
    assert not is_borrowed(Phase.PREFILL, 5, 900, 0)
    assert is_borrowed(Phase.DECODE, 3, 400, 3)
    assert not is_borrowed(Phase.DECODE, 3, 3, 3), "a token each for requests whose KV comes from elsewhere"
    assert not is_borrowed(Phase.MIXED, 3, 400, 3)
    claims, home = PoolClaims[int](), state(Phase.PREFILL)
    found = True
    for number in range(LIMIT // 10 + 5):  # a gateway that sends nothing
        found, said = claims.answer(number, claim(Work.BOTH, Phase.PREFILL, 10, 0), home, LIMITS, 0.0)
        assert said.pool is Phase.PREFILL
    assert not found
    assert len(claims) == LIMIT // 10
    assert claims.answer(-1, claim(Work.PROMPT, Phase.PREFILL), home, LIMITS, LEASE_S)[0]
    assert len(claims) == 1


def test_claims_beyond_the_most_are_refused_and_others_are_not() -> None:
    claims, idle = PoolClaims[int](), state(Phase.DECODE, free=1 << 40)
    asked = claim(Work.TOKEN, Phase.DECODE, 1, 0)
    found = [claims.answer(number, asked, idle, LIMITS, 0.0, "one")[0] for number in range(MOST_CLAIMS + 5)]
    assert sum(found) == MOST_CLAIMS
    assert claims.answer(-1, asked, idle, LIMITS, 0.0, "other")[0]
    claims.leave(0)
    assert claims.answer(-2, asked, idle, LIMITS, 0.0, "one")[0]


def test_who_says_how_much_it_expects_ahead_is_refused_where_there_is_more_whatever_the_pool() -> None:
    claims, busy = PoolClaims[str](), state(Phase.MIXED, 5 * LIMIT, 9, free=0)
    asked = msgspec.structs.replace(claim(Work.PROMPT, Phase.PREFILL), most_ahead=5 * LIMIT)
    assert claims.answer("a", asked, busy, LIMITS, 0.0) == (True, state(Phase.MIXED, 5 * LIMIT + 300, 10, free=0))
    assert claims.answer("b", asked, busy, LIMITS, 0.0) == (False, state(Phase.MIXED, 5 * LIMIT + 300, 10, free=0))
    assert claims.answer("a", asked, busy, LIMITS, 0.0)[0], "who asks again does not stand in its own way"
    claims.leave("a")
    assert claims.answer("b", asked, busy, LIMITS, 0.0)[0]


def test_bounds_of_what_is_said() -> None:
    good = msgspec.to_builtins(claim(Work.PROMPT, Phase.PREFILL))
    assert msgspec.convert(good, PoolClaim) == claim(Work.PROMPT, Phase.PREFILL)
    for field, wrong in (
        ("prompt_tokens", 0), ("prompt_tokens", 1 << 40), ("answer_tokens", -1), ("most_ahead", -1),
        ("most_ahead", 1 << 50), ("work", "all"), ("pool", "x"), ("replica", ""),
    ):  # fmt: skip
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**good, field: wrong}, PoolClaim)
    for field in ("requests", "prefill_tokens", "kv_free_tokens", "decodes"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**msgspec.to_builtins(state(Phase.MIXED)), field: -1}, PoolState)


PLAN = Plan(
    epoch=1, version=1, service="s", codec="kv4", why=(),
    replicas=tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=f"box-{name}", tp=1, first_layer=0, last_layer=4),))
        for name, phase in zip("pqde", (Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE), strict=True)
    ),
    pairings=tuple(Pairing(prefill=a, decode=b, weight=0.25) for a in "pq" for b in "de"),
)  # fmt: skip
HOMES = {replica.id: replica.phase for replica in PLAN.replicas}


class Machine:
    """Computes `speed` prompt tokens a second, and answers for 3 s each; the truth of its pool."""

    def __init__(self, home: Phase) -> None:
        self.home = home
        self.claims = PoolClaims[int]()
        self.prompts: list[list[int]] = []  # tokens left, and seconds of its answer here; 0: elsewhere
        self.answers: list[int] = []  # seconds left

    @property
    def state(self) -> PoolState:
        tokens = sum(left for left, _ in self.prompts)
        decodes = len(self.answers) + sum(seconds > 0 for _, seconds in self.prompts)
        requests = len(self.prompts) + len(self.answers)
        borrowed = is_borrowed(self.home, requests, tokens, decodes)
        return PoolState(
            pool=Phase.MIXED if borrowed else self.home,
            requests=requests, prefill_tokens=tokens, kv_free_tokens=KV - 400 * decodes, decodes=decodes,
        )  # fmt: skip

    def pass_second(self, speed: int) -> None:
        self.answers = [left - 1 for left in self.answers if left > 1]
        while speed and self.prompts:
            done = min(speed, self.prompts[0][0])
            self.prompts[0][0] -= done
            speed -= done
            if not self.prompts[0][0]:
                _, seconds = self.prompts.pop(0)
                self.answers += [seconds] if seconds else []


class Fleet:
    """Four machines, and gateways that hear of others' requests by a report each second and by answers to claims."""

    def __init__(self, gateways: int, speed: int = 800) -> None:
        self.routers = [Router(PLAN, SETTINGS, rng=np.random.default_rng(number)) for number in range(gateways)]
        self.machines = {name: Machine(home) for name, home in HOMES.items()}
        self.speed = speed
        self.requests = self.refusals = 0
        self.report()

    def report(self) -> None:
        heard = {name: machine.state for name, machine in self.machines.items()}
        self.heard = [dict(heard) for _ in self.routers]

    def place(self, gateway: int, tokens: int = 300) -> Route:
        """A request comes, is routed, and arrives before another one comes."""
        route = self.claim(gateway, tokens)
        self.arrive(route, tokens)
        return route

    def claim(self, gateway: int, tokens: int = 300) -> Route:
        """Ask until nobody refuses."""
        self.requests += 1
        router, heard, answers = self.routers[gateway], self.heard[gateway], dict[PoolClaim, bool]()
        while True:
            loads = [
                Load(
                    replica=name, outstanding=each.requests, prefill_tokens=each.prefill_tokens,
                    kv_free_tokens=each.kv_free_tokens, decodes=each.decodes, told=each,
                )
                for name, each in heard.items()
            ]  # fmt: skip
            router.report(loads, gateways=float(len(self.routers)))
            route = router.route(tokens, answers=answers)
            for asked in route.claims:
                if asked not in answers:
                    machine = self.machines[asked.replica]
                    answers[asked], heard[asked.replica] = machine.claims.answer(
                        self.requests, asked, machine.state, LIMITS, 0.0
                    )
                    self.refusals += not answers[asked]
            if all(answers[asked] for asked in route.claims):
                for machine in self.machines.values():
                    machine.claims.leave(self.requests)
                return route

    def arrive(self, route: Route, tokens: int = 300) -> None:
        if route.prefill is None:
            self.machines[route.decode].prompts.append([tokens, 3])
        else:
            self.machines[route.prefill].prompts.append([tokens, 0])
            self.machines[route.decode].answers.append(3)

    def pass_second(self) -> None:
        for machine in self.machines.values():
            machine.pass_second(self.speed)
        self.report()


@pytest.mark.parametrize("gateways", [1, 4])
def test_no_limit_is_passed_by_whoever_is_asked_and_machines_go_home(gateways: int) -> None:
    fleet = Fleet(gateways)
    for count in (12, 8, 8):
        for number in range(count):
            before = {name: machine.state for name, machine in fleet.machines.items()}
            route = fleet.place(number % gateways)
            assert route.claims, "none is left over"
            first = before[route.prefill or route.decode]
            assert first.prefill_tokens == 0 or first.prefill_tokens + 300 <= LIMIT
            if route.prefill is None:
                queues = [before[name].prefill_tokens for name in "pq"]
                assert min(queues) + 300 > LIMIT, "no machine is borrowed while prompt machines have room"
        fleet.pass_second()
    borrowed = {name for name, machine in fleet.machines.items() if machine.state.pool is not HOMES[name]}
    assert borrowed <= set("de"), "prompts queue: only token machines are borrowed"
    assert borrowed
    while any(machine.prompts for machine in fleet.machines.values()):
        fleet.pass_second()
    assert [machine.state.pool for machine in fleet.machines.values()] == list(HOMES.values()), "with answers to write"
    assert {fleet.place(number % gateways).prefill for number in range(gateways)} <= {"p", "q"}


def test_four_gateways_borrow_just_as_one_does() -> None:
    """Each request at the same moment as with one gateway; of others' requests nothing is reported."""
    fleets = {gateways: Fleet(gateways) for gateways in (1, 4)}
    kinds = {
        gateways: [fleet.place(number % gateways).prefill is None for number in range(14)]
        for gateways, fleet in fleets.items()
    }
    assert kinds[1] == kinds[4]
    assert Counter(kinds[1]) == {False: 6, True: 8}
    assert fleets[1].refusals == 0, "who knows all is not refused"
    assert 0 < fleets[4].refusals <= 14, "a round trip each"


@pytest.mark.parametrize("gateways", [1, 4])
def test_under_a_load_that_prompt_machines_carry_nobody_is_borrowed(gateways: int) -> None:
    """No flapping: without queues beyond the limit the pools stay as the plan has them."""
    fleet = Fleet(gateways)
    for _ in range(20):
        routes = [fleet.place(number % gateways) for number in range(4)]
        assert all(route.prefill is not None for route in routes)
        fleet.pass_second()


def test_a_release_that_asks_nobody_is_counted_when_its_requests_are_here() -> None:
    fleet = Fleet(1)
    for _ in range(3):
        fleet.arrive(Route(prefill="p", decode="d"))
        fleet.arrive(Route(prefill="q", decode="d"))
    assert fleet.place(0).prefill is None
    assert fleet.refusals == 2


@pytest.mark.parametrize("seed", range(20))
def test_gateways_that_ask_at_the_same_time_do_not_pass_a_limit_together(seed: int) -> None:
    """Claims and arrivals in any order: a queue that was within the limit stays so."""
    rng = random.Random(seed)
    claims, here, coming = PoolClaims[int](), 0, dict[int, int]()
    for number in range(200):
        if coming and rng.random() < 0.5:
            request = rng.choice(list(coming))
            tokens = coming.pop(request)
            claims.leave(request)
            here += tokens if rng.random() < 0.8 else 0
        elif here and rng.random() < 0.3:
            here = 0
        tokens = rng.randint(1, 400)
        asked = msgspec.structs.replace(claim(Work.PROMPT, Phase.PREFILL), prompt_tokens=tokens)
        if claims.answer(number, asked, state(Phase.PREFILL, here), LIMITS, 0.0)[0]:
            coming[number] = tokens
        assert here + sum(coming.values()) <= LIMIT
