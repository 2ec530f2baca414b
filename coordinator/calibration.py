"""What engines' own steps say of their cards, in place of what a micro-benchmark said when they
started.

A card's rates are set so that the roofline takes as long for the traffic's mean request as the
engine's profile does: TFLOP/s by its prefills, GB/s by its decodes. So a replica that has only ever
done one phase is corrected in that one; in the other it is taken to be as its like are, where some
have done that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from math import sqrt
from statistics import median
from typing import Final, NamedTuple

import msgspec

from .capacity import BoxView
from .costs.gpus import GpuSpec, Specs
from .costs.replica import StageHardware, replica_times
from .costs.step_times import StepTimes
from .planning.model.workload import Workload
from .profile import PhaseFit

WORST_FIT: Final = 0.3
"""Median relative error up to which a fit counts."""

BATCH: Final = 8
"""Requests that decode together when decode steps are compared."""

FURTHEST: Final = 8.0
"""By what factor a rate is corrected at most, up or down."""

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
            compute_tflops=box.compute_tflops * (factors.compute or median(compute.get(kind, [1.0]))),
            memory_gbps=box.memory_gbps * (factors.memory or median(memory.get(kind, [1.0]))),
        )
    return found


def _kind(box: BoxView) -> object:
    """Equal for boxes with equal cards; one without a name has no like."""
    return (box.card, box.tp) if box.card else box.peer


def _factors(box: BoxView, workload: Workload) -> _Factors:
    profile = box.profile
    if profile is None:
        return _Factors(None, None)
    prompt, held = workload.mean_prompt, workload.mean_prompt + workload.mean_output / 2
    compute = _factor(
        _seconds(profile.prefill, 1.0, prompt),
        lambda factor: step_times_of(box, factor, 1.0).prefill_s(round(prompt), prompt * (prompt + 1.0) / 2.0),
    )
    memory = _factor(
        _seconds(profile.decode, BATCH, held),
        lambda factor: step_times_of(box, compute or 1.0, factor).decode_line(BATCH).step_s(BATCH * held),
    )
    return _Factors(compute, memory)


def _seconds(fit: PhaseFit | None, requests: float, length: float) -> float | None:
    """Of a step over so many requests of this length; None where that is not known well enough."""
    if fit is None or fit.error > WORST_FIT:
        return None
    return fit.cost.seconds(requests, length) or None


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
