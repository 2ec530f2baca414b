"""What decides: plans and routes, as plain functions over plain frozen values.

Nothing here reads a clock, a socket, a file or a random number, so the network, the tests and the simulator
run the same code. `make_plan` turns views of boxes and links into a `Plan`; a `Router` turns a plan and the
latest loads into a `Route` for one request. All values can be sent with msgspec and are validated on the way
in.
"""

from .capacity import BoxView, CapacityError, LinkView
from .plan import Pairing, Phase, Plan, PlanError, Replica, Stage
from .planner import PREFILL_TFLOP_PER_DECODE_GB, make_plan
from .profile import LatencyProfile, PhaseCost, PhaseFit, StepSample
from .router import Load, LoadError, NoRoute, Route, Router, route

__all__ = [
    "PREFILL_TFLOP_PER_DECODE_GB",
    "BoxView",
    "CapacityError",
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
    "Replica",
    "Route",
    "Router",
    "Stage",
    "StepSample",
    "make_plan",
    "route",
]
