"""SeaLLM's setting, as far as it can be had: its models, its lengths, its 32 GPUs, and the systems that it compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....coordinator.costs.gpus import Specs, gpu_table
from ....coordinator.costs.model_shape import model_shape
from ....coordinator.costs.replica import StageHardware, kv_capacity_tokens, replica_times
from ....coordinator.costs.step_times import StepTimes, chunk_pairs
from ....coordinator.placement.replay import PeriodReplay
from ....coordinator.placement.seallm import place_seallm
from ....coordinator.placement.search import search_placement
from ....coordinator.placement.values import Groups, Period, PlacementBox, PlacementProblem, PlacementService
from ....coordinator.sharing.orders import DOUBLING_BUDGET, TURN_ORDERS
from ....coordinator.sharing.service_profile import ServiceProfile, expect_service, lone_execution_s
from ...engine.engine import Engine
from ...engine.shared_engine import SharedEngine, SharedService
from ...placement.engines import FleetEngine
from ...placement.fleet import ENGINE, Fleet, period_of, serve_groups
from ...records import Outcomes, Trace
from ...workloads import Lengths
from ..setting import lengths as azure_lengths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CARD: Final = "A100-SXM4-80GB"
"""An A800 computes and keeps as much; its NVLink is slower."""

NVLINK_GBPS: Final = 2400.0
"""400 GB/s, as much as cost models count with of them."""

SAMPLE: Final = 400
"""Requests that are drawn of a service for what is expected of it."""

SPREAD: Final = 0.7
"""Deviation over mean of lengths of which only the mean is known, and by what multiple of it they are cut off."""

LONGEST: Final = 4.0
PEAK_S: Final = 30.0
"""For how long the rate of a service stays as it is."""

PEAK_SHAPE: Final = 1.0
"""Of the gamma distribution of those rates: their deviation is as large as their mean."""

SHIFT_SHAPE: Final = 4.0
"""Of those rates where it is popularity that changes: their deviation is half of their mean."""

SKEW: Final = 9.0
"""How much more GPU time the popular service of a group needs than the other."""

TYPICAL_BATCH: Final = 16
"""Requests of a decode step, where it is said how much GPU time a service needs."""


@dataclass(frozen=True, slots=True)
class LengthsKind:
    """What a service is asked: requests as in table 1 (mean tokens of prompts and answers), or a cluster of one of
    Azure's traces, by its place among `clusters` from short to long."""

    prompt: float = 0.0
    output: float = 0.0
    azure: str = ""
    cluster: int = 0
    clusters: int = 1


@dataclass(frozen=True, slots=True)
class ModelService:
    """A service of the experiment. `is_popular`: it is the one of its group that more is asked of."""

    name: str
    model: str
    kind: LengthsKind
    is_popular: bool = False


SHAREGPT: Final = LengthsKind(73.0, 426.9)
LONGBENCH: Final = LengthsKind(13186.8, 21.1)
HUMANEVAL: Final = LengthsKind(156.5, 66.9)

SERVICES: Final = (
    ModelService("talk-long", "llama2-70b", LengthsKind(azure="conversation", cluster=2, clusters=3), is_popular=True),
    ModelService("coding-long", "llama2-70b", LengthsKind(azure="coding", cluster=1, clusters=2)),
    ModelService("summaries", "llama2-13b", LONGBENCH),
    ModelService(
        "talk-middle", "llama2-13b", LengthsKind(azure="conversation", cluster=1, clusters=3), is_popular=True
    ),
    ModelService("chat", "llama2-7b", SHAREGPT, is_popular=True),
    ModelService("code", "opt-6.7b", HUMANEVAL),
    ModelService("coding-short", "llama2-7b", LengthsKind(azure="coding", cluster=0, clusters=2)),
    ModelService("talk-short", "opt-6.7b", LengthsKind(azure="conversation", cluster=0, clusters=3), is_popular=True),
    ModelService("code-70b", "llama2-70b", HUMANEVAL),
    ModelService("chat-70b", "llama2-70b", SHAREGPT, is_popular=True),
    ModelService("chat-13b", "llama2-13b", SHAREGPT, is_popular=True),
    ModelService("code-13b", "llama2-13b", HUMANEVAL),
    ModelService("coding-7b", "llama2-7b", LengthsKind(azure="coding", cluster=1, clusters=2)),
    ModelService("talk-7b", "llama2-7b", LengthsKind(azure="conversation", cluster=1, clusters=3), is_popular=True),
    ModelService("chat-opt", "opt-6.7b", SHAREGPT, is_popular=True),
    ModelService("coding-opt", "opt-6.7b", LengthsKind(azure="coding", cluster=0, clusters=2)),
)
"""As in the figures the first 8; all 16 where it says so."""


