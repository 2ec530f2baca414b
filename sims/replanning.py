"""What the simulated coordinator answers to news: new phases, new groups, both or nothing
(ThunderServe sections 3.4 and 5.4).

    replanner = Replanner(problem, ReplanSettings(policy=ReplanPolicy.LIGHT))
    result = simulate(cluster, runs, changes=[BoxLost(60.0, "a40-1")], replan=replanner)
    replanner.records

Plans are made by the coordinator's own code (`coordinator.planning.rescheduling`). Their counted
time is a setting, so that a simulation does not depend on the machine that it runs on; what
planning takes on this machine is measured beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from time import perf_counter
from typing import Final, final

import msgspec
import numpy as np

from ..coordinator.costs.loading import LoadRates, load_seconds
from ..coordinator.demand import Demand
from ..coordinator.demand_meter import expected_workload
from ..coordinator.plan import Phase, Plan, PlanError
from ..coordinator.planning.model.errors import NoPlan, UnservedError
from ..coordinator.planning.model.problem import Problem
from ..coordinator.planning.model.slo import SloScale, scaled_slo
from ..coordinator.planning.model.workload import Service
from ..coordinator.planning.rescheduling import (
    Rescheduling,
    pays_reload,
    reschedule_groups,
    reschedule_phases,
    without_boxes,
)
from ..coordinator.planning.upper.settings import SearchSettings
from ..coordinator.settings import NetworkPlanSettings
from .scenario import PlanChange, Situation, WorldError

CANNOT_PLAN: Final = (NoPlan, UnservedError, PlanError)


class ReplanPolicy(StrEnum):
    """How plans answer to news.

    - `none`: they do not; gateways go on with the replicas that are left.
    - `light`: phases and shares, as the running network does.
    - `full`: new groups where they are expected to serve more, whatever reloading costs; else as
      `light`.
    - `best`: `light` at once; then new groups where the gain pays for the reload.
    """

    NONE = "none"
    LIGHT = "light"
    FULL = "full"
    BEST = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanSettings:
    """How the coordinator answers, and how long that is counted for.

    - `light_s`, `full_s`: simulated seconds from news to the plan in force.
    - `rates`: what loading takes on a box; `reload_s` instead: every replica that loads is away for
      so long.
    - `margin`: by how much of all requests in time new groups must be expected to gain. Higher: fewer
      reloads for what estimates are off by.
    - `deadlines`: multiples of what the mean request takes alone on A100s, when gateways have told of
      other traffic; None: the services' own stay.
    - `payback_s`: within so long new groups have to pay for their reload (`best`). Longer: they are
      taken for less.
    - `keep_loaded`: replicas that new groups agree with keep their weights; False restarts all, as
      ThunderServe's full rescheduling does.
    - `search`: how long the search for new groups is; `seed`: of its random numbers.
    """

    policy: ReplanPolicy = ReplanPolicy.LIGHT
    light_s: float = 1.0
    full_s: float = 5.0
    rates: LoadRates = field(default_factory=LoadRates)
    reload_s: float | None = None
    margin: float = NetworkPlanSettings().margin
    deadlines: SloScale | None = None
    payback_s: float = 600.0
    keep_loaded: bool = True
    search: SearchSettings = field(default_factory=SearchSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("light_s", "full_s", "reload_s", "payback_s"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0.0):
                raise WorldError(f"{name} is {value}; it must not be negative")


class ReplanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to news. Moments are simulated; `planning_s` was measured on this machine,
    `reload_s` is modelled.

    `asked_s`: when the coordinator had the news; `in_force_s`: when the plan takes effect;
    `ready_s`: when the last of the replicas that load is ready. `before`, `after`: shares of the
    requests expected in time. `kept`: why there is no new plan, "" where there is one.
    """

    asked_s: float
    why: tuple[str, ...]
    kind: str
    in_force_s: float
    ready_s: float
    planning_s: float
    reload_s: float
    loading: tuple[str, ...]
    replicas: str
    flips: tuple[str, ...]
    before: float
    after: float
    kept: str = ""


