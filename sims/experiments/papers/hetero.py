"""Xiong et al., section 5: degrees of tensor parallelism by estimate and simulated, and who schedules
requests among unequal instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from typing import Final, NamedTuple

import numpy as np

from ....coordinator.costs.gpus import GpuSpec, gpu_table
from ....coordinator.costs.model_shape import model_shape
from ....coordinator.costs.replica import StageHardware, replica_times
from ....coordinator.costs.sweep import profile_times
from ....coordinator.costs.tensor_parallel import EngineMemory, RequestLengths, estimate_degrees
from ....coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ....coordinator.planning.model.cluster import Box, Cluster
from ....coordinator.planning.model.cluster_file import NVLINK_SHARE, PCIE_GBPS
from ....coordinator.planning.model.workload import Service, Workload
from ....coordinator.profile import ReplicaProfile
from ....coordinator.routing.interface import RoutingSettings
from ...engine.values import SimEngineSettings
from ...policies import HETERO, LEAST_TOKENS, MEMORY, PLAN, ROUND_ROBIN, SINGLE, WEIGHTED_ROUND_ROBIN
from ...records import Trace
from ...results.outcomes import SimResult
from ...scenario import ReplicaModel, ServiceRun, SimSettings
from ...world import simulate
from ..page import Curves, Page, PageTable, Picture, ResultRow
from ..setting import Scope

DEGREES: Final = "5.1, degrees of tensor parallelism"
TWO_INSTANCES: Final = "5.2, t=4 and t=1 on V100"
TWO_MACHINES: Final = "5.3, four of t=2 on V100 and one of t=1 on A800"
EQUAL_TWO: Final = "5.2 again, equal options for all"
EQUAL_FIVE: Final = "5.3 again, equal options for all"

V100: Final = "V100-SXM2-32GB"
A800: Final = "A100-PCIE-80GB"  # an A800 but for its NVLink, which one card does not use
MEMORY_OF_ENGINE: Final = EngineMemory()  # the paper's: 0.9 of a card, 2 GB of it taken

PROMPT, OUTPUT, LONGEST = 217, 202, 1024
"""Mean tokens of ShareGPT's prompts and answers as vLLM's benchmark has them, and the most of each."""

PCIE: Final = "PCIe"
NVLINK: Final = "NVLink"
LINKS: Final = (PCIE, NVLINK)
"""Between two V100: as the paper says, and as cards of this form have them; 8 of them share PCIe either way, for their
NVLinks make two groups of four."""

REPEATS: Final = 8
RATES: Final = (8.0, 16.0, 24.0, inf)
POLICIES: Final[Mapping[str, str]] = {
    "RR": ROUND_ROBIN,
    "SI": SINGLE,
    "MB": MEMORY,
    "WRR": WEIGHTED_ROUND_ROBIN,
    "OS": HETERO,
    "plan": PLAN,
    "tokens": LEAST_TOKENS,
}
AT_ONCE: Final = "at once"
GATEWAYS: Final = 4
SPREAD: Final = "OS, 4 gateways"


class EngineOptions(NamedTuple):
    """What all engines of a run batch by, and how the lengths of answers are predicted: tokens of a step, chunks of
    prompts beside decodes; requests of a step; a `LENGTH_PREDICTORS`."""

    step_tokens: int = 2048
    requests: int = 256
    predictor: str = "sampled"


PAPER: Final = EngineOptions()
EQUAL: Final = EngineOptions(step_tokens=512, predictor="learned")


class Instances(NamedTuple):
    """So many copies of an instance of `degree` GPUs, on a machine of `gpus` of one kind."""

    gpu: str
    gpus: int
    degree: int
    copies: int


class ServingSystem(NamedTuple):
    """What serves a model; `link`: between GPUs of an instance."""

    model: str
    link: str
    parts: tuple[Instances, ...]


def make_pair(link: str) -> ServingSystem:
    """Of section 5.2."""
    return ServingSystem("llama3-8b", link, (Instances(V100, 4, 4, 1), Instances(V100, 1, 1, 1)))


def make_five(link: str) -> ServingSystem:
    """Of section 5.3."""
    return ServingSystem("qwen2.5-14b", link, (Instances(V100, 8, 2, 4), Instances(A800, 1, 1, 1)))


class DegreeRow(ResultRow, frozen=True):
    """Tokens per second of a machine, prompts and answers, by estimate of two samples and simulated
    with two; `preempted`: how often a request lost its place for want of KV."""

    link: str
    t: int
    instances: int
    kv_tokens: int
    estimate_1: float
    estimate_2: float
    simulated_1: float
    simulated_2: float
    last_over_first: float
    preempted: int


class ScheduleRow(ResultRow, frozen=True):
    """Tokens per second, prompts and answers, at so many requests per second. `over_rr`: of round
    robin's, in percent; `last_over_first`: when the last instance had ended all that it was given,
    over when the first had. `to_first`: the share of requests that the first instance got."""

    link: str
    rate: str
    policy: str
    tokens_s: float
    over_rr: float
    last_over_first: float
    to_first: float
    p50_s: float
    p99_s: float


class EqualOptionsRow(ResultRow, frozen=True):
    """Tokens per second, prompts and answers, and what requests saw: seconds to the first token,
    milliseconds from token to token, and seconds in all; medians and the slowest in a hundred."""

    link: str
    rate: str
    policy: str
    tokens_s: float
    over_rr: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    p50_s: float
    p99_s: float


@cache
def draw_lengths(count: int, seed: int) -> tuple[RequestLengths, ...]:
    """In place of ShareGPT: exponential lengths, independent of each other."""
    rng = np.random.default_rng((seed, count))
    prompts, outputs = (np.clip(rng.exponential(mean, count).round(), 1, LONGEST) for mean in (PROMPT, OUTPUT))
    return tuple(RequestLengths(int(a), int(b)) for a, b in zip(prompts, outputs, strict=True))


def link_gbps(gpu: GpuSpec, degree: int, link: str) -> float:
    """Between two GPUs of an instance."""
    is_wired = link == NVLINK and degree <= 4
    return gpu.nvlink_gbps * 8 * NVLINK_SHARE if is_wired else PCIE_GBPS[gpu.pcie_gen]


@cache
def instance_model(model_name: str, gpu_name: str, degree: int, link: str) -> ReplicaModel:
    """How fast an instance is by roofline, and its room for KV by equation 1."""
    model, gpu = model_shape(model_name), gpu_table().find(gpu_name)
    stage = StageHardware(gpu=gpu, tp=degree, layers=model.layers, link_gbps=link_gbps(gpu, degree, link))
    times = replica_times(model, [stage])
    return ReplicaModel(times, MEMORY_OF_ENGINE.kv_tokens(model, gpu.memory_gib, degree))


@cache
def profile_instance(model_name: str, gpu_name: str, degree: int, link: str) -> ReplicaProfile:
    """Its eight constants, fitted to a sweep."""
    found = instance_model(model_name, gpu_name, degree, link)
    return profile_times(found.times, found.kv_tokens)


def run_system(
    system: ServingSystem,
    lengths: tuple[RequestLengths, ...],
    *,
    policy: str,
    rate: float = inf,
    seed: int = 0,
    gateways: int = 0,
    options: EngineOptions = PAPER,
) -> SimResult:
    """All requests on the system's instances, arriving at `rate` as Poisson has it, or at once."""
    boxes, replicas, models = [], [], {}
    for number, part in enumerate(system.parts):
        gpu = gpu_table().find(part.gpu)
        name = f"machine{number}"
        boxes.append(Box(id=name, gpu=gpu, gpus=part.gpus, gpu_link_gbps=PCIE_GBPS[gpu.pcie_gen]))
        for place in range(part.copies):
            replica = _replica(f"{name}.{place}", name, part.degree, place, model_shape(system.model).layers)
            replicas.append(replica)
            models[replica.id] = instance_model(system.model, part.gpu, part.degree, system.link)
    # requests come to boxes beside the machines, in turn
    boxes += [
        Box(id=f"gateway{number}", gpu=boxes[0].gpu, gpus=1, gpu_link_gbps=75.0) for number in range(max(1, gateways))
    ]
    weights = {replica.id: profile_weight(models[replica.id]) for replica in replicas}
    total = sum(weights.values())
    plan = Plan(
        epoch=1, version=1, service="s", codec="raw", why=(), replicas=tuple(replicas),
        pairings=tuple(Pairing(prefill=name, decode=name, weight=each / total) for name, each in weights.items()),
    )  # fmt: skip
    prompts, outputs = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    gaps = np.random.default_rng((seed, 1)).exponential(1.0 / rate, len(lengths)) if rate < inf else np.zeros(1)
    arrivals = np.cumsum(gaps) if rate < inf else np.zeros(len(lengths))
    trace = Trace(
        ids=np.arange(len(lengths)), arrival_s=arrivals, prompt=prompts, output=outputs, lengths="like ShareGPT",
        arrivals="Poisson" if rate < inf else "at once",
    )  # fmt: skip
    workload = Workload(name="like ShareGPT", prompts=prompts, outputs=outputs, rate=min(rate, 1e3))
    run = ServiceRun(
        service=Service(name="s", model=model_shape(system.model), workload=workload), plan=plan, trace=trace
    )
    settings = SimSettings(
        engine=SimEngineSettings(max_batched_tokens=options.step_tokens, max_sequences=options.requests),
        routing=RoutingSettings(policy=policy, length_predictor=options.predictor), seed=seed,
        gateways=tuple(f"gateway{number}" for number in range(gateways)), report_s=1.0 if gateways else 0.0,
    )  # fmt: skip
    size = len(boxes)
    cluster = Cluster(
        boxes=tuple(boxes), gbps=np.full((size, size), 10.0), rtt_s=np.full((size, size), 0.0005) * (1 - np.eye(size)),
        usd_per_gb=np.zeros((size, size)),
    )  # fmt: skip
    return simulate(cluster, [run], settings=settings, model_of=lambda _, __, replica: models[replica.id])