class SharingGroup(NamedTuple):
    """Two services, by number, that share 8 GPUs; their engines are spread over at least `fewest` each."""

    one: int
    two: int
    fewest: int


GROUPS: Final = (
    SharingGroup(0, 1, 4), SharingGroup(2, 3, 2), SharingGroup(4, 5, 1), SharingGroup(6, 7, 1),
    SharingGroup(8, 9, 4), SharingGroup(10, 11, 2), SharingGroup(12, 13, 1), SharingGroup(14, 15, 1),
)  # fmt: skip
FEW: Final = 8
"""Services of the figures: the first ones, in the first groups."""

GPUS: Final = 32
GPUS_OF_A_BOX: Final = 8
GPUS_OF_A_GROUP: Final = 8
SEALLM: Final = "seallm"
DEFAULT: Final = "default"
LOOKED_BACK: Final = 6000
"""Requests of it, at most."""

HISTORY_S: Final = 180.0
"""Of requests by which services are placed: before those that are served, with other bursts."""

DEGREES: Final = (1, 2, 4, 8)
"""Of tensor parallelism."""


def draw_lengths(kind: LengthsKind, rng: np.random.Generator) -> Lengths:
    """To draw a service's requests from."""
    if not kind.azure:
        size = 4000
        return Lengths(_draw_tokens(kind.prompt, size, rng), _draw_tokens(kind.output, size, rng), "table 1")
    return cluster_lengths(kind.azure, kind.clusters)[kind.cluster]


def _draw_tokens(mean: float, count: int, rng: np.random.Generator) -> Ints:
    """Log-normal, cut off, with this mean but for that."""
    variance = log(1.0 + SPREAD**2)
    drawn = rng.lognormal(log(mean) - variance / 2.0, variance**0.5, count)
    return np.clip(np.rint(drawn), 1, LONGEST * mean).astype(np.int64)


