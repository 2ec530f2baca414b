"""A page of results: tables and remarks for people, rows for programs, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COMMAND: Final = "python -m p2pserve.sims.experiments"
DASHES: Final = (
    "-", (0, (5, 2)), (0, (4, 2, 1, 2)), (0, (1, 1.5)), (0, (7, 2, 1, 2, 1, 2)), (0, (2, 3)), (0, (1, 4)), (0, (3, 6)),
)  # fmt: skip
"""Of a picture's lines, in turn: all but the first, which is the widest, have gaps to see others through."""
MARKERS: Final = "osD^v*XP"
"""Hollow, so that one shows inside another; in turn."""
FEW_POINTS: Final = 20
"""Up to so many have a marker each."""
FEW_DECADES: Final = 1e2
"""A logarithmic axis over less than two has more labels than powers of ten."""
MARK_EVERY: Final = 12
"""Of more points, so many have one between them."""

RowT = TypeVar("RowT", bound="ResultRow")
KeptT = TypeVar("KeptT")


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
    """Lines by name, as (x, y), on axes with labels; `log_x`, `log_y`: where decades are shown. `unjoined`: those that
    are points and no lines."""

    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    unjoined: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Rows of axes, written as `<file>.png`. Lines have the same names on all of them: one legend is
    for all. `about`: what it shows, for who cannot see it."""

    file: str
    about: str
    panels: tuple[tuple[Curves, ...], ...]

    @classmethod
    def of(cls, file: str, curves: Curves) -> Picture:
        """One with these alone."""
        return cls(file, f"{curves.y} over {curves.x}", ((curves,),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """`assumes`: what went in; `remarks`: what agrees with the paper, what does not, why;
    `command`: what makes the page again, if not `COMMAND` and its name."""

    name: str
    title: str
    assumes: str
    tables: tuple[PageTable, ...]
    remarks: str
    pictures: tuple[Picture, ...] = ()
    command: str = ""

    def markdown(self) -> str:
        """The page; it names the command that makes it again."""
        blocks = [f"# {self.title}", _wrap(self.assumes), f"    {self.command or f'{COMMAND} {self.name}'}"]
        blocks += [table.markdown() for table in self.tables]
        blocks += [f"![{picture.about}]({picture.file}.png)" for picture in self.pictures]
        blocks += ["## What agrees, what does not, and why", _wrap(self.remarks)]
        return "\n\n".join(blocks) + "\n"

    def records(self) -> dict[str, Any]:
        """All rows, for programs."""
        return {
            "experiment": self.name,
            "assumes": self.assumes,
            "tables": {table.title: msgspec.to_builtins(table.rows) for table in self.tables},
        }


class KeptResults:
    """Parts of a page that takes long, in a file (None: nowhere), a line for each as it is done: a run
    that was ended goes on from there. Nothing in it says by which code it was found."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
        self._found = dict(msgspec.json.decode(line, type=tuple[str, msgspec.Raw]) for line in lines)

    def get(self, name: str, measure: Callable[[], KeptT], kind: Any) -> KeptT:
        """What was found before, or is now; `kind`: its type. Raises OSError."""
        if name not in self._found:
            found = measure()
            self._found[name] = msgspec.Raw(msgspec.json.encode(found))
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode((name, found)) + b"\n")
        kept: KeptT = msgspec.json.decode(self._found[name], type=kind)
        return kept


def write_page(page: Page, folder: Path) -> None:
    """`<name>.md`, `<name>.json`, pictures. Raises OSError, ImportError (matplotlib)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{page.name}.md").write_text(page.markdown(), encoding="utf-8")
    encoded = msgspec.json.format(msgspec.json.encode(page.records()), indent=1)
    (folder / f"{page.name}.json").write_bytes(encoded + b"\n")
    for picture in page.pictures:
        _draw(picture, folder / f"{picture.file}.png")


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
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if isfinite(value) and abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _draw(picture: Picture, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # of the extra `plots`, and slow to import
    from matplotlib.figure import Figure

    rows, columns = len(picture.panels), max(map(len, picture.panels))
    size = (7.0, 4.3) if rows == columns == 1 else (max(7.0, 3.5 * columns), 0.5 + 2.6 * rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes_row, panels in zip(grid, picture.panels, strict=True):
        for axes, curves in zip(axes_row, panels, strict=True):
            _draw_lines(axes, curves)
    handles, names = grid[0][0].get_legend_handles_labels()
    # above the axes: inside them it would hide a line somewhere
    figure.legend(handles, names, loc="outside upper center", ncols=min(2 * columns + 1, len(names)), fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_lines(axes: Axes, curves: Curves) -> None:
    """Equal lines all show: each is thinner than those below it and dashed in its own way, its markers are smaller and
    of their own form, and where points are many, in other places."""
    count = len(curves.lines)
    for place, (name, (x, y)) in enumerate(curves.lines.items()):
        above = (count - 1 - place) / max(1, count - 1)
        axes.plot(
            x, y, label=name, linewidth=1.0 + 2.2 * above, markersize=4.0 + 7.0 * above,
            linestyle="none" if name in curves.unjoined else DASHES[place % len(DASHES)],
            marker=MARKERS[place % len(MARKERS)], markerfacecolor="none", markeredgewidth=1.2,
            markevery=1 if len(x) <= FEW_POINTS else (MARK_EVERY * place // count, MARK_EVERY),
        )  # fmt: skip
    axes.set(xlabel=curves.x, ylabel=curves.y)
    if curves.log_x:
        axes.set_xscale("log")
        _label_decades(axes.xaxis, [at for x, _ in curves.lines.values() for at in x])
    if curves.log_y:
        axes.set_yscale("log")
        _label_decades(axes.yaxis, [at for _, y in curves.lines.values() for at in y])
    if all(float(at).is_integer() for x, _ in curves.lines.values() for at in x) and not curves.log_x:
        axes.locator_params(axis="x", integer=True)  # there is no replica and a half
    axes.grid(alpha=0.3)


def _label_decades(axis: Axis, values: Sequence[float]) -> None:
    """Of few decades 1, 2 and 5 are labelled, as plain numbers: all minor labels run into each other."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if max(values) < FEW_DECADES * min(values):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
