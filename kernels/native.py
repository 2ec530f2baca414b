"""C++ kernels, built on the machine that runs them and loaded with `ctypes`, which frees the GIL.

The bytes are the reference's: only speed depends on this. Building takes seconds, once per machine;
the library is kept under the hash of its sources, compiler and processor features."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch

from .accelerate import KernelMode, build_beside, is_worth_building, mode
from .format import BlockLayout

_log = logging.getLogger(__name__)

CACHE_VARIABLE = "P2PSERVE_KERNEL_CACHE"
_HEADERS = Path(__file__).resolve().parent / "csrc"
"""What the codecs' sources share."""
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"),
    # Which operations are rounded, and in which order, is the format.
    *("-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_BUILD_S = 120.0
_WORTH_THREADS = 1 << 22


class Library:
    """One C++ source. What was built of it on this machine is looked for when it is first wanted."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._looked = self._asked = False  # for what is there; to build it
        self._loaded: ctypes.CDLL | None = None

    def __repr__(self) -> str:
        return f"<Library {self._source.name} {'loaded' if self._loaded else 'not loaded'}>"

    def get(self) -> ctypes.CDLL | None:
        """The library. None while it is being loaded or built, in mode `eager`, where it cannot be built, and as long
        as that is not worth it."""
        chosen = mode()
        if chosen is KernelMode.EAGER:
            return None
        if self._loaded is None:
            with self._lock:
                thread = self._begin()
            if thread is not None and chosen is KernelMode.COMPILED:
                thread.join()
        return self._loaded

    def _begin(self) -> threading.Thread | None:
        """Under the lock: what is to be done next, each once."""
        if not self._asked and is_worth_building():
            self._looked = self._asked = True
            return build_beside(self._build)
        if not self._looked:
            self._looked = True
            return build_beside(self._look)
        return None

    def _look(self) -> None:
        # Why it cannot be loaded is said when it is to be built.
        with suppress(OSError, RuntimeError, subprocess.SubprocessError):
            library = _place(self._source, _compiler())
            if library.exists():
                _require_own(library.parent)
                self._loaded = ctypes.CDLL(str(library))

    def _build(self) -> None:
        try:
            self._loaded = ctypes.CDLL(str(_built(self._source)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            text = getattr(error, "stderr", None) or str(error)
            reason = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
            _log.warning("%s: KV codecs stay with plain torch: %s", self._source.name, reason)


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Where a contiguous tensor's memory begins."""
    return ctypes.c_void_p(tensor.data_ptr())


def section_addresses(payload: torch.Tensor, layout: BlockLayout) -> list[ctypes.c_void_p]:
    """Address of each section; views would take a tenth of a kernel's time."""
    *starts, _ = accumulate(layout.section_bytes, initial=payload.data_ptr())
    return [ctypes.c_void_p(start) for start in starts]


def is_fp16(x: torch.Tensor) -> int:
    """What a kernel is told of its 16-bit values: 1 for fp16, 0 for bf16."""
    return int(x.dtype == torch.float16)


def threads(elements: int) -> int:
    """Threads for a kernel: as many as torch's, or one where starting them does not pay (torch's
    idle threads spin on the cores that they would need)."""
    return torch.get_num_threads() if elements >= _WORTH_THREADS else 1


def _place(source: Path, compiler: str) -> Path:
    """Where the library is, or is to be. Raises OSError, RuntimeError or SubprocessError where the compiler does not
    start or the user has no folder."""
    key = hashlib.sha256(source.read_bytes())
    for header in sorted((*source.parent.glob("*.h"), *_HEADERS.glob("*.h"))):
        key.update(header.read_bytes())
    for part in (*_FLAGS, compiler, _version(compiler), _processor()):
        key.update(part.encode() + b"\0")
    return _folder() / f"{source.stem}-{key.hexdigest()[:24]}.so"


def _built(source: Path) -> Path:
    """The built library. Raises as `_place`, and where there is no compiler or it fails."""
    compiler = _compiler()
    library = _place(source, compiler)
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(library.parent)
    if not library.exists():
        handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
        os.close(handle)
        try:
            command = [compiler, *_FLAGS, f"-I{_HEADERS}", "-o", name, str(source)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
            Path(name).replace(library)  # whole or not at all, whoever else builds it at the same time
        finally:
            Path(name).unlink(missing_ok=True)
    return library


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise FileNotFoundError("no C++ compiler was found (Debian, Ubuntu: apt-get install g++; or name it in CXX)")


@cache
def _version(compiler: str) -> str:
    run = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=_BUILD_S)
    return run.stdout


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = ("flags", "Features", "model name")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(named)}))


def _folder() -> Path:
    """Not in the temporary folder, which each process may have of its own."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "p2pserve" / "kernels"


def _require_own(folder: Path) -> None:
    """Raises PermissionError unless it is this user's alone: what lies in it is run."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by others; name a folder of your own in {CACHE_VARIABLE}")
