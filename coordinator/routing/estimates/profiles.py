"""How fast the replicas of the running network are: what each one's engine has told, phase by phase,
and what the roofline has of its boxes until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeGuard, final

from ...calibration import told_costs
from ...capacity import BoxView, Links
from ...costs.gpus import GpuError, GpuSpec, Specs, gpu_table
from ...costs.model_shape import ModelShape
from ...costs.profiled_times import FURTHEST
from ...costs.replica import Hop, ReplicaError, StageHardware, replica_times
from ...costs.sweep import profile_times
from ...plan import Plan, Replica
from ...profile import PhaseCost, ReplicaProfile

AT_ONCE: Final = 4
"""Replicas whose profile is made anew at a time: a sweep takes 10 ms, on the gateway's event loop."""

NO_HOP: Final = Hop(rtt_s=0.0, gbps=1e6)

TYPICAL_STEP: Final = (4.0, 256.0)
"""Requests and their length at which a box's own constants are held against those of its hardware."""


@final
class ReplicaProfiles:
    """Of one plan, kept while what boxes say of themselves stays the same.

    `boxes` and `links` are asked for when a replica's profile is to be made."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made: dict[str, tuple[object, ReplicaProfile | None]] = {}

    def update(
        self,
        signs: Mapping[str, object],
        boxes: Callable[[], Iterable[BoxView]],
        links: Callable[[], Links],
        into: list[ReplicaProfile | None],
    ) -> None:
        """Write the profiles, in the plan's order. `signs`: by box, a value that changes when its
        figures do. Makes a few that have changed; the others follow at the next calls."""
        stale = [
            replica
            for replica in self._plan.replicas
            if self._made.get(replica.id, ((), None))[0] != tuple(signs.get(peer) for peer in replica.peers)
        ][:AT_ONCE]
        if not stale:
            return
        by_peer = {box.peer: box for box in boxes()}
        for replica in stale:
            sign = tuple(signs.get(peer) for peer in replica.peers)
            self._made[replica.id] = (sign, profile_replica(replica, by_peer, links))
        for place, replica in enumerate(self._plan.replicas):
            into[place] = self._made.get(replica.id, (None, None))[1]


def profile_replica(
    replica: Replica, boxes: Mapping[str, BoxView], links: Callable[[], Links]
) -> ReplicaProfile | None:
    """None where nothing is known of one of its boxes, or what is said of it cannot be."""
    held = [boxes.get(stage.peer) for stage in replica.stages]
    known = [box for box in held if box is not None]
    if len(known) < len(held):
        return None
    head = known[0]
    is_current = len(replica.stages) == 1 or head.stages == replica.stages
    told = told_costs(head.profile if is_current else None)
    kv_tokens = head.kv_tokens if is_current else 0
    try:
        stages = tuple(
            StageHardware(_card(box, stage.tp), stage.tp, stage.layers, box.card_link_gbps)
            for box, stage in zip(known, replica.stages, strict=True)
        )
        prior = _profile_model(head.model, stages, _hops(replica, links) if len(stages) > 1 else ())
        # Links may not have been measured yet: nothing is too fast for them.
        fastest = _profile_model(head.model, stages, (NO_HOP,) * len(stages)) if len(stages) > 1 else prior
    except (GpuError, ReplicaError, ArithmeticError):
        return None
    return ReplicaProfile(
        prefill=told.prefill if _is_credible(told.prefill, fastest.prefill) else prior.prefill,
        decode=told.decode if _is_credible(told.decode, fastest.decode) else prior.decode,
        kv_tokens=kv_tokens,
    )


def _is_credible(told: PhaseCost | None, fastest: PhaseCost) -> TypeGuard[PhaseCost]:
    """Not where a box calls itself so much faster than its hardware that it would draw every request
    to it."""
    return told is not None and told.seconds(*TYPICAL_STEP) * FURTHEST >= fastest.seconds(*TYPICAL_STEP)


@lru_cache(maxsize=256)
def _profile_model(model: ModelShape, stages: tuple[StageHardware, ...], hops: tuple[Hop, ...]) -> ReplicaProfile:
    return profile_times(replica_times(model, stages, hops), kv_tokens=0)


def _hops(replica: Replica, links: Callable[[], Links]) -> tuple[Hop, ...]:
    between, ends = links(), pairwise([*replica.peers, replica.head])
    return tuple(Hop(between.rtt_s(one, two), between.gbps(one, two)) for one, two in ends)


def _card(box: BoxView, tp: int) -> GpuSpec:
    """One of a box's cards, as the table has it or as its engine measured it."""
    if box.specs is not None:
        return gpu_table().find(box.card, box.specs)
    return GpuSpec(
        name=box.card, memory_gib=box.memory_gib / tp, memory_gbps=box.memory_gbps / tp,
        tflops=box.compute_tflops / tp, nvlink_gbps=0.0, pcie_gen=0, usd_per_hour=0.0, specs=Specs.ENGINE,
    )  # fmt: skip
