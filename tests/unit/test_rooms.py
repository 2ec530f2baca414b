"""The house rules, as tests: floors between rooms, import circles, budgets, and what may not be written.

Each rule is a function over source text that returns complaints. It runs over the whole checkout, and over
planted text that breaks it, so that a rule which cannot fail does not pass for one that holds.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Who may import whom, other than itself. `kernels` has no __init__.py: with one, `import transformers` in the
# checkout's folder would take it for Hugging Face's package of that name.
FLOORS: dict[str, frozenset[str]] = {
    "bootstrap": frozenset(),
    "kernels": frozenset(),
    "coordinator": frozenset(),
    "kvtransport": frozenset({"kernels"}),
    "sims": frozenset({"coordinator", "kvtransport"}),
    "node": frozenset({"bootstrap", "kernels", "coordinator", "kvtransport", "sims"}),
    "sdk": frozenset({"bootstrap", "kernels", "coordinator", "kvtransport", "sims", "node"}),
}

# The only place of a node that simulates: plans are tried there.
TRIES = "node/planning/trying.py"

# Library -> the only places that import it.
WRAPPED = {"libp2p": ("bootstrap/streams/libp2p_host.py",), "vllm": ("node/engine/",)}

UNSAFE_MODULES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})
UNSAFE_CALLS = frozenset({"eval", "exec"})
IMPURE = frozenset(
    {"asyncio", "datetime", "os", "random", "secrets", "socket", "subprocess", "threading", "time", "torch"}
    | {"trio", "uuid"}
)

# Rims in the coordinator's room: what measures it has to read a clock and to print.
BENCHES = frozenset({"coordinator/dev/bench.py"})

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 500, 80, 8

# "file::function" -> why it may catch everything without raising again. Every entry must be in use.
SWALLOWS: dict[str, str] = {
    "bootstrap/handlers.py::notify": "a bug in a notice's handler is logged with its traceback and costs that notice",
    "node/engine/vllm_program/process.py::handle": "what vLLM raises for a request it refuses is of no common "
    "type: that request is answered with the reason, and the others go on",
    "node/http/front.py::serve_stream": "a bug in one HTTP connection is logged with its traceback and costs that "
    "connection, not the others'",
    "node/planning/worker.py::answer": "what goes wrong with what boxes say is an answer: boxes are set aside",
    "node/requests/driver.py::step": "a bug in one request is logged with its traceback and told to its client: it "
    "may not end the node, with everybody else's requests",
    "bootstrap/streams/transport.py::run_handler": "a bug in a connection's handler is logged and costs that "
    "connection: no stranger may stop the node",
}


class Module(NamedTuple):
    """A source file: its path in the checkout and its text."""

    path: str
    text: str

    @property
    def is_front(self) -> bool:
        """Whether it is a folder's __init__.py."""
        return Path(self.path).name == "__init__.py"

    @property
    def parts(self) -> tuple[str, ...]:
        """Its name inside the package: ("node", "agent"); ("node",) for node/__init__.py."""
        return Path(self.path).parent.parts if self.is_front else Path(self.path).with_suffix("").parts

    @property
    def room(self) -> str:
        """The folder at the root that it is in."""
        return Path(self.path).parts[0]


