"""State folders of boxes as small file systems of their own, which can be filled. Needs root on Linux."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import trio

from ..errors import DemoFailed

DISK_MIB: Final = 48
FILLER: Final = "filler"
BLOCK: Final = bytes(64 << 10)


@contextmanager
def open_disks(folders: Sequence[Path]) -> Iterator[None]:
    """A small file system in each of these folders, which are made. Raises DemoFailed."""
    with ExitStack() as stack:
        for folder in folders:
            folder.mkdir()
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "p2pserve-chaos", os.fspath(folder))
            stack.callback(_run, "umount", "--lazy", os.fspath(folder))
        yield


async def fill_disk(folder: Path, seconds: float) -> None:
    """Leave no room on the file system of this folder, for so long."""
    filler = folder / FILLER
    try:
        await trio.to_thread.run_sync(_fill, filler)
        await trio.sleep(seconds)
    finally:
        filler.unlink(missing_ok=True)


def _fill(path: Path) -> None:
    size = len(BLOCK)
    with path.open("wb", buffering=0) as filler:
        while size:
            try:
                filler.write(BLOCK[:size])
            except OSError:  # the rest goes in by smaller pieces
                size //= 2


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise DemoFailed(f"`{' '.join(command[:3])}`: {' '.join(done.stderr.split())}")
