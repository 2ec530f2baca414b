"""What a wide-area network is made of: boxes with caps, and pairs with a round trip. Plain frozen
values.

    Scenario(
        boxes={"paris": WanBox(up_gbps=1, down_gbps=1), "nyc": WanBox(up_gbps=2, down_gbps=2)},
        pairs={("paris", "nyc"): WanPair(rtt_ms=90, loss=1e-4, jitter_ms=2)},
    )

A box's caps are shared by everything that it sends or receives, whoever is at the other end. A pair
counts for both directions, unless the reverse pair is given as well.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from math import isfinite
from pathlib import Path
from typing import TypeVar

import msgspec

LINKS = Path(__file__).parent.parent / "data" / "wan_links.csv"
CLASS = "class:"
FIGURES = ("rtt_ms", "single_stream_gbps", "multi_stream_gbps")  # columns of that table
MAX_BOXES = 250
MAX_GBPS = 400.0
MAX_RTT_MS = 60_000.0
# The smallest packet that IPv4 must carry, and the largest that a TUN device takes.
MIN_MTU, MAX_MTU = 576, 65_000
# Queues are one bandwidth-delay product long, the routers' old rule of thumb, but never shorter than these.
MIN_QUEUE_S = 0.02
MIN_QUEUE_BYTES = 131_072.0

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class ScenarioError(ValueError):
    """A scenario says something that cannot be: names the field and what it may be."""


class WanBox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box's access link in Gb/s of IP packets, shared by all its flows. `behind_nat`: its router forwards no port, so
    that nobody can dial it."""

    up_gbps: float = 1.0
    down_gbps: float = 1.0
    behind_nat: bool = False

    def __post_init__(self) -> None:
        _within("up_gbps", self.up_gbps, 1e-5, MAX_GBPS)
        _within("down_gbps", self.down_gbps, 1e-5, MAX_GBPS)


class WanPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The path between two boxes.

    `rtt_ms`: half of it in each direction. `loss`: the part of packets that vanishes, independently
    of each other. `jitter_ms`: how far a round trip may lie from `rtt_ms`; packets stay in order.
    `gbps`: what the path itself carries, each direction, if that is less than the boxes' caps; None
    for no limit of its own.
    """

    rtt_ms: float = 1.0
    loss: float = 0.0
    jitter_ms: float = 0.0
    gbps: float | None = None

    def __post_init__(self) -> None:
        _within("rtt_ms", self.rtt_ms, 0.0, MAX_RTT_MS)
        _within("loss", self.loss, 0.0, 1.0)
        _within("jitter_ms", self.jitter_ms, 0.0, self.rtt_ms, "no more than rtt_ms")
        if self.gbps is not None:
            _within("gbps", self.gbps, 1e-5, MAX_GBPS)


class Outage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing passes between `a` and `b`, from `start_s` after the network is up, for `seconds`."""

    a: str
    b: str
    start_s: float
    seconds: float

    def __post_init__(self) -> None:
        _within("start_s", self.start_s, 0.0, 1e9)
        _within("seconds", self.seconds, 0.0, 1e9)


