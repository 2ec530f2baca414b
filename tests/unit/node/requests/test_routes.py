"""Which route a request takes by the plan, and when there is none."""

import re
from math import inf

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import (
    Demand,
    LatencyProfile,
    NoRoute,
    Pairing,
    Phase,
    PhaseCost,
    PhaseFit,
    Plan,
    Replica,
    Route,
    RoutingSettings,
    Stage,
)
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import Deadlines
from p2pserve.coordinator.prefixes.held import PrefixNews, PrefixVersion, pack_names
from p2pserve.coordinator.prefixes.knowledge import PrefixKnowledge
from p2pserve.coordinator.prefixes.naming import prefix_names
from p2pserve.coordinator.requests.stalls import ExpectedTimes
from p2pserve.coordinator.requests.values import FindRoute
from p2pserve.coordinator.routing.pools import PoolState
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, EngineAdvert, LinkTable
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.requests.engine_room import prefill_tokens_s
from p2pserve.node.requests.routes import RouteFinder
from p2pserve.node.view import NetworkView, Queue

SERVICE = "tiny-1234"
MODEL = ModelInfo(
    service=SERVICE,
    shape=ModelShape(
        name="tiny", layers=1, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
    ),
    max_model_len=512,
    weights=WeightSizes(layers=(1,), embeddings=1, head=1),
)
ONE, TWO = PeerId("one"), PeerId("two")
WANTED = FindRoute(20, {})


def advert(state: str = "ready", starts: int = 1, max_model_len: int = 0, *, draining: bool = False) -> Advert:
    engine = EngineAdvert(
        state=state, tflops=1.0, memory_gbps=1.0, kv_tokens=10_000, starts=starts, max_model_len=max_model_len
    )
    hardware = Hardware(cores=1, memory_gib=1.0, processor="x")
    return Advert(hardware=hardware, draining=draining, model=MODEL, engine=engine)


def by_service(plan: Plan) -> dict[str, Plan]:
    return {plan.service: plan}


def plan_of(*peers: PeerId, service: str = SERVICE) -> Plan:
    replicas = tuple(
        Replica(id=peer, phase=Phase.MIXED, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=1),))
        for peer in peers
    )
    pairings = tuple(Pairing(prefill=peer, decode=peer, weight=1 / len(peers), prefill_share=1.0) for peer in peers)
    return Plan(epoch=1, version=1, service=service, replicas=replicas, pairings=pairings, codec="raw", why=())


def finder(view: NetworkView, queues: dict[PeerId, Queue] | None = None) -> RouteFinder:
    return RouteFinder(view, SERVICE, RoutingSettings(), lambda: queues or {})


def test_without_a_plan_for_the_service_there_is_no_route() -> None:
    for plans in ({}, by_service(plan_of(ONE, service="other"))):
        view = NetworkView(adverts={ONE: advert()}, plans=plans)
        with pytest.raises(NoRoute, match="no plan for it yet"):
            finder(view).find(WANTED, 0.0)


def test_each_gateway_draws_its_own_lots() -> None:
    """Of two that are as good: else all gateways would send to the same one until they hear of it."""
    asked = msgspec.structs.replace(advert(), demand=Demand(requests_s=1.0, arrival_cv=1.0, lengths=((20, 20),)))
    view = NetworkView(adverts={ONE: asked, TWO: asked}, plans=by_service(plan_of(ONE, TWO)))

    def first(gateway: str) -> str:
        return RouteFinder(view, SERVICE, RoutingSettings(), dict, gateway=PeerId(gateway)).find(WANTED, 0.0).decode

    assert {first(f"gateway{number}") for number in range(16)} == {ONE, TWO}
    assert {first("gateway3") for _ in range(4)} == {first("gateway3")}


def test_only_replicas_that_serve_are_taken() -> None:
    for other in (advert("restarting"), advert(draining=True)):
        view = NetworkView(adverts={ONE: other, TWO: advert()}, plans=by_service(plan_of(ONE, TWO)))
        assert {finder(view).find(WANTED, 0.0).decode for _ in range(4)} == {TWO}


