"""Bandwidth as a colour: five bands, the same in the map, in the matrix and in their legend. The colours are the style
sheet's: from orange to blue, which all eyes tell apart, in both themes."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from ..observing.values import LinkSummary
from . import units

EDGES: Final = (0.25, 1.0, 3.0, 8.0)  # Gb/s: where one band ends and the next begins
NAMES: Final = ("below 0.25", "0.25 to 1", "1 to 3", "3 to 8", "above 8")


def band_of(gbps: float) -> int:
    """The band's number, from the slowest, 0."""
    return bisect_right(EDGES, gbps)


def describe(link: LinkSummary, source: str, target: str, flow: float = 0.0) -> str:
    """A link in a line: what it carries, how far it is, how that is known, and the KV that goes over it, in Gb/s."""
    head = f"{source} → {target}: "
    if not link.reachable:
        return f"{head}unreachable. {link.reason}".strip()
    least = "at least " if link.is_floor else ""
    age = f" {units.ago(link.age_s)} ago" if link.age_s is not None and link.age_s >= 2 else ""
    parts = [
        f"{least}{units.gbps(link.gbps)}",
        f"{link.streams} streams" if link.streams != 1 else "1 stream",
        f"rtt {units.seconds(link.rtt_s)}",
        f"loss {link.loss * 100:.2g}{units.SPACE}%" if link.loss else "no loss",
        f"{units.usd(link.usd_per_gb)}/GB" if link.usd_per_gb else "",
        f"{link.known}{age}",
        f"carries {units.gbps(flow)} of KV" if flow else "",
    ]
    return head + ", ".join(part for part in parts if part)
