"""The module list of docs/architecture.md: `python tests/unit/docs/architecture.py` writes it anew.

Each module's line is the first sentence of its docstring, so that there is one place to say what it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("bootstrap", "kernels", "coordinator", "kvtransport", "sims", "node", "sdk")
BEGIN, END = "<!-- modules -->", "<!-- end of modules -->"


def first_sentence(path: Path) -> str:
    """What a module's docstring begins with; one sentence, without its full stop."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<!al)\.(?: |$)", text, maxsplit=1)[0]
    return sentence.rstrip(".: ").replace("|", "\\|")


def folders(room: str) -> Iterator[Path]:
    """The room and the folders in it that hold modules, in the order of their names."""
    for folder in sorted([ROOT / room, *(path for path in (ROOT / room).rglob("*") if path.is_dir())]):
        if any(folder.glob("*.py")):
            yield folder


def module_list() -> str:
    """A heading for each folder, with what its front door says, and a line for each module in it."""
    lines: list[str] = []
    for room in ROOMS:
        for folder in folders(room):
            name = folder.relative_to(ROOT).as_posix()
            front = folder / "__init__.py"
            modules = [path for path in sorted(folder.glob("*.py")) if path != front]
            about = first_sentence(front) if front.exists() else "Codecs: how KV is written on the wire"
            lines += ["", f"| `{name}/` | {about} |", "|---|---|"]
            lines += [f"| `{path.name}` | {first_sentence(path)} |" for path in modules]
    return "\n".join(lines).strip()


def page_with(text: str, modules: str) -> str:
    """The page with this module list in it."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{modules}\n\n{END}{tail}"


def main() -> None:
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), module_list()), encoding="utf-8")


if __name__ == "__main__":
    main()
