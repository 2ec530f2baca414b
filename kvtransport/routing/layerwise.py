"""Whether a prompt's KV should leave layer by layer while later layers compute, or all at once
after prefill.

Layer by layer hides the transfer behind prefill but costs something for each group of layers: the
engine is held up while a group of layers is taken from it, for some time whatever its size, and
each frame has a fixed price to encode and record. For small prompts that is more than what is
hidden. Nothing here is a constant: hold-up, frame and prefill costs are measured and decay, the
link is given as measured. For P seconds of prefill, L layers in G groups, B bytes, rate R, hold-up
h of a group (and H of all layers at once, which is less than G * h)::

    a group is ready every        c = P / G + h
    and takes in the pipeline     s = max(encode, B / (G * R)),  its first bytes min of the two more
    all has left after            max(c + G * s, G * c + s) + min(...)
    visible                       that - P + rtt

All at once is the same with one group, of hold-up H, after prefill, and L frames in the pipeline at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, isfinite
from typing import final

from ..errors import FiguresError
from ..probing.figures import LinkFigures, bytes_per_s, rate_gbps


class SendMode(StrEnum):
    """When KV leaves."""

    LAYERWISE = "layerwise"
    SERIALISED = "serialised"


@dataclass(frozen=True, slots=True)
class KVShape:
    """Of a model as it is sent: layers, and encoded bytes of one token's K and V in one layer."""

    layers: int
    bytes_per_token_layer: float

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise FiguresError(f"shape.layers is {self.layers}; it must be at least 1")
        if not (isfinite(self.bytes_per_token_layer) and self.bytes_per_token_layer > 0.0):
            raise FiguresError(f"shape.bytes_per_token_layer is {self.bytes_per_token_layer}; it must be positive")


@dataclass(frozen=True, slots=True)
class SendDecision:
    """What to do with one prompt, and the seconds either adds to its first token.
    `layers_per_group`: layers that leave together; all when all at once."""

    mode: SendMode
    layers_per_group: int
    visible_layerwise_s: float
    visible_serialised_s: float
    why: str


@dataclass(slots=True)
class DecayedLine:
    """y = fixed + slope * x by least squares; weights halve every `half_life` samples."""

    keep: float
    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n = self.n * self.keep + 1.0
        self.x = self.x * self.keep + x
        self.y = self.y * self.keep + y
        self.xx = self.xx * self.keep + x * x
        self.xy = self.xy * self.keep + x * y

    def fit(self) -> tuple[float, float]:
        """Fixed part and slope, neither negative; all slope while only one x has been seen."""
        spread = self.n * self.xx - self.x * self.x
        if spread <= 1e-9 * self.n * self.xx:
            return 0.0, self.y / self.x if self.x else 0.0
        slope = (self.n * self.xy - self.x * self.y) / spread
        fixed = (self.y - slope * self.x) / self.n
        if slope < 0.0:
            return self.y / self.n, 0.0
        if fixed < 0.0:
            return 0.0, self.xy / self.xx
        return fixed, slope


