"""The plan of the running network: who does what, and who sends to whom.

A first plan takes the best phases found from several starts. After that, replicas keep their
phases: new ones take what helps most, and a phase changes only where that pays
(`planning.upper.light_rescheduling`). Formulas say what pays; where plans can be tried
(`planning.upper.trials`), phases change only to what carries more in a trial. X and Y come from the
planner's linear programme. Nothing of
it loads weights, except for boxes that form a new pipeline. Groups that a regrouping loads now are
in the plan, so that their boxes follow it, and get no requests.

Importing this takes a solver with it: import it where plans are made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Final, TypedDict, Unpack

import msgspec
import numpy as np

from .capacity import BoxView, KvCodec, LinkView
from .demand import Demand
from .names import count_of
from .network_problem import SLO_SCALE, NetworkProblem, build_network_problem
from .plan import Deadlines, Groups, Pairing, Phase, Plan, PlanError, Replica
from .planning.lower.flow import FlowProblem, RequestFlow, flow_from_rates
from .planning.lower.orchestration import Solver
from .planning.model.errors import UnservedError
from .planning.model.problem import Problem, Solution
from .planning.model.slo import SloScale, deadlines_of
from .planning.model.workload import Slo
from .planning.upper.light_rescheduling import Adjustment, list_flips, reschedule_lightly
from .planning.upper.scorer import Scorer, never
from .planning.upper.search import phase_cuts
from .planning.upper.search_space import SearchSpace
from .planning.upper.trials import PlanTrial, PlanTrials
from .settings import NetworkPlanSettings

MakeTrial = Callable[[Problem], PlanTrial]

MAX_PAIRINGS: Final = 128
"""Pairs that a plan names, and for each replica its heaviest besides: a plan has to fit 64 KiB of
gossip."""

WHY_CHARACTERS: Final = 8000
"""Of reasons, for the same reason."""


class PlanIdentity(TypedDict):
    """What the new plan is to be called, and what it replaces."""

    service: str
    epoch: int
    version: int
    previous: Plan | None
    codec: KvCodec


def plan_network(
    boxes: Iterable[BoxView],
    links: Iterable[LinkView],
    demands: Iterable[Demand],
    *,
    loading: Groups = (),
    spent: Callable[[], bool] = never,
    settings: NetworkPlanSettings | None = None,
    slo: Slo | SloScale = SLO_SCALE,
    make_trial: MakeTrial | None = None,
    **named: Unpack[PlanIdentity],
) -> Plan | None:
    """The plan for a service, `previous` itself where nothing changes, None where no box or group
    of boxes is ready.

    The order of boxes, links and demands does not matter. A replica keeps its phase unless a change
    of phases pays. A new epoch is a change: its coordinator states the decisions again under its
    own number. `loading`: groups that are on their way to be replicas, and what others they make
    unnecessary. `slo`: as for `build_network_problem`. `make_trial`: tries plans at the rate that is
    asked for; None: formulas decide. The search ends early when `spent()`. Raises PlanError if a new
    plan would not be newer than `previous`, or is given what cannot be planned.
    """
    previous, service, codec = named["previous"], named["service"], named["codec"]
    if previous is not None and previous.service != service:
        raise PlanError(f"the previous plan is of service {previous.service!r}, not {service!r}")
    offered = list(boxes)
    away = {stage.peer for group in loading for stage in group}
    staying = [box for box in offered if box.peer not in away]
    network = build_network_problem(staying, links, demands, service=service, codec=codec, previous=previous, slo=slo)
    if network is None:
        return _plan_loading_alone(loading, **named) if loading else None
    if settings is not None:
        network = replace(network, settings=settings)
    why = [*network.why, *_explain_departures(staying, service, previous, away)]
    solution = _choose_phases(network, previous, spent, why, make_trial)
    replicas, pairings, expected = _share_requests(network, solution)
    idle = _explain_idle(replicas, pairings)
    replicas = _add_loading(replicas, loading, {box.peer: box.phase for box in offered})
    if previous is not None:
        replicas = _keep_step_budgets(replicas, previous, network.settings.budget_factor)
        # Shares that are as good stay: a plan of the same content is no news, and nobody has to follow another one.
        if replicas == previous.replicas and _may_keep_shares(network, solution, previous.pairings, pairings):
            pairings = previous.pairings
            if (named["epoch"], codec.name) == (previous.epoch, previous.codec):
                return previous
        if codec.name != previous.codec:
            why.append(f"KV travels as {codec.name}, before as {previous.codec}")
    plan = Plan(
        epoch=named["epoch"], version=named["version"], service=service, replicas=replicas, pairings=pairings,
        codec=codec.name,
        why=_limit_reasons([*why, *idle, _explain_load(network), *expected]),
        deadlines=deadlines_of(network.service.slo),
    )  # fmt: skip
    if not plan.newer_than(previous):
        raise PlanError(f"the new plan {plan.number} would not be newer than {previous and previous.number}")
    return plan


def search_phases(network: NetworkProblem, spent: Callable[[], bool] = never) -> Solution:
    """The best phases found, whatever runs now: from all mixed, and from replicas in the order of
    what they are good at, cut at several places into those that prefill and those that decode."""
    mixed = network.colocated
    if len(network.heads) == 1:
        return mixed
    scorer = _make_scorer(network, spent)
    # First, since of equals the first stays: where nothing is in time, this at least serves requests.
    scorer.score(mixed)
    starts = {*phase_cuts(scorer.space, mixed)} - {mixed}
    ranked = sorted(starts, key=lambda start: (-scorer.objective(start), start))
    for start in (mixed, *ranked)[: network.settings.climbed_starts]:
        _climb_phases(network, scorer, start, tuple(network.heads))
    return scorer.best


def solver_for_shares(network: NetworkProblem, solution: Solution, pairings: Iterable[Pairing], rate: float) -> Solver:
    """An orchestration that shares `rate` requests per second among replicas as these pairs."""
    weights = {(pair.prefill, pair.decode): pair.weight for pair in pairings}
    ids = network.ids(solution)

    def share_out(problem: FlowProblem) -> RequestFlow:
        ends = zip(problem.prefill.tolist(), problem.decode.tolist(), strict=True)
        return flow_from_rates(problem, rate * np.array([weights.get((ids[one], ids[two]), 0.0) for one, two in ends]))

    return share_out


def _explain_departures(
    staying: Sequence[BoxView], service: str, previous: Plan | None, away: Collection[str]
) -> list[str]:
    """One line where boxes of the previous plan are gone; a plan does not name those."""
    here = {box.peer for box in staying if box.service == service and box.usable}
    gone = set(previous.peers) - here - set(away) if previous is not None else set()
    return [f"boxes of the previous plan that are gone, draining or not ready: {len(gone)}"] if gone else []


# --- groups on their way


def _add_loading(
    replicas: tuple[Replica, ...], loading: Groups, pins: Mapping[str, Phase | None]
) -> tuple[Replica, ...]:
    """With the groups that load, in the phase that their owners want, else in both."""
    coming = []
    for group in loading:
        pinned = [pin for stage in group if (pin := pins.get(stage.peer)) is not None]
        coming.append(Replica(id=group[0].peer, phase=pinned[0] if pinned else Phase.MIXED, stages=group))
    return tuple(sorted((*replicas, *coming), key=lambda replica: replica.id))


def _plan_loading_alone(loading: Groups, **named: Unpack[PlanIdentity]) -> Plan:
    """The plan while nobody serves: requests wait for the groups that load."""
    previous = named["previous"]
    replicas = _add_loading((), loading, {})
    shared = [Pairing(prefill=one.id, decode=one.id, weight=1.0) for one in replicas]
    pairings = _limit_pairings(shared)
    told = (previous.epoch, previous.replicas, previous.pairings) if previous is not None else None
    if previous is not None and told == (named["epoch"], replicas, pairings):
        return previous
    return Plan(
        epoch=named["epoch"], version=named["version"], service=named["service"], replicas=replicas, pairings=pairings,
        codec=named["codec"].name, why=("all boxes load: requests wait until the first group is ready",),
        deadlines=previous.deadlines if previous is not None else Deadlines(),
    )  # fmt: skip


# --- phases


def _choose_phases(
    network: NetworkProblem,
    previous: Plan | None,
    spent: Callable[[], bool],
    why: list[str],
    make_trial: MakeTrial | None,
) -> Solution:
    """Every replica's phase: the old one, the best for new ones, then changes that pay."""
    kept = _continuing_phases(network, previous, why)
    running = _add_new_replicas(network, kept, spent) if kept else search_phases(network, spent)
    if not _covers_both_phases(network.phases(running).values()):
        why.append("phases are chosen anew: the replicas that go on only prefill, or only decode")
        kept, running = {}, search_phases(network, spent)
    why += [f"{head} takes {phase}" for head, phase in network.phases(running).items() if head not in kept]
    if len(network.heads) == 1:
        return running
    wanted, reasons = running, list[str]()
    while (found := _reschedule(network, wanted, spent)).flips:
        reasons += [flip.why for flip in found.flips]
        wanted = found.solution
    if make_trial is not None and network.asked > 0.0:
        wanted, reasons = _try_phases(network, running, wanted, spent, make_trial)
    why += reasons
    return wanted


