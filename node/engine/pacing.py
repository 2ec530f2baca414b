"""When each prompt's KV leaves: layer by layer, in groups of layers, or in one piece. Decided from what this engine
has measured of itself and what its node predicts of the link; see `kvtransport.layerwise`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from ...kernels.format import Codec, WireDtype, payload_bytes
from ...kvtransport.figures import LinkFigures
from ...kvtransport.layerwise import KVShape, LayerwiseEstimator, Mode, SendMode
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

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: WireDtype) -> None:
        self._layers, self._heads, self._head_dim, self._dtype = layers, heads, head_dim, dtype
        self._lock = threading.Lock()
        self._estimators: dict[str, LayerwiseEstimator] = {}

    def __repr__(self) -> str:
        return f"<Pacer {self._estimators}>"

    def transfer(self, codec: str, tokens: int, outlet: Outlet) -> Pacing:
        """How to hand over a prompt of `tokens`."""
        streams = sum(path.streams for path in outlet.paths)
        link = LinkFigures(rtt_s=outlet.rtt_s, one_stream_gbps=outlet.gbps / max(1, streams), capacity_gbps=outlet.gbps)
        with self._lock:
            mode = self._estimator(codec).decide(tokens, link, streams)
        if outlet.pacing != "auto" and mode.mode.value != outlet.pacing:
            group = self._layers if outlet.pacing == "serialised" else 1
            mode = replace(mode, mode=SendMode(outlet.pacing), layers_per_group=group, why="asked for")
        return Pacing(mode, self, codec)

    def computed(self, codecs: set[str], tokens: int, seconds: float) -> None:
        """A step read `tokens` of prompts whose KV is pushed, and took so long without the hand-overs."""
        with self._lock:
            for codec in codecs:
                self._estimator(codec).on_prefill(tokens, seconds)

    def held_up(self, codec: str, seconds: float) -> None:
        """A hand-over has kept the engine for so long."""
        with self._lock:
            self._estimator(codec).on_hold_up(seconds)

    def encoded(self, codec: str, size: int, seconds: float) -> None:
        """A frame of `size` bytes took so long to encode."""
        with self._lock:
            self._estimator(codec).on_frame(size, seconds)

    def _estimator(self, codec: str) -> LayerwiseEstimator:
        known = self._estimators.get(codec)
        if known is None:
            size = payload_bytes(
                Codec(codec), self._dtype, start=0, tokens=_TYPICAL_TOKENS, heads=self._heads, head_dim=self._head_dim
            )
            known = self._estimators[codec] = LayerwiseEstimator(KVShape(self._layers, size / _TYPICAL_TOKENS))
        return known
