"""Ed25519 keys on disk and libp2p peer ids, without libp2p.

A peer id is the base58 text of the *identity multihash* of the protobuf public key::

    00 24 | 08 01 12 20 | 32 bytes of Ed25519 public key
    ^ identity hash, 36 bytes   ^ KeyType 1, field 2 of 32 bytes

so the key can be read back out of the id, and a signature needs nothing but the id of its maker.
"""

import os
import secrets
from functools import lru_cache
from pathlib import Path
from typing import NewType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..errors import AddressError, IdentityError

PeerId = NewType("PeerId", str)

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_MULTIHASH_PREFIX = bytes.fromhex("002408011220")
_MAX_PEER_ID_CHARS = 64


def peer_id_of(public_key: bytes) -> PeerId:
    """The libp2p peer id of an Ed25519 public key."""
    return PeerId(base58.b58encode(_MULTIHASH_PREFIX + public_key).decode("ascii"))


@lru_cache(maxsize=4096)  # base58 is arithmetic on large numbers, and every entry of gossip asks
def public_key_of(peer_id: str) -> bytes | None:
    """The Ed25519 public key inside a peer id; ``None`` when the text is not such an id."""
    if len(peer_id) > _MAX_PEER_ID_CHARS:  # base58 decoding is quadratic, and the text may come from a stranger
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    if len(raw) != len(_MULTIHASH_PREFIX) + KEY_BYTES or not raw.startswith(_MULTIHASH_PREFIX):
        return None
    return raw[len(_MULTIHASH_PREFIX) :]


def parse_peer_id(text: str) -> PeerId:
    """``text`` as a peer id, or :class:`AddressError` with the right form."""
    if public_key_of(text) is None:
        raise AddressError(f"{text!r} is not a peer id; write the id that the node prints, such as 12D3KooW...")
    return PeerId(text)


def verify_raw(public_key: bytes, payload: bytes, signature: bytes) -> bool:
    """Whether ``signature`` of ``payload`` was made with the private half of ``public_key``."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, payload)
    except (InvalidSignature, ValueError):
        return False
    return True


def verify(peer_id: str, payload: bytes, signature: bytes) -> bool:
    """Whether ``signature`` of ``payload`` was made by the peer with this id."""
    public_key = public_key_of(peer_id)
    return public_key is not None and verify_raw(public_key, payload, signature)


def private_key(seed: bytes) -> Ed25519PrivateKey:
    """The signing key grown from a 32-byte seed."""
    return Ed25519PrivateKey.from_private_bytes(seed)


def load_or_create_seed(folder: Path, name: str) -> bytes:
    """The 32-byte seed in ``folder/name``, made on first use: private (0700, 0600), and whole or
    not at all (temporary file, sync, rename)."""
    path = folder / name
    try:
        return _read_seed(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise IdentityError(
            f"cannot read key file {path}: {_reason(error)}; make it readable by this user or name another folder"
        ) from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        _write_seed(path, secrets.token_bytes(KEY_BYTES))
        return _read_seed(path)
    except OSError as error:
        raise IdentityError(
            f"cannot write key file {path}: {_reason(error)}; free some space, or name a folder this user can write"
        ) from error


def _read_seed(path: Path) -> bytes:
    with path.open("rb") as file:
        seed = file.read(KEY_BYTES + 1)
    if len(seed) != KEY_BYTES:
        size = path.stat().st_size
        raise IdentityError(
            f"key file {path} holds {size} bytes instead of {KEY_BYTES}: it is damaged; restore it from a copy, "
            "or delete it to get a new identity"
        )
    if seed == bytes(KEY_BYTES):
        raise IdentityError(
            f"key file {path} holds only zeros: it is damaged; restore it from a copy, "
            "or delete it to get a new identity"
        )
    return seed


def _write_seed(path: Path, seed: bytes) -> None:
    # Written beside it and renamed: a power cut leaves the old file, the new one or none, never half
    # a key, which would be a new identity without anybody having asked for one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            left = memoryview(seed)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
