"""`p2pserve plan`: what the planner would do with a described cluster, and why."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...coordinator import Phase, Replica
from ...coordinator.costs.model_shape import KV_8_BIT
from ...coordinator.names import count_of
from ...coordinator.planning.lower.evaluator import LowerLevel
from ...coordinator.planning.model.problem import Percentiles, Problem, Proposal
from ...coordinator.planning.model.workload import Service
from ...coordinator.planning.reasons import explain_replicas
from ...coordinator.planning.upper.search import SearchResult, search
from ...coordinator.planning.upper.trials import PlanTrials, TriedPlan
from ...sims.results.expectations import expect_by_simulation
from ...sims.results.trials import SimulatedTrial
from ..explaining.plan_words import Explanation, explain_plan, explanation_json, print_explanation
from .plan_options import describe_kv_choice, problem_of
from .status_view import keep_whole, open_console, print_prose

FLOWS_SHOWN: Final = 12
TRIALS: Final = {32: 4, 128: 2}
"""Plans that are simulated, by GPUs up to which, where nobody has said how many: as many as take some
ten to twenty seconds."""
CHALLENGERS: Final = 4
"""Others that challenge the best of those, for each plan beyond the one found and the colocated
one."""


def run_plan(arguments: SimpleNamespace) -> int:
    """Search, and print the best plan found. Returns the exit code."""
    problem = problem_of(arguments)
    started = time.monotonic()
    evaluator = LowerLevel(problem)
    console = Console(stderr=True)
    quiet = arguments.format == "json" or not console.is_terminal

    gpus = count_of(problem.cluster.gpus, "GPU")
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, disable=quiet,
        transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task(f"planning {gpus}")

        def progress(step: int, steps: int, objective: float) -> None:
            of = f" of {steps}" if arguments.budget_s is None else ""
            about = f"step {step}{of}, objective {objective:.4f}"
            bar.update(task, description=f"planning {gpus}: {about}")

        found = search_plan(problem, evaluator, arguments, progress)
        tried: list[TriedPlan] = []
        trials = count_trials(arguments.trials, problem.cluster.gpus, arguments.budget_s)
        if trials:
            bar.update(task, description=f"planning {gpus}: the best plans are simulated")
            trial = SimulatedTrial(problem=problem, seeds=(arguments.seed,), is_even=True)
            contest = PlanTrials(problem=problem, evaluator=evaluator, trial=trial)
            tried = contest.try_all(contest.pick_candidates(found, trials))
            challengers = CHALLENGERS * max(0, trials - 2)
            tried = contest.challenge(tried, found, challengers, np.random.default_rng(arguments.seed))
            found = replace(found, solution=tried[0].solution, score=evaluator.score(tried[0].solution))
    estimated = tried[0].proposals if tried else evaluator.propose(found.solution, epoch=0, version=1)
    proposals = estimated
    if tried:
        proposals = expect_by_simulation(problem, estimated, arguments.seed, near=tried[0].outcome.capacity)
    seconds = time.monotonic() - started
    explained = _explain(problem, evaluator, found, proposals) if arguments.explain else [None] * len(proposals)
    if arguments.format == "json":
        tried_json = {"trials": trials_json(tried)} if tried else {}
        print(json.dumps({**plan_json(problem, found, proposals, seconds, arguments.seed, explained), **tried_json}))
    else:
        out = open_console()
        print_proposals(problem, found, proposals, out, explained)
        for service in problem.services if arguments.kv_cache_dtype == "choose" else ():
            print_prose((describe_kv_choice(service.model),), out)
        if tried:
            print_trials(tried, out)
        out.print(f"planned in {seconds:.2f} s, {found.steps} steps, seed {arguments.seed}")
    sys.stdout.flush()
    return 0


def count_trials(asked: int | None, gpus: int, budget_s: float | None) -> int:
    """How many plans are simulated. Where nobody has said: as many as take a few seconds."""
    if asked is not None:
        return asked
    sizes = [most for most in TRIALS if gpus <= most]
    return TRIALS[min(sizes)] if sizes and budget_s is None else 0


def search_plan(
    problem: Problem,
    evaluator: LowerLevel,
    arguments: SimpleNamespace,
    progress: Callable[[int, int, float], None] | None = None,
) -> SearchResult:
    """The best plan by the options' seed, within their budget of time."""
    until = time.monotonic() + (arguments.budget_s or inf)
    return search(
        problem,
        evaluator,
        rng=np.random.default_rng(arguments.seed),
        spent=lambda: time.monotonic() > until,
        progress=progress,
        anytime=arguments.budget_s is not None,
    )


