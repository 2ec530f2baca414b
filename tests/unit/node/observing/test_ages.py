"""How long ago something was, for people."""

import pytest

from p2pserve.node.observing.ages import describe_age, describe_gone


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (59, "59 s"), (60, "1 min"), (130, "2 min"), (7000, "117 min"), (7200, "2 h"),
     (172_700, "48 h"), (172_800, "2 days")],
)  # fmt: skip
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert describe_age(seconds) == text


def test_the_latest_are_named_and_the_others_counted() -> None:
    assert describe_gone({}) == ""
    assert (
        describe_gone({"12D3first1": 130.0, "12D3second": 5.0}) == "vast-goat is dead since 5 s, solar-deer since 2 min"
    )
    assert describe_gone({f"12D3{number}": float(number) for number in range(5)}).endswith(" since 2 s, 2 more")
