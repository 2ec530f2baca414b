"""What the coordinator can be told about plans of the running network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlanSettings:
    """The knobs of `plan_network`: how long it searches, and what is worth a new plan.

    Evaluations; each takes some milliseconds, more with more replicas:

    - `steps_per_replica`, within `least_steps` and `most_steps`: of a first plan, or to place new
      replicas. More find better phases in networks of unequal boxes.
    - `climbed_starts`: starts that a first plan is climbed to from; they share the steps.
    - `flips_per_replica`, up to `most_flips`: to see whether running replicas should change their
      phases, each to either other one and some in pairs.

    Hysteresis, since every plan is signed and gossiped, and a flip lets requests finish first:

    - `margin`: by how much of the objective (about: of all requests) a change of phases must pay.
      Measured figures are off by some percent, and by another few the next time: lower values
      follow noise, higher ones keep a plan that is worse by as much.
    - `share_change`: shares of requests that all move by less are left as they are.
    - `budget_factor`: token budgets of steps that change by a smaller factor are left as they are;
      they are chosen from a few, and the best may be between two.
    """

    steps_per_replica: int = 8
    least_steps: int = 40
    most_steps: int = 150
    climbed_starts: int = 3
    flips_per_replica: int = 4
    most_flips: int = 60
    margin: float = 0.02
    share_change: float = 0.1
    budget_factor: float = 1.6
