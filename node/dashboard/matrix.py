"""The links of a network as a table, row to column: what ThunderServe's figure 13 shows of its clusters. Of many boxes
each cell is small, and its number is for whoever points at it or has it read out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from ..observing.values import LinkSummary
from . import units
from .bands import band_of, describe
from .topology import site_of, wants_sites
from .view import View

MAX_NUMBERS: Final = 16  # ends whose cells have room for a number
MAX_ENDS: Final = 128  # that are drawn at all: more are folded, or left to the API
MAX_TOLD: Final = 32  # ends whose cells say all that is known: of more that would be a megabyte


@dataclass(frozen=True, slots=True)
class LinkCell:
    """One direction. `band` None: nothing is known of it; -1: unreachable. `is_measured`: not inferred."""

    text: str
    band: int | None
    is_measured: bool
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMatrix:
    """Ends with their labels, those of one site side by side; a row of cells for each."""

    ends: tuple[str, ...]
    sites: tuple[tuple[str, int], ...]  # and how many of the ends are there
    rows: tuple[tuple[LinkCell, ...], ...]
    has_numbers: bool
    left_out: int


def draw_matrix(view: View) -> LinkMatrix:
    """Of the boxes that are there, or of their sites."""
    nodes = sorted(view.shown, key=lambda node: (site_of(node), node.name, node.id))
    if wants_sites(view):
        ends = tuple(sorted({site_of(node) for node in nodes}))
        home = {node.id: site_of(node) for node in nodes}
        return _fill(view, ends, ends, tuple((end, 1) for end in ends), home, left_out=0)
    shown = nodes[:MAX_ENDS]
    keys = tuple(node.id for node in shown)
    sites = tuple((site, sum(site_of(node) == site for node in shown)) for site in dict.fromkeys(map(site_of, shown)))
    labels = tuple(view.label(key) for key in keys)
    return _fill(view, keys, labels, sites, {key: key for key in keys}, left_out=len(nodes) - len(shown))


def _fill(
    view: View,
    keys: Sequence[str],
    labels: tuple[str, ...],
    sites: tuple[tuple[str, int], ...],
    home: Mapping[str, str],
    *,
    left_out: int,
) -> LinkMatrix:
    found: defaultdict[tuple[str, str], list[LinkSummary]] = defaultdict(list)
    for link in view.links:
        if link.source in home and link.target in home:
            found[home[link.source], home[link.target]].append(link)
    has_numbers, told = len(keys) <= MAX_NUMBERS, len(keys) <= MAX_TOLD
    names = dict(zip(keys, labels, strict=True))
    rows = tuple(
        tuple(_make_cell(found.get((source, target), []), (names[source], names[target]), told=told) for target in keys)
        for source in keys
    )
    return LinkMatrix(ends=labels, sites=sites, rows=rows, has_numbers=has_numbers, left_out=left_out)


def _make_cell(links: Sequence[LinkSummary], ends: tuple[str, str], *, told: bool) -> LinkCell:
    if not links:
        alone = ends[0] == ends[1]
        return LinkCell(
            "" if alone else "?", None, False, "" if alone or not told else f"{ends[0]} → {ends[1]}: not known"
        )
    reachable = [link for link in links if link.reachable]
    if not reachable:
        return LinkCell("×", -1, False, describe(links[0], *ends) if told else "")
    rate = median(link.gbps for link in reachable)
    measured = any(link.known == "measured" for link in reachable)
    tip = ""
    if told and len(links) == 1:
        tip = describe(links[0], *ends)
    elif told:
        tip = f"{ends[0]} → {ends[1]}: {units.gbps(rate)}, in the middle of {len(links)} links"
    return LinkCell(units.digits(rate), band_of(rate), measured, tip)