def _try_phases(
    network: NetworkProblem,
    running: Solution,
    wanted: Solution,
    spent: Callable[[], bool],
    make_trial: MakeTrial,
) -> tuple[Solution, list[str]]:
    """The phases with most requests in time in a trial, and why: of those that run, those that formulas would have
    instead, all replicas by themselves, what a search from the beginning finds, and neighbours of the best of these."""
    service = network.service
    workload = replace(service.workload, rate=network.asked)
    problem = replace(network.problem, services=(replace(service, workload=workload),))
    trials = PlanTrials(problem=problem, evaluator=network.evaluator, trial=make_trial(problem))
    tried = trials.choose_phases(running, (wanted, network.colocated, search_phases(network, spent)), spent)
    if not tried:
        return running, ["phases stay: there was no time to try them and others"]
    best, before = tried[0], next(plan for plan in tried if plan.solution == running)
    flips = list_flips(SearchSpace.of(network.problem, network.evaluator), running, best.solution)
    told = f"{count_of(len(tried), 'plan')} tried by simulated requests at what is asked for and more"
    share = f"{before.outcome.attainment:.0%} are in time"
    if best is not before:
        return best.solution, [
            *(flip.why for flip in flips),
            f"phases change: of {told}, {best.outcome.attainment:.0%} are in time, with the phases before {share}",
        ]
    return running, [f"phases stay: of {told}, none has clearly more in time: with these {share}"]


