"""Pages of the site that are made from the code: start, command line, SDK, errors, admin API. A hook of mkdocs."""

from __future__ import annotations

import importlib
import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import p2pserve
from p2pserve.node.admin.api import make_admin_api
from p2pserve.node.admin.asking import AskedNode
from p2pserve.node.admin.feed import Feed
from p2pserve.node.web.access import Access
from p2pserve.sdk.failures import EXIT_CODES

ROOT = Path(__file__).parent.parent
CLI_PAGE = """\
# Command line

Every option has a variable of its name: `P2PSERVE_JOIN_MAX_MODEL_LEN` is `join --max-model-len`. It may stand in the
[config file](../settings.md) as well: `max-model-len` under `[join]`.

::: mkdocs-click
    :module: p2pserve.sdk.cli
    :command: PROGRAM_GROUP
    :prog_name: p2pserve
    :style: table
    :depth: 1
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "index.md": start_page(),
        "reference/cli.md": CLI_PAGE,
        "reference/sdk.md": sdk_page(),
        "reference/errors.md": errors_page(),
        "reference/admin.md": admin_page(admin_document()),
    }
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


def errors_page() -> str:
    """Every error that ends a command with a line of its own, by exit code, with what its class says of it."""
    parts = ["# Errors\n\nWhat a command may end with, by its exit code: every error that is told in one line."]
    told: set[type[BaseException]] = set()
    for code, kinds in error_kinds():
        rows = [f"| `{kind.__name__}` | {_first_sentence(kind)} |" for kind in kinds if kind not in told]
        told |= kinds.keys()
        parts.append("\n".join([f"## Exit code {code}", "", "| error | what it says |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def error_kinds() -> Iterator[tuple[int, dict[type[BaseException], None]]]:
    """For each exit code the errors that end with it, and all that are made of them."""
    for code, names in EXIT_CODES:
        modules = {module: importlib.import_module(f"p2pserve.{module}") for module in names}
        roots = [getattr(modules[module], name) for module, found in names.items() for name in found]
        yield code, dict.fromkeys(kind for root in roots for kind in (root, *_made_of(root)))


def _made_of(root: type[BaseException]) -> list[type[BaseException]]:
    return [kind for below in root.__subclasses__() for kind in (below, *_made_of(below))]


def _first_sentence(kind: type) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split())
    return text.partition(". ")[0].rstrip(".").replace("|", "\\|")


def admin_page(document: dict[str, Any]) -> str:
    """The admin API: its paths with their parameters, and the values that it answers with."""
    parts = [f"# Admin API\n\n{document['info']['description']}\n\nAll paths are below `/p2p/v1`."]
    for path, methods in document["paths"].items():
        asked = methods["get"]
        parts.append(f"## GET {path}\n\n{asked['description']}")
        if rows := [_parameter_row(each) for each in asked.get("parameters", ())]:
            parts.append("\n".join(["| parameter | in | type | |", "|---|---|---|---|", *rows]))
        answers = [f"- {status}: {each['description']}" for status, each in asked["responses"].items()]
        body = _type_of(asked["responses"]["200"]["content"]["application/json"]["schema"])
        parts.append(f"Answers with {body}.\n\n" + "\n".join(answers))
    for name, schema in sorted(document["components"]["schemas"].items()):
        text = " ".join(schema.get("description", "").split())
        fields = [f"| `{field}` | {_type_of(kind)} |" for field, kind in schema.get("properties", {}).items()]
        table = "\n".join(["| field | type |", "|---|---|", *fields]) if fields else _type_of(schema)
        parts.append(f"## {name}\n\n{text}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def admin_document() -> dict[str, Any]:
    """Its OpenAPI document, from an application that nobody asks."""

    async def ask(what: str, body: bytes) -> bytes:
        raise LookupError(what)

    return make_admin_api(Feed(AskedNode(ask, LookupError), time.monotonic), Access(None)).openapi()


def _parameter_row(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    least, most = schema.get("minimum"), schema.get("maximum")
    bounds = f"{least} to {most}" if least is not None and most is not None else ""
    default = f"default {schema['default']}" if schema.get("default") is not None else ""
    told = "; ".join(filter(None, (parameter.get("description", ""), bounds, default)))
    return f"| `{parameter['name']}` | {parameter['in']} | {_type_of(schema)} | {told} |"


def _type_of(schema: dict[str, Any]) -> str:
    """A schema in a word, with a link to its own heading where it has one."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_of, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema['items'])}" if isinstance(schema.get("items"), dict) else "list"
    return str(schema.get("type", "any"))


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
