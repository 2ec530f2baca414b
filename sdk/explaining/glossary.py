"""The words of docs/words.md, which explains them once: `words.md` beside this is a link to it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).with_name("words.md")
END: Final = "## Words that are not used"


@cache
def read_glossary() -> dict[str, str]:
    """Word -> its meaning, as in the first row of the page that has it; what stands behind a word in parentheses is no
    part of it."""
    found: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and cells != ["word", "meaning"]:
            for word in re.sub(r"\([^)]*\)", "", cells[0]).split(","):
                found.setdefault(word.strip(), cells[1].replace("`", ""))
    return found


def meaning_of(word: str) -> str:
    """What a word means. Raises KeyError for one that the page does not have."""
    return read_glossary()[word]
