"""A box's place in its replica, and what the workers of two replicas transfer to each other. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ...bootstrap import PeerId
from ...coordinator import Phase, Plan, PlanError, Replica, Stage
from ...coordinator.plan import GroupStages
from ...kvtransport.errors import FiguresError
from ...kvtransport.routing.reslice import ShardLayout, reslice
from ...kvtransport.routing.reslice import ShardRank as LayoutRank
from ..engine.protocol import KvSlice, WorkerRank
from ..messages import RankSlice, TicketedSlice


class PlaceError(ValueError):
    """Stages that do not hold the model together, or work for another replica than this one."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Stage `index` of a replica of these stages, which hold the model together, in the order of their layers."""

    stages: tuple[Stage, ...]
    index: int

    @property
    def stage(self) -> Stage:
        """What this box holds."""
        return self.stages[self.index]

    @property
    def head(self) -> PeerId:
        """The box that takes the replica's requests."""
        return PeerId(self.stages[0].peer)

    @property
    def is_head(self) -> bool:
        """Whether that is this box."""
        return self.index == 0

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each stage; nothing for a replica of one box."""
        return tuple(stage.layers for stage in self.stages) if len(self.stages) > 1 else ()

    @property
    def others(self) -> tuple[PeerId, ...]:
        """The boxes of the other stages, in order."""
        return tuple(PeerId(stage.peer) for i, stage in enumerate(self.stages) if i != self.index)

    def __str__(self) -> str:
        """As status shows it: `2/3 layers 10-21`."""
        stage = self.stage
        return f"{self.index + 1}/{len(self.stages)} layers {stage.first_layer}-{stage.last_layer - 1}"


def find_place(plan: Plan | None, own: PeerId, service: str) -> Place | None:
    """The place that a plan gives this box in a replica that spans several, if any."""
    replica = plan.replica_of(own) if plan is not None and plan.service == service else None
    if replica is None or len(replica.stages) < 2:
        return None
    return place_in(replica.stages, own)


def place_in(group: GroupStages, own: PeerId) -> Place:
    """The place of a box in a group that it is part of."""
    return Place(group, next(index for index, stage in enumerate(group) if stage.peer == own))


def slices_between(
    prefill: tuple[Stage, ...], decode: tuple[Stage, ...], *, layers: int, kv_heads: int
) -> tuple[RankSlice, ...]:
    """What each worker of one replica sends to each of the other. Raises PlaceError for stages that
    are no replica."""
    try:
        slices = reslice(_layout(prefill, layers, kv_heads), _layout(decode, layers, kv_heads))
    except FiguresError as error:
        raise PlaceError(f"prefill: {error}") from error
    return tuple(
        RankSlice(
            source_peer=prefill[found.source.stage].peer,
            source=WorkerRank(stage=found.source.stage, tp=found.source.tp),
            target_peer=decode[found.target.stage].peer,
            target=WorkerRank(stage=found.target.stage, tp=found.target.tp),
            slice=KvSlice(
                first_layer=found.layers.start,
                last_layer=found.layers.stop,
                first_head=found.heads.start,
                last_head=found.heads.stop,
            ),
        )
        for found in slices
    )


def check_sends(slices: tuple[TicketedSlice, ...], place: Place, *, kv_heads: int) -> None:
    """Raise PlaceError unless this replica's workers hold what `slices` want from them, of one transfer, for others."""
    layout = _layout(place.stages, place.stages[-1].last_layer, kv_heads)
    peers = {stage.peer for stage in place.stages}
    if len({ticketed.ticket.transfer for ticketed in slices}) != 1:
        raise PlaceError("slices: they are of different transfers")
    for ticketed in slices:
        found, rank = ticketed.rank_slice, LayoutRank(ticketed.rank_slice.source.stage, ticketed.rank_slice.source.tp)
        if found.target_peer in peers:
            raise PlaceError(f"slices: {found.target_peer} prefills here; name another replica to decode")
        if rank not in layout.ranks or found.source_peer != place.stages[rank.stage].peer:
            raise PlaceError(f"slices: {found.source_peer} has no worker {rank.tp} of stage {rank.stage} here")
        if not (
            _within(found.slice.layers, layout.layers_of(rank)) and _within(found.slice.heads, layout.heads_of(rank))
        ):
            raise PlaceError(f"slices: worker {rank.tp} of stage {rank.stage} does not hold {found.slice}")


def _layout(stages: tuple[Stage, ...], layers: int, kv_heads: int) -> ShardLayout:
    try:
        held = Replica(id="here", phase=Phase.MIXED, stages=stages).layers
    except PlanError as error:
        raise PlaceError(f"stages: {error}") from error
    if held != layers:
        raise PlaceError(f"stages: they hold {held} layers, the model has {layers}")
    try:
        return ShardLayout(
            tp=tuple(stage.tp for stage in stages), stages=tuple(stage.layers for stage in stages), kv_heads=kv_heads
        )
    except FiguresError as error:
        raise PlaceError(f"stages: {error}") from error


def _within(inner: range, whole: range) -> bool:
    return whole.start <= inner.start and inner.stop <= whole.stop
