"""The running network's plans: tables for single decisions, properties for what must hold for any network."""

from random import Random

import msgspec
import pytest
from hypothesis import Phase as Drawing
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.coordinator import BoxView, Demand, LinkView, Phase, Plan, PlanError
from p2pserve.coordinator.costs.rounds import TOKEN_BUDGETS
from p2pserve.coordinator.network_plan import MAX_PAIRINGS, plan_network, search_phases
from p2pserve.coordinator.network_problem import build_network_problem
from p2pserve.coordinator.settings import NetworkPlanSettings

from .networks import KV4, RAW, D, M, P, box, fast, model, plan_of, roles, shares, some_plan

PEER = "12D3KooW{:044d}".format


# ---- who can be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boxes", [(), (box("a", ready=False),), (box("a", draining=True),)])
def test_no_box_ready_is_no_plan(boxes: tuple[BoxView, ...]) -> None:
    assert plan_of(*boxes) is None
    assert plan_of(*boxes, previous=some_plan(box("a"))) is None


def test_boxes_of_other_services_are_not_seen() -> None:
    assert plan_network([box("a")], [], [], service="other", epoch=1, version=0, previous=None, codec=RAW) is None


@pytest.mark.parametrize(
    ("boxes", "used"),
    [
        ((box("a"), box("b", draining=True)), {"a"}),
        ((box("a"), box("b", ready=False)), {"a"}),
        ((box("a", layers=8), box("b", layers=8), box("c", layers=6)), {"a", "b"}),
        ((box("a", layers=8, fits=3), box("c", layers=6)), {"c"}),
        ((box("a"), box("b", emulated=True)), {"a"}),
        ((box("a", emulated=True), box("b", emulated=True)), {"a", "b"}),
    ],
)
def test_who_is_used(boxes: tuple[BoxView, ...], used: set[str]) -> None:
    plan = some_plan(*boxes)
    assert set(plan.peers) == used
    left_out = {one.peer for one in boxes if one.usable} - used
    assert all(any(f"{peer} left out" in line for line in plan.why) for peer in left_out)


def test_the_same_model_from_another_folder_is_the_same_model() -> None:
    other = msgspec.structs.replace(box("b"), model=model(name="elsewhere"))
    assert set(some_plan(box("a"), other).peers) == {"a", "b"}


def test_boxes_that_keep_kv_in_8_bits_and_in_16_have_the_same_model() -> None:
    eight = [msgspec.structs.replace(box(peer), model=model().with_kv_cache_dtype("fp8")) for peer in "bc"]
    mixed = some_plan(box("a"), eight[0])
    assert set(mixed.peers) == {"a", "b"}
    assert "1 of 2 boxes keep KV in 8 bits, the others in 16" in mixed.why
    assert not any("8 bits" in line for line in some_plan(*eight).why)


def test_a_single_replica_does_both_phases_for_itself() -> None:
    plan = some_plan(box("a"))
    assert roles(plan) == {"a": M}
    assert [(pair.prefill, pair.decode, pair.weight) for pair in plan.pairings] == [("a", "a", 1.0)]


# ---- phases ---------------------------------------------------------------------------------------------------

FLOP_RICH, BYTE_RICH = box("f", 900.0, 700.0), box("b", 60.0, 1500.0)


def test_boxes_do_what_they_are_good_at() -> None:
    plan = some_plan(FLOP_RICH, BYTE_RICH, links=fast("f", "b"))
    assert roles(plan)["b"] is D
    assert plan.weight("f", "b") > 0.5


def test_nobody_transfers_through_a_link_that_is_too_slow() -> None:
    slow = tuple(msgspec.structs.replace(link, gbps=0.01) for link in fast("f", "b"))
    assert roles(some_plan(FLOP_RICH, BYTE_RICH, links=slow)) == {"f": M, "b": M}


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ((P, D), {"a": P, "b": D}),
        ((D, P), {"a": D, "b": P}),
        ((M, M), {"a": M, "b": M}),
        ((P, P), {"a": P, "b": M}),
        ((D, D), {"a": D, "b": M}),
        ((P, None), {"a": P}),
    ],
)
def test_pins_are_obeyed_as_far_as_can_be(pins: tuple[Phase | None, ...], expected: dict[str, Phase]) -> None:
    boxes = [box(peer, phase=pin) for peer, pin in zip("ab", pins, strict=True)]
    plan = some_plan(*boxes)
    assert expected.items() <= roles(plan).items()
    impossible = len(set(pins)) == 1 and pins[0] is not M
    assert any("all the same" in line for line in plan.why) is impossible
    assert plan_of(*boxes, previous=plan) is plan


