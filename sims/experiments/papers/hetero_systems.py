"""Instances of unequal strength as Xiong et al. set them up, section 5: cards, links, memory, engines, and requests."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Final, NamedTuple

import numpy as np

from ....coordinator.costs.gpus import GpuSpec, gpu_table
from ....coordinator.costs.model_shape import model_shape
from ....coordinator.costs.replica import StageHardware, replica_times
from ....coordinator.costs.sweep import profile_times
from ....coordinator.costs.tensor_parallel import EngineMemory, RequestLengths
from ....coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ....coordinator.planning.model.cluster import Box, Cluster
from ....coordinator.planning.model.cluster_file import NVLINK_SHARE, PCIE_GBPS
from ....coordinator.planning.model.workload import Service, Workload
from ....coordinator.profile import ReplicaProfile
from ....coordinator.routing.interface import RoutingSettings
from ...engine.values import SimEngineSettings
from ...records import Trace
from ...results.outcomes import SimResult
from ...scenario import ReplicaModel, ServiceRun, SimAdmission, SimSettings
from ...world import simulate

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


class EngineOptions(NamedTuple):
    """What all engines of a run batch by, and how the lengths of answers are predicted: tokens of a step, and whether
    they are chunks of prompts beside decodes; requests of a step; a `LENGTH_PREDICTORS`."""

    step_tokens: int
    chunked_prefill: bool
    predictor: str
    requests: int = 256


PAPER: Final = EngineOptions(step_tokens=8192, chunked_prefill=False, predictor="sampled")
"""vLLM 0.6.0's defaults for Llama-3-8B: a step has as many tokens as the model's context."""
EQUAL: Final = EngineOptions(step_tokens=512, chunked_prefill=True, predictor="learned")


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


@cache
def draw_lengths(count: int, seed: int, longer: int = 1) -> tuple[RequestLengths, ...]:
    """In place of ShareGPT: exponential lengths, independent of each other; `longer` times those of the benchmark."""
    rng = np.random.default_rng((seed, count))
    prompts, outputs = (
        np.clip(rng.exponential(longer * mean, count).round(), 1, longer * LONGEST) for mean in (PROMPT, OUTPUT)
    )
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
    admission: SimAdmission | None = None,
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
        engine=SimEngineSettings(
            max_batched_tokens=options.step_tokens, max_sequences=options.requests,
            chunked_prefill=options.chunked_prefill,
        ),
        routing=RoutingSettings(policy=policy, length_predictor=options.predictor), seed=seed,
        gateways=tuple(f"gateway{number}" for number in range(gateways)), report_s=1.0 if gateways else 0.0,
        admission=admission,
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
