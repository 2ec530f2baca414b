"""What a process keeps of memory that it does not use."""

import re
from pathlib import Path

import pytest

from p2pserve.node.box.heap import find_unchanged_files, release_library_pages

SMAPS = Path("/proc/self/smaps")


def mapping(permissions: str, name: str, *, anonymous: int = 0, swap: int = 0, flags: str = "rd ex mr mw me") -> str:
    return (
        f"7f0000001000-7f0000004000 {permissions} 00000000 fe:00 131                    {name}\n"
        f"Size:                 12 kB\nRss:                   8 kB\nAnonymous:      {anonymous:8} kB\n"
        f"Swap:           {swap:8} kB\nTHPeligible:           0\nVmFlags: {flags}\n"
    )


@pytest.mark.parametrize(
    ("shown", "is_found"),
    [
        (mapping("r-xp", "/usr/lib/libtorch_cpu.so"), True),
        (mapping("r--p", "/usr/lib/a library (deleted)"), True),
        (mapping("rw-p", "/usr/lib/libtorch_cpu.so"), False),
        (mapping("r--p", "/usr/lib/libtorch_cpu.so", anonymous=4), False),  # as the loader fills it in, and protects it
        (mapping("r--p", "/usr/lib/libtorch_cpu.so", swap=4), False),  # the same, swapped out
        (mapping("r--s", "/dev/nvidiactl"), False),  # where CUDA reads how far a GPU is
        (mapping("r--p", "/dev/nvidia0"), False),
        (mapping("r--p", "/sys/device", flags="rd mr me io pf dd"), False),
        (mapping("r--s", "/run/shared by others"), False),
        (mapping("r-xp", "[vdso]"), False),
        (mapping("r-xp", ""), False),
    ],
)
def test_only_what_a_file_has_is_released(shown: str, is_found: bool) -> None:
    around = mapping("rw-p", "[heap]", anonymous=8)
    assert list(find_unchanged_files(around + shown + around)) == [(0x7F0000001000, 0x3000)] * is_found


def test_released_pages_come_back_when_they_are_used() -> None:
    before = _resident_kib()
    release_library_pages()
    assert _resident_kib() < before
    assert re.sub(r"(\d)", r"<\1>", "a1") == "a<1>"


def _resident_kib() -> int:
    """Of libraries, in this process."""
    found = re.findall(r" r-xp [^\n]* /[^\n]*\.so[^\n]*\nSize:[^\n]*\n(?:[^\n]*\n)*?Rss: +(\d+) kB", SMAPS.read_text())
    return sum(map(int, found))