def test_a_single_box_that_is_pinned_to_one_phase_does_both_all_the_same() -> None:
    plan = some_plan(box("a", phase=P))
    assert roles(plan) == {"a": M}
    assert any("pinned to prefill" in line for line in plan.why)


def test_a_new_pin_changes_a_running_replica() -> None:
    before = some_plan(FLOP_RICH, BYTE_RICH, links=fast("f", "b"))
    pinned = msgspec.structs.replace(BYTE_RICH, phase=P)
    after = some_plan(FLOP_RICH, pinned, links=fast("f", "b"), previous=before)
    assert roles(after)["b"] is P
    assert any("b does not go on with decode: only prefill" in line for line in after.why)


@pytest.mark.parametrize("left", [("p1", "p2"), ("d1", "d2"), ("p2", "d1"), ("d2",)])
def test_whoever_is_left_takes_over(left: tuple[str, ...]) -> None:
    boxes = [box("p1", phase=P), box("p2", phase=P), box("d1", phase=D), box("d2", phase=D)]
    before = some_plan(*boxes)
    free = [msgspec.structs.replace(one, phase=None) for one in boxes]
    after = some_plan(*(one for one in free if one.peer in left), previous=before)
    assert set(after.peers) == set(left)
    assert any("gone, draining or not ready" in line for line in after.why)


def test_small_changes_of_figures_change_no_phase() -> None:
    rng = Random(1)
    boxes = [box(f"b{number}", rng.uniform(50, 400), rng.uniform(500, 2000)) for number in range(5)]
    names = [one.peer for one in boxes]
    before = some_plan(*boxes, links=fast(*names))
    for _ in range(3):
        noisy = [
            msgspec.structs.replace(
                one,
                compute_tflops=one.compute_tflops * rng.uniform(0.98, 1.02),
                memory_gbps=one.memory_gbps * rng.uniform(0.98, 1.02),
            )
            for one in boxes
        ]
        after = some_plan(*noisy, links=fast(*names), previous=before)
        assert roles(after) == roles(before)


def test_a_joining_box_moves_nobody_unless_that_pays() -> None:
    """Equal boxes that do both have no reason to change when one more comes."""
    boxes = [box(name) for name in "abc"]
    before = some_plan(*boxes)
    after = some_plan(*boxes, box("d"), previous=before)
    assert roles(before).items() <= roles(after).items()
    told = " ".join(after.why)
    assert "d takes mixed" in told
    assert "a takes" not in told
    assert "chosen anew" not in told
    assert "KV travels" not in told
    assert "does not go on" not in told


def test_a_joining_box_takes_what_helps_most_though_nobody_else_may_change() -> None:
    before = some_plan(FLOP_RICH)
    after = plan_network(
        [FLOP_RICH, BYTE_RICH], fast("f", "b"), [], service="llama", epoch=1, version=1, previous=before, codec=KV4,
        settings=NetworkPlanSettings(most_flips=0),
    )  # fmt: skip
    assert after is not None
    assert roles(after) == {"f": M, "b": D}
    assert "b takes decode" in after.why
    assert after.newer_than(before)


def test_nobody_is_left_to_write_and_hardly_anything_is_in_time() -> None:
    """Then no flip gains 2 % of all requests, and somebody has to decode all the same."""
    before = some_plan(box("p", phase=P), box("q", phase=P), box("d", phase=D))
    flood = Demand(requests_s=1e5, arrival_cv=1.0, lengths=((1000, 200),))
    after = some_plan(box("p"), box("q"), previous=before, demands=(flood,))
    assert any(replica.decodes for replica in after.replicas)
    assert any("chosen anew" in line for line in after.why)