class Import(NamedTuple):
    """One imported name. `own`: inside this package, with `target` from its top; else a library's name."""

    line: int
    target: tuple[str, ...]
    own: bool


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(module: Module) -> Iterator[Import]:
    """All: at the top, in functions, under TYPE_CHECKING, and `import_module("...")` of a constant."""
    here = module.parts if module.is_front else module.parts[:-1]
    for node in ast.walk(parsed(module.text)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, tuple(name.name.split(".")), False) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            if node.level > len(here) + 1:
                base = ("beyond the package",)
            start = (*base, *(node.module.split(".") if node.module else ()))
            yield from (Import(node.lineno, (*start, name.name), node.level > 0) for name in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"} and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value[:1] != ".":
                yield Import(node.lineno, tuple(first.value.split(".")), False)


def called(node: ast.Call) -> str:
    """The last name of what is called: `suppress` for both `suppress()` and `contextlib.suppress()`."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(module.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def floors(module: Module) -> Iterator[str]:
    """A room imports relatively, and only from rooms below it."""
    for line, target, own in imports(module):
        at = f"{module.path}:{line}"
        if not own and (target[0] == "p2pserve" or target[0] in FLOORS):
            yield f"{at}: `{'.'.join(target)}` is ours: import it relatively"
        elif own and target[0] in FLOORS and target[0] not in {module.room, *FLOORS[module.room]}:
            yield f"{at}: {module.room} must not import {target[0]}"
        elif own and (module.room, target[0]) == ("node", "sims") and module.path != TRIES:
            yield f"{at}: a node simulates in {TRIES} alone"
        elif own and target[0] not in FLOORS and target != ("__version__",):
            yield f"{at}: {'.'.join(target)} is no room"


def wrapped(module: Module) -> Iterator[str]:
    """libp2p and vllm are each imported in one place."""
    for line, target, own in imports(module):
        if not own and not module.path.startswith(WRAPPED.get(target[0], "")):
            yield f"{module.path}:{line}: {target[0]} is imported only in {WRAPPED[target[0]]}"


def unsafe(module: Module) -> Iterator[str]:
    """No pickle in any form, no eval."""
    for line, target, own in imports(module):
        if not own and target[0] in UNSAFE_MODULES:
            yield f"{module.path}:{line}: {target[0]} runs what it reads"
    for node in ast.walk(parsed(module.text)):
        if isinstance(node, ast.Name) and node.id in UNSAFE_CALLS:
            yield f"{module.path}:{node.lineno}: {node.id} runs what it reads"


def pure(module: Module) -> Iterator[str]:
    """The coordinator has no clock, randomness, input or output."""
    if module.room != "coordinator" or module.path in BENCHES:
        return
    for line, target, own in imports(module):
        if not own and target[0] in IMPURE:
            yield f"{module.path}:{line}: the coordinator does without {target[0]}: pass the value in"
    for node in ast.walk(parsed(module.text)):
        if isinstance(node, ast.Name) and node.id in {"open", "print", "input"}:
            yield f"{module.path}:{node.lineno}: the coordinator does without {node.id}"


def budgets(module: Module) -> Iterator[str]:
    """Files, functions and parameter lists that one can take in."""
    lines = module.text.count("\n")
    if lines > MAX_FILE:
        yield f"{module.path}: {lines} lines, at most {MAX_FILE}"
    for node in functions(module):
        at = f"{module.path}:{node.lineno}: {node.name}"
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION:
            yield f"{at} has {length} lines, at most {MAX_FUNCTION}"
        names = {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        count = len(names - {"self", "cls"})
        if count > MAX_PARAMETERS:
            yield f"{at} has {count} parameters, at most {MAX_PARAMETERS}"


def swallowing(module: Module) -> Iterator[tuple[str, int]]:
    """`file::function` and line of each handler of everything that does not raise."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.ExceptHandler) and takes_all(child.type) and not raises(child):
                yield f"{module.path}::{inside}", child.lineno
            if isinstance(child, ast.Call) and called(child) == "suppress" and any(map(takes_all, child.args)):
                yield f"{module.path}::{inside}", child.lineno
            yield from visit(child, inside)

    yield from visit(parsed(module.text), "<module>")


def takes_all(kind: ast.expr | None) -> bool:
    """Whether `except <kind>` takes every error; bare `except:` does."""
    if isinstance(kind, ast.Tuple):
        return any(map(takes_all, kind.elts))
    name = kind.attr if isinstance(kind, ast.Attribute) else kind.id if isinstance(kind, ast.Name) else None
    return kind is None or name in {"Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup"}


def raises(node: ast.AST) -> bool:
    """Whether a block raises on its own, not in a function that it defines."""
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    return any(raises(child) for child in ast.iter_child_nodes(node))


def swallows(module: Module) -> Iterator[str]:
    """A handler of everything raises again, or is on the list with its reason."""
    for name, line in swallowing(module):
        if name not in SWALLOWS:
            yield f"{module.path}:{line}: {name} catches everything: name the errors or list a reason"


def sleeps(module: Module) -> Iterator[str]:
    """Tests without sockets do not wait for a clock."""
    clocks, waits = {"time", "trio", "asyncio", "anyio"}, {"sleep", "sleep_until"}
    for line, target, own in imports(module):
        if not own and target[0] in clocks and target[-1] in waits:
            yield f"{module.path}:{line}: {'.'.join(target)}: pass `now`, or use a virtual clock"
    for node in ast.walk(parsed(module.text)):
        if not isinstance(node, ast.Attribute) or node.attr not in waits:
            continue
        if ast.unparse(node.value) in clocks:
            yield f"{module.path}:{node.lineno}: {ast.unparse(node)}: pass `now`, or use a virtual clock"


def import_graph(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Which of our modules names which; lazy and TYPE_CHECKING imports count like all others.

    `from ..room import x` names the module `x` where there is one, else the room's front door.
    """
    by_name = {".".join(module.parts): module for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in by_name}
    for name, module in by_name.items():
        for _, target, own in imports(module):
            full, front = ".".join(target), ".".join(target[:-1])
            if own:
                graph[name].update([full] if full in by_name else [front] if front in by_name else [])
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """One line for each module that can reach itself: the shortest way round."""
    found: list[str] = []
    for start in sorted(graph):
        ways: dict[str, tuple[str, ...]] = {target: (target,) for target in sorted(graph[start])}
        queue = list(ways)
        while queue and start not in ways:
            here = queue.pop(0)
            for target in sorted(graph[here] - ways.keys()):
                ways[target] = (*ways[here], target)
                queue.append(target)
        if start in ways:
            found.append(" -> ".join((start, *ways[start])))
    return found


def links(root: Path) -> list[str]:
    """Every room is a folder at the root and a relative link in p2pserve/; kernels has no __init__.py."""
    bad: list[str] = []
    for room in FLOORS:
        link = root / "p2pserve" / room
        if not (root / room).is_dir() or (root / room).is_symlink():
            bad.append(f"{room}/ is no folder")
        if not link.is_symlink() or link.readlink() != Path("..") / room:
            bad.append(f"p2pserve/{room} is no link to ../{room}")
        if (root / room / "__init__.py").exists() is (room == "kernels"):
            bad.append(f"{room}/__init__.py must{' not' if room == 'kernels' else ''} be there")
    return bad


def read(*folders: str) -> list[Module]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


ROOMS = read(*FLOORS)
FRONT = Module("__init__.py", (ROOT / "p2pserve" / "__init__.py").read_text(encoding="utf-8"))

Rule = Callable[[Module], Iterator[str]]


@pytest.mark.parametrize(
    ("rule", "modules"),
    [
        pytest.param(floors, ROOMS, id="floors"),
        pytest.param(wrapped, ROOMS, id="wrapped"),
        pytest.param(unsafe, [*ROOMS, *read("tests"), FRONT], id="unsafe"),
        pytest.param(pure, ROOMS, id="pure"),
        pytest.param(budgets, [*ROOMS, FRONT], id="budgets"),
        pytest.param(swallows, [*ROOMS, FRONT], id="swallows"),
        pytest.param(sleeps, read("tests/unit", "tests/sim"), id="sleeps"),
    ],
)
def test_the_checkout_keeps(rule: Rule, modules: list[Module]) -> None:
    complaints = [complaint for module in modules for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


def test_there_are_no_import_circles() -> None:
    found = circles(import_graph([*ROOMS, FRONT]))
    assert not found, "\n".join(found)


def test_rooms_are_folders_and_links() -> None:
    assert links(ROOT) == []


def test_every_listed_swallow_is_in_use() -> None:
    used = {name for module in [*ROOMS, FRONT] for name, _ in swallowing(module)}
    assert SWALLOWS.keys() <= used


NODE, COORDINATOR, ENGINE = "node/agent.py", "coordinator/plan.py", "node/engine/server.py"
TRY = "def f() -> None:\n    try:\n        g()\n    {}:\n        {}\n"


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (floors, "kvtransport/wire.py", "from .. import node"),
        (floors, "kvtransport/wire/frames.py", "from ...node.agent import Agent"),
        (floors, "kernels/codec.py", "from ..kvtransport import wire"),
        (floors, "bootstrap/members/gossip.py", "from ...coordinator import Plan"),
        (floors, COORDINATOR, "def f():\n    from ..kernels import codec"),
        (floors, "sims/run.py", "if TYPE_CHECKING:\n    from ..node import agent"),
        (floors, ENGINE, "from ...sdk.client import Client"),
        (floors, "node/planning/worker.py", "from ...sims.world import simulate"),
        (floors, "node/__init__.py", "from ..sdk import Client"),
        (floors, "sdk/cli.py", "import p2pserve.node"),
        (floors, "sdk/cli.py", "from p2pserve.node import agent"),
        (floors, "sdk/cli.py", "import_module('p2pserve.node')"),
        (floors, "sdk/cli.py", "import kernels"),
        (floors, "sdk/cli.py", "from ..utils import thing"),
        (floors, "sdk/cli.py", "from ....node import agent"),
        (wrapped, NODE, "import libp2p.host"),
        (wrapped, "bootstrap/members/gossip.py", "from libp2p import new_host"),
        (wrapped, NODE, "def f():\n    from vllm import LLMEngine"),
        (wrapped, NODE, "importlib.import_module('vllm.v1')"),
        (unsafe, NODE, "import pickle"),
        (unsafe, NODE, "from marshal import loads"),
        (unsafe, NODE, "import cloudpickle as c"),
        (unsafe, NODE, "eval('1')"),
        (unsafe, NODE, "run = exec"),
        *((pure, COORDINATOR, f"import {name}") for name in ["trio", "torch", "time", "socket", "random", "asyncio"]),
        (pure, COORDINATOR, "def f():\n    from time import monotonic"),
        (pure, COORDINATOR, "open('x')"),
        (budgets, NODE, "\n" * 501),
        (budgets, NODE, "def f():\n" + "    x = 1\n" * 80),
        (budgets, NODE, "class A:\n    async def f(self):\n" + "        x = 1\n" * 80),
        (budgets, NODE, "def f(a, b, c, d, e, /, f, g, *, h, i): ..."),
        (swallows, NODE, TRY.format("except", "pass")),
        (swallows, NODE, TRY.format("except Exception", "log()")),
        (swallows, NODE, TRY.format("except BaseException as error", "return")),
        (swallows, NODE, TRY.format("except (OSError, Exception)", "pass")),
        (swallows, NODE, TRY.format("except* Exception", "pass")),
        (swallows, NODE, TRY.format("except builtins.Exception", "pass")),
        (swallows, NODE, TRY.format("except Exception", "def g():\n            raise")),
        (swallows, NODE, "with contextlib.suppress(Exception):\n    f()"),
        (sleeps, "tests/unit/test_x.py", "time.sleep(1)"),
        (sleeps, "tests/sim/test_x.py", "async def f():\n    await trio.sleep(0)"),
        (sleeps, "tests/unit/test_x.py", "from time import sleep"),
    ],
)
def test_a_rule_can_fail(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Module(path, text)))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (floors, "kvtransport/wire.py", "from ..kernels.codec import pack\nfrom . import tickets"),
        (floors, TRIES, "from ...sims.world import simulate"),
        (floors, ENGINE, "from ...kvtransport.frames import KVFrame\nfrom ..agent import x\nfrom .y import z"),
        (floors, "sdk/cli.py", "from .. import __version__\nfrom ..sims import events"),
        (wrapped, "bootstrap/streams/libp2p_host.py", "import libp2p"),
        (wrapped, ENGINE, "from vllm import LLMEngine"),
        (unsafe, NODE, "model.eval()\nimport json"),
        (pure, COORDINATOR, "import math\nfrom .timetable import time"),
        (pure, NODE, "import time"),
        (budgets, NODE, "\n" * 500 + "def f(self, a, b, c, d, e, f, g, h): ..."),
        (budgets, NODE, "def f():\n" + "    x = 1\n" * 79),
        (swallows, NODE, TRY.format("except Exception as error", "raise Ours() from error")),
        (swallows, NODE, TRY.format("except OSError", "pass")),
        (sleeps, "tests/unit/test_x.py", "clock.sleep(1)\ntrio.sleep_forever"),
    ],
)
def test_a_rule_lets_good_code_pass(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Module(path, text)))


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"node/a.py": "from .b import x", "node/b.py": "from .a import y"}, 2),
        (
            {
                "node/a.py": "def f():\n    from . import b",
                "node/b.py": "if TYPE_CHECKING:\n    from .a import y",
            },
            2,
        ),
        ({"node/__init__.py": "from .a import x", "node/a.py": "from . import y"}, 2),
        ({"node/a.py": "from .a import x"}, 1),
        ({"__init__.py": "from .sdk.c import C", "sdk/c.py": "from .. import __version__"}, 2),
        ({"node/a.py": "from ..sdk.b import x", "sdk/b.py": "from ..node.a import y"}, 2),
        ({"node/__init__.py": "from .a import x", "node/a.py": "from .b import y", "node/b.py": ""}, 0),
    ],
)
def test_circles_are_found(sources: dict[str, str], expected: int) -> None:
    graph = import_graph(Module(path, text) for path, text in sources.items())
    assert len(circles(graph)) == expected


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "p2pserve").mkdir()
    for room in FLOORS:
        (tmp_path / room).mkdir()
        if room != "kernels":
            (tmp_path / room / "__init__.py").touch()
        (tmp_path / "p2pserve" / room).symlink_to(Path("..") / room)
    assert links(tmp_path) == []
    (tmp_path / "kernels" / "__init__.py").touch()
    (tmp_path / "node" / "__init__.py").unlink()
    (tmp_path / "p2pserve" / "sdk").unlink()
    (tmp_path / "p2pserve" / "sims").unlink()
    (tmp_path / "p2pserve" / "sims").symlink_to(tmp_path / "sims")
    assert len(links(tmp_path)) == 4
