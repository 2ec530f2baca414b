"""The Triton kernels without a GPU: in Triton's interpreter, and compiled for GPUs that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

DATA = Path(__file__).parent / "data"
ALIGNED = [["tt.divisibility", 16]]
BYTES = ("*u8",) * 4


def test_the_kernels_make_the_bytes_of_the_references() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "P2PSERVE_KERNELS": "eager", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-W", "ignore", str(DATA / "check_triton.py"), "cpu"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["kv4 fp8 kivi4"] * 12


def kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Kernel, types of its arguments, and its constants, for heads of 128."""
    from p2pserve.kernels import triton_fp8, triton_kivi4, triton_kv4

    flag = {"flag": "*i32"}
    columns = {"x": "*bf16", "zeros": "*bf16", "packed": "*u8", **flag, "columns": "i32"}
    keys = {"x": "*bf16", "zeros": "*bf16", "exponents": "*u8", "codes": "*u8", **flag, "tokens": "i32", "lead": "i32"}
    values = {"x": "*bf16", "exponents": "*u8", "codes": "*u8", **flag, "rows": "i32"}
    spans = {"shape": ("i32",) * 9}
    vectors = {"matrix": "*fp16", "vectors": "i32"}
    shape = triton_kv4._value_shape(128)
    found: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
    for name in ("_quantise", "_dequantise"):
        found[f"kivi4{name} K"] = getattr(triton_kivi4, name), {**columns, "inner": "i32"}, {"width": 32, "block": 64}
        found[f"kivi4{name} V"] = getattr(triton_kivi4, name), columns, {"inner": 1, "width": 32, "block": 64}
        found[f"fp8{name} K"] = getattr(triton_fp8, f"{name}_keys"), {**keys, "width": "i32"}, {"block": 64}
        found[f"fp8{name} V"] = getattr(triton_fp8, f"{name}_values"), values, {"width": 128, "block": 32}
        into = "into" if name == "_quantise" else "stored"
        part = {"x": "*bf16", into: ("*bf16", *BYTES, "*i32"), **spans}
        found[f"kv4{name} K"] = getattr(triton_kv4, f"{name}_keys"), part, {"block": 64}
        part = {"x": "*bf16", into: (*BYTES[1:], *(("*i32",) if into == "into" else ())), **vectors}
        found[f"kv4{name} V"] = getattr(triton_kv4, f"{name}_values"), part, {"shape": shape, "tiles": 8}
    return found


def wide(at: int, name: str, kind: Any) -> Iterator[tuple[int, ...]]:
    """Paths of the arguments that are multiples of 16 for ordinary heads: addresses and channels."""
    if isinstance(kind, tuple):
        yield from ((at, i) for i, part in enumerate(kind) if part[0] == "*" or (name, i) == ("shape", 2))
    elif kind is not None and (kind[0] == "*" or name in {"columns", "inner", "width", "vectors"}):
        yield (at,)


@pytest.mark.parametrize("architecture", [80])
def test_the_kernels_compile_for_gpus(architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes more than the compiler does. Shared memory must fit a consumer card's 99 KiB."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets in this process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, (kernel, types, constants) in kernels().items():
        signature = {key: types.get(key, "constexpr") for key in kernel.arg_names}
        aligned = {path: ALIGNED for at, key in enumerate(kernel.arg_names) for path in wide(at, key, types.get(key))}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        options = {"enable_fp_fusion": False, "num_stages": 1, "num_warps": 4 if "V" in name else 1}
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert "fma.rn.f32" not in compiled.asm["ptx"], f"{name}: a product and a sum were fused"
        assert "global.v4.b32" in compiled.asm["ptx"], f"{name}: neither wide loads nor wide stores"
        assert compiled.metadata.shared <= 99 * 1024, name
