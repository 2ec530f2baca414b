"""The list of codecs: a new one is added here, and nowhere else (docs/extending.md)."""

from __future__ import annotations

from typing import Final

from .errors import CodecError, PayloadError
from .format import Codec
from .fp8 import FP8
from .kivi4 import KIVI4
from .kv4 import KV4
from .raw import RAW

CODECS: Final = (RAW, KV4, FP8, KIVI4)
"""All codecs, in the order of tables."""

CODEC_NAMES: Final = tuple(codec.name for codec in CODECS)
DEFAULT: Final = KV4
"""Between boxes."""

_BY_NAME: Final = {codec.name: codec for codec in CODECS}
_BY_NUMBER: Final = {codec.wire: codec for codec in CODECS}


def codec_named(name: str) -> Codec:
    """The codec with this name. Raises CodecError."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise CodecError(f"codec {name[:64]!r} is unknown; known are {', '.join(CODEC_NAMES)}") from None


def codec_from_wire(number: int) -> Codec:
    """The codec with this number in frames. Raises PayloadError."""
    try:
        return _BY_NUMBER[number]
    except KeyError:
        raise PayloadError(f"codec number {number} is unknown; known are {sorted(_BY_NUMBER)}") from None
