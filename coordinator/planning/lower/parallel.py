"""The parallel configuration of a group: how its GPUs share the model (ThunderServe section 3.3 and
appendix B).

Tensor parallelism stays within a box; the stages of a pipeline are so many GPUs of a box each. For
every way to cut the boxes into stages and every rule to share out layers, it is estimated how many
requests per second the replica would serve in time; the best of them is kept, of near equals the
one that answers sooner. Where the paper takes the fastest for prefill and the one with the highest
throughput for decode, here the deadlines say which of the two counts: tight ones ask for speed,
loose ones for throughput.

A configuration depends on what the GPUs and links are, not on whose they are: `GroupHardware` is
that description, and equal parts share one configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import groupby, islice, pairwise, product
from math import inf, isfinite, prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...costs.gpus import GpuSpec
from ...costs.model_shape import ModelShape
from ...costs.profiled_times import ProfiledTimes, scale_card
from ...costs.replica import GIB, Hop, StageHardware, kv_capacity_tokens, replica_times
from ...costs.step_times import StepTimes
from ...plan import Phase
from ...profile import MeasuredCosts
from ..model.length_classes import Classes
from ..model.workload import Service, Slo
from .behaviour import LOADS, MAX_BATCH, Behaviour, model_replica
from .queueing import OtherPhase, in_time_by_load

Array = NDArray[np.float64]

MEMORY_SHARE: Final = 0.9
"""Of a GPU's memory, for weights and KV."""

LOCAL_RTT_S: Final = 20e-6
"""Round trip between two GPUs of a box."""

EXACT_STAGES: Final = 10
"""Boxes that are put in order by dynamic programming; more of them greedily."""

MAX_SHAPES: Final = 16
"""Ways to cut a group's boxes into stages that are tried; above that, all boxes are cut to stages
of one width."""

CLOSE_TO_BOUND: Final = 0.75
RIVAL_SHARE: Final = 0.9
"""Where the shape with the highest upper bound carries so much of it in time, only shapes whose
bound is so much of that as well are looked at: waiting costs all shapes about as much."""

EQUAL_WITHIN: Final = 0.02
"""Configurations whose rates are within this share of each other count as equal."""


Stages = tuple[tuple[int, int, int], ...]
"""In layer order, as (index of the part, TP degree, layers)."""


class BoxGpus(NamedTuple):
    """So many equal GPUs of one box; `atomic`: they are one stage, whatever their number. `measured`:
    what their engine takes for its steps, where it holds the model alone."""

    gpu: GpuSpec
    gpus: int
    link_gbps: float
    atomic: bool
    measured: MeasuredCosts | None = None


class GroupHardware(NamedTuple):
    """The boxes of a group, and the links between them, [from][to]; no links for one box."""

    parts: tuple[BoxGpus, ...]
    links: tuple[tuple[Hop, ...], ...]
    loaded: tuple[Stages, ...] = ()


class ServiceNeeds(NamedTuple):
    """What a replica is for. `longest`: tokens of KV it must have room for."""

    service: Service
    classes: Classes
    longest: int

    @property
    def model(self) -> ModelShape:
        """Of the service."""
        return self.service.model

    def in_time(
        self,
        behaviours: Sequence[Behaviour],
        slo: Slo,
        phase_counts: tuple[int, int],
        other_phase: OtherPhase | None = None,
    ) -> Array:
        """[replica, load] the share of the service's requests in time at each of LOADS, on replicas
        of one phase: see `queueing.in_time_by_load`."""
        later = not behaviours[0].does_prefill and not self.service.first_token_at_decode
        cv = self.service.workload.arrival_cv
        return in_time_by_load(
            behaviours, self.classes, slo, cv, phase_counts=phase_counts, other_phase=other_phase, admitted_later=later
        )


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """Stages in layer order, as (index of the part, TP degree, layers), with their times, and what
    comes of them."""

    stages: Stages
    times: StepTimes
    kv_tokens: int
    behaviour: Behaviour

    @property
    def spans(self) -> tuple[tuple[int, float, float], ...]:
        """(part, first, last) of each part in layer order, as shares of the layers."""
        total = sum(layers for _, _, layers in self.stages)
        found: list[tuple[int, float, float]] = []
        last = 0
        for part, stages in groupby(self.stages, key=lambda stage: stage[0]):
            first, last = last, last + sum(layers for _, _, layers in stages)
            found.append((part, first / total, last / total))
        return tuple(found)


