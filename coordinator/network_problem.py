"""The running network as a problem of the planner.

Weights are loaded already: `pipelines` says which boxes are a replica together, most of all those
that are one now. So every replica keeps its stages, and what is left to decide is who does what,
and who sends to whom. Other groups of boxes are for `regrouping/`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, log
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .calibration import BATCH, calibrate_boxes, measured_costs
from .capacity import BoxView, KvCodec, Links, LinkView
from .costs.gpus import GpuSpec, Specs, gpu_table
from .costs.model_shape import KV_8_BIT, KV_16_BIT, ModelShape
from .costs.profiled_times import ProfiledTimes
from .costs.replica import GIB, StageHardware, kv_capacity_tokens
from .demand import Demand, is_idle
from .demand_meter import expected_workload
from .names import count_of
from .pipelines import BoxGroup, group_boxes
from .plan import Phase, Plan, PlanError, Stage
from .planning.lower.evaluator import LowerLevel
from .planning.lower.parallel import MEMORY_SHARE
from .planning.lower.replicas import ConfigurationCache
from .planning.model.cluster import Box, Cluster
from .planning.model.problem import Group, Problem, Slice, Solution
from .planning.model.slo import SloScale, slo_by
from .planning.model.workload import Service, Slo, Workload
from .planning.reasons import pipeline_times
from .planning.upper.search_space import make_solution
from .profile import MeasuredCosts
from .settings import NetworkPlanSettings

SLO_SCALE: Final = SloScale(5.0)
"""Deadlines: multiples of the mean request's times alone on the fastest replica."""

READY: Final = 1.0
"""Plans are for at least this share of what all replicas carry alone: with few requests every plan
looks alike and would leave most boxes out."""

STEP: Final = log(1.03)
"""Measured figures are rounded to 3 % steps, so that equal cards count as equal."""

SLOWEST_TFLOPS: Final = 1e-3
SLOWEST_MEMORY_GBPS: Final = 0.1
"""A card measured slower counts as this fast: solvers lose smaller rates."""

UNNAMED: Final = "CPU"
"""What a box without a card computes with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkProblem:
    """`heads`: replicas by the id of their first box; `stages`, which `evaluator` keeps; `asked`:
    requests per second seen or assumed, at most those planned for; `why`: reasons for people."""

    problem: Problem
    evaluator: LowerLevel
    heads: Mapping[str, tuple[Slice, ...]]
    stages: Mapping[str, tuple[Stage, ...]]
    asked: float
    why: tuple[str, ...]
    settings: NetworkPlanSettings = field(default_factory=NetworkPlanSettings)

    @property
    def service(self) -> Service:
        """The only one."""
        return self.problem.services[0]

    def allowed(self, head: str) -> tuple[Phase, ...]:
        """What a replica may do: its owner's phase, else any; alone it does both."""
        if len(self.heads) == 1:
            return (Phase.MIXED,)
        pin = self.problem.pinned.get(head)
        return (Phase.MIXED, Phase.PREFILL, Phase.DECODE) if pin is None else (pin,)

    @property
    def colocated(self) -> Solution:
        """Every replica by itself, as far as owners let it."""
        return self.solution({head: self.allowed(head)[0] for head in self.heads})

    @property
    def colocated_rate(self) -> float:
        """Requests per second that all replicas would carry so."""
        return self.evaluator.score(self.colocated).capacity * self.service.workload.rate

    def solution(self, phases: Mapping[str, Phase]) -> Solution:
        """These replicas, by head, in their phases."""
        return make_solution(Group(self.heads[head], phase) for head, phase in phases.items())

    def phases(self, solution: Solution) -> dict[str, Phase]:
        """By head."""
        found = {group.slices: group.phase for group in solution}
        return {head: found[slices] for head, slices in self.heads.items()}

    def ids(self, solution: Solution) -> list[str]:
        """The heads of a solution's groups, in their order."""
        names = {slices: head for head, slices in self.heads.items()}
        return [names[group.slices] for group in solution]


