"""`p2pserve plan --live`: the running plan with its expected figures, and the best found."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from rich.console import Console

from ...coordinator import Phase, Plan
from ...coordinator.capacity import KvCodec
from ...coordinator.names import count_of, name_of
from ...coordinator.network_plan import search_phases, solver_for_shares
from ...coordinator.network_problem import SLO_SCALE, NetworkProblem, build_network_problem
from ...coordinator.planning.lower.flow import solve_exact, solve_greedy
from ...coordinator.planning.model.problem import Proposal, Solution
from ...coordinator.planning.model.slo import SloScale, read_slo, slo_of_deadlines
from ...coordinator.planning.model.workload import Service, Slo
from ...coordinator.planning.reasons import explain_replicas
from ...coordinator.planning.upper.light_rescheduling import reschedule_lightly
from ...coordinator.regrouping.proposal import propose_regrouping
from ...coordinator.regrouping.recuts import NetworkFigures, propose_recuts
from ...coordinator.regrouping.steps import RegroupProposal
from ...kernels.codecs import DEFAULT, codec_named
from ...node.adverts import divided_boxes, plans_of
from ...node.messages import Status
from ...node.planning.trying import settings_of_network
from ...node.view import NetworkView
from ...sims.results.expectations import expect_by_simulation
from ..actions.network import client_of
from ..actions.plan import figures_by, print_service
from ..actions.status_view import open_console, print_prose, shortened
from ..errors import NotReady, UsageError
from ..explaining.plan_words import Explanation, explain_plan, explanation_json
from .regrouping import apply_proposal, print_proposal, proposal_json

REQUESTS: Final = 1000
"""Simulated of each plan that is told of: fewer than of a described cluster, whose plan is made once."""

OF_FILES: Final = (
    "cluster",
    "workload",
    "services",
    "kv_cache_dtype",
    "pin",
    "exclude",
    "price_weight",
    "budget_s",
    "trials",
)
"""Options that only a described cluster has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A replica that changes in the best plan; `was` is None for a new one."""

    replica: str
    was: Phase | None
    now: Phase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LivePlans:
    """`plan` is what the network follows; `running` its expected figures with the replicas there
    now, None where they cannot serve. `best` is the best found."""

    network: NetworkProblem
    plan: Plan | None
    running: Proposal | None
    best: Proposal
    changes: tuple[Change, ...]


def run_live_plan(arguments: SimpleNamespace) -> int:
    """Ask the network, and print both plans. Returns the exit code."""
    given = [name for name in OF_FILES if getattr(arguments, name)]
    if given:
        raise UsageError(f"{given[0].replace('_', '-')}: --live plans the running network, which is as it is")
    slo, rate = read_slo(arguments.slo), arguments.rate
    if rate is not None and not 0.0 < rate < 1e9:
        raise UsageError(f"rate: {rate} is not a number of requests per second above 0")
    with client_of(arguments) as client:
        status = client.status()
    service = _service(NetworkView.of_status(status), arguments.model)
    plan = next((each for each in plans_of(status) if each.service == service), None)
    network = _problem_of(status, service, plan, slo, rate)
    if network is None:
        reasons = NetworkView.of_status(status).describe_unserved(service, 0.0)
        known = f" ({reasons})" if reasons else ""
        raise NotReady(f"no box of the network is ready to serve {service}{known}: see `p2pserve status`")
    found = simulate_plans(compare(network, plan))
    explained = _explain(network, found.running or found.best) if arguments.explain else None
    proposal = _propose(status, network, plan) if plan is not None else None
    begun = apply_proposal(arguments, status, service, proposal) if arguments.apply else None
    if arguments.format == "json":
        regrouping = {"regrouping": proposal_json(proposal), "applied": begun is not None}
        print(json.dumps({**live_json(found, explained), **regrouping}))
    else:
        console = open_console()
        print_live(found, console, explained)
        print_proposal(proposal, plan, status, begun, console)
        if arguments.apply and begun is None:
            console.print("\nnothing is applied: no groups of these boxes were found that serve more")
    sys.stdout.flush()
    return 0


def explain_running_plan(status: Status, plan: Plan) -> tuple[Explanation, Service] | None:
    """What the network's plan would do with its boxes, links and traffic as they are; None where its replicas cannot
    serve now."""
    network = _problem_of(status, plan.service, plan, slo_of_deadlines(plan.deadlines) or SLO_SCALE, None)
    expected = expect_running(network, plan) if network is not None else None
    if network is None or expected is None:
        return None
    return _explain(network, expected), network.service


def _problem_of(
    status: Status, service: str, plan: Plan | None, slo: Slo | SloScale, rate: float | None
) -> NetworkProblem | None:
    view = NetworkView.of_status(status)
    codec = codec_named(plan.codec) if plan is not None else DEFAULT
    return build_network_problem(
        view.boxes(service), view.links(), view.demands(service).values(),
        service=service, codec=KvCodec(codec.name, codec.bits), previous=plan, slo=slo, rate=rate,
    )  # fmt: skip


def _propose(status: Status, network: NetworkProblem, plan: Plan) -> RegroupProposal | None:
    """Other groups of boxes, or other cuts of machines, that would serve more: what serves most."""
    view, service = NetworkView.of_status(status), plan.service
    boxes, keeping = view.boxes(service), [each.peer for each in plan.refused]
    figures = NetworkFigures(boxes, view.links(), tuple(view.demands(service).values()))
    found = (
        propose_recuts(network, plan, figures, divided_boxes(view.adverts, service), keeping=keeping),
        propose_regrouping(network, plan, boxes, keeping=keeping),
    )
    return max(filter(None, found), key=lambda each: each.regrouping.after, default=None)


def _explain(network: NetworkProblem, proposal: Proposal) -> Explanation:
    phases = {head: phase for head in network.heads if (phase := proposal.plan.phase_of(head)) is not None}
    solution = network.solution(phases)
    (reasons,) = explain_replicas(network.problem, network.evaluator, solution, [proposal], {})
    return explain_plan(proposal.plan, network.service, proposal, reasons, is_running=True)


def _service(view: NetworkView, wanted: str | None) -> str:
    services = view.services()
    if not services:
        raise NotReady("no box of the network serves a model: there is nothing to plan")
    if wanted is not None and wanted not in services:
        raise UsageError(f"model: the network does not serve {wanted!r}, but {', '.join(services)}")
    if wanted is None and len(services) > 1:
        raise UsageError(f"model: the network serves several, choose one with --model: {', '.join(services)}")
    return wanted or services[0]


def compare(network: NetworkProblem, plan: Plan | None) -> LivePlans:
    """The plan as it would do now, and the best found, from scratch or from the plan."""
    running = _running(network, plan)
    # The running plan is one of the starting points, so that the best found is never worse than it.
    starts = [search_phases(network)]
    if running is not None and len(running) == len(network.heads):
        starts.append(reschedule_lightly(network.problem, network.evaluator, running, margin=0.0).solution)
    solution = max(starts, key=lambda start: network.evaluator.score(start).objective)
    epoch, version = plan.number if plan is not None else (0, 0)
    best = network.evaluator.propose(solution, epoch=epoch, version=version + 1)[0]
    expected = expect_running(network, plan) if plan is not None else None
    before = {head: plan.phase_of(head) if plan is not None else None for head in network.heads}
    changes = tuple(
        Change(replica=head, was=before[head], now=phase)
        for head, phase in network.phases(solution).items()
        if before[head] is not phase
    )
    return LivePlans(network=network, plan=plan, running=expected, best=best, changes=changes)


def expect_running(network: NetworkProblem, plan: Plan) -> Proposal | None:
    """What is expected of the plan's replicas that are there, with its own shares; None where they cannot serve."""
    running = _running(network, plan)
    return _expected(network, plan, running) if running is not None else None


