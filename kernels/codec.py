"""Encode and decode a block of keys and values: all that engines call.

A block is `k` and `v` of shape `[tokens, heads, head_dim]`, token positions `[start, start +
tokens)` of a prompt. Payloads are little-endian and row-major; `raw`, `kv4`, `fp8` and `kivi4`
specify their formats bit for bit."""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from . import payload as payloads
from .blocks import require_finite, sixteen_bit
from .codecs import codec_named
from .errors import NonFiniteError, PayloadError, TensorError
from .format import BlockLayout, Codec, WireDtype, layout_of
from .soundness import SOUND, Soundness, on_device

_TORCH = {WireDtype.BF16: torch.bfloat16, WireDtype.FP16: torch.float16, WireDtype.FP32: torch.float32}
_WIRE = {dtype: wire for wire, dtype in _TORCH.items()}

_WARM_UP_TOKENS = (256, 257, 258, 260, 264)
"""Triton compiles anew where sections begin at multiples of 16 bytes and where they do not, which
depends on how often 2 divides the tokens."""
_WARM_UP_VECTORS = 65536
"""From so many on, a program of `kv4` takes several tiles of vectors."""


def torch_dtype(dtype: WireDtype) -> torch.dtype:
    """torch's name of a dtype."""
    return _TORCH[dtype]


def wire_dtype(dtype: torch.dtype) -> WireDtype:
    """What frames call a dtype. Raises TensorError."""
    try:
        return _WIRE[dtype]
    except KeyError:
        raise TensorError(f"dtype {dtype} is not supported; use bfloat16, float16 or float32") from None


