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

from ...coordinator.plan import Plan
from ...coordinator.planning.lower.evaluator import LowerLevel
from ...coordinator.planning.model.problem import Problem
from ...coordinator.planning.model.workload import Service
from ...coordinator.routing.interface import RoutingSettings
from ...sims.records import Trace, TraceError
from ...sims.results.chrome_trace import write_chrome_trace
from ...sims.results.outcomes import SimResult
from ...sims.results.plots import plot_attainment, plot_timeline
from ...sims.results.report import report_of, tables, write_requests
from ...sims.scenario import BoxLost, ServiceRun, SimSettings
from ...sims.workloads import AZURE, Lengths, azure, draw, read_requests, replay
from ...sims.world import simulate
from ..errors import UsageError
from ..options.values import check_writable
from .plan import search_plan
from .plan_options import problem_of
from .status_view import open_console

SECONDS: Final = 300.0


class _Planned(msgspec.Struct):
    plan: Plan


class _PlanFile(msgspec.Struct):
    """What is read of the output of `p2pserve plan --format json`."""

    services: list[_Planned]


def run_planned(arguments: SimpleNamespace) -> int:
    """Plan unless there is a plan, simulate, and write what was asked for. Returns the exit code."""
    # Before the search and the simulation, which take minutes: what they find must have a place to go.
    for field, path in (("requests", arguments.requests), ("chrome-trace", arguments.chrome_trace)):
        check_writable(field, path)
    problem = problem_of(arguments)
    losses = [_loss(text, problem) for text in arguments.lose]
    traces = [_trace(arguments, service, number) for number, service in enumerate(problem.services)]
    plans = _plans(arguments, problem)
    runs = [
        ServiceRun(service=service, plan=plan, trace=trace)
        for service, plan, trace in zip(problem.services, plans, traces, strict=True)
    ]
    settings = SimSettings(
        layerwise=not arguments.serialised,
        routing=RoutingSettings(policy=arguments.dispatch),
        seed=arguments.seed,
    )
    started = time.process_time()
    result = _simulate(problem, runs, settings, losses, arguments)
    seconds = time.process_time() - started
    _write(result, arguments)
    report = report_of(result)
    if arguments.format == "json":
        figures = msgspec.to_builtins(report)
        specs = sorted({box.gpu.specs.value for box in problem.cluster.boxes})
        print(json.dumps({"simulated": True, "specs": specs, "cpu_s": seconds, **figures}))
    else:
        console = open_console()
        console.print(tables(report))
        console.print(f"simulated: {report.simulated_s:.0f} s, {report.events} events in {seconds:.2f} CPU seconds")
    return 0


def _simulate(
    problem: Problem,
    runs: Sequence[ServiceRun],
    settings: SimSettings,
    losses: Sequence[BoxLost],
    arguments: SimpleNamespace,
) -> SimResult:
    console = Console(stderr=True)
    quiet = arguments.format == "json" or not console.is_terminal
    with Progress(console=console, disable=quiet, transient=True) as bar:
        task = bar.add_task("simulating")
        return simulate(
            problem.cluster,
            runs,
            settings=settings,
            changes=losses,
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
    return [item.plan for item in file.services]


def _trace(arguments: SimpleNamespace, service: Service, number: int) -> Trace:
    """The requests of a service; each has random numbers of its own."""
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
    bursty = arguments.arrivals == "bursty"
    if bursty and what in AZURE:
        cv = azure(what).gap_cv
    elif bursty:
        cv = workload.arrival_cv
    else:
        cv = 1.0
    rng = np.random.default_rng([arguments.seed, number])
    lengths = Lengths(workload.prompts, workload.outputs, workload.name)
    try:
        seconds = (arguments.seconds or SECONDS) if arguments.count is None else None
        return draw(lengths, rate=workload.rate, rng=rng, cv=cv, requests=arguments.count, seconds=seconds)
    except TraceError as error:
        raise TraceError(f"service {service.name}: {error}") from None


def _loss(text: str, problem: Problem) -> BoxLost:
    box, _, at = text.rpartition("@")
    if box not in {item.id for item in problem.cluster.boxes}:
        raise UsageError(f"lose: {text!r} is not like BOX@60 with a box of the cluster")
    try:
        return BoxLost(float(at), box)
    except ValueError:
        raise UsageError(f"lose: {at!r} in {text!r} is not a number of seconds") from None


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
