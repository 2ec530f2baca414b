"""What a box must have before an engine can be installed or started."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.node.box.prerequisites import (
    DiskRoom,
    Prerequisites,
    choose_device,
    describe_lack,
    describe_lack_of_room,
    driver_version,
    inspect_box,
    main,
)

HEADER = Path("/usr/include/python3.12/Python.h")
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)  Tue Sep 23\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)
CLOSED_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:\n"
)


def box(
    *,
    driver: str | None = "580.95.05",
    cuda: tuple[int, int] | None = (13, 0),
    has_compiler: bool = True,
    has_header: bool = True,
) -> Prerequisites:
    return Prerequisites(
        driver=driver, cuda=cuda, compiler="cc", has_compiler=has_compiler, header=HEADER, has_header=has_header
    )


NO_GPU = box(driver=None, cuda=None)


@pytest.mark.parametrize(
    ("asked", "found", "device"),
    [
        ("auto", box(), "cuda"),
        ("auto", box(cuda=(12, 8)), "cuda"),  # refused for its driver rather than served from the processor
        ("auto", NO_GPU, "cpu"),
        ("auto", box(cuda=None), "cpu"),  # a container without GPUs on a machine with some
        ("cuda", NO_GPU, "cuda"),
        ("cpu", box(), "cpu"),
    ],
)
def test_the_device_to_install_for(asked: str, found: Prerequisites, device: str) -> None:
    assert choose_device(asked, found) == device


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (box(has_compiler=False), ["no C compiler 'cc'", "build-essential", "CC="]),
        (box(has_header=False), [str(HEADER), "apt-get install python3.12-dev"]),
        (NO_GPU, ["no NVIDIA driver", "cuda_max_good>=13", "make setup DEVICE=cpu"]),
        (box(cuda=None), ["580.95.05", "libcuda.so.1", "docker run --gpus all"]),
        (
            box(driver="570.86.15", cuda=(12, 8)),
            ["570.86.15 runs CUDA 12.8", "13.0", "driver 580", "cuda_max_good>=13", "DEVICE=cpu"],
        ),
        (box(driver=None, cuda=(12, 8)), ["the NVIDIA driver runs CUDA 12.8"]),
    ],
)
def test_what_is_missing_for_cuda_is_one_line_with_what_to_do(found: Prerequisites, words: list[str]) -> None:
    complaint = describe_lack(found, "cuda")
    assert complaint is not None
    assert "\n" not in complaint
    assert [word for word in words if word not in complaint] == []


@pytest.mark.parametrize("found", [box(), box(cuda=(13, 2)), box(driver=None), box(driver="535.183.01")])
def test_a_box_that_has_all(found: Prerequisites) -> None:
    """The driver's own version does not count: with NVIDIA's compatibility libraries an old one runs new CUDA."""
    assert describe_lack(found, "cuda") is None


def test_a_processor_needs_a_compiler_only() -> None:
    assert describe_lack(box(driver=None, cuda=None, has_header=False), "cpu") is None
    assert describe_lack(box(has_compiler=False), "cpu") is not None


def test_an_image_is_made_without_a_driver() -> None:
    assert describe_lack(NO_GPU, "cuda", driver_later=True) is None
    assert "Python.h" in (describe_lack(box(cuda=None, has_header=False), "cuda", driver_later=True) or "")


@pytest.mark.parametrize(
    ("target", "scratch", "full"),
    [
        (DiskRoom("/here", 1, 10.0), DiskRoom("/tmp", 2, 5.0), None),
        (DiskRoom("/here", 1, 15.0), DiskRoom("/tmp", 1, 15.0), None),
        (DiskRoom("/here", 1, 9.9), DiskRoom("/tmp", 2, 99.0), "/here has 9.9 GB free"),
        (DiskRoom("/here", 1, 99.0), DiskRoom("/tmp", 2, 4.0), "/tmp has 4.0 GB free"),
        (
            DiskRoom("/here", 1, 14.9),
            DiskRoom("/tmp", 1, 14.9),
            "/here has 14.9 GB free, and installing for CUDA takes 15",
        ),
    ],
)
def test_room_on_the_disk(target: DiskRoom, scratch: DiskRoom, full: str | None) -> None:
    complaint = describe_lack_of_room(target, scratch)
    assert complaint is None if full is None else complaint is not None and complaint.startswith(full)


@pytest.mark.parametrize(
    ("text", "version"),
    [(OPEN_MODULE, "580.95.05"), (CLOSED_MODULE, "535.183.01"), ("", None), ("GCC version: 12.3.0 \n", None)],
)
def test_the_driver_names_its_version(text: str, version: str | None) -> None:
    assert driver_version(text) == version


def library(version: int, status: int = 0) -> Callable[[str], Any]:
    def answer(pointer: Any) -> int:
        pointer._obj.value = version
        return status

    def open_library(name: str) -> SimpleNamespace:
        assert name == "libcuda.so.1"
        return SimpleNamespace(cuDriverGetVersion=answer)

    return open_library


def none_there(name: str) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


def test_a_box_is_looked_at(tmp_path: Path) -> None:
    empty = inspect_box(tmp_path, {"PATH": str(tmp_path), "CC": "my-cc"}, none_there)
    assert (empty.driver, empty.cuda, empty.has_header) == (None, None, False)
    assert (empty.compiler, empty.has_compiler) == ("my-cc", False)
    for name, text in {
        "proc/driver/nvidia/version": OPEN_MODULE,
        str(empty.header).lstrip("/"): "",
        "my-cc": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "my-cc").chmod(0o755)
    full = inspect_box(tmp_path, {"PATH": str(tmp_path), "CC": "my-cc"}, library(13020))
    assert (full.driver, full.cuda, full.has_header, full.has_compiler) == ("580.95.05", (13, 2), True, True)


@pytest.mark.parametrize(
    ("open_library", "cuda"), [(library(12080), (12, 8)), (library(0), None), (library(0, 3), None)]
)
def test_what_the_driver_answers(
    tmp_path: Path, open_library: Callable[[str], Any], cuda: tuple[int, int] | None
) -> None:
    assert inspect_box(tmp_path, {}, open_library).cuda == cuda


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == main([]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "setup: DEVICE: 'gpu' is none; say one of auto, cpu, cuda"
