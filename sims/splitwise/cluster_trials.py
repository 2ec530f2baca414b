"""Clusters of machines, tried at a rate: does one meet every SLO?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from ...coordinator.routing.interface import RoutingPolicy
from ..policies.pools import SharedPool, SplitPools
from ..records import Outcomes, Trace, TraceError
from .cluster import RunStopped, SplitwiseCluster
from .machine import AS_RELEASED, Machine, MachineLimits
from .machine_types import MachineCatalogue, MachineType
from .metrics import LoneRequests, Slo, missed_slos, slowdowns_over, summary
from .setups import KV_TRANSFER_BYTES_S, MAX_PENDING_TOKENS, SetupError
from .slo_watch import SloWatch
from .traces import draw_trace

MAX_TRACE_REQUESTS: Final = 200_000
UNFINISHED: Final = "unfinished"
"""What a cluster misses in which requests never end, for want of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class ClusterDesign:
    """Types of machines: for prompts and for tokens, or one for both (`token` None: a baseline)."""

    name: str
    prompt: MachineType
    token: MachineType | None

    def usd_per_h(self, prompt: int, token: int) -> float:
        """Of a cluster of so many machines."""
        per_token = 0.0 if self.token is None else self.token.token_usd_per_h
        return prompt * self.prompt.prompt_usd_per_h + token * per_token

    def kw(self, prompt: int, token: int) -> float:
        """What its cards may draw, in kW."""
        watts = 0.0 if self.token is None else self.token.watts
        return (prompt * self.prompt.watts + token * watts) / 1e3


class MachineUsage(NamedTuple):
    """Of a pool, on average: the share of time that a machine computes, and requests that decode
    there meanwhile. `tokens_s`: by tokens of a batch, in order, the seconds of all machines that
    computed such."""

    busy: float
    decodes: float
    tokens_s: Mapping[int, float]


class ClusterTrial(NamedTuple):
    """How a cluster fares. `missed`: the SLOs that it misses; of a run that was ended early, the
    one that is certain, and no figures."""

    missed: tuple[str, ...]
    slowdowns: Mapping[str, float]
    figures: Mapping[str, float]
    prompt_pool: MachineUsage
    token_pool: MachineUsage


NOT_USED: Final = MachineUsage(0.0, 0.0, {})


@final
class DrawnTraces:
    """Poisson arrivals for `seconds`, with lengths drawn from `lengths`; one trace for each rate."""

    def __init__(self, lengths: Sequence[tuple[int, int]], *, source: str, seconds: float, seed: int) -> None:
        prompts, outputs = np.mean(lengths, axis=0)
        self.mean_lengths = float(prompts), float(outputs)
        """Tokens of prompts and of answers."""
        self.seconds = seconds
        self._lengths = lengths
        self._source = source
        self._seed = seed
        self._made: dict[float, Trace] = {}

    @property
    def most_rate(self) -> float:
        """The highest rate, by the number of requests that a trace may have."""
        return MAX_TRACE_REQUESTS / self.seconds

    def at(self, rate: float) -> Trace:
        """Raises SetupError for a rate at which too many requests come, or none."""
        if rate > self.most_rate:
            raise SetupError(
                f"rate: {rate:g} requests/s for {self.seconds:g} s are more than {MAX_TRACE_REQUESTS:,} requests; "
                "give fewer seconds"
            )
        trace = self._made.get(rate)
        if trace is None:
            try:
                trace = draw_trace(self._lengths, source=self._source, rate=rate, seconds=self.seconds, seed=self._seed)
            except TraceError as error:
                raise SetupError(f"rate: {rate:g} requests/s for {self.seconds:g} s: {error}") from None
            self._made[rate] = trace
        return trace