def test_a_refusal_names_each_box_of_the_plan_that_does_not_serve_and_why() -> None:
    failed = msgspec.structs.replace(
        advert(), engine=EngineAdvert(state="failed", detail="gave up after 6 failures, at last: out of memory")
    )
    view = NetworkView(adverts={ONE: failed, TWO: advert(draining=True)}, plans=by_service(plan_of(ONE, TWO)))
    engine = f"the engine of {name_of(ONE)} has failed: gave up after 6 failures, at last: out of memory"
    with pytest.raises(NoRoute, match=re.escape(f"; {engine}; {name_of(TWO)} is draining")):
        finder(view).find(WANTED, 0.0)
    assert view.describe_unserved(SERVICE, 0.0) == f"{engine}; {name_of(TWO)} is draining"


def test_an_engine_that_fails_with_a_request_is_named_in_its_refusal() -> None:
    view = NetworkView(adverts={ONE: advert()}, plans=by_service(plan_of(ONE)))
    with pytest.raises(NoRoute, match=f"the engine of {name_of(ONE)} has failed with this request"):
        finder(view).find(FindRoute(20, {ONE: 1}), 0.0)


def test_a_request_goes_to_a_box_that_ends_before_it_only_where_no_other_serves() -> None:
    ending = msgspec.structs.replace(advert(), ends_in_s=30.0)
    plan = msgspec.structs.replace(plan_of(ONE, TWO), deadlines=Deadlines(ttft_s=2.0, tpot_s=0.1))
    view = NetworkView(adverts={ONE: ending, TWO: advert()}, plans=by_service(plan))
    assert {finder(view).find(WANTED, 0.0, 400).decode for _ in range(4)} == {TWO}
    busy = {TWO: Queue(50, 5000)}
    assert finder(view, busy).find(WANTED, 0.0, 400).decode == TWO
    assert finder(view, busy).find(WANTED, 0.0, 100).decode == ONE  # that finishes in time
    view.adverts[TWO] = advert("restarting")
    assert finder(view).find(WANTED, 0.0, 400).decode == ONE


def test_what_is_expected_of_a_route_is_what_the_plan_was_made_for_after_the_prompts_that_wait_there() -> None:
    plan = msgspec.structs.replace(plan_of(ONE), deadlines=Deadlines(ttft_s=2.0, tpot_s=0.1))
    view = NetworkView(adverts={ONE: advert()}, plans=by_service(plan))
    engine = view.adverts[ONE].engine
    assert engine is not None
    rate = prefill_tokens_s(view, plan.replicas[0], engine)
    for queues, tokens in (({}, 20), ({ONE: Queue(3, 5000)}, 5020)):
        routes = finder(view, queues)
        expected = routes.expect(routes.find(WANTED, 0.0), WANTED.tokens)
        assert expected == pytest.approx(ExpectedTimes(2.0 + tokens / rate, 0.1))


def test_a_first_token_is_expected_after_the_prompts_of_services_that_share_the_gpu() -> None:
    shared = msgspec.structs.replace(advert(), beside=(ONE, TWO))
    view = NetworkView(adverts={ONE: shared, TWO: shared}, plans=by_service(plan_of(ONE)))
    engine = shared.engine
    assert engine is not None
    rate = prefill_tokens_s(view, view.plans[SERVICE].replicas[0], engine)
    routes = finder(view, {TWO: Queue(2, 3000)})
    expected = routes.expect(routes.find(WANTED, 0.0), WANTED.tokens)
    assert expected.first_token_s == pytest.approx((3000 + WANTED.tokens) / rate)


def test_replicas_prefill_at_the_rate_of_their_own_steps_or_of_their_hardware() -> None:
    cost = PhaseFit(cost=PhaseCost(token_s=1e-3, length_s=1e-3, step_s=0.1), samples=100, error=0.0)
    fitted = msgspec.structs.replace(advert(), profile=LatencyProfile(prefill=cost))
    view = NetworkView(adverts={ONE: fitted, TWO: advert()}, plans=by_service(plan_of(ONE, TWO)))
    routes = finder(view)
    rates = routes.find_prefill_rates()
    assert rates[ONE] == pytest.approx(1024 / (0.1 + 1024 * 2e-3))
    assert rates[TWO] > rates[ONE]
    view.plans[SERVICE] = plan_of(TWO)
    assert routes.find_prefill_rates() == {TWO: pytest.approx(rates[TWO])}
    assert routes.find(WANTED, 0.0).decode == TWO
    del view.plans[SERVICE]
    assert routes.find_prefill_rates() == {}


