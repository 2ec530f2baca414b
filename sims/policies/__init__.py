"""Routing policies that only simulations use, and all that a simulation may be set to.

To compare another one: write it in a file of its own as a `RoutingPolicy`, and enter it in
POLICIES.
"""

from collections.abc import Mapping
from typing import Final

from ...coordinator.routing.interface import PolicyFactory
from ...coordinator.routing.policies import NETWORK_POLICIES
from .load_blind import PlanShares, RandomReplicas, RoundRobin

__all__ = ["PLAN", "POLICIES", "RANDOM", "ROUND_ROBIN", "SHARES"]

PLAN: Final = "plan"
SHARES: Final = "shares"
RANDOM: Final = "random"
ROUND_ROBIN: Final = "round-robin"

POLICIES: Final[Mapping[str, PolicyFactory]] = {
    **NETWORK_POLICIES,
    SHARES: PlanShares,
    RANDOM: RandomReplicas,
    ROUND_ROBIN: RoundRobin,
}
"""By name: the network's, and those that it is compared with."""