@cache
def cluster_lengths(azure: str, clusters: int) -> tuple[Lengths, ...]:
    """Of one of Azure's traces by k-means over the logarithms of both lengths, from short prompts to long ones."""
    drawn = azure_lengths(azure)
    points = np.log(np.stack([drawn.prompt, drawn.output], axis=1).astype(np.float64))
    order = np.argsort(points.sum(axis=1), kind="stable")
    centres = points[order[(2 * np.arange(clusters) + 1) * len(points) // (2 * clusters)]]  # quantiles: no chance in it
    nearest = np.zeros(len(points), dtype=np.int64)
    for _ in range(50):
        nearest = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2).argmin(axis=1)
        centres = np.stack([points[nearest == number].mean(axis=0) for number in range(clusters)])
    return tuple(
        Lengths(drawn.prompt[nearest == number], drawn.output[nearest == number], f"{drawn.source}, a cluster")
        for number in np.argsort(centres[:, 0])
    )


def draw_bursts(
    lengths: Lengths, *, rate: float, seconds: float, rng: np.random.Generator, shape: float = PEAK_SHAPE
) -> Trace:
    """Poisson arrivals whose rate changes every PEAK_S, at least one of them. `shape`: of those rates' distribution."""
    spans = int(np.ceil(seconds / PEAK_S))
    rates = rate * rng.gamma(shape, 1.0 / shape, spans)
    counts = rng.poisson(rates * PEAK_S)
    counts[0] = max(1, counts[0])
    arrival = np.sort(np.repeat(np.arange(spans) * PEAK_S, counts) + rng.uniform(0.0, PEAK_S, counts.sum()))
    arrival = arrival[: max(1, int(np.searchsorted(arrival, seconds)))]
    rows = rng.integers(len(lengths.prompt), size=len(arrival))
    return Trace(
        ids=np.arange(len(arrival)),
        arrival_s=arrival,
        prompt=lengths.prompt[rows],
        output=lengths.output[rows],
        lengths=lengths.source,
        arrivals=f"Poisson, {rate:g} requests/s on average, another rate every {PEAK_S:g} s",
    )


@cache
def times_at(model: str, tp: int) -> StepTimes:
    """Of a model over so many GPUs."""
    return replica_times(model_shape(model), [_stage(model, tp)])


def _stage(model: str, tp: int) -> StageHardware:
    return StageHardware(gpu_table().find(CARD, Specs.MEASURED), tp, model_shape(model).layers, NVLINK_GBPS)


def kv_bytes(models: Sequence[str], tp: int) -> int:
    """That so many GPUs have room for beside the weights of several models; 0 or less: those do not fit."""
    shapes = [model_shape(model) for model in models]
    alone = kv_capacity_tokens(shapes[0], [_stage(models[0], tp)]) * shapes[0].kv_bytes_per_token
    return alone - sum(shape.weight_bytes for shape in shapes[1:])


def fewest_gpus(model: str) -> int:
    """The least power of two on which a model has room for its weights and a long prompt."""
    return next(tp for tp in (1, 2, 4, 8) if kv_bytes([model], tp) > 0.1 * model_shape(model).weight_bytes)


@cache
def lone_latencies(service: ModelService) -> tuple[Ints, Ints, Floats]:
    """Prompts, answers and execution times of requests of a service, each alone on the fewest GPUs."""
    rng = np.random.default_rng([23, len(service.name), SERVICES.index(service)])
    drawn = draw_lengths(service.kind, rng)
    rows = rng.integers(len(drawn.prompt), size=SAMPLE)
    times = times_at(service.model, fewest_gpus(service.model))
    return drawn.prompt[rows], drawn.output[rows], lone_latency_s(times, drawn.prompt[rows], drawn.output[rows])


def lone_latency_s(times: StepTimes, prompts: Ints, outputs: Ints) -> Floats:
    """Of each request alone."""
    pairs = zip(prompts.tolist(), outputs.tolist(), strict=True)
    return np.array([lone_execution_s(times, prompt, output) for prompt, output in pairs])


@cache
def traffic_shares(skew: float = SKEW, services: int = FEW, *, turned: bool = False) -> tuple[float, ...]:
    """Of all requests, by service: every group needs as much GPU time, by the cost model, and its popular service
    `skew` times that of the other; `turned`: the other is popular."""
    wanted = [(skew if service.is_popular is not turned else 1.0) / _gpu_s(service) for service in SERVICES[:services]]
    return tuple(share / sum(wanted) for share in wanted)


def _gpu_s(service: ModelService) -> float:
    """That a request of a service takes, whose decode steps are shared with others."""
    gpus = fewest_gpus(service.model)
    times, (prompts, outputs, _) = times_at(service.model, gpus), lone_latencies(service)
    prefill_s = np.mean([times.prefill_s(prompt, chunk_pairs(0, prompt)) for prompt in prompts.tolist()])
    context = float((prompts + outputs / 2).mean())
    step_s = times.decode_line(TYPICAL_BATCH).step_s(TYPICAL_BATCH * context)
    return gpus * (float(prefill_s) + float(outputs.mean()) * step_s / TYPICAL_BATCH)


def draw_traces(
    rate: float,
    seconds: float,
    seed: int,
    *,
    noise: float = 0.0,
    skew: float = SKEW,
    services: int = FEW,
    run: int = 1,
) -> dict[int, Trace]:
    """Of the first so many services, by number. `noise`: each answer's length is off by a normal deviation of so many
    times it. `run`: requests of a service that come in a row (above 1: whose request comes when is changed)."""
    traces = {}
    for number, service in enumerate(SERVICES[:services]):
        rng = np.random.default_rng([5, seed, number])
        drawn = draw_lengths(service.kind, rng)
        share = traffic_shares(skew, services)[number]
        trace = draw_bursts(drawn, rate=rate * share, seconds=seconds, rng=rng)
        if noise:
            off = rng.normal(0.0, noise * trace.output)
            trace = replace(trace, output=np.maximum(1, np.rint(trace.output + off)).astype(np.int64))
        traces[number] = trace
    return _line_up(traces, run) if run > 1 else traces


def _line_up(traces: Mapping[int, Trace], run: int) -> dict[int, Trace]:
    """The same requests at the same moments, but `run` of a service in a row: those of the service whose turn it would
    have been."""
    period = period_of(traces)
    left = {number: len(trace) for number, trace in traces.items()}
    order: list[int] = []
    for number in period.service.tolist():
        taken = min(run, left[number])
        left[number] -= taken
        order += [number] * taken
    service = np.array(order)
    return {number: replace(trace, arrival_s=period.arrival_s[service == number]) for number, trace in traces.items()}


def draw_shifts(rate: float, seconds: float, seed: int, shifts: int, shape: float = SHIFT_SHAPE) -> dict[int, Trace]:
    """Of the first services, in parts of as many seconds each: with every part the other service of each pair is the
    popular one."""
    parts = []
    for part in range(shifts):
        shares = traffic_shares(SKEW, FEW, turned=part % 2 == 1)
        rngs = [np.random.default_rng([7, seed, part, number]) for number in range(FEW)]
        parts.append([
            draw_bursts(
                draw_lengths(SERVICES[number].kind, rng), rate=rate * shares[number], seconds=seconds, rng=rng,
                shape=shape,
            )
            for number, rng in enumerate(rngs)
        ])  # fmt: skip
    return {number: _join([part[number] for part in parts], seconds) for number in range(FEW)}


def _join(parts: Sequence[Trace], seconds: float) -> Trace:
    """One behind the other."""
    arrival = np.concatenate(
        [np.minimum(part.arrival_s, seconds) + place * seconds for place, part in enumerate(parts)]
    )
    return Trace(
        ids=np.arange(len(arrival)),
        arrival_s=arrival,
        prompt=np.concatenate([part.prompt for part in parts]),
        output=np.concatenate([part.output for part in parts]),
        lengths=parts[0].lengths,
        arrivals=f"{parts[0].arrivals}, {len(parts)} parts",
    )


def dedicated_engines(number: int, tp: int, gpus: int = GPUS_OF_A_GROUP // 2) -> list[FleetEngine]:
    """So many GPUs for one service, as vLLM serves it: first come, first served, chunks beside decodes."""
    model = SERVICES[number].model
    tokens = kv_bytes([model], tp) // model_shape(model).kv_bytes_per_token
    return [
        FleetEngine(Engine(times_at(model, tp), ENGINE, kv_tokens=tokens), {number: SERVICES[number].name})
        for _ in range(gpus // tp)
    ]


def shared_engines(group: SharingGroup, tp: int, order: str, gpus: int = GPUS_OF_A_GROUP) -> list[FleetEngine]:
    """So many GPUs for two services that step one at a time."""
    members = {number: SERVICES[number] for number in group[:2]}
    room = kv_bytes([service.model for service in members.values()], tp)
    names = {number: service.name for number, service in members.items()}
    return [
        FleetEngine(
            SharedEngine(
                {service.name: _host(service, tp) for service in members.values()},
                TURN_ORDERS[order],
                ENGINE,
                kv_bytes=room,
            ),
            names,
        )
        for _ in range(gpus // tp)
    ]


def _host(service: ModelService, tp: int) -> SharedService:
    """With a profile of its own, from what the cost model expects."""
    times = times_at(service.model, tp)
    prompts, outputs, _ = lone_latencies(service)
    profile = ServiceProfile(expect_service(times, prompts, outputs))
    return SharedService(times, model_shape(service.model).kv_bytes_per_token, profile)


def serve_dedicated(number: int, trace: Trace, gpus: int = GPUS_OF_A_GROUP // 2) -> dict[int, Outcomes]:
    """One service on GPUs of its own, over as many at once as serve it best; no result where it fits on none."""
    degrees = [tp for tp in DEGREES if fewest_gpus(SERVICES[number].model) <= tp <= gpus]
    runs = [serve(dedicated_engines(number, tp, gpus), {number: trace}) for tp in degrees]
    return min(runs, key=sum_normalized, default=serve([], {number: trace}))


def serve_shared(
    group: SharingGroup, order: str, traces: Mapping[int, Trace], gpus: int = GPUS_OF_A_GROUP
) -> dict[int, Outcomes]:
    """The two services of a group, over as many GPUs at once as serve them best; no result where they fit on none."""
    own = {number: traces[number] for number in (group.one, group.two)}
    degrees = [tp for tp in DEGREES if group.fewest <= tp <= gpus]
    return min((serve(shared_engines(group, tp, order, gpus), own) for tp in degrees), key=sum_normalized,
               default=serve([], own))  # fmt: skip


def sum_normalized(served: Mapping[int, Outcomes]) -> float:
    """Of all requests, latency over the average execution time of their service."""
    return sum(float(run.e2e_s.sum()) / execution_s(number) for number, run in served.items())


def execution_s(number: int) -> float:
    """On average, of a service's requests, each alone on the fewest GPUs."""
    return float(lone_latencies(SERVICES[number])[2].mean())


def serve(engines: Sequence[FleetEngine], traces: Mapping[int, Trace]) -> dict[int, Outcomes]:
    """All requests, each at the engine with the fewest open ones that has its service; by the service's number."""
    fleet = Fleet(traces)
    for number, engine in enumerate(engines):
        fleet.add(number, engine)
    return fleet.run()


# --- placed


def placement_problem(period: Period, *, services: int = FEW, gpus: int = GPUS) -> PlacementProblem:
    """The first so many services on boxes of 8 GPUs, with all weights on their disks."""
    card = gpu_table().find(CARD, Specs.MEASURED)
    return PlacementProblem(
        boxes=[
            PlacementBox(id=f"box-{number}", gpu=card, gpus=GPUS_OF_A_BOX, link_gbps=NVLINK_GBPS,
                         on_disk=frozenset(range(services)))
            for number in range(gpus // GPUS_OF_A_BOX)
        ],
        services=[PlacementService(name=each.name, model=model_shape(each.model)) for each in SERVICES[:services]],
        period=period,
    )  # fmt: skip


def place_by(policy: str, replay: PeriodReplay, before: Groups = ()) -> Groups:
    """SEALLM's, or DEFAULT."""
    if policy == SEALLM:
        return place_seallm(replay)
    return search_placement(replay, rng=np.random.default_rng(0), before=before).groups


def serve_placed(
    policy: str, history: Mapping[int, Trace], traces: Mapping[int, Trace], *, services: int = FEW, gpus: int = GPUS
) -> dict[int, Outcomes]:
    """Services placed by what was asked before, shared engines by the doubling budget."""
    problem = placement_problem(period_of(history).sampled(LOOKED_BACK), services=services, gpus=gpus)
    return serve_groups(problem, place_by(policy, PeriodReplay(problem)), DOUBLING_BUDGET, traces)
