"""When each prompt's KV leaves: layer by layer, in groups of layers, or in one piece. Decided from what this engine
has measured of itself and what its node predicts of the link; see `kvtransport.layerwise`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from ...kernels.codec import wire_dtype
from ...kernels.format import Codec, payload_bytes
from ...kvtransport.figures import LinkFigures
from ...kvtransport.layerwise import KVShape, LayerwiseEstimator, Mode, SendMode
from .layout import Shard
from .protocol import Outlet

_TYPICAL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Pacing:
    """How one transfer's layers are handed over."""

    mode: Mode
    _pacer: Pacer
    _codec: str

    @property
    def layerwise(self) -> bool:
        """Whether layers leave while later ones are being computed."""
        return self.mode.mode is SendMode.LAYERWISE

    def due(self, position: int, layers: int) -> range:
        """The layers, by position, to hand over once the one at `position` of `layers` has been computed."""
        group = self.mode.layers_per_group
        first = position // group * group
        last = min(first + group, layers) - 1
        return range(first, last + 1) if self.layerwise and position == last else range(0)

    def encoded(self, size: int, seconds: float) -> None:
        """A frame of `size` bytes took so long to encode."""
        self._pacer.encoded(self._codec, size, seconds)


class Pacer:
    """What one engine has measured, for all its transfers. Used by several threads."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._lock = threading.Lock()
        self._estimators: dict[str, LayerwiseEstimator] = {}

    def __repr__(self) -> str:
        return f"<Pacer {self._estimators}>"

    def transfer(self, codec: str, tokens: int, outlet: Outlet) -> Pacing:
        """How to hand over a prompt of `tokens`. Estimated is all that this worker has of it: a link that carries half
        of that is as good as one that is twice as fast."""
        streams = sum(path.streams for path in outlet.paths)
        carried = len(outlet.slice.layers) * len(outlet.slice.heads)
        gbps = outlet.gbps * len(self._shard.layers) * len(self._shard.heads) / carried
        link = LinkFigures(rtt_s=outlet.rtt_s, one_stream_gbps=gbps / max(1, streams), capacity_gbps=gbps)
        with self._lock:
            mode = self._estimator(codec).decide(tokens, link, streams)
        if outlet.pacing != "auto" and mode.mode.value != outlet.pacing:
            group = len(self._shard.layers) if outlet.pacing == "serialised" else 1
            mode = replace(mode, mode=SendMode(outlet.pacing), layers_per_group=group, why="asked for")
        return Pacing(mode, self, codec)

    def computed(self, codecs: set[str], tokens: int, seconds: float) -> None:
        """A step read `tokens` of prompts whose KV is pushed, and took so long without the hand-overs."""
        with self._lock:
            for codec in codecs:
                self._estimator(codec).on_prefill(tokens, seconds)

    def held_up(self, codec: str, tokens: int, layers: int, seconds: float) -> None:
        """A hand-over of `tokens` positions of so many layers has kept the engine for so long."""
        with self._lock:
            self._estimator(codec).on_hold_up(tokens, layers, seconds)

    def encoded(self, codec: str, size: int, seconds: float) -> None:
        """A frame of `size` bytes took so long to encode."""
        with self._lock:
            self._estimator(codec).on_frame(size, seconds)

    def _estimator(self, codec: str) -> LayerwiseEstimator:
        known = self._estimators.get(codec)
        if known is None:
            shard = self._shard
            size = payload_bytes(
                Codec(codec),
                wire_dtype(shard.dtype),
                start=0,
                tokens=_TYPICAL_TOKENS,
                heads=len(shard.heads),
                head_dim=shard.head_dim,
            )
            known = self._estimators[codec] = LayerwiseEstimator(KVShape(len(shard.layers), size / _TYPICAL_TOKENS))
        return known
