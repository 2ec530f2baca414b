"""What a process keeps of memory that it does not use: what has been freed, and pages of libraries. With another C
library than glibc it keeps the former."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_M_ARENA_MAX: Final = -8  # glibc's <malloc.h>
_MADV_DONTNEED: Final = 4  # Linux's <sys/mman.h>
_MAPPING: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)$")  # the first line of one in smaps
_DEVICE_FLAGS: Final = frozenset({"pf", "io", "mm"})  # of `VmFlags`: a driver has put pages there, which it does once


def return_freed_memory() -> None:
    """Give memory that has been freed back to the system: loading a model leaves much behind that serving does not use
    again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def share_one_heap() -> None:
    """Let all threads that begin from now on take memory from one heap. Each would have its own and keep what it once
    needed; an agent's threads are short, and wait for each other anyway."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


def release_library_pages() -> None:
    """Take out of this process what it has mapped of libraries and never changed. It stays in the system's cache of
    files, and what is used again is mapped again. An import reads much of a library once: of torch some 60 MiB."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    for start, size in list(
        find_unchanged_files(Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace"))
    ):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def find_unchanged_files(smaps: str) -> Iterator[tuple[int, int]]:
    """Start and bytes of the mappings of files that this process cannot write to and has no pages of its own in. Those
    that the loader has filled in and then protected do not count: their contents are nowhere else. Nor do mappings of
    devices: CUDA reads in `/dev/nvidia*` how far a GPU is, and the next look would end the process with SIGBUS."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        head, *lines = mapping.splitlines() or [""]
        match = _MAPPING.match(head)
        if match is None or "w" in match[3] or not match[3].endswith("p"):
            continue
        if not match[4].startswith("/") or match[4].startswith("/dev/"):
            continue
        said = {key: value.split() for key, _, value in (line.partition(":") for line in lines) if value.strip()}
        if not _DEVICE_FLAGS.isdisjoint(said.get("VmFlags", ())):
            continue
        if said.get("Anonymous", [])[:1] == said.get("Swap", [])[:1] == ["0"]:
            yield int(match[1], 16), int(match[2], 16) - int(match[1], 16)
