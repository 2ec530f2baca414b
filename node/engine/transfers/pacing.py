"""When each prompt's KV leaves: layer by layer, in groups of layers, or all at once. Decided from what this engine
has measured of itself and what its node predicts of the link; see `kvtransport.layerwise`.

Layers that leave early are there sooner for the second token of an answer, and make both wait: the threads that read,
encode and send share the interpreter with the model, and where it computes on a CPU its cores and its memory. What
leaves all at once does so when the first token has left. So the engine measures prefills of both kinds, and takes the
way that makes the first two tokens wait less, together.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from ....kernels.codec import wire_dtype
from ....kernels.codecs import codec_named
from ....kernels.format import payload_bytes
from ....kvtransport.probing.figures import LinkFigures
from ....kvtransport.routing.layerwise import KVShape, LayerwiseEstimator, SendDecision, SendMode
from ..protocol import Outlet
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..vllm.layout import Shard

_TYPICAL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Pacing:
    """How one transfer's layers are sent."""

    mode: SendDecision
    _pacer: Pacer
    codec: str

    @property
    def layerwise(self) -> bool:
        """Whether layers leave while later ones are being computed."""
        return self.mode.mode is SendMode.LAYERWISE

    def layers_due(self, position: int, layers: int) -> range:
        """The layers, by position, to send once the one at `position` of `layers` has been computed."""
        group = self.mode.layers_per_group
        first = position // group * group
        last = min(first + group, layers) - 1
        return range(first, last + 1) if self.layerwise and position == last else range(0)

    def on_frame(self, size: int, seconds: float) -> None:
        """A frame of `size` bytes took so long to encode."""
        self._pacer.on_frame(self.codec, size, seconds)


@final
class SlowDown:
    """By how much prefills take longer while layers leave."""

    def __init__(self, settings: TransferSettings) -> None:
        self._enough, self._changed = settings.prefills_enough, settings.changed
        self._prefills = {mode: deque[tuple[int, float]](maxlen=settings.prefills_kept) for mode in SendMode}

    def __repr__(self) -> str:
        return f"<SlowDown {', '.join(f'{len(each)} {mode.value}' for mode, each in self._prefills.items())}>"

    def on_prefill(self, mode: SendMode, tokens: int, seconds: float) -> None:
        """One of so many tokens, with KV to send in this mode, took so long."""
        self._prefills[mode].append((tokens, seconds))

    def notice_change(self, mode: SendMode, usual_s: Callable[[int], float]) -> None:
        """Forget what is of another time, if prefills of this mode lately take much longer or shorter than before.
        Those of the other one, which was not tried since, would be compared with what else the machine does."""
        parts = [seconds / usual_s(tokens) for tokens, seconds in self._prefills[mode]]
        before, lately = parts[: -self._enough], parts[-self._enough :]
        if len(before) < self._enough:
            return
        change = statistics.median(lately) / statistics.median(before)
        if not 1 / self._changed < change < self._changed:
            kept = list(self._prefills[mode])[-self._enough :]
            for prefills in self._prefills.values():
                prefills.clear()
            self._prefills[mode].extend(kept)

    @property
    def unmeasured_mode(self) -> SendMode | None:
        """The mode of which too few prefills have been seen to compare the two."""
        fewest = min(SendMode, key=lambda mode: len(self._prefills[mode]))
        return fewest if len(self._prefills[fewest]) < self._enough else None

    def fraction(self, usual_s: Callable[[int], float]) -> float:
        """What is added to a prefill, as a part of what it usually takes for its number of tokens; both modes must have
        been seen. Medians, because on a busy machine, or after a pause, any prefill may take several times as long."""
        slower, alone = (
            statistics.median(seconds / usual_s(tokens) for tokens, seconds in self._prefills[mode])
            for mode in (SendMode.LAYERWISE, SendMode.SERIALISED)
        )
        return max(0.0, slower - alone)


