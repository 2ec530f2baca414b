"""Do the unit tests of the modules that decide notice when those decide otherwise? `python -m tests.mutants --help`.

Samples small faults (a flipped comparison, a constant off by one, a dropped `not`, `min` for `max`, a condition that
always holds), makes them one at a time in a copy of the checkout, and runs the module's own unit tests there: those in
`tests/unit` and `tests/sim/bootstrap` that import it, and for the machines of membership their scripts, which say what
a whole network does. A fault that no test notices is printed with its line.

    $ make mutants
    bootstrap/members/election.py:71: Lt -> LtE: survived
    killed 187 of 200 (93.5 %)
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 60.0
FOLDERS = ("tests/unit", "tests/sim/bootstrap")
PASSING = 0.9
NO_FAULT = -1

OTHERS = ("cryptography", "hypothesis.strategies", "msgspec", "numpy", "scipy.special", "trio.testing")
PRELOADED = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins among them, which pytest would rewrite

MODULES = [
    f"{folder}/{name}"
    for folder, names in {
        "bootstrap": ("address_book",),
        "bootstrap/members": (
            "admission", "allowance", "election", "gossip", "leading", "liveness", "mesh", "neighbours", "overlay",
            "peering", "roster", "table", "watch",
        ),
        "bootstrap/trust": ("entries", "orders", "targets", "tokens"),
        "coordinator": (
            "calibration", "capacity", "demand", "network_plan", "network_problem", "pipelines", "workload_profiler",
        ),
        "coordinator/costs": ("model_shape", "replica", "rounds"),
        "coordinator/planning/lower": (
            "behaviour", "evaluator", "flow", "orchestration", "pair_model", "parallel", "proposals", "queueing",
            "replica_pairs", "simplex", "upper_bound",
        ),
        "coordinator/planning/upper": (
            "cells", "clustering", "light_rescheduling", "moves", "packing", "scorer", "search", "search_space",
            "seed_assignment", "tabu", "trials",
        ),
        "coordinator/requests": (
            "admission", "attempt", "drain_rate", "fair_queue", "machine", "placement", "retry_times", "stalls",
        ),
        "coordinator/routing": ("interface", "plan_and_queues", "router"),
        "kvtransport/link": ("budget", "dialling", "machine", "receiving", "sending", "transfers"),
        "kvtransport/probing": ("burst_meter", "estimates", "probe"),
        "kvtransport/routing": ("choices", "layerwise", "paths", "prediction", "reslice", "steering"),
        "kvtransport/wire": ("assembly", "permits"),
        "node": ("view",),
        "node/box": ("fitting", "shares"),
        "node/engine/emulated": ("batching",),
        "node/engine/transfers": ("idle", "pacing", "wait_limits"),
        "node/links": ("link_knowledge", "path_selection"),
        "node/planning": ("coordination", "set_aside"),
        "node/replica": ("hung", "place"),
        "node/requests": ("acceptance", "live_request", "routes"),
        "sims/results": ("trials",),
    }.items()
    for name in names
]  # fmt: skip
"""Modules that decide: no clock, no task, no socket."""

SCRIPTS = {"bootstrap/members": ["tests/sim/bootstrap/test_scripts.py"]}
"""By folder: tests that run its modules together, and say what must follow."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One fault: `number` counts the places of `module` that can be changed."""

    module: str
    number: int


class Changer(ast.NodeTransformer):
    """Walks a module's functions and changes the place with the given number; NO_FAULT changes nothing and counts."""

    def __init__(self, number: int = NO_FAULT) -> None:
        self.number, self.count, self.change = number, 0, ""
        self._depth = 0

    def _is_chosen(self, node: ast.expr | ast.stmt, change: str) -> bool:
        chosen = self._depth > 0 and self.count == self.number
        if chosen:
            self.change = f"{node.lineno}: {change}"
        self.count += self._depth > 0
        return chosen

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Only bodies: neither annotations nor defaults, and nothing that is there for people to read."""
        if node.name not in {"__repr__", "__str__"}:
            self._depth += 1
            node.body = [self.visit(statement) for statement in node.body]
            self._depth -= 1
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Texts of errors are not decisions."""
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Nor is what holds anyway."""
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Nor are other texts."""
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Nor is `strict=True`, which says that lengths agree."""
        return node if node.arg == "strict" else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """The annotation stays as it is."""
        node.value = self.visit(node.value) if node.value is not None else None
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for index, operator in enumerate(node.ops):
            other = SWAPS[type(operator)]
            if self._is_chosen(node, f"{type(operator).__name__} -> {other.__name__}"):
                node.ops[index] = other()  # type: ignore[call-overload]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, "and <-> or"):
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in SWAPS and self._is_chosen(node, f"another operator than {type(node.op).__name__}"):
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if isinstance(node.op, ast.Not) and self._is_chosen(node, "not dropped") else node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, "condition always holds"):
            node.test = ast.copy_location(ast.Constant(True), node.test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func
        if isinstance(name, ast.Name) and name.id in CALLS and self._is_chosen(node, f"{name.id} -> {CALLS[name.id]}"):
            name.id = CALLS[name.id]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_chosen(node, f"{node.value} -> {not node.value}"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int | float) and self._is_chosen(node, f"{node.value} -> {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node


def count_places(module: str) -> int:
    changer = Changer()
    changer.visit(ast.parse((ROOT / f"{module}.py").read_text(encoding="utf-8")))
    return changer.count


def sample(modules: Sequence[str], size: int, seed: int) -> list[Mutant]:
    """`size` different faults, each place of each module as likely as any other."""
    places = [Mutant(module, number) for module in modules for number in range(count_places(module))]
    return sorted(random.Random(seed).sample(places, min(size, len(places))))


@cache
def read_tests() -> dict[str, str]:
    """Path -> text of each file of tests that may be a module's own."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def is_above(folder: Path, module: str) -> bool:
    """Whether a folder of tests mirrors the module's own, or one of its room's above that."""
    return folder != Path("tests/unit") and (Path("tests/unit") / module).is_relative_to(folder)


