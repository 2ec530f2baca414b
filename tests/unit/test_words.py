"""The vocabulary of docs/words.md, kept: a class name stands in one place, and no word that was given up comes back."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bootstrap", "coordinator", "kernels", "kvtransport", "node", "sdk", "sims")
WORDS = "docs/words.md"
HEADING = "## Words that are not used"
MAX_SHARED_NAMES = 10

SHARED_NAMES: dict[str, str] = {}
"""Class names that may stand in more than one file, each with the reason. The list may only shrink."""

QUOTED: dict[tuple[str, str], str] = {}
"""(file, phrase) -> why a phrase that is not used stands there all the same. Every entry must be in use."""


def source_files() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def text_files() -> list[Path]:
    """All that people read: source, tests, pages."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    return [*source_files(), *tests, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def find_shared_names(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Class name -> the files that define it, where there are several definitions. `sources` is (path, text)."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, text in sources:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    return {name: files for name, files in homes.items() if len(files) > 1}


def split_into_words(text: str) -> str:
    """`hand_over`, `HandOver` and `hand-over` all become `hand over`; a line stays a line."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return re.sub(r"[_\-]+", " ", text).lower()


def read_banned(page: str) -> dict[str, str]:
    """Phrase -> what is said instead, from the table of `page` under HEADING. `*` stands for any ending."""
    table = page.partition(HEADING)[2].partition("\n## ")[0]
    banned: dict[str, str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 2 and line.startswith("|") and not set(cells[0]) <= set("-: "):
            banned |= {phrase.strip(): cells[1] for phrase in cells[0].split(",")}
    banned.pop("not this", None)
    return banned


@cache
def compile_phrase(phrase: str) -> re.Pattern[str]:
    words = re.escape(split_into_words(phrase)).replace(r"\*", r"\w*").replace(r"\ ", r"\s+")
    return re.compile(rf"\b{words}\b")


def begin_of(phrase: str) -> str:
    """What stands wherever the phrase does: to look for that is much quicker."""
    return re.split(r"[ *]", split_into_words(phrase))[0]


def find_banned(text: str, banned: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Line and phrase of each use; a phrase that is broken over two lines counts at the first."""
    plain = split_into_words(text)
    for phrase in banned:
        if begin_of(phrase) not in plain:
            continue
        for match in compile_phrase(phrase).finditer(plain):
            yield plain.count("\n", 0, match.start()) + 1, phrase


def test_a_class_name_stands_in_one_place() -> None:
    sources = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in source_files()]
    found = find_shared_names(sources)
    new = {name: files for name, files in found.items() if name not in SHARED_NAMES}
    assert not new, "\n".join(f"{name}: {', '.join(files)}" for name, files in sorted(new.items()))
    assert SHARED_NAMES.keys() <= found.keys(), "these stand in one place now: take them off the list"
    assert len(SHARED_NAMES) <= MAX_SHARED_NAMES


def test_words_that_were_given_up_do_not_come_back() -> None:
    banned = read_banned((ROOT / WORDS).read_text(encoding="utf-8"))
    complaints: list[str] = []
    used: set[tuple[str, str]] = set()
    for path in text_files():
        name = path.relative_to(ROOT).as_posix()
        if name in {WORDS, "tests/unit/test_words.py"}:
            continue
        for line, phrase in find_banned(path.read_text(encoding="utf-8"), banned):
            if (name, phrase) in QUOTED:
                used.add((name, phrase))
            else:
                complaints.append(f"{name}:{line}: {phrase}: say {banned[phrase]}")
    assert not complaints, "\n".join(complaints)
    assert used == QUOTED.keys(), "these are not in use: take them off the list"


def test_the_page_lists_what_is_not_used() -> None:
    banned = read_banned((ROOT / WORDS).read_text(encoding="utf-8"))
    assert {"handover*", "hand off*", "toll*", "crew*"} <= banned.keys()
    assert all(banned.values())


def test_two_classes_of_one_name_are_found() -> None:
    sources = [("a.py", "class Path: ..."), ("b.py", "if x:\n    class Path: ..."), ("c.py", "class KVPath: ...")]
    assert find_shared_names(sources) == {"Path": ["a.py", "b.py"]}
    assert find_shared_names([("a.py", "class A: ...\nclass A: ...")]) == {"A": ["a.py", "a.py"]}


PAGE = f"""# Words
| a | b |
|---|---|
| handing | over |

{HEADING}

Some text, and | a bar.

| not this | say this |
|---|---|
| hand over, handover* | KV transfer |
| crew* | worker processes |

## More
| toll | no |
"""


def test_the_table_is_read() -> None:
    assert read_banned(PAGE) == {"hand over": "KV transfer", "handover*": "KV transfer", "crew*": "worker processes"}


@pytest.mark.parametrize(
    "text",
    ["hand_over(kv)", "a hand-over", "HandOver", "self._hand_over", "to hand\nover", "Handovers", "Crew", "_crews"],
)
def test_a_banned_word_is_found(text: str) -> None:
    assert [line for line, _ in find_banned(f"x\n{text}\n", read_banned(PAGE))] == [2]


@pytest.mark.parametrize("text", ["handing over", "screw", "hand over_all", "secrewt", "overhand"])
def test_other_words_are_left_alone(text: str) -> None:
    found = list(find_banned(text, read_banned(PAGE)))
    assert found == ([(1, "hand over")] if text == "hand over_all" else [])
