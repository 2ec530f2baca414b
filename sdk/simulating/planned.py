"""`p2pserve sim` with a plan: the one given, or the one that `p2pserve plan` would make."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from ...coordinator.costs.model_shape import KV_8_BIT, KV_16_BIT
from ...coordinator.plan import Plan
from ...coordinator.planning.lower.evaluator import LowerLevel
from ...coordinator.planning.model.cluster import Cluster
from ...coordinator.planning.model.problem import Problem
from ...coordinator.planning.model.workload import Service, Workload
from ...coordinator.planning.rescheduling import without_boxes
from ...coordinator.requests.admission import AdmissionSettings
from ...coordinator.routing.interface import RoutingSettings
from ...node.planning.trying import settings_with_network_times
from ...sims.admission import AT_DEADLINE
from ...sims.records import Trace, TraceError
from ...sims.replanning import Replanner
from ...sims.results.chrome_trace import write_chrome_trace
from ...sims.results.outcomes import SimResult
from ...sims.results.plots import plot_attainment, plot_timeline
from ...sims.results.report import report_of, tables, write_requests
from ...sims.scenario import Change, Replan, ServiceRun, SimAdmission, SimSettings, WorldError
from ...sims.workloads import AZURE, Lengths, azure, chain_traces, draw, read_requests, replay
from ...sims.world import simulate
from ..actions.plan import search_plan
from ..actions.plan_options import problem_of
from ..actions.status_view import open_console
from ..errors import UsageError
from ..options.values import check_writable
from .changes import (
    SimScenario,
    TrafficShift,
    check_moments,
    read_scenario,
    replan_policies,
    replan_settings,
)
from .report import PolicyRun, changes_json, print_changes, run_json, spans_of

SECONDS: Final = 300.0
NAMED: Final = 8  # boxes in a line about one that is none of them


class _Planned(msgspec.Struct):
    plan: Plan
    kv_value_bytes: int = KV_16_BIT


class _PlanFile(msgspec.Struct):
    """What is read of the output of `p2pserve plan --format json`."""

    services: list[_Planned]


def run_planned(arguments: SimpleNamespace) -> int:
    """Plan unless there is a plan, simulate, and write what was asked for. Returns the exit code."""
    # Before the search and the simulation, which take minutes: what they find must have a place to go.
    for field, path in (("requests", arguments.requests), ("chrome-trace", arguments.chrome_trace)):
        check_writable(field, path)
    problem = problem_of(arguments)
    scenario = read_scenario(arguments, problem)
    traces = [_trace(arguments, service, number, scenario.shifts) for number, service in enumerate(problem.services)]
    check_moments(scenario, max(float(trace.arrival_s[-1]) for trace in traces))
    plans = _plans(arguments, without_boxes(problem, scenario.absent) if scenario.absent else problem)
    runs = [
        ServiceRun(
            service=service,
            plan=plan,
            trace=trace,
            later_slos=tuple((shift.at, shift.slo) for shift in scenario.shifts),
        )
        for service, plan, trace in zip(problem.services, plans, traces, strict=True)
    ]
    settings = SimSettings(
        layerwise=not arguments.serialised,
        gateways=_gateways(arguments.gateways, problem.cluster),
        routing=RoutingSettings(policy=arguments.dispatch),
        admission=_admission(arguments),
        seed=arguments.seed,
    )
    if scenario.events:
        return _run_changes(arguments, problem, runs, settings, scenario)
    started = time.process_time()
    result = _simulate(problem, runs, settings, arguments)
    seconds = time.process_time() - started
    _write(result, arguments)
    report = report_of(result)
    if arguments.format == "json":
        figures = msgspec.to_builtins(report)
        print(json.dumps({"simulated": True, "specs": _specs(problem), "cpu_s": seconds, **figures}))
    else:
        console = open_console()
        console.print(tables(report), soft_wrap=not console.is_terminal)
        console.print(f"simulated: {report.simulated_s:.0f} s, {report.events} events in {seconds:.2f} CPU seconds")
    return 0


def _admission(arguments: SimpleNamespace) -> SimAdmission | None:
    if arguments.admission == "none":
        for field in ("urgent", "batch"):
            if getattr(arguments, field):
                raise UsageError(
                    f"{field}: classes count where requests wait; give --admission network or deadline too"
                )
        return None
    rules = AT_DEADLINE if arguments.admission == "deadline" else AdmissionSettings()
    try:
        return SimAdmission(rules=rules, urgent=arguments.urgent, batch=arguments.batch)
    except WorldError as error:
        raise UsageError(str(error)) from error


def _run_changes(
    arguments: SimpleNamespace,
    problem: Problem,
    runs: Sequence[ServiceRun],
    settings: SimSettings,
    scenario: SimScenario,
) -> int:
    """Simulate what changes, by each policy that was asked for."""
    policies = replan_policies(arguments)
    if len(policies) > 1:
        for field in ("requests", "plots", "chrome_trace"):
            if getattr(arguments, field) is not None:
                raise UsageError(f"{field.replace('_', '-')}: it is written of one run; give one policy as --replan")
    settings = settings_with_network_times(settings, len(problem.cluster.boxes), killed=arguments.loss == "killed")
    done: list[PolicyRun] = []
    for policy in policies:
        replanner = Replanner(problem, replan_settings(arguments, policy, scenario))
        started = time.process_time()
        result = _simulate(problem, runs, settings, arguments, scenario.changes, replanner)
        seconds = time.process_time() - started
        done.append(PolicyRun(policy=policy, result=result, records=tuple(replanner.records), cpu_s=seconds))
    spans = spans_of(scenario, done, settings, max(float(run.trace.arrival_s[-1]) for run in runs))
    if len(done) == 1:
        _write(done[0].result, arguments)
    if arguments.format == "json":
        about = {"simulated": True, "specs": _specs(problem), "changes": changes_json(scenario, settings)}
        figures = [run_json(run, spans) for run in done]
        print(json.dumps({**about, **figures[0]} if len(done) == 1 else {**about, "runs": figures}))
        return 0
    console = open_console()
    if len(done) == 1:
        console.print(tables(report_of(done[0].result)), soft_wrap=not console.is_terminal)
    print_changes(scenario, done, spans, settings, console)
    seconds = sum(run.cpu_s for run in done)
    console.print(f"simulated: {max(run.result.end_s for run in done):.0f} s in {seconds:.2f} CPU seconds")
    return 0


def _gateways(named: str, cluster: Cluster) -> tuple[str, ...]:
    known = tuple(box.id for box in cluster.boxes)
    if named in ("all", "none"):
        return known if named == "all" else ()
    found = tuple(name.strip() for name in named.split(","))
    for name in found:
        if name not in known:
            raise UsageError(f"gateways: there is no box {name!r}; the cluster has {', '.join(known[:NAMED])}")
    return found


def _specs(problem: Problem) -> list[str]:
    return sorted({box.gpu.specs.value for box in problem.cluster.boxes})


def _simulate(
    problem: Problem,
    runs: Sequence[ServiceRun],
    settings: SimSettings,
    arguments: SimpleNamespace,
    changes: Sequence[Change] = (),
    replan: Replan | None = None,
) -> SimResult:
    console = Console(stderr=True)
    quiet = arguments.format == "json" or not console.is_terminal
    with Progress(console=console, disable=quiet, transient=True) as bar:
        task = bar.add_task("simulating")
        return simulate(
            problem.cluster,
            runs,
            settings=settings,
            changes=changes,
            replan=replan,
            record=arguments.chrome_trace is not None,
            progress=lambda done, total, _: bar.update(task, completed=done, total=total),
        )


def _plans(arguments: SimpleNamespace, problem: Problem) -> list[Plan]:
    if arguments.plan is None:
        evaluator = LowerLevel(problem)
        found = search_plan(problem, evaluator, arguments)
        return [proposal.plan for proposal in evaluator.propose(found.solution, epoch=0, version=1)]
    try:
        file = msgspec.json.decode(arguments.plan.read_bytes(), type=_PlanFile)
    except OSError as error:
        raise UsageError(f"plan: {arguments.plan} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"plan: {arguments.plan} is not what `p2pserve plan --format json` prints: {error}") from error
    if len(file.services) != len(problem.services):
        raise UsageError(f"plan: {arguments.plan} is for {len(file.services)} services, not {len(problem.services)}")
    for item, service in zip(file.services, problem.services, strict=True):
        if item.kv_value_bytes != service.model.kv_value_bytes:
            kept, option = ("8", "fp8") if item.kv_value_bytes == KV_8_BIT else ("16", "auto")
            raise UsageError(f"plan: {arguments.plan} is for KV kept in {kept} bits; give --kv-cache-dtype {option}")
    return [item.plan for item in file.services]


def _trace(arguments: SimpleNamespace, service: Service, number: int, shifts: Sequence[TrafficShift]) -> Trace:
    """The requests of a service; each has random numbers of its own."""
    if shifts:
        return _shifting_trace(arguments, service, number, shifts)
    workload = service.workload
    what = arguments.workload or ""
    if arguments.count is not None and arguments.seconds is not None:
        raise UsageError("count: give either --count or --seconds, and not both")
    if arguments.arrivals in ("replay", "recorded"):
        if arguments.count is not None:
            raise UsageError(f"count: --arrivals {arguments.arrivals} takes --seconds")
        if arguments.arrivals == "recorded":
            if not Path(what).is_file():
                raise UsageError("arrivals: `recorded` needs a file of requests as --workload")
            return read_requests(Path(what))
        if what not in AZURE:
            raise UsageError(f"arrivals: `replay` needs --workload {' or '.join(AZURE)}")
        return replay(azure(what), rate=workload.rate, seconds=arguments.seconds or SECONDS)
    seconds = (arguments.seconds or SECONDS) if arguments.count is None else None
    rng = np.random.default_rng([arguments.seed, number])
    return _drawn(arguments, service, workload, rng, seconds=seconds)


def _shifting_trace(arguments: SimpleNamespace, service: Service, number: int, shifts: Sequence[TrafficShift]) -> Trace:
    """Requests of one kind after the other."""
    end_s = arguments.seconds or SECONDS
    for at, _, _ in shifts:
        if not 0.0 < at < end_s:
            raise UsageError(f"shift: {at:g} s is not between 0 and the end of the requests, {end_s:g} s")
    parts: list[tuple[float, Trace]] = []
    kinds = [TrafficShift(0.0, service.workload, service.slo), *shifts]
    ends = [*(shift.at for shift in shifts), end_s]
    for place, ((at, workload, _), until) in enumerate(zip(kinds, ends, strict=True)):
        rng = np.random.default_rng([arguments.seed, number, *([place] if place else [])])
        parts.append((at, _drawn(arguments, service, workload, rng, seconds=until - at)))
    return chain_traces(parts)


def _drawn(
    arguments: SimpleNamespace, service: Service, workload: Workload, rng: np.random.Generator, seconds: float | None
) -> Trace:
    """Requests of a workload for so many seconds, or as many as --count says."""
    cv = 1.0
    if arguments.arrivals == "bursty":
        recorded = next((one for one in map(azure, AZURE) if one.lengths.source == workload.name), None)
        cv = workload.arrival_cv if recorded is None else recorded.gap_cv
    lengths = Lengths(workload.prompts, workload.outputs, workload.name)
    try:
        return draw(lengths, rate=workload.rate, rng=rng, cv=cv, requests=arguments.count, seconds=seconds)
    except TraceError as error:
        raise TraceError(f"service {service.name}: {error}") from None


def _write(result: SimResult, arguments: SimpleNamespace) -> None:
    several = len(result.services) > 1
    if arguments.requests is not None:
        for outcome in result.services:
            name = f"{arguments.requests.stem}-{outcome.service.name}{arguments.requests.suffix}"
            write_requests(outcome, result, arguments.requests.with_name(name) if several else arguments.requests)
    if arguments.plots is not None:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        curves = {outcome.service.name: outcome for outcome in result.services}
        plot_attainment(curves, arguments.plots / "attainment.png")
        plot_timeline(curves, arguments.plots / "timeline.png")
    if arguments.chrome_trace is not None:
        write_chrome_trace(result, arguments.chrome_trace)