def _covers_both_phases(phases: Collection[Phase]) -> bool:
    """Whether there is a replica that prefills and one that decodes."""
    return Phase.MIXED in phases or {Phase.PREFILL, Phase.DECODE} <= set(phases)


def _reschedule(network: NetworkProblem, running: Solution, spent: Callable[[], bool]) -> Adjustment:
    settings = network.settings
    steps = min(settings.most_flips, settings.flips_per_replica * len(network.heads))
    return reschedule_lightly(
        network.problem, network.evaluator, running, margin=settings.margin, steps=steps, spent=spent
    )


def _continuing_phases(network: NetworkProblem, previous: Plan | None, why: list[str]) -> dict[str, Phase]:
    """The phases that go on, as far as owners still allow them."""
    kept: dict[str, Phase] = {}
    for head in network.heads:
        phase = previous.phase_of(head) if previous is not None else None
        if phase in (allowed := network.allowed(head)):
            kept[head] = phase
        elif phase is not None:
            why.append(f"{head} does not go on with {phase}: only {' or '.join(allowed)} is open to it")
    return kept


def _add_new_replicas(network: NetworkProblem, kept: Mapping[str, Phase], spent: Callable[[], bool]) -> Solution:
    """Replicas that go on, and new ones where they help most, changed one at a time."""
    running = network.solution({head: kept.get(head, network.allowed(head)[0]) for head in network.heads})
    new = [head for head in network.heads if head not in kept]
    return _climb_phases(network, _make_scorer(network, spent), running, new)


def _climb_phases(network: NetworkProblem, scorer: Scorer, start: Solution, heads: Sequence[str]) -> Solution:
    """Climb from `start`, changing one of these replicas' phase in turn, while it helps."""
    here, level = start, scorer.objective(start)
    idle = 0
    for head in cycle(heads):
        if idle == len(heads) or scorer.is_exhausted():
            break
        phases = network.phases(here)
        others = [
            network.solution({**phases, head: phase}) for phase in network.allowed(head) if phase is not phases[head]
        ]
        found = scorer.find_best_above(others, level)
        idle = idle + 1 if found is None else 0
        level, here = found or (level, here)
    return here


def _make_scorer(network: NetworkProblem, spent: Callable[[], bool]) -> Scorer:
    settings = network.settings
    steps = min(settings.most_steps, max(settings.least_steps, settings.steps_per_replica * len(network.heads)))
    return Scorer(SearchSpace.of(network.problem, network.evaluator), limit=steps, spent=spent, same_groups=True)


# --- routing


def _share_requests(
    network: NetworkProblem, solution: Solution
) -> tuple[tuple[Replica, ...], tuple[Pairing, ...], tuple[str, ...]]:
    """The replicas, X and Y, and what is expected. Where the programme finds no way for any
    request, all replicas do both phases, as owners allow, and share alike."""
    try:
        plan = network.evaluator.propose(solution, epoch=0, version=0)[0].plan
    except UnservedError:
        phases = network.phases(network.colocated)
        replicas = tuple(
            Replica(id=head, phase=phases[head], stages=network.stages[head]) for head in sorted(network.heads)
        )
        ends = [(one.id, two.id) for one in replicas for two in replicas if _can_pair(one, two)]
        pairings = [Pairing(prefill=one, decode=two, weight=1.0) for one, two in ends]
        return replicas, _limit_pairings(pairings), ("nothing is expected of any replica: all share alike",)
    return tuple(sorted(plan.replicas, key=lambda replica: replica.id)), _limit_pairings(plan.pairings), plan.why


