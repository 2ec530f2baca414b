"""Rates of cards, corrected by what their engines' own steps took."""

from typing import Any

import msgspec
import pytest

from p2pserve.coordinator import BoxView, LatencyProfile, PhaseCost, PhaseFit
from p2pserve.coordinator.calibration import BATCH, LEAST_LIKE, WORST_FIT, calibrate_boxes, measured_costs, told_costs
from p2pserve.coordinator.costs.gpus import GpuSpec, Specs
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.costs.profiled_times import FURTHEST, ProfiledTimes
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.costs.step_times import StepTimes, chunk_pairs
from p2pserve.coordinator.costs.sweep import ENGINE_SWEEP, profile_times
from p2pserve.coordinator.demand_meter import expected_workload
from p2pserve.coordinator.network_problem import make_card

MODEL = MODELS["llama3-8b"]
WORKLOAD = expected_workload([], 8192)
PROMPT, HELD = WORKLOAD.mean_prompt, WORKLOAD.mean_prompt + WORKLOAD.mean_output / 2


def box(peer: str, **more: Any) -> BoxView:
    made = BoxView(
        peer=peer, service="s", model=MODEL, fits=MODEL.layers, ready=True, draining=False, compute_tflops=200.0,
        memory_gbps=1600.0, memory_gib=48.0, kv_tokens=50_000, tp=2, card="A40-48GB",
    )  # fmt: skip
    return msgspec.structs.replace(made, **more)


def card_of(one: BoxView) -> GpuSpec:
    return GpuSpec(
        name="x", memory_gib=24.0, memory_gbps=one.memory_gbps / one.tp, tflops=one.compute_tflops / one.tp,
        nvlink_gbps=0.0, pcie_gen=0, usd_per_hour=0.0, specs=Specs.ENGINE,
    )  # fmt: skip


def times(one: BoxView) -> StepTimes:
    return replica_times(MODEL, [StageHardware(card_of(one), one.tp, MODEL.layers, one.card_link_gbps)])


def prefill_s(one: BoxView) -> float:
    return times(one).prefill_s(round(PROMPT), PROMPT * (PROMPT + 1) / 2)


def decode_s(one: BoxView) -> float:
    return times(one).decode_line(BATCH).step_s(BATCH * HELD)


def profile(prefill: float | None = None, decode: float | None = None, error: float = 0.05) -> LatencyProfile:
    """Of an engine whose mean prompt, and whose decode step, take so many seconds."""

    def fit(seconds: float) -> PhaseFit:
        return PhaseFit(cost=PhaseCost(step_s=seconds), samples=100, error=error)

    return LatencyProfile(
        prefill=None if prefill is None else fit(prefill), decode=None if decode is None else fit(decode)
    )


def test_the_roofline_takes_as_long_as_the_engine_did() -> None:
    slow = box("a", profile=profile(1.5 * prefill_s(box("a")), 1.3 * decode_s(box("a"))))
    found = calibrate_boxes({"a": slow}, WORKLOAD)["a"]
    assert prefill_s(found) == pytest.approx(1.5 * prefill_s(slow), rel=0.03)
    assert decode_s(found) == pytest.approx(1.3 * decode_s(slow), rel=0.03)


def test_what_a_box_has_not_done_is_taken_from_its_like() -> None:
    prefillers = [box(f"a{n}", profile=profile(prefill=2.0 * prefill_s(box("a")))) for n in range(LEAST_LIKE)]
    decoders = [box(f"b{n}", profile=profile(decode=2.0 * decode_s(box("b")))) for n in range(LEAST_LIKE)]
    other = box("c", card="RTX-4090-24GB")
    found = calibrate_boxes({one.peer: one for one in (*prefillers, *decoders, other)}, WORKLOAD)
    assert found["a0"].compute_tflops == found["b0"].compute_tflops < 150.0
    assert found["a0"].memory_gbps == pytest.approx(found["b0"].memory_gbps, rel=0.1)
    assert found["a0"].memory_gbps < 1200.0
    assert (found["c"].compute_tflops, found["c"].memory_gbps) == (200.0, 1600.0)


def test_what_few_boxes_say_of_themselves_moves_no_other() -> None:
    liars = [box(f"l{n}", profile=profile(1e3, 1e3)) for n in range(LEAST_LIKE - 1)]
    honest = box("h")
    assert calibrate_boxes({one.peer: one for one in (*liars, honest)}, WORKLOAD)["h"] == honest


def test_each_rate_is_found_to_a_fraction_of_a_percent_and_by_itself() -> None:
    slow = box("a", card_link_gbps=50.0, profile=profile(prefill=1.7 * prefill_s(box("a", card_link_gbps=50.0))))
    found = calibrate_boxes({"a": slow}, WORKLOAD)["a"]
    assert prefill_s(found) == pytest.approx(1.7 * prefill_s(slow), rel=2e-3)
    assert found.memory_gbps == slow.memory_gbps
    slow = box("a", profile=profile(decode=1.7 * decode_s(box("a"))))
    found = calibrate_boxes({"a": slow}, WORKLOAD)["a"]
    assert decode_s(found) == pytest.approx(1.7 * decode_s(slow), rel=2e-3)
    assert found.compute_tflops == slow.compute_tflops


