"""What engines' own steps say of their cards, in place of what a micro-benchmark said when they
started.

A card's rates are set so that the roofline takes as long for the traffic's mean request as the
engine's profile does: TFLOP/s by its prefills, GB/s by its decodes. So a replica that has only ever
done one phase is corrected in that one; in the other it is taken to be as its like are, where
`LEAST_LIKE` of them have done that: what one box says of itself moves no other.

Where the profile still says otherwise than its card, at other sizes than the mean request's, plans
go by the constants themselves (`measured_costs`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import exp, log, sqrt
from statistics import median
from typing import Final, NamedTuple

import msgspec

from .capacity import BoxView
from .costs.gpus import GpuSpec, Specs
from .costs.model_shape import ModelShape
from .costs.profiled_times import FURTHEST, KNOWN_REQUESTS, ProfiledTimes
from .costs.replica import StageHardware, replica_times
from .costs.step_times import StepTimes, chunk_pairs
from .costs.sweep import ENGINE_SWEEP, profile_times
from .planning.model.workload import Workload
from .profile import LatencyProfile, MeasuredCosts, PhaseCost, PhaseCosts

WORST_FIT: Final = 0.3
"""Median relative error up to which a fit counts."""

BATCH: Final = 8
"""Requests that decode together when decode steps are compared."""

LEAST_LIKE: Final = 3
"""Boxes with the same cards that must have told of a phase before another is taken to be like their middle one."""

CLOSE: Final = 1.1
"""Constants within this factor of what a card is taken for add nothing: equal boxes stay equal, and plans stable."""

STEP: Final = log(1.03)
"""Constants are rounded to steps of 3 %, for the same reason."""

HALVINGS: Final = 12
"""Of the interval that a factor is searched in: to a tenth of a percent."""


class _Factors(NamedTuple):
    """On TFLOP/s and on GB/s; None where nothing is known."""

    compute: float | None
    memory: float | None


def calibrate_boxes(boxes: Mapping[str, BoxView], workload: Workload) -> dict[str, BoxView]:
    """The same boxes, by the same keys, with corrected rates; not emulated ones, nor those with a
    part of the model, whose engines have timed all stages together."""
    own = {name: _factors(box, workload) for name, box in boxes.items() if box.whole and box.specs is None}
    compute: defaultdict[object, list[float]] = defaultdict(list)
    memory: defaultdict[object, list[float]] = defaultdict(list)
    for name, factors in own.items():
        if factors.compute is not None:
            compute[_kind(boxes[name])].append(factors.compute)
        if factors.memory is not None:
            memory[_kind(boxes[name])].append(factors.memory)
    found = dict(boxes)
    for name, factors in own.items():
        box, kind = boxes[name], _kind(boxes[name])
        found[name] = msgspec.structs.replace(
            box,
            compute_tflops=box.compute_tflops * (factors.compute or _middle(compute.get(kind, []))),
            memory_gbps=box.memory_gbps * (factors.memory or _middle(memory.get(kind, []))),
        )
    return found


def _middle(factors: list[float]) -> float:
    return median(factors) if len(factors) >= LEAST_LIKE else 1.0


def told_costs(profile: LatencyProfile | None) -> PhaseCosts:
    """The constants that a box tells, of the phases that they describe well."""
    fits = (None, None) if profile is None else (profile.prefill, profile.decode)
    return PhaseCosts(*(fit.cost if fit is not None and fit.error <= WORST_FIT else None for fit in fits))


def measured_costs(box: BoxView, card: GpuSpec, workload: Workload) -> MeasuredCosts | None:
    """What plans go by for a box that holds the model alone, beside what its cards are taken for;
    None where both say the same."""
    told = PhaseCosts(*(cost and _round_cost(cost, box.part) for cost in told_costs(box.profile)))
    if told == PhaseCosts():
        return None
    # How much memory a card has says nothing of its steps.
    stage = StageHardware(msgspec.structs.replace(card, memory_gib=1.0), box.tp, box.layers, box.card_link_gbps)
    prior = replica_times(box.model, [stage])
    modelled = _profile_stage(box.model, stage)
    own = ProfiledTimes(prior, MeasuredCosts(told, modelled))
    prompt, held = workload.mean_prompt, workload.mean_prompt + workload.mean_output / 2
    prompts = [max(2, round(prompt * share)) for share in (0.25, 1.0, 4.0)]
    found = PhaseCosts(
        None if _are_close([own.prefill_factor(each, chunk_pairs(0, each)) for each in prompts]) else told.prefill,
        None if _are_close([own.decode_factor(each, held) for each in (1, BATCH, KNOWN_REQUESTS)]) else told.decode,
    )
    return MeasuredCosts(found, modelled) if found != PhaseCosts() else None


@lru_cache(maxsize=1024)
def _profile_stage(model: ModelShape, stage: StageHardware) -> PhaseCosts:
    """What a sweep of an engine on this hardware would find, were it as fast as it is taken for."""
    found = profile_times(replica_times(model, [stage]), 0, ENGINE_SWEEP)
    return PhaseCosts(found.prefill, found.decode)


def _are_close(factors: list[float]) -> bool:
    return all(1.0 / CLOSE < factor < CLOSE for factor in factors)


def _round_cost(cost: PhaseCost, part: float) -> PhaseCost:
    """Of an engine that has this part of its GPUs' time."""
    told = {name: each / part for name, each in msgspec.structs.asdict(cost).items() if each}
    return PhaseCost(**{name: exp(round(log(each) / STEP) * STEP) for name, each in told.items()})


def _kind(box: BoxView) -> object:
    """Equal for boxes with equal cards; one without a name has no like."""
    return (box.card, box.tp) if box.card else box.peer


def _factors(box: BoxView, workload: Workload) -> _Factors:
    told = told_costs(box.profile)
    prompt, held = workload.mean_prompt, workload.mean_prompt + workload.mean_output / 2
    compute = _factor(
        _seconds(told.prefill, 1.0, prompt),
        lambda factor: step_times_of(box, factor, 1.0).prefill_s(round(prompt), prompt * (prompt + 1.0) / 2.0),
    )
    memory = _factor(
        _seconds(told.decode, BATCH, held),
        lambda factor: step_times_of(box, compute or 1.0, factor).decode_line(BATCH).step_s(BATCH * held),
    )
    return _Factors(compute, memory)


def _seconds(cost: PhaseCost | None, requests: float, length: float) -> float | None:
    """Of a step over so many requests of this length; None where that is not known."""
    return (cost.seconds(requests, length) or None) if cost is not None else None


def _factor(measured: float | None, modelled: Callable[[float], float]) -> float | None:
    """On a rate, so that the model, which falls with it, comes to what was measured."""
    if measured is None:
        return None
    low, high = 1.0 / FURTHEST, FURTHEST
    for _ in range(HALVINGS):
        middle = sqrt(low * high)  # factors: half way is the geometric mean
        if modelled(middle) > measured:
            low = middle
        else:
            high = middle
    return sqrt(low * high)


def step_times_of(box: BoxView, compute: float = 1.0, memory: float = 1.0) -> StepTimes:
    """Of a replica on this box alone, with its measured rates times these factors."""
    card = GpuSpec(
        name=box.card, memory_gib=box.memory_gib / box.tp, memory_gbps=box.memory_gbps * memory / box.tp,
        tflops=box.compute_tflops * compute / box.tp, nvlink_gbps=0.0, pcie_gen=0, usd_per_hour=0.0,
        specs=Specs.ENGINE,
    )  # fmt: skip
    return replica_times(box.model, [StageHardware(card, box.tp, box.layers, box.card_link_gbps)])
