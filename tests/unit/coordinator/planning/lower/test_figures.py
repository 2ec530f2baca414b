"""What estimates come to in a few cases that meet every term of theirs: a change shows, and is made on purpose.

`data/figures.json` keeps the figures; `python -m tests.unit.coordinator.planning.lower.test_figures` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.replica import Hop
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import LoadRow, model_replica
from p2pserve.coordinator.planning.lower.parallel import BoxGpus, GroupHardware, ParallelOptions, ServiceNeeds
from p2pserve.coordinator.planning.lower.queueing import OtherPhase, in_time_by_load
from p2pserve.coordinator.planning.model.length_classes import Classes, classify_lengths
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload

from .....linear_times import LinearTimes

FILE = Path(__file__).parent / "data" / "figures.json"
Figures = dict[str, list[float]]

TIMES = LinearTimes(step=0.01, token=1e-4, pair=2e-8, request=1e-3, context=2e-7, interval_share=0.6)
SOME_LOADS = (0, 2, 5, 9, 13)
"""Of those that behaviour is tabulated at: 0, 0.4, 0.7, 0.9 and 1."""


def mixed_workload() -> Workload:
    """Prompts of 30 to some 9,000 tokens, outputs of 1 to some 2,000, in bursts."""
    rng = np.random.default_rng(5)
    prompts, outputs = rng.lognormal(6.5, 1.0, 300), rng.lognormal(4.5, 1.2, 300)
    sizes = [np.clip(np.round(lengths), 1, 10_000).astype(np.int64) for lengths in (prompts, outputs)]
    return Workload(name="mixed", prompts=sizes[0], outputs=sizes[1], rate=1.0, arrival_cv=1.3)


def mixed_lengths() -> Classes:
    return classify_lengths(mixed_workload(), prompts=3, outputs=(0.5,))


def describe_replica(phase: Phase, kv_tokens: int, arrival_cv: float, stages: int, tpot_s: float) -> Figures:
    found = model_replica(
        phase, TIMES, mixed_lengths(), kv_tokens=kv_tokens, arrival_cv=arrival_cv, stages=stages, tpot_s=tpot_s
    )
    rates = (found.prefill_rate, found.decode_rate, found.mixed_rate, found.max_batch)
    figures = {
        "finite rates and batch": [float(rate) for rate in rates if isfinite(rate)],
        "prefill_s": found.prefill_s.tolist(),
        "prefill_sd_s": found.prefill_sd_s.tolist(),
        "prefill_rounds": found.prefill_rounds.tolist(),
        "prefill_cv2": [found.prefill_cv2],
        "alone_s": [found.alone_s(mixed_lengths())],
    }
    columns = zip(LoadRow._fields, found.table[list(SOME_LOADS)].T.tolist(), strict=True)
    figures |= {f"{name} at some loads": values for name, values in columns}
    return {name: values for name, values in figures.items() if any(values)}


def replica(
    phase: Phase, kv_tokens: int = 10**7, arrival_cv: float = 1.0, stages: int = 1, tpot_s: float = float("inf")
) -> Callable[[], Figures]:
    return lambda: describe_replica(phase, kv_tokens, arrival_cv, stages, tpot_s)


def describe_shares(phase: Phase, slo: Slo, counts: tuple[int, int], other: OtherPhase | None, later: bool) -> Figures:
    """In time at every load, of two replicas: one has little memory."""
    classes = mixed_lengths()
    replicas = [
        model_replica(phase, TIMES, classes, kv_tokens=tokens, arrival_cv=1.3, tpot_s=slo.tpot_s)
        for tokens in (30_000, 10**6)
    ]
    shares = in_time_by_load(
        replicas, classes, slo, 1.3, phase_counts=counts, other_phase=other, admitted_later=later
    )  # fmt: skip
    return {f"kv_tokens {tokens}": row.tolist() for tokens, row in zip((30_000, 10**6), shares, strict=True)}


def shares(
    phase: Phase, slo: Slo, counts: tuple[int, int] = (1, 1), other: OtherPhase | None = None, later: bool = False
) -> Callable[[], Figures]:
    return lambda: describe_shares(phase, slo, counts, other, later)


def describe_configurations(model: str, slo: Slo, boxes: Sequence[tuple[str, int, bool]]) -> Figures:
    """Of boxes whose links get slower with the distance of their numbers: stages in order, and what they carry."""
    parts = tuple(BoxGpus(gpu_table().find(name, Specs.TABLE1), gpus, 160.0, atomic) for name, gpus, atomic in boxes)
    links = tuple(
        tuple(Hop(1e-3 * (1 + abs(one - two)), 20.0 / (1 + (one - two) ** 2)) for two in range(len(parts)))
        for one in range(len(parts))
    )
    workload = mixed_workload()
    service = Service(name="s", model=model_shape(model), workload=workload, slo=slo)
    options = ParallelOptions(GroupHardware(parts, links), ServiceNeeds(service, mixed_lengths(), longest=6000))
    figures: Figures = {}
    for phase in Phase:
        best = options.best(phase)
        if best is not None:
            figures[f"{phase.value}: box, GPUs and layers of each stage"] = [float(n) for s in best.stages for n in s]
            figures[f"{phase.value}: room for KV, requests/s"] = [best.kv_tokens, best.behaviour.rate]
    return figures


def configurations(model: str, slo: Slo, *boxes: tuple[str, int, bool]) -> Callable[[], Figures]:
    return lambda: describe_configurations(model, slo, boxes)


A40, TI, A5000 = "A40-48GB", "RTX-3090TI-24GB", "RTX-A5000-24GB"
PACED, ALL = Slo(ttft_s=1.5, tpot_s=0.06), Slo(ttft_s=1.5, tpot_s=0.09, e2e_s=15.0)

CASES: dict[str, Callable[[], Figures]] = {
    "a prefill replica": replica(Phase.PREFILL),
    "a decode replica": replica(Phase.DECODE),
    "a decode replica short of memory, and bursts": replica(Phase.DECODE, 30_000, 2.0),
    "a decode replica with hardly any memory": replica(Phase.DECODE, 9_000),
    "a mixed replica": replica(Phase.MIXED),
    "a mixed replica of three stages under a tight deadline": replica(Phase.MIXED, 100_000, 1.5, 3, 0.1),
    "a mixed replica short of memory": replica(Phase.MIXED, 20_000, 1.0, 2, 0.3),
    "in time on mixed replicas": shares(Phase.MIXED, ALL),
    "in time on mixed replicas that share what comes": shares(Phase.MIXED, PACED, (3, 3)),
    "in time on prefill replicas": shares(Phase.PREFILL, ALL, (2, 1), OtherPhase(0.0, 0.04)),
    "in time on decode replicas": shares(Phase.DECODE, ALL, (1, 2), OtherPhase(0.4, 0.0)),
    "in time on decode replicas that generate the first token": shares(Phase.DECODE, PACED, later=True),
    "two unlike boxes": configurations("llama-30b", PACED, (A40, 4, False), (TI, 4, False)),
    "a box that is one stage, and two others": configurations(
        "llama-30b", ALL, (TI, 4, True), (A40, 2, False), (A5000, 3, False)
    ),
    "a model that hardly fits": configurations("llama2-70b", Slo(), (A40, 2, False), (TI, 4, False)),
    "four boxes without deadlines": configurations(
        "llama-13b", Slo(), (A5000, 2, False), (A40, 2, False), (TI, 1, False), (A5000, 2, False)
    ),
    "a model that needs all of five": configurations(
        "llama2-70b",
        Slo(e2e_s=60.0),
        (A40, 2, False),
        (TI, 2, False),
        (A40, 2, False),
        (A5000, 4, False),
        (TI, 1, False),
    ),
}


def read_figures() -> dict[str, Figures]:
    found: dict[str, Figures] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_an_estimate_is_what_it_was(case: str) -> None:
    before, now = read_figures()[case], CASES[case]()
    assert now.keys() == before.keys()
    for name, values in now.items():
        assert values == pytest.approx(before[name], rel=1e-6, abs=1e-12), name


def write_figures() -> None:
    cases: list[str] = []
    for case, describe in CASES.items():
        rounded = {name: [float(f"{value:.9g}") for value in values] for name, values in describe().items()}
        lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in rounded.items()]
        cases.append(f"{json.dumps(case)}: {{\n" + ",\n".join(lines) + "\n}")
    FILE.write_text("{\n" + ",\n".join(cases) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write_figures()
