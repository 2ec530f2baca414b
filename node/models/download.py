"""One file from the hub, which goes on where it stopped and is taken only when its hash is right.

huggingface_hub 2 starts a file anew when its download was interrupted and does not look at its hash, so its HTTP
session is used here with range requests, and what has come is kept in `blobs/<hash>.incomplete` of its cache. Shards
come over plain HTTP, several at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

import msgspec
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff, httpx

from .progress import DownloadProgress, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSettings:
    """How models come from a hub.

    `waits_s`: seconds before each next try, while tries in a row bring nothing; more of them ride out a longer outage.
    `connections`: files at a time; one TCP stream seldom fills the line of a rented box. `reserve_bytes`: disk space
    that a download leaves free.
    """

    waits_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    connections: int = 4
    reserve_bytes: int = 256 << 20


_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")  # SHA-256 of a large file; git's SHA-1 of a small one


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the hub lists it. `hash` names its blob in the cache."""

    path: str
    url: str
    size: int
    hash: str

    def __post_init__(self) -> None:
        if not _HASH.fullmatch(self.hash):
            raise ValueError(f"{self.path}: {self.hash!r} is no hash")


class CorruptError(Exception):
    """A file came with a wrong hash, twice."""


class IncompleteError(Exception):
    """A file has stopped coming; what is here of it is kept."""


class StoppedError(Exception):
    """Another file of the same download has failed."""


@final
class DownloadMeter:
    """Counts the bytes of a download that runs in several threads, and reports them one call at a time."""

    def __init__(self, total_bytes: int, report: Report | None) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._done_bytes = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def add(self, count: int, file: str) -> None:
        """`count` more (or fewer) bytes of `file` are here. Raises StoppedError, and what the
        report raises."""
        with self._lock:
            if self._stopped.is_set():
                raise StoppedError
            self._done_bytes += count
            if self._report is not None:
                self._report(DownloadProgress(done_bytes=self._done_bytes, total_bytes=self._total_bytes, file=file))

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than the download goes on."""
        self._stopped.wait(seconds)

    def stop(self) -> None:
        """Make every other thread end at its next bytes."""
        self._stopped.set()


def fetch(file: RemoteFile, blob: Path, meter: DownloadMeter, waits_s: Sequence[float]) -> None:
    """Bring a file to `blob`, again if it came corrupt; other processes wait for it.

    Raises CorruptError, IncompleteError, HfHubHTTPError, OSError, StoppedError, and what the
    meter's report raises."""
    partial = blob.with_name(f"{blob.name}.incomplete")
    with partial.open("ab") as stream, _locked(stream):
        if is_whole(blob, file):  # another process, or another file with the same content, was first
            partial.unlink(missing_ok=True)
            meter.add(file.size, file.path)
            return
        stream.truncate(min(stream.tell(), file.size))
        meter.add(stream.seek(0, os.SEEK_END), file.path)
        for _ in range(2):
            _complete(file, stream, meter, waits_s)
            if _hash(partial, file) == file.hash:
                partial.replace(blob)
                return
            stream.truncate(0)
            meter.add(-file.size, file.path)
    raise CorruptError(f"{file.path} came twice with a wrong hash")


def is_whole(blob: Path, file: RemoteFile) -> bool:
    """Whether a file is in the cache. Its hash was checked when it came; reading it all again would take minutes."""
    return blob.is_file() and blob.stat().st_size == file.size


@contextmanager
def _locked(stream: BinaryIO) -> Iterator[None]:
    fcntl.flock(stream, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(stream, fcntl.LOCK_UN)


def _complete(file: RemoteFile, stream: BinaryIO, meter: DownloadMeter, waits_s: Sequence[float]) -> None:
    """Append what is lacking. Tries go on for as long as they bring something."""
    waits = iter(waits_s)
    while (have := stream.seek(0, os.SEEK_END)) < file.size:
        try:
            _append(file, stream, have, meter)
            cause: Exception | None = None
        except httpx.TransportError as error:
            cause = error
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
            cause = error
        if stream.seek(0, os.SEEK_END) > have:
            waits = iter(waits_s)
            continue
        wait_s = next(waits, None)
        if wait_s is None:
            reason = " ".join(str(cause or "the hub sends nothing").split())
            raise IncompleteError(f"{file.path} stopped at {have} of {file.size} bytes ({reason})") from cause
        meter.pause(wait_s)


def _append(file: RemoteFile, stream: BinaryIO, have: int, meter: DownloadMeter) -> None:
    """One request for all that is lacking; writes what comes of it."""
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    # The library would take an error of the body for one of the opening, and try again inside this block.
    with http_stream_backoff(
        "GET",
        file.url,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),
        retry_on_status_codes=(429,),
    ) as response:
        hf_raise_for_status(response)
        if have and response.status_code != httpx.codes.PARTIAL_CONTENT:  # all of it, from the start
            stream.truncate(0)
            meter.add(-have, file.path)
            have = 0
        for chunk in response.iter_bytes():  # as they come: gathered ones would be lost in a cut
            wanted = chunk[: file.size - have]  # more than was announced is dropped; the hash judges
            stream.write(wanted)
            have += len(wanted)
            meter.add(len(wanted), file.path)


def _hash(path: Path, file: RemoteFile) -> str:
    """The hash of a whole file, of the kind that the hub tells for it."""
    with path.open("rb") as stream:
        if len(file.hash) == 64:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)  # as git names a file
        return hashlib.file_digest(stream, lambda: digest).hexdigest()
