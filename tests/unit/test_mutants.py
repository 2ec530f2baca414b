"""The check by small faults: its list of modules is true, and it makes the faults that it names."""

import ast

import pytest

from ..mutants import MODULES, ROOT, Changer, find_tests, sample


def change(text: str, number: int) -> str:
    """The only statement of a function, changed at one place."""
    changed = Changer(number).visit(ast.parse(f"def f(x, y):\n    {text}"))
    return ast.unparse(changed).partition("\n    ")[2]


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_decide_are_there_and_have_tests(module: str) -> None:
    assert (ROOT / f"{module}.py").is_file()
    assert find_tests(module)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("return x < y", ["return x <= y"]),
        ("return x + 1", ["return x + 2", "return x - 1"]),
        ("return not x", ["return x"]),
        ("return x and y", ["return x or y"]),
        ("return min(x, y)", ["return max(x, y)"]),
        ("x.gone = True", ["x.gone = False"]),
        ("return 'as it is'", []),
        ("return zip(x, y, strict=True)", []),
        ("assert x > 0", []),
        ("raise ValueError(x + 1)", []),
    ],
)
def test_each_place_is_changed_in_one_way(text: str, faults: list[str]) -> None:
    counter = Changer()
    counter.visit(ast.parse(f"def f(x, y):\n    {text}"))
    assert [change(text, number) for number in range(counter.count)] == faults
    assert change(text, counter.count) == text


def test_a_sample_is_of_different_places_and_the_same_for_its_seed() -> None:
    chosen = sample(["coordinator/routing/interface", "kvtransport/link/budget"], 20, 1)
    assert len(set(chosen)) == 20
    assert chosen == sample(["coordinator/routing/interface", "kvtransport/link/budget"], 20, 1)
    assert chosen != sample(["coordinator/routing/interface", "kvtransport/link/budget"], 20, 2)
