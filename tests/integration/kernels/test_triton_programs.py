"""The Triton kernels without a GPU, in processes of Triton's: in its interpreter, and compiled for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.beside

CHECK = Path(__file__).parents[2] / "unit" / "kernels" / "data" / "check_triton.py"
ALIGNED = [["tt.divisibility", 16]]


def test_the_kernels_make_the_bytes_of_the_references() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "P2PSERVE_KERNELS": "eager", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-W", "ignore", str(CHECK), "cpu"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["kv4 fp8 kivi4"] * 14


def kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Kernel, types of its arguments, and its constants, for heads of 128, and `kv4`'s for V of
    288 too.
    """
    from p2pserve.kernels.fp8 import triton as triton_fp8
    from p2pserve.kernels.kivi4 import triton as triton_kivi4
    from p2pserve.kernels.kv4 import triton as triton_kv4

    columns = {"x": "*bf16", "zeros": "*bf16", "packed": "*u8", "flag": "*i32", "columns": "i32"}
    rows = dict.fromkeys(("coded", "lead", "code_first", "code_stop", "width"), "i32")
    found: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
    for name, into in (("quantise", "into"), ("dequantise", "stored")):
        kernel = getattr(triton_kivi4, f"{name}_kernel")
        found[f"kivi4 {name} K"] = kernel, {**columns, "inner": "i32"}, {"width": 32, "block": 64}
        found[f"kivi4 {name} V"] = kernel, columns, {"inner": 1, "width": 32, "block": 64}
        part = {"x": "*bf16", into: ("*bf16", "*u8", "*u8", "*i32"), "tokens": "i32", "lead": "i32", "width": "i32"}
        found[f"fp8 {name} K"] = getattr(triton_fp8, f"{name}_keys_kernel"), part, {"block": 64}
        part = {"x": "*bf16", into: ("*u8", "*u8", "*i32"), "rows": "i32"}
        found[f"fp8 {name} V"] = getattr(triton_fp8, f"{name}_values_kernel"), part, {"width": 128, "block": 32}
        part = {"x": "*bf16", into: ("*bf16", *["*u8"] * 4, "*i32"), **rows}
        found[f"kv4 {name} K"] = getattr(triton_kv4, f"{name}_keys_kernel"), part, {"block": 64}
        flag = ["*i32"] if into == "into" else []
        part = {"x": "*bf16", into: (*["*u8"] * 3, *flag), "matrix": "*fp16", "vectors": "i32"}
        for head_dim in (128, 288):
            constants = {"shape": triton_kv4.value_shape(head_dim), "tiles": 8}
            found[f"kv4 {name} V {head_dim}"] = getattr(triton_kv4, f"{name}_values_kernel"), part, constants
    return found


def wide(at: int, name: str, kind: Any) -> Iterator[tuple[int, ...]]:
    """Paths of the arguments that are multiples of 16 for ordinary heads: addresses and channels."""
    if isinstance(kind, tuple):
        yield from ((at, i) for i, part in enumerate(kind) if part[0] == "*")
    elif kind is not None and (kind[0] == "*" or name in {"columns", "inner", "width", "vectors"}):
        yield (at,)


SHARED_KIB = {80: 163, 86: 99, 90: 227}
"""What a block of threads may have of an A100, of consumer cards from 3090 to 4090, and of an H100.
"""

MOST_STACK_BYTES = 128
"""Of a thread: spilled registers. `kv4` spills 80 bytes where it codes K, the others nothing."""


@pytest.mark.parametrize("architecture", SHARED_KIB)
def test_the_kernels_compile_for_gpus(architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes more than the compiler does."""
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
        assert compiled.metadata.shared <= SHARED_KIB[architecture] * 1024, name
        assert stack_bytes(compiled.asm["cubin"], tmp_path) <= MOST_STACK_BYTES, f"{name}: registers are spilled"


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory of a thread, as the tool that comes with Triton tells it."""
    from triton.backends import nvidia

    (folder / "kernel.cubin").write_bytes(cubin)
    tool = str(Path(nvidia.__path__[0]) / "bin" / "cuobjdump")
    told = subprocess.run(
        [tool, "-res-usage", str(folder / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", told.stdout)
    assert found is not None, told.stdout
    return int(found[1]) + int(found[2])
