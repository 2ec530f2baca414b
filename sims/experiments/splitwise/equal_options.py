"""Splitwise's pools beside this network's own routing and beside machines that do both phases, with
the same engines, links and requests for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from ....coordinator.costs.gpus import Specs, gpu_table
from ....coordinator.costs.model_shape import model_shape
from ....coordinator.costs.replica import StageHardware, replica_times
from ....coordinator.costs.step_times import chunk_pairs
from ....coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ....coordinator.planning.model.cluster import Box, Cluster
from ....coordinator.planning.model.cluster_file import card_link_gbps
from ....coordinator.planning.model.problem import Problem
from ....coordinator.planning.model.workload import Service, Workload
from ....coordinator.routing.interface import RoutingSettings
from ...engine.values import SimEngineSettings
from ...policies import PLAN, ROUND_ROBIN
from ...records import Outcomes, Trace
from ...results.outcomes import ServiceOutcome
from ...scenario import SimAdmission, SimSettings
from ...splitwise.metrics import PERCENTILES, LoneRequests, missed_slos, slowdowns_over, summary
from ...workloads import azure, draw
from ..page import ResultRow
from ..setting import Scope, run
from .kv_second_token import CARDS, H100

MODEL: Final = "llama2-70b"
WORKLOAD: Final = "conversation"
MACHINES: Final = 40
RATES: Final = (70.0, 130.0, 200.0)
SECONDS: Final = 60.0
SPLITWISE: Final = "splitwise"
ENGINE: Final = SimEngineSettings(max_batched_tokens=2048)
LONE_GPU: Final = "A100-SXM4-80GB"


class EqualSystem(NamedTuple):
    """Machines for prompts and for tokens (`token` 0: all do both), and who routes."""

    prompt: int
    token: int
    routing: str
    gateways: int = 0

    @property
    def machines(self) -> str:
        """How many of each."""
        return f"{self.prompt}P, {self.token}T" if self.token else f"{self.prompt}"


SYSTEMS: Final = (
    EqualSystem(40, 0, ROUND_ROBIN),
    EqualSystem(40, 0, PLAN),
    EqualSystem(25, 15, PLAN),
    EqualSystem(25, 15, SPLITWISE),
    EqualSystem(15, 25, PLAN),
    EqualSystem(15, 25, SPLITWISE),
    EqualSystem(15, 25, PLAN, gateways=4),
    EqualSystem(15, 25, SPLITWISE, gateways=4),
)


class SystemLatencyRow(ResultRow, frozen=True):
    """Latencies at p50/p90/p99; `alone`: requests that one machine served whole; `missed`: of the
    nine SLOs, over a lone request on a DGX-A100."""

    requests_s: float
    machines: str
    routing: str
    TTFT_ms: str
    TBT_ms: str
    E2E_s: str
    alone: str
    missed: str


def about_equal_options() -> str:
    """What holds for all systems."""
    return (
        "Llama2-70B by the roofline, engines that batch as vLLM does (2,048 tokens a step, prompts in chunks beside "
        f"decodes, 256 requests), KV in 16 bits and layer by layer over {CARDS} x {H100.gbps:g} Gb/s, 5 ms for its "
        "synchronisation, no reuse of KV, gateways that do not know how long answers will be and hear of all queues "
        "at once (four of them: a second late)."
    )


def name_missed(missed: Sequence[str]) -> str:
    """Of `missed_slos`, by metric: `TTFT 90/99, TBT 50`."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for each in missed:
        metric, _, percentile = each.partition("_p")
        found[metric.upper()].append(percentile)
    return ", ".join(f"{metric} {'/'.join(percentiles)}" for metric, percentiles in found.items()) or "none"


def equal_rows(scope: Scope) -> list[SystemLatencyRow]:
    """Every system at every rate, all with the same requests."""
    rows = []
    for rate in RATES:
        trace = draw_requests(rate, min(SECONDS, scope.seconds))
        lone = _lone_requests(trace)
        for system in SYSTEMS:
            found = run_system(system, trace)
            outcomes = found.outcomes
            rows.append(
                SystemLatencyRow(
                    requests_s=rate,
                    machines=system.machines,
                    routing=f"{system.routing}, {system.gateways} gateways" if system.gateways else system.routing,
                    TTFT_ms=_latencies(outcomes, "ttft", 1e3),
                    TBT_ms=_latencies(outcomes, "tbt", 1e3),
                    E2E_s=_latencies(outcomes, "e2e", 1.0),
                    alone=f"{np.mean(found.prefill == found.decode):.0%}",
                    missed=name_missed(missed_slos(slowdowns_over(outcomes, lone))),
                )
            )
    return rows