def _explain(
    problem: Problem, evaluator: LowerLevel, found: SearchResult, proposals: tuple[Proposal, ...]
) -> list[Explanation | None]:
    """Of each service."""
    reasons = explain_replicas(problem, evaluator, found.solution, proposals, found.evaluated)
    return [
        explain_plan(proposal.plan, service, proposal, why)
        for service, proposal, why in zip(problem.services, proposals, reasons, strict=True)
    ]


def trials_json(tried: Sequence[TriedPlan]) -> list[dict[str, Any]]:
    """What was estimated of each plan that was tried, and what came of it; the first was chosen."""
    return [
        {
            "replicas": _replica_counts(plan),
            "colocated": plan.is_colocated,
            "estimated": {
                "attainment": plan.proposals[0].score.attainment,
                "capacity": plan.proposals[0].score.capacity,
            },
            "simulated": plan.outcome._asdict(),
        }
        for plan in tried
    ]


def print_trials(tried: Sequence[TriedPlan], console: Console) -> None:
    """The same for people."""
    table = Table(
        "plan", "in time: estimated", "simulated", "capacity: estimated", "simulated", box=None, pad_edge=False
    )
    for plan in tried:
        estimated, seen = plan.proposals[0].score, plan.outcome
        table.add_row(
            _replica_counts(plan) + (", colocated" if plan.is_colocated else ""),
            f"{estimated.attainment:.1%}", f"{seen.attainment:.1%}",
            f"{estimated.capacity:.2f} x the rate", f"{seen.capacity:.2f} x",
        )  # fmt: skip
    console.print(f"\nsimulated, the best first: {count_of(len(tried), 'plan')}")
    console.print(table)


def _replica_counts(plan: TriedPlan) -> str:
    """Prefill, decode and mixed replicas, as the paper's 8P 4D."""
    phases = Counter(group.phase for group in plan.solution)
    return " ".join(f"{phases[phase]}{phase.value[0].upper()}" for phase in Phase if phases[phase])


def plan_json(
    problem: Problem,
    found: SearchResult,
    proposals: tuple[Proposal, ...],
    seconds: float,
    seed: int,
    explained: Sequence[Explanation | None],
) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "gpus": problem.cluster.gpus,
        "specs": _specs(problem),
        "objective": found.score.objective,
        "attainment": found.score.attainment,
        "capacity": found.score.capacity,
        "seconds": seconds,
        "steps": found.steps,
        "seed": seed,
        "services": [
            {
                "service": service.name,
                "lengths": service.workload.name,
                "rate": service.workload.rate,
                "arrivals": f"CV {service.workload.arrival_cv:g}",
                "slo": msgspec.to_builtins(service.slo),
                "kv_value_bytes": service.model.kv_value_bytes,
                **msgspec.to_builtins(proposal),
                **({"explain": explanation_json(why)} if why is not None else {}),
            }
            for service, proposal, why in zip(problem.services, proposals, explained, strict=True)
        ],
    }


def print_proposals(
    problem: Problem,
    found: SearchResult,
    proposals: tuple[Proposal, ...],
    console: Console,
    explained: Sequence[Explanation | None],
) -> None:
    """For people: per service its replicas, who sends to whom, what to expect, and why."""
    cluster = problem.cluster
    console.print(
        f"{count_of(cluster.gpus, 'GPU')} in {count_of(len(cluster.boxes), 'box')}, ${cluster.usd_per_hour:.2f}/h, "
        f"GPU figures: {_specs(problem)}\n{figures_by(proposals)}, not measurements"
    )
    for service, proposal, why in zip(problem.services, proposals, explained, strict=True):
        print_service(service, problem, proposal, console, explained=why)
    console.print(
        f"estimated: objective {found.score.objective:.4f}, "
        f"attainment {found.score.attainment:.1%}, capacity {found.score.capacity:.2f} x the rate"
    )


