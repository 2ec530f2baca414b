"""The recipe for a node message in docs/extending.md, followed: the text's own code, added to copies of two modules."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

from p2pserve.bootstrap import NetworkError, PeerId, RemoteError, Role
from p2pserve.node.testing import MemoryExchange

ROOT = Path(__file__).parents[3]
HERE, THERE = PeerId("here"), PeerId("there")
IMPORTS = """from __future__ import annotations

from collections.abc import Callable

from ..bootstrap import PeerId, Role
from ..bootstrap.methods import Messenger
from . import messages_by_recipe as messages
from . import methods_by_recipe as methods


"""
ASKING = """

async def ask(messenger: Messenger, peer: PeerId) -> messages.Temperatures:
    {}
    return answer
"""


def recipe() -> list[str]:
    """Messages, the catalogue's line, the handler, and the question."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = re.search(r"^## A node message\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    return re.findall(r"```python\n(.*?)```", section[1], flags=re.DOTALL)


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[ModuleType]:
    """The module of the handler, beside copies of the catalogue's modules with the recipe's additions."""
    added, line, handler, question = recipe()
    node = ROOT / "node"
    catalogue = (node / "methods.py").read_text("utf-8")
    catalogue = catalogue.replace("import messages as m", "import messages_by_recipe as m")
    sources = {
        "messages_by_recipe": f"{(node / 'messages.py').read_text('utf-8')}\n\n{added}",
        "methods_by_recipe": f"{catalogue}\n{line}",
        "thermometer_by_recipe": IMPORTS + handler + ASKING.format(question.strip()),
    }
    names = []
    for name, source in sources.items():
        file = tmp_path / f"{name}.py"
        file.write_text(source, "utf-8")
        full = f"p2pserve.node.{name}"
        spec = importlib.util.spec_from_file_location(full, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        names.append(full)
        setattr(sys.modules["p2pserve.node"], name, module)
        spec.loader.exec_module(module)
    yield sys.modules["p2pserve.node.thermometer_by_recipe"]
    for full in names:
        delattr(sys.modules["p2pserve.node"], full.rpartition(".")[2])
        del sys.modules[full]


def ask(followed: Any, read: Callable[[], tuple[float, ...]], role: Role = Role.WORKER) -> Any:
    exchange = MemoryExchange()
    followed.Thermometer(exchange.join(THERE), read)

    async def main() -> Any:
        return await followed.ask(exchange.join(HERE, role), THERE)

    return trio.run(main)


def test_the_new_message_is_asked_and_answered(followed: Any) -> None:
    assert ask(followed, lambda: (61.5, 64.0)).celsius == (61.5, 64.0)


def test_only_members_may_ask_it(followed: Any) -> None:
    with pytest.raises(RemoteError, match=r"clients may not call 'box\.temperatures'"):
        ask(followed, lambda: (), Role.CLIENT)


@pytest.mark.parametrize("strange", [(1000.0,), (20.0,) * 65])
def test_an_answer_out_of_bounds_is_refused(followed: Any, strange: tuple[float, ...]) -> None:
    with pytest.raises(NetworkError, match="malformed"):
        ask(followed, lambda: strange)
