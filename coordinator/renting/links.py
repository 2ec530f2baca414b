"""Links that nobody has measured, between boxes that nobody has rented: what they may be like.

A link is a range, not a figure. Ranges are the tenth, fiftieth and ninetieth percentiles of what
was measured between regions of clouds (`sims/data/wan_links.csv`), bounded by what the market says
of both boxes' lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from ..planning.model.cluster import Box, Cluster
from .needs import Needs
from .offers import Offer
from .places import Distance, distance


class Outlook(StrEnum):
    """Which end of every range counts."""

    PESSIMISTIC = "pessimistic"
    EXPECTED = "expected"
    OPTIMISTIC = "optimistic"


class LinkGuess(NamedTuple):
    """A round trip, and what many streams reach in Gb/s."""

    rtt_s: float
    gbps: float


LINK_RANGES: Final[dict[Distance, dict[Outlook, LinkGuess]]] = {
    kind: dict(zip(Outlook, (LinkGuess(rtt_ms / 1e3, gbps) for rtt_ms, gbps in figures), strict=True))
    for kind, figures in {
        Distance.SITE: ((0.7, 5.24), (0.7, 6.82), (0.3, 7.05)),
        Distance.COUNTRY: ((67.6, 4.34), (35.0, 4.68), (1.8, 4.78)),
        Distance.CONTINENT: ((81.9, 3.99), (27.2, 4.66), (15.6, 15.1)),
        Distance.WORLD: ((254.0, 1.21), (157.6, 3.08), (91.3, 9.51)),
    }.items()
}
"""By distance. Rows of clouds alone: lines of homes are slower, which their offers say."""

LINK_RANGES[Distance.UNKNOWN] = {
    Outlook.PESSIMISTIC: LINK_RANGES[Distance.WORLD][Outlook.PESSIMISTIC],
    Outlook.EXPECTED: LINK_RANGES[Distance.CONTINENT][Outlook.EXPECTED],
    Outlook.OPTIMISTIC: LINK_RANGES[Distance.COUNTRY][Outlook.OPTIMISTIC],
}

LINE_SHARE: Final = {Outlook.PESSIMISTIC: 0.5, Outlook.EXPECTED: 0.75, Outlook.OPTIMISTIC: 1.0}
"""Of the rate that a market says of a box's line, what another box gets of it: assumed. A host's
line is shared by all that rent there."""

UNKNOWN_LINE_GBPS: Final = {Outlook.PESSIMISTIC: 0.5, Outlook.EXPECTED: 1.0, Outlook.OPTIMISTIC: 5.0}
"""Of a box whose market says nothing of its line: assumed."""


def cluster_of(offers: Sequence[Offer], outlook: Outlook, needs: Needs) -> Cluster:
    """These boxes, rented, with links as they may turn out."""
    many = len(offers)
    gbps, rtt_s, usd_per_gb = np.zeros((many, many)), np.zeros((many, many)), np.zeros((many, many))
    for source, one in enumerate(offers):
        for target, other in enumerate(offers):
            if source != target:
                guess = LINK_RANGES[distance(one.place, other.place)][outlook]
                lines = _line_gbps(one.up_gbps, outlook), _line_gbps(other.down_gbps, outlook)
                gbps[source, target], rtt_s[source, target] = min(guess.gbps, *lines), guess.rtt_s
                usd_per_gb[source, target] = one.up_usd_per_gb + other.down_usd_per_gb
    return Cluster(boxes=tuple(box_of(offer, needs) for offer in offers), gbps=gbps, rtt_s=rtt_s, usd_per_gb=usd_per_gb)


def box_of(offer: Offer, needs: Needs) -> Box:
    """An offer as the planner's box."""
    usd = offer.hourly_usd(needs.disk_gb(offer))
    return Box(
        id=offer.id, gpu=offer.gpu, gpus=offer.gpus, site=offer.place.site, usd_per_hour=usd,
        gpu_link_gbps=offer.gpu_link_gbps,
    )  # fmt: skip


def _line_gbps(told: float | None, outlook: Outlook) -> float:
    return UNKNOWN_LINE_GBPS[outlook] if told is None else told * LINE_SHARE[outlook]
