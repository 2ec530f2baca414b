"""How long a whole replica takes: its stages one behind the other, and what travels between them.

In a pipeline of n stages, decoding requests are spread over n batches, so that every stage has one
to work on. The time from one token of a request to its next is then the longer of two: once through
all stages and hops and back to the first, or n batches through the slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from .efficiency import efficiency_of
from .gpus import GpuSpec
from .model_shape import ModelShape
from .roofline import TYPICAL_CONTEXT, StageCost, stage_cost
from .step_times import DecodeLine, StepTimes

GIB: Final = 1 << 30


class ReplicaError(ValueError):
    """Stages that do not make a replica; the text says which and why."""


@dataclass(frozen=True, slots=True)
class StageHardware:
    """`tp` cards of a kind in one box, joined at `link_gbps` Gb/s, and their layers."""

    gpu: GpuSpec
    tp: int
    layers: int
    link_gbps: float


class Hop(NamedTuple):
    """From one stage to the next, the last back to the first, and what it passes."""

    rtt_s: float
    gbps: float


def replica_times(model: ModelShape, stages: Sequence[StageHardware], hops: Sequence[Hop] = ()) -> StepTimes:
    """Raises ReplicaError where stages, layers and hops do not fit the model or each other."""
    _check(model, stages, hops)
    costs = [_cost(model, stage, last=number == len(stages) - 1) for number, stage in enumerate(stages)]
    columns = sorted({stage.gpu.specs.value for stage in stages})
    return _PipelineTimes(costs, hops, model.activation_bytes_per_token, f"roofline, {' + '.join(columns)}")


@lru_cache(maxsize=4096)
def _cost(model: ModelShape, stage: StageHardware, *, last: bool) -> StageCost:
    """A planner asks for the same few stages in thousands of pipelines."""
    return stage_cost(
        model, stage.gpu, efficiency_of(stage.gpu),
        layers=stage.layers, tp=stage.tp, link_gbps=stage.link_gbps, last=last,
    )  # fmt: skip


def kv_capacity_tokens(model: ModelShape, stages: Sequence[StageHardware], *, memory_share: float = 0.9) -> int:
    """Tokens of KV that fit beside the weights of every stage; 0 or less where the weights do not
    fit.

    `memory_share` of a card is the engine's. Layers that look back only through a window are
    counted like all others. Raises ReplicaError.
    """
    _check(model, stages)
    return min(
        _stage_tokens(model, stage, memory_share, first=number == 0, last=number == len(stages) - 1)
        for number, stage in enumerate(stages)
    )


def _stage_tokens(model: ModelShape, stage: StageHardware, memory_share: float, *, first: bool, last: bool) -> int:
    room = stage.tp * stage.gpu.memory_gib * GIB * memory_share
    free = room - model.stage_weight_bytes(stage.layers, first=first, last=last)
    # Each card keeps at least one KV head, so more cards than heads keep copies.
    copies = max(1.0, stage.tp / model.kv_heads)
    return int(free // (stage.layers * model.kv_bytes_per_token_layer * copies))


def _check(model: ModelShape, stages: Sequence[StageHardware], hops: Sequence[Hop] | None = None) -> None:
    if sum(stage.layers for stage in stages) != model.layers:
        raise ReplicaError(f"stages hold {[stage.layers for stage in stages]} layers; {model.name} has {model.layers}")
    for number, stage in enumerate(stages):
        if stage.layers < 1 or stage.tp < 1 or not stage.link_gbps > 0.0:
            raise ReplicaError(f"stage {number} has {stage.layers} layers, tp {stage.tp}, link {stage.link_gbps} Gb/s")
    wanted = len(stages) if len(stages) > 1 else 0
    if hops is not None and len(hops) != wanted:
        raise ReplicaError(
            f"{len(stages)} stages need {wanted} hops (from each to the next, and back); {len(hops)} given"
        )
    for number, hop in enumerate(hops or ()):
        if not (hop.gbps > 0.0 and hop.rtt_s >= 0.0):
            raise ReplicaError(f"hop {number} has {hop.gbps} Gb/s and a round trip of {hop.rtt_s} s")


class _PipelineTimes:
    """StepTimes of stages and hops, cached by batch size; equal stages are computed once."""

    def __init__(self, stages: Sequence[StageCost], hops: Sequence[Hop], token_bytes: int, source: str) -> None:
        token_s = [token_bytes * 8.0 / (hop.gbps * 1e9) for hop in hops]
        self.source = source
        self._size = len(stages)
        self._runs = [(stage, len(list(run))) for stage, run in groupby(stages)]
        # What a stage has computed goes ahead to the next; back to the first go only the numbers of sampled tokens.
        self._round_s = sum(hop.rtt_s / 2 for hop in hops)
        self._ahead_s = sum(hop.rtt_s / 2 for hop in hops[:-1])
        self._ahead_token_s = sum(token_s[:-1])
        self._slowest_hop_token_s = max(token_s[:-1], default=0.0)
        self._lines: dict[int, DecodeLine] = {}

    def prefill_s(self, tokens: int, pairs: float) -> float:
        seconds = self._ahead_s + self._ahead_token_s * tokens
        for stage, count in self._runs:
            seconds += count * stage.step_s(tokens, pairs, 0, 0.0)
        return seconds

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        seconds = self._slowest_hop_token_s * tokens
        for stage, _ in self._runs:
            seconds = max(seconds, stage.step_s(tokens, pairs, 0, 0.0))
        return seconds

    def decode_line(self, requests: int) -> DecodeLine:
        """Which of the two times is longer is decided at TYPICAL_CONTEXT."""
        line = self._lines.get(requests)
        if line is None:
            line = self._lines[requests] = self._decode_line(requests)
        return line

    def _decode_line(self, requests: int) -> DecodeLine:
        batches = self._batches(requests)
        lines = [(stage.decode_line(requests / batches), count) for stage, count in self._runs]
        through = DecodeLine(
            sum(line.fixed_s * count for line, count in lines)
            + self._round_s
            + self._ahead_token_s * requests / batches,
            sum(line.context_s * count for line, count in lines) / batches,
        )
        # All batches pass a stage one after the other, and with them all of the context.
        queues = [DecodeLine(batches * line.fixed_s, line.context_s) for line, _ in lines]
        typical = requests * TYPICAL_CONTEXT
        return max([through, *queues], key=lambda line: line.step_s(typical))

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        """The prompt's tokens travel with one batch in flight; the others pass as without."""
        batches = self._batches(requests)
        batch, held = requests / batches, context / batches
        through = self._round_s + self._ahead_token_s * (batch + tokens)
        slowest = 0.0
        for stage, count in self._runs:
            both = stage.step_s(tokens, pairs, batch, held)
            through += count * both
            if batches > 1:
                slowest = max(slowest, both + (batches - 1) * stage.step_s(0, 0.0, batch, held))
        return max(through, slowest)

    def _batches(self, requests: int) -> int:
        return max(1, min(self._size, requests))
