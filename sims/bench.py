"""What simulating costs: `python -m p2pserve.sims.bench [--format json] [--requests N] [ROW ...]`.

Each row is a cluster of boxes of 8 A100 that serve llama2-70b, a replica each, by a plan made by
hand, at about 80 % of what it carries; lengths are Azure's conversation, arrivals Poisson. CPU
seconds are of `simulate` alone; the peak of the process's memory is of all rows up to that one.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from itertools import product
from typing import Final

import msgspec
import numpy as np

from ..coordinator.costs.gpus import gpu_table
from ..coordinator.costs.model_shape import model_shape
from ..coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ..coordinator.planning.model.cluster import Box, Cluster
from ..coordinator.planning.model.workload import Service, Slo
from .scenario import ServiceRun
from .workloads import azure, draw, workload_of
from .world import simulate

GPUS_OF_A_BOX: Final = 8
MODEL: Final = "llama2-70b"


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """A cluster and its load; `prefill` of the boxes only prefill (0: all do both)."""

    boxes: int
    prefill: int
    rate: float
    requests: int


SETUPS: Final = {
    "colocated": BenchSetup(boxes=8, prefill=0, rate=30.0, requests=20_000),
    "split": BenchSetup(boxes=8, prefill=4, rate=26.0, requests=20_000),
    "1000-gpus-colocated": BenchSetup(boxes=125, prefill=0, rate=450.0, requests=1_000_000),
    "1000-gpus-split": BenchSetup(boxes=125, prefill=62, rate=400.0, requests=1_000_000),
}


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row; `tokens` are output tokens."""

    name: str
    gpus: int
    requests: int
    completed: int
    tokens: int
    events: int
    simulated_s: float
    cpu_s: float
    tokens_per_cpu_s: float
    requests_per_cpu_s: float
    peak_rss_mib: float


def measure(name: str, setup: BenchSetup) -> BenchRow:
    """Simulate one setup, with seed 0."""
    trace = draw(azure("conversation").lengths, rate=setup.rate, rng=np.random.default_rng(0), requests=setup.requests)
    model = model_shape(MODEL)
    service = Service(name=MODEL, model=model, workload=workload_of(trace), slo=Slo(ttft_s=2.0, tpot_s=0.15))
    run = ServiceRun(service=service, plan=plan_by_hand(setup, model.layers), trace=trace)
    begun = time.process_time()
    result = simulate(_cluster(setup.boxes), [run])
    cpu_s = time.process_time() - begun
    tokens = int(trace.output.sum())
    return BenchRow(
        name=name,
        gpus=setup.boxes * GPUS_OF_A_BOX,
        requests=len(trace),
        completed=int(result.services[0].outcomes.completed.sum()),
        tokens=tokens,
        events=result.events,
        simulated_s=result.end_s,
        cpu_s=cpu_s,
        tokens_per_cpu_s=tokens / cpu_s,
        requests_per_cpu_s=len(trace) / cpu_s,
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _cluster(boxes: int) -> Cluster:
    gpu = gpu_table().find("A100-SXM4-80GB")
    return Cluster(
        boxes=tuple(Box(id=f"b{number}", gpu=gpu, gpus=GPUS_OF_A_BOX, gpu_link_gbps=1920.0) for number in range(boxes)),
        gbps=np.full((boxes, boxes), 40.0),
        rtt_s=np.full((boxes, boxes), 0.001),
        usd_per_gb=np.zeros((boxes, boxes)),
    )


def plan_by_hand(setup: BenchSetup, layers: int) -> Plan:
    """Prefill replicas pair with the decode replicas next to them, as in an LP's solution."""
    phases = [Phase.MIXED if not setup.prefill else Phase.PREFILL] * (setup.prefill or setup.boxes)
    phases += [Phase.DECODE] * (setup.boxes - len(phases))
    replicas = tuple(
        Replica(
            id=f"b{number}",
            phase=phase,
            stages=(Stage(peer=f"b{number}", tp=GPUS_OF_A_BOX, first_layer=0, last_layer=layers),),
        )
        for number, phase in enumerate(phases)
    )
    weights: dict[tuple[int, int], float] = {}
    if not setup.prefill:
        weights = {(number, number): 1.0 / setup.boxes for number in range(setup.boxes)}
    else:
        decode = setup.boxes - setup.prefill
        # The unit interval cut in as many parts as there are on either side: overlaps are weights.
        for a, b in product(range(setup.prefill), range(decode)):
            overlap = min((a + 1) / setup.prefill, (b + 1) / decode) - max(a / setup.prefill, b / decode)
            if overlap > 1e-12:
                weights[a, setup.prefill + b] = overlap
    pairings = tuple(Pairing(prefill=f"b{a}", decode=f"b{b}", weight=weight) for (a, b), weight in weights.items())
    return Plan(epoch=0, version=0, service=MODEL, replicas=replicas, pairings=pairings, codec="kv4", why=())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.sims.bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(SETUPS)} (default: all)")
    parser.add_argument("--requests", type=int, help="requests of each row, instead of its own number")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.rows) - SETUPS.keys())
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(SETUPS)}")
    rows = []
    for name in arguments.rows or SETUPS:
        setup = SETUPS[name]
        requests = arguments.requests or setup.requests
        rows.append(measure(name, BenchSetup(setup.boxes, setup.prefill, setup.rate, requests)))
    print(msgspec.json.encode(rows).decode() if arguments.format == "json" else _table(rows))  # noqa: T201


def _table(rows: list[BenchRow]) -> str:
    head = f"{'row':<22}{'GPUs':>6}{'requests':>10}{'events':>11}{'CPU s':>8}{'tokens/CPU s':>14}{'peak MiB':>10}"
    lines = [
        f"{row.name:<22}{row.gpus:>6}{row.requests:>10}{row.events:>11}{row.cpu_s:>8.1f}{row.tokens_per_cpu_s:>14,.0f}"
        f"{row.peak_rss_mib:>10.0f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    main()
