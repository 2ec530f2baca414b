"""Clusters as JSON files: boxes by kind, links by default, by site and by pair.

    {"name": "two rooms", "source": "an example",
     "boxes": [{"id": "a40", "gpu": "A40", "gpus": 4, "count": 2, "site": "oslo"},
               {"id": "ti", "gpu": "RTX 3090 Ti", "gpus": 4, "site": "rome", "usd_per_hour": 1.3}],
     "default": {"gbps": 1, "rtt_ms": 30, "usd_per_gb": 0.02},
     "within_site": {"gbps": 10, "rtt_ms": 0.3},
     "links": [{"a": "oslo", "b": "rome", "gbps": 2.5, "rtt_ms": 45}]}

`count` boxes of a kind are called `a40-0`, `a40-1`. Ends of a link are boxes or sites; it holds
both ways unless `"one_way": true`, and a link between boxes goes before one between sites. Prices
not given are those of the table.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import product
from typing import Final

import msgspec
import numpy as np

from ...bounds import MAX_GPUS
from ...costs.gpus import GpuError, GpuSpec, Specs, gpu_table
from .cluster import Box, Cluster, ClusterError

# Gb/s that two cards of a box reach over PCIe (16 lanes) when nothing is said: about 60 % of the bus.
PCIE_GBPS = {3: 75.0, 4: 150.0, 5: 300.0}
# Of the printed NVLink figure, which counts both directions.
NVLINK_SHARE = 0.4
LAN_RTT_MS = 0.5

MAX_BOXES: Final = 1024
"""Beyond it the tables of links alone take long, and no plan is found in minutes."""
MAX_NAME: Final = 128  # characters
GBPS: Final = (1e-6, 1e6)
RTT_MS: Final = (0.0, 6e4)
USD: Final = (0.0, 1e6)


class _LinkEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    gbps: float
    rtt_ms: float = LAN_RTT_MS
    usd_per_gb: float = 0.0


class _PairEntry(_LinkEntry, frozen=True, forbid_unknown_fields=True, kw_only=True):
    a: str
    b: str
    one_way: bool = False


class _BoxEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    gpu: str
    gpus: int = 1
    count: int = 1
    site: str = ""
    usd_per_hour: float | None = None
    gpu_link_gbps: float | None = None
    nvlink: bool | None = None


class _ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    boxes: list[_BoxEntry]
    source: str = ""
    default: _LinkEntry | None = None
    within_site: _LinkEntry | None = None
    links: list[_PairEntry] = []


def parse_cluster(text: str | bytes, specs: Specs = Specs.DENSE) -> Cluster:
    """The cluster of a file's text. Raises ClusterError or GpuError with one line that says what
    and where."""
    try:
        described = msgspec.json.decode(text, type=_ClusterFile)
    except msgspec.DecodeError as error:
        raise ClusterError(f"cluster file: {error}") from None
    for kind in described.boxes:
        _check_kind(kind)
    count = sum(kind.count for kind in described.boxes)
    if count > MAX_BOXES:
        raise ClusterError(f"boxes: {count} in all; a plan is made for at most {MAX_BOXES}")
    boxes = [box for kind in described.boxes for box in _boxes(kind, specs)]
    return _link_boxes(tuple(boxes), described)


@cache
def cluster_names() -> tuple[str, ...]:
    """The clusters that come with the project."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _folder().iterdir()))


def packaged_cluster(name: str, specs: Specs = Specs.DENSE) -> Cluster:
    """One of `cluster_names`. Raises ClusterError."""
    if name not in cluster_names():
        raise ClusterError(f"cluster {name!r} is neither a file nor one of {', '.join(cluster_names())}")
    return parse_cluster((_folder() / f"{name}.json").read_bytes(), specs)


def _folder() -> Traversable:
    return files(__package__.partition(".planning")[0]) / "data" / "clusters"


def _check_kind(kind: _BoxEntry) -> None:
    """Before anything is made of its numbers."""
    for field, name in (("id", kind.id), ("site", kind.site)):
        if not name.isprintable() or len(name) > MAX_NAME:
            raise ClusterError(f"boxes: {field} {name[:32]!r}: a name is one line of at most {MAX_NAME} characters")
    where = f"boxes: {kind.id or '(no id)'}"
    _check_range(kind.count, "count", (1, MAX_BOXES), where)
    _check_range(kind.gpus, "gpus", (1, MAX_GPUS), where)
    if kind.usd_per_hour is not None:
        _check_range(kind.usd_per_hour, "usd_per_hour", USD, where)
    if kind.gpu_link_gbps is not None:
        _check_range(kind.gpu_link_gbps, "gpu_link_gbps", GBPS, where)


