"""The policies that gateways can be set to, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from .cronus import Cronus
from .hetero import MinMaxWorkload, WorkloadKind
from .interface import PolicyFactory, RoutingPolicy
from .load_blind import RoundRobin
from .plan_and_queues import PlanAndQueues
from .predicted import PredictedTimes
from .splitwise import SplitwisePools

ROUND_ROBIN: Final = "round-robin"
LEAST_TOKENS: Final = "least-tokens"

NETWORK_POLICIES: Final[Mapping[str, PolicyFactory]] = {
    "predicted": PredictedTimes,
    "plan": PlanAndQueues,
    "hetero": MinMaxWorkload,
    "splitwise": SplitwisePools,
    "cronus": Cronus,
    ROUND_ROBIN: RoundRobin,
    LEAST_TOKENS: partial(MinMaxWorkload, workload=WorkloadKind.TOKENS),
}
"""The last two are what others do, to be compared with."""


def lends_replicas(policy: str) -> bool:
    """Whether gateways that route by the policy of this name borrow replicas (`RoutingPolicy.lends_replicas`)."""
    made = NETWORK_POLICIES.get(policy)
    return isinstance(made, type) and issubclass(made, RoutingPolicy) and made.lends_replicas
