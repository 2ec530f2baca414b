"""Routing policies that only simulations use, and all that a simulation may be set to.

To compare another one: write it in a file of its own as a `RoutingPolicy`, and enter it in
POLICIES.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

from ...coordinator.routing.hetero import MinMaxWorkload, WorkloadKind
from ...coordinator.routing.interface import PolicyFactory
from ...coordinator.routing.load_blind import PlanShares, RandomReplicas, SingleReplica, WeightedRoundRobin
from ...coordinator.routing.policies import LEAST_TOKENS, NETWORK_POLICIES, ROUND_ROBIN

__all__ = [
    "HETERO", "LEAST_TOKENS", "MEMORY", "PLAN", "POLICIES", "PREDICTED", "RANDOM", "ROUND_ROBIN", "SHARES", "SINGLE",
    "WEIGHTED_ROUND_ROBIN",
]  # fmt: skip

PLAN: Final = "plan"
PREDICTED: Final = "predicted"
HETERO: Final = "hetero"
SHARES: Final = "shares"
RANDOM: Final = "random"
WEIGHTED_ROUND_ROBIN: Final = "weighted-round-robin"
SINGLE: Final = "single"
MEMORY: Final = "memory"

POLICIES: Final[Mapping[str, PolicyFactory]] = {
    **NETWORK_POLICIES,
    SHARES: PlanShares,
    RANDOM: RandomReplicas,
    WEIGHTED_ROUND_ROBIN: WeightedRoundRobin,
    SINGLE: SingleReplica,
    MEMORY: partial(MinMaxWorkload, workload=WorkloadKind.ONE),
}
"""By name: the network's, and those that it is compared with."""