def test_a_profile_of_short_prompts_makes_no_replica_a_thousand_times_as_fast() -> None:
    """All of their time may be that of a step, and nothing what grows with their length."""
    flat = PhaseFit(cost=PhaseCost(step_s=0.012), samples=100, error=0.0)
    view = NetworkView(
        adverts={ONE: msgspec.structs.replace(advert(), profile=LatencyProfile(prefill=flat))},
        plans=by_service(plan_of(ONE)),
    )
    assert finder(view).find_prefill_rates()[ONE] == pytest.approx(1024 / 0.012)


def test_nothing_is_expected_of_a_box_that_has_measured_nothing() -> None:
    unmeasured = msgspec.structs.replace(advert(), engine=EngineAdvert(state="ready", kv_tokens=10_000))
    view = NetworkView(adverts={ONE: unmeasured}, plans=by_service(plan_of(ONE)))
    routes = finder(view)
    assert routes.expect(routes.find(WANTED, 0.0), WANTED.tokens).first_token_s == inf


def test_a_box_that_stalls_is_the_last_to_be_taken_for_longer_the_second_time_and_never_more_than_half_are() -> None:
    view = NetworkView(adverts={ONE: advert(), TWO: advert()}, plans=by_service(plan_of(ONE, TWO)))
    routes = finder(view)
    now, held_s = 0.0, []
    for _ in range(3):
        assert routes.note_stall(ONE, now)
        assert not routes.note_stall(ONE, now + 1.0), "what else it has stalls as well"
        began = now
        while {routes.find(WANTED, now).decode for _ in range(4)} == {TWO}:
            now += 1.0
        held_s.append(now - began)
    assert 45.0 < held_s[0] < held_s[1] == held_s[2] < 150.0
    assert routes.note_stall(ONE, now)
    assert routes.note_stall(TWO, now)
    assert routes.find(WANTED, now).decode == TWO, "the one that stalled less often"


def test_boxes_of_the_plan_that_are_dead_are_named_with_their_age() -> None:
    """Also to whoever has asked: it is the reason that its request ends with."""
    dead = {TWO: 10.0, PeerId("not in the plan"): 100.0}
    view = NetworkView(adverts={ONE: advert("failed")}, plans=by_service(plan_of(ONE, TWO)), dead_at=dead)
    with pytest.raises(NoRoute, match=r"; \S+ is dead since 2 min$"):
        finder(view).find(WANTED, 130.0)


def test_an_engine_that_failed_the_request_is_not_asked_again_but_the_next_one_there_is() -> None:
    view = NetworkView(adverts={ONE: advert(starts=2)}, plans=by_service(plan_of(ONE)))
    with pytest.raises(NoRoute):
        finder(view).find(FindRoute(20, {ONE: 2}), 0.0)
    assert finder(view).find(FindRoute(20, {ONE: 1}), 0.0).decode == ONE


def test_a_new_plan_is_followed_at_once() -> None:
    view = NetworkView(adverts={ONE: advert(), TWO: advert()}, plans=by_service(plan_of(ONE)))
    routes = finder(view)
    assert routes.find(WANTED, 0.0).decode == ONE
    view.plans = by_service(plan_of(TWO))
    assert routes.find(WANTED, 0.0).decode == TWO


def test_this_gateways_own_requests_count_before_any_report_of_them() -> None:
    view = NetworkView(adverts={ONE: advert(), TWO: advert()}, plans=by_service(plan_of(ONE, TWO)))
    assert finder(view, {ONE: Queue(50, 5000)}).find(WANTED, 0.0).decode == TWO
    assert finder(view, {TWO: Queue(50, 5000)}).find(WANTED, 0.0).decode == ONE


