"""Compare the codecs by Triton with the plain torch references, byte for byte: `python check_triton.py DEVICE`.

On a CPU this runs in Triton's interpreter, which TRITON_INTERPRET=1 must have chosen before Triton is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock, patch

import torch

from p2pserve.kernels import payload as payloads
from p2pserve.kernels import soundness
from p2pserve.kernels.codec import decode_into, encode, encode_into
from p2pserve.kernels.errors import CodecError
from p2pserve.kernels.fp8.layout import Fp8Layout
from p2pserve.kernels.fp8.reference import Fp8Sections
from p2pserve.kernels.kivi4.layout import Kivi4Layout
from p2pserve.kernels.kivi4.reference import Kivi4Sections
from p2pserve.kernels.kv4.layout import Kv4Layout
from p2pserve.kernels.kv4.reference import Kv4Sections

# tokens, heads, head_dim, start
GEOMETRIES = (
    (64, 1, 64, 0),
    (70, 1, 80, 5),
    (36, 1, 96, 31),
    (33, 1, 128, 7),
    (34, 1, 256, 100),
    (150, 1, 16, 250),
)
CHUNKS = {torch.bfloat16: (5, 1, 288, 300), torch.float16: (6, 1, 144, 300)}
"""Heads of which V is coded run by run or group by group (as 256 is): in one dtype each, as they take long."""
BAD = (float("nan"), -float("inf"), 2.0**121)
CODECS = ("kv4", "fp8", "kivi4")


def block(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels and tokens of very different size, constant ones, zeros of both signs."""
    rng = torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(tokens, heads, head_dim, generator=rng) for _ in range(2))
    k = k * 3 + 20 * torch.randn(heads, head_dim, generator=rng)
    v = v * torch.exp(2 * torch.randn(tokens, heads, 1, generator=rng))
    k[:, 0, 1], k[:, :, 2] = 2.5, k[:, :, 2] * 1e-6
    v[0], v[-1, 0], v[tokens // 2] = 0.0, -3.0, v[tokens // 2] * 1e-7
    v[tokens // 2, 0, 3] = -0.0
    return k.to(dtype), v.to(dtype)


def check(device: str, dtype: torch.dtype, geometry: tuple[int, int, int, int]) -> Iterator[str]:
    """One name for each codec that agrees; AssertionError for the first that does not."""
    tokens, heads, head_dim, start = geometry
    k, v = block(tokens, heads, head_dim, dtype)
    for codec in CODECS:
        payload = torch.frombuffer(bytearray(encode(codec, k, v, start=start, layer=3)), dtype=torch.uint8)
        plain = decoded(codec, payload, k, start)
        with triton_on(device):
            got = torch.zeros_like(payload, device=device)
            encode_into(codec, k.to(device), v.to(device), got, start=start, layer=3).raise_if_unsound()
            values = decoded(codec, got, k, start)
        assert torch.equal(got.cpu(), payload), f"{codec} {dtype} {geometry}: other bytes"
        for name, one, other in zip("KV", plain, values, strict=True):
            assert torch.equal(one, other.cpu()), f"{codec} {dtype} {geometry}: other values of {name}"
        if tokens == 64:  # which is enough
            check_what_is_unsound(codec, device, (k, v), payload, start)
        yield codec


def check_what_is_unsound(
    codec: str, device: str, pair: tuple[torch.Tensor, torch.Tensor], payload: torch.Tensor, start: int
) -> None:
    """Kernels and references say the same of values that cannot be coded and of payloads that no encoder writes."""
    for bad in BAD:
        for which in range(2):
            k, v = (x.clone() for x in pair)
            (k, v)[which][6, -1, -1] = bad  # 2**121 is infinite in fp16
            with triton_on(device):
                out = torch.zeros_like(payload, device=device)
                found = encode_into(codec, k.to(device), v.to(device), out, start=start, layer=3)
                text = message(found.raise_if_unsound)
            assert text == message(partial(encode, codec, k, v, start=start, layer=3)), text
    for corrupt in corrupted(codec, payload, pair[0], start):
        with triton_on(device):
            text = message(partial(decoded, codec, corrupt.to(device), pair[0], start))
        assert text == message(partial(decoded, codec, corrupt, pair[0], start)), text


def corrupted(codec: str, payload: torch.Tensor, like: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
    """Copies of a payload, each with one parameter or byte of the header that no encoder writes."""
    nan = float("nan")
    places: dict[str, list[tuple[str, float]]] = {
        "kv4": [("header", 9), ("exempt_values", nan), ("key_bases", nan)],
        "fp8": [("header", 9), ("key_zeros", nan), ("key_exponents", 251), ("value_exponents", 31)],
        "kivi4": [("header", 9), ("key_scales", -1.0), ("value_scales", nan), ("value_zeros", nan)],
    }
    for name, value in places[codec]:
        corrupt = payload.clone()
        if codec == "kv4":
            part = getattr(Kv4Sections.of(corrupt, Kv4Layout(start, *like.shape), like.dtype), name)
        elif codec == "fp8":
            part = getattr(Fp8Sections.of(corrupt, Fp8Layout(start, *like.shape), like.dtype), name)
        else:
            part = getattr(Kivi4Sections.of(corrupt, Kivi4Layout(start, *like.shape), like.dtype), name)
        part.view(-1)[-1] = value
        yield corrupt


def decoded(codec: str, payload: torch.Tensor, like: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.zeros(like.shape, dtype=like.dtype, device=payload.device) for _ in range(2))
    decode_into(codec, payload, k, v, start=start, layer=3).raise_if_unsound()
    return k, v


def message(action: Callable[[], object]) -> str:
    """What an action raises. AssertionError if it does not."""
    try:
        action()
    except CodecError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was taken for sound")


@contextmanager
def triton_on(device: str) -> Iterator[None]:
    """On a CPU, as if it were a GPU: the codecs use Triton, whose work is done at once."""
    if device != "cpu":
        yield
        return
    with (
        patch.object(payloads, "has_triton", lambda _: True),
        patch.object(soundness, "record_moment", Mock()),
    ):
        yield


def main() -> None:
    device = sys.argv[1]
    for dtype in (torch.bfloat16, torch.float16):
        for geometry in (*GEOMETRIES, CHUNKS[dtype]):
            sys.stdout.write(f"{' '.join(check(device, dtype, geometry))}\n")


if __name__ == "__main__":
    main()
