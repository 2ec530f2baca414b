"""The names of a prompt's prefixes: vLLM's block hashes under `sha256_cbor`, cut to 64 bits as in its KV events.

vLLM names each full block of a prompt by a hash over the name of the block before it and its own tokens, so a name
stands for the whole prompt up to there, and equal names on two boxes mean equal KV. The salt of a request
(vLLM's `cache_salt`) goes into the first block's hash, and by that into all: prompts under other salts share nothing.

Computed here and not with vLLM, because gateways have none: CBOR (RFC 8949) of such a hash's three fields is a few
bytes around the tokens. A test compares the names with those of the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

HASH_ALGORITHM: Final = "sha256_cbor"
"""vLLM's `prefix_caching_hash_algo`: its default pickles tokens, which says something else in another Python."""

NAME_BYTES: Final = 8
"""Of 32: names only choose routes, and a hit by accident would cost one misrouted request. Engines compare all 32."""

_BYTES_32: Final = b"\x58\x20"
_ARRAY_3: Final = b"\x83"
_NULL: Final = b"\xf6"


def prefix_names(tokens: Sequence[int], block_tokens: int, salt: str = "") -> list[int]:
    """The name of the prompt's beginning up to the end of each full block, in order."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
    names = []
    parent, extra = _NO_PARENT, _encode_salt(salt) if salt else _NULL
    head = _encode_head(4, block_tokens)
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        block = b"".join(map(_encode_token, tokens[end - block_tokens : end]))
        parent = sha256(b"".join((_ARRAY_3, _BYTES_32, parent, head, block, extra))).digest()
        extra = _NULL
        names.append(cut_name(parent))
    return names


def cut_name(block_hash: bytes) -> int:
    """The name that goes with vLLM's hash of a block."""
    return int.from_bytes(block_hash[-NAME_BYTES:], "big")


def _encode_token(token: int) -> bytes:
    if token < 24:
        return bytes((token,))
    if token < 0x100:
        return bytes((0x18, token))
    if token < 0x10000:
        return b"\x19" + token.to_bytes(2, "big")
    return b"\x1a" + token.to_bytes(4, "big")


def _encode_head(kind: int, size: int) -> bytes:
    """CBOR's first bytes of an array (4) or a text (3) of this size: as those of a number, of another kind."""
    first, *rest = _encode_token(size)
    return bytes((first | kind << 5, *rest))


def _encode_text(text: str) -> bytes:
    encoded = text.encode()
    return _encode_head(3, len(encoded)) + encoded


def _encode_salt(salt: str) -> bytes:
    """The extra keys of vLLM's first block: one pair of a tag and the salt."""
    return _encode_head(4, 1) + _encode_head(4, 2) + _encode_text("cache_salt") + _encode_text(salt)


_NO_PARENT: Final = sha256(_encode_text("vllm-none-hash")).digest()
"""What stands for the block before the first: vLLM's, unless PYTHONHASHSEED says otherwise."""
