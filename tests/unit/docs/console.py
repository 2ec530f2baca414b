"""The commands and snippets of README and docs, as a reader would copy them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import architecture

ROOT = architecture.ROOT
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One command of a console block, continued lines as one, or one Python block. `shown`: the output below it."""

    page: str
    text: str
    shown: tuple[str, ...] = ()
    is_python: bool = False

    @property
    def name(self) -> str:
        """The text without a comment; of a snippet its first line that is no import."""
        lines = [line for line in self.text.splitlines() if not re.match(r"(from|import) |$", line)]
        return lines[0] if self.is_python else self.text.partition("  #")[0].rstrip()

    def __str__(self) -> str:
        return f"{self.page}: {self.name}"


def examples_in(page: str, text: str) -> Iterator[Example]:
    """All of a page, in its order."""
    for language, block in BLOCK.findall(text):
        if language == "python":
            yield Example(page, block, is_python=True)
        elif language == "console":
            yield from _commands_in(page, block)


def _commands_in(page: str, block: str) -> Iterator[Example]:
    command, shown = "", list[str]()
    for line in [*re.sub(r"\s*\\\n\s*", " ", block).splitlines(), "$ "]:
        if not line.startswith(("$ ", "# ")):
            shown.append(line)
            continue
        if command:
            yield Example(page, command, tuple(shown))
        command, shown = line[2:], []


def all_examples() -> list[Example]:
    """Of README and docs."""
    return [
        example for page in PAGES for example in examples_in(page.relative_to(ROOT).as_posix(), page.read_text("utf-8"))
    ]


def arguments_of_ours(line: str) -> list[str] | None:
    """The arguments of a line that runs `p2pserve`, without variables before it and without comments."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    if not words or Path(words[0]).name != "p2pserve":
        return None
    end = next((index for index, word in enumerate(words) if word in {"|", ">", "&&", "&", ";"}), len(words))
    return words[1:end]
