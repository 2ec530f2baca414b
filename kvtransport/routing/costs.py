"""What traffic costs. Rented boxes are billed by the gigabyte for what they send and again for what
they receive, so a byte is paid for at both ends of every hop: twice on a direct path, four times
through a relay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import fsum

from ..probing.figures import GB, BoxFigures, LinkFigures

_UNKNOWN = BoxFigures()


def path_usd_per_gb(
    boxes: Mapping[str, BoxFigures], links: Mapping[tuple[str, str], LinkFigures], stops: Sequence[str]
) -> float:
    """What all boxes along `stops` together pay for a gigabyte: (source, target) or (source, relay,
    target). A link's own price goes before those of its boxes; a box without figures is free."""
    prices: list[float] = []
    for source, target in pairwise(stops):
        link = links.get((source, target))
        if link is not None and link.usd_per_gb is not None:
            prices.append(link.usd_per_gb)
        else:
            prices.append(boxes.get(source, _UNKNOWN).up_usd_per_gb + boxes.get(target, _UNKNOWN).down_usd_per_gb)
    return fsum(prices)


def transfer_usd(
    boxes: Mapping[str, BoxFigures],
    links: Mapping[tuple[str, str], LinkFigures],
    ends: tuple[str, str],
    bytes_by_via: Mapping[str | None, int],
) -> float:
    """What a transfer between `ends` (source, target) cost, from the bytes that each path carried:
    `None` direct, else the relay's name. Bytes that were sent twice are paid for twice."""
    return fsum(
        path_usd_per_gb(boxes, links, ends if via is None else (ends[0], via, ends[1])) * size / GB
        for via, size in bytes_by_via.items()
    )