@pytest.mark.parametrize("figures", [(1e-6, 1e-6), (1e5, 1e-6), (1e-6, 1e5)])
def test_a_box_with_figures_that_make_no_sense_stops_nobody(figures: tuple[float, float]) -> None:
    flood = Demand(requests_s=1e6, arrival_cv=50.0, lengths=((90_000, 90_000),))
    for others in ((), (box("a"),)):
        plan = some_plan(*others, box("odd", *figures, kv_tokens=1), box("even", *figures), demands=(flood,))
        assert {"odd", "even"} <= set(plan.peers)


def test_requests_go_from_who_prefills_to_who_decodes() -> None:
    """Also where hardly anything is expected of anybody."""
    flood = Demand(requests_s=1e6, arrival_cv=50.0, lengths=((90_000, 90_000),))
    for figures, demands in (((100.0, 1000.0), ()), ((1e-6, 1e-6), (flood,))):
        phases = {"p": P, "q": P, "d": D, "m": M}
        plan = some_plan(*(box(name, *figures, phase=phase) for name, phase in phases.items()), demands=demands)
        for pair in plan.pairings:
            assert phases[pair.prefill] is not D
            assert phases[pair.decode] is not P


def test_a_first_plan_is_the_best_that_was_found_whatever_runs() -> None:
    """Over a fast link the box that is good at it only decodes, over a slow one each does both."""
    slow = tuple(msgspec.structs.replace(link, gbps=0.01) for link in fast("f", "b"))
    for links, expected in ((fast("f", "b"), {"f": P, "b": D}), (slow, {"f": M, "b": M})):
        network = build_network_problem((FLOP_RICH, BYTE_RICH), links, [], service="llama", codec=KV4, previous=None)
        assert network is not None
        assert network.phases(search_phases(network)) == expected


def test_no_phase_is_changed_where_none_may_be() -> None:
    mixed = [msgspec.structs.replace(one, phase=M) for one in (FLOP_RICH, BYTE_RICH)]
    before = some_plan(*mixed, links=fast("f", "b"))
    for most_flips, changes in ((0, False), (60, True)):
        after = plan_network(
            [FLOP_RICH, BYTE_RICH], fast("f", "b"), [], service="llama", epoch=1, version=1, previous=before, codec=KV4,
            settings=NetworkPlanSettings(most_flips=most_flips),
        )  # fmt: skip
        assert after is not None
        assert (roles(after) != roles(before)) is changes


# ---- routing --------------------------------------------------------------------------------------------------


def test_a_plan_says_what_it_is_for_and_how_much_of_that_is_room() -> None:
    asked = Demand(requests_s=1e5, arrival_cv=1.0, lengths=((1000, 200),))
    told = " ".join(some_plan(box("a"), demands=(asked,)).why)
    assert "planned for 1e+05 requests/s with lengths of what a gateway saw lately: 1000 tokens in and 200 out" in told
    told = " ".join(some_plan(box("a")).why)
    assert "requests/s (1 requests/s asked for: the rest is room) with lengths of Azure's" in told


def test_equal_boxes_share_alike() -> None:
    plan = some_plan(*(box(name) for name in "abcd"))
    assert all(share == pytest.approx(0.25, abs=0.02) for share in shares(plan).values())


def test_a_faster_box_gets_more() -> None:
    got = shares(some_plan(box("a", 100.0, 1000.0), box("b", 200.0, 2000.0)))
    assert got["b"] > 1.3 * got["a"] > 0.0


def test_a_box_that_is_too_slow_for_the_deadlines_gets_nothing_and_is_named() -> None:
    plan = some_plan(box("a", 400.0, 2000.0), box("slow", 1.0, 10.0))
    assert shares(plan)["slow"] == 0.0
    assert any(line.startswith("no requests for slow") for line in plan.why)


