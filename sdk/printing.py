"""Texts that may be another box's, as they are printed: nothing in them moves the cursor or hides what was there."""

from __future__ import annotations

import unicodedata
from typing import Final

_KEPT: Final = "\n\t"
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_CONTROL: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # escapes, marks of direction, lone surrogates, separators


def printable(text: str) -> str:
    """The text without characters that a terminal acts upon."""
    if text.isprintable():
        return text
    return "".join(
        _REPLACEMENT if each not in _KEPT and unicodedata.category(each) in _CONTROL else each for each in text
    )