def simulate_plans(found: LivePlans) -> LivePlans:
    """With what simulated requests get of both plans in the place of the estimates that chose the best."""
    best = expect_by_requests(found.network, found.best, found.best.plan)
    if found.running is None or found.plan is None:
        return replace(found, best=best)
    return replace(found, running=expect_by_requests(found.network, found.running, found.plan), best=best)


def expect_by_requests(network: NetworkProblem, estimate: Proposal, plan: Plan, requests: int = REQUESTS) -> Proposal:
    """What simulated requests get of this plan, of which `estimate` is: asked for at all boxes in turn, under the
    default policy, in a network that hears of things as late as the running one. Of a plan that names boxes which are
    not there, as it would be without those."""
    boxes = [box.id for box in network.problem.cluster.boxes]
    if set(plan.peers) <= set(boxes):
        estimate = replace(estimate, plan=msgspec.structs.replace(plan, why=estimate.plan.why))
    (found,) = expect_by_simulation(
        network.problem, (estimate,), 0, requests=requests, settings=settings_of_network(boxes)
    )
    return found


def _running(network: NetworkProblem, plan: Plan | None) -> Solution | None:
    """Those replicas of the plan that are there; None where they cannot serve."""
    if plan is None:
        return None
    phases = {head: phase for head in network.heads if (phase := plan.phase_of(head)) is not None}
    if Phase.MIXED not in phases.values() and len(set(phases.values())) < len((Phase.PREFILL, Phase.DECODE)):
        return None
    return network.solution(phases)


