"""What can be wrong with a tensor handed to a codec, or with a payload handed back."""

from __future__ import annotations


class CodecError(ValueError):
    """A KV block cannot be encoded or decoded; names layer, tensor and position where known."""


class TensorError(CodecError):
    """The caller's tensors or geometry do not fit the codec (shape, dtype, emptiness, range)."""


class NonFiniteError(TensorError):
    """A value is NaN, infinite or too large to quantise; names layer, tensor and position."""


class PayloadError(CodecError):
    """The bytes are no payload of this format and geometry (length, version, dtype, parameters)."""
