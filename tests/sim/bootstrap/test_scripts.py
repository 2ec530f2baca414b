"""Golden scripts of membership. After a change that is meant: `REWRITE_SCRIPTS=1 pytest <this file>`, read the diff."""

import os
from pathlib import Path

import pytest

from .interpreter import run_script

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = run_script(text)
    if os.environ.get("REWRITE_SCRIPTS"):
        path.write_text(found, encoding="utf-8")
    else:
        assert found == text


def test_a_script_gives_the_same_output_every_time() -> None:
    text = "\n\n".join(path.read_text(encoding="utf-8").split("\n\n")[0] for path in SCRIPTS[:1])
    assert run_script(text) == run_script(text)
