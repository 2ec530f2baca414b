"""A page of results: tables and remarks for people, rows for programs, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any, Final, TypeVar

import msgspec

COMMAND: Final = "python -m p2pserve.sims.experiments"


RowT = TypeVar("RowT", bound="ResultRow")


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """A table's row. A field's name is its heading, with blanks for underscores."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows of one type, and a line about them. Lists in rows are for programs only."""

    title: str
    rows: Sequence[ResultRow]
    about: str = ""

    def markdown(self) -> str:
        """The whole table, title and all."""
        first = self.rows[0]
        fields = [field for field in first.__struct_fields__ if not isinstance(getattr(first, field), list)]
        lines = [f"## {self.title}", "", *([self.about, ""] if self.about else [])]
        lines.append("| " + " | ".join(field.replace("_", " ") for field in fields) + " |")
        lines.append("|" + " --- |" * len(fields))
        lines += ["| " + " | ".join(_cell(getattr(row, field)) for field in fields) + " |" for row in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Curves:
    """A picture: lines by name, as (x, y), on axes with labels. It is written as `<file>.png`."""

    file: str
    x: str
    y: str
    lines: dict[str, tuple[Sequence[float], Sequence[float]]]
    marker: str = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """`assumes`: what went in; `remarks`: what agrees with the paper, what does not, why."""

    name: str
    title: str
    assumes: str
    tables: tuple[PageTable, ...]
    remarks: str
    curves: tuple[Curves, ...] = ()

    def markdown(self) -> str:
        """The page; it names the command that makes it again."""
        blocks = [f"# {self.title}", _wrap(self.assumes), f"    {COMMAND} {self.name}"]
        blocks += [table.markdown() for table in self.tables]
        blocks += [f"![{curve.y} over {curve.x}]({curve.file}.png)" for curve in self.curves]
        blocks += ["## What agrees, what does not, and why", _wrap(self.remarks)]
        return "\n\n".join(blocks) + "\n"

    def records(self) -> dict[str, Any]:
        """All rows, for programs."""
        return {
            "experiment": self.name,
            "assumes": self.assumes,
            "tables": {table.title: msgspec.to_builtins(table.rows) for table in self.tables},
        }


def write_page(page: Page, folder: Path) -> None:
    """`<name>.md`, `<name>.json`, pictures. Raises OSError, ImportError (matplotlib)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{page.name}.md").write_text(page.markdown(), encoding="utf-8")
    encoded = msgspec.json.format(msgspec.json.encode(page.records()), indent=1)
    (folder / f"{page.name}.json").write_bytes(encoded + b"\n")
    for curve in page.curves:
        _draw(curve, folder / f"{curve.file}.png")


def read_rows(folder: Path, name: str, title: str, kind: type[RowT]) -> list[RowT]:
    """A table of a written page. Raises OSError, or ValueError for another form."""
    records = msgspec.json.decode((folder / f"{name}.json").read_bytes())
    return msgspec.convert(records["tables"][title], list[kind])  # type: ignore[valid-type]


def write_index(folder: Path) -> None:
    """README.md: every page in the folder by its title, also pages of other commands."""
    lines = ["# Results", "", f"Made again by `{COMMAND} all`, or as each page says.", ""]
    for path in sorted(folder.glob("*.md")):
        if path.name != "README.md":
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title}]({path.name})")
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _wrap(text: str) -> str:
    """Text at most 100 columns wide; each item of a list begins a line of its own, and a blank line
    begins a new paragraph, also of an item."""
    mark = "- " if text.startswith("- ") else ""
    items = text.strip().removeprefix("- ").split("\n- ")
    return "\n".join(_wrap_item(item, mark) for item in items)


def _wrap_item(item: str, mark: str) -> str:
    indent = " " * len(mark)
    paragraphs = (" ".join(each.split()) for each in item.split("\n\n"))
    return "\n\n".join(
        fill(each, 100, initial_indent=indent if n else mark, subsequent_indent=indent, break_on_hyphens=False)
        for n, each in enumerate(paragraphs)
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if isfinite(value) and abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _draw(curves: Curves, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # of the extra `plots`, and slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, (x, y) in curves.lines.items():
        axes.plot(x, y, marker=curves.marker, label=name)
    axes.set(xlabel=curves.x, ylabel=curves.y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Software": None})
