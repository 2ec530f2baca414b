"""What the C library keeps of this process's memory. With another one than glibc it stays as it is."""

from __future__ import annotations

import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8  # glibc's <malloc.h>


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
