"""The unit in which KV travels: keys and values of one layer, some heads and some tokens.

Ranges are half-open: heads `[head_first, head_last)` of the whole model, token positions `[start,
start + tokens)` of the prompt. So a frame means the same whatever tensor or pipeline parallelism
either side runs. Its bytes on the wire are in `signals`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.codecs import codec_from_wire
from ...kernels.errors import PayloadError
from ...kernels.format import dtype_from_wire
from ..errors import KVProtocolError

MAX_REASON_BYTES = 512
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024 - 64
"""What a frame may make its receiver reserve."""

_U16 = (1 << 16) - 1
_MAX_HEAD_DIM = 1024
_MAX_POSITION = 1 << 31


@dataclass(frozen=True, slots=True)
class KVFrame:
    """Keys and values of one layer, some heads and some tokens. `payload` is what `kernels.codec`
    wrote; it is not copied."""

    layer: int
    head_first: int
    head_last: int
    start: int
    tokens: int
    codec: int
    dtype: int
    head_dim: int
    payload: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        _bounded("layer", self.layer, 0, _U16)
        _bounded("head_last", self.head_last, 1, _U16)
        _bounded("head_first", self.head_first, 0, self.head_last - 1)
        _bounded("tokens", self.tokens, 1, _MAX_POSITION)
        _bounded("start", self.start, 0, _MAX_POSITION - self.tokens)
        _bounded("head_dim", self.head_dim, 1, _MAX_HEAD_DIM)
        _bounded("payload length", memoryview(self.payload).nbytes, 1, MAX_PAYLOAD_BYTES)
        try:
            codec_from_wire(self.codec)
            dtype_from_wire(self.dtype)
        except PayloadError as error:
            raise KVProtocolError(f"KV frame of layer {self.layer}: {error}") from error

    @property
    def heads(self) -> int:
        return self.head_last - self.head_first

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def __repr__(self) -> str:
        return (
            f"KVFrame(layer={self.layer}, heads=[{self.head_first}, {self.head_last}), "
            f"tokens=[{self.start}, {self.end}), codec={self.codec}, dtype={self.dtype}, "
            f"head_dim={self.head_dim}, {memoryview(self.payload).nbytes} bytes)"
        )


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise KVProtocolError(f"{name} is {value}, outside {low}..{high}")