def print_service(
    service: Service,
    problem: Problem,
    proposal: Proposal,
    console: Console,
    named: Callable[[str], str] = str,
    explained: Explanation | None = None,
) -> None:
    """One service: replicas, flows, figures and reasons. `named` rewrites ids for display."""
    workload, slo = service.workload, service.slo
    load = (
        f"{service.name}: {workload.rate:.4g} requests/s, lengths {workload.name} "
        f"(mean {workload.mean_prompt:.0f} in, {workload.mean_output:.0f} out), "
        f"arrivals with CV {workload.arrival_cv:g}, KV as {service.codec}"
        + (", in 8 bits in memory" if service.model.kv_value_bytes == KV_8_BIT else "")
    )
    console.print()
    print_prose((load,), console)
    gpu_of = {box.id: box.gpu.name for box in problem.cluster.boxes}
    table = Table("replica", "phase", "TP,PP", "stages", "requests/s", "busy", "batch", box=None, pad_edge=False)
    expected = {item.id: item for item in proposal.replicas}
    for replica in sorted(proposal.plan.replicas, key=_by_phase):
        about = expected[replica.id]
        table.add_row(
            named(replica.id),
            replica.phase.value,
            f"{max(stage.tp for stage in replica.stages)},{len(replica.stages)}",
            "; ".join(
                f"{stage.tp} x {gpu_of[stage.peer]} {named(stage.peer)} [{stage.first_layer},{stage.last_layer})"
                for stage in replica.stages
            ),
            f"{about.requests_s:.2f}",
            f"{about.utilisation:.0%}",
            f"{about.batch:.1f}",
        )
    console.print(keep_whole(table, "replica", "phase"))
    _print_flows(proposal, console, named)
    times = (
        f"TTFT {_times(proposal.ttft_s)}, TPOT {_times(proposal.tpot_s)}, E2E {_times(proposal.e2e_s)} (p50/p90/p99); "
        f"deadlines {slo.ttft_s:.3g}, {slo.tpot_s:.3g}, {slo.e2e_s:.3g} s"
    )
    gain = (
        f"attainment {proposal.attainment:.1%}; {proposal.tokens_s:.0f} output tokens/s at this rate, at most "
        f"{proposal.max_rate:.2f} requests/s; ${proposal.usd_per_hour:.2f}/h, "
        f"${proposal.usd_per_million_tokens:.2f} per million output tokens"
    )
    print_prose((times, gain), console)
    if explained is not None:
        print_explanation(explained, service, console, named)
        return
    print_prose((f"  why: {named(line)}" for line in proposal.plan.why), console)


def _print_flows(proposal: Proposal, console: Console, named: Callable[[str], str]) -> None:
    """X: what part of the requests each replica prefills; Y: where those go on to."""
    share: defaultdict[str, float] = defaultdict(float)
    for pair in proposal.plan.pairings:
        share[pair.prefill] += pair.weight
    pairs = sorted(proposal.plan.pairings, key=lambda pair: -pair.weight)
    for pair in pairs[:FLOWS_SHOWN]:
        x, y = share[pair.prefill], pair.weight / share[pair.prefill] if share[pair.prefill] else 0.0
        route = f"on {pair.decode}" if pair.prefill == pair.decode else f"{pair.prefill} -> {pair.decode}"
        console.print(f"  {pair.weight:5.1%} {named(route)} (X {x:.3f}, Y {y:.3f})")
    if len(pairs) > FLOWS_SHOWN:
        rest = sum(pair.weight for pair in pairs[FLOWS_SHOWN:])
        console.print(f"  {rest:5.1%} over {len(pairs) - FLOWS_SHOWN} more pairs (--format json has all)")


def _by_phase(replica: Replica) -> tuple[int, str]:
    return ((Phase.PREFILL, Phase.MIXED, Phase.DECODE).index(replica.phase), replica.id)


def figures_by(proposals: Sequence[Proposal]) -> str:
    """What the figures of these plans come from."""
    simulated = min(proposal.simulated_requests for proposal in proposals)
    return f"expected by {simulated:,} simulated requests" if simulated else "estimates"


def _specs(problem: Problem) -> str:
    return ", ".join(sorted({box.gpu.specs.value for box in problem.cluster.boxes}))


def _times(figures: Percentiles) -> str:
    if max(figures) < 10.0:
        return "/".join(f"{value * 1e3:.0f}" for value in figures) + " ms"
    return "/".join(f"{value:.3g}" for value in figures) + " s"