@pytest.mark.parametrize(
    ("state", "draining", "is_hopeful"),
    [("starting", False, True), ("loading", False, True), ("restarting", False, True), ("starting", True, False),
     ("failed", False, False), ("waiting", False, False)],
)  # fmt: skip
def test_waiting_makes_sense_while_an_engine_is_being_started(state: str, draining: bool, is_hopeful: bool) -> None:
    assert finder(NetworkView(adverts={ONE: advert(state, draining=draining)})).is_hopeful == is_hopeful


def test_the_engine_with_the_least_room_says_how_long_a_request_may_be() -> None:
    view = NetworkView(adverts={ONE: advert(max_model_len=300), TWO: advert(max_model_len=200)})
    assert view.max_model_len(MODEL) == 200
    view.adverts = {ONE: advert(max_model_len=0), TWO: advert(max_model_len=9000)}
    assert view.max_model_len(MODEL) == 512


def test_what_was_sent_over_a_link_is_remembered_for_as_long_as_the_plan_is_followed() -> None:
    """Nobody reports more work anywhere, and still the first pair gets no more than 1.5 times its half."""
    peers = [PeerId(name) for name in ("p1", "p2", "d1", "d2")]
    replicas = tuple(
        msgspec.structs.replace(plan_of(peer).replicas[0], phase=Phase.PREFILL if peer[0] == "p" else Phase.DECODE)
        for peer in peers
    )
    pairings = tuple(Pairing(prefill=f"p{n}", decode=f"d{n}", weight=0.5, prefill_share=1.0) for n in (1, 2))
    plan = msgspec.structs.replace(plan_of(ONE), replicas=replicas, pairings=pairings)
    found = finder(NetworkView(adverts={peer: advert() for peer in peers}, plans=by_service(plan)))
    taken = [found.find(WANTED, 0.0).decode for _ in range(100)]
    assert 70 <= taken.count("d1") <= 80


def test_replicas_that_do_not_answer_are_the_last_to_be_taken() -> None:
    view = NetworkView(adverts={ONE: advert(), TWO: advert()}, plans=by_service(plan_of(ONE, TWO)))
    routes = finder(view)
    routes.hung = frozenset({ONE})
    assert {routes.find(WANTED, 0.0).decode for _ in range(4)} == {TWO}
    routes.hung = frozenset({ONE, TWO})
    assert routes.find(WANTED, 0.0).decode in (ONE, TWO)


def test_a_request_leaves_its_replica_only_for_one_that_answers() -> None:
    view = NetworkView(adverts={ONE: advert(), TWO: advert()}, plans=by_service(plan_of(ONE, TWO)))
    routes = finder(view)
    assert routes.find(FindRoute(20, {}, ONE), 0.0).decode == TWO
    for hung in (frozenset({ONE, TWO}), frozenset({TWO})):
        routes.hung = hung
        with pytest.raises(NoRoute):
            routes.find(FindRoute(20, {}, ONE), 0.0)


def hetero_view(**profiles: LatencyProfile | None) -> NetworkView:
    boxes = {PeerId(name): msgspec.structs.replace(advert(), fits=1, profile=told) for name, told in profiles.items()}
    return NetworkView(adverts=boxes, plans=by_service(plan_of(*boxes)))


def told(step_s: float) -> LatencyProfile:
    """An engine whose steps take so long."""
    fit = PhaseFit(cost=PhaseCost(step_s=step_s, token_s=step_s / 100), samples=9, error=0.01)
    return LatencyProfile(prefill=fit, decode=fit)


def test_a_node_may_route_by_how_fast_replicas_say_they_are() -> None:
    view = hetero_view(one=told(1.0), two=told(0.1))
    routes = RouteFinder(view, SERVICE, RoutingSettings(policy="hetero", kv_pressure=0.0), dict)
    found = [routes.find(WANTED, 0.0, 400, f"r{number}").decode for number in range(110)]
    assert 5 <= found.count(ONE) <= 15
    for number in range(110):
        routes.end_request(f"r{number}", 30)
    # nothing is left of them, also under another plan; and the fast one has been throttled since
    view.adverts[TWO] = msgspec.structs.replace(view.adverts[TWO], profile=told(10.0))
    view.plans = by_service(msgspec.structs.replace(plan_of(ONE, TWO), version=2))
    found = [routes.find(WANTED, 1.0, 400, f"s{number}").decode for number in range(110)]
    assert 5 <= found.count(TWO) <= 15