class _Shape(NamedTuple):
    """Stages as in `Configuration`, what they run on, and the tokens of KV that they have room
    for."""

    stages: Stages
    hardware: tuple[StageHardware, ...]
    room: int


class _TimedShape(NamedTuple):
    """A shape with its step times."""

    shape: _Shape
    times: StepTimes


class _LazyShapes:
    """Those that an iterator makes, which is asked for no more of them than needed."""

    def __init__(self, rest: Iterator[_Shape]) -> None:
        self._rest = rest
        self._made: list[_Shape] = []

    @property
    def has_any(self) -> bool:
        """Whether there is one."""
        self._made.extend(islice(self._rest, 1))
        return bool(self._made)

    @property
    def all(self) -> list[_Shape]:
        """In the order they are made."""
        self._made.extend(self._rest)
        return self._made


def has_memory_for(parts: Sequence[BoxGpus], needs: ServiceNeeds) -> bool:
    """Whether the memory of all GPUs together could do: a check that costs nothing, before any
    other."""
    room = sum(part.gpus * part.gpu.memory_gib for part in parts) * GIB * MEMORY_SHARE
    return room >= needs.model.weight_bytes + needs.longest * needs.model.kv_bytes_per_token


class ParallelOptions:
    """The ways to run a service on some parts. What the phases have in common is found once for all
    of them."""

    def __init__(self, parts: GroupHardware, needs: ServiceNeeds) -> None:
        self._parts, self._needs = parts, needs
        self._timed: dict[tuple[int, ...], list[_TimedShape]] = {}
        self._shapes: dict[tuple[int, ...], _LazyShapes] = {}

    @cached_property
    def is_possible(self) -> bool:
        """Whether there is one, found without finding out how good it is."""
        order = self._order_boxes(Phase.MIXED)
        return order is not None and self._shapes_in(order).has_any

    def best(self, phase: Phase) -> Configuration | None:
        """For a phase; None where no configuration holds the model and the longest request."""
        order = self._order_boxes(phase)
        if order is None:
            return None
        if order not in self._timed:
            self._timed[order] = [_TimedShape(shape, self._times(shape)) for shape in self._shapes_in(order).all]
        promising = list(_rank_shapes(self._timed[order], phase, self._needs))
        if len(promising) == 1:
            return _configuration(promising[0][1], phase, self._needs)
        found: list[tuple[float, Configuration]] = []
        most = enough = 0.0
        for upper_bound, timed in promising:
            if upper_bound < max(most * (1.0 - EQUAL_WITHIN), enough):
                break  # the bound is without waiting: nothing carries more
            configuration = _configuration(timed, phase, self._needs)
            if configuration.behaviour.rate < most * (1.0 - EQUAL_WITHIN):
                continue
            goodput = _goodput(configuration.behaviour, self._needs)
            # the most promising is near its bound, so waiting costs little here: rivals far below it cannot win
            if not found and goodput >= CLOSE_TO_BOUND * upper_bound:
                enough = RIVAL_SHARE * upper_bound
            found.append((goodput, configuration))
            most = max(most, goodput)
        near = [configuration for goodput, configuration in found if goodput >= most * (1.0 - EQUAL_WITHIN)]
        return min(near, key=lambda item: item.behaviour.alone_s(self._needs.classes), default=None)

    def _order_boxes(self, phase: Phase) -> tuple[int, ...] | None:
        if not has_memory_for(self._parts.parts, self._needs):
            return None
        return best_order(_hop_costs(self._parts, phase, self._needs), cycle=phase is not Phase.PREFILL)

    def _shapes_in(self, order: tuple[int, ...]) -> _LazyShapes:
        if order not in self._shapes:
            self._shapes[order] = _LazyShapes(self._generate_shapes(order))
        return self._shapes[order]

    def _generate_shapes(self, order: tuple[int, ...]) -> Iterator[_Shape]:
        """All different ones that have room for the longest request."""
        parts, model = self._parts.parts, self._needs.model
        for stages in dict.fromkeys(self._parts.loaded or _all_stages(order, parts, self._needs)):
            hardware = tuple(
                StageHardware(parts[box].gpu, tp, count, parts[box].link_gbps) for box, tp, count in stages
            )
            room = kv_capacity_tokens(model, hardware, memory_share=MEMORY_SHARE)
            if room >= self._needs.longest:
                yield _Shape(stages, hardware, room)

    def _times(self, shape: _Shape) -> StepTimes:
        boxes = [box for box, _, _ in shape.stages]
        hops = [_hop(self._parts, *ends) for ends in pairwise([*boxes, boxes[0]])] if len(boxes) > 1 else []
        measured = [self._parts.parts[box].measured for box in boxes]
        if len(shape.stages) == 1:
            times = replica_times(self._needs.model, shape.hardware)
            return ProfiledTimes(times, measured[0]) if measured[0] is not None else times
        stages = [
            replace(stage, gpu=scale_card(stage.gpu, costs)) if costs is not None else stage
            for stage, costs in zip(shape.hardware, measured, strict=True)
        ]
        return replica_times(self._needs.model, stages, hops)


