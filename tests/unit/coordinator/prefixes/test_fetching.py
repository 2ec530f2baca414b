"""When the KV of a prompt's beginning comes from another replica, and when it is computed."""

from collections.abc import Sequence
from functools import partial

import pytest

from p2pserve.coordinator.capacity import LinkView
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.prefixes.fetching import (
    LEAST_TOKENS,
    MAX_SOURCES,
    OVERHEAD_S,
    KvLinks,
    OpenFetches,
    PrefixFetch,
    choose_fetch,
    list_sources,
    route_fetch,
)
from p2pserve.coordinator.prefixes.knowledge import ExpectedPrefill, PrefixKnowledge
from p2pserve.coordinator.prefixes.trust import FORGET_S, HitTrust
from p2pserve.coordinator.routing.interface import ReplicaLoads, Route

TOKEN_S = 1e-4
GIGABITS = 1e-4  # of a token: at 1 Gb/s it takes as long to send as to compute


def links(gbps: float = 10.0, **others: float) -> KvLinks:
    """All at one rate, but for those from the replicas that are named."""

    def between(source: str, target: str) -> LinkView | None:
        rate = others.get(source, gbps)
        return LinkView(source=source, target=target, rtt_s=0.01, gbps=rate) if rate >= 0.0 else None

    return KvLinks(GIGABITS, between)


def choose(
    held: dict[str, int], kv: KvLinks, *, share: float = 1.0, under_way: OpenFetches | None = None, prompt: int = 20_000
) -> PrefixFetch | None:
    return choose_fetch(
        prompt, "here", held, token_s=TOKEN_S, links=kv, under_way=under_way or OpenFetches(), share=share
    )


def test_what_is_sent_sooner_than_computed_is_fetched() -> None:
    assert choose({"a": 10_000}, links(10.0)) == PrefixFetch("a", 10_000, 10_000)
    assert choose({"a": 10_000}, links(1.0)) is None
    assert choose({"a": 10_000, "here": 4_000}, links(10.0)) == PrefixFetch("a", 10_000, 6_000)


@pytest.mark.parametrize("held", [{}, {"here": 9_000}, {"here": 9_000, "a": 9_000}, {"here": 9_000, "a": 4_000}])
def test_nothing_is_fetched_where_nobody_holds_more(held: dict[str, int]) -> None:
    assert choose(held, links()) is None


def test_a_short_prefix_is_computed_in_the_time_of_the_messages() -> None:
    shortest = OVERHEAD_S / TOKEN_S
    assert choose({"a": int(0.9 * shortest)}, links(1e6)) is None
    assert choose({"a": int(1.3 * shortest)}, links(1e6)) is not None


def test_a_few_tokens_are_computed_however_slow_that_is() -> None:
    for tokens, fetched in ((LEAST_TOKENS - 1, False), (LEAST_TOKENS, True)):
        found = choose_fetch(
            20_000, "here", {"a": tokens}, token_s=1.0, links=links(), under_way=OpenFetches(), share=1.0
        )
        assert (found is not None) == fetched


def test_the_share_says_how_much_sooner_it_must_be() -> None:
    assert choose({"a": 10_000}, links(2.0), share=1.0) is not None
    assert choose({"a": 10_000}, links(2.0), share=0.5) is None
    assert choose({"a": 10_000}, links(2.0), share=0.0) is None
    assert choose({"a": 10_000}, links(0.5), share=4.0) is not None


@pytest.mark.parametrize("gbps", [0.0, -1.0])
def test_without_a_link_nothing_is_fetched(gbps: float) -> None:
    assert choose({"a": 10_000}, links(gbps), share=1e9) is None


def test_the_holder_is_taken_whose_kv_saves_most() -> None:
    held = {"more": 12_000, "near": 10_000}
    assert choose(held, links(10.0)) == PrefixFetch("more", 12_000, 12_000)
    assert choose(held, links(10.0, more=1.5)) == PrefixFetch("near", 10_000, 10_000)


def test_what_is_under_way_has_to_come_first() -> None:
    under_way = OpenFetches()
    for number in range(7):
        under_way.begin(number, "there", PrefixFetch("a", 10_000, 10_000))
    assert choose({"a": 10_000}, links(10.0), under_way=under_way) is not None
    under_way.begin(8, "here", PrefixFetch("b", 90_000, 90_000))
    assert choose({"a": 10_000}, links(10.0), under_way=under_way) is None
    under_way.end(8)
    under_way.end(8)
    under_way.begin(0, "there", PrefixFetch("a", 90_000, 90_000))  # another attempt of that request
    assert choose({"a": 10_000}, links(10.0), under_way=under_way) is None
    for number in range(8):
        under_way.end(number)
    assert under_way.tokens_beside("a", "here") == 0


@pytest.mark.parametrize("claimed", [9_999, 10_000, 10**9])
def test_a_replica_cannot_name_more_than_the_prompt_and_the_last_token_is_computed(claimed: int) -> None:
    fetch = choose({"a": claimed}, links(), prompt=10_000)
    assert fetch == PrefixFetch("a", 9_999, 9_999)
    assert route_fetch(Route(prefill=None, decode="here"), fetch, 10_000) == Route(
        prefill="a", decode="here", split=9_999, cached=9_999
    )


def test_a_holder_prefills_one_token_more_than_it_has() -> None:
    route = route_fetch(Route(prefill=None, decode="here"), PrefixFetch("a", 512, 512), 10_000)
    assert (route.prefill, route.decode, route.split, route.cached) == ("a", "here", 513, 512)


