"""Parallel configurations: order of stages, layers, widths, and which one is best for what."""

from dataclasses import replace
from itertools import pairwise, permutations
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from p2pserve.coordinator.costs.gpus import GpuSpec, Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape, model_shape
from p2pserve.coordinator.costs.replica import Hop, StageHardware, replica_times
from p2pserve.coordinator.costs.sweep import ENGINE_SWEEP, profile_times
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import LOADS
from p2pserve.coordinator.planning.lower.parallel import (
    BoxGpus,
    Configuration,
    GroupHardware,
    ParallelOptions,
    ServiceNeeds,
    best_order,
    has_memory_for,
    split_layers,
)
from p2pserve.coordinator.planning.model.length_classes import classify_lengths
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.coordinator.profile import MeasuredCosts, PhaseCost, PhaseCosts

Matrix = NDArray[np.float64]

A40 = gpu_table().find("A40-48GB", Specs.TABLE1)
TI = gpu_table().find("RTX-3090TI-24GB", Specs.TABLE1)


def card_of(gib: float) -> GpuSpec:
    return msgspec.structs.replace(A40, memory_gib=gib)


def needs(model: ModelShape, slo: Slo | None = None, prompt: int = 1024, output: int = 64) -> ServiceNeeds:
    workload = Workload(name="x", prompts=np.full(8, prompt), outputs=np.full(8, output), rate=1.0)
    service = Service(name="s", model=model, workload=workload, slo=slo or Slo())
    return ServiceNeeds(service, classify_lengths(workload), prompt + output)


def box(gpu: GpuSpec, gpus: int, *, atomic: bool = False) -> GroupHardware:
    return GroupHardware((BoxGpus(gpu, gpus, 160.0, atomic),), ())


def pair(gbps: float, rtt_s: float = 1e-3) -> GroupHardware:
    hop = Hop(rtt_s, gbps)
    return GroupHardware((BoxGpus(A40, 2, 160.0, False), BoxGpus(TI, 2, 160.0, False)), ((hop, hop), (hop, hop)))


def configure(parts: GroupHardware, phase: Phase, wanted: ServiceNeeds) -> Configuration | None:
    return ParallelOptions(parts, wanted).best(phase)


def length(costs: Matrix, order: tuple[int, ...], cycle: bool) -> float:
    return float(sum(costs[a, b] for a, b in pairwise(order + order[:1] * cycle)))


@pytest.mark.parametrize("cycle", [False, True])
def test_the_order_is_the_best_of_all_orders(cycle: bool) -> None:
    rng = np.random.default_rng(5)
    for size in (2, 3, 5, 6):
        costs = rng.exponential(size=(size, size))

        found = best_order(costs, cycle=cycle)
        assert found is not None
        assert length(costs, found, cycle) == pytest.approx(
            min(length(costs, order, cycle) for order in permutations(range(size)))
        )


def test_a_cycle_takes_the_dearest_hop_on_its_way_back() -> None:
    costs = np.array([[0, 1, 9], [9, 0, 5], [1, 9, 0]], dtype=float)
    assert best_order(costs, cycle=True) == (2, 0, 1)


@pytest.mark.parametrize("cycle", [False, True])
def test_boxes_that_are_all_as_near_to_each_other_stay_in_order(cycle: bool) -> None:
    assert best_order(np.ones((4, 4)) - np.eye(4), cycle=cycle) == (0, 1, 2, 3)
    assert best_order(np.full((3, 3), inf), cycle=cycle) is None
    assert best_order(np.zeros((1, 1)), cycle=cycle) == (0,)


def test_boxes_without_a_way_between_them_have_no_order() -> None:
    assert best_order(np.array([[0, inf], [1, 0]]), cycle=True) is None
    assert best_order(np.array([[0, inf], [1, 0]]), cycle=False) == (1, 0)
    assert configure(pair(0.0), Phase.PREFILL, needs(model_shape("llama-7b"))) is None


def test_many_boxes_are_ordered_greedily() -> None:
    places = np.arange(14.0)
    costs = np.abs(places[:, None] - places)
    order = best_order(costs, cycle=False)
    assert order is not None
    assert sorted(order) == list(range(14))
    assert length(costs, order, False) <= 2 * 13


def test_many_boxes_are_cut_where_the_next_one_is_farthest() -> None:
    """From 0 to 9, always to the next; the last box is left over, and nearer to the first than to the tenth."""
    places = np.array([*range(10), -1.5])
    costs = np.abs(places[:, None] - places)
    assert best_order(costs, cycle=False) == best_order(costs, cycle=True) == (10, *range(10))


