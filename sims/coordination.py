"""When plans are made in a simulation, and of what: the coordinator's news.

Boxes that come or go are planned with at once. What links carry and what clients ask moves all the
time: it is planned with at most every `quiet_s`, as in the running network. Traffic is watched by
the gateways' own `DemandMeter`, so a workload that shifts is noticed as late as there. Where
gateways borrow replicas, the network's own `Repurposing` says which of them are moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import final

from ..coordinator.demand import Demand
from ..coordinator.demand_meter import DemandMeter
from ..coordinator.plan import Plan
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.repair.repurposing import Repurposing
from ..coordinator.routing.interface import ReplicaLoads
from .scenario import PlanChange, Replan, Situation


@final
class SimCoordinator:
    """Collects news until `wake_at`, when `plan` is to be called. Begins with plans that are as good
    as what was known at second 0, when the boxes `missing` were away. `round`: how often it has
    planned."""

    def __init__(
        self,
        replan: Replan,
        cluster: Cluster,
        services: Sequence[str],
        *,
        quiet_s: float,
        missing: frozenset[str] = frozenset(),
    ) -> None:
        self.round = 0
        self._missing = missing  # as far as it knows
        self._replan = replan
        self._cluster = cluster
        self._services = services
        self._quiet_s = quiet_s
        self._meters = [DemandMeter() for _ in services]
        self._demands: list[Demand | None] = [None] * len(services)
        self._pools = [Repurposing() for _ in services]
        self._joined: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()
        self._planned_at = 0.0
        self._news: list[str] = []
        self._figures_at = inf  # when the first news of links or traffic came that is not planned with
        self._roster_at = inf  # the same of boxes

    def __repr__(self) -> str:
        return f"<SimCoordinator planned {self.round} times, {len(self._news)} news>"

    @property
    def wake_at(self) -> float:
        """When to plan; infinite while there is no news."""
        return min(self._roster_at, max(self._figures_at, self._planned_at + self._quiet_s))

    def record_start(self, service: int, prompt: int, now: float) -> None:
        """A request of a service has come."""
        self._meters[service].record_start(now, prompt)

    def record_end(self, service: int, prompt: int, output: int, now: float) -> None:
        """A request has been answered."""
        meter = self._meters[service]
        meter.record_end(prompt, output)
        demand = meter.demand(now)
        if demand is not None and demand is not self._demands[service] and demand.requests_s > 0.0:
            self._demands[service] = demand
            prompts, outputs = zip(*demand.lengths, strict=True)
            self._note_figures(
                f"traffic of {self._services[service]}: {demand.requests_s:.3g} requests/s, "
                f"{sum(prompts) / len(prompts):.0f} tokens in and {sum(outputs) / len(outputs):.0f} out",
                now,
            )

    def watch_pools(self, service: int, plan: Plan, loads: ReplicaLoads, now: float) -> None:
        """What the replicas of a service report, some of which may be borrowed."""
        pools = self._pools[service]
        pools.observe(plan, loads, now)
        moved = pools.move_one(plan, now)
        if moved:
            self._note_roster(moved, now)

    def on_links(self, cluster: Cluster, why: str, now: float) -> None:
        """Links carry what they do in this cluster."""
        self._cluster = cluster
        self._note_figures(why, now)

    def on_lost(self, box: str, now: float) -> None:
        """A box is dead."""
        self._joined -= {box}
        self._missing |= {box}
        self._note_roster(f"{box} is lost", now)

    def on_joined(self, box: str, now: float) -> None:
        """A box has joined, and has loaded the model."""
        self._joined |= {box}
        self._missing -= {box}
        self._note_roster(f"{box} has joined", now)

    def set_held(self, held: frozenset[str]) -> None:
        """These boxes are trusted less, as of the next plan."""
        self._held = held

    def on_trusted(self, boxes: frozenset[str], now: float) -> None:
        """Boxes have not failed for so long that they are trusted as before."""
        self._note_roster(f"{', '.join(sorted(boxes))} may be used again", now)

    def plan(self, plans: tuple[Plan, ...], now: float) -> Sequence[PlanChange]:
        """New plans, if there are any, by all the news."""
        why, self._news = tuple(self._news), []
        self._planned_at, self._figures_at, self._roster_at = now, inf, inf
        self.round += 1
        return self._replan(
            Situation(
                now=now, plans=plans, missing=self._missing, joined=self._joined, cluster=self._cluster,
                demands=tuple(self._demands), why=why, held=self._held,
                pins={
                    box: phase
                    for pools, plan in zip(self._pools, plans, strict=False)
                    for box, phase in pools.pins(plan, now).items()
                },
            )
        )  # fmt: skip

    def _note_figures(self, why: str, now: float) -> None:
        self._news.append(why)
        self._figures_at = min(self._figures_at, now)

    def _note_roster(self, why: str, now: float) -> None:
        self._news.append(why)
        self._roster_at = min(self._roster_at, now)
