"""Numbers as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from p2pserve.node.dashboard import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00042, "0"),
        (0.063, "0.063"),
        (0.0999, "0.1"),
        (1.0, "1"),
        (1.236, "1.24"),
        (9.994, "9.99"),
        (9.996, "10"),
        (28.44, "28.4"),
        (99.96, "100"),
        (412.4, "412"),
        (1e6, "1000000"),
    ],
)
def test_three_digits_that_matter(value: float, text: str) -> None:
    assert units.digits(value) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("seconds", None, "–"),
        ("seconds", 0.0, "0 ms"),
        ("seconds", 0.0004, "0.4 ms"),
        ("seconds", 0.412, "412 ms"),
        ("seconds", 0.9996, "1 s"),
        ("seconds", 12.34, "12.3 s"),
        ("seconds", 180, "3 min"),
        ("seconds", 9000, "2.5 h"),
        ("gbps", None, "–"),
        ("gbps", 0.85, "0.85 Gb/s"),
        ("size", None, "–"),
        ("size", 0, "0 B"),
        ("size", 999, "999 B"),
        ("size", 630_000, "630 kB"),
        ("size", 999_600, "1 MB"),
        ("size", 21.9e9, "21.9 GB"),
        ("size", 3.2e15, "3200 TB"),
        ("usd", None, "–"),
        ("usd", 0, "$0.00"),
        ("usd", 3.36, "$3.36"),
        ("usd", 1234.5, "$1,234.50"),
        ("usd", 0.00031, "$0.00031"),
        ("usd", 0.00999, "$0.0100"),
        ("usd", 0.0000031, "$0.0000031"),
        ("usd", 0.00000031, "<$0.000001"),
        ("share", None, "–"),
        ("share", 0.974, "97 %"),
        ("share", 0.9971, "99.7 %"),
        ("share", 1.0, "100 %"),
        ("count", None, "–"),
        ("count", 1210, "1,210"),
        ("ago", None, "–"),
        ("ago", 1.0, "now"),
        ("ago", 12, "12 s"),
        ("ago", 600, "10 min"),
        ("ago", 7200, "2 h"),
        ("ago", 86400 * 3, "3 d"),
        ("clock_time", 1_800_000_000.0, "08:00:00"),
    ],
)
def test_a_number_has_its_unit(name: str, value: Any, text: str) -> None:
    assert getattr(units, name)(value).replace(units.SPACE, " ") == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ttft_s", 0.412, "ttft 412 ms"),
        ("wire_bytes", 630_000, "wire 630 kB"),
        ("capacity_gbps", 1.0, "capacity 1 Gb/s"),
        ("prompt_tokens", 1210, "prompt tokens 1,210"),
        ("share", 0.5, "share 0.5"),
        ("usd", 0.0, "$0.00"),
        ("traffic_usd", 0.002, "traffic $0.0020"),
        ("is_floor", True, "is floor True"),
        ("finish", "stop", "finish stop"),
        ("reason_s", "not a number", "reason s not a number"),
    ],
)
def test_a_fact_has_the_unit_that_its_name_tells(name: str, value: Any, text: str) -> None:
    assert units.fact(name, value).replace(units.SPACE, " ") == text