@pytest.mark.parametrize(("gbps", "first"), [(1.0, 1), (0.4, 0)])
def test_decode_replicas_take_their_slowest_hop_on_the_way_back(gbps: float, first: int) -> None:
    """One way is 5 ms long; the other takes 3.4 ms or 8.5 ms for 32 tokens of 13,312 bytes. Prompts only go there."""
    there, back = Hop(0.01, 1000.0), Hop(0.0, gbps)
    parts = pair(1.0)._replace(links=((there, there), (back, back)))
    found = configure(parts, Phase.DECODE, needs(model_shape("llama-30b")))
    assert found is not None
    assert found.stages[0][0] == first
    prefill = configure(parts, Phase.PREFILL, needs(model_shape("llama-30b")))
    assert prefill is not None
    assert prefill.stages[0][0] == 0


def test_layers_by_speed_within_memory() -> None:
    assert split_layers(7, [3.0, 1.0], [5, 7]) == (5, 2)
    assert split_layers(4, [3.0, 1.0], [3, 1]) == (3, 1)
    assert split_layers(60, [2.0, 1.0], [60, 60]) == (40, 20)
    assert split_layers(60, [2.0, 1.0], [30, 60]) == (30, 30)
    assert split_layers(5, [1.0, 1.0, 1.0], [5, 5, 5]) in {(2, 2, 1), (2, 1, 2), (1, 2, 2)}


@given(st.integers(3, 40), st.lists(st.floats(0.1, 10), min_size=1, max_size=3))
def test_no_other_split_has_a_faster_slowest_stage(layers: int, rates: list[float]) -> None:
    held = split_layers(layers, rates, [layers] * len(rates))
    assert sum(held) == layers
    worst = max((count / rate for count, rate in zip(held, rates, strict=True) if count > 1), default=0.0)
    # with one layer more, any stage would be as slow as the slowest that has one to give, or slower
    assert all((count + 1) / rate >= worst - 1e-9 for count, rate in zip(held, rates, strict=True))


def test_memory_is_looked_at_first() -> None:
    big, small = needs(model_shape("llama-30b")), needs(model_shape("llama-7b"))
    assert not has_memory_for(box(TI, 2).parts, big)
    assert configure(box(TI, 2), Phase.DECODE, big) is None
    assert configure(box(TI, 2), Phase.DECODE, small) is not None
    # the weights fit, a prompt of a hundred thousand tokens does not
    assert configure(box(A40, 2), Phase.DECODE, needs(model_shape("llama-30b"), prompt=100_000)) is None


TINY = ModelShape(
    name="tiny", layers=8, hidden=384, heads=3, kv_heads=1, head_dim=128, intermediate=1024, vocabulary=8192
)


def just_enough(tokens: int) -> GpuSpec:
    """Memory for four layers and one end of the model, and for KV of so many tokens."""
    taken = 4 * TINY.layer_weight_bytes + 2 * TINY.embedding_parameters + 4 * tokens * TINY.kv_bytes_per_token_layer
    return card_of((taken + 1) / (0.9 * 2**30))


@pytest.mark.parametrize("phase", list(Phase))
def test_a_model_that_just_fits_is_cut_as_it_must_be(phase: Phase) -> None:
    """Three heads are not shared by two cards, so there are two stages."""
    parts = box(just_enough(1088), 2)
    options = ParallelOptions(parts, needs(TINY))
    found = options.best(phase)
    assert found is not None
    assert (options.is_possible, found.stages, found.kv_tokens) == (True, ((0, 1, 4), (0, 1, 4)), 1088)
    assert found.spans == ((0, 0.0, 1.0),)
    longer = ParallelOptions(parts, needs(TINY, output=65))
    assert (longer.is_possible, longer.best(phase)) == (False, None)


def test_what_all_cards_hold_together_is_their_memory_share() -> None:
    """Ten GiB of which nine count, weights and KV of whole pages of 32 KiB."""
    model = msgspec.structs.replace(TINY, heads=32, kv_heads=8, hidden=4096, intermediate=14336, vocabulary=32000)
    assert model.kv_bytes_per_token == 2**15
    parts = (BoxGpus(card_of(3.0), 2, 160.0, False), BoxGpus(card_of(4.0), 1, 160.0, False))
    room = (9 * 2**30 - model.weight_bytes) // 2**15
    assert has_memory_for(parts, needs(model)._replace(longest=room))
    assert not has_memory_for(parts, needs(model)._replace(longest=room + 1))


