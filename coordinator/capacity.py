"""What the planner sees of a box and of a link: measured figures, as frozen values."""

from collections.abc import Iterable
from math import isfinite
from typing import final

import msgspec

UNKNOWN_RTT_S = 0.2
"""What a link counts for until it is measured: like one between continents."""


class CapacityError(ValueError):
    """A figure that cannot be; the text names the field."""


class BoxView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box that offers a service.

    `layers` is how many layers the model has, `fits` how many of them the box has memory for: one that holds them
    all is a replica, others wait until a plan makes them stages of one. `ready` says that it can be given work: its
    engine has answered a test request, or it waits for a stage. `draining` says that it wants no new work.
    `compute_tflops`, `memory_gbps` (GB/s) and `memory_gib` are sums over its `tp` GPUs; `kv_tokens` is what its KV
    cache holds. `emulated`: the engine only models a GPU.
    """

    peer: str
    service: str
    layers: int
    fits: int
    ready: bool
    draining: bool
    compute_tflops: float
    memory_gbps: float
    memory_gib: float
    kv_tokens: int
    emulated: bool = False
    tp: int = 1

    def __post_init__(self) -> None:
        _require(bool(self.peer), "box.peer is empty")
        _require(bool(self.service), f"box.service of {self.peer} is empty")
        _require(self.layers >= 1, f"box.layers of {self.peer} is {self.layers}; it must be at least 1")
        _require(
            0 <= self.fits <= self.layers, f"box.fits of {self.peer} is {self.fits}; it is 0 to {self.layers} layers"
        )
        _require(self.tp >= 1, f"box.tp of {self.peer} is {self.tp}; it must be at least 1")
        _require(self.kv_tokens >= 0, f"box.kv_tokens of {self.peer} is negative")
        figures = {
            "compute_tflops": self.compute_tflops,
            "memory_gbps": self.memory_gbps,
            "memory_gib": self.memory_gib,
        }
        for field, value in figures.items():
            _require(
                isfinite(value) and value > 0.0,
                f"box.{field} of {self.peer} is {value}; measure the box first: it must be above 0",
            )

    @property
    def whole(self) -> bool:
        """Whether it holds the model alone."""
        return self.fits == self.layers

    @property
    def usable(self) -> bool:
        """Whether it may be given work."""
        return self.ready and not self.draining


class LinkView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The directed path from one box to another, with its measured round trip."""

    source: str
    target: str
    rtt_s: float

    def __post_init__(self) -> None:
        _require(bool(self.source) and bool(self.target), "link.source or link.target is empty")
        _require(
            isfinite(self.rtt_s) and self.rtt_s >= 0.0,
            f"link.rtt_s of {self.source} -> {self.target} is {self.rtt_s}; it must not be negative",
        )


@final
class RoundTrips:
    """The round trip between any two boxes; of several figures for one link the largest."""

    def __init__(self, links: Iterable[LinkView]) -> None:
        self._measured: dict[tuple[str, str], float] = {}
        for link in links:
            pair = (link.source, link.target)
            self._measured[pair] = max(link.rtt_s, self._measured.get(pair, 0.0))

    def between(self, source: str, target: str) -> float:
        """Seconds, as measured on the way asked for, else on the way back (the same round trip), else assumed."""
        return self._measured.get((source, target), self._measured.get((target, source), UNKNOWN_RTT_S))


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise CapacityError(text)
