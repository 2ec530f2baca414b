"""Make vLLM and torch take this machine for one with GPUs, in a process of its own.

What asks the driver through NVML is answered; the extension modules of vLLM's CUDA build are empty; and what would
initialise CUDA fails and is noted: no child of a process that has initialised it can use it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType, SimpleNamespace
from typing import Any

GPU_MEMORY = 80 << 30
VLLM_BUILD = "0.32.0"

_NVML = "vllm.third_party.pynvml"
_TOUCHES_CUDA = "flashinfer"  # asks torch for a device's capability while it is imported
_EMPTY = {
    "flashinfer_cubin",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
}
# Operators of its extension that vLLM calls, and those that it only looks up, while it is imported.
_CALLED = (
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_sparse_scaled_mm_supported",
)
_LOOKED_UP = (
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_static_fp8_quant",
    "rotary_embedding",
    "silu_and_mul",
    "static_scaled_fp8_quant",
)


class Trap:
    """Stands for functions that initialise CUDA. `sprung`: who has called one, the innermost last."""

    def __init__(self) -> None:
        self.sprung: list[str] = []

    def set(self, name: str) -> Any:
        """A function that is never to be called."""

        def spring(*args: object) -> None:
            frames = traceback.extract_stack()[:-1]
            self.sprung.append(f"{name}: " + " > ".join(f"{frame.filename}:{frame.lineno}" for frame in frames[-12:]))
            raise RuntimeError(f"{name} would initialise CUDA")

        return spring


class _Build(Distribution):
    """vLLM's CUDA build, by which vLLM chooses its platform."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_BUILD}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class Installation(MetaPathFinder, Loader):
    """What a box with `gpus` of this compute capability has installed, and this machine has not."""

    def __init__(self, capability: tuple[int, int], gpus: int) -> None:
        self.capability = capability
        self.flashinfer = True
        self._gpus = gpus

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in _EMPTY or fullname == _NVML or (fullname == _TOUCHES_CUDA and self.flashinfer):
            return ModuleSpec(fullname, self)
        return None

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Found by `importlib.metadata` through `sys.meta_path`."""
        return [_Build()] if context.name == "vllm" else []

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _NVML:
            self._fill_nvml(module)
        elif module.__name__ == _TOUCHES_CUDA:
            import torch

            torch.cuda.get_device_capability(0)

    def _fill_nvml(self, module: Any) -> None:
        error = type("NVMLError", (Exception,), {})
        memory = SimpleNamespace(total=GPU_MEMORY, free=GPU_MEMORY, used=0)
        module.NVMLError = error
        module.NVMLError_NotSupported = type("NVMLError_NotSupported", (error,), {})
        module.NVMLError_LibraryNotFound = type("NVMLError_LibraryNotFound", (error,), {})
        module.nvmlInit = module.nvmlShutdown = lambda: None
        module.nvmlDeviceGetCount = lambda: self._gpus
        module.nvmlDeviceGetHandleByIndex = lambda index: index
        module.nvmlDeviceGetCudaComputeCapability = lambda handle: self.capability
        module.nvmlDeviceGetName = lambda handle: "NVIDIA mock"
        module.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
        module.nvmlDeviceGetMemoryInfo = lambda handle: memory
        module.nvmlSystemGetDriverVersion = lambda: "580.65.06"


def pretend(capability: tuple[int, int], gpus: int) -> tuple[Installation, Trap]:
    """To be called before vLLM is imported."""
    trap = Trap()
    installation = Installation(capability, gpus)
    sys.meta_path.insert(0, installation)
    import torch
    import torch._inductor  # while torch's build for CPUs is still one: it imports what that does not have

    handle: Any = torch
    handle.version.cuda = "13.0"
    handle._C._cuda_getDeviceCount = trap.set("cudaGetDeviceCount")
    handle._C._cuda_init = trap.set("cuInit")
    handle.cuda._cudart = object()  # else torch gives up before it comes to the two
    handle.cuda._device_count_nvml = lambda: gpus
    extension = torch.library.Library("_C", "FRAGMENT")
    for name in _CALLED:
        extension.define(f"{name}(int capability) -> bool")
        extension.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    for name in _LOOKED_UP:
        extension.define(f"{name}(Tensor value) -> Tensor")
    handle._mock_extension = extension  # its operators go with it
    return installation, trap
