"""Runs of all systems of the comparison with SeaLLM, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....coordinator.placement.replay import PeriodReplay
from ....coordinator.placement.search import PlacementGoals, place_apart
from ....coordinator.placement.values import Groups
from ....coordinator.sharing.orders import DOUBLING_BUDGET, DOUBLING_BUDGET_PRINTED, FCFS, MLFQ, ROUND_ROBIN
from ...placement.fleet import Fleet, period_of
from ...placement.replacing import ReplacementCounts, Replacing, ReplacingSettings
from ...records import Outcomes, Trace
from ..page import ResultRow
from .sharing_systems import (
    DEFAULT,
    FEW,
    GPUS,
    GROUPS,
    HISTORY_S,
    SEALLM,
    SERVICES,
    SKEW,
    draw_shifts,
    draw_traces,
    execution_s,
    fewest_gpus,
    lone_latency_s,
    place_by,
    placement_problem,
    serve_dedicated,
    serve_placed,
    serve_shared,
    times_at,
)

Floats = NDArray[np.float64]

DEDICATED: Final = "dedicated"
UNPLACED: Final[Mapping[str, str]] = {
    DEDICATED: "dedicated",
    FCFS: "FCFS",
    ROUND_ROBIN: "round robin",
    MLFQ: "skip-join MLFQ",
    DOUBLING_BUDGET: "doubling budget",
    DOUBLING_BUDGET_PRINTED: "as printed",
}
"""Systems without placement, and what pages call them."""

OTHER_SEEDS: Final = 1000
"""Added to a seed for the requests before those that are served."""

SHIFT_S: Final = 400.0
"""For how long the same services are popular, where that changes."""

SHIFTS: Final = 2
SHIFT_RATE: Final = 110.0
"""More than as many GPUs for each service carry."""

LOOKS_BACK_S: Final = 150.0
"""The default placement is judged by so much at least. The rate of a service changes every 30 s by chance here: what is
seen in an interval alone is not what comes."""


class SharingCase(NamedTuple):
    """What is served: requests per second, seconds of arrivals, and see `draw_traces`; and on how many GPUs."""

    rate: float
    seconds: float
    seeds: tuple[int, ...]
    noise: float = 0.0
    skew: float = SKEW
    run: int = 1
    services: int = FEW
    gpus: int = GPUS

    def draw(self, seconds: float, seed: int) -> dict[int, Trace]:
        """Of all services."""
        return draw_traces(
            self.rate, seconds, seed, noise=self.noise, skew=self.skew, services=self.services, run=self.run
        )


@dataclass(frozen=True, slots=True, eq=False)
class ServedServices:
    """What became of every service's requests under one system, by the service's number; several runs in a row."""

    runs: Sequence[Mapping[int, Outcomes]]

    def latencies(self, number: int | None = None) -> Floats:
        """Seconds from arrival to the last token."""
        return np.concatenate([outcomes.e2e_s for _, outcomes in self._of(number)])

    def normalized(self, number: int | None = None) -> float:
        """The average of latency over the service's average execution time (section 6.1)."""
        return float(np.concatenate([run.e2e_s / execution_s(each) for each, run in self._of(number)]).mean())

    def attainment(self, scale: float, number: int | None = None) -> float:
        """The share of requests that took at most so many times what each takes alone."""
        in_time = [run.e2e_s <= scale * _alone_s(each, run.trace) for each, run in self._of(number)]
        return float(np.concatenate(in_time).mean())

    @property
    def numbers(self) -> list[int]:
        """Of its services."""
        return sorted(self.runs[0])

    @property
    def mean_of_services(self) -> float:
        """The mean of the services' own normalized latencies."""
        return float(np.mean([self.normalized(number) for number in self.numbers]))

    @property
    def p99_s(self) -> float:
        """Of latency."""
        return float(np.quantile(self.latencies(), 0.99))

    def least_attainment(self, scale: float) -> float:
        """That of the service with the least."""
        return min(self.attainment(scale, number) for number in self.numbers)

    @property
    def ttft_s(self) -> float:
        """On average."""
        return float(np.concatenate([run.ttft_s for _, run in self._of(None)]).mean())

    @property
    def tpot_ms(self) -> float:
        """On average, of answers of several tokens."""
        return 1e3 * float(np.concatenate([run.tpot_s[run.trace.output > 1] for _, run in self._of(None)]).mean())

    def _of(self, number: int | None) -> list[tuple[int, Outcomes]]:
        return [(each, one) for run in self.runs for each, one in run.items() if number is None or each == number]


