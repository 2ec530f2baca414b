"""What traffic costs. Rented boxes are billed by the gigabyte for what they send and again for what
they receive, so a byte is paid for at both ends of every hop: twice on a direct path, four times
through a relay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from ..errors import FiguresError
from ..probing.figures import GB, BoxFigures, LinkFigures

_UNKNOWN = BoxFigures()


@dataclass(frozen=True, slots=True)
class HopCost:
    """What one hop of one path was billed for: `usd_up` at the source, `usd_down` at the target."""

    source: str
    target: str
    bytes: int
    usd_up: float
    usd_down: float


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What one transfer cost. `payload_bytes` arrived; `billed_bytes` counts every byte each time
    it was billed."""

    payload_bytes: int
    hops: tuple[HopCost, ...]

    @property
    def billed_bytes(self) -> int:
        return 2 * sum(hop.bytes for hop in self.hops)

    @property
    def usd(self) -> float:
        return fsum(hop.usd_up + hop.usd_down for hop in self.hops)

    @property
    def usd_per_gb(self) -> float:
        """Dollars for each gigabyte that arrived; 0 when none did."""
        return self.usd / (self.payload_bytes / GB) if self.payload_bytes else 0.0

    def explain(self) -> str:
        """One line for people."""
        hops = ", ".join(f"{hop.source} > {hop.target} {hop.bytes / 1e6:.1f} MB" for hop in self.hops)
        return (
            f"${self.usd:.6f} for {self.payload_bytes / 1e6:.1f} MB (${self.usd_per_gb:.4f}/GB; "
            f"{self.billed_bytes / 1e6:.1f} MB billed): {hops or 'nothing sent'}"
        )


def hop_prices(
    boxes: Mapping[str, BoxFigures], source: str, target: str, link: LinkFigures | None = None
) -> tuple[float, float]:
    """Dollars per GB that source and target are billed for one hop. A link's own price goes first,
    to the source; a box without figures is free."""
    if link is not None and link.usd_per_gb is not None:
        return link.usd_per_gb, 0.0
    return boxes.get(source, _UNKNOWN).up_usd_per_gb, boxes.get(target, _UNKNOWN).down_usd_per_gb


def path_usd_per_gb(
    boxes: Mapping[str, BoxFigures], links: Mapping[tuple[str, str], LinkFigures], stops: Sequence[str]
) -> float:
    """What all boxes along `stops` together pay for a gigabyte: (source, target) or (source, relay,
    target)."""
    return fsum(sum(hop_prices(boxes, a, b, links.get((a, b)))) for a, b in pairwise(stops))


def transfer_cost(
    boxes: Mapping[str, BoxFigures],
    links: Mapping[tuple[str, str], LinkFigures],
    ends: tuple[str, str],
    bytes_by_via: Mapping[str | None, int],
    *,
    payload_bytes: int | None = None,
) -> TransferCost:
    """What a transfer between `ends` (source, target) cost, from bytes by path: `None` direct, else
    the relay's name. `payload_bytes`: those wanted."""
    hops: list[HopCost] = []
    for via, size in sorted(bytes_by_via.items(), key=lambda item: item[0] or ""):
        if size < 0:
            raise FiguresError(f"bytes over {via or 'the direct path'} are {size}; they must not be negative")
        stops = ends if via is None else (ends[0], via, ends[1])
        for a, b in pairwise(stops):
            up, down = hop_prices(boxes, a, b, links.get((a, b)))
            hops.append(HopCost(a, b, size, up * size / GB, down * size / GB))
    sent = sum(bytes_by_via.values())
    return TransferCost(sent if payload_bytes is None else payload_bytes, tuple(hops))
