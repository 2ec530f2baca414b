"""One pair of servers for all tests of this folder: `p2pserve serve`, and vLLM's own over the same kind of engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .servers import REASONING, Server, make_thinking_model, start_p2pserve, start_vllm, wait_ready


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Ours and vLLM's."""
    folder = tmp_path_factory.mktemp("api")
    model = make_thinking_model(folder / "thinking")
    named = ("--served-model-name", "bundled", *REASONING)
    with ExitStack() as stack:
        theirs = stack.enter_context(start_vllm(folder, model, *REASONING))
        ours = stack.enter_context(start_p2pserve(folder / "home", *named, model=str(model)))
        wait_ready(ours)
        wait_ready(theirs)
        yield ours, theirs


@pytest.fixture(scope="session")
def ours(pair: tuple[Server, Server]) -> Server:
    return pair[0]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"
