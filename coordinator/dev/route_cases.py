"""Routers that choose among replicas as a large network has them, to be timed."""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np

from ..plan import Deadlines, Pairing, Phase, Plan, Replica, Stage
from ..profile import PhaseCost, ReplicaProfile
from ..routing.interface import RoutingSettings
from ..routing.router import Router

REPLICAS: Final = 100
DEADLINES: Final = Deadlines(ttft_s=2.0, tpot_s=0.1, e2e_s=30.0)


def make_plan(*, is_split: bool) -> Plan:
    """Of so many replicas that do both, or of half as many pairs of each with each."""
    phases = [Phase.PREFILL, Phase.DECODE] if is_split else [Phase.MIXED]
    replicas = tuple(
        Replica(
            id=f"r{number}",
            phase=phases[number % len(phases)],
            stages=(Stage(peer=f"r{number}", tp=1, first_layer=0, last_layer=32),),
        )
        for number in range(REPLICAS)
    )
    first = [replica.id for replica in replicas if replica.prefills]
    ends = list(product(first, (replica.id for replica in replicas if not replica.prefills))) or list(
        zip(first, first, strict=True)
    )
    pairings = tuple(Pairing(prefill=one, decode=other, weight=1.0 / len(ends)) for one, other in ends)
    return Plan(
        epoch=1, version=1, service="s", replicas=replicas, pairings=pairings, codec="kv4", why=(), deadlines=DEADLINES
    )


def make_router(policy: str, plan: Plan) -> Router:
    """One that has heard of all replicas, each with other queues and other times."""
    router = Router(plan, RoutingSettings(policy=policy))
    rng = np.random.default_rng(0)
    for replica in plan.replicas:
        requests, tokens = (int(each) for each in rng.integers((64, 8192)))
        router.loads.note(replica.id, requests, tokens, 100_000, decodes=requests)
        speed = float(rng.uniform(0.5, 2.0))
        router.loads.profiles[router.loads.index[replica.id]] = ReplicaProfile(
            prefill=PhaseCost(token_s=1e-4 * speed, step_s=0.01),
            decode=PhaseCost(token_s=1e-7 * speed, request_s=1e-4, step_s=0.02 * speed),
            kv_tokens=100_000,
        )
    return router
