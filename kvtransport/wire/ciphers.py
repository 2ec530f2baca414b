"""AES-256-GCM for one direction of a connection: a counter as nonce, and a key that is replaced in
time.

After 2**22 seals or 32 GiB under a key, far inside the bounds of GCM (RFC 8446 section 5.5), both
ends replace it by HKDF-Expand of itself: who gets hold of a key cannot read what went before.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from ..errors import KVProtocolError

TAG_BYTES = 16
_NEXT = b"p2pserve kv/2 next key"


class Damaged(KVProtocolError):
    """Bytes that do not open."""


@dataclass(frozen=True, slots=True)
class RekeyBounds:
    """A key is replaced after this many seals or bytes of plain text. Both ends must have the same."""

    seals: int = 1 << 22
    bytes: int = 32 << 30


class Cipher:
    """The key of one direction, its counter, and when it must be replaced."""

    __slots__ = ("_aead", "_bounds", "_bytes", "_counter", "_key", "_last", "rekeyed")

    def __init__(self, key: bytes, bounds: RekeyBounds) -> None:
        self._key = key
        self._aead = AESGCM(key)
        self._bounds = bounds
        self._counter = self._bytes = 0
        self._last = bounds.seals
        self.rekeyed = 0

    def seal(self, plain: bytes | bytearray | memoryview, out: memoryview) -> None:
        """Encrypt into `out`, which is longer by the tag."""
        self._aead.encrypt_into(self._counter.to_bytes(12, "big"), plain, None, out)
        self._count(len(plain))

    def open(self, sealed: memoryview, out: memoryview | bytearray) -> None:
        """Decrypt into `out`, which is shorter by the tag. Raises Damaged."""
        try:
            self._aead.decrypt_into(self._counter.to_bytes(12, "big"), sealed, None, out)
        except InvalidTag:
            text = f"seal {self._counter} does not open: altered, replayed, reordered or of another key"
            raise Damaged(text) from None
        self._count(len(sealed) - TAG_BYTES)

    def _count(self, size: int) -> None:
        self._counter += 1
        self._bytes += size
        if self._counter >= self._last or self._bytes >= self._bounds.bytes:
            self._key = HKDFExpand(SHA256(), 32, _NEXT).derive(self._key)
            self._aead = AESGCM(self._key)
            self._last = self._counter + self._bounds.seals
            self._bytes = 0
            self.rekeyed += 1


def derive_ciphers(
    secret: bytes, salt: bytes, info: bytes, bounds: RekeyBounds, *, dials: bool
) -> tuple[Cipher, Cipher]:
    """To seal what this end says, and to open what the other one does: a key for each direction."""
    keys = HKDF(SHA256(), 64, salt, info).derive(secret)
    mine, theirs = (keys[:32], keys[32:]) if dials else (keys[32:], keys[:32])
    return Cipher(mine, bounds), Cipher(theirs, bounds)