def build_network_problem(
    boxes: Iterable[BoxView],
    links: Iterable[LinkView],
    demands: Iterable[Demand],
    *,
    service: str,
    codec: KvCodec,
    previous: Plan | None,
    slo: Slo | SloScale = SLO_SCALE,
    rate: float | None = None,
) -> NetworkProblem | None:
    """None where no box or group of boxes is ready. The order of boxes, links and demands does not
    matter.

    `previous`: the running plan, whose pipelines go on. `slo`: deadlines, or multiples of what the
    mean request takes alone on the fastest replica here. `rate`: requests per second to plan for,
    whatever `demands` and READY say. Raises PlanError for a box that is there twice."""
    why: list[str] = []
    offered = sorted((box for box in boxes if box.service == service and box.usable), key=lambda box: box.peer)
    between = Links(links)
    usable = {box.peer: box for box in _select_boxes(offered, why)}
    groups = group_boxes(list(usable.values()), between, previous, why)
    if not groups:
        return None
    model = _common_model((usable[stage.peer] for group in groups for stage in group.stages), why)
    rooms = [_kv_room(group, usable, previous) for group in groups]
    told = list(demands)
    workload = expected_workload(told, longest=max(rooms))
    workload = workload if rate is None else replace(workload, rate=rate)
    asked = 0.0 if rate is None and is_idle(told) else workload.rate
    longest = int((workload.prompts + workload.outputs).max())
    # Engines' own steps are compared at the lengths of this traffic, so the workload has to be there first.
    usable = calibrate_boxes(usable, workload)
    cards = {
        stage.peer: _card_for_stage(usable[stage.peer], model, stage, max(room, longest) + part)
        for group, room, part in zip(groups, rooms, _fractional_tokens(groups), strict=True)
        for stage in group.stages
    }
    cluster = _make_cluster([usable[peer] for peer in sorted(cards)], cards, between)
    measured = _find_measured(groups, usable, cards, workload, why)
    cluster = replace(cluster, boxes=tuple(replace(box, measured=measured.get(box.id)) for box in cluster.boxes))
    if not isinstance(slo, Slo):
        times = {group.head: pipeline_times(model, group.stages, cluster) for group in groups}
        # A box that calls itself faster than its hardware is makes no deadline tighter for the others.
        times |= {peer: ProfiledTimes(times[peer], costs, fastest=1.0) for peer, costs in measured.items()}
        alone = [slo_by(times[group.head], workload, slo) for group in groups]
        slo = min(alone, key=lambda deadlines: deadlines.e2e_s)
    ours = Service(
        name=service, model=model, workload=workload, slo=slo, codec=codec.name, kv_bits=codec.bits
    )  # fmt: skip
    problem = Problem(cluster=cluster, services=(ours,), pinned=_choose_pins(groups, usable, why))
    places = {box.id: number for number, box in enumerate(cluster.boxes)}
    heads = {
        group.head: tuple(sorted(Slice(places[stage.peer], stage.tp) for stage in group.stages)) for group in groups
    }
    loaded = {heads[group.head]: (_stage_parts(group.stages, places),) for group in groups}
    memory = ConfigurationCache()
    found = NetworkProblem(
        problem=problem, evaluator=LowerLevel(problem, loaded, memory), heads=heads,
        stages={group.head: group.stages for group in groups}, asked=asked, why=tuple(why),
    )  # fmt: skip
    # What the replicas carry is known only by evaluating them: a problem for more than is asked is made in a second go.
    least = 0.0 if rate is not None else READY * found.colocated_rate
    if least <= workload.rate:
        return found
    ours = replace(ours, workload=replace(workload, rate=least))
    problem = replace(problem, services=(ours,))
    return replace(found, problem=problem, evaluator=LowerLevel(problem, loaded, memory))


def _find_measured(
    groups: Sequence[BoxGroup],
    usable: Mapping[str, BoxView],
    cards: Mapping[str, GpuSpec],
    workload: Workload,
    why: list[str],
) -> dict[str, MeasuredCosts]:
    """By box that serves alone: what its engine's own steps say, where that is something else than
    what its cards are taken for."""
    found: dict[str, MeasuredCosts] = {}
    for group in groups:
        box = usable[group.head]
        is_alone = box.whole and len(group.stages) == 1
        costs = measured_costs(box, cards[box.peer], workload) if is_alone else None
        if costs is not None:
            found[box.peer] = costs
            why.append(_explain_measured(box.peer, costs, workload))
    return found