def test_prompts_that_were_sent_count_where_they_are_computed() -> None:
    view = NetworkView(adverts={ONE: advert(), TWO: advert()}, plans=by_service(plan_of(ONE, TWO)))
    routes = RouteFinder(view, SERVICE, RoutingSettings(policy="splitwise"), dict)
    chosen = [routes.find(WANTED, 0.0).decode for _ in range(3)]
    assert {load.replica: load.sent_tokens for load in view.loads({})} == {
        peer: WANTED.tokens * chosen.count(peer) for peer in (ONE, TWO)
    }


def test_one_of_several_gateways_asks_first_over_a_short_link() -> None:
    """Both boxes compute for 100 s, and have gateways that are asked as much as this one."""
    asked, here = Demand(requests_s=1.0, arrival_cv=1.0, lengths=((20, 20),)), PeerId("here")
    busy = msgspec.structs.replace(hetero_view(one=told(1.0)).adverts[ONE], demand=asked)
    view = NetworkView(
        adverts={ONE: busy, TWO: busy, here: msgspec.structs.replace(busy, engine=None)},
        plans=by_service(plan_of(ONE, TWO)),
    )

    def find(own: Demand) -> Route:
        queues = {ONE: BUSY, TWO: BUSY}
        routes = RouteFinder(view, SERVICE, RoutingSettings(), lambda: queues, lambda: own, gateway=here)
        return routes.find(WANTED, 0.0, request="a")

    assert find(asked).claims, "of links that are not measured, too: the wait is longer by far"
    for rtt_s, asks in ((0.01, True), (60.0, False)):
        figures = LinkFigures(rtt_s=rtt_s, one_stream_gbps=1.0, capacity_gbps=1.0)
        table = msgspec.msgpack.encode(LinkTable(links={ONE: figures, TWO: figures}))
        view.update_links({here: table})
        assert [claim.replica for claim in find(asked).claims] == [find(asked).decode] * asks
    view.update_links({})
    assert not find(msgspec.structs.replace(asked, requests_s=1e9)).claims, "others have next to no requests"


def test_a_prompt_that_is_refused_has_not_been_sent() -> None:
    view = NetworkView(adverts={ONE: advert()}, plans=by_service(plan_of(ONE)))
    routes = RouteFinder(view, SERVICE, RoutingSettings(policy="splitwise"), lambda: {ONE: Queue(1, WANTED.tokens)})
    (claim,) = routes.find(WANTED, 0.0, request="a").claims
    state = PoolState(pool=Phase.MIXED, requests=9, prefill_tokens=900, kv_free_tokens=9, decodes=9)
    routes.note_answer(claim, False, state, routes.own_work(claim))
    (load,) = view.loads({})
    assert load.sent_tokens == 0
    assert load.told is not None
    assert (load.told.requests, load.told.prefill_tokens) == (9, 900)


def test_requests_that_have_not_ended_count_under_the_next_plan() -> None:
    view = hetero_view(one=told(0.2), two=told(0.1))
    routes = RouteFinder(view, SERVICE, RoutingSettings(policy="hetero"), dict)
    before = [routes.find(WANTED, 0.0, 400, f"r{number}").decode for number in range(3)]
    view.plans = by_service(msgspec.structs.replace(plan_of(ONE, TWO), version=2))
    after = [routes.find(WANTED, 1.0, 400, f"s{number}").decode for number in range(3)]
    assert {ONE, TWO} == set(before + after)
    alone = RouteFinder(view, SERVICE, RoutingSettings(policy="hetero"), dict)
    alone.end_request("never routed", None)
    together = [alone.find(WANTED, 1.0, 400, f"t{number}").decode for number in range(6)]
    assert before + after == together


# ---- prefixes that another box holds ----------------------------------------------------------------------

