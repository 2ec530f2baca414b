"""Cronus' policy (partially disaggregated prefill): a slow replica computes the first part of each
prompt, a fast one the rest beside the answers that it decodes.

Where a prompt is split is not decided here but by `balancer`, at the partial-prefill replica and at
the moment when that takes the request (`prefill_slots`): as in the paper from fresh statistics of
the chunked-prefill replica, and with any number of gateways, none of which knows what the others
send there. What is decided here is which two replicas: the paper has one pair, a plan may have
several, and `PlanAndQueues` chooses among them.
"""

from __future__ import annotations

from typing import final

import msgspec
import numpy as np

from ..plan import Plan
from .interface import ReplicaLoads, RequestFacts, Route, RoutingPolicy, RoutingSettings
from .plan_and_queues import PlanAndQueues


@final
class Cronus(RoutingPolicy):
    """The pair of the plan with the least work outstanding; its prefill replica says how much of
    the prompt it computes. A request for a replica that does both phases is not split."""

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        self._pairs = PlanAndQueues(plan, settings)

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        route = self._pairs.choose(request, loads, now=now, rng=rng)
        if route.prefill is None:
            return route
        return msgspec.structs.replace(route, split=request.prompt_tokens, splits_there=True)
