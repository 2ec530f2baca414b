"""Colours of links and boxes, for terminals and drawings: bright is fast, and they can be told apart without hue."""

from __future__ import annotations

from math import log10
from typing import Final

from ...node.observing.values import LinkSummary

SLOW_GBPS: Final = 0.05
FAST_GBPS: Final = 50.0
_SCALE: Final = (
    (68, 1, 84), (72, 40, 120), (62, 73, 137), (49, 104, 142), (38, 130, 142),
    (31, 158, 137), (53, 183, 121), (110, 206, 88), (181, 222, 43), (253, 231, 37),
)  # fmt: skip
PHASES: Final = {"prefill": "#d55e00", "decode": "#0072b2", "mixed": "#008060"}
ON_DARK: Final = {"prefill": "#e69f00", "decode": "#56b4e9", "mixed": "#2bb673"}  # as text, in terminals
NEUTRAL: Final = "#6b7280"
UNREACHABLE: Final = "#b3261e"
UNKNOWN: Final = "#d9d9df"
DARK: Final = "#14161a"
LIGHT: Final = "#ffffff"


def rate_colour(gbps: float) -> str:
    """The colour of a rate, on a logarithmic scale from SLOW_GBPS to FAST_GBPS."""
    share = log10(max(gbps, 1e-9) / SLOW_GBPS) / log10(FAST_GBPS / SLOW_GBPS)
    at = min(1.0, max(0.0, share)) * (len(_SCALE) - 1)
    low = min(int(at), len(_SCALE) - 2)
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(_SCALE[low], _SCALE[low + 1], strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def link_colour(link: LinkSummary | None) -> str:
    """The colour of a link's cell."""
    if link is None or link.known == "prior":
        return UNKNOWN
    return rate_colour(link.gbps) if link.reachable else UNREACHABLE


def ink_on(colour: str) -> str:
    """What can be read on that colour."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255.0 for at in (1, 3, 5))
    return DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else LIGHT


def phase_colour(phase: str) -> str:
    """The colour of what a box does."""
    return PHASES.get(phase, NEUTRAL)
