"""`encode_into` and `decode_into`: what they write, when they tell, and that on a GPU they never
wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from p2pserve.kernels import payload as payloads
from p2pserve.kernels import soundness
from p2pserve.kernels.blocks import header
from p2pserve.kernels.codec import decode, decode_into, encode, encode_into, wire_dtype
from p2pserve.kernels.codecs import CODECS
from p2pserve.kernels.errors import CodecError, NonFiniteError, PayloadError, TensorError
from p2pserve.kernels.format import Codec, payload_bytes
from p2pserve.kernels.fp8 import FP8
from p2pserve.kernels.kivi4 import KIVI4
from p2pserve.kernels.kv4 import KV4
from p2pserve.kernels.raw import RAW

LOSSY = (KV4, FP8, KIVI4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Pair = tuple[torch.Tensor, torch.Tensor]


def block(tokens: int, dtype: torch.dtype) -> Pair:
    k, v = (torch.randn(tokens, 2, 64).to(dtype) for _ in range(2))
    return k, v


def bytes_for(codec: Codec, like: torch.Tensor, start: int) -> torch.Tensor:
    tokens, heads, head_dim = like.shape
    dtype = wire_dtype(like.dtype)
    size = payload_bytes(codec, dtype, start=start, tokens=tokens, heads=heads, head_dim=head_dim)
    return torch.empty(size, dtype=torch.uint8, device=like.device)


class TestOnTheHost:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("codec", CODECS, ids=str)
    def test_payloads_and_values_are_those_of_encode_and_decode(self, codec: Codec, dtype: torch.dtype) -> None:
        k, v = block(70, dtype)
        out = bytes_for(codec, k, 2)
        encode_into(codec, k, v, out, start=2, layer=0).raise_if_unsound()
        assert bytes(out.numpy()) == bytes(encode(codec, k, v, start=2, layer=0))
        into = torch.empty_like(k), torch.empty_like(v)
        decode_into(codec, out, *into, start=2, layer=0).raise_if_unsound()
        expected = decode_by_value(codec, out, k, 2)
        assert all(torch.equal(one, other) for one, other in zip(into, expected, strict=True))

    @pytest.mark.parametrize("codec", LOSSY, ids=str)
    def test_a_value_that_cannot_be_coded_is_told_when_asked(self, codec: Codec) -> None:
        k, v = block(70, torch.bfloat16)
        v[9, 1, 7] = float("nan")
        found = encode_into(codec, k, v, bytes_for(codec, k, 100), start=100, layer=5)
        with pytest.raises(NonFiniteError, match="layer 5: V is nan at position 109, head 1, channel 7"):
            found.raise_if_unsound()
        v.zero_()
        with pytest.raises(NonFiniteError, match=r"layer 5: K or V had a value .* overwritten since; the .* is void"):
            found.raise_if_unsound()

    @pytest.mark.parametrize("codec", LOSSY, ids=str)
    def test_a_corrupt_payload_is_told_when_asked(self, codec: Codec) -> None:
        k, v = block(70, torch.bfloat16)
        out = bytes_for(codec, k, 100)
        encode_into(codec, k, v, out, start=100, layer=0).raise_if_unsound()
        out[0] = 77
        found = decode_into(codec, out, k, v, start=100, layer=5)
        with pytest.raises(PayloadError, match=f"layer 5: {codec.name} version 77; this build reads"):
            found.raise_if_unsound()
        encode_into(codec, k, v, out, start=100, layer=0)
        with pytest.raises(PayloadError, match=r"layer 5: the .* was corrupt, and has been overwritten since"):
            found.raise_if_unsound()

    def test_memory_that_does_not_fit_is_refused(self) -> None:
        k, v = block(8, torch.bfloat16)
        right = bytes_for(RAW, k, 0)
        wide = torch.empty(right.numel() + 32, dtype=torch.uint8)
        for out, message in (
            (right[:-1], "layer 4: raw of 8 x 2 x 64 bf16 values from position 0 has 4096 bytes, this one has 4095"),
            (right.view(2, -1), "expected contiguous bytes on cpu"),
            (right.view(torch.int8), "is torch.int8"),
            (wide[8 : right.numel() + 8], "begins at byte 8 of its storage; expected a multiple of 16"),
        ):
            with pytest.raises(CodecError, match=message):
                encode_into("raw", k, v, out, start=0, layer=4)
            with pytest.raises(CodecError, match=message):
                decode_into("raw", out, k, v, start=0, layer=4)
        strided = torch.empty(8, 64, 2, dtype=torch.bfloat16).transpose(1, 2)
        with pytest.raises(TensorError, match="layer 4: V to decode into is not contiguous"):
            decode_into("raw", right, k, strided, start=0, layer=4)

    def test_a_header_is_made_once_for_each_device(self) -> None:
        made = header(3, torch.bfloat16, torch.device("cpu"))
        assert header(3, torch.bfloat16, torch.device("cpu")) is made
        assert header(3, torch.float16, torch.device("cpu")).tolist() == [3, 1, *bytes(14)]


def decode_by_value(name: Codec, payload: torch.Tensor, like: torch.Tensor, start: int) -> Pair:
    tokens, heads, head_dim = like.shape
    shape = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
    return decode(name, bytes(payload.numpy()), **shape, dtype=like.dtype, start=start, layer=0)


GPU = torch.device("meta")
"""Stands in for a GPU: its tensors have shapes and no values, so whatever would ask for one can be
seen.
"""


class Waited(Exception):
    """An operation would have waited for the GPU."""


class NoWaiting(TorchDispatchMode):
    """Refuse what waits for a GPU: asking for values, shapes that depend on them, copies to or
    from the host.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if asks and any(tensor.device == GPU for tensor in tensors):
            raise Waited(str(func))
        if func is torch.ops.aten._to_copy.default:
            source, into = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            if source == GPU != into and kwargs.get("non_blocking"):
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if source != into:
                raise Waited(f"{func} from {source} to {into}")
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            raise Waited(f"{func} from {args[1].device} to {args[0].device}")
        return func(*args, **kwargs)