@final
class Replanner:
    """Implements `scenario.Replan`. `records`: what it has answered; `clock`: seconds, to measure
    what planning takes."""

    def __init__(
        self, problem: Problem, settings: ReplanSettings, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.records: list[ReplanRecord] = []
        self._problem = problem
        self._settings = settings
        self._clock = clock
        # By service and box, the layers that it has had.
        self._on_disk: list[defaultdict[str, set[int]]] = [defaultdict(set) for _ in problem.services]

    def __repr__(self) -> str:
        return f"<Replanner {self._settings.policy}, {len(self.records)} answers>"

    def __call__(self, situation: Situation) -> Sequence[PlanChange]:
        """The plans that follow from the news."""
        self._drop_overtaken(situation.now)
        self._note_disks(situation)
        policy = self._settings.policy
        if policy is ReplanPolicy.NONE:
            return ()
        try:
            problem = self._problem_of(situation)
        except CANNOT_PLAN as error:
            self._record_failure(situation, "light", 0.0, str(error))
            return ()
        light, light_s = self._reschedule("light", problem, situation)
        if policy is ReplanPolicy.LIGHT:
            return self._answer("light", situation, light, light_s)
        full, full_s = self._reschedule("full", problem, situation)
        if full is None or not self._is_worth(light, full):
            return self._answer("light", situation, light, light_s)
        if policy is ReplanPolicy.FULL:
            return self._answer("full", situation, full, full_s)
        return (*self._answer("light", situation, light, light_s), *self._answer("full", situation, full, full_s))

    # ---- planning ---------------------------------------------------------------------------------------------

    def _problem_of(self, situation: Situation) -> Problem:
        """As things are: the boxes that are there, their links, and the traffic that gateways have told of."""
        deadlines = self._settings.deadlines
        services = tuple(
            _with_demand(service, demand, deadlines)
            for service, demand in zip(self._problem.services, situation.demands, strict=True)
        )
        pinned = {**situation.pins, **self._problem.pinned}
        problem = replace(self._problem, cluster=situation.cluster, services=services, pinned=pinned)
        return without_boxes(problem, situation.missing)

    def _reschedule(self, kind: str, problem: Problem, situation: Situation) -> tuple[Rescheduling | None, float]:
        """With the seconds that it took here. None where there is no such plan, which is recorded."""
        settings, began = self._settings, self._clock()
        try:
            if kind == "light":
                found = reschedule_phases(problem, situation.plans, joined=situation.joined - problem.excluded)
            else:
                rng = np.random.default_rng([settings.seed, len(self.records)])
                found = reschedule_groups(
                    problem, situation.plans, rng=rng, settings=settings.search, keep_loaded=settings.keep_loaded
                )
        except CANNOT_PLAN as error:
            self._record_failure(situation, kind, self._clock() - began, str(error))
            return None, 0.0
        return found, self._clock() - began

    def _is_worth(self, light: Rescheduling | None, full: Rescheduling) -> bool:
        """Whether new groups are to replace the running ones."""
        if not any(full.loading):
            return True
        if light is None:
            return full.after > 0.0
        settings = self._settings
        if settings.policy is ReplanPolicy.FULL:
            return full.after - light.after > settings.margin
        reload_s = max(self._load_seconds(full).values(), default=0.0)
        return pays_reload(light, full, reload_s=reload_s, payback_s=settings.payback_s, margin=settings.margin)

    def _load_seconds(self, found: Rescheduling) -> dict[tuple[int, str], float]:
        """By service and replica. All of a box's replicas load together."""
        settings, seconds = self._settings, dict[tuple[int, str], float]()
        for number, (plan, names) in enumerate(zip(found.plans, found.loading, strict=True)):
            replicas = [replica for replica in plan.replicas if replica.id in names]
            model = self._problem.services[number].model
            times = load_seconds(model, replicas, self._on_disk[number], settings.rates)
            for name, computed in times.items():
                seconds[number, name] = computed if settings.reload_s is None else settings.reload_s
        return seconds

    def _note_disks(self, situation: Situation) -> None:
        """Boxes have on disk what they hold now, and those that have joined the whole model."""
        for number, plan in enumerate(situation.plans):
            held = self._on_disk[number]
            for replica in plan.replicas:
                for stage in replica.stages:
                    held[stage.peer].update(range(stage.first_layer, stage.last_layer))
            for box in situation.joined:
                held[box].update(range(plan.layers))

    # ---- answers ------------------------------------------------------------------------------------------------

    def _answer(
        self, kind: str, situation: Situation, found: Rescheduling | None, planning_s: float
    ) -> tuple[PlanChange, ...]:
        if found is None:
            return ()
        settings = self._settings
        at = situation.now + (settings.light_s if kind == "light" else settings.full_s)
        seconds = self._load_seconds(found)
        reload_s = max(seconds.values(), default=0.0)
        self.records.append(
            ReplanRecord(
                asked_s=situation.now, why=situation.why, kind=kind, in_force_s=at, ready_s=at + reload_s,
                planning_s=planning_s, reload_s=reload_s, loading=tuple(sorted(name for _, name in seconds)),
                replicas="; ".join(map(describe_phases, found.plans)), flips=found.flips,
                before=found.before, after=found.after,
            )
        )  # fmt: skip
        return tuple(
            PlanChange(at, number, plan, {name: s for (service, name), s in seconds.items() if service == number})
            for number, plan in enumerate(found.plans)
        )

    def _record_failure(self, situation: Situation, kind: str, planning_s: float, reason: str) -> None:
        now = situation.now
        self.records.append(
            ReplanRecord(
                asked_s=now, why=situation.why, kind=kind, in_force_s=now, ready_s=now, planning_s=planning_s,
                reload_s=0.0, loading=(), replicas="; ".join(map(describe_phases, situation.plans)), flips=(),
                before=0.0, after=0.0, kept=reason,
            )
        )  # fmt: skip

    def _drop_overtaken(self, now: float) -> None:
        """Plans that are not in force yet will not be: there is news."""
        for place, record in enumerate(self.records):
            if record.in_force_s > now and not record.kept:
                self.records[place] = msgspec.structs.replace(record, kept="there was news before it was in force")


def describe_phases(plan: Plan) -> str:
    """Replicas that prefill, decode and do both: `4P 8D 0M`."""
    return " ".join(f"{len(plan.in_phase(phase))}{phase.value[0].upper()}" for phase in Phase)


def _with_demand(service: Service, demand: Demand | None, deadlines: SloScale | None) -> Service:
    """The service with the traffic that gateways have told of, and deadlines for it."""
    if demand is None:
        return service
    longest = max(prompt + output for prompt, output in demand.lengths)
    workload = expected_workload([demand], longest)
    slo = service.slo if deadlines is None else scaled_slo(service.model, workload, deadlines.scale, deadlines.target)
    return replace(service, workload=workload, slo=slo)
