"""When each layer of a KV transfer was on its way, as its sender sees it: plain bookkeeping, told what happens."""

from __future__ import annotations

from typing import final

from ..protocol import MAX_LAYER_TIMES, LayerTimes


@final
class LayerMeter:
    """Of one transfer, for the given layers. The calls may come from several threads: each sets values of one layer
    only, and what it sets is never read but by `times`."""

    def __init__(self, layers: range) -> None:
        self._layers = layers
        self._sent_at: dict[int, float] = {}  # the first frame of each layer
        self._acknowledged_at: dict[int, float] = {}  # the last
        self._bytes: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<LayerMeter {len(self._acknowledged_at)} of {len(self._layers)} layers>"

    def on_sent(self, layer: int, size: int, now: float) -> None:
        """A frame of so many bytes is given to the link."""
        self._sent_at.setdefault(layer, now)
        self._bytes[layer] = self._bytes.get(layer, 0) + size

    def on_acknowledged(self, layer: int, now: float) -> None:
        """The receiver has a frame."""
        self._acknowledged_at[layer] = now

    def times(self) -> tuple[LayerTimes, ...]:
        """Of the layers that left, in their order; of many layers, several are told of together."""
        sent = sorted(set(self._sent_at) & set(self._acknowledged_at))
        if not sent:
            return ()
        first_at = min(self._sent_at.values())
        each = -(-len(sent) // MAX_LAYER_TIMES)
        groups = [sent[at : at + each] for at in range(0, len(sent), each)]
        return tuple(
            LayerTimes(
                first_layer=group[0],
                last_layer=group[-1] + 1,
                begin_s=min(self._sent_at[layer] for layer in group) - first_at,
                end_s=max(self._acknowledged_at[layer] for layer in group) - first_at,
                wire_bytes=sum(self._bytes[layer] for layer in group),
            )
            for group in groups
        )