def test_deadlines_that_a_plan_cannot_say_are_none() -> None:
    """Of a box whose figures are within their bounds, and absurd."""
    size = 1 << 24
    huge = msgspec.structs.replace(model(4096), hidden=size, intermediate=size, vocabulary=size, active_experts=1)
    absurd = msgspec.structs.replace(box("a", 1e-6, 1e-6, layers=4096), model=huge, memory_gib=1e12)
    plan = some_plan(absurd)
    assert plan.deadlines.ttft_s == plan.deadlines.e2e_s == 0.0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan).deadlines == plan.deadlines


def test_a_plan_of_many_boxes_fits_the_gossip() -> None:
    rng = Random(3)
    boxes = [
        box(PEER(number), rng.uniform(100, 300), rng.uniform(800, 1600), phase=P if number < 30 else D)
        for number in range(60)
    ]
    plan = some_plan(*boxes)
    assert len(plan.pairings) <= MAX_PAIRINGS + len(boxes)
    assert len(msgspec.msgpack.encode(plan)) < 60_000


# ---- what is a change -----------------------------------------------------------------------------------------


def test_a_plan_says_how_much_a_step_may_compute_and_keeps_to_it() -> None:
    boxes = [msgspec.structs.replace(FLOP_RICH, phase=P), msgspec.structs.replace(BYTE_RICH, phase=D)]
    plan = some_plan(*boxes, links=fast("f", "b"))
    steps = {replica.id: replica.step_tokens for replica in plan.replicas}
    assert steps["f"] == TOKEN_BUDGETS[0]  # it only prefills
    assert steps["b"] in TOKEN_BUDGETS

    def running(tokens: int) -> Plan:
        """The plan, with another budget for who decodes."""
        replicas = tuple(
            msgspec.structs.replace(replica, step_tokens=tokens) if replica.id == "b" else replica
            for replica in plan.replicas
        )
        return msgspec.structs.replace(plan, replicas=replicas)

    near, far = running(round(steps["b"] * 1.5)), running(steps["b"] * 2)
    assert some_plan(*boxes, links=fast("f", "b"), previous=near) is near
    for other in (far, running(0)):
        again = some_plan(*boxes, links=fast("f", "b"), previous=other)
        assert {replica.id: replica.step_tokens for replica in again.replicas} == steps


def test_nothing_new_is_the_same_object() -> None:
    boxes = (box("m"), FLOP_RICH, BYTE_RICH)
    before = some_plan(*boxes)
    assert plan_of(*boxes, previous=before) is before
    assert plan_of(*boxes, box("x", ready=False), previous=before) is before


def test_a_new_epoch_and_a_new_codec_are_changes() -> None:
    before = some_plan(box("m"), FLOP_RICH)
    again = some_plan(box("m"), FLOP_RICH, previous=before, epoch=2)
    assert (again.number, again.replicas, again.pairings) == ((2, 1), before.replicas, before.pairings)
    other = some_plan(box("m"), FLOP_RICH, previous=before, codec=RAW)
    assert other.codec == "raw"
    assert any("KV travels as raw" in line for line in other.why)


def test_noise_on_links_is_no_news_and_a_link_that_breaks_down_is() -> None:
    boxes = (box("p", 500.0, phase=P), box("d1", phase=D), box("d2", phase=D))
    links = fast("p", "d1", "d2")
    before = some_plan(*boxes, links=links)
    noisy = tuple(msgspec.structs.replace(link, rtt_s=2e-4, gbps=90.0) for link in links)
    assert plan_of(*boxes, links=noisy, previous=before) is before
    broken = tuple(msgspec.structs.replace(link, gbps=0.02) if "d1" in link.target else link for link in links)
    after = some_plan(*boxes, links=broken, previous=before)
    assert after.weight("p", "d1") < 0.5 * before.weight("p", "d1")


def test_refusals() -> None:
    one = box("m")
    before = some_plan(one, FLOP_RICH)
    with pytest.raises(PlanError, match="not be newer"):
        plan_network([one], [], [], service="llama", epoch=1, version=0, previous=before, codec=KV4)
    with pytest.raises(PlanError, match="service"):
        plan_network([one], [], [], service="x", epoch=1, version=1, previous=before, codec=KV4)
    with pytest.raises(PlanError, match="twice"):
        plan_of(one, one)


# ---- properties -----------------------------------------------------------------------------------------------

