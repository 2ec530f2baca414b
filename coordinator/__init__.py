"""What decides: plans and routes, as plain functions over plain frozen values.

Nothing here reads a clock, a socket, a file or a random number, so the network, the tests and the
simulator run the same code. `network_plan.plan_network` turns views of boxes and links and the
demand into a `Plan`; a `Router` turns a plan and the latest loads into a `Route` for one request,
by the policy that it is set to. All values can be sent with msgspec and are validated on the way
in.

`network_plan` is not imported here: it takes a solver, which is slow to import and needed by
whoever plans only.
"""

from .capacity import BoxView, CapacityError, LinkView
from .demand import Demand, DemandMeter
from .plan import Pairing, Phase, Plan, PlanError, Replica, Stage
from .profile import LatencyProfile, PhaseCost, PhaseFit, StepSample
from .routing.interface import Load, LoadError, NoRoute, PolicyError, Route, RoutingSettings
from .routing.router import Router

__all__ = [
    "BoxView",
    "CapacityError",
    "Demand",
    "DemandMeter",
    "LatencyProfile",
    "LinkView",
    "Load",
    "LoadError",
    "NoRoute",
    "Pairing",
    "Phase",
    "PhaseCost",
    "PhaseFit",
    "Plan",
    "PlanError",
    "PolicyError",
    "Replica",
    "Route",
    "Router",
    "RoutingSettings",
    "Stage",
    "StepSample",
]