class Pacer:
    """What one engine has measured, for all its transfers. Used by several threads."""

    def __init__(self, shard: Shard, settings: TransferSettings = TRANSFER_DEFAULTS) -> None:
        self._shard = shard
        self._settings = settings
        self._lock = threading.Lock()
        self._estimators: dict[str, LayerwiseEstimator] = {}
        self._slow_downs: dict[str, SlowDown] = {}

    def __repr__(self) -> str:
        return f"<Pacer {self._estimators}>"

    def decide(self, codec: str, tokens: int, outlet: Outlet) -> Pacing:
        """How to send a prompt of `tokens`. Estimated is all that this worker has of it: a link that carries half
        of that is as good as one that is twice as fast."""
        streams = sum(path.streams for path in outlet.paths)
        carried = len(outlet.slice.layers) * len(outlet.slice.heads)
        gbps = outlet.gbps * len(self._shard.layers) * len(self._shard.heads) / carried
        link = LinkFigures(rtt_s=outlet.rtt_s, one_stream_gbps=gbps / max(1, streams), capacity_gbps=gbps)
        with self._lock:
            mode = self._slowed_down(codec, tokens, self._estimator(codec).decide(tokens, link, streams))
        if outlet.pacing != "auto" and mode.mode.value != outlet.pacing:
            group = len(self._shard.layers) if outlet.pacing == "serialised" else 1
            mode = replace(mode, mode=SendMode(outlet.pacing), layers_per_group=group, why="asked for")
        return Pacing(mode, self, codec)

    def on_prefill(self, pacings: Sequence[Pacing], tokens: int, seconds: float) -> None:
        """A step read `tokens` of prompts whose KV is pushed like this, and took so long, sending not counted."""
        layerwise = any(pacing.layerwise for pacing in pacings)
        with self._lock:
            for codec in {pacing.codec for pacing in pacings}:
                self._estimator(codec).on_prefill(tokens, seconds)
                slow_down = self._slow_downs.setdefault(codec, SlowDown(self._settings))
                mode = SendMode.LAYERWISE if layerwise else SendMode.SERIALISED
                slow_down.on_prefill(mode, tokens, seconds)
                slow_down.notice_change(mode, self._estimator(codec).prefill_s)

    def on_hold_up(self, codec: str, tokens: int, layers: int, seconds: float) -> None:
        """Announcing `tokens` positions of so many layers has kept the engine for so long."""
        with self._lock:
            self._estimator(codec).on_hold_up(tokens, layers, seconds)

    def on_frame(self, codec: str, size: int, seconds: float) -> None:
        """A frame of `size` bytes took so long to encode."""
        with self._lock:
            self._estimator(codec).on_frame(size, seconds)

    def _slowed_down(self, codec: str, tokens: int, mode: SendDecision) -> SendDecision:
        """With what leaving layer by layer costs the prefill. Until that is known both ways are taken in turn."""
        slow_down, estimator = self._slow_downs.get(codec), self._estimator(codec)
        if mode.mode is SendMode.SERIALISED or slow_down is None:
            return mode
        whole = replace(mode, mode=SendMode.SERIALISED, layers_per_group=estimator.shape.layers)
        unmeasured = slow_down.unmeasured_mode
        if unmeasured is not None:
            why = f"not measured yet: prefills {unmeasured.value}"
            return replace(mode if unmeasured is SendMode.LAYERWISE else whole, why=why)
        slower_s = slow_down.fraction(estimator.prefill_s) * estimator.prefill_s(tokens)
        first_s = estimator.held_up_s(tokens, mode.layers_per_group) + slower_s
        visible_s = mode.visible_layerwise_s + slower_s
        chosen = mode if first_s + visible_s < mode.visible_serialised_s else whole
        why = f"{mode.why}, slowed down by {slower_s * 1e3:.1f} ms"
        return replace(chosen, visible_layerwise_s=visible_s, why=why)

    def _estimator(self, codec: str) -> LayerwiseEstimator:
        known = self._estimators.get(codec)
        if known is None:
            shard = self._shard
            size = payload_bytes(
                codec_named(codec),
                wire_dtype(shard.dtype),
                start=0,
                tokens=_TYPICAL_TOKENS,
                heads=len(shard.heads),
                head_dim=shard.head_dim,
            )
            known = self._estimators[codec] = LayerwiseEstimator(KVShape(len(shard.layers), size / _TYPICAL_TOKENS))
        return known