def _expected(network: NetworkProblem, plan: Plan, running: Solution) -> Proposal:
    """With the plan's own shares, at the rate that one of the planner's solvers would serve."""
    there = {replica.id for replica in plan.replicas} & set(network.ids(running))
    left = [pair for pair in plan.pairings if {pair.prefill, pair.decode} <= there]
    total = sum(pair.weight for pair in left)
    served = [
        network.evaluator.orchestrate(running, solver=solver)[0].flow.served for solver in (solve_greedy, solve_exact)
    ]
    routes = [solver_for_shares(network, running, left, rate / total) for rate in served if total and rate]
    return network.evaluator.propose(running, epoch=plan.epoch, version=plan.version, solvers=routes)[0]


def live_json(found: LivePlans, explained: Explanation | None = None) -> dict[str, Any]:
    """Everything, for programs."""
    service = found.network.service
    explanation = {"explain": explanation_json(explained, name_of)} if explained is not None else {}
    return {
        **explanation,
        "service": service.name,
        "rate": service.workload.rate,
        "asked": found.network.asked,
        "lengths": service.workload.name,
        "slo": msgspec.to_builtins(service.slo),
        "plan": msgspec.to_builtins(found.plan),
        "running": msgspec.to_builtins(found.running),
        "best": msgspec.to_builtins(found.best),
        "changes": msgspec.to_builtins(found.changes),
        "why": list(found.network.why),
    }


def print_live(found: LivePlans, console: Console, explained: Explanation | None = None) -> None:
    """For people. `explained`: of the running plan, or of the best where none runs."""
    network, problem = found.network, found.network.problem
    count = problem.cluster.gpus
    gpus = "1 GPU or processor" if count == 1 else f"{count} GPUs or processors"
    boxes = count_of(len(problem.cluster.boxes), "box")
    said = figures_by([found.best])
    about = f"{gpus} in {boxes}, {network.asked:.3g} requests/s asked for; {said}, not measurements"
    named = partial(shortened, peers=[box.id for box in problem.cluster.boxes])
    print_prose((about, *(f"  {named(line)}" for line in network.why)), console)
    if found.plan is None:
        console.print("\nno plan is running")
    elif found.running is None:
        number = f"{found.plan.epoch}.{found.plan.version}"
        console.print(f"\nplan {number} is running; those of its replicas that are there cannot serve")
    else:
        console.print(f"\nplan {found.plan.epoch}.{found.plan.version} is running:", end="")
        print_service(network.service, problem, found.running, console, named, explained)
    if found.running is not None and not found.changes:
        console.print("\nno better plan was found: every replica does what is best")
        return
    console.print("\nbest found:", end="")
    print_service(network.service, problem, found.best, console, named, None if found.running else explained)
    console.print()
    changes = (f"{name_of(each.replica)}: {each.was or 'not in the plan'} -> {each.now}" for each in found.changes)
    print_prose((f"would change: {change}" for change in changes), console)
    if found.running is not None:
        was, now = found.running, found.best
        gives = (
            f"would give: attainment {was.attainment:.1%} -> {now.attainment:.1%}, at most "
            f"{was.max_rate:.2f} -> {now.max_rate:.2f} requests/s in time"
        )
        print_prose((gives,), console)
