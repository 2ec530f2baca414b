"""Numbers as people read them: three digits that matter, and a unit."""

from __future__ import annotations

from datetime import UTC, datetime
from math import floor, log10
from typing import Final

SPACE: Final = "\N{NARROW NO-BREAK SPACE}"  # a number and its unit stay in one line
NONE: Final = "–"


def seconds(value: float | None) -> str:
    """`0.4 ms`, `412 ms`, `1.24 s`, `3 min`, `2.5 h`."""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{digits(value * 1e3)}{SPACE}ms"
    if value < 99.5:
        return f"{digits(value)}{SPACE}s"
    return f"{value / 60:.0f}{SPACE}min" if value < 5400 else f"{value / 3600:.1f}{SPACE}h"


def gbps(value: float | None) -> str:
    """`0.85 Gb/s`."""
    return NONE if value is None else f"{digits(value)}{SPACE}Gb/s"


def size(value: float | None) -> str:
    """Bytes, in powers of a thousand: `0.63 MB`."""
    if value is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f}{SPACE}B" if unit == "B" else f"{digits(value)}{SPACE}{unit}"
        value /= 1e3
    return f"{digits(value)}{SPACE}TB"


def usd(value: float | None) -> str:
    """`$3.36`; sums below a cent with two digits that matter, down to `$0.000001`."""
    if value is None:
        return NONE
    if value == 0 or value >= 0.01:
        return f"${value:,.2f}"
    if value < 1e-6:
        return "<$0.000001"
    return f"${value:.{1 - floor(log10(value))}f}"


def share(value: float | None) -> str:
    """`97 %`."""
    if value is None:
        return NONE
    return f"{value * 100:.0f}{SPACE}%" if value < 0.995 or value == 1 else f"{value * 100:.1f}{SPACE}%"


def count(value: float | None) -> str:
    """`1,210`."""
    return NONE if value is None else f"{value:,.0f}"


def digits(value: float) -> str:
    """Three that matter, and never an exponent: `0.063`, `1.24`, `28.4`, `412`."""
    if value == 0:
        return "0"
    places = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.0995 else 3
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ago(value: float | None) -> str:
    """An age: `now`, `12 s`, `3 min`, `2 h`, `5 d`."""
    if value is None:
        return NONE
    if value < 2:
        return "now"
    if value < 90:
        return f"{value:.0f}{SPACE}s"
    if value < 5400:
        return f"{value / 60:.0f}{SPACE}min"
    return f"{value / 3600:.0f}{SPACE}h" if value < 129_600 else f"{value / 86400:.0f}{SPACE}d"


def clock_time(value: float) -> str:
    """A moment in UTC: `09:14:03`."""
    return datetime.fromtimestamp(value, UTC).strftime("%H:%M:%S")


def fact(name: str, value: bool | float | str) -> str:
    """A named value, whose name tells its unit: `ttft_s` as `ttft 412 ms`, `wire_bytes` as `wire 0.63 MB`."""
    if isinstance(value, bool | str):
        return f"{name.replace('_', ' ')} {value}"
    if name.endswith("_s"):
        return f"{name[:-2].replace('_', ' ')} {seconds(value)}"
    if name.endswith("_bytes"):
        return f"{name[:-6].replace('_', ' ')} {size(value)}"
    if name == "usd" or name.endswith("_usd"):
        return f"{name[:-3].rstrip('_').replace('_', ' ')} {usd(value)}".strip()
    if name.endswith("_gbps"):
        return f"{name[:-5].replace('_', ' ')} {gbps(value)}".strip()
    return f"{name.replace('_', ' ')} {count(value) if isinstance(value, int) or value >= 100 else digits(value)}"
