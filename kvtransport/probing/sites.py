"""Links that nobody has measured, filled in from those that somebody has.

With n boxes there are n * (n - 1) links; measuring representatives of each site is enough, because
what two boxes of two sites have between them is mostly what the sites have, bounded by the boxes'
own caps. Every figure filled in says so, and from what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median, median_low
from typing import final

from ..errors import FiguresError
from .figures import BoxFigures, LinkFigures, Source, one_stream_gbps

_UNKNOWN = BoxFigures()
_SHARE = 0.6
"""Of the confidence in the measured links, in those inferred from them."""

_REVERSED_SHARE = 0.4
_RELATIVE_SPREAD = 0.5


def infer(
    measured: Mapping[tuple[str, str], LinkFigures],
    sites: Mapping[str, str],
    boxes: Mapping[str, BoxFigures],
    wanted: Iterable[tuple[str, str]],
) -> dict[tuple[str, str], LinkFigures]:
    """Figures for those wanted links that are not measured and of whose sites some other link is.

    `sites`: box -> site. A link takes the medians of the measured links between the same two sites
    in the same direction, else in the reverse one; its rates are bounded by its own boxes' caps.
    Whether it is reachable is never taken from another link. Links about which nothing is known are
    left out: the caller has a prior for them."""
    groups: dict[tuple[str, str], list[LinkFigures]] = {}
    for (a, b), figures in sorted(measured.items()):
        if a in sites and b in sites and figures.source is Source.MEASURED and figures.reachable:
            groups.setdefault((sites[a], sites[b]), []).append(figures)
    filled: dict[tuple[str, str], LinkFigures] = {}
    for a, b in wanted:
        if a == b:
            raise FiguresError(f"a link from {a} to itself was asked for")
        if (a, b) in measured or a not in sites or b not in sites:
            continue
        direction = (sites[a], sites[b])
        share = _SHARE
        if direction not in groups:
            # Up and down differ on many boxes, so the reverse direction says less.
            direction, share = (direction[1], direction[0]), _REVERSED_SHARE
        if direction in groups:
            up, down = boxes.get(a, _UNKNOWN).up_gbps, boxes.get(b, _UNKNOWN).down_gbps
            filled[a, b] = _typical(groups[direction], direction, share).bounded(up, down)
    return filled


def leave_out_alike(
    links: Mapping[str, LinkFigures], sites: Mapping[str, str], within: float
) -> dict[str, LinkFigures]:
    """Of the links of one box, by target, those that tell everything: of each site's the first, and those that are not
    like it. `SiteLinks` fills in the others. A target without a site is left in.

    Of a link whose rates are inferred, only the round trip is this box's own."""
    first: dict[str, LinkFigures] = {}
    kept: dict[str, LinkFigures] = {}
    for target, figures in sorted(links.items(), key=_rank):
        site = sites.get(target, "")
        like = first.setdefault(site, figures) if site else figures
        if figures.source is Source.INFERRED:
            is_like = figures.reachable == like.reachable and figures.as_far(like, within)
        else:
            is_like = figures.alike(like, within)
        if like is figures or not is_like:
            kept[target] = figures
    return kept


@final
class SiteLinks(Mapping[tuple[str, str], LinkFigures]):
    """Links as boxes tell them, where each tells of one only of those to one site that are alike.

    Iterates over what was told; any other link can be asked for, and is the first to the same site."""

    def __init__(self, told: Mapping[tuple[str, str], LinkFigures], sites: Mapping[str, str]) -> None:
        self._told = told
        self._sites = sites
        self._first: dict[tuple[str, str], LinkFigures] = {}
        for (source, target), figures in sorted(
            told.items(), key=lambda link: (link[0][0], *_rank((link[0][1], link[1])))
        ):
            if sites.get(target):
                self._first.setdefault((source, sites[target]), figures)

    def __getitem__(self, link: tuple[str, str]) -> LinkFigures:
        figures = self._told.get(link)
        if figures is not None:
            return figures
        source, target = link
        if source == target:
            raise KeyError(link)
        return self._first[source, self._sites.get(target, "")]

    def __contains__(self, link: object) -> bool:
        return isinstance(link, tuple) and self.get(link) is not None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)


def _rank(link: tuple[str, LinkFigures]) -> tuple[bool, str]:
    """Of links to one site, those that were measured come first."""
    target, figures = link
    return figures.source is not Source.MEASURED, target


def _typical(group: list[LinkFigures], direction: tuple[str, str], share: float) -> LinkFigures:
    rates = [one.capacity_gbps for one in group]
    middle = median(rates)
    # Links that disagree among themselves say little about one more of them.
    spread = median(abs(rate - middle) for rate in rates) / middle if middle > 0.0 else 1.0
    agreement = 1.0 / (1.0 + (spread / _RELATIVE_SPREAD) ** 2)
    known = len(group) / (len(group) + 1.0)
    rtt_s = median(one.rtt_s for one in group)
    prices = [one.usd_per_gb for one in group]
    kind = "reverse links" if share == _REVERSED_SHARE else "links"
    return LinkFigures(
        rtt_s=rtt_s,
        rtt_min_s=min(one.rtt_min_s for one in group),
        jitter_s=median(one.jitter_s for one in group),
        loss=median(one.loss for one in group),
        # The caps of a measured pair may have held its one stream down; the window would allow more.
        one_stream_gbps=min(max(median(one.one_stream_gbps for one in group), _window_share(group, rtt_s)), middle),
        capacity_gbps=middle,
        usd_per_gb=prices[0] if prices.count(prices[0]) == len(prices) else None,
        rtt_confidence=share * known * median(one.rtt_confidence for one in group),
        rate_confidence=share * known * agreement * median(one.rate_confidence for one in group),
        capacity_is_floor=median_low(one.capacity_is_floor for one in group),
        source=Source.INFERRED,
        reason=f"median of {len(group)} measured {kind} from {direction[0]} to {direction[1]}"[:200],
    )


def _window_share(group: list[LinkFigures], rtt_s: float) -> float:
    """What a window carries at this round trip, if all of the group's single streams were held down
    by capacity."""
    held_down = all(one.one_stream_gbps >= 0.99 * one.capacity_gbps for one in group)
    return one_stream_gbps(rtt_s) if held_down else 0.0
