"""Novels as R keeps them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from p2pserve.node.dev.novels import NOVELS, read_novels, split_chapters

BODY = [
    "", "by Jane Austen", "", "VOLUME I", "", "CHAPTER I", "", "A first  paragraph", "of _two_ lines.", "",
    "Another; the end of it, \xa35.", "", "", "Chapter 2", "", "Hers.", "", "VOLUME II", "CHAPTER I", "", "Last.", "",
    "FINIS", "", "A note.",
]  # fmt: skip
CHAPTERS = ["A first paragraph of two lines.\n\nAnother; the end of it, \xa35.", "Hers.", "Last."]


def pack(lines: list[str], kind: int = 16) -> bytes:
    """A vector of strings in R's serialisation, compressed, after its size."""
    data = b"X\n" + struct.pack(">III", 3, 0x040201, 0x030500) + struct.pack(">I", 5) + b"UTF-8"
    data += struct.pack(">II", kind, len(lines))
    for line in lines:
        data += struct.pack(">II", 0x40009, len(line.encode())) + line.encode()
    return struct.pack(">I", len(data)) + zlib.compress(data)


def test_chapters_are_paragraphs_without_headings(tmp_path: Path) -> None:
    (tmp_path / "Rdata.rdb").write_bytes(b"".join(pack([title, *BODY]) for title in NOVELS))
    assert read_novels(tmp_path) == dict.fromkeys(NOVELS.values(), CHAPTERS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"".join(pack([title, *BODY]) for title in [*NOVELS][:-1]),
        pack(["DRACULA", *BODY]),
        pack(["EMMA", *BODY], kind=13),
        pack(["EMMA", *BODY])[:-9],
        b"no data of R's",
    ],
)
def test_other_data_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "Rdata.rdb").write_bytes(data)
    with pytest.raises(ValueError, match=r"janeaustenr|it has|type 13"):
        read_novels(tmp_path)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not the data of R's janeaustenr: FileNotFoundError"):
        read_novels(tmp_path)


def test_the_chapter_in_the_middle_is_held_out() -> None:
    assert split_chapters(["a", "b", "c", "d", "e"]) == (["a", "b", "d", "e"], "c")
    assert split_chapters(["a", "b", "c", "d"]) == (["a", "b", "d"], "c")