class SharingRateRow(ResultRow, frozen=True):
    """A system at a rate. `of services`: the mean of the services' own means. `least`: of the services."""

    rate: float
    system: str
    normalized_latency: float
    of_services: float
    p99_s: float
    attainment: float
    least_attainment: float
    ttft_s: float
    tpot_ms: float

    @classmethod
    def of(cls, rate: float, system: str, one: ServedServices, scale: float) -> SharingRateRow:
        """`system` as pages call it; `scale`: times of a request alone, within which it is in time."""
        return cls(
            rate=rate,
            system=system,
            normalized_latency=one.normalized(),
            of_services=one.mean_of_services,
            p99_s=one.p99_s,
            attainment=one.attainment(scale),
            least_attainment=one.least_attainment(scale),
            ttft_s=one.ttft_s,
            tpot_ms=one.tpot_ms,
        )


def serve_all(case: SharingCase, systems: Iterable[str]) -> dict[str, ServedServices]:
    """Every system, with the same requests."""
    traces = [(seed, case.draw(case.seconds, seed)) for seed in case.seeds]
    return {system: ServedServices([_serve(case, system, *each) for each in traces]) for system in systems}


def _serve(case: SharingCase, system: str, seed: int, traces: Mapping[int, Trace]) -> Mapping[int, Outcomes]:
    if system in (SEALLM, DEFAULT):
        history = case.draw(HISTORY_S, seed + OTHER_SEEDS)
        return serve_placed(system, history, traces, services=case.services, gpus=case.gpus)
    served: dict[int, Outcomes] = {}
    if system == DEDICATED:
        for number, trace in traces.items():
            served |= serve_dedicated(number, trace, case.gpus // case.services)
    else:
        for group in GROUPS[: case.services // 2]:
            served |= serve_shared(group, system, traces, 2 * case.gpus // case.services)
    return served


def _alone_s(number: int, trace: Trace) -> Floats:
    model = SERVICES[number].model
    return lone_latency_s(times_at(model, fewest_gpus(model)), trace.prompt, trace.output)


class ReplacedRun(NamedTuple):
    """All services under one policy while who is popular changes."""

    served: ServedServices
    counts: Sequence[ReplacementCounts]
    replayed: int
    waited: int


def serve_shifts(policy: str, rate: float, seeds: Iterable[int], *, is_replaced: bool) -> ReplacedRun:
    """`policy`: DEDICATED, SEALLM or DEFAULT. Placed by requests of the first part, and anew as it goes, or not."""
    runs, counts, replayed, waited = [], [], 0, 0
    for seed in seeds:
        history = draw_shifts(rate, HISTORY_S, seed + OTHER_SEEDS, 1)
        traces = draw_shifts(rate, SHIFT_S, seed, SHIFTS)
        problem = placement_problem(period_of(history))
        place = _place_evenly if policy == DEDICATED else partial(place_by, policy)
        settings = ReplacingSettings(
            looks_back_s=LOOKS_BACK_S if policy == DEFAULT else 0.0, until_s=SHIFTS * SHIFT_S if is_replaced else 0.0
        )
        groups = place(PeriodReplay(problem), ())
        changes = Replacing(problem, groups, DOUBLING_BUDGET, traces, place=place, settings=settings)
        fleet = Fleet(traces)
        changes.begin(fleet)
        runs.append(fleet.run(changes))
        counts.append(changes.counts)
        replayed += fleet.replayed
        waited += fleet.waited
    return ReplacedRun(ServedServices(runs), counts, replayed, waited)


def _place_evenly(replay: PeriodReplay, before: Groups) -> Groups:
    """Each service on as many GPUs of its own."""
    return place_apart(replay, {(each,): 1.0 for each in range(FEW)}, PlacementGoals())