def test_of_several_of_its_like_the_one_in_the_middle_counts() -> None:
    known = [box(f"b{times}", profile=profile(times * prefill_s(box("x")), times * decode_s(box("x"))))
             for times in (4, 2, 3)]  # fmt: skip
    found = calibrate_boxes({one.peer: one for one in (*known, box("new"))}, WORKLOAD)
    assert (found["new"].compute_tflops, found["new"].memory_gbps) == (
        found["b3"].compute_tflops, found["b3"].memory_gbps,
    )  # fmt: skip


@pytest.mark.parametrize("other", [{"card": ""}, {"tp": 4}, {"card": "A5000-24GB"}])
def test_only_as_many_cards_of_the_same_name_are_alike(other: dict[str, Any]) -> None:
    one = box("a", profile=profile(9.0, 9.0))
    nameless = msgspec.structs.replace(one, peer="n", card="")
    stranger = box("b", **other)
    assert calibrate_boxes({"a": one, "n": nameless, "b": stranger}, WORKLOAD)["b"] == stranger


def test_a_fit_that_is_just_good_enough_counts() -> None:
    one = box("a", profile=profile(1.5 * prefill_s(box("a")), error=WORST_FIT))
    assert calibrate_boxes({"a": one}, WORKLOAD)["a"].compute_tflops < 190.0


def test_a_correction_has_bounds() -> None:
    found = calibrate_boxes({"a": box("a", profile=profile(1e5, 1e-9))}, WORKLOAD)["a"]
    assert found.compute_tflops == pytest.approx(200.0 / FURTHEST, rel=0.01)
    assert found.memory_gbps == pytest.approx(1600.0 * FURTHEST, rel=0.01)


@pytest.mark.parametrize(
    "one",
    [
        box("a"),
        box("a", profile=LatencyProfile()),
        box("a", profile=profile(5.0, 5.0, error=2 * WORST_FIT)),
        box("a", profile=profile(0.0, 0.0)),
        box("a", profile=profile(5.0, 5.0), specs=Specs.DENSE, emulated=True),
        box("a", profile=profile(5.0, 5.0), fits=3),
    ],
)
def test_figures_that_stay_as_they_are(one: BoxView) -> None:
    assert calibrate_boxes({"a": one}, WORKLOAD) == {"a": one}


def swept(prefill: float, decode: float) -> BoxView:
    """A box whose engine, swept, takes so many times as long as its cards are taken for."""
    found = profile_times(times(box("a")), 0, ENGINE_SWEEP)
    fits = {"prefill": scaled(found.prefill, prefill), "decode": scaled(found.decode, decode)}
    profile = LatencyProfile(**{phase: PhaseFit(cost=cost, samples=30, error=0.05) for phase, cost in fits.items()})
    return box("a", profile=profile)


def test_constants_count_where_they_say_otherwise_than_the_card() -> None:
    for prefill, decode in ((1.43, 1.43), (1.0, 1.43), (0.7, 1.0)):
        found = measured_costs(swept(prefill, decode), card_of(box("a")), WORKLOAD)
        assert found is not None
        assert (found.told.prefill is None, found.told.decode is None) == (prefill == 1.0, decode == 1.0)
        own = ProfiledTimes(times(box("a")), found)
        line = own.decode_line(BATCH)
        assert own.prefill_s(512, chunk_pairs(0, 512)) == pytest.approx(
            prefill * times(box("a")).prefill_s(512, chunk_pairs(0, 512)), rel=0.02
        ), "rounded to 3 %"
        assert line.step_s(BATCH * HELD) == pytest.approx(decode * decode_s(box("a")), rel=0.02)


def test_constants_of_an_engine_count_for_its_part_of_the_gpu() -> None:
    whole, half = (msgspec.structs.replace(swept(1.43, 1.43), part=part) for part in (1.0, 0.5))
    alone, shared = (measured_costs(one, make_card(one, one.memory_gib), WORKLOAD) for one in (whole, half))
    assert alone is not None
    assert shared is not None
    for one, two in zip(alone.told, shared.told, strict=True):
        assert one is not None
        assert two is not None
        assert two.seconds(BATCH, HELD) == pytest.approx(2.0 * one.seconds(BATCH, HELD), rel=0.03)


@pytest.mark.parametrize("noise", [0.95, 1.0, 1.05])
def test_constants_that_say_what_the_card_says_add_nothing(noise: float) -> None:
    """So equal boxes stay equal, whatever the noise of their fits."""
    assert measured_costs(swept(noise, 1.0 / noise), card_of(box("a")), WORKLOAD) is None
    assert measured_costs(box("a"), card_of(box("a")), WORKLOAD) is None


def scaled(cost: PhaseCost, factor: float) -> PhaseCost:
    return PhaseCost(**{name: factor * value for name, value in msgspec.structs.asdict(cost).items()})


def test_only_good_fits_are_told() -> None:
    told = told_costs(profile(1.0, 2.0))
    assert (told.prefill, told.decode) == (PhaseCost(step_s=1.0), PhaseCost(step_s=2.0))
    assert told_costs(profile(1.0, 2.0, error=2 * WORST_FIT)) == told_costs(None)
