"""A live run beside its simulation and what was planned: figures, ratios and verdicts.

    estimated    by the formulas that plans are searched by, of the plan that the network follows, at this rate
    expected     what `plan --live` says of it, by more requests: to boxes as their nodes describe them
    steady       that plan simulated with the boxes as they are, and with as many other requests of the same kind, on
                 average over some draws; both without those that are more than it carries in time, which count as
                 missed
    simulated    the run itself: the same requests, the plans as they changed, what happened to nodes and links
    live         emulated nodes on this machine, asked by a client

The planner says well what comes where `expected` and `steady` agree, the simulator where `simulated` and `live` do.
What differs between the last two is all that the simulator leaves out: gossip that lags and processes that wait for a
core.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from statistics import fmean
from typing import Final

import msgspec
import numpy as np
import psutil
import trio
from numpy.typing import NDArray
from scipy.stats.mstats import hdquantiles

from ...coordinator import Plan
from ...coordinator.names import name_of
from ...coordinator.plan import Deadlines
from ...coordinator.planning.model.problem import Proposal
from ...coordinator.planning.model.workload import Slo, Workload
from ...node.messages import Status
from ...sims.records import Outcomes, Trace
from ...sims.results.trials import MOST_REQUESTS
from ...sims.workloads import Lengths, draw
from ..errors import UsageError
from .expected import expect_plan, find_capacity
from .network import LiveRun, Say, find_in_time, run_live
from .nodes import LiveSettings
from .simulated import SimulatedNetwork, deadlines_in_seconds, service_of, simulated_network, with_deadlines_in_seconds

Floats = NDArray[np.float64]

TOLERANCE: Final = 0.05
"""Between live and simulated."""
ESTIMATE_TOLERANCE: Final = 0.1
"""Between what `plan --live` expects and what the simulator finds."""
STEADY_REQUESTS: Final = MOST_REQUESTS
"""Simulated, and expected by, which takes no more: in longer runs queues have more time to grow."""
STEADY_DRAWS: Final = 4
SPREAD: Final = (-2e-3, -1.5e-3, -1e-3, -5e-4, 0.0, 5e-4, 1e-3, 1.5e-3, 2e-3)
"""Seconds that messages take more or less in runs that are simulated beside each other: which of two boxes a request
goes to hangs on moments, live as well."""
PERCENTILES: Final = (50, 90, 99)
SHOWN_ONLY: Final = ("e2e", "ttft_p99", "tpot_p99", "throughput")
"""E2E follows from the others; of some hundred requests the 99th percentile hangs on two or three, and throughput on
the last."""
ESTIMATED: Final = ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s", "attainment")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveTraffic:
    """What is asked: `requests` with these lengths, `rate` a second, or `load` of what the best plan is expected to
    carry in time. The first `lead` of them fill the network and do not count."""

    lengths: Lengths
    requests: int
    seed: int
    rate: float | None = None
    load: float | None = None
    lead: int = 0

    def workload(self, rate: float) -> Workload:
        """For the planner."""
        lengths = self.lengths
        return Workload(name=lengths.source, prompts=lengths.prompt, outputs=lengths.output, rate=rate)

    def trace(self, rate: float) -> Trace:
        """Raises TraceError."""
        return draw(self.lengths, rate=rate, rng=np.random.default_rng(self.seed), requests=self.requests)

    def others(self, rate: float, requests: int, number: int) -> Trace:
        """Others of the kind: as many long ones as there are among all lengths, as the planner expects them. Drawn by
        chance, queues of four times 3,000 were 5 % longer. Raises TraceError."""
        rng = np.random.default_rng([self.seed, number])
        return draw(self.lengths, rate=rate, rng=rng, requests=requests, is_even=True)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of all runs.

    `estimated`: by formulas; `estimate_error`: steady over expected, less 1; `difference`: live over simulated, less 1;
    None where there is nothing to compare. `spread`: standard deviation over mean of the simulated runs. `counts`,
    `is_estimated`: whether they are held against a tolerance. `as_routed`: simulated with each request on the nodes
    that served it live."""

    name: str
    expected: float | None
    steady: float | None
    simulated: float
    spread: float
    live: float
    estimate_error: float | None
    difference: float
    counts: bool
    is_estimated: bool
    estimated: float | None = None
    as_routed: float | None = None


class LiveComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a comparison has found. Seconds, requests and tokens per second. `own_plans_goodput_s`: where
    something goes wrong, of a simulation whose coordinator plans by itself."""

    ok: bool
    estimate_ok: bool
    tolerance: float
    estimate_tolerance: float
    emulated: str
    model: str
    lengths: str
    arrivals: str
    requests: int
    lead: int
    rate: float
    load: float | None
    rate_rule: str
    deadlines: Deadlines
    phases: dict[str, int]
    plans: int
    schedule: tuple[str, ...]
    figures: tuple[Figure, ...]
    failed: int
    own_plans_goodput_s: float | None
    median_request_ttft_difference: float
    median_request_e2e_difference: float
    link_gbps: float
    link_rtt_s: float
    message_s: float
    cores: float
    own_cores: float
    late: int
    notes: tuple[str, ...]
    elapsed_s: float


def estimate_percentile(values: NDArray[np.float64], share: float) -> float:
    """Harrell and Davis's estimate (Biometrika 69, 1982): a mean of all values, of which those near the percentile
    weigh most. Of some hundred requests a percentile is one of them, and where the next is far, as between two boxes
    that are unequally fast, two runs with one request on another box would differ by that."""
    if len(values) < 2:
        return float(values[0]) if len(values) else nan
    return float(hdquantiles(values, prob=[share / 100.0])[0])


def figures_of(outcomes: Outcomes, deadlines: Deadlines) -> dict[str, float]:
    """Percentiles over the requests that ended; output tokens per second from the first arrival to the last token;
    of all requests the share in time, and how many of these a second of the arrivals."""
    trace, done = outcomes.trace, outcomes.completed
    several = done & (trace.output > 1)
    columns = (("ttft", outcomes.ttft_s[done]), ("tpot", outcomes.tpot_s[several]), ("e2e", outcomes.e2e_s[done]))
    found: dict[str, float] = {}
    for name, values in columns:
        found[f"{name}_mean_s"] = float(values.mean()) if len(values) else nan
        for share in PERCENTILES:
            found[f"{name}_p{share}_s"] = estimate_percentile(values, share)
    in_time = find_in_time(outcomes, deadlines)
    arrivals = trace.arrival_s
    ends = (arrivals + outcomes.e2e_s)[done]
    found["throughput_tokens_s"] = (
        float(trace.output[done].sum()) / float(ends.max() - arrivals[0]) if len(ends) else 0.0
    )
    found["attainment"] = float(in_time.mean())
    found["goodput_requests_s"] = float(in_time.sum()) / max(1e-9, float(arrivals[-1] - arrivals[0]))
    return found


def expected_figures(proposal: Proposal, rate: float) -> dict[str, float]:
    """What the planner says, by the names of `figures_of`; it knows no means."""
    found = {"attainment": proposal.attainment, "goodput_requests_s": proposal.attainment * rate}
    for name, values in (("ttft", proposal.ttft_s), ("tpot", proposal.tpot_s), ("e2e", proposal.e2e_s)):
        found |= {f"{name}_{share}_s": seconds for share, seconds in values._asdict().items()}
    return found


def compare(
    live: Mapping[str, float],
    simulated: Sequence[Mapping[str, float]],
    expected: Mapping[str, float] | None = None,
    steady: Mapping[str, float] | None = None,
    *,
    estimated: Mapping[str, float] | None = None,
    as_routed: Mapping[str, float] | None = None,
    has_faults: bool = False,
) -> tuple[Figure, ...]:
    """All side by side; of the simulated runs the mean. Where something goes wrong, goodput alone counts: what single
    requests are late by depends on the very moment."""

    def figure(name: str, value: float) -> Figure:
        found = np.array([each[name] for each in simulated])
        modelled = float(found.mean())
        planned, lasting = (expected or {}).get(name), (steady or {}).get(name)
        has_both = planned is not None and lasting is not None
        return Figure(
            name=name,
            expected=planned,
            steady=lasting,
            simulated=modelled,
            spread=float(found.std()) / modelled if modelled else 0.0,
            live=value,
            estimate_error=_difference(lasting, planned) if planned is not None and lasting is not None else None,
            difference=_difference(value, modelled),
            counts=name.startswith("goodput") if has_faults else not name.startswith(SHOWN_ONLY),
            is_estimated=has_both and name in ESTIMATED,
            estimated=(estimated or {}).get(name),
            as_routed=(as_routed or {}).get(name),
        )

    return tuple(figure(name, value) for name, value in live.items())


def run_comparison(settings: LiveSettings, traffic: LiveTraffic, tolerance: float, say: Say) -> LiveComparison:
    """Live, then simulated. Raises DemoFailed, ClientError or UsageError."""
    began = time.monotonic()
    settings = with_deadlines_in_seconds(settings, traffic.workload(1.0))
    slo = deadlines_in_seconds(settings, traffic.workload(1.0))
    asked: list[tuple[float, str]] = []

    def make_trace(status: Status) -> Trace:
        rate, rule = choose_rate(traffic, status, slo)
        asked.append((rate, rule))
        say(f"{rate:.3g} requests/s: {rule}")
        return traffic.trace(rate)

    live = trio.run(run_live, settings, make_trace, say)
    ((rate, rule),) = asked
    trace = live.outcomes.trace
    plan = plan_for_most(live.plans, float(trace.arrival_s[traffic.lead]), float(trace.arrival_s[-1]))
    network = simulated_network(settings, live, service_of(settings, traffic.workload(rate), plan.service))
    say("simulating the same requests")
    run = trace, live.plans, live.happened
    simulated = network.run(*run)
    estimated = expected = steady = as_routed = None
    if not settings.schedule:
        say(f"simulating {STEADY_DRAWS} times {STEADY_REQUESTS} requests of the same kind")
        gbps, rtt_s = float(network.cluster.gbps[0, -1]), float(network.cluster.rtt_s[0, -1])
        planned = expect_plan(live.before, plan, traffic.workload(rate), slo, gbps, rtt_s, STEADY_REQUESTS)
        if planned is not None:
            estimated, expected = (expected_figures(proposal, rate) for proposal in planned)
        steady = _steady_figures(network, traffic, rate, plan, rate if planned is None else planned.expected.max_rate)
        as_routed = figures_of(_without_lead(network.run(*run, as_routed=live.served), traffic.lead), plan.deadlines)
    seen, modelled = (_without_lead(outcomes, traffic.lead) for outcomes in (live.outcomes, simulated))
    predicted = network.predict(trace, live.plans[0][1], live.happened) if settings.schedule else None
    figures = compare(
        figures_of(seen, plan.deadlines),
        [
            figures_of(_without_lead(network.with_messages(more_s).run(*run), traffic.lead), plan.deadlines)
            for more_s in SPREAD
        ],
        expected,
        steady,
        estimated=estimated,
        as_routed=as_routed,
        has_faults=bool(settings.schedule),
    )
    cluster = network.cluster
    return LiveComparison(
        ok=all(abs(figure.difference) <= tolerance for figure in figures if figure.counts),
        estimate_ok=all(
            abs(figure.estimate_error or 0.0) <= ESTIMATE_TOLERANCE for figure in figures if figure.is_estimated
        ),
        tolerance=tolerance,
        estimate_tolerance=ESTIMATE_TOLERANCE,
        emulated=settings.describe(),
        model=network.service.model.name,
        lengths=trace.lengths,
        arrivals=trace.arrivals,
        requests=len(trace),
        lead=traffic.lead,
        rate=rate,
        load=traffic.load,
        rate_rule=rule,
        deadlines=plan.deadlines,
        phases=dict(Counter(replica.phase.value for replica in plan.replicas)),
        plans=len(live.plans),
        schedule=tuple(map(str, settings.schedule)),
        figures=figures,
        failed=int((~live.outcomes.completed).sum()),
        own_plans_goodput_s=None if predicted is None else _goodput(predicted, traffic.lead, plan.deadlines),
        median_request_ttft_difference=_median_difference(seen.ttft_s, modelled.ttft_s),
        median_request_e2e_difference=_median_difference(seen.e2e_s, modelled.e2e_s),
        link_gbps=float(cluster.gbps[0, -1]),
        link_rtt_s=float(cluster.rtt_s[0, -1]),
        message_s=network.message_s,
        cores=live.cores,
        own_cores=live.own_cores,
        late=live.late,
        notes=_notes(live),
        elapsed_s=time.monotonic() - began,
    )


def describe_verdicts(found: LiveComparison) -> list[str]:
    """Whether they agree, in a line each."""
    counted = dict.fromkeys(figure.name.partition("_")[0] for figure in found.figures if figure.counts)
    what = ", ".join(name.upper() if name in ("ttft", "tpot") else name for name in counted)
    verdict = "agree" if found.ok else "do not agree"
    lines = [f"live and simulated {verdict} within {found.tolerance:.0%} on {what}"]
    if any(figure.is_estimated for figure in found.figures):
        kept = "agree" if found.estimate_ok else "do not agree"
        within = f"within {found.estimate_tolerance:.0%}"
        lines.append(f"expected and simulated {kept} {within} on TTFT and TPOT (p50, p90) and attainment")
    return lines


def plan_for_most(plans: tuple[tuple[float, Plan], ...], first_s: float, last_s: float) -> Plan:
    """The plan that was in force for the longest of these seconds."""
    ends = [*(at for at, _ in plans[1:]), inf]
    spans = [max(0.0, min(end, last_s) - max(at, first_s)) for (at, _), end in zip(plans, ends, strict=True)]
    return plans[int(np.argmax(spans))][1]


def choose_rate(traffic: LiveTraffic, status: Status, slo: Slo) -> tuple[float, str]:
    """Requests per second, and by which rule. Raises UsageError where no plan can serve them, DemoFailed."""
    if traffic.load is None:
        return (1.0, "the default") if traffic.rate is None else (traffic.rate, "as given")
    capacity = find_capacity(status, traffic.workload(1.0), slo)
    if not capacity.rate > 0.0:
        raise UsageError("load: no plan can serve such requests, in time or not; give --rate")
    rule = f"{traffic.load:.0%} of {capacity}"
    if capacity.share != slo.target:
        rule += f", since {slo.target:.0%} are expected to be in time at no rate"
    return traffic.load * capacity.rate, rule


def _steady_figures(
    network: SimulatedNetwork, traffic: LiveTraffic, rate: float, plan: Plan, carried: float
) -> dict[str, float]:
    """From clients of all gateways, as the planner expects them. Where it expects the plan to keep the target up to a
    lower rate (`carried`), requests beyond that count as missed, as in what it says: a queue that grows for as long as
    requests come would say how many of them there were."""

    def simulate_share(share: float) -> dict[str, float]:
        draws = (traffic.others(share * rate, STEADY_REQUESTS, number) for number in range(STEADY_DRAWS))
        runs = [figures_of(from_all.run(trace, [(0.0, plan)]), plan.deadlines) for trace in draws]
        found = {name: fmean(run[name] for run in runs) for name in runs[0]}
        return found | {"attainment": share * found["attainment"]}

    from_all = replace(network, gateways=(), told_limits=False, holds_back=False)
    shares = dict.fromkeys((1.0, min(1.0, (carried or rate) / rate)))
    return max(map(simulate_share, shares), key=lambda found: found["goodput_requests_s"])


def _without_lead(outcomes: Outcomes, lead: int) -> Outcomes:
    trace = outcomes.trace
    rest = replace(
        trace,
        ids=trace.ids[lead:],
        arrival_s=trace.arrival_s[lead:],
        prompt=trace.prompt[lead:],
        output=trace.output[lead:],
    )
    return Outcomes(trace=rest, ttft_s=outcomes.ttft_s[lead:], e2e_s=outcomes.e2e_s[lead:])


def _goodput(outcomes: Outcomes, lead: int, deadlines: Deadlines) -> float:
    return figures_of(_without_lead(outcomes, lead), deadlines)["goodput_requests_s"]


def _difference(value: float, reference: float) -> float:
    """As a share of the reference; equal ones differ by nothing, also of 0."""
    if value == reference:
        return 0.0
    return value / reference - 1.0 if reference else inf


def _median_difference(live: Floats, simulated: Floats) -> float:
    """Of the same request in both runs, as a share of the simulated figure."""
    return float(np.nanmedian(np.abs(live / simulated - 1.0)))


def _notes(live: LiveRun) -> tuple[str, ...]:
    """What to know of the live run before its figures are believed."""
    cores = psutil.cpu_count() or 1
    notes = [f"{live.cores:.1f} of {cores} cores were busy on average, {live.own_cores:.1f} of them with this run"]
    if live.late:
        notes.append(f"emulated engines fell behind their model {live.late} times: this machine was too slow")
    if len(live.plans) > 1:
        moments = ", ".join(f"{at:.0f}" for at, _ in live.plans[1:])
        notes.append(f"the network made another plan {moments} s after the beginning, and so does the simulator")
    for each in sorted(live.happened, key=lambda each: each.began):
        names = ", ".join(map(name_of, each.peers))
        notes.append(f"{each.fault} ({names}) took from {each.began:.1f} to {each.ended:.1f} s")
    if live.recovered:
        notes.append(f"{live.recovered} requests needed more than one attempt")
    return tuple(notes)