@final
class ClusterTrials:
    """Simulates clusters of a catalogue's machines, and keeps what is certain: of fewer machines
    than missed an SLO nothing better is expected, nor worse of more than met all."""

    def __init__(
        self,
        traces: DrawnTraces,
        catalogue: MachineCatalogue,
        slo: Slo,
        *,
        kv_bytes_s: float = KV_TRANSFER_BYTES_S,
        limits: MachineLimits = AS_RELEASED,
        is_time_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.traces = traces
        self.simulated = 0
        self.missed_last = ""  # an SLO that the latest cluster missed
        self._catalogue = catalogue
        self._slo = slo
        self._limits = limits
        self._kv_token_s = catalogue.kv_token_bytes / kv_bytes_s
        self._is_time_up = is_time_up
        self._lone: dict[float, LoneRequests] = {}
        self._met: dict[tuple[str, float], list[tuple[int, int]]] = {}
        self._failed: dict[tuple[str, float], list[tuple[int, int]]] = {}

    def meets(self, design: ClusterDesign, prompt: int, token: int, rate: float) -> bool:
        """Whether so many machines meet every SLO. Raises SearchTimeUp."""
        met = self._met.setdefault((design.name, rate), [])
        failed = self._failed.setdefault((design.name, rate), [])
        if any(prompt >= fewer and token >= others for fewer, others in met):
            return True
        if any(prompt <= more and token <= others for more, others in failed):
            return False
        missed = self.try_cluster(design, prompt, token, rate).missed
        found, self.missed_last = not missed, missed[0] if missed else ""
        (met if found else failed).append((prompt, token))
        return found

    def try_cluster(
        self, design: ClusterDesign, prompt: int, token: int, rate: float, *, to_the_end: bool = False
    ) -> ClusterTrial:
        """Serve the trace of a rate; `to_the_end`: also where an SLO is missed. Raises
        SearchTimeUp."""
        trace = self.traces.at(rate)
        lone = self._lone.get(rate)
        if lone is None:
            lone = self._lone[rate] = self._catalogue.lone_requests(trace)
        machines, policy = _build(design, prompt, token, self._limits)
        watch = None if to_the_end else SloWatch(trace, lone, self._slo, self._is_time_up)
        cluster = SplitwiseCluster(trace, machines, policy, kv_token_s=self._kv_token_s, watch=watch)
        self.simulated += 1
        try:
            cluster.run()
        except RunStopped:
            assert watch is not None, "only the watch stops a run"
            return ClusterTrial((watch.missed or "",), {}, {}, NOT_USED, NOT_USED)
        outcomes = Outcomes(
            trace=trace,
            ttft_s=np.array(cluster.first_token) - trace.arrival_s,
            e2e_s=np.array(cluster.last_token) - trace.arrival_s,
        )
        if not outcomes.completed.all():
            return ClusterTrial((UNFINISHED,), {}, {}, NOT_USED, NOT_USED)
        slowdown = slowdowns_over(outcomes, lone)
        return ClusterTrial(
            missed=tuple(missed_slos(slowdown, self._slo)),
            slowdowns=slowdown,
            figures=summary(outcomes),
            prompt_pool=_usage(machines[:prompt], cluster.ended_at),
            token_pool=_usage(machines[prompt:], cluster.ended_at),
        )


def _build(
    design: ClusterDesign, prompt: int, token: int, limits: MachineLimits
) -> tuple[list[Machine], RoutingPolicy]:
    machines = [Machine(design.prompt.iterations, design.prompt.kv_tokens, limits) for _ in range(prompt)]
    if design.token is None:
        return machines, SharedPool()
    machines += [Machine(design.token.iterations, design.token.kv_tokens, limits) for _ in range(token)]
    return machines, SplitPools(range(prompt), range(prompt, prompt + token), max_pending=MAX_PENDING_TOKENS)


def _usage(machines: Sequence[Machine], seconds: float) -> MachineUsage:
    if not machines:
        return NOT_USED
    busy = sum(machine.busy_s for machine in machines)
    decodes = sum(machine.decode_request_s for machine in machines) / busy if busy else 0.0
    tokens_s: defaultdict[int, float] = defaultdict(float)
    for machine in machines:
        for tokens, spent_s in machine.tokens_s.items():
            tokens_s[tokens] += spent_s
    return MachineUsage(busy / seconds / len(machines), decodes, dict(sorted(tokens_s.items())))