def _replica(name: str, box: str, degree: int, place: int, layers: int) -> Replica:
    stage = Stage(peer=box, tp=degree, first_layer=0, last_layer=layers, first_gpu=place * degree)
    return Replica(id=name, phase=Phase.MIXED, stages=(stage,))


def profile_weight(model: ReplicaModel) -> float:
    """A plan's share of an instance: what it decodes with as many requests as are usual and fit."""
    size = PROMPT + OUTPUT
    requests = max(1, min(256, model.kv_tokens // size))
    return requests / model.times.decode_line(requests).step_s(requests * size)


def tokens_s(result: SimResult) -> float:
    """Of prompts and answers, until the last request has ended."""
    trace = result.services[0].outcomes.trace
    return float((trace.prompt.sum() + trace.output.sum()) / _ends(result).max())


def _ends(result: SimResult) -> np.ndarray:
    outcomes = result.services[0].outcomes
    return np.asarray(outcomes.trace.arrival_s + outcomes.e2e_s)


def last_over_first(result: SimResult) -> float:
    """When the last instance had ended all of its requests, over when the first had; of those that
    got any."""
    ends, decode = _ends(result), result.services[0].decode
    done = [float(ends[decode == number].max()) for number in range(len(result.replicas)) if (decode == number).any()]
    return max(done) / min(done)


@cache
def degree_rows(link: str, samples: int, estimated: int) -> tuple[DegreeRow, ...]:
    """For t of 1, 2, 4 and 8: `samples` requests, each eight times, on eight V100; estimates are
    of `estimated` requests."""
    model = "llama3-8b"
    degrees = (1, 2, 4, 8)
    estimates = [
        {each.degree: each for each in estimate_degrees(
            8, degrees, draw_lengths(estimated, 100 + seed), lambda degree: profile_instance(model, V100, degree, link)
        )}
        for seed in range(2)
    ]  # fmt: skip
    rows = []
    for degree in degrees:
        system = ServingSystem(model, link, (Instances(V100, 8, degree, 8 // degree),))
        runs = []
        for seed in range(2):
            lengths = tuple(each for each in draw_lengths(samples, seed) for _ in range(REPEATS))
            runs.append(run_system(system, lengths, policy=ROUND_ROBIN))
        estimate = [found[degree] for found in estimates]
        rows.append(
            DegreeRow(
                link=link, t=degree, instances=8 // degree, kv_tokens=estimate[0].kv_tokens,
                estimate_1=estimate[0].tokens_s, estimate_2=estimate[1].tokens_s,
                simulated_1=tokens_s(runs[0]), simulated_2=tokens_s(runs[1]),
                last_over_first=last_over_first(runs[0]),
                preempted=sum(replica.counts.preemptions for replica in runs[0].replicas),
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.simulated_1))


@cache
def schedule_rows(system: ServingSystem, count: int) -> tuple[ScheduleRow, ...]:
    """Every policy at every rate, and the paper's also by four gateways."""
    rows = []
    for rate in RATES:
        base = 0.0
        for name, policy in [*POLICIES.items(), (SPREAD, HETERO)]:
            result = run_system(
                system, draw_lengths(count, 0), policy=policy, rate=rate, gateways=GATEWAYS if name == SPREAD else 0
            )
            found, service = tokens_s(result), result.services[0]
            base = base or found
            rows.append(
                ScheduleRow(
                    link=system.link, rate=f"{rate:g}" if rate < inf else AT_ONCE, policy=name,
                    tokens_s=found, over_rr=100.0 * (found / base - 1.0),
                    last_over_first=last_over_first(result), to_first=float((service.decode == 0).mean()),
                    p50_s=float(np.median(service.outcomes.e2e_s)),
                    p99_s=float(np.quantile(service.outcomes.e2e_s, 0.99)),
                )
            )  # fmt: skip
    return tuple(rows)


@cache
def latency_rows(system: ServingSystem, count: int) -> tuple[EqualOptionsRow, ...]:
    """Every policy at every rate with equal options, and the paper's also by four gateways."""
    rows = []
    for rate in RATES:
        base = 0.0
        for name, policy in [*POLICIES.items(), (SPREAD, HETERO)]:
            result = run_system(
                system, draw_lengths(count, 0), policy=policy, rate=rate, options=EQUAL,
                gateways=GATEWAYS if name == SPREAD else 0,
            )  # fmt: skip
            found, outcomes = tokens_s(result), result.services[0].outcomes
            base = base or found
            (ttft, ttft_p99), (tpot, tpot_p99), (e2e, e2e_p99) = (
                np.nanquantile(seconds, (0.5, 0.99)) for seconds in (outcomes.ttft_s, outcomes.tpot_s, outcomes.e2e_s)
            )
            rows.append(
                EqualOptionsRow(
                    link=system.link, rate=f"{rate:g}" if rate < inf else AT_ONCE, policy=name, tokens_s=found,
                    over_rr=100.0 * (found / base - 1.0), ttft_p50_s=float(ttft), ttft_p99_s=float(ttft_p99),
                    tpot_p50_ms=1e3 * float(tpot), tpot_p99_ms=1e3 * float(tpot_p99), p50_s=float(e2e),
                    p99_s=float(e2e_p99),
                )
            )  # fmt: skip
    return tuple(rows)


def hetero(scope: Scope) -> Page:
    """The page. The paper's counts of requests, or a few with `--quick`."""
    is_whole = scope.seconds >= Scope().seconds
    samples, estimated, count = (1000, 200, 4000) if is_whole else (40, 40, 200)
    pairs, fives = (
        [row for link in LINKS for row in schedule_rows(make(link), count)] for make in (make_pair, make_five)
    )
    equal_pairs, equal_fives = (
        [row for link in LINKS for row in latency_rows(make(link), count)] for make in (make_pair, make_five)
    )
    return Page(
        name="hetero",
        title="Unequal instances, and who schedules among them (Xiong et al.)",
        assumes=(
            "Llama-3-8B on V100 of 32 GB, behind PCIe 3 as the paper says (75 Gb/s between two cards) and again "
            "with the NVLink that cards of that form have (960 Gb/s, in groups of four), Qwen2.5-14B's "
            "dimensions where the paper has R1-Distill-Qwen-14B; a card's datasheet with measured efficiencies; "
            "KV memory by equation 1 with 0.9 and 2 GB a card.\n\nShareGPT is not in this project: its stand-in "
            f"has independent exponential lengths with the means of vLLM's benchmark, {PROMPT} tokens in and "
            f"{OUTPUT} out, at most {LONGEST} each.\n\nEngines batch continuously, up to 256 requests and 2,048 "
            "tokens a step, prompts in chunks beside decodes (vLLM 0.6.0: prompts first, each "
            f"whole).\n\nThroughput counts prompts and answers. {samples} samples eight times and estimates of "
            f"{estimated} (5.1), {count} requests (5.2, 5.3), Poisson arrivals; theta is 2 and answers are "
            "predicted by drawing from a normal distribution, as in the paper.\n\nRR takes turns, SI is one "
            "instance, WRR weighs by GPUs, OS is the paper's scheduler (`hetero`), MB the same without times (T "
            "= 1), `plan` this network's default (its shares by decode throughput), `tokens` the fewest "
            "outstanding tokens. Four gateways hear each other a second late; all others are one."
        ),
        tables=(
            PageTable(
                DEGREES,
                [row for link in LINKS for row in degree_rows(link, samples, estimated)],
                "Requests go to instances in turn, all at once.",
            ),
            PageTable(
                TWO_INSTANCES,
                pairs,
                "WRR weighs 4 to 1; SI is t=4 alone.",
            ),
            PageTable(TWO_MACHINES, fives, "WRR weighs by GPUs, 2 to 1. SI is one instance of t=2."),
            PageTable(EQUAL_TWO, equal_pairs, EQUAL_NOTE),
            PageTable(EQUAL_FIVE, equal_fives, EQUAL_NOTE),
        ),
        remarks=REMARKS,
        pictures=(_picture(pairs, fives), _latency_picture(equal_pairs, equal_fives)),
    )


def _picture(*systems: Sequence[ScheduleRow]) -> Picture:
    """Figures 5 and 6: throughput by rate, a row for each link; what comes at once stands at 32."""
    panels = []
    for link in LINKS:
        curves = []
        for rows, title in zip(systems, ("t=4, t=1", "t=2 x4, A800"), strict=True):
            of_link = [row for row in rows if row.link == link]
            lines = {
                name: (
                    [32.0 if row.rate == AT_ONCE else float(row.rate) for row in of_link if row.policy == name],
                    [row.tokens_s for row in of_link if row.policy == name],
                )
                for name in (*POLICIES, SPREAD)
            }
            curves.append(Curves(f"requests/s (32: at once), {title}", f"tokens/s, {link}", lines))
        panels.append(tuple(curves))
    return Picture("hetero", "tokens/s over the rate of requests, by policy, on two systems", tuple(panels))


def _latency_picture(*systems: Sequence[EqualOptionsRow]) -> Picture:
    """The slowest in a hundred by rate, with NVLink. What comes at once waits for minutes: it would
    hide the rest."""
    panels = []
    for field, label in LATENCY_AXES.items():
        curves = []
        for rows, title in zip(systems, ("t=4, t=1", "t=2 x4, A800"), strict=True):
            shown = [row for row in rows if row.link == NVLINK and row.rate != AT_ONCE]
            lines = {
                name: (
                    [float(row.rate) for row in shown if row.policy == name],
                    [float(getattr(row, field)) for row in shown if row.policy == name],
                )
                for name in (*POLICIES, SPREAD)
            }
            curves.append(Curves(f"requests/s, {title}", label, lines, log_y=True))
        panels.append(tuple(curves))
    about = "TTFT, TPOT and end to end of the slowest in a hundred over the rate of requests, equal options, NVLink"
    return Picture("hetero-latency", about, tuple(panels))


LATENCY_AXES: Final = {"ttft_p99_s": "TTFT P99, s", "tpot_p99_ms": "TPOT P99, ms", "p99_s": "end to end P99, s"}

EQUAL_NOTE: Final = """\
Every engine computes 512 tokens a step at most, of at most 256 requests, chunks of prompts beside
decodes. Whoever predicts lengths learns them from answers that have ended."""

REMARKS: Final = """\
- Agrees, with NVLink: where one of two instances is far stronger, taking turns is the worst, worse
  than leaving the weak one alone, and the paper's scheduler (OS) carries most: at once 87 % over
  round robin, WRR 81, MB 74, the strong one alone 48. The paper has 122.5 % at 24 requests/s, and
  WRR ahead of OS there and at once. Weighing by memory alone is below OS there as here.
- Does not agree: up to 24 requests/s OS gains 2 to 13 %, since our instances keep up (one of t=4
  carries 11,736 tokens/s alone). The roofline has V100 with measured efficiencies, the paper vLLM
  0.6.0 in FP16. Latency shows more: at 24 requests/s 19 s at P99 under OS, 71 under round robin.
- Does not agree, over PCIe as printed: there the roofline's all-reduces make a prefill over four
  cards no faster than on one, so t=4 is hardly better than t=1. Weights of 4 to 1 then lose 31 %
  against taking turns, and OS, at once, 27 %: it sends 69 % of requests to t=4 for its memory, where
  half would be best. That the paper's round robin is below SI, and weights of 4 to 1 are best, says
  that its t=4 was several times its t=1, which takes more than 75 Gb/s between cards.
- In part, 5.1: the paper measured t=2 before 4, 1 and 8, and its estimate has that order. Algorithm
  1 has 2, 1, 4, 8 with NVLink and 1, 2, 4, 8 without. Simulated, the order is 1, 2, 4, 8 both times,
  t=1 and t=2 within 2 and 5 % of each other with NVLink. So the estimate swaps only two that are
  near each other, and t=8 is last everywhere. It is a fifth to a seventh of what is simulated: static
  batches wait for their longest answer (the paper, too, estimates far below what it measures).
- In part, 5.3: OS is ahead of round robin by 4 to 11 % at once, where the paper has 33.6 % at 16
  requests/s. At 16 ours keep up under every policy but one instance alone.
- With equal options throughput says the same up to 24 requests/s, and latency more. With NVLink at
  24 requests/s the slowest in a hundred of 5.2 wait 0.11 s for their first token under OS, 0.14
  under `plan` and SI, 0.15 under WRR, 0.22 under MB, 0.23 under `tokens`, and 1.06 s under round
  robin, which fills the weak instance: there a token takes 108 ms at P99, under SI, OS, `plan` and
  WRR 26.8 to 31.1. In 5.3 all but SI are within 0.19 to 0.28 s and 35 to 42 ms, OS by four gateways
  the last of them.
- At once, OS loses with learned lengths: 63 % over round robin instead of 87 %, below MB. Nothing
  has ended when the last request is placed, so that nothing has been learned; drawing from a known
  distribution, as the paper does, is of help there.
- Theta of 2 is not the best here. At once, every request is placed before any ends, so that memory
  decides more than speed. With 0.5 instead, the two instances carry 15,526 instead of 14,841 tokens/s
  with NVLink and 6,773 instead of 5,789 over PCIe; with 0 it is 12,319 and 7,461.
- Four gateways carry as much as one up to 24 requests/s, give or take 2.5 %. At once they carry 1 %
  less to 17 % more: before the first report each knows a quarter of the requests only, so memory
  decides less. This network's `plan`, which the plan's shares guide, is within 6 % of the best
  throughout.
"""
