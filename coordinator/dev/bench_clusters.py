"""The clusters of the planner's benchmark: ThunderServe's, and larger ones by chance."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..costs.gpus import Specs, gpu_table
from ..costs.model_shape import model_shape
from ..demand_meter import azure_lengths
from ..planning.model.cluster import Box, Cluster
from ..planning.model.cluster_file import packaged_cluster
from ..planning.model.problem import Problem
from ..planning.model.slo import scaled_slo
from ..planning.model.workload import Service, Workload

SITE_BOXES: Final = 12
SHAPES: Final = (("RTX A6000", 4), ("RTX A5000", 4), ("A40", 8), ("RTX 3090 Ti", 4), ("RTX 4090", 4), ("L40S", 2))
SITE_GBPS: Final = (10.0, 40.0)  # between boxes of a site
SITE_RTT_S: Final = (2e-4, 1e-3)
FAR_GBPS: Final = (0.5, 5.0)  # n streams between sites, as measured between clouds
FAR_RTT_S: Final = (0.01, 0.15)

REQUESTS_PER_GPU: Final = {"conversation": 0.3, "coding": 0.3}
"""Per second: about what ThunderServe's 32 GPUs carry at the deadlines below."""

SLO_SCALE: Final = 8.0
"""Deadlines in multiples of what a request takes alone on A100s."""


def azure_workload(kind: str, rate: float) -> Workload:
    """Lengths of 512 requests of the Azure traces: `coding` or `conversation`; Poisson arrivals."""
    prompts, outputs = azure_lengths(kind)
    return Workload(name=f"azure {kind}, 512 of its requests", prompts=prompts, outputs=outputs, rate=rate)


def rented_cluster(gpus: int, rng: np.random.Generator) -> Cluster:
    """Boxes with `gpus` cards in all: random shapes, sites and links, equal both ways."""
    table, boxes = gpu_table(), list[Box]()
    while (left := gpus - sum(box.gpus for box in boxes)) > 0:
        name, count = SHAPES[int(rng.integers(len(SHAPES)))]
        gpu, count = table.find(name, Specs.MEASURED), min(count, left)
        number = len(boxes)
        price = gpu.usd_per_hour * count
        boxes.append(
            Box(id=f"box-{number}", gpu=gpu, gpus=count, site=f"site-{number // SITE_BOXES}", usd_per_hour=price)
        )
    site = np.arange(len(boxes)) // SITE_BOXES
    near = site[:, None] == site[None, :]

    def figures(inside: tuple[float, float], outside: tuple[float, float]) -> np.ndarray:
        def drawn(low: float, high: float) -> np.ndarray:
            half = np.triu(np.exp(rng.uniform(np.log(low), np.log(high), near.shape)), 1)
            return np.asarray(half + half.T)

        return np.where(near, drawn(*inside), drawn(*outside))

    return Cluster(
        boxes=tuple(boxes),
        gbps=figures(SITE_GBPS, FAR_GBPS),
        rtt_s=figures(SITE_RTT_S, FAR_RTT_S),
        usd_per_gb=np.zeros(near.shape),
    )


def bench_problem(gpus: int, kind: str, *, load: float = 1.0) -> Problem:
    """LLaMA-30B on so many GPUs: ThunderServe's boxes for 16, 24 and 32, else rented ones (always
    the same ones). `load`: of the benchmark's requests per GPU."""
    if gpus in (16, 24, 32):
        cluster = packaged_cluster(f"thunderserve-cloud-{gpus}", Specs.MEASURED)
    else:
        cluster = rented_cluster(gpus, np.random.default_rng(gpus))
    model = model_shape("llama-30b")
    workload = azure_workload(kind, load * REQUESTS_PER_GPU[kind] * gpus)
    service = Service(name=kind, model=model, workload=workload, slo=scaled_slo(model, workload, SLO_SCALE, 0.9))
    return Problem(cluster=cluster, services=(service,), pinned={})
