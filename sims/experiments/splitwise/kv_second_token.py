"""Figures 13 and 14: what moving a prompt's KV does to the second token, layer by layer and all at
once.

Of the paper's machines each GPU has a network card of its own (section II-F: 25 and 50 GB/s per
GPU; Table I has 200 and 400 GB/s a machine), and sends its part of the heads over it. The figures
fit BLOOM-176B over all eight: 512 tokens, from where on it sends layer by layer on H100, are 2.05
GB, which take 400 GB/s the 5 ms that it says are left of a layerwise transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ....coordinator.costs.gpus import Specs, gpu_table
from ....coordinator.costs.model_shape import model_shape
from ....coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ....coordinator.planning.model.cluster import Box, Cluster
from ....coordinator.planning.model.problem import Problem
from ....coordinator.planning.model.workload import Service, Workload
from ...engine.values import SimEngineSettings
from ...records import Trace
from ...scenario import SimSettings
from ...workloads import azure
from ..page import Curves, Picture, ResultRow
from ..setting import run

PROMPT, TOKEN = "prompt", "token"
"""The two machines."""

CARDS: Final = 8
APART_S: Final = 60.0
"""Between requests, so that each is alone."""

LENGTHS: Final = (128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Tokens of the prompts of figure 13."""

WHOLE_PROMPTS: Final = SimEngineSettings(max_batched_tokens=8192)
"""Engines that compute every prompt in one step, as the paper's do."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Two of a kind. `gbps`: of each card's network card; `sync_s`: what is left of a layerwise
    transfer, for any prompt; `layerwise_from`: tokens from which on it is used."""

    name: str
    gpu: str
    gbps: float
    sync_s: float
    layerwise_from: int


H100: Final = Machines("DGX-H100", "H100-SXM5-80GB", 400.0, 0.005, 512)
A100: Final = Machines("DGX-A100", "A100-SXM4-80GB", 200.0, 0.008, 512)


class VisibleKvRow(ResultRow, frozen=True):
    """Milliseconds from the end of a prefill until its KV is there, by tokens of the prompt. `chosen`:
    the one for prompts below `layerwise_from`, else the other; `of_the_prompt`: over the time that
    computing it takes."""

    machines: str
    prompt: int
    serialised_ms: float
    layer_by_layer_ms: float
    chosen_ms: float
    of_the_prompt: str


class SecondTokenRow(ResultRow, frozen=True):
    """Milliseconds on average: to the first token, from it to the second, and the KV that is left
    to be moved after the prefill; the whole answer's, over one machine's."""

    model: str
    gbps: int
    KV: str
    TTFT_ms: float
    second_token_ms: float
    visible_kv_ms: float
    second_token_over_one_machine: str
    E2E_over_one_machine: str
    paper: str


class _MeanTimes:
    """Of one run, in seconds: to the first token, to the second, visible KV, to the last."""

    def __init__(self, machines: Machines, model: str, cards: int, settings: SimSettings | None, trace: Trace) -> None:
        problem = _problem(machines, model, machines.gbps * cards)
        plan = _plan(problem, is_split=settings is not None)
        settings = settings or SimSettings(engine=WHOLE_PROMPTS)
        result = run(problem, plan, trace, settings)
        self.ttft_s = float(np.mean(result.outcomes.ttft_s))
        self.e2e_s = float(np.mean(result.outcomes.e2e_s))
        self.visible_s = float(np.mean(result.kv_s)) if plan.pairings[0].prefill != plan.pairings[0].decode else 0.0


def visible_rows(lengths: Sequence[int] = LENGTHS) -> list[VisibleKvRow]:
    """Figure 13: BLOOM-176B, over all eight network cards."""
    found = []
    for machines in (H100, A100):
        for length in lengths:
            trace = _requests(np.array([length]), np.array([2]))
            serialised, layers, chosen = (
                _MeanTimes(machines, "bloom-176b", CARDS, settings, trace)
                for settings in (_serialised(), _layerwise(machines), _layerwise(machines, machines.layerwise_from))
            )
            found.append(
                VisibleKvRow(
                    machines=machines.name,
                    prompt=length,
                    serialised_ms=1e3 * serialised.visible_s,
                    layer_by_layer_ms=1e3 * layers.visible_s,
                    chosen_ms=1e3 * chosen.visible_s,
                    of_the_prompt=f"{chosen.visible_s / chosen.ttft_s:.1%}",
                )
            )
    return found


