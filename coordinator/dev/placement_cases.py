"""Services to be placed on a cluster, for the bench: SeaLLM's four models, its 32 GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ..costs.gpus import Specs, gpu_table
from ..costs.model_shape import model_shape
from ..placement.replay import PeriodReplay
from ..placement.seallm import place_seallm
from ..placement.search import search_placement
from ..placement.values import Period, PlacementBox, PlacementProblem, PlacementService

MODELS: Final = ("llama2-70b", "llama2-13b", "llama2-7b", "opt-6.7b")
SERVICES: Final = 16
BOXES: Final = 4
SECONDS: Final = 60.0
RATE: Final = 30.0
"""Requests per second of all services: some need several engines of their own, and all can be served in time."""

MEAN_TOKENS: Final = ((73, 427), (13187, 21), (157, 67), (1155, 211))
"""Of prompts and answers: table 1, and Azure's conversations."""


def placement_problem(seed: int = 0) -> PlacementProblem:
    """16 services of unequal popularity, those of the largest model asked for least."""
    rng = np.random.default_rng(seed)
    wanted = np.array([(1 + number % 4) ** 2 * (1 + number // 4) for number in range(SERVICES)], dtype=float)
    wanted[[number for number in range(SERVICES) if MEAN_TOKENS[number // 4][0] > 10_000]] /= 20.0
    counts = rng.poisson(RATE * SECONDS * wanted / wanted.sum()) + 1
    service = np.repeat(np.arange(SERVICES), counts)
    arrival = rng.uniform(0.0, SECONDS, len(service))
    order = np.argsort(arrival, kind="stable")
    means = np.array(MEAN_TOKENS)[service // 4]
    tokens = np.maximum(1, rng.gamma(2.0, means / 2.0)).astype(np.int64)
    gpu = gpu_table().find("A100-SXM4-80GB", Specs.MEASURED)
    return PlacementProblem(
        boxes=[PlacementBox(id=f"box-{number}", gpu=gpu, gpus=8, link_gbps=2400.0) for number in range(BOXES)],
        services=[
            PlacementService(name=f"service-{number}", model=model_shape(MODELS[number % 4]))
            for number in range(SERVICES)
        ],
        period=Period(
            service=service[order], arrival_s=arrival[order], prompt=tokens[order, 0], output=tokens[order, 1]
        ),
    )


def placement_rows(clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Seconds of both policies, each with nothing known beforehand, and what they come to by the replay."""
    rows = []
    for policy in ("seallm", "default"):
        problem = placement_problem()
        began = clock()
        replay = PeriodReplay(problem)
        if policy == "seallm":
            groups = place_seallm(replay)
        else:
            groups = search_placement(replay, rng=np.random.default_rng(0)).groups
        seconds = clock() - began
        judged = replay.judge(groups)
        rows.append({
            "policy": policy,
            "gpus": problem.gpus,
            "services": SERVICES,
            "requests": len(problem.period),
            "seconds": round(seconds, 3),
            "attainment": round(judged.attainment, 5),
            "least_attainment": round(float(judged.by_service.min()), 5),
            "normalized": round(judged.normalized, 4),
            "engines": len(groups),
            "shared_engines": sum(len(group.services) > 1 for group in groups),
        })  # fmt: skip
    return rows
