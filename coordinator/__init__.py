"""What decides: plans and routes, as plain functions over plain frozen values.

Nothing here reads a clock, a socket, a file or a random number, so the network, the tests and the
simulator run the same code. `network_plan.plan_network` turns views of boxes and links and the
demand into a `Plan`; a `Router` turns a plan and the latest loads into a `Route` for one request,
by the policy that it is set to. All values can be sent with msgspec and are validated on the way
in.

Names are loaded when first used: what clients need of this room are values, and neither numpy nor a
solver. `network_plan` is not among them: it is needed by whoever plans only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capacity import BoxView, CapacityError, LinkView
    from .demand import Demand
    from .demand_meter import DemandMeter
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

_HOMES = {
    "BoxView": "capacity",
    "CapacityError": "capacity",
    "Demand": "demand",
    "DemandMeter": "demand_meter",
    "LatencyProfile": "profile",
    "LinkView": "capacity",
    "Load": "routing.interface",
    "LoadError": "routing.interface",
    "NoRoute": "routing.interface",
    "Pairing": "plan",
    "Phase": "plan",
    "PhaseCost": "profile",
    "PhaseFit": "profile",
    "Plan": "plan",
    "PlanError": "plan",
    "PolicyError": "routing.interface",
    "Replica": "plan",
    "Route": "routing.interface",
    "Router": "routing.router",
    "RoutingSettings": "routing.interface",
    "Stage": "plan",
    "StepSample": "profile",
}
"""Where each name is defined."""


def __getattr__(name: str) -> object:
    """Load a public name when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
