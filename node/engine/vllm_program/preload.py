"""What a fork server does once for all vLLM engines that it forks. No torch operation runs here, and no CUDA."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any, Final

from ..gpus import has_gpu
from .sampling import check_fields

# What vLLM, torch and transformers import where it is installed, and serving text on a CPU does without: 160 MB.
LEFT_OUT_ON_CPU: Final = ("cv2", "grpc", "opentelemetry", "scipy", "triton")
# What `import vllm` imports to change a list of it, of no use to an engine that compiles nothing: 50 MB. Models that
# need it import it later.
_NOT_YET_ON_CPU: Final = ("torch._inductor.lowering",)
# What vLLM imports only while it builds an engine: most of a second in each of them.
_IMPORTED_LATE = (
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.renderers.hf",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.pool.flash_maxsim",
)
# The same on a GPU, without what imports FlashInfer (its attention backend, the compiler's passes): that initialises
# CUDA (`capability`).
_IMPORTED_LATE_ON_CUDA = (
    "vllm.compilation.caching",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.model_states.default",
    "vllm.v1.worker.gpu_worker",
)


def preload() -> str:
    """In the fork server: import everything an engine needs and return vLLM's version. Raises ImportError, also
    for a release whose sampling parameters are not known."""
    if not has_gpu():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # CPU engines run eagerly: what vLLM still marks to be compiled, too
        leave_out((*LEFT_OUT_ON_CPU, *_NOT_YET_ON_CPU))
    import vllm
    import vllm.engine.arg_utils
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.registry
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    late = _IMPORTED_LATE if current_platform.is_cpu() else (*_IMPORTED_LATE, *_IMPORTED_LATE_ON_CUDA)
    for name in late:
        with contextlib.suppress(ImportError):  # each child would find that out for itself
            importlib.import_module(name)
    if current_platform.is_cpu():
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.worker.cpu_worker

        from ..pipeline import cpu_worker  # noqa: F401  (imported for the children)

        _rebind_kernels(current_platform)
    install_model_runners()
    check_fields()

    from . import process  # noqa: F401  (imported for the children)

    if not has_gpu():
        take_back(_NOT_YET_ON_CPU)
    return str(vllm.__version__)


def leave_out(names: tuple[str, ...]) -> None:
    """Have these modules be as if they were not installed, in this process and those that it forks."""
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # how Python is told that there is no such module


def take_back(names: tuple[str, ...]) -> None:
    """Have these modules be as they are installed again."""
    for name in names:
        if sys.modules.get(name, name) is None:
            del sys.modules[name]


def install_model_runners() -> None:
    """For the workers of this process and of those that it forks."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from ..vllm import seeded_cpu

        seeded_cpu.install()
    else:
        from ..vllm import seeded

        seeded.install()


def _rebind_kernels(platform: Any) -> None:
    """Do once what each worker would: vLLM looks through all modules (half a second) for Triton kernels that have a
    C++ version on a CPU. Modules that a child imports later find them replaced already."""
    platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
