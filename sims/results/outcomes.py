"""What comes out of a simulation, and the figures that people ask of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Final, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...coordinator.plan import Phase
from ...coordinator.planning.model.workload import Service, Slo
from ..engine.values import EngineCounts, StepRecord
from ..records import Outcomes
from ..scenario import ServiceRun, SimSettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PERCENTILES: Final = (50.0, 90.0, 99.0)


class StepLog(NamedTuple):
    """What a replica (its number in the result) did in one go."""

    replica: int
    step: StepRecord


class TransferRecord(NamedTuple):
    """One request's KV transfer: its row, replicas (numbers), first and last moment."""

    row: int
    source: int
    target: int
    start_s: float
    end_s: float
    tokens: int


@final
class ServiceLog:
    """Filled while the simulation runs; a row for each request of the trace."""

    def __init__(self, run: ServiceRun) -> None:
        count = len(run.trace)
        self._run = run
        self.ttft_s = array("d", [nan]) * count
        self.e2e_s = array("d", [nan]) * count
        self.kv_s = array("d", [0.0]) * count
        self.prefill = array("q", [-1]) * count
        self.decode = array("q", [-1]) * count
        self.replays = array("q", [0]) * count
        self.refused = 0
        self.not_admitted = array("b", [0]) * count

    def outcome(self) -> ServiceOutcome:
        """As values."""
        return ServiceOutcome(
            service=self._run.service,
            outcomes=Outcomes(trace=self._run.trace, ttft_s=np.array(self.ttft_s), e2e_s=np.array(self.e2e_s)),
            kv_s=np.array(self.kv_s),
            prefill=np.array(self.prefill, dtype=np.int64),
            decode=np.array(self.decode, dtype=np.int64),
            replays=np.array(self.replays, dtype=np.int64),
            refused=self.refused,
            not_admitted=np.array(self.not_admitted, dtype=np.bool_),
            later_slos=self._run.later_slos,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServiceOutcome:
    """What became of a service's requests, row by row.

    `kv_s`: seconds from the end of the prefill to that of the KV transfer (its visible part).
    `prefill`, `decode`: numbers of the replicas of the last attempt; -1 for none. `replays`: how
    often a lost box made it start again. `refused`: requests longer than their replica's KV memory.
    `not_admitted`: which ones gateways have refused. `later_slos`: the deadlines of requests that
    arrive from a moment on.
    """

    service: Service
    outcomes: Outcomes
    kv_s: Floats
    prefill: Ints
    decode: Ints
    replays: Ints
    refused: int
    not_admitted: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    later_slos: tuple[tuple[float, Slo], ...] = ()

    def met(self, scale: float = 1.0) -> NDArray[np.bool_]:
        """Which requests met all of their deadlines, each `scale` times as long."""
        found = meets(self.outcomes, self.service.slo, scale)
        for at, slo in self.later_slos:
            found = np.where(self.outcomes.trace.arrival_s >= at, meets(self.outcomes, slo, scale), found)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOutcome:
    """One replica; `times` says where its step times are from, `phase` is its last."""

    id: str
    service: str
    phase: Phase
    boxes: tuple[str, ...]
    times: str
    counts: EngineCounts
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimResult:
    """`sent_bytes` by (from, to), indices of `boxes`; `steps`, `transfers` if recorded."""

    services: tuple[ServiceOutcome, ...]
    replicas: tuple[ReplicaOutcome, ...]
    boxes: tuple[str, ...]
    settings: SimSettings
    events: int
    end_s: float
    sent_bytes: Mapping[tuple[int, int], float]
    traffic_usd: float
    steps: tuple[StepLog, ...]
    transfers: tuple[TransferRecord, ...]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, over the requests that ended; NaN if none did."""

    mean: float
    p50: float
    p90: float
    p99: float


class ServiceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A service in figures.

    Rates are per second of `span_s`, from the first arrival to the last request's end.
    `attainment`: the share of all requests that met every deadline; `goodput_s`: how many of those
    per second. `lengths`, `arrivals` and `times` say what went in.
    """

    service: str
    model: str
    lengths: str
    arrivals: str
    times: tuple[str, ...]
    requests: int
    completed: int
    refused: int
    replayed: int
    span_s: float
    offered_s: float
    completed_s: float
    output_tokens_s: float
    prompt_tokens_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    kv_visible_s: Distribution
    attainment: float
    goodput_s: float
    slo: dict[str, float]
    not_admitted: int = 0


def meets(outcomes: Outcomes, slo: Slo, scale: float = 1.0) -> NDArray[np.bool_]:
    """Which requests met all deadlines, each `scale` times as long."""
    return (
        (outcomes.ttft_s <= slo.ttft_s * scale)
        & (outcomes.tpot_s <= slo.tpot_s * scale)
        & (outcomes.e2e_s <= slo.e2e_s * scale)
    )


def attainment(outcomes: Outcomes, slo: Slo, scale: float = 1.0) -> float:
    """The share of all requests that met all deadlines, each `scale` times as long."""
    return float(meets(outcomes, slo, scale).mean())


def summarise(outcome: ServiceOutcome, result: SimResult) -> ServiceSummary:
    """The figures of one service of a result."""
    outcomes, service = outcome.outcomes, outcome.service
    trace, done = outcomes.trace, outcomes.completed
    ends = trace.arrival_s[done] + outcomes.e2e_s[done]
    first = float(trace.arrival_s[0])
    span = max(float(ends.max()) - first, 1e-12) if len(ends) else nan
    offered_span = float(trace.arrival_s[-1]) - first
    met = outcome.met()
    split = done & (outcome.prefill != outcome.decode)
    slo = service.slo
    return ServiceSummary(
        service=service.name,
        model=service.model.name,
        lengths=trace.lengths,
        arrivals=trace.arrivals,
        times=tuple(sorted({replica.times for replica in result.replicas if replica.service == service.name})),
        requests=len(trace),
        completed=int(done.sum()),
        refused=outcome.refused,
        not_admitted=int(outcome.not_admitted.sum()),
        replayed=int((outcome.replays > 0).sum()),
        span_s=span,
        offered_s=(len(trace) - 1) / offered_span if offered_span > 0.0 else nan,
        completed_s=float(done.sum()) / span,
        output_tokens_s=float(trace.output[done].sum()) / span,
        prompt_tokens_s=float(trace.prompt[done].sum()) / span,
        ttft_s=distribution_of(outcomes.ttft_s[done]),
        # An answer of one token has no time between tokens, which 0 would pass off as a good one.
        tpot_s=distribution_of(outcomes.tpot_s[done & (trace.output > 1)]),
        e2e_s=distribution_of(outcomes.e2e_s[done]),
        kv_visible_s=distribution_of(outcome.kv_s[split]),
        attainment=float(met.mean()),
        goodput_s=float(met.sum()) / span,
        slo={"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s, "target": slo.target},
    )


def distribution_of(values: Floats) -> Distribution:
    """Mean and percentiles."""
    if not len(values):
        return Distribution(mean=nan, p50=nan, p90=nan, p99=nan)
    p50, p90, p99 = (float(figure) for figure in np.percentile(values, PERCENTILES))
    return Distribution(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)