def test_boxes_of_many_kinds_are_all_cut_to_one_width_or_to_their_widest() -> None:
    gpus = (8, 8, 2)
    parts = tuple(BoxGpus(card_of(40.0 + n), n_gpus, 160.0, False) for n, n_gpus in enumerate(gpus))
    near = Hop(1e-5, 100.0)
    found = configure(
        GroupHardware(parts, ((near,) * 3,) * 3), Phase.PREFILL, needs(model_shape("llama2-70b"), Slo(ttft_s=0.5))
    )
    assert found is not None
    widths = {part: tp for part, tp, _ in found.stages}
    assert widths == {0: 8, 1: 8, 2: 2}


def test_the_width_divides_the_heads() -> None:
    found = configure(box(A40, 8), Phase.PREFILL, needs(model_shape("llama-30b")))  # 52 heads
    assert found is not None
    assert {tp for _, tp, _ in found.stages} <= {1, 2, 4}
    assert sum(tp for _, tp, _ in found.stages) == 8
    assert sum(layers for _, _, layers in found.stages) == 60


def test_an_atomic_box_is_one_stage() -> None:
    found = configure(box(A40, 4, atomic=True), Phase.MIXED, needs(model_shape("llama-30b")))
    assert found is not None
    assert found.stages == ((0, 4, 60),)


def test_tight_deadlines_ask_for_speed_and_loose_ones_for_throughput() -> None:
    model = model_shape("llama-30b")
    loose = configure(box(A40, 4), Phase.PREFILL, needs(model))
    tight = configure(box(A40, 4), Phase.PREFILL, needs(model, Slo(ttft_s=0.6)))
    assert loose is not None
    assert tight is not None
    assert len(loose.stages) > len(tight.stages)
    assert loose.behaviour.prefill_rate > tight.behaviour.prefill_rate
    classes = needs(model).classes
    assert tight.behaviour.alone_s(classes) < loose.behaviour.alone_s(classes)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("slo", [Slo(), Slo(ttft_s=0.6, tpot_s=0.05), Slo(e2e_s=6.0)])
def test_no_other_shape_carries_clearly_more(phase: Phase, slo: Slo) -> None:
    wanted = needs(model_shape("llama-30b"), slo)

    def carried(parts: GroupHardware) -> float:
        found = configure(parts, phase, wanted)
        assert found is not None
        behaves = found.behaviour
        half = slo if behaves.does_prefill and behaves.does_decode else replace(slo, e2e_s=slo.e2e_s / 2)
        return float((LOADS * behaves.rate * wanted.in_time([behaves], half, (1, 1))).max())

    shapes = (((0, 1, 15),) * 4, ((0, 2, 30),) * 2, ((0, 4, 60),))
    each = [carried(box(A40, 4)._replace(loaded=(stages,))) for stages in shapes]
    assert len(set(each)) == 3
    assert carried(box(A40, 4)) >= 0.98 * max(each)


def test_across_boxes_the_faster_cards_hold_more_layers() -> None:
    found = configure(pair(40.0), Phase.PREFILL, needs(model_shape("llama-30b")))
    assert found is not None
    held = {part: sum(layers for p, _, layers in found.stages if p == part) for part in (0, 1)}
    assert held[0] > held[1]
    spans = found.spans
    assert spans[0][1] == 0.0
    assert spans[-1][2] == 1.0
    assert all(before[2] == after[1] for before, after in pairwise(spans))


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_what_an_engine_measured_counts_alone_and_as_a_stage(phase: Phase) -> None:
    """A box whose steps take twice as long as its card's."""
    model = model_shape("llama-30b")
    found = profile_times(replica_times(model, [StageHardware(A40, 4, model.layers, 160.0)]), 0, ENGINE_SWEEP)
    swept = PhaseCosts(found.prefill, found.decode)
    told = [
        PhaseCost(**{name: 2.0 * value for name, value in msgspec.structs.asdict(cost).items()})
        for cost in (found.prefill, found.decode)
    ]
    measured = MeasuredCosts(PhaseCosts(*told), swept)

    def seconds(parts: GroupHardware) -> float:
        found = configure(parts, phase, needs(model))
        assert found is not None
        times = found.times
        return times.prefill_s(512, 512 * 513 / 2) if phase is Phase.PREFILL else times.decode_line(8).step_s(4096)

    def slowed(parts: GroupHardware) -> GroupHardware:
        first, *others = parts.parts
        return parts._replace(parts=(first._replace(measured=measured), *others))

    alone, both = box(A40, 4, atomic=True), pair(10.0)
    assert seconds(slowed(alone)) == pytest.approx(2.0 * seconds(alone), rel=0.01)
    assert 1.05 * seconds(both) < seconds(slowed(both)) < 2.0 * seconds(both)
