"""The novels of Jane Austen as R's package `janeaustenr` ships them: chapters of plain paragraphs.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb .
    read_novels(Path("usr/lib/R/site-library/janeaustenr/data"))

R keeps a package's data as `Rdata.rdb`: for each object its size as a 32-bit number and a zlib stream. Each object
here is a vector of strings, one a line, in R's serialisation (XDR, version 3; "R Internals", section 1.8).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

NOVELS = {  # by the first line of each
    "EMMA": "emma",
    "MANSFIELD PARK": "mansfield_park",
    "NORTHANGER ABBEY": "northanger_abbey",
    "Persuasion": "persuasion",
    "PRIDE AND PREJUDICE": "pride_and_prejudice",
    "SENSE AND SENSIBILITY": "sense_and_sensibility",
}
_CHAPTER = re.compile(r"^ *chapter [ivxl\d]+ *$", re.IGNORECASE | re.MULTILINE)
_VOLUME = re.compile(r"^ *volume [ivxl\d]+ *$", re.IGNORECASE | re.MULTILINE)
_END = re.compile(r"^ *(finis|the end|\*vide .*) *$", re.IGNORECASE | re.MULTILINE)
_STRING, _STRINGS = 9, 16  # types of R's serialisation: one string, a vector of them


def read_novels(folder: Path) -> dict[str, list[str]]:
    """The chapters of each novel, by its name. Raises ValueError for a folder that is not the package's data."""
    novels = {}
    try:
        for lines in _read_vectors((folder / "Rdata.rdb").read_bytes()):
            novels[NOVELS[lines[0].strip()]] = _chapters("\n".join(lines))
    except (OSError, KeyError, IndexError, struct.error, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{folder}: not the data of R's janeaustenr: {error!r}") from error
    if set(novels) != set(NOVELS.values()):
        raise ValueError(f"{folder}: it has {', '.join(novels) or 'nothing'}")
    return novels


def split_chapters(chapters: list[str]) -> tuple[list[str], str]:
    """The chapters to train on, and the one in the middle, which is held out."""
    middle = len(chapters) // 2
    return chapters[:middle] + chapters[middle + 1 :], chapters[middle]


def _chapters(text: str) -> list[str]:
    """Without title, headings and end; a paragraph is a line, with an empty line between two."""
    end = _END.search(text)
    body = _VOLUME.sub("", text[: end.start()] if end else text)
    return [_paragraphs(chapter) for chapter in _CHAPTER.split(body)[1:]]


def _paragraphs(text: str) -> str:
    """Lines joined, blanks made one, marks of italics left out."""
    paragraphs = (" ".join(each.replace("_", "").split()) for each in re.split(r"\n\s*\n", text))
    return "\n\n".join(filter(None, paragraphs))


def _read_vectors(data: bytes) -> Iterator[list[str]]:
    at = 0
    while at < len(data):
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data[at + 4 :])  # 4 bytes: the size that comes out
        yield _read_strings(plain)
        at = len(data) - len(unpacker.unused_data)


def _read_strings(data: bytes) -> list[str]:
    (encoding,) = struct.unpack_from(">I", data, 14)  # after "X\n", three versions and the length of this name
    at = 18 + encoding
    kind, count = struct.unpack_from(">II", data, at)
    if kind & 0xFF != _STRINGS:
        raise ValueError(f"R's type {kind & 0xFF} where strings are expected")
    at += 8
    strings = []
    for _ in range(count):
        kind, size = struct.unpack_from(">II", data, at)
        if kind & 0xFF != _STRING:
            raise ValueError(f"R's type {kind & 0xFF} where a string is expected")
        strings.append(data[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return strings