# ---- who may send, and receive ------------------------------------------------------------------------------


def plan_of(**stages: int) -> Plan:
    """A mixed replica of so many boxes each, and one that only decodes."""
    replicas = [
        Replica(
            id=name,
            phase=Phase.DECODE if name == "decode" else Phase.MIXED,
            stages=tuple(
                Stage(peer=f"{name}{at}", tp=1, first_layer=at * 2 // count, last_layer=(at + 1) * 2 // count)
                for at in range(count)
            ),
        )
        for name, count in stages.items()
    ]
    pairings = (Pairing(prefill="here", decode="here", weight=1.0),)
    return Plan(epoch=1, version=1, service="chat", replicas=tuple(replicas), pairings=pairings, codec="kv4", why=())


def sources(
    plan: Plan, named: dict[str, int], *, route: Route | None = None, excluded: Sequence[str] = (), free: int = 10**6
) -> list[str]:
    loads = ReplicaLoads(replica.id for replica in plan.replicas)
    loads.note("here", 0, 0, free)
    return list_sources(
        plan,
        route or Route(prefill=None, decode="here"),
        named,
        excluded=frozenset(excluded),
        loads=loads,
        prompt_tokens=1000,
    )


def test_those_that_hold_more_may_send_the_ones_with_most_first() -> None:
    plan = plan_of(here=1, a=1, b=1, c=1)
    assert sources(plan, {"here": 100, "a": 100, "b": 200, "c": 300, "gone": 900}) == ["c", "b"]
    many = plan_of(here=1, **{f"r{number}": 1 for number in range(20)})
    assert len(sources(many, {f"r{number}": 100 for number in range(20)})) == MAX_SOURCES


def test_whoever_is_avoided_is_not_asked() -> None:
    plan = plan_of(here=1, a=1, b=1)
    assert sources(plan, {"a": 100, "b": 200}, excluded=["b"]) == ["a"]
    assert sources(plan, {"a": 100, "b": 200}, excluded=["b0"]) == ["a"]


def test_only_replicas_of_one_box_that_prefill_exchange_prefixes() -> None:
    plan = plan_of(here=1, a=2, decode=1)
    assert sources(plan, {"a": 100, "decode": 100}) == []
    assert sources(plan_of(here=2, a=1), {"a": 100}) == []
    assert sources(plan_of(here=1, a=1), {"a": 100}, route=Route(prefill="a", decode="here", split=5)) == []


def test_a_replica_without_room_for_the_prompt_receives_nothing() -> None:
    assert sources(plan_of(here=1, a=1), {"a": 100}, free=999) == []


# ---- whether it was worth it ----------------------------------------------------------------------------------


def observe(trust: HitTrust, seconds: float, now: float = 0.0, times: int = 1) -> None:
    for _ in range(times):
        trust.observe_fetch("here", "a", tokens=10_000, fetched=8_000, seconds=seconds, now=now)


def test_a_source_whose_kv_saves_nothing_is_not_asked_until_that_is_forgotten() -> None:
    trust = HitTrust()
    trust.observe("here", tokens=10_000, named=0, seconds=1.0)
    observe(trust, 0.3, times=9)
    assert trust.is_source("a", 0.0)
    observe(trust, 5.0, times=9)
    assert not trust.is_source("a", 0.0)
    assert trust.share("a") == 1.0, "what it says of its own cache is another matter"
    assert [trust.is_source("a", periods * FORGET_S) for periods in (0.1, 1.0, 2.0)] == [False, True, True]


def test_nothing_is_said_of_a_source_where_nobody_knows_how_fast_it_would_have_been() -> None:
    trust = HitTrust()
    observe(trust, 100.0, times=9)
    trust.observe("here", tokens=10_000, named=0, seconds=1.0)
    for _ in range(9):
        trust.observe_fetch("here", "a", tokens=10_000, fetched=100, seconds=100.0, now=0.0)  # lost in the noise
    assert trust.is_source("a", 0.0)
    observe(trust, 100.0, times=9)
    assert not trust.is_source("a", 0.0)
    trust.keep({"here"})
    assert trust.is_source("a", 0.0)


def test_a_holder_that_sends_nothing_is_hardly_asked() -> None:
    known = PrefixKnowledge()
    known.trust.observe("here", tokens=10_000, named=0, seconds=1.0)
    ask = partial(
        known.choose_fetch, 10_000, "here", {"a": 9_000}, sources=["a"], token_s=TOKEN_S, links=links(), share=1.0
    )
    now, asked = 0.0, 0
    for number in range(40):
        fetch = ask(now=now)
        asked += fetch is not None
        known.note_route(number, "here", lambda _: (), ExpectedPrefill(now, 10_000, 0, 0), fetch)
        now += 1.0 if fetch is None else 3.0  # what had to be computed all the same came late
        known.note_first_token(number, now)
        known.note_end(number, now)
    assert 2 < asked < 12
    assert ask(now=now + 2 * FORGET_S) is not None


def test_fetches_whose_requests_have_not_begun_hold_further_ones_back() -> None:
    known = PrefixKnowledge()
    ask = partial(
        known.choose_fetch, 10_000, "here", {"a": 9_000}, sources=["a"], token_s=TOKEN_S, links=links(2.0), share=1.0,
        now=0.0,
    )  # fmt: skip
    fetch = ask()
    known.note_route("one", "here", lambda _: (), ExpectedPrefill(0.0, 10_000, 0, 0), fetch)
    assert fetch is not None
    assert ask() is None
    known.note_end("one", None)  # its client is gone
    assert ask() == fetch
