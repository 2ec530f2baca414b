"""What the planner sees of a box and of a link: measured figures, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import Final, NamedTuple, final

import msgspec

from .costs.gpus import GpuError, Specs, gpu_table
from .costs.model_shape import ModelShape
from .plan import Phase, Stage
from .profile import LatencyProfile

UNKNOWN_RTT_S: Final = 0.2
"""What a link counts for until it is measured: like one between continents."""

UNKNOWN_GBPS: Final = 1.0
"""Likewise, in Gb/s: rented boxes in homes have 1, several in data centres."""

SLOWEST_GBPS: Final = 1e-3
"""A link measured slower counts as one of this rate: plans are to stay finite."""


class CapacityError(ValueError):
    """A figure that cannot be; the text names the field."""


class BoxView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box that offers a service.

    `fits` is how many layers of `model` the box has memory for: one that holds them all is a
    replica, others wait until a plan makes them stages of one. `ready` says that it can be given
    work: its engine has answered a test request, or it waits for a stage. `draining` says that it
    wants no new work. `compute_tflops`, `memory_gbps` (GB/s) and `memory_gib` are sums over its
    `tp` GPUs, any two of which are joined at `card_link_gbps` (Gb/s); `kv_tokens` is what its KV
    cache holds, 0 while that is not known. `emulated`: the engine only models a GPU. `card` names
    the GPUs; with `specs`, they count for what the table of GPUs has in that column, else the
    figures were measured by the engine there. `profile` is fitted to the steps of that engine.
    `phase`: all that its owner lets it do. `usd_per_hour`: for the whole box. `stages`: of the
    replica of several boxes that its engine is a part of, and that `kv_tokens` is of; none: alone. `beside`: how many
    layers more it has memory for while it serves. `part`: of the time of its GPUs, where engines of other services have
    the rest; its other figures are of all of them, but for `kv_tokens`, which is its own.
    """

    peer: str
    service: str
    model: ModelShape
    fits: int
    ready: bool
    draining: bool
    compute_tflops: float
    memory_gbps: float
    memory_gib: float
    kv_tokens: int
    emulated: bool = False
    tp: int = 1
    card: str = ""
    specs: Specs | None = None
    card_link_gbps: float = 160.0
    usd_per_hour: float = 0.0
    phase: Phase | None = None
    site: str = ""
    profile: LatencyProfile | None = None
    stages: tuple[Stage, ...] = ()
    beside: int = 0
    part: float = 1.0

    def __post_init__(self) -> None:
        _require(bool(self.peer), "box.peer is empty")
        _require(bool(self.service), f"box.service of {self.peer} is empty")
        _require(
            0 <= self.fits <= self.layers, f"box.fits of {self.peer} is {self.fits}; it is 0 to {self.layers} layers"
        )
        _require(self.tp >= 1, f"box.tp of {self.peer} is {self.tp}; it must be at least 1")
        _require(0.0 < self.part <= 1.0, f"box.part of {self.peer} is {self.part}; it is above 0, and 1 at most")
        _require(self.kv_tokens >= 0, f"box.kv_tokens of {self.peer} is negative")
        figures = {
            "compute_tflops": self.compute_tflops,
            "memory_gbps": self.memory_gbps,
            "memory_gib": self.memory_gib,
            "card_link_gbps": self.card_link_gbps,
        }
        for field, value in figures.items():
            _require(
                isfinite(value) and value > 0.0,
                f"box.{field} of {self.peer} is {value}; measure the box first: it must be above 0",
            )
        _require(
            isfinite(self.usd_per_hour) and self.usd_per_hour >= 0.0,
            f"box.usd_per_hour of {self.peer} is {self.usd_per_hour}; it must not be negative",
        )
        if self.specs is not None:
            _check_card(self.peer, self.card, self.specs)

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.model.layers

    @property
    def whole(self) -> bool:
        """Whether it holds the model alone."""
        return self.fits == self.layers

    @property
    def usable(self) -> bool:
        """Whether it may be given work."""
        return self.ready and not self.draining


class LinkView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The directed path from one box to another: its measured round trip, what n streams reach
    (Gb/s; 0 while that is not measured), and what a GB over it costs."""

    source: str
    target: str
    rtt_s: float
    gbps: float = 0.0
    usd_per_gb: float = 0.0

    def __post_init__(self) -> None:
        are_costs = 0.0 <= self.rtt_s < inf and 0.0 <= self.gbps < inf and 0.0 <= self.usd_per_gb < inf
        if self.source and self.target and are_costs:
            return  # a network of 60 boxes has thousands of links
        _require(bool(self.source) and bool(self.target), "link.source or link.target is empty")
        for field in ("rtt_s", "gbps", "usd_per_gb"):
            value = getattr(self, field)
            _require(
                isfinite(value) and value >= 0.0,
                f"link.{field} of {self.source} -> {self.target} is {value}; it must not be negative",
            )


@final
class Links:
    """What lies between any two boxes: of several figures the worst; measured one way only, the
    same both ways but for its price; else assumed."""

    def __init__(self, views: Iterable[LinkView]) -> None:
        self._rtt_s: dict[tuple[str, str], float] = {}
        self._gbps: dict[tuple[str, str], float] = {}
        self._usd_per_gb: dict[tuple[str, str], float] = {}
        for view in views:
            pair = (view.source, view.target)
            self._rtt_s[pair] = max(view.rtt_s, self._rtt_s.get(pair, 0.0))
            self._usd_per_gb[pair] = max(view.usd_per_gb, self._usd_per_gb.get(pair, 0.0))
            if view.gbps:
                gbps = max(SLOWEST_GBPS, view.gbps)
                self._gbps[pair] = min(gbps, self._gbps.get(pair, gbps))

    def rtt_s(self, source: str, target: str) -> float:
        """The round trip in seconds."""
        return self._rtt_s.get((source, target), self._rtt_s.get((target, source), UNKNOWN_RTT_S))

    def gbps(self, source: str, target: str) -> float:
        """Gb/s, always above 0."""
        return self._gbps.get((source, target), self._gbps.get((target, source), UNKNOWN_GBPS))

    def usd_per_gb(self, source: str, target: str) -> float:
        """Of what goes this way."""
        return self._usd_per_gb.get((source, target), 0.0)


def _check_card(peer: str, card: str, specs: Specs) -> None:
    try:
        gpu_table().find(card, specs)
    except GpuError as error:
        raise CapacityError(f"box.card of {peer}: {error}") from None


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise CapacityError(text)


class KvCodec(NamedTuple):
    """How KV travels, as far as plans count with it."""

    name: str
    bits: float
    """Per element on the wire, all overhead included, as measured at heads of 128."""


class KvNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """What KV travels over, and how: `links` between boxes, and the codec with its bits per element."""

    links: tuple[LinkView, ...] = ()
    codec: str = "kv4"
    kv_bits: float = 4.5