def _explain_measured(peer: str, costs: MeasuredCosts, workload: Workload) -> str:
    prompt, held = workload.mean_prompt, workload.mean_prompt + workload.mean_output / 2
    factors = [
        f"{phase} steps take {told.seconds(*at) / modelled.seconds(*at):.2g} times as long"
        for phase, at, told, modelled in (
            ("prefill", (1.0, prompt), costs.told.prefill, costs.modelled.prefill),
            ("decode", (BATCH, held), costs.told.decode, costs.modelled.decode),
        )
        if told is not None and modelled is not None
    ]
    return f"{peer} counts by its engine's own steps: {' and '.join(factors)} as its hardware is taken for"


def _select_boxes(offered: list[BoxView], why: list[str]) -> list[BoxView]:
    """The boxes to plan with, in the order given: of one model, and all real or all emulated."""
    for box, following in pairwise(offered):
        if box.peer == following.peer:
            raise PlanError(f"box {box.peer} is there twice")
    if any(box.emulated for box in offered) and not all(box.emulated for box in offered):
        emulated = [box.peer for box in offered if box.emulated]
        why.append(f"{', '.join(emulated)} left out: emulated boxes do not share requests with real ones")
        offered = [box for box in offered if not box.emulated]
    offers: defaultdict[ModelShape, list[BoxView]] = defaultdict(list)
    for box in offered:
        offers[_comparable(box.model)].append(box)
    common = max(offers, key=lambda model: _rank_model(model, offers[model]), default=None)
    why += [
        f"{box.peer} left out: its model ({box.layers} layers of {box.model.hidden}) is not that of the others "
        f"({common.layers} layers of {common.hidden})"
        for box in offered
        if common is not None and _comparable(box.model) != common
    ]
    return offers[common] if common is not None else []


def _rank_model(model: ModelShape, boxes: Sequence[BoxView]) -> tuple[object, ...]:
    """Of models with one name: the one that can be served, then the one on most boxes."""
    return sum(box.fits for box in boxes) >= model.layers, len(boxes), msgspec.structs.astuple(model)


def _comparable(model: ModelShape) -> ModelShape:
    """Without the name, which is a matter of where a box has the model from, and without how its engine keeps KV, which
    is its owner's choice: KV goes from either kind of engine to the other."""
    return msgspec.structs.replace(model, name="", kv_value_bytes=KV_16_BIT)


def _common_model(boxes: Iterable[BoxView], why: list[str]) -> ModelShape:
    """Of boxes with one model: KV counts as 8 bits where all engines keep it so. What fits into each is told by the
    engines themselves; where they differ, what decode reads counts as 16 bits until their own steps say otherwise."""
    models = [box.model for box in boxes]
    kept = {model.kv_value_bytes for model in models}
    if len(kept) > 1:
        count = sum(model.kv_value_bytes == KV_8_BIT for model in models)
        why.append(f"{count} of {count_of(len(models), 'box')} keep KV in 8 bits, the others in 16")
    return models[0].with_kv_value_bytes(max(kept))


def _kv_room(group: BoxGroup, usable: Mapping[str, BoxView], previous: Plan | None) -> int:
    """Tokens of KV that a replica holds, by its engine, or by memory before it starts."""
    head = usable[group.head]
    alone = head.whole and len(group.stages) == 1
    planned = any(replica.stages == group.stages for replica in (previous.replicas if previous else ()))
    started = not head.stages if alone else planned
    if started and head.kv_tokens:
        return head.kv_tokens if head.specs else max(1, int(_round_figure(head.kv_tokens)))
    stages = [
        StageHardware(
            make_card(usable[stage.peer], usable[stage.peer].memory_gib / stage.tp), stage.tp, stage.layers,
            usable[stage.peer].card_link_gbps,
        )
        for stage in group.stages
    ]  # fmt: skip
    return max(1, kv_capacity_tokens(head.model, stages, memory_share=MEMORY_SHARE))