def _boxes(kind: _BoxEntry, specs: Specs) -> list[Box]:
    where = f"boxes: {kind.id or '(no id)'}"
    try:
        gpu = gpu_table().find(kind.gpu, specs)
    except GpuError as error:
        raise GpuError(f"{where}: {error}") from None
    price = kind.usd_per_hour if kind.usd_per_hour is not None else gpu.usd_per_hour * kind.gpus
    names = [kind.id] if kind.count == 1 else [f"{kind.id}-{number}" for number in range(kind.count)]
    return [
        Box(
            id=name,
            gpu=gpu,
            gpus=kind.gpus,
            site=kind.site or name,
            usd_per_hour=price,
            gpu_link_gbps=_gpu_link(kind, gpu),
        )
        for name in names
    ]


def card_link_gbps(gpu: GpuSpec, nvlink: bool | None = None) -> float:
    """Gb/s that two such cards of a box reach between each other. With nothing said of NVLink,
    cards have it whose very form includes it. Raises ClusterError."""
    wired = nvlink if nvlink is not None else "SXM" in gpu.name
    if wired and not gpu.nvlink_gbps:
        raise ClusterError(f"nvlink is true, and {gpu.name} has none")
    return gpu.nvlink_gbps * 8 * NVLINK_SHARE if wired else PCIE_GBPS[gpu.pcie_gen]


def _gpu_link(kind: _BoxEntry, gpu: GpuSpec) -> float:
    if kind.gpu_link_gbps is not None:
        return kind.gpu_link_gbps
    try:
        return card_link_gbps(gpu, kind.nvlink)
    except ClusterError as error:
        raise ClusterError(f"boxes: {kind.id}: {error}") from None


def _link_boxes(boxes: tuple[Box, ...], described: _ClusterFile) -> Cluster:
    count = len(boxes)
    gbps, rtt, price = np.zeros((count, count)), np.zeros((count, count)), np.zeros((count, count))

    def put(source: int, target: int, link: _LinkEntry) -> None:
        gbps[source, target], rtt[source, target] = link.gbps, link.rtt_ms / 1e3
        price[source, target] = link.usd_per_gb

    for field, link in (("default", described.default), ("within_site", described.within_site)):
        if link is not None:
            _check(link, field)
    for source, target in product(range(count), repeat=2):
        same = boxes[source].site == boxes[target].site
        link = described.within_site if same and described.within_site is not None else described.default
        if link is not None and source != target:
            put(source, target, link)
    by_name: dict[str, list[int]] = {}
    for number, box in enumerate(boxes):
        by_name.setdefault(box.site, []).append(number)
    by_name.update({box.id: [number] for number, box in enumerate(boxes)})
    ids = {box.id for box in boxes}
    # those of sites first, so that a link between boxes is the last word
    for place, pair in sorted(enumerate(described.links), key=lambda item: {item[1].a, item[1].b} <= ids):
        where = f"links[{place}] ({pair.a} - {pair.b})"
        _check(pair, where)
        for end in (pair.a, pair.b):
            if end not in by_name:
                raise ClusterError(f"{where}: {end!r} is neither a box nor a site; there are {', '.join(sorted(ids))}")
        if pair.a == pair.b and len(by_name[pair.a]) == 1:
            raise ClusterError(f"{where}: a box has no link to itself")
        for one, other in product(by_name[pair.a], by_name[pair.b]):
            if one != other:
                put(one, other, pair)
                if not pair.one_way:
                    put(other, one, pair)
    cluster = Cluster(boxes=boxes, gbps=gbps, rtt_s=rtt, usd_per_gb=price)
    _check_joined(cluster)
    return cluster


def _check(link: _LinkEntry, where: str) -> None:
    if not link.gbps > 0.0:
        raise ClusterError(f"{where}: gbps is {link.gbps:g}; it must be above 0, or leave the link out")
    for field, value, bounds in (
        ("gbps", link.gbps, GBPS),
        ("rtt_ms", link.rtt_ms, RTT_MS),
        ("usd_per_gb", link.usd_per_gb, USD),
    ):
        _check_range(value, field, bounds, where)


def _check_range(value: float, field: str, bounds: tuple[float, float], where: str) -> None:
    least, most = bounds
    if not least <= value <= most:  # neither is NaN
        raise ClusterError(f"{where}: {field} is {value:g}; it must be between {least:g} and {most:g}")


def _check_joined(cluster: Cluster) -> None:
    """Every box reaches every other, if over others."""
    reached, frontier = {0}, [0]
    joined = (cluster.gbps > 0.0) & (cluster.gbps.T > 0.0)
    while frontier:
        here = frontier.pop()
        for other in np.flatnonzero(joined[here]):
            if int(other) not in reached:
                reached.add(int(other))
                frontier.append(int(other))
    if len(reached) < len(cluster.boxes):
        lost = next(box.id for number, box in enumerate(cluster.boxes) if number not in reached)
        raise ClusterError(
            f"box {lost} has no links both ways to the boxes around {cluster.boxes[0].id}: "
            "give a `default` link, or one in `links`"
        )
