"""What a box must have for an engine, looked at before anything is installed and again before a node starts one.

    python3 -P node/box/prerequisites.py auto|cpu|cuda [--driver-later] [--renew]

prints the device to install for; `--driver-later` looks for no driver, `--renew` for no room, as most is there already.
What is missing is one line, with what to do about it, and exit code 1; an unknown device is 2. Only the standard
library: `make setup` runs this file before there is anything else.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

Device = Literal["cpu", "cuda"]
DEVICES: Final = ("auto", "cpu", "cuda")
CUDA: Final = (13, 0)  # what torch and vLLM are built for
DRIVER: Final = 580  # the first that runs it
INSTALLED_GB, DOWNLOADED_GB = 10.0, 5.0  # of all packages for CUDA: unpacked and compiled to byte code; as archives
DRIVER_LATER, RENEW = "--driver-later", "--renew"
CHOOSE: Final = f"choose a box with CUDA {CUDA[0]}.{CUDA[1]} or newer (vast.ai: cuda_max_good>={CUDA[0]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prerequisites:
    """What was found. `driver` is the version of NVIDIA's kernel module; `cuda` the newest CUDA that programs can use
    here, None where they can use none. `header` is where this Python wants its `Python.h`."""

    driver: str | None
    cuda: tuple[int, int] | None
    compiler: str
    has_compiler: bool
    header: Path
    has_header: bool


class DiskRoom(NamedTuple):
    """A folder, and the device and free room of its file system."""

    folder: str
    device: int
    free_gb: float


def choose_device(asked: str, box: Prerequisites) -> Device:
    """The device to install for; `auto` is CUDA where programs can use it."""
    if asked == "auto":
        return "cpu" if box.cuda is None else "cuda"
    return "cuda" if asked == "cuda" else "cpu"


def describe_lack(box: Prerequisites, device: Device, *, driver_later: bool = False) -> str | None:
    """What keeps an engine from working on `device`, with what to do about it, in one line; None for nothing."""
    return next(list_complaints(box, device, driver_later=driver_later), None)


def list_complaints(box: Prerequisites, device: Device, *, driver_later: bool = False) -> Iterator[str]:
    """All that `describe_lack` would say, one after the other."""
    if not box.has_compiler:
        yield (
            f"no C compiler '{box.compiler}'; install one (Debian, Ubuntu: apt-get install build-essential) or name it "
            "in CC, like CC=gcc"
        )
    if device == "cpu":
        return
    if not box.has_header:
        yield (
            f"{box.header} is missing, and Triton compiles with it while an engine starts (Debian, Ubuntu: apt-get "
            f"install {box.header.parent.name}-dev)"
        )
    if driver_later:
        return
    if box.cuda is None and box.driver is None:
        yield f"no NVIDIA driver is found; {CHOOSE}, or serve from the processor: make setup DEVICE=cpu"
    elif box.cuda is None:
        yield (
            f"the machine has the NVIDIA driver {box.driver}, but no libcuda.so.1 is found here; start the container "
            "with its GPUs (docker run --gpus all), or serve from the processor: make setup DEVICE=cpu"
        )
    elif box.cuda < CUDA:
        named = f"the NVIDIA driver {box.driver}" if box.driver else "the NVIDIA driver"
        yield (
            f"{named} runs CUDA {box.cuda[0]}.{box.cuda[1]}, and the engine is built for {CUDA[0]}.{CUDA[1]} (driver "
            f"{DRIVER} or newer); {CHOOSE}, or serve from the processor: make setup DEVICE=cpu"
        )


def describe_lack_of_room(target: DiskRoom, scratch: DiskRoom) -> str | None:
    """What is wrong, as `describe_lack` says it, where the CUDA packages do not fit into the folder where they are
    installed or the one where their archives lie meanwhile."""
    needed = [(target, INSTALLED_GB), (scratch, DOWNLOADED_GB)]
    if target.device == scratch.device:
        needed = [(target, INSTALLED_GB + DOWNLOADED_GB)]
    for place, gigabytes in needed:
        if place.free_gb < gigabytes:
            return (
                f"{place.folder} has {place.free_gb:.1f} GB free, and installing for CUDA takes {gigabytes:.0f} there; "
                "make room, or rent the box with more disk (a model needs its own on top)"
            )
    return None


def inspect_box(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL,
) -> Prerequisites:
    """Look at the box whose files are under `root`. Loads the driver's library, starts nothing on a GPU."""
    compiler = environ.get("CC") or "cc"
    # The folder that Triton takes: in Debian's own scheme, for packages installed locally, it can be another.
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    return Prerequisites(
        driver=driver_version(_text(root / "proc/driver/nvidia/version")),
        cuda=_cuda(open_library),
        compiler=compiler,
        has_compiler=shutil.which(compiler, path=environ.get("PATH")) is not None,
        header=header,
        has_header=(root / header.relative_to("/")).is_file(),
    )


def driver_version(text: str) -> str | None:
    """The kernel module's version in what `/proc/driver/nvidia/version` says; None where there is none."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, flags=re.MULTILINE)
    return found[1] if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cuda(open_library: Callable[[str], ctypes.CDLL]) -> tuple[int, int] | None:
    """The newest CUDA that the driver's library runs. It answers this without being initialised."""
    version = ctypes.c_int()
    try:
        status = open_library("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if status == 0 and version.value else None


def _place(folder: str) -> DiskRoom:
    return DiskRoom(folder, Path(folder).stat().st_dev, shutil.disk_usage(folder).free / 1e9)


def main(arguments: list[str]) -> int:
    """Print the device to install for; returns the exit code."""
    asked, options = "".join(arguments[:1]), set(arguments[1:])
    if asked not in DEVICES or not options <= {DRIVER_LATER, RENEW}:
        return _refuse(f"DEVICE: '{asked}' is none; say one of {', '.join(DEVICES)}", 2)
    box = inspect_box()
    device = choose_device(asked, box)
    complaint = describe_lack(box, device, driver_later=DRIVER_LATER in options)
    if complaint is None and device == "cuda" and RENEW not in options:
        complaint = describe_lack_of_room(_place(str(Path.cwd())), _place(tempfile.gettempdir()))
    if complaint is not None:
        return _refuse(complaint, 1)
    sys.stdout.write(f"{device}\n")
    return 0


def _refuse(line: str, code: int) -> int:
    sys.stderr.write(f"setup: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
