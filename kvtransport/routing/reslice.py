"""Who sends which layers and heads to whom when two engines are cut differently: tensor parallel
over heads, pipeline parallel over layers, each side by its own cut.

A rank holds a rectangle of (layers x heads). Every (layer, head) that a target rank holds comes to
it exactly once, from exactly one source rank, in as few transfers as there are source rectangles in
it. Where several source ranks hold the same heads (more ranks than heads), they share the work
evenly. Frames carry absolute layers and heads, so nothing of this is on the wire.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import FiguresError
from ..wire.frames import KVFrame


class ShardRank(NamedTuple):
    """One worker of an engine: pipeline stage and place in the tensor-parallel group of that stage."""

    stage: int
    tp: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a model's KV lies on the ranks of one engine: `stages` has the layers of each stage, `tp`
    its ranks.

    Up to one rank per head, a stage's `tp` divides `kv_heads` and each rank has its block of heads;
    beyond that, `kv_heads` divides `tp` and neighbouring ranks hold the same head, as in vLLM."""

    tp: tuple[int, ...]
    stages: tuple[int, ...]
    kv_heads: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1:
            raise FiguresError(f"layout.kv_heads is {self.kv_heads}; it must be at least 1")
        for tp in self.tp:
            if tp < 1 or (self.kv_heads % tp and tp % self.kv_heads):
                raise FiguresError(
                    f"layout.tp is {tp}; it must divide the {self.kv_heads} KV heads or be a multiple of them"
                )
        if not self.stages or min(self.stages) < 1:
            raise FiguresError(f"layout.stages is {self.stages}; every stage must hold at least one layer")
        if len(self.tp) != len(self.stages):
            raise FiguresError(f"layout.tp has {len(self.tp)} numbers for {len(self.stages)} stages")

    @classmethod
    def uniform(cls, tp: int, stages: tuple[int, ...], kv_heads: int) -> ShardLayout:
        """The same number of ranks in every stage."""
        return cls((tp,) * len(stages), stages, kv_heads)

    @classmethod
    def even(cls, *, tp: int, pp: int, layers: int, kv_heads: int) -> ShardLayout:
        """`pp` stages as equal as they can be, the first ones taking what is left over."""
        if not 1 <= pp <= layers:
            raise FiguresError(f"layout.pp is {pp}; it must be in [1, {layers}], one layer per stage at least")
        share, more = divmod(layers, pp)
        return cls.uniform(tp, tuple(share + (stage < more) for stage in range(pp)), kv_heads)

    @property
    def layers(self) -> int:
        return sum(self.stages)

    @property
    def ranks(self) -> tuple[ShardRank, ...]:
        """All ranks, stage by stage."""
        return tuple(ShardRank(stage, rank) for stage, tp in enumerate(self.tp) for rank in range(tp))

    def layers_of(self, rank: ShardRank) -> range:
        """The layers of its stage."""
        self._known(rank)
        first = sum(self.stages[: rank.stage])
        return range(first, first + self.stages[rank.stage])

    def heads_of(self, rank: ShardRank) -> range:
        """The KV heads it holds."""
        self._known(rank)
        tp = self.tp[rank.stage]
        if tp >= self.kv_heads:
            head = rank.tp // (tp // self.kv_heads)
            return range(head, head + 1)
        size = self.kv_heads // tp
        return range(rank.tp * size, (rank.tp + 1) * size)

    def _known(self, rank: ShardRank) -> None:
        if not (0 <= rank.stage < len(self.stages) and 0 <= rank.tp < self.tp[rank.stage]):
            raise FiguresError(f"{rank} does not exist in {self}")


@dataclass(frozen=True, slots=True)
class ShardTransfer:
    """`source` sends these heads of these layers to `target`, for all tokens."""

    source: ShardRank
    target: ShardRank
    layers: range
    heads: range

    @property
    def size(self) -> int:
        """In units of one head of one layer."""
        return len(self.layers) * len(self.heads)


def reslice(source: ShardLayout, target: ShardLayout) -> tuple[ShardTransfer, ...]:
    """Everything that must be sent, by source rank, first layer, then target rank."""
    if (source.layers, source.kv_heads) != (target.layers, target.kv_heads):
        raise FiguresError(
            f"source has {source.layers} layers and {source.kv_heads} KV heads, target has {target.layers} and "
            f"{target.kv_heads}; they must be of the same model"
        )
    holders: dict[tuple[int, range], list[ShardRank]] = {}  # (stage, heads) -> the ranks that hold the same
    for rank in source.ranks:
        holders.setdefault((rank.stage, source.heads_of(rank)), []).append(rank)
    wanted: list[tuple[tuple[int, range], ShardTransfer]] = []
    for rank in target.ranks:
        for held, ranks in holders.items():
            layers = _overlap(source.layers_of(ranks[0]), target.layers_of(rank))
            heads = _overlap(held[1], target.heads_of(rank))
            if layers and heads:
                wanted.append((held, ShardTransfer(ranks[0], rank, layers, heads)))
    # The largest first, to whoever has least to send: as even as it gets with few transfers.
    load: Counter[ShardRank] = Counter()
    transfers: list[ShardTransfer] = []
    for held, transfer in sorted(wanted, key=lambda item: (-item[1].size, item[1].target)):
        sender = min(holders[held], key=lambda rank: (load[rank], rank))
        load[sender] += transfer.size
        transfers.append(replace(transfer, source=sender))
    return tuple(sorted(transfers, key=lambda one: (one.source, one.layers.start, one.target, one.heads.start)))


def localise(frame: KVFrame, heads: range) -> KVFrame:
    """The frame, its heads counted from the rank's first; `heads` are of the whole model."""
    if frame.head_first < heads.start or frame.head_last > heads.stop:
        raise FiguresError(f"{frame} has heads that this rank does not hold; it holds {heads.start}..{heads.stop - 1}")
    return replace(frame, head_first=frame.head_first - heads.start, head_last=frame.head_last - heads.start)


def _overlap(one: range, two: range) -> range:
    return range(max(one.start, two.start), min(one.stop, two.stop))