def _keep_step_budgets(replicas: tuple[Replica, ...], previous: Plan, factor: float) -> tuple[Replica, ...]:
    """With the budgets that replicas had, where those are nearly as good."""

    def keep_budget(replica: Replica) -> Replica:
        before = previous.replica(replica.id)
        if before is None or before.phase is not replica.phase or not (before.step_tokens and replica.step_tokens):
            return replica
        change = max(before.step_tokens, replica.step_tokens) / min(before.step_tokens, replica.step_tokens)
        return msgspec.structs.replace(replica, step_tokens=before.step_tokens) if change < factor else replica

    return tuple(map(keep_budget, replicas))


def _can_pair(one: Replica, two: Replica) -> bool:
    """A mixed replica keeps its requests, unless the other one does not prefill."""
    return one.id == two.id if one.decodes and two.prefills else one.prefills and two.decodes


def _may_keep_shares(
    network: NetworkProblem, solution: Solution, before: Sequence[Pairing], after: Sequence[Pairing]
) -> bool:
    """Whether requests may as well be shared out as before: every replica prefills and decodes
    about as many, and no more of them would be in time."""
    if _largest_change(before, after) > network.settings.share_change:
        return False
    served = network.evaluator.orchestrate(solution)[0].flow.served
    old, new = (
        network.evaluator.orchestrate(solution, solver=solver_for_shares(network, solution, pairings, served))[
            0
        ].attainment
        for pairings in (before, after)
    )
    return new < old + network.settings.margin


def _largest_change(before: Sequence[Pairing], after: Sequence[Pairing]) -> float:
    """By how much the share of some replica differs, of prefill or of decode."""
    moved: defaultdict[tuple[str, str], float] = defaultdict(float)
    for sign, pairings in ((-1.0, before), (1.0, after)):
        for pair in pairings:
            moved["prefill", pair.prefill] += sign * pair.weight
            moved["decode", pair.decode] += sign * pair.weight
    return max(abs(share) for share in moved.values())


def _limit_pairings(pairings: Sequence[Pairing]) -> tuple[Pairing, ...]:
    """The heaviest pairs, and each replica's heaviest, by id; weights sum to 1 again."""
    ranked = sorted(pairings, key=lambda pair: (-pair.weight, pair.prefill, pair.decode))
    kept = ranked[:MAX_PAIRINGS]
    named = {end for pair in kept for end in (pair.prefill, pair.decode)}
    for pair in ranked[MAX_PAIRINGS:]:
        if not {pair.prefill, pair.decode} <= named:
            named |= {pair.prefill, pair.decode}
            kept.append(pair)
    total = sum(pair.weight for pair in kept)
    kept.sort(key=lambda pair: (pair.prefill, pair.decode))
    return tuple(msgspec.structs.replace(pair, weight=pair.weight / total) for pair in kept)


# --- reasons


def _explain_idle(replicas: Sequence[Replica], pairings: Sequence[Pairing]) -> list[str]:
    """One line where replicas get no requests."""
    busy = {end for pair in pairings for end in (pair.prefill, pair.decode)}
    idle = [replica.id for replica in replicas if replica.id not in busy]
    return [f"no requests for {', '.join(idle)}: all that can be in time are served without"] if idle else []


def _explain_load(network: NetworkProblem) -> str:
    """What the plan is for."""
    workload, slo = network.service.workload, network.service.slo
    ready = f" ({network.asked:.3g} requests/s asked for: the rest is room)" if network.asked < workload.rate else ""
    return (
        f"planned for {workload.rate:.3g} requests/s{ready} with lengths of {workload.name}: "
        f"{workload.mean_prompt:.0f} tokens in and {workload.mean_output:.0f} out on average; deadlines "
        f"{slo.ttft_s:.3g} s to the first token, {slo.tpot_s:.3g} s from token to token, {slo.e2e_s:.3g} s in all"
    )


def _limit_reasons(lines: Sequence[str]) -> tuple[str, ...]:
    """As many as fit."""
    kept: list[str] = []
    room = WHY_CHARACTERS
    for number, line in enumerate(lines):
        room -= len(line)
        if room < 0:
            return (*kept, f"and {len(lines) - number} more reasons")
        kept.append(line)
    return tuple(kept)