def _fractional_tokens(groups: Sequence[BoxGroup]) -> list[float]:
    """For each replica, memory besides whole tokens: room for rounding, another part for each
    pipeline, so that boxes of two are not alike and exchanged."""
    pipelines = [group.head for group in groups if len(group.stages) > 1]
    return [
        (pipelines.index(group.head) + 1) / (len(pipelines) + 1) if len(group.stages) > 1 else 0.5 for group in groups
    ]


def _card_for_stage(box: BoxView, model: ModelShape, stage: Stage, tokens: float) -> GpuSpec:
    """One of the box's cards with exactly the memory that the stage and so many tokens take, so
    that what the engine found counts."""
    weights = model.stage_weight_bytes(
        stage.layers, first=stage.first_layer == 0, last=stage.last_layer == model.layers
    )
    per_token = stage.layers * model.kv_bytes_per_token_layer * max(1.0, stage.tp / model.kv_heads)
    return make_card(box, (weights + tokens * per_token) / (stage.tp * GIB * MEMORY_SHARE))


def make_card(box: BoxView, memory_gib: float) -> GpuSpec:
    """One of a box's cards, or its part of one, with this memory: as the table has it, or as its engine measured."""
    if box.specs is not None:
        card = gpu_table().find(box.card, box.specs)
        rates = {"tflops": card.tflops * box.part, "memory_gbps": card.memory_gbps * box.part}
        return msgspec.structs.replace(card, memory_gib=memory_gib, **rates)
    tflops = _round_figure(max(SLOWEST_TFLOPS, box.part * box.compute_tflops / box.tp))
    memory_gbps = _round_figure(max(SLOWEST_MEMORY_GBPS, box.part * box.memory_gbps / box.tp))
    return GpuSpec(
        name=f"{box.card or UNNAMED} ({tflops:.3g} TFLOP/s, {memory_gbps:.3g} GB/s)", memory_gib=memory_gib,
        memory_gbps=memory_gbps, tflops=tflops, nvlink_gbps=0.0, pcie_gen=0, usd_per_hour=0.0, specs=Specs.ENGINE,
    )  # fmt: skip


def _round_figure(figure: float) -> float:
    return exp(round(log(figure) / STEP) * STEP)


def _make_cluster(boxes: Sequence[BoxView], cards: Mapping[str, GpuSpec], between: Links) -> Cluster:
    def matrix(figure: Callable[[str, str], float]) -> NDArray[np.float64]:
        return np.array([[figure(one.peer, two.peer) for two in boxes] for one in boxes])

    return Cluster(
        boxes=tuple(
            Box(
                id=box.peer, gpu=cards[box.peer], gpus=box.tp, site=box.site, usd_per_hour=box.usd_per_hour,
                gpu_link_gbps=box.card_link_gbps, atomic=True,
            )
            for box in boxes
        ),
        gbps=matrix(between.gbps), rtt_s=matrix(between.rtt_s), usd_per_gb=matrix(between.usd_per_gb),
    )  # fmt: skip


def _choose_pins(groups: Sequence[BoxGroup], usable: Mapping[str, BoxView], why: list[str]) -> dict[str, Phase]:
    """By box, owners' phases as far as possible: one per replica, both phases somewhere."""
    pins: dict[str, Phase] = {}
    for group in groups:
        asked = sorted({phase for stage in group.stages if (phase := usable[stage.peer].phase) is not None})
        if len(asked) > 1:
            why.append(f"{group.head} is free in what it does: its boxes are pinned to {' and '.join(asked)}")
        elif asked:
            pins[group.head] = asked[0]
    done = {pins.get(group.head) for group in groups}
    if done in ({Phase.PREFILL}, {Phase.DECODE}):
        last = groups[-1].head
        why.append(f"{last} is pinned to {pins[last]} and does both phases all the same: nobody else does the other")
        pins[last] = Phase.MIXED
    return {stage.peer: pins[group.head] for group in groups if group.head in pins for stage in group.stages}


def _stage_parts(stages: Sequence[Stage], places: Mapping[str, int]) -> tuple[tuple[int, int, int], ...]:
    """As the planner has them: the part's number in the replica's slices, TP, layers."""
    order = sorted(stages, key=lambda stage: places[stage.peer])
    return tuple((order.index(stage), stage.tp, stage.layers) for stage in stages)