class LinkClass(msgspec.Struct, frozen=True, kw_only=True):
    """A typical link: `rtt_ms`, Gb/s of one and of many streams, and the source."""

    name: str
    rtt_ms: float
    one_stream_gbps: float
    multi_stream_gbps: float
    source: str


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A whole network. Raises `ScenarioError` if a pair is missing or names no box.

    `default`: the pair of two boxes for which `pairs` has none. `mtu`: bytes of a packet. `seed`:
    of loss and jitter. `congestion`: what TCP in the boxes uses where the kernel allows it.
    """

    boxes: Mapping[str, WanBox]
    pairs: Mapping[tuple[str, str], WanPair] = {}
    default: WanPair | None = None
    outages: tuple[Outage, ...] = ()
    mtu: int = 1500
    seed: int = 0
    congestion: str = "cubic"

    def __post_init__(self) -> None:
        if not 1 <= len(self.boxes) <= MAX_BOXES:
            raise ScenarioError(f"boxes: {len(self.boxes)} of them, where 1 to {MAX_BOXES} are possible")
        for name in self.boxes:
            if not _NAME.fullmatch(name):
                raise ScenarioError(f"boxes: {name!r} is no name: 1 to 32 of a-z, 0-9, _ and -")
        for a, b in self.pairs:
            self._check_ends("pairs", a, b)
        for outage in self.outages:
            self._check_ends("outages", outage.a, outage.b)
        _within("mtu", self.mtu, MIN_MTU, MAX_MTU)
        if not re.fullmatch(r"[a-z0-9_]{1,15}", self.congestion):
            raise ScenarioError(f"congestion: {self.congestion!r} is no name of a TCP congestion control")
        for a, b in permutations(self.boxes, 2):
            self.pair(a, b)

    def _check_ends(self, field: str, a: str, b: str) -> None:
        for name in (a, b):
            if name not in self.boxes:
                raise ScenarioError(f"{field}: there is no box {name!r}; boxes: {', '.join(self.boxes)}")
        if a == b:
            raise ScenarioError(f"{field}: {a!r} twice: a pair joins two boxes")

    def pair(self, a: str, b: str) -> WanPair:
        """What lies between `a` and `b`, in that direction."""
        found = self.pairs.get((a, b)) or self.pairs.get((b, a)) or self.default
        if found is None:
            raise ScenarioError(f"pairs: none for {a} and {b}: add it, or a `default`")
        return found

    def directions(self) -> Iterator[tuple[str, str, WanPair]]:
        """Every ordered pair of boxes, with what lies between."""
        for a, b in permutations(self.boxes, 2):
            yield a, b, self.pair(a, b)

    @property
    def fastest_gbps(self) -> float:
        """The most that any pair can carry."""
        return max((self.carried_gbps(a, b) for a, b, _ in self.directions()), default=0.0)

    def carried_gbps(self, a: str, b: str) -> float:
        """What `a` can send to `b` while nothing else flows."""
        return min(self.boxes[a].up_gbps, self.boxes[b].down_gbps, self.pair(a, b).gbps or MAX_GBPS)

    @staticmethod
    def queue_bytes(gbps: float, rtt_ms: float) -> float:
        """Bytes that may wait at a cap: `max(gbps x max(rtt, 20 ms), 128 KiB)`."""
        return max(gbps * 1e9 / 8 * max(rtt_ms / 1e3, MIN_QUEUE_S), MIN_QUEUE_BYTES)

    @classmethod
    def from_classes(cls, links: Mapping[tuple[str, str], str]) -> Scenario:
        """A network of typical links: `{("paris", "nyc"): "transatlantic"}`, names as in
        `link_classes()`.

        A row's many-stream rate becomes the pair's own cap; a box's caps are the highest of its
        links, so that a fast link does not make a slow one faster. The one-stream rate is not set:
        it has to come out of TCP's window at this rtt.
        """
        table = link_classes()
        for name in links.values():
            if name not in table:
                raise ScenarioError(f"there is no class of links {name!r}; classes: {', '.join(table)}")
        rows = {ends: table[name] for ends, name in links.items()}
        caps: dict[str, float] = {}
        for (a, b), row in rows.items():
            for name in (a, b):
                caps[name] = max(caps.get(name, 0.0), row.multi_stream_gbps)
        return cls(
            boxes={name: WanBox(up_gbps=cap, down_gbps=cap) for name, cap in caps.items()},
            pairs={ends: WanPair(rtt_ms=row.rtt_ms, gbps=row.multi_stream_gbps) for ends, row in rows.items()},
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Scenario:
        """Read what `to_json` writes; raises `ScenarioError` that names the field."""
        try:
            read = msgspec.json.decode(text, type=_ScenarioFile)
            pairs = {(row.a, row.b): row.pair() for row in read.pairs}
        except msgspec.MsgspecError as error:
            raise ScenarioError(f"the scenario is not right: {error}") from error
        if len(pairs) != len(read.pairs):
            raise ScenarioError("pairs: one is given twice")
        return cls(**{**msgspec.structs.asdict(read), "pairs": pairs})

    def to_json(self) -> str:
        """The scenario as a JSON document, pairs as a list of objects with the ends `a` and `b`."""
        rows = [{"a": a, "b": b, **msgspec.structs.asdict(pair)} for (a, b), pair in self.pairs.items()]
        return msgspec.json.encode({**msgspec.structs.asdict(self), "pairs": rows}).decode()


class _PairRow(WanPair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    a: str
    b: str

    def pair(self) -> WanPair:
        return WanPair(rtt_ms=self.rtt_ms, loss=self.loss, jitter_ms=self.jitter_ms, gbps=self.gbps)


class _ScenarioFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    boxes: dict[str, WanBox]
    pairs: tuple[_PairRow, ...] = ()
    default: WanPair | None = None
    outages: tuple[Outage, ...] = ()
    mtu: int = 1500
    seed: int = 0
    congestion: str = "cubic"


Value = TypeVar("Value", WanBox, WanPair)


def changed(value: Value, changes: Mapping[str, float | None]) -> Value:
    """The value with some fields replaced, checked as a new one is; raises `ScenarioError`."""
    fields = msgspec.structs.asdict(value)
    for name in changes:
        if name not in fields:
            raise ScenarioError(f"{type(value).__name__} has no field {name!r}; fields: {', '.join(fields)}")
        if isinstance(fields[name], bool):
            raise ScenarioError(f"{type(value).__name__}: {name!r} stays as it was when the network was made")
    return type(value)(**{**fields, **changes})


def link_classes() -> dict[str, LinkClass]:
    """The table's `class:*` rows by name; one between two classes is `one:other`."""
    found = {}
    for row in _read_links():
        if row["a"].startswith(CLASS):
            a, b = row["a"].removeprefix(CLASS), row["b"].removeprefix(CLASS)
            name = a if a == b else f"{a}:{b}"
            found[name] = _link(name, row)
    return found


def measured_link(a: str, b: str) -> LinkClass:
    """The table's row between two places, such as `azure:eastus` and `aws:ap-south-1`, in either order. Raises
    `ScenarioError` where there is none, or it lacks a figure."""
    for row in _read_links():
        if {row["a"], row["b"]} == {a, b} and all(row[name] for name in FIGURES):
            return _link(f"{a} - {b}", row)
    raise ScenarioError(f"{LINKS.name} has no row with all figures between {a!r} and {b!r}")


def _read_links() -> list[dict[str, str]]:
    with LINKS.open(newline="") as file:
        return list(csv.DictReader(file))


def _link(name: str, row: Mapping[str, str]) -> LinkClass:
    rtt_ms, one_stream_gbps, multi_stream_gbps = (float(row[figure]) for figure in FIGURES)
    return LinkClass(
        name=name,
        rtt_ms=rtt_ms,
        one_stream_gbps=one_stream_gbps,
        multi_stream_gbps=multi_stream_gbps,
        source=row["source"],
    )


def _within(field: str, value: float, low: float, high: float, what: str = "") -> None:
    if not (isfinite(value) and low <= value <= high):
        raise ScenarioError(f"{field}: {value!r} is not {what or 'possible'}: {low:g} to {high:g}")
