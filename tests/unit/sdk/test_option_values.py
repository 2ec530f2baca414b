"""An option that may be given several times."""

import argparse

import pytest

from p2pserve.sdk.commands.option_values import Listed


@pytest.mark.parametrize(
    ("arguments", "default", "expected"),
    [
        ([], None, None),
        ([], "env", "env"),
        (["--where", "a"], "env", "a"),
        (["--where", "a,b", "--where", "c"], "env", "a,b,c"),
    ],
)
def test_values_are_listed_and_replace_the_default(
    arguments: list[str], default: str | None, expected: str | None
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", action=Listed, default=default)
    for _ in range(2):  # one parse leaves nothing for the next
        assert parser.parse_args(arguments).where == expected