def encode(codec: Codec | str, k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    """The payload of one block, in memory of its own. Waits for the device. Raises `NonFiniteError`
    for the first value that cannot be quantised."""
    codec = _known(codec)
    layout = _layout_for(codec, k, v, start, layer)
    out = torch.empty(layout.payload_bytes(wire_dtype(k.dtype)), dtype=torch.uint8, device=k.device)
    _encode_into(codec, k, v, out, layout, layer).raise_if_unsound()
    return out.cpu().numpy().data


def encode_into(
    codec: Codec | str, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, start: int, layer: int
) -> Soundness:
    """Write the payload of one block to `out`: contiguous bytes beside `k` and `v`, `payload_bytes`
    of them.

    On a GPU this only queues work on the current stream. The payload is void if its soundness
    raises `NonFiniteError`; until that is asked `k` and `v` must stay as they are."""
    codec = _known(codec)
    layout = _layout_for(codec, k, v, start, layer)
    _check_bytes(codec, out, k, layout, layer)
    return _encode_into(codec, k, v, out, layout, layer)


def decode(
    codec: Codec | str,
    payload: bytes | bytearray | memoryview | torch.Tensor,
    *,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    start: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(k, v)` of shape `[tokens, heads, head_dim]` in memory of their own, in the `dtype` that was
    encoded. A tensor of bytes is decoded on its device, and waited for."""
    codec = _known(codec)
    data = payload if isinstance(payload, torch.Tensor) else _as_tensor(payload)
    # The length before anything is made for it: numbers of a lying frame may ask for any amount of memory.
    layout = layout_of(codec, start, tokens, heads, head_dim)
    _check_length(codec, data, layout, dtype, layer)
    k, v = (torch.empty(tokens, heads, head_dim, dtype=dtype, device=data.device) for _ in range(2))
    _decode_into(codec, data, k, v, layout, layer).raise_if_unsound()
    return k, v


def decode_into(
    codec: Codec | str, payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int
) -> Soundness:
    """Fill `k` and `v`, contiguous `[tokens, heads, head_dim]`, from a payload on their device.

    A wrong length raises `PayloadError` at once; a corrupt payload when the soundness is asked. On
    a GPU this only queues work; until then leave the payload and do not use `k` and `v`."""
    codec = _known(codec)
    layout = _layout_for(codec, k, v, start, layer)
    _check_bytes(codec, payload, k, layout, layer)
    for name, tensor in (("K", k), ("V", v)):
        if not tensor.is_contiguous():
            raise TensorError(f"layer {layer}: {name} to decode into is not contiguous")
    return _decode_into(codec, payload, k, v, layout, layer)


def load_built(codec: Codec | str) -> None:
    """Have the code for CPUs that was built on this machine loaded, beside whatever goes on: before the first block."""
    native = _known(codec).native
    if native is not None:
        native().available()


def warm_up(codec: Codec | str, *, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what a GPU needs for blocks of any length of such heads (seconds), and make its
    constants."""
    codec = _known(codec)
    for tokens in (*_WARM_UP_TOKENS, -(-_WARM_UP_VECTORS // heads)):
        k, v = (torch.zeros(tokens, heads, head_dim, dtype=dtype, device=device) for _ in range(2))
        layout = _layout_for(codec, k, v, 256, 0)
        out = torch.empty(layout.payload_bytes(wire_dtype(dtype)), dtype=torch.uint8, device=device)
        _encode_into(codec, k, v, out, layout, 0).raise_if_unsound()
        _decode_into(codec, out, k, v, layout, 0).raise_if_unsound()


def _known(codec: Codec | str) -> Codec:
    return codec if isinstance(codec, Codec) else codec_named(codec)


def _encode_into(
    codec: Codec, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: BlockLayout, layer: int
) -> Soundness:
    if codec.reference is None:
        halves = out.view(k.dtype).view(2, *k.shape)
        halves[0].copy_(k, non_blocking=True)
        halves[1].copy_(v, non_blocking=True)
        return SOUND
    sixteen = sixteen_bit(k.dtype)
    with on_device(k.device):
        keys, values = k.to(sixteen), v.to(sixteen)
        unsound = payloads.encode(codec, keys, values, out, layout)

        def explain() -> NoReturn:
            require_finite(keys, "K", layout.start, codec, layer)
            require_finite(values, "V", layout.start, codec, layer)
            lost = "K or V had a value that was not finite or too large, and has been overwritten since"
            raise NonFiniteError(f"layer {layer}: {lost}; the {codec} payload is void")

        return Soundness.of(unsound, explain)


def _decode_into(
    codec: Codec, data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, layer: int
) -> Soundness:
    if codec.reference is None:
        for into, half in zip((k, v), data.chunk(2), strict=True):
            into.view(torch.uint8).view(-1).copy_(half, non_blocking=True)  # as bytes, at whatever address they are
        return SOUND
    sixteen = sixteen_bit(k.dtype)
    with on_device(k.device):
        keys, values = (x if x.dtype == sixteen else torch.empty_like(x, dtype=sixteen) for x in (k, v))
        unsound = payloads.decode(codec, data, keys, values, layout)
        if k.dtype != sixteen:
            k.copy_(keys)
            v.copy_(values)

        def explain() -> NoReturn:
            payloads.require_sound(codec, data, sixteen, layout, layer)
            raise PayloadError(f"layer {layer}: the {codec} payload was corrupt, and has been overwritten since")

        return Soundness.of(unsound, explain)


def _as_tensor(payload: bytes | bytearray | memoryview) -> torch.Tensor:
    """The bytes of a payload. Copied if read-only, or if at an odd address."""
    view = memoryview(payload).cast("B")
    if not view.readonly and view.nbytes:
        data = torch.frombuffer(view, dtype=torch.uint8)
        if data.data_ptr() % 2 == 0:
            return data
    data = torch.empty(view.nbytes, dtype=torch.uint8)
    data.numpy().data[:] = view
    return data


def _layout_for(codec: Codec, k: torch.Tensor, v: torch.Tensor, start: int, layer: int) -> BlockLayout:
    """The layout of the payload of two tensors, once they are found to be a block."""
    for name, tensor in (("K", k), ("V", v)):
        if tensor.dim() != 3:
            shape = list(tensor.shape)
            raise TensorError(f"layer {layer}: {name} is {shape}; expected [tokens, kv_heads, head_dim]")
        if math.prod(tensor.shape) == 0:
            raise TensorError(f"layer {layer}: {name} is empty, shape {tuple(tensor.shape)}")
    if k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
        shapes = f"K is {list(k.shape)} {k.dtype} on {k.device}, V is {list(v.shape)} {v.dtype} on {v.device}"
        raise TensorError(f"layer {layer}: {shapes}; they must agree")
    return layout_of(codec, start, *k.shape)


def _check_bytes(codec: Codec, data: torch.Tensor, k: torch.Tensor, layout: BlockLayout, layer: int) -> None:
    """Refuse what cannot be the memory of a payload of a block like `k`."""
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.device != k.device:
        found = f"{data.dtype} {list(data.shape)} on {data.device}"
        raise TensorError(f"layer {layer}: the payload's tensor is {found}; expected contiguous bytes on {k.device}")
    # Views as 16-bit values and wide loads need it.
    if data.storage_offset() % 16:
        at = f"byte {data.storage_offset()} of its storage"
        raise TensorError(f"layer {layer}: the payload's tensor begins at {at}; expected a multiple of 16")
    _check_length(codec, data, layout, k.dtype, layer)


def _check_length(codec: Codec, data: torch.Tensor, layout: BlockLayout, dtype: torch.dtype, layer: int) -> None:
    wire = wire_dtype(dtype)
    expected = layout.payload_bytes(wire)
    if data.numel() != expected:
        raise PayloadError(
            f"layer {layer}: {codec} of {layout.tokens} x {layout.heads} x {layout.head_dim} {wire.value} values from "
            f"position {layout.start} has {expected} bytes, this one has {data.numel()}"
        )
