"""The pages as a site, and the commands in them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from p2pserve.sdk.cli import PROGRAM_GROUP
from p2pserve.sdk.failures import EXIT_CODES

from .console import PAGES, ROOT, all_examples, arguments_of_ours, examples_in

LOADED_FROM_ELSEWHERE = re.compile(r"""(?:<script[^>]*\ssrc|<link[^>]*\shref|<img[^>]*\ssrc)=["']?https?://[^"'> ]+""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; a page that the navigation lacks, or the other way round, fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    found = {page.name: LOADED_FROM_ELSEWHERE.findall(page.read_text("utf-8")) for page in pages}
    # What says which page is the first of several with one text is followed by search engines alone.
    assert {name: urls for name, urls in found.items() if any('rel="canonical"' not in url for url in urls)} == {}


def test_the_reference_has_every_command_and_every_public_name(site: Path) -> None:
    import p2pserve

    cli = (site / "reference/cli.html").read_text("utf-8")
    for name in PROGRAM_GROUP.list_commands(click.Context(PROGRAM_GROUP)):
        assert f">{name}<" in cli, name
    sdk = (site / "reference/sdk.html").read_text("utf-8")
    assert [name for name in p2pserve.__all__ if name[0].isupper() and name not in sdk] == []
    errors = (site / "reference/errors.html").read_text("utf-8")
    kinds = [name for _, names in EXIT_CODES for found in names.values() for name in found]
    exported = {name: getattr(p2pserve, name) for name in p2pserve.__all__}
    made = [name for name, each in exported.items() if inspect.isclass(each) and issubclass(each, Exception)]
    assert [name for name in (*kinds, *made) if f"<code>{name}</code>" not in errors] == []
    admin = (site / "reference/admin.html").read_text("utf-8")
    paths = ("/nodes", "/nodes/{name}", "/links", "/links/{source}/{target}", "/plan", "/requests", "/events")
    assert [text for text in (*paths, "NodeSummary", "RequestTrace", "Last-Event-ID") if text not in admin] == []


EVERYTHING = sorted(
    {
        (example.page, example.text)
        for example in all_examples()
        if not example.is_python and arguments_of_ours(example.text) is not None
    }
)


@pytest.mark.parametrize(("page", "line"), EVERYTHING, ids=[f"{page}: {line}" for page, line in EVERYTHING])
def test_a_command_in_a_page_is_one_that_is_understood(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", "p2p_client_ksTEs...")
    arguments = arguments_of_ours(line)
    assert arguments is not None
    command: click.Command = PROGRAM_GROUP
    context = PROGRAM_GROUP.make_context("p2pserve", list(arguments))
    while isinstance(command, click.Group):
        assert arguments, f"{line} names no command"
        name = arguments.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"{name} is no command"
        command, context = found, found.make_context(name, list(arguments), parent=context)


def test_there_are_commands_in_the_pages() -> None:
    assert len(EVERYTHING) >= 17
    block = "```console\n$ p2pserve plan \\\n    --live\nplan\n```\n```python\nimport os\n\nprint(1)\n```\n"
    plan, snippet = examples_in("a.md", block)
    assert (plan.text, plan.shown, str(snippet)) == ("p2pserve plan --live", ("plan",), "a.md: print(1)")
    assert arguments_of_ours("A=b .venv/bin/p2pserve status | less") == ["status"]
    assert arguments_of_ours("make test") is None