@final
class LayerwiseEstimator:
    """Of one engine. A measurement's weight halves every `half_life` of its kind."""

    def __init__(self, shape: KVShape, *, half_life: float = 64.0) -> None:
        if not (isfinite(half_life) and half_life > 0.0):
            raise FiguresError(f"layerwise.half_life is {half_life}; it must be positive")
        self.shape = shape
        keep = 0.5 ** (1.0 / half_life)
        self._prefill, self._frames, self._hold_ups = DecayedLine(keep), DecayedLine(keep), DecayedLine(keep)

    def __repr__(self) -> str:
        if missing := self._missing():
            return f"<LayerwiseEstimator, not measured yet: {missing}>"
        (base, token), (frame, byte), (hold_up, value) = self._prefill.fit(), self._frames.fit(), self._hold_ups.fit()
        return (
            f"<LayerwiseEstimator prefill {base * 1e3:.2f} ms + {token * 1e6:.1f} us/token, frame {frame * 1e6:.0f} us "
            f"+ {byte * 1e9:.3f} ns/byte, hold-up {hold_up * 1e6:.0f} us + {value * 1e6:.3f} us/token and layer>"
        )

    def on_prefill(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took so long, not counting the hold-ups."""
        self._prefill.add(_positive("prefill.tokens", tokens), _duration("prefill.seconds", seconds))

    def on_frame(self, payload_bytes: int, seconds: float) -> None:
        """To encode one frame and record it for sending took so long."""
        self._frames.add(_positive("frame.payload_bytes", payload_bytes), _duration("frame.seconds", seconds))

    def on_hold_up(self, tokens: int, layers: int, seconds: float) -> None:
        """Taking so many tokens of a group of layers held the engine up for so long."""
        size = _positive("hold_up.tokens", tokens) * _positive("hold_up.layers", layers)
        self._hold_ups.add(size, _duration("hold_up.seconds", seconds))

    def decide(self, tokens: int, link: LinkFigures, streams: int) -> SendDecision:
        """How to send the KV of a prompt of so many tokens over this link with so many streams."""
        _positive("decide.tokens", tokens)
        if missing := self._missing():
            # Layer by layer measures all of it; all at once would never show what a group costs.
            return SendDecision(SendMode.LAYERWISE, 1, inf, inf, f"not measured yet: {missing}")
        rate = bytes_per_s(rate_gbps(link, streams))
        if rate <= 0.0:
            return SendDecision(SendMode.SERIALISED, self.shape.layers, inf, inf, "the link moves nothing")
        whole = self._serialised_s(tokens, rate) + link.rtt_s
        groups = _group_sizes(self.shape.layers)
        seconds, size = min((self._layerwise_s(tokens, rate, size) + link.rtt_s, size) for size in groups)
        prefill = self.prefill_s(tokens)
        transfer = tokens * self.shape.layers * self.shape.bytes_per_token_layer / rate
        why = (
            f"prefill {prefill * 1e3:.1f} ms, bytes on the link {transfer * 1e3:.1f} ms, "
            f"hold-up {self._hold_up(tokens, size) * 1e3:.2f} ms x {ceil(self.shape.layers / size)}"
        )
        if seconds < whole:
            return SendDecision(SendMode.LAYERWISE, size, seconds, whole, why)
        return SendDecision(SendMode.SERIALISED, self.shape.layers, seconds, whole, why)

    def prefill_s(self, tokens: int) -> float:
        """How long a prefill of so many tokens takes, as measured; 0 before the first."""
        fixed, token = self._prefill.fit()
        return fixed + token * tokens

    def held_up_s(self, tokens: int, size: int) -> float:
        """How long the engine is held up in all by taking that prompt in groups of `size` layers."""
        return ceil(self.shape.layers / size) * self._hold_up(tokens, size)

    def _layerwise_s(self, tokens: int, rate: float, size: int) -> float:
        layers = self.shape.layers
        groups = ceil(layers / size)
        prefill = self.prefill_s(tokens)
        ready = prefill / groups + self._hold_up(tokens, size)
        encode = self._encode_s(tokens) * layers / groups
        send = tokens * layers * self.shape.bytes_per_token_layer / groups / rate
        stage = max(encode, send)
        return max(ready + groups * stage, groups * ready + stage) + min(encode, send) / size - prefill

    def _serialised_s(self, tokens: int, rate: float) -> float:
        encode = self._encode_s(tokens)
        send = tokens * self.shape.bytes_per_token_layer / rate
        return self._hold_up(tokens, self.shape.layers) + self.shape.layers * max(encode, send) + min(encode, send)

    def _encode_s(self, tokens: int) -> float:
        fixed, byte = self._frames.fit()
        return fixed + byte * tokens * self.shape.bytes_per_token_layer

    def _hold_up(self, tokens: int, layers: int) -> float:
        fixed, value = self._hold_ups.fit()
        return fixed + value * tokens * layers

    def _missing(self) -> str:
        kinds = (("prefill", self._prefill), ("frames", self._frames), ("hold-ups", self._hold_ups))
        return ", ".join(name for name, line in kinds if not line.n)


def _group_sizes(layers: int) -> list[int]:
    """1, 2, 4, ... layers at once, always at least two groups: one would be all at once."""
    return [1 << power for power in range(layers.bit_length()) if 1 << power < layers] or [1]


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise FiguresError(f"{name} is {value}; it must be at least 1")
    return value


def _duration(name: str, seconds: float) -> float:
    if not (isfinite(seconds) and seconds >= 0.0):
        raise FiguresError(f"{name} is {seconds}; it must not be negative")
    return seconds
