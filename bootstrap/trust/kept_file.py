"""A value in a file that survives a power cut: replaced as a whole, private (0600), with a checksum.

    file = KeptFile(home / "network.catalogue", Catalogue, b"p2pserve-catalogue-1\n")

One that is damaged is set aside, with a line that says so.
"""

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from ..errors import DECODE_ERRORS

_log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 << 20
_SUM_BYTES: Final = 16

Value = TypeVar("Value", bound=msgspec.Struct)


class KeptFile(Generic[Value]):
    """One value in one file.

    Args:
        kind: of the value.
        magic: what the file begins with: its format.
        say: told in a line for people what was not read.
    """

    def __init__(self, path: Path, kind: type[Value], magic: bytes, say: Callable[[str], None] = _log.warning) -> None:
        self.path = path
        self._kind = kind
        self._magic = magic
        self._say = say

    def load(self) -> Value | None:
        """What was kept; None where there is nothing, or it is damaged. Raises OSError where it cannot be read."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_BYTES)
        except FileNotFoundError:
            return None
        try:
            return self._decode(raw)
        except (ValueError, *DECODE_ERRORS) as error:
            aside = self.path.with_suffix(".damaged")
            self._say(f"{self.path} is damaged ({error}) and was set aside as {aside}; starting without it")
            with suppress(OSError):
                self.path.replace(aside)
            return None

    def written_at(self) -> int:
        """Another number after each :meth:`save`, by whatever process; 0 where there is no file."""
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return 0

    def save(self, value: Value) -> None:
        """Replace the file. Raises OSError."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._encode(value))
                file.flush()
                os.fsync(descriptor)
            temporary.replace(self.path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _encode(self, value: Value) -> bytes:
        body = msgspec.msgpack.encode(value)
        return self._magic + blake2b(body, digest_size=_SUM_BYTES).digest() + body

    def _decode(self, raw: bytes) -> Value:
        if not raw.startswith(self._magic):
            raise ValueError("it is not such a file")
        checksum, body = raw[len(self._magic) :][:_SUM_BYTES], raw[len(self._magic) + _SUM_BYTES :]
        if blake2b(body, digest_size=_SUM_BYTES).digest() != checksum:
            raise ValueError("its checksum does not fit")
        return msgspec.msgpack.decode(body, type=self._kind)

    def __repr__(self) -> str:
        return f"KeptFile({self.path})"
