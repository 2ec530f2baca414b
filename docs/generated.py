"""Pages of the site that are made from the code: the start page, the command line, the SDK. A hook of mkdocs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import p2pserve

ROOT = Path(__file__).parent.parent
CLI_PAGE = """\
# Command line

Every option has a variable of its name: `P2PSERVE_JOIN_MAX_MODEL_LEN` is `join --max-model-len`.

::: mkdocs-click
    :module: p2pserve.sdk.cli
    :command: PROGRAM_GROUP
    :prog_name: p2pserve
    :style: table
    :depth: 1
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"index.md": start_page(), "reference/cli.md": CLI_PAGE, "reference/sdk.md": sdk_page()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def start_page() -> str:
    """The README, with links as they are from among the pages."""
    text = (ROOT / "README.md").read_text("utf-8")
    return re.sub(r"\]\(docs/", "](", text)


def sdk_page() -> str:
    """All that `p2pserve` exports: signatures and docstrings."""
    parts = ["# SDK\n\nWhat `import p2pserve` gives. Every error is a `ClientError` of one line."]
    for name in sorted(p2pserve.__all__):
        exported = getattr(p2pserve, name)
        if not inspect.isclass(exported):
            continue
        kind = "error" if issubclass(exported, Exception) else "class"
        parts.append(f"## {name}\n\n*{kind}*\n\n{_prose(exported)}")
        parts += [f"### {name}.{method}\n\n{text}" for method, text in _methods(exported)]
    return "\n\n".join(parts) + "\n"


def _methods(exported: type) -> list[tuple[str, str]]:
    found = []
    for name, member in inspect.getmembers(exported, inspect.isfunction):
        if name.startswith("_") or not member.__module__.startswith("p2pserve"):
            continue
        signature = str(inspect.signature(member)).replace("'", "")
        found.append((name, f"```python\n{name}{signature}\n```\n\n{_prose(member)}"))
    return found


def _prose(documented: object) -> str:
    """A docstring, its sections as lists."""
    text = inspect.getdoc(documented) or ""
    text = re.sub(r"^(Args|Raises|Returns):$", r"\n**\1**\n", text, flags=re.MULTILINE)
    return re.sub(r"^ {4}(\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
