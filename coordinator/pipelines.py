"""Which boxes hold the model together.

Pipelines that run are kept while their boxes are there. Of the other boxes, one that holds the model
is a replica by itself; a regrouping alone joins such boxes (`regrouping/`). A box whose memory holds
only some of the layers waits until a plan makes it a stage of a replica: new pipelines are made of
boxes near each other and as few as possible, because every stage adds a network hop to every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .capacity import BoxView, Links
from .plan import Plan, Replica, Stage


@dataclass(frozen=True, slots=True)
class BoxGroup:
    """Boxes that together hold the model once: a replica that has no phase yet."""

    stages: tuple[Stage, ...]

    @property
    def head(self) -> str:
        """The box with the first layer, which names the replica, whatever its phase."""
        return self.stages[0].peer


def group_boxes(boxes: Sequence[BoxView], links: Links, previous: Plan | None, why: list[str]) -> list[BoxGroup]:
    """The replicas these boxes of one model can be, by peer id of the head. `why` gets a line for
    each new pipeline and for waiting boxes."""
    groups: list[BoxGroup] = []
    left = {box.peer: box for box in boxes if box.fits}
    for replica in previous.replicas if previous is not None else ():
        if _can_continue(replica, left):
            members = [left.pop(peer) for peer in replica.peers]
            groups.append(_group(members, [stage.layers for stage in replica.stages]))
    groups += [_group([box], (box.layers,)) for box in left.values() if box.whole]
    free = [box for box in left.values() if not box.whole]
    while found := _pipeline(free, links):
        groups.append(_group(found, _shares(found)))
        free = [box for box in free if box not in found]
        spans = ", ".join(f"{stage.layers} on {stage.peer}" for stage in groups[-1].stages)
        why.append(f"{len(found)} boxes form one replica, layers in proportion to memory: {spans}")
    if free:
        held, layers = sum(box.fits for box in free), free[0].layers
        why.append(f"boxes that wait for more memory to join them: {len(free)}, with room for {held} of {layers}")
    hopeless = sum(not box.fits for box in boxes)
    if hopeless:
        why.append(f"boxes without room for a single layer, left out: {hopeless}")
    return sorted(groups, key=lambda group: group.head)


def _can_continue(replica: Replica, left: dict[str, BoxView]) -> bool:
    """Whether every box of a pipeline is still there and still holds its layers."""
    held = [(left.get(stage.peer), stage) for stage in replica.stages]
    return len(held) > 1 and all(
        box is not None and box.tp == stage.tp and box.fits >= stage.layers and box.layers == replica.layers
        for box, stage in held
    )


def _pipeline(free: Sequence[BoxView], links: Links) -> list[BoxView]:
    """Boxes for one more replica, in the order of their stages; none when all of them together are
    too small.

    The largest begins, the nearest to those there is added until the model fits, and whoever is not
    needed after all leaves again, the smallest first. The largest is the head, and each stage is
    followed by the nearest left.
    """
    if not free or sum(box.fits for box in free) < free[0].layers:
        return []
    rest = sorted(free, key=lambda box: (-box.fits, box.peer))
    chosen = [rest.pop(0)]
    while sum(box.fits for box in chosen) < chosen[0].layers:
        nearest = min(rest, key=lambda box: (max(links.rtt_s(one.peer, box.peer) for one in chosen), box.peer))
        rest.remove(nearest)
        chosen.append(nearest)
    # one that was near but small may be superfluous once a larger one has joined: fewer stages are fewer hops
    for box in sorted(chosen[1:], key=lambda box: (box.fits, box.peer)):
        if sum(one.fits for one in chosen) - box.fits >= box.layers:
            chosen.remove(box)
    chain, left = chosen[:1], chosen[1:]
    while left:
        last = chain[-1].peer
        chain.append(min(left, key=lambda box: (links.rtt_s(last, box.peer), box.peer)))
        left.remove(chain[-1])
    return chain


def _shares(chain: Sequence[BoxView]) -> list[int]:
    """Layers for each box in proportion to what fits it, by largest remainders.

    Every share is at least one layer and at most what fits: the chain holds the model, and would
    not without any one of its boxes.
    """
    layers, room = chain[0].layers, sum(box.fits for box in chain)
    shares = [layers * box.fits // room for box in chain]
    by_remainder = sorted(range(len(chain)), key=lambda i: (-(layers * chain[i].fits % room), i))
    for i in by_remainder[: layers - sum(shares)]:
        shares[i] += 1
    return shares


def _group(chain: Sequence[BoxView], shares: Sequence[int]) -> BoxGroup:
    stages: list[Stage] = []
    first = 0
    for box, share in zip(chain, shares, strict=True):
        stages.append(Stage(peer=box.peer, tp=box.tp, first_layer=first, last_layer=first + share))
        first += share
    return BoxGroup(stages=tuple(stages))