class Launches:
    """Stands in for a Triton kernel: takes launches, and computes nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            self.count += 1

        return launch


class Moments:
    """Stands in for CUDA's events; says whether it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def record(self, device: torch.device) -> Moments:
        assert device == GPU
        return self

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Moments:
    found = Moments()
    monkeypatch.setattr(soundness, "record_moment", found.record)
    return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    pytest.importorskip("triton")
    from p2pserve.kernels.fp8 import triton as triton_fp8
    from p2pserve.kernels.kivi4 import triton as triton_kivi4
    from p2pserve.kernels.kv4 import triton as triton_kv4

    kernels = Launches()
    for module in (triton_kv4, triton_fp8, triton_kivi4):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, kernels)
    monkeypatch.setattr(payloads, "has_triton", lambda device: device == GPU)
    return kernels


class TestOnAGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("codec", CODECS, ids=str)
    def test_nothing_waits_before_the_verdict_is_asked(
        self,
        codec: Codec,
        dtype: torch.dtype,
        launches: Launches,
        moments: Moments,
    ) -> None:
        """From the start of a prompt (exempt tokens), from within groups (residual), and from a
        group on.
        """
        for start, tokens in ((0, 512), (37, 100), (256, 256), (0, 3)):
            k, v = (torch.empty(tokens, 2, 64, dtype=dtype, device=GPU) for _ in range(2))
            out = bytes_for(codec, k, start)
            with suppress(NotImplementedError):  # makes the constants; then there is nothing to read on this "GPU"
                encode_into(codec, k, v, out, start=start, layer=0)
            launches.count = 0
            with NoWaiting():
                found = encode_into(codec, k, v, out, start=start, layer=0)
                other = decode_into(codec, out, k, v, start=start, layer=0)
            coded = start != 0 or tokens > 3 or codec is FP8
            assert launches.count == (4 if coded and codec is not RAW else 0)
            assert moments.waited == 0
            with NoWaiting():  # what is asked then lies on the host
                found.raise_if_unsound()
                other.raise_if_unsound()
            assert moments.waited == (0 if codec is RAW else 2)
            moments.waited = 0

    @pytest.mark.parametrize(
        "action",
        [
            lambda x: bool(x.any()),
            lambda x: x.sum().item(),
            lambda x: x.tolist(),
            lambda x: x.cpu(),
            lambda x: x.to("cpu"),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: torch.ones(4).to(x.device),
            lambda x: torch.empty(4).copy_(x),
            lambda x: x.copy_(torch.empty(4)),
        ],
    )
    def test_what_waits_is_seen(self, action: Callable[[torch.Tensor], object]) -> None:
        """Or else the test above could not fail."""
        x = torch.empty(4, device=GPU)
        with NoWaiting(), pytest.raises(Waited):
            action(x)