def _all_stages(order: Sequence[int], parts: Sequence[BoxGpus], needs: ServiceNeeds) -> Iterator[Stages]:
    for widths in _tp_choices(parts, needs.model):
        stages = [(box, widths[box]) for box in order for _ in range(parts[box].gpus // widths[box])]
        for layers in _layer_splits(stages, parts, needs):
            yield tuple((box, tp, count) for (box, tp), count in zip(stages, layers, strict=True))


def _rank_shapes(
    shapes: Sequence[_TimedShape], phase: Phase, needs: ServiceNeeds
) -> Iterator[tuple[float, _TimedShape]]:
    """Shapes by requests per second if all were average and never waited: the first, and each that
    answers sooner than those before it. Details take far longer."""
    workload = needs.service.workload
    prompt, pairs, output = round(workload.mean_prompt), workload.mean_pairs, workload.mean_output
    context = workload.mean_prompt + workload.mean_output / 2

    def seconds(timed: _TimedShape) -> tuple[float, float]:
        """Of a replica's time for a request, and of the request's when it is alone."""
        times, batch = timed.times, max(1, min(MAX_BATCH, int(timed.shape.room / context)))
        prefill_s = 0.0 if phase is Phase.DECODE else times.prefill_interval_s(prompt, pairs)
        decode_s = 0.0 if phase is Phase.PREFILL else output * times.decode_line(batch).step_s(batch * context) / batch
        first = 0.0 if phase is Phase.DECODE else times.prefill_s(prompt, pairs)
        rest = 0.0 if phase is Phase.PREFILL else output * times.decode_line(1).step_s(context)
        return prefill_s + decode_s, first + rest

    costs = [seconds(timed) for timed in shapes]
    soonest = inf
    for place, number in enumerate(sorted(range(len(shapes)), key=costs.__getitem__)):
        taken, latency = costs[number]
        if place == 0 or latency < soonest:
            yield 1.0 / taken, shapes[number]
        soonest = min(soonest, latency)


def _configuration(timed: _TimedShape, phase: Phase, needs: ServiceNeeds) -> Configuration:
    cv = needs.service.workload.arrival_cv
    behaves = model_replica(
        phase, timed.times, needs.classes, kv_tokens=timed.shape.room, arrival_cv=cv,
        stages=len(timed.shape.stages), tpot_s=needs.service.slo.tpot_s, step_tokens=needs.service.step_tokens,
    )  # fmt: skip
    return Configuration(timed.shape.stages, timed.times, timed.shape.room, behaves)


def _goodput(behaves: Behaviour, needs: ServiceNeeds) -> float:
    """The most requests per second in time; a replica of one phase may take half of an end-to-end
    deadline."""
    slo = needs.service.slo
    if not (behaves.does_prefill and behaves.does_decode):
        slo = replace(slo, e2e_s=slo.e2e_s / 2)
    return float((LOADS * behaves.rate * needs.in_time([behaves], slo, (1, 1))).max())


def _hop(parts: GroupHardware, source: int, target: int) -> Hop:
    if source == target:
        return Hop(LOCAL_RTT_S, parts.parts[source].link_gbps)
    return parts.links[source][target]


# --- who is behind whom


def _hop_costs(parts: GroupHardware, phase: Phase, needs: ServiceNeeds) -> Array:
    """Seconds from box to box: of a prompt where prompts are prefilled, of a batch's tokens where
    only tokens are made."""
    tokens = MAX_BATCH / 8 if phase is Phase.DECODE else needs.classes.mean_prompt
    gigabits = tokens * needs.model.activation_bytes_per_token * 8e-9
    size = len(parts.parts)
    costs = np.zeros((size, size))
    for source, target in product(range(size), repeat=2):
        if source != target:
            link = parts.links[source][target]
            costs[source, target] = link.rtt_s / 2 + gigabits / link.gbps if link.gbps > 0.0 else inf
    return costs


def best_order(costs: Array, *, cycle: bool) -> tuple[int, ...] | None:
    """All indices in the order with the least sum of costs from each to the next; None where there
    is no way.

    `cycle`: the way back from the last to the first counts as well, and is the dearest of the hops
    where it can be chosen, since prompts do not take it. Dynamic programming over subsets up to
    EXACT_STAGES, nearest next beyond.
    """
    size = len(costs)
    if size == 1:
        return (0,)
    first = costs[0, 1]
    if isfinite(first) and np.count_nonzero(costs == first) == size * (size - 1):
        return tuple(range(size))  # all ways are alike
    order = _shortest(costs, cycle=cycle) if size <= EXACT_STAGES else _nearest(costs)
    if not order:
        return None
    # prompts take every hop but the one back, so the dearest hop becomes that
    hops = [costs[a, b] for a, b in pairwise([order[-1], *order])]
    back = hops.index(max(hops))
    return tuple(order[back:] + order[:back]) if hops.count(inf) <= (not cycle) else None


def _shortest(costs: Array, *, cycle: bool) -> list[int]:
    """Nothing where there is no way."""
    size = len(costs)
    reach = np.full((1 << size, size), inf)
    came = np.zeros((1 << size, size), dtype=np.intp)
    for first in range(1 if cycle else size):
        reach[1 << first, first] = 0.0
    for subset in range(1, 1 << size):
        if not np.isfinite(reach[subset]).any():
            continue
        ways = reach[subset][:, None] + costs
        best = ways.argmin(axis=0)
        for target in range(size):
            if not subset >> target & 1:
                grown = subset | 1 << target
                if ways[best[target], target] < reach[grown, target]:
                    reach[grown, target] = ways[best[target], target]
                    came[grown, target] = best[target]
    subset = (1 << size) - 1
    whole = reach[subset] + costs[:, 0] if cycle else reach[subset]
    last = int(whole.argmin())
    if not isfinite(whole[last]):
        return []
    order = [last]
    while len(order) < size:
        subset, last = subset & ~(1 << last), int(came[subset, last])
        order.append(last)
    return order[::-1]


def _nearest(costs: Array) -> list[int]:
    open_ends = costs.copy()
    np.fill_diagonal(open_ends, inf)
    order = [int(np.unravel_index(open_ends.argmin(), open_ends.shape)[0])]
    while len(order) < len(costs):
        row = open_ends[order[-1]].copy()
        row[order] = inf
        rest = [index for index in range(len(costs)) if index not in order]
        order.append(int(row.argmin()) if np.isfinite(row).any() else rest[0])
    return order


# --- how wide the stages are, and which layers they hold


def _tp_choices(parts: Sequence[BoxGpus], model: ModelShape) -> Iterator[tuple[int, ...]]:
    """TP degrees for the boxes. Equal boxes are cut alike: there is nothing to gain by cutting them
    differently."""
    choices: dict[BoxGpus, tuple[int, ...]] = {
        part: (part.gpus,) if part.atomic else tuple(tp for tp in _divisors_of(part.gpus) if model.heads % tp == 0)
        for part in parts
    }
    kinds = list(choices)
    if prod(len(options) for options in choices.values()) > MAX_SHAPES:
        widest = sorted({tp for options in choices.values() for tp in options})
        ways = [tuple(max(tp for tp in choices[kind] if tp <= max(limit, choices[kind][0])) for kind in kinds)
                for limit in widest]  # fmt: skip
    else:
        ways = list(product(*choices.values()))
    for way in ways:
        widths = dict(zip(kinds, way, strict=True))
        if sum(part.gpus // widths[part] for part in parts) <= model.layers:
            yield tuple(widths[part] for part in parts)


def _divisors_of(number: int) -> tuple[int, ...]:
    return tuple(tp for tp in range(1, number + 1) if number % tp == 0)


def _layer_splits(
    stages: Sequence[tuple[int, int]], parts: Sequence[BoxGpus], needs: ServiceNeeds
) -> Iterator[tuple[int, ...]]:
    """Layers in proportion to compute, to memory bandwidth, and to memory; none where the memory
    does not do."""
    model, ends = needs.model, len(stages) - 1
    known: dict[tuple[int, int, bool, bool], int] = {}
    caps = []
    for number, (box, tp) in enumerate(stages):
        key = box, tp, number == 0, number == ends
        if key not in known:
            known[key] = _most_layers(parts[box].gpu, tp, needs, first=key[2], last=key[3])
        caps.append(known[key])
    if min(caps) < 1 or sum(caps) < model.layers:
        return
    cards = [(parts[box].gpu, tp) for box, tp in stages]
    for rates in (
        [gpu.tflops * tp for gpu, tp in cards],
        [gpu.memory_gbps * tp for gpu, tp in cards],
        [gpu.memory_gib * tp for gpu, tp in cards],
    ):
        yield split_layers(model.layers, rates, caps)


def _most_layers(gpu: GpuSpec, tp: int, needs: ServiceNeeds, *, first: bool, last: bool) -> int:
    """That a stage has memory for, with the longest request."""
    model = needs.model
    room = tp * gpu.memory_gib * GIB * MEMORY_SHARE
    ends = model.stage_weight_bytes(1, first=first, last=last) - model.layer_weight_bytes
    kv = model.kv_bytes_per_token_layer * max(1.0, tp / model.kv_heads) * needs.longest
    return int((room - ends) // (model.layer_weight_bytes + kv))


def split_layers(layers: int, rates: Sequence[float], caps: Sequence[int]) -> tuple[int, ...]:
    """Whole layers for stages of these speeds, at least 1 and at most `caps` each, so that the
    slowest is fastest.

    Every layer goes where it hurts least, which is optimal for the slowest stage. `sum(caps)` must
    be at least `layers`, and there must be no more stages than layers.
    """
    # the slowest stage takes at least this long, so what each holds by then needs no choice
    least = (layers - len(rates)) / sum(rates)
    held = [max(1, min(cap, int(rate * least))) for rate, cap in zip(rates, caps, strict=True)]
    ready = [((count + 1) / rates[stage], stage) for stage, count in enumerate(held) if caps[stage] > count]
    heapify(ready)
    for _ in range(layers - sum(held)):
        _, stage = ready[0]
        held[stage] += 1
        if held[stage] < caps[stage]:
            heapreplace(ready, ((held[stage] + 1) / rates[stage], stage))
        else:
            heappop(ready)
    return tuple(held)