def visible_picture(rows: Sequence[VisibleKvRow]) -> Picture:
    """Figure 13."""
    lines = {
        f"{name}, {how}": (
            [row.prompt for row in rows if row.machines == name],
            [getattr(row, field) for row in rows if row.machines == name],
        )
        for name in dict.fromkeys(row.machines for row in rows)
        for how, field in (("serialised", "serialised_ms"), ("layer by layer", "layer_by_layer_ms"))
    }
    curves = Curves(x="prompt, tokens", y="visible KV transfer, ms", lines=lines, log_x=True, log_y=True)
    return Picture.of("provision-kv", curves)


def second_token_rows(requests: int) -> list[SecondTokenRow]:
    """Figure 14, H100: on one machine; on two, layer by layer without and with what synchronising
    takes; on two, after the prefill. By model and by network cards that are used."""
    lengths = azure("coding").lengths
    prompts, outputs = lengths.prompt[:requests], lengths.output[:requests]
    rows = []
    for model, cards in (("bloom-176b", CARDS), ("llama2-70b", CARDS), ("llama2-70b", 1)):
        alone: tuple[float, float] | None = None
        for name, settings, paper in (
            ("on one machine", None, "-"),
            ("layer by layer, bytes alone", SimSettings(engine=WHOLE_PROMPTS), "-"),
            ("layer by layer", _layerwise(H100, H100.layerwise_from), "+16.5 %, 5 ms, E2E 0.8 %"),
            ("after the prefill (serialised)", _serialised(), "+64 %, E2E up to 3 %"),
        ):
            two = _MeanTimes(H100, model, cards, settings, _requests(prompts, np.full(len(prompts), 2)))
            whole = _MeanTimes(H100, model, cards, settings, _requests(prompts, np.maximum(outputs, 2)))
            second_s = two.e2e_s - two.ttft_s
            alone = alone or (second_s, whole.e2e_s)
            rows.append(
                SecondTokenRow(
                    model=model,
                    gbps=round(cards * H100.gbps),
                    KV=name,
                    TTFT_ms=1e3 * two.ttft_s,
                    second_token_ms=1e3 * second_s,
                    visible_kv_ms=1e3 * two.visible_s,
                    second_token_over_one_machine=f"{second_s / alone[0] - 1.0:+.1%}",
                    E2E_over_one_machine=f"{whole.e2e_s / alone[1] - 1.0:+.1%}",
                    paper=paper if model == "bloom-176b" else "",
                )
            )
    return rows


def _serialised() -> SimSettings:
    return SimSettings(layerwise=False, engine=WHOLE_PROMPTS)


def _layerwise(machines: Machines, layerwise_from: int = 0) -> SimSettings:
    return SimSettings(layer_sync_s=machines.sync_s, layerwise_from=layerwise_from, engine=WHOLE_PROMPTS)


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


def _problem(machines: Machines, model: str, gbps: float) -> Problem:
    gpu = gpu_table().find(machines.gpu, Specs.MEASURED)
    boxes = tuple(Box(id=name, gpu=gpu, gpus=CARDS, gpu_link_gbps=3600.0) for name in (PROMPT, TOKEN))
    cluster = Cluster(
        boxes=boxes, gbps=np.full((2, 2), gbps), rtt_s=np.full((2, 2), 10e-6), usd_per_gb=np.zeros((2, 2))
    )
    lengths = azure("coding").lengths
    service = Service(
        name="s", model=model_shape(model),
        workload=Workload(name="coding", prompts=lengths.prompt, outputs=lengths.output, rate=1.0 / APART_S),
        codec="raw", kv_bits=16.0,
    )  # fmt: skip
    return Problem(cluster=cluster, services=(service,), pinned={})


def _requests(prompts: np.ndarray, outputs: np.ndarray) -> Trace:
    """One after the other, far apart."""
    return Trace(
        ids=np.arange(len(prompts)),
        arrival_s=np.arange(len(prompts), dtype=np.float64) * APART_S,
        prompt=prompts,
        output=outputs,
        lengths="as given",
        arrivals=f"every {APART_S:g} s",
    )