@cache
def find_tests(module: str) -> list[str]:
    """The unit tests that import `module` and are in the folder that mirrors its own or above that, those of its name
    first; where there are none, all that import it, or else all of that folder or of its room. Then the scripts."""
    room, _, name = module.replace("/", ".").rpartition(".")
    direct = (f"p2pserve.{room}.{name} import", f"p2pserve.{room} import {name}\n")
    texts = read_tests()
    found = [path for path, text in texts.items() if any(phrase in text for phrase in direct)]
    mirror = [path for path in texts if Path(path).parent == Path("tests/unit") / Path(module).parent]
    near = [path for path in found if is_above(Path(path).parent, module)]
    in_room = [path for path in texts if path.startswith(f"tests/unit/{module.partition('/')[0]}/")]
    own = sorted(near or found or mirror or in_room, key=lambda path: Path(path).stem != f"test_{name}")
    return own + [path for path in SCRIPTS.get(module.rpartition("/")[0], []) if path not in own]


class Outcome(Enum):
    """What the tests of a module did. HUNG: they do not end within TIMEOUT_S, as they do without a fault."""

    PASSED = "survived"
    FAILED = "killed"
    HUNG = "killed: does not end"


def start_tests(tests: Sequence[str], copy: Path) -> int:
    """Pytest in a fork, which has what tests import of others already: that takes longer than most tests. Its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(copy)
        with Path(os.devnull).open("r+b") as nowhere:
            for number in range(3):
                os.dup2(nowhere.fileno(), number)
        sys.dont_write_bytecode, sys.path[0] = True, str(copy)
        os.environ.update({"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"})
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", PRELOADED, *tests]))
    finally:
        os._exit(code)


def apply_fault(mutant: Mutant, copy: Path) -> str:
    """Into a checkout of its own. What it is."""
    target = copy / f"{mutant.module}.py"
    changer = Changer(mutant.number)
    tree = changer.visit(ast.parse((ROOT / f"{mutant.module}.py").read_text(encoding="utf-8")))
    target.write_text(ast.unparse(tree), encoding="utf-8")
    return f"{mutant.module}.py:{changer.change}"


def restore(module: str, copy: Path) -> None:
    shutil.copy2(ROOT / f"{module}.py", copy / f"{module}.py")


def copy_checkout(folder: Path) -> Path:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def wait_for_one(pids: Iterable[int], deadlines: Mapping[int, float]) -> tuple[int, Outcome]:
    """The first of these processes that ends, or has to be ended."""
    while True:
        for pid in pids:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return pid, Outcome.FAILED if status else Outcome.PASSED
            if time.monotonic() > deadlines[pid]:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return pid, Outcome.HUNG
        time.sleep(0.02)


def run_all(mutants: Iterable[Mutant], copies: Sequence[Path]) -> Iterator[tuple[Outcome, Mutant, str]]:
    """Each in a free copy, as many at once as there are copies; NO_FAULT as a number leaves a module as it is."""
    free = list(copies)
    running: dict[int, tuple[Mutant, Path, str]] = {}
    deadlines: dict[int, float] = {}

    def take_one() -> tuple[Outcome, Mutant, str]:
        pid, outcome = wait_for_one(running, deadlines)
        mutant, copy, fault = running.pop(pid)
        restore(mutant.module, copy)
        free.append(copy)
        return outcome, mutant, fault

    for mutant in mutants:
        if not free:
            yield take_one()
        copy = free.pop()
        fault = apply_fault(mutant, copy)
        pid = start_tests(find_tests(mutant.module), copy)
        running[pid], deadlines[pid] = (mutant, copy, fault), time.monotonic() + TIMEOUT_S
    while running:
        yield take_one()


def run(mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Outcome, str]]:
    for name in OTHERS:
        import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_checkout(Path(folder) / str(number)) for number in range(jobs)]
        # Tests that fail anyway would count every fault as found, slow ones every fault as one that does not end.
        plain = {tuple(find_tests(mutant.module)): Mutant(mutant.module, NO_FAULT) for mutant in mutants}
        for outcome, mutant, _ in run_all(plain.values(), copies):
            if outcome is not Outcome.PASSED:
                why = "fail" if outcome is Outcome.FAILED else "take too long"
                raise SystemExit(f"mutants: these {why} without a fault: {' '.join(find_tests(mutant.module))}")
        for outcome, _, fault in run_all(mutants, copies):
            yield outcome, fault


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=200, help="faults to try (200)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (one for each core)")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="room/module without .py (all that decide)")
    options = parser.parse_args(arguments)
    mutants = sample(options.modules or MODULES, options.sample, options.seed)
    found = Counter[Outcome]()
    for outcome, text in run(mutants, options.jobs):
        found[outcome] += 1
        if outcome is not Outcome.FAILED:
            sys.stdout.write(f"{text}: {outcome.value}\n")
            sys.stdout.flush()
    killed = len(mutants) - found[Outcome.PASSED]
    hung = f", {found[Outcome.HUNG]} of them since a test did not end" if found[Outcome.HUNG] else ""
    sys.stdout.write(f"killed {killed} of {len(mutants)} ({killed / len(mutants):.1%}){hung}\n")
    return 0 if killed >= PASSING * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
