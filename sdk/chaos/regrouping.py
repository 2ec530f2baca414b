"""Which boxes a run orders to hold the model together, or to part again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...coordinator import Plan, Stage
from ...coordinator.plan import Groups
from ...node.messages import NodeStatus


@dataclass(frozen=True, slots=True)
class GroupChange:
    """The groups that are ordered, and the boxes whose part of the plan changes by that."""

    groups: Groups
    boxes: tuple[str, ...]


def choose_groups(plan: Plan, nodes: Sequence[NodeStatus], here: Collection[str], pick: float) -> GroupChange | None:
    """Boxes part that hold the model together, though each could alone; else two of a phase join. None while there are
    no such boxes among `here`, or the plan is on its way to other groups. `pick` in [0, 1) chooses."""
    adverts = {node.peer: node.advert for node in nodes}
    whole = {
        peer: advert.phase
        for peer, advert in adverts.items()
        if advert is not None and advert.model is not None and advert.fits >= advert.model.layers
    }
    if plan.regrouping is not None:
        return None
    joined = [replica.peers for replica in plan.replicas if len(replica.peers) > 1 and whole.keys() >= {*replica.peers}]
    if joined:
        boxes = tuple(peer for peers in joined for peer in peers)
        return GroupChange((), boxes) if {*boxes} <= {*here} else None
    alone = sorted(replica.head for replica in plan.replicas if replica.peers == (replica.head,))
    usable = [peer for peer in alone if peer in whole and peer in here]
    pairs = [(one, two) for one in usable for two in usable if one < two and whole[one] == whole[two]]
    if not pairs:
        return None
    one, two = pairs[int(pick * len(pairs))]
    half = plan.layers // 2
    first = Stage(peer=one, tp=_tp_of(plan, one), first_layer=0, last_layer=half)
    last = Stage(peer=two, tp=_tp_of(plan, two), first_layer=half, last_layer=plan.layers)
    return GroupChange(((first, last),), (one, two))


def _tp_of(plan: Plan, box: str) -> int:
    return next(stage.tp for replica in plan.replicas for stage in replica.stages if stage.peer == box)