DRAW_ONLY = (Drawing.explicit, Drawing.reuse, Drawing.generate)  # a plan takes too long to look for the least failure
PEERS = [f"box{number}" for number in range(5)]
figures = st.floats(min_value=1.0, max_value=1000.0, allow_nan=False)
fleets = st.lists(
    st.builds(
        lambda peer, tflops, gbps, sizes, **more: box(peer, tflops, gbps, **sizes, **more),
        st.sampled_from(PEERS),
        figures,
        figures,
        sizes=st.sampled_from([
            {"kv_tokens": 1}, {"kv_tokens": 500}, {"kv_tokens": 50_000}, {"kv_tokens": 0}, {"layers": 6}, {"fits": 5},
            {"fits": 3}, {"fits": 5, "tp": 2}, {"fits": 0},
        ]),
        ready=st.sampled_from([True, True, True, False]),
        draining=st.sampled_from([False, False, False, True]),
        phase=st.sampled_from([None, None, P, D, M]),
    ),
    unique_by=lambda item: item.peer,
    max_size=5,
)  # fmt: skip
meshes = st.lists(
    st.builds(
        LinkView,
        source=st.sampled_from(PEERS),
        target=st.sampled_from(PEERS),
        rtt_s=st.floats(min_value=0.0, max_value=1.0),
        gbps=st.sampled_from([0.0, 1e-6, 0.5, 100.0]),
    ),
    max_size=12,
)


@settings(max_examples=15, deadline=None, phases=DRAW_ONLY, derandomize=True)
@given(fleets, fleets, meshes, st.randoms(use_true_random=False))
def test_whatever_the_network_its_plan_can_be_followed(
    first: list[BoxView], second: list[BoxView], mesh: list[LinkView], rng: Random
) -> None:
    """It uses only boxes that may be used, names those that it leaves out, obeys pins where it can, does not depend on
    the order of anything, and soon stays as it is while nothing changes."""
    previous = plan_of(*first)
    plan = plan_of(*second, links=tuple(mesh), previous=previous)
    usable = {one.peer: one for one in second if one.usable}
    if plan is None:
        assert not any(one.whole for one in usable.values())
        return
    assert set(plan.peers) <= usable.keys()
    told = " ".join(plan.why)
    for one in usable.values() if plan is not previous else ():
        assert one.peer in plan.peers or one.peer in told or ("wait for" if one.fits else "without room") in told
    for replica in plan.replicas:
        assert all(stage.layers <= usable[stage.peer].fits for stage in replica.stages)
        pins = {usable[peer].phase for peer in replica.peers} - {None}
        assert replica.phase in pins or len(pins) != 1 or "all the same" in told
    rng.shuffle(second)
    rng.shuffle(mesh)
    assert plan_of(*second, links=tuple(mesh), previous=previous) == plan
    for _ in range(3):
        following = plan_of(*second, links=tuple(mesh), previous=plan)
        if following is plan:
            break
        plan = following
    else:
        pytest.fail("the plan goes on changing")


@settings(max_examples=12, deadline=None, phases=DRAW_ONLY)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 12), st.randoms(use_true_random=False))
def test_whatever_the_boxes_every_replica_holds_the_model_and_no_box_more_than_fits(
    fits: list[int], layers: int, rng: Random
) -> None:
    boxes = [box(f"b{i}", layers=layers, fits=min(each, layers)) for i, each in enumerate(fits)]
    links = tuple(
        LinkView(source=one.peer, target=two.peer, rtt_s=rng.random()) for one in boxes for two in boxes if one != two
    )
    plan = plan_of(*boxes, links=links)
    waiting = [one for one in boxes if not one.whole]
    if plan is None:
        assert len(waiting) == len(boxes)
        assert sum(one.fits for one in waiting) < layers
        return
    room = {one.peer: one.fits for one in boxes}
    for replica in plan.replicas:
        assert replica.layers == layers
        assert all(sum(room[peer] for peer in replica.peers if peer != out) < layers for out in replica.peers[1:])
    assert sum(one.fits for one in boxes if one.peer not in plan.peers) < layers
    assert plan_of(*boxes, links=links, previous=plan) is plan
