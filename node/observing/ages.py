"""How long ago something was, for people."""

from __future__ import annotations

from collections.abc import Mapping

from ...coordinator.names import name_of

MAX_NAMED = 3


def describe_age(seconds: float) -> str:
    """`12 s`, `2 min`, `5 h` or `3 days`."""
    for unit_s, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s or (seconds >= unit_s and unit == "min"):
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def describe_gone(ages: Mapping[str, float]) -> str:
    """`amber-otter is dead since 2 min, calm-heron since 5 h`, the latest first; "" where nobody is."""
    latest = sorted(ages.items(), key=lambda each: each[1])
    shown = [
        f"{name_of(peer)}{' is dead' * (not index)} since {describe_age(age)}"
        for index, (peer, age) in enumerate(latest)
    ]
    more = [f"{len(shown) - MAX_NAMED} more"] if len(shown) > MAX_NAMED else []
    return ", ".join([*shown[:MAX_NAMED], *more])
