"""The documentation: its measures, its links, and the lists in it that are held against the tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pserve.kvtransport.link.transfers import TRANSITIONS, TransferEvent

from . import architecture, topology_picture, transfer_states
from .console import BLOCK, PAGES, ROOT

MAX_COLUMNS, MAX_PARAGRAPH, MAX_README = 100, 6, 200


TO_BE_MADE = {"kernels/top8.py", "node/engine/echo.py", "coordinator/routing/fewest.py"}
"""What the recipes of docs/extending.md begin with."""


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are sentences: no code, no tables, no headings, no pictures."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "#", "!", "    ", "<!--")):
            yield number, line


def wide_lines(text: str) -> list[int]:
    return [number for number, line in prose(text) if len(line) > MAX_COLUMNS]


def wide_examples(text: str) -> list[str]:
    """Lines of consoles that do not fit."""
    blocks = [block for language, block in BLOCK.findall(text) if language == "console"]
    return [line for block in blocks for line in block.splitlines() if len(line) > MAX_COLUMNS]


def long_paragraphs(text: str) -> list[int]:
    """Where paragraphs (and items of lists) of too many lines begin."""
    found: list[int] = []
    begin, length, before = 0, 0, 0
    for number, line in [*prose(text), (0, "")]:
        goes_on = line.strip() and number == before + 1 and not re.match(r"\s*([-*]|\d+\.) ", line)
        if not goes_on:
            if length > MAX_PARAGRAPH:
                found.append(begin)
            begin, length = number, 0
        length, before = length + bool(line.strip()), number
    return found


def dead_links(text: str, folder: Path) -> list[str]:
    """Relative links that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [target for target in targets if "://" not in target and not (folder / target).exists()]


def missing_files(text: str) -> list[str]:
    """Modules that are named by a path, as `node/agent.py` is, and are not there."""
    named = re.findall(r"`([a-z]+/[\w/.-]+\.(?:py|md|cpp|h))`", text)
    ours = [name for name in named if name.split("/")[0] in (*architecture.ROOMS, "tests", "docs")]
    return [name for name in ours if name not in TO_BE_MADE and not (ROOT / name).exists()]


def missing_commands(text: str) -> list[str]:
    """Modules that `python -m` is said to run, and that are not there to be run."""
    named = re.findall(r"python -m (p2pserve(?:\.\w+)+)", text)
    places = {name: ROOT.joinpath(*name.split(".")[1:]) for name in named}
    return [
        name
        for name, place in places.items()
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists()
    ]


def page_ids(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
class TestPages:
    def test_lines_fit_a_terminal(self, page: Path) -> None:
        assert wide_lines(page.read_text(encoding="utf-8")) == []
        assert wide_examples(page.read_text(encoding="utf-8")) == []

    def test_paragraphs_are_short(self, page: Path) -> None:
        assert long_paragraphs(page.read_text(encoding="utf-8")) == []

    def test_links_and_named_files_are_there(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        assert dead_links(text, page.parent) == []
        assert missing_files(text) == []
        assert missing_commands(text) == []

    def test_an_example_comes_early(self, page: Path) -> None:
        """A page begins with what it is for, and shows one thing that it is about."""
        first = page.read_text(encoding="utf-8").splitlines()[:30]
        assert first[0].startswith("# ")
        assert any(line.startswith(("```", "|", "!", "    ", "- [")) or "xample" in line for line in first)


def test_the_readme_is_one_that_people_read() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_screen = "\n".join(text.splitlines()[:24])
    assert text.count("\n") <= MAX_README
    assert "**For whom:**" in first_screen
    assert "$ make demo" in first_screen
    assert "$ make test" in first_screen
    assert "import asyncio" in text
    assert "P2PSERVE_BOOTSTRAP" in text


def test_architecture_has_a_line_for_every_module() -> None:
    page = architecture.PAGE.read_text(encoding="utf-8")
    expected = architecture.page_with(page, architecture.module_list())
    assert page == expected, "run: python tests/unit/docs/architecture.py"


def test_the_states_of_a_transfer_are_those_of_the_code() -> None:
    page = transfer_states.PAGE.read_text(encoding="utf-8")
    assert page == transfer_states.page_with(page), "run: python tests/unit/docs/transfer_states.py"
    assert transfer_states.MEANINGS.keys() == set(TransferEvent), "say what each event is at either end"
    lines = page.splitlines()
    for (status, event), after in TRANSITIONS.items():
        arrow = f"    {status} --> {after}: "
        assert any(line.startswith(arrow) and event in line.split(": ")[1].split(", ") for line in lines)
    assert "    delivered --> [*]" in lines
    assert "    waiting --> [*]" not in lines


def test_the_picture_of_a_topology_is_what_is_drawn_now() -> None:
    drawn = topology_picture.PICTURE.read_text(encoding="utf-8")
    assert drawn == topology_picture.draw_picture(), "run: python tests/unit/docs/topology_picture.py"
    assert topology_picture.NOTE in drawn


def test_every_word_is_explained_in_one_line() -> None:
    text = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    terms = [(row[0].strip(), row[1].strip()) for row in rows if row[0].strip() != "word"]
    assert len(terms) > 80
    assert len(set(terms)) == len(terms)
    assert all(meaning and len(term) + len(meaning) < 120 for term, meaning in terms)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (wide_lines, "x" * 100 + "\n| " + "x" * 200, "x" * 101),
        (wide_examples, "```console\n$ x\n```", "```console\n$ " + "x" * 99 + "\n```"),
        (long_paragraphs, "x\n" * 6 + "\n" + "x\n" * 6, "x\n" * 7),
        (long_paragraphs, "- x\n" * 20, "- x\n" + "  x\n" * 6),
        (missing_files, "`sdk/cli.py`", "`sdk/no_such.py`"),
        (missing_commands, "python -m p2pserve.kernels.bench", "python -m p2pserve.kernels.bunch --help"),
        (lambda text: dead_links(text, ROOT), "[a](README.md#x) [b](https://x.org/y)", "[a](NO.md)"),
    ],
)
def test_the_rules_can_fail(rule: Callable[[str], list[object]], good: str, bad: str) -> None:
    assert rule(good) == []
    assert len(rule(bad)) == 1