def draw_requests(rate: float, seconds: float, seed: int = 0) -> Trace:
    """The same for all systems."""
    return draw(azure(WORKLOAD).lengths, rate=rate, rng=np.random.default_rng([17, seed]), seconds=seconds)


def run_system(system: EqualSystem, trace: Trace, admission: SimAdmission | None = None) -> ServiceOutcome:
    """What becomes of the requests."""
    problem = _problem()
    settings = SimSettings(
        engine=ENGINE, layer_sync_s=H100.sync_s, layerwise_from=H100.layerwise_from,
        routing=RoutingSettings(policy=system.routing), admission=admission,
        gateways=tuple(box.id for box in problem.cluster.boxes[: system.gateways]),
        report_s=1.0 if system.gateways else 0.0,
    )  # fmt: skip
    return run(problem, _plan(problem, system), trace, settings)


def _latencies(outcomes: Outcomes, metric: str, scale: float) -> str:
    figures = summary(outcomes)
    return "/".join(f"{scale * figures[f'{metric}_p{percentile}']:.3g}" for percentile in PERCENTILES)


def _lone_requests(trace: Trace) -> LoneRequests:
    """Each request alone on eight A100, by the roofline."""
    gpu, model = gpu_table().find(LONE_GPU, Specs.MEASURED), model_shape(MODEL)
    stage = StageHardware(gpu=gpu, tp=CARDS, layers=model.layers, link_gbps=card_link_gbps(gpu))
    times = replica_times(model, (stage,))
    line = times.decode_line(1)
    return LoneRequests(
        ttft_s=np.array([times.prefill_s(prompt, chunk_pairs(0, prompt)) for prompt in trace.prompt.tolist()]),
        tbt_s=np.array([line.step_s(float(context)) for context in trace.prompt + trace.output / 2]),
    )


@cache
def _problem() -> Problem:
    gpu = gpu_table().find(H100.gpu, Specs.MEASURED)
    boxes = tuple(Box(id=f"m{n:02}", gpu=gpu, gpus=CARDS, gpu_link_gbps=card_link_gbps(gpu)) for n in range(MACHINES))
    size = (MACHINES, MACHINES)
    cluster = Cluster(
        boxes=boxes, gbps=np.full(size, CARDS * H100.gbps), rtt_s=np.full(size, 10e-6), usd_per_gb=np.zeros(size)
    )
    lengths = azure(WORKLOAD).lengths
    service = Service(
        name="s", model=model_shape(MODEL), codec="raw", kv_bits=16.0,
        workload=Workload(name=WORKLOAD, prompts=lengths.prompt, outputs=lengths.output, rate=1.0),
    )  # fmt: skip
    return Problem(cluster=cluster, services=(service,), pinned={})


def _plan(problem: Problem, system: EqualSystem) -> Plan:
    service, boxes = problem.services[0], [box.id for box in problem.cluster.boxes]
    whole = Phase.PREFILL if system.token else Phase.MIXED
    phases = {box: whole if place < system.prompt else Phase.DECODE for place, box in enumerate(boxes)}
    replicas = tuple(
        Replica(
            id=box, phase=phase, stages=(Stage(peer=box, tp=CARDS, first_layer=0, last_layer=service.model.layers),)
        )
        for box, phase in phases.items()
    )
    ends = [(box, box) for box in boxes]
    if system.token:
        ends = [(one, two) for one in boxes[: system.prompt] for two in boxes[system.prompt :]]
    pairings = tuple(Pairing(prefill=one, decode=two, weight=1.0 / len(ends)) for one, two in ends)
    return Plan(epoch=0, version=1, service=service.name, codec="raw", why=(), replicas=replicas, pairings=pairings)
