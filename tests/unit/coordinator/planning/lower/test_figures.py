"""What estimates come to in a few cases that meet every term of theirs: a change shows, and is made on purpose.

`data/figures.json` keeps the figures; `python -m tests.unit.coordinator.planning.lower.test_figures` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import LoadRow, model_replica
from p2pserve.coordinator.planning.model.length_classes import Classes, classify_lengths
from p2pserve.coordinator.planning.model.workload import Workload
from p2pserve.sims.testing import LinearTimes

FILE = Path(__file__).parent / "data" / "figures.json"
Figures = dict[str, list[float]]

TIMES = LinearTimes(step=0.01, token=1e-4, pair=2e-8, request=1e-3, context=2e-7, interval_share=0.6)
SOME_LOADS = (0, 2, 5, 9, 13)
"""Of those that behaviour is tabulated at: 0, 0.4, 0.7, 0.9 and 1."""


def mixed_lengths() -> Classes:
    """Prompts of 30 to some 9,000 tokens, outputs of 1 to some 2,000."""
    rng = np.random.default_rng(5)
    prompts, outputs = rng.lognormal(6.5, 1.0, 300), rng.lognormal(4.5, 1.2, 300)
    sizes = [np.clip(np.round(lengths), 1, 10_000).astype(np.int64) for lengths in (prompts, outputs)]
    return classify_lengths(
        Workload(name="mixed", prompts=sizes[0], outputs=sizes[1], rate=1.0), prompts=3, outputs=(0.5,)
    )


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


CASES: dict[str, Callable[[], Figures]] = {
    "a prefill replica": replica(Phase.PREFILL),
    "a decode replica": replica(Phase.DECODE),
    "a decode replica short of memory, and bursts": replica(Phase.DECODE, 30_000, 2.0),
    "a decode replica with hardly any memory": replica(Phase.DECODE, 9_000),
    "a mixed replica": replica(Phase.MIXED),
    "a mixed replica of three stages under a tight deadline": replica(Phase.MIXED, 100_000, 1.5, 3, 0.1),
    "a mixed replica short of memory": replica(Phase.MIXED, 20_000, 1.0, 2, 0.3),
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