BLOCK = 16
PROMPT = tuple(range(1600))
LONG = FindRoute(len(PROMPT), {})
BUSY = Queue(9, 10_000)


def fetching_finder(view: NetworkView, known: PrefixKnowledge, share: float = 1.0, queued: Queue = BUSY) -> RouteFinder:
    """Of two boxes, ONE holds the prompt and is busy, or has as much queued as is said."""
    known.index.take(
        ONE,
        PrefixNews(
            version=PrefixVersion(1, 1), block_tokens=BLOCK, held=pack_names(prefix_names(PROMPT, BLOCK)), lost=b""
        ),
    )
    routing = RoutingSettings(prefix_weight=1e-6, prefix_fetch=share)
    return RouteFinder(view, SERVICE, routing, lambda: {ONE: queued}, prefixes=known)


def linked_view(codec: str = "raw") -> NetworkView:
    plan = msgspec.structs.replace(plan_of(ONE, TWO), codec=codec)
    # so slow that the prompt takes seconds
    slow = msgspec.structs.replace(
        advert(), engine=EngineAdvert(state="ready", tflops=1e-6, memory_gbps=1e-3, starts=1, kv_tokens=10_000)
    )
    view = NetworkView(adverts={ONE: slow, TWO: slow}, plans={SERVICE: plan})
    link = LinkFigures(rtt_s=0.001, one_stream_gbps=10.0, capacity_gbps=10.0)
    view.links_told = {ONE: LinkTable(links={TWO: link})}
    return view


def find_with_names(routes: RouteFinder, wanted: FindRoute = LONG) -> Route:
    return routes.find(wanted, 0.0, request="r", names_of=lambda size: prefix_names(PROMPT, size))


def test_a_prefix_comes_from_the_box_that_holds_it() -> None:
    routes = fetching_finder(linked_view(), PrefixKnowledge())
    assert find_with_names(routes) == Route(prefill=ONE, decode=TWO, split=1599, cached=1599)
    assert routes.find(LONG, 0.0, request="r") == Route(prefill=None, decode=TWO)  # nobody has named its prefixes


@pytest.mark.parametrize(("codec", "share"), [("raw", 1e-6), ("of the next release", 1.0), ("raw", 0.0)])
def test_it_is_computed_where_that_is_sooner_or_cannot_be_said_or_is_not_wanted(codec: str, share: float) -> None:
    routes = fetching_finder(linked_view(codec), PrefixKnowledge(), share)
    assert find_with_names(routes) == Route(prefill=None, decode=TWO)


def test_a_box_that_has_failed_with_the_request_or_leaves_or_does_not_answer_is_not_asked_for_its_prefix() -> None:
    routes = fetching_finder(linked_view(), PrefixKnowledge())
    for wanted in (FindRoute(1600, {ONE: 1}), FindRoute(1600, {}, ONE)):
        assert find_with_names(routes, wanted) == Route(prefill=None, decode=TWO)
    routes.hung = frozenset([ONE])
    assert find_with_names(routes) == Route(prefill=None, decode=TWO)


def test_what_is_fetched_is_not_counted_as_to_be_computed() -> None:
    view = linked_view()
    routes = fetching_finder(view, PrefixKnowledge())
    find_with_names(routes)
    sent = {load.replica: load.sent_tokens for load in view.loads({})}
    assert sent == {ONE: 0, TWO: 1}


def test_what_a_box_has_in_its_cache_is_not_counted_as_to_be_computed() -> None:
    view = linked_view()
    routes = fetching_finder(view, PrefixKnowledge(), queued=Queue())
    assert find_with_names(routes) == Route(prefill=None, decode=ONE, found=1599)
    assert {load.replica: load.sent_tokens for load in view.loads({})} == {ONE: 1, TWO: 0}


def test_fetches_are_under_way_until_their_answers_have_begun() -> None:
    known = PrefixKnowledge()
    view = linked_view()
    routes = fetching_finder(view, known)
    find_with_names(routes)
    assert "<OpenFetches 1>" in repr(known)
    routes.note_first_token("r", 1.0)
    assert "<OpenFetches 0>" in repr(known)
    routes.end_request("r", 20, 1.0)
