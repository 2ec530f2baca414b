"""What the public simulator says, and how far this one is from it.

All on traces of `azure_trace`, 120 s, seed 0:
- `splitwise_reference.csv`: 48 runs of llama2-70b, as released;
- `splitwise_measured_axis.csv`: 16 runs with its decode times looked up on the measured batch axis,
  else as released; figures that were not kept are empty;
- `BLOOM_LIMITS`: BLOOM-176B on conversations, as released: the highest rate in steps of 10
  requests/s that meets the SLO, with the paper's numbers of machines.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..records import Trace
from .metrics import missed_slos, slowdowns, summary
from .run import SplitwiseResult, run_setup
from .step_lookup import Mode
from .traces import DATA, azure_trace

BLOOM = "bloom-176b"
BLOOM_LIMITS: Mapping[str, int] = {"baseA": 50, "baseH": 110, "AA": 120, "HH": 120, "HHcap": 140, "HA": 140}
LIMITS_STEP = 10

# How far a figure may be off: more where a run misses its SLO, as queues that grow magnify what is different.
TOLERANCE, TOLERANCE_BEYOND_SLO = 0.01, 0.10

_KEYS = ("model", "workload", "rate", "setup", "prompt_machines", "decode_machines", "slo_ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """A run of the public simulator. `figures`: as in `summary`, slowdowns as `slow_...`."""

    model: str
    workload: str
    rate: int
    setup: str
    machines: tuple[int, int] | None
    mode: Mode
    figures: Mapping[str, float]
    meets_slo: bool

    @property
    def name(self) -> str:
        """Like `conv 130 HH`, or `conv 130 HH 15,25` for other numbers of machines."""
        machines = "" if self.machines is None else f" {self.machines[0]},{self.machines[1]}"
        return f"{self.workload} {self.rate} {self.setup}{machines}"

    @property
    def tolerance(self) -> float:
        """How far, relatively, a figure may be off."""
        return TOLERANCE if self.meets_slo else TOLERANCE_BEYOND_SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceComparison:
    """A case, the same figures found here, and the slowdowns' percentiles that miss the SLO."""

    case: ReferenceRun
    figures: Mapping[str, float]
    missed: tuple[str, ...]

    @property
    def worst(self) -> tuple[str, float]:
        """The figure that is furthest off, and by how much, relatively."""
        off = {name: abs(self.figures[name] / value - 1.0) for name, value in self.case.figures.items()}
        name = max(off, key=off.__getitem__)
        return name, off[name]

    @property
    def agrees(self) -> bool:
        """Whether every figure is within the tolerance, and the SLO is met or missed alike."""
        return self.worst[1] <= self.case.tolerance and self.case.meets_slo is not bool(self.missed)


def released_cases() -> list[ReferenceRun]:
    """The 48 rows as released."""
    return _cases("splitwise_reference.csv", "released")


def axis_cases() -> list[ReferenceRun]:
    """The 16 rows on the measured axis."""
    return _cases("splitwise_measured_axis.csv", "axis")


def compare(case: ReferenceRun) -> ReferenceComparison:
    """Run a case here, in its mode."""
    result = run_setup(
        case.setup, case.model, case.workload, _trace(case.workload, case.rate), mode=case.mode, machines=case.machines
    )
    slowdown = slowdowns(result.outcomes, case.model)
    return ReferenceComparison(case=case, figures=_figures(result, slowdown), missed=tuple(missed_slos(slowdown)))


def meets_slo(setup: str, rate: int) -> bool:
    """Whether a setup serves BLOOM-176B's conversations at so many requests/s within the SLO."""
    result = run_setup(setup, BLOOM, "conv", _trace("conv", rate))
    return not missed_slos(slowdowns(result.outcomes, BLOOM))


def _cases(file: str, mode: Mode) -> list[ReferenceRun]:
    with (DATA / file).open(encoding="utf-8", newline="") as lines:
        return [
            ReferenceRun(
                model=row["model"],
                workload=row["workload"],
                rate=int(row["rate"]),
                setup=row["setup"],
                machines=(int(row["prompt_machines"]), int(row["decode_machines"]))
                if "prompt_machines" in row
                else None,
                mode=mode,
                figures={name: float(value) for name, value in row.items() if name not in _KEYS and value},
                meets_slo=row["slo_ok"] == "1",
            )
            for row in csv.DictReader(lines)
        ]


@cache
def _trace(workload: str, rate: int) -> Trace:
    return azure_trace(workload, rate)


def _figures(result: SplitwiseResult, slowdown: Mapping[str, float]) -> dict[str, float]:
    return {
        **summary(result.outcomes),
        **{f"slow_{name}": value for name, value in slowdown.items()},
        "n": float(np.count_nonzero(result.outcomes.completed)),
        "events": float(result.events),
        "sim_end": result.sim_end_s,
    }
