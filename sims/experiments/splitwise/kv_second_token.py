"""Figures 13 and 14: what moving a prompt's KV does to the second token, layer by layer and all at
once."""

from __future__ import annotations

from typing import Final

import numpy as np

from ....coordinator.costs.gpus import Specs, gpu_table
from ....coordinator.costs.model_shape import model_shape
from ....coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ....coordinator.planning.model.cluster import Box, Cluster
from ....coordinator.planning.model.problem import Problem
from ....coordinator.planning.model.workload import Service, Workload
from ...records import Trace
from ...scenario import SimSettings
from ...workloads import azure
from ..page import ResultRow
from ..setting import run

PROMPT, TOKEN = "prompt", "token"
"""The two machines."""

GBPS: Final = 400.0
APART_S: Final = 60.0
"""Between requests, so that each is alone."""


class SecondTokenRow(ResultRow, frozen=True):
    """Milliseconds on average: to the first token, from it to the second, and the KV that is left
    to be moved after the prefill."""

    KV: str
    TTFT_ms: float
    second_token_ms: float
    visible_kv_ms: float
    second_token_over_one_machine: str
    paper: str


def second_token_rows(requests: int) -> list[SecondTokenRow]:
    """On one machine; on two, layer by layer; on two, after the prefill."""
    problem = _problem()
    trace = _requests(requests)
    found = []
    for is_split, layerwise in ((False, True), (True, True), (True, False)):
        result = run(problem, _plan(problem, is_split=is_split), trace, SimSettings(layerwise=layerwise))
        ttft, e2e = result.outcomes.ttft_s, result.outcomes.e2e_s
        seconds = float(np.mean(ttft)), float(np.mean(e2e - ttft)), float(np.mean(result.kv_s)) if is_split else 0.0
        found.append(tuple(1e3 * each for each in seconds))
    names_of = ("on one machine", "layer by layer", "after the prefill (serialised)")
    papers = ("-", "second token +16.5 %, 5 ms", "second token +64 %")
    return [
        SecondTokenRow(
            KV=name,
            TTFT_ms=ttft,
            second_token_ms=second,
            visible_kv_ms=visible,
            second_token_over_one_machine=f"{second / found[0][1] - 1.0:+.1%}",
            paper=paper,
        )
        for name, (ttft, second, visible), paper in zip(names_of, found, papers, strict=True)
    ]


def _plan(problem: Problem, *, is_split: bool) -> Plan:
    """Tensor parallelism over the eight cards of a machine, as in the paper."""
    phases = {PROMPT: Phase.PREFILL, TOKEN: Phase.DECODE} if is_split else {PROMPT: Phase.MIXED}
    service = problem.services[0]
    replicas = tuple(
        Replica(id=box, phase=phase, stages=(Stage(peer=box, tp=8, first_layer=0, last_layer=service.model.layers),))
        for box, phase in phases.items()
    )
    pairing = Pairing(prefill=PROMPT, decode=TOKEN if is_split else PROMPT, weight=1.0)
    return Plan(epoch=0, version=1, service=service.name, codec="raw", why=(), replicas=replicas, pairings=(pairing,))


def _problem() -> Problem:
    gpu = gpu_table().find("H100-SXM5-80GB", Specs.MEASURED)
    boxes = tuple(Box(id=name, gpu=gpu, gpus=8, gpu_link_gbps=3600.0) for name in (PROMPT, TOKEN))
    links = np.full((2, 2), GBPS)
    cluster = Cluster(boxes=boxes, gbps=links, rtt_s=np.full((2, 2), 10e-6), usd_per_gb=np.zeros((2, 2)))
    lengths = azure("coding").lengths
    service = Service(
        name="s", model=model_shape("llama2-70b"),
        workload=Workload(name="coding", prompts=lengths.prompt, outputs=lengths.output, rate=1.0 / APART_S),
        codec="raw", kv_bits=16.0,
    )  # fmt: skip
    return Problem(cluster=cluster, services=(service,), pinned={})


def _requests(count: int) -> Trace:
    """Coding prompts as recorded, two tokens each, far apart."""
    return Trace(
        ids=np.arange(count),
        arrival_s=np.arange(count, dtype=np.float64) * APART_S,
        prompt=azure("coding").lengths.prompt[:count],
        output=np.full(count, 2),
        lengths="Azure 2023 coding, two tokens of output",
        arrivals=f"every {APART_S:g} s",
    )
