"""How fast replicas are: what their engines have told, phase by phase, and the roofline until then."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from p2pserve.coordinator import BoxView, LatencyProfile, Pairing, Phase, PhaseCost, PhaseFit, Plan, Replica, Stage
from p2pserve.coordinator.calibration import WORST_FIT, step_times_of
from p2pserve.coordinator.capacity import Links, LinkView
from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.costs.sweep import BATCHES, LENGTHS, MOST_PREFILLED, profile_times, sweep_steps
from p2pserve.coordinator.profile import ReplicaProfile
from p2pserve.coordinator.routing.estimates.profiles import AT_ONCE, ReplicaProfiles, profile_replica

from .....linear_times import LinearTimes

LLAMA = model_shape("llama3-8b")
COST = PhaseCost(token_s=1e-5, step_s=0.01)
OTHER = PhaseCost(step_s=0.02, request_s=1e-4)


def box(name: str, profile: LatencyProfile | None = None, tflops: float = 100.0) -> BoxView:
    return BoxView(
        peer=name, service="s", model=LLAMA, fits=LLAMA.layers, ready=True, draining=False, compute_tflops=tflops,
        memory_gbps=800.0, memory_gib=32.0, kv_tokens=50_000, profile=profile,
    )  # fmt: skip


def fit_of(cost: PhaseCost, error: float = 0.05) -> PhaseFit:
    return PhaseFit(cost=cost, samples=20, error=error)


def alone(name: str) -> Replica:
    return Replica(id=name, phase=Phase.MIXED, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=LLAMA.layers),))


def no_links() -> Links:
    return Links(())


def profile_of(view: BoxView) -> ReplicaProfile | None:
    return profile_replica(alone(view.peer), {view.peer: view}, no_links)


def test_a_sweep_finds_the_constants_of_what_is_linear() -> None:
    times = LinearTimes(step=0.004, token=3e-5, request=2e-4, context=1e-7)
    found = profile_times(times, 1000)
    assert found.kv_tokens == 1000
    assert found.prefill.seconds(4, 300) == pytest.approx(0.004 + 3e-5 * 1200, rel=1e-3)
    assert found.decode.seconds(16, 700) == pytest.approx(0.004 + 2e-4 * 16 + 1e-7 * 16 * 700, rel=1e-3)


def test_a_sweep_has_each_batch_and_length_that_engines_compute_at_once() -> None:
    steps = list(sweep_steps(LinearTimes(step=1.0)))
    decoded = {(step.decode_requests, step.decode_context) for step in steps if step.decode_requests}
    assert decoded == {(batch, batch * length) for batch in BATCHES for length in LENGTHS}
    prefilled = [step for step in steps if step.prefill_requests]
    assert max(step.prefill_tokens for step in prefilled) <= MOST_PREFILLED
    # so that all four constants of a phase can be told apart
    assert len({step.prefill_requests for step in prefilled}) > 3


def test_until_an_engine_has_told_anything_the_roofline_counts() -> None:
    found = profile_of(box("a"))
    assert found is not None
    times = step_times_of(box("a"))
    assert found.kv_tokens == 50_000
    assert found.decode.seconds(8, 512) == pytest.approx(times.decode_line(8).step_s(8 * 512), rel=0.1)
    assert found.prefill.seconds(1, 1024) == pytest.approx(times.prefill_s(1024, 1024 * 1025 / 2), rel=0.1)
    faster = profile_of(box("a", tflops=200.0))
    assert faster is not None
    assert faster.prefill.seconds(1, 1024) < 0.7 * found.prefill.seconds(1, 1024)


def test_what_an_engine_has_told_counts_phase_by_phase() -> None:
    prior = profile_of(box("a"))
    assert prior is not None
    both = profile_of(box("a", LatencyProfile(prefill=fit_of(COST), decode=fit_of(OTHER))))
    assert both == ReplicaProfile(prefill=COST, decode=OTHER, kv_tokens=50_000)
    only_decode = profile_of(box("a", LatencyProfile(decode=fit_of(OTHER))))
    assert only_decode == ReplicaProfile(prefill=prior.prefill, decode=OTHER, kv_tokens=50_000)
    bad = LatencyProfile(prefill=fit_of(COST, error=2 * WORST_FIT), decode=fit_of(OTHER))
    assert profile_of(box("a", bad)) == only_decode


def test_a_box_that_calls_itself_far_too_fast_is_not_believed() -> None:
    prior = profile_of(box("a"))
    assert prior is not None
    absurd = fit_of(PhaseCost(step_s=1e-9))
    assert profile_of(box("a", LatencyProfile(prefill=absurd, decode=absurd))) == prior
    one = profile_of(box("a", LatencyProfile(prefill=absurd, decode=fit_of(OTHER))))
    assert one == ReplicaProfile(prefill=prior.prefill, decode=OTHER, kv_tokens=50_000)
    slow = fit_of(PhaseCost(step_s=1e6))  # harms nobody else
    assert profile_of(box("a", LatencyProfile(prefill=slow, decode=slow))) == ReplicaProfile(
        prefill=slow.cost, decode=slow.cost, kv_tokens=50_000
    )


def test_an_emulated_box_counts_for_the_card_that_it_models() -> None:
    view = msgspec.structs.replace(box("a"), card="A40", specs=Specs.DENSE, emulated=True)
    found = profile_of(view)
    stage = StageHardware(gpu_table().find("A40", Specs.DENSE), 1, LLAMA.layers, view.card_link_gbps)
    assert found == profile_times(replica_times(LLAMA, [stage]), 50_000)


def pipeline() -> tuple[Replica, dict[str, BoxView]]:
    stages = (
        Stage(peer="a", tp=1, first_layer=0, last_layer=16),
        Stage(peer="b", tp=1, first_layer=16, last_layer=LLAMA.layers),
    )
    boxes = {name: msgspec.structs.replace(box(name), stages=stages) for name in "ab"}
    return Replica(id="a", phase=Phase.MIXED, stages=stages), boxes


def test_a_pipeline_counts_with_what_lies_between_its_boxes() -> None:
    replica, boxes = pipeline()

    def links(rtt_s: float) -> Links:
        return Links(LinkView(source=one, target=two, rtt_s=rtt_s, gbps=1.0) for one, two in (("a", "b"), ("b", "a")))

    near, far = (profile_replica(replica, boxes, partial(links, rtt_s)) for rtt_s in (0.001, 0.1))
    assert near is not None
    assert far is not None
    assert far.decode.seconds(1, 100) == pytest.approx(near.decode.seconds(1, 100) + 0.099, rel=0.05)
    assert profile_replica(replica, {"a": boxes["a"]}, lambda: links(0.1)) is None


def test_what_an_engine_said_of_other_stages_does_not_count() -> None:
    replica, boxes = pipeline()
    told = LatencyProfile(prefill=fit_of(COST), decode=fit_of(OTHER))
    as_part = msgspec.structs.replace(boxes["a"], profile=told)
    found = profile_replica(replica, {**boxes, "a": as_part}, no_links)
    assert found == ReplicaProfile(prefill=COST, decode=OTHER, kv_tokens=50_000)
    before = msgspec.structs.replace(as_part, stages=())  # when it was a replica alone
    stale = profile_replica(replica, {**boxes, "a": before}, no_links)
    assert stale is not None
    assert stale.prefill != COST
    assert stale.kv_tokens == 0


def test_profiles_are_made_anew_when_a_box_says_something_else_and_a_few_at_a_time() -> None:
    names = [f"box{number}" for number in range(AT_ONCE + 2)]
    pairings = tuple(Pairing(prefill=name, decode=name, weight=1 / len(names)) for name in names)
    plan = Plan(
        epoch=1, version=1, service="s", replicas=tuple(map(alone, names)), pairings=pairings, codec="raw", why=()
    )
    profiles, found = ReplicaProfiles(plan), list[ReplicaProfile | None]([None] * len(names))
    boxes, asked = {name: box(name) for name in names}, list[int]()

    def update() -> None:
        signs: dict[str, object] = {name: view.profile for name, view in boxes.items()}
        profiles.update(signs, lambda: asked.append(1) or boxes.values(), no_links, found)  # type: ignore[func-returns-value]

    update()
    assert [each is not None for each in found] == [True] * AT_ONCE + [False] * 2
    update()
    update()
    assert all(found)
    assert len(asked) == 2
    boxes["box1"] = box("box1", LatencyProfile(prefill=fit_of(COST), decode=fit_of(OTHER)))
    update()
    assert found[1] == ReplicaProfile(prefill=COST, decode=OTHER, kv_tokens=50_000)
    assert len(asked) == 3
    del boxes["box1"]
    update()
    assert found[1] is None
