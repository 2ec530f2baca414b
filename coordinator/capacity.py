"""What the planner sees of a box and of a link: measured figures, as frozen values."""

from math import isfinite

import msgspec


class CapacityError(ValueError):
    """A figure that cannot be; the text names the field."""


class BoxView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box that offers a service.

    `layers` is how many layers of the model it holds, `ready` that its engine has answered a test request,
    `draining` that it wants no new work. `compute_tflops`, `memory_gbps` (GB/s) and `memory_gib` are measured
    sums over its `tp` GPUs; `kv_tokens` is what its KV cache holds. `emulated`: the engine only models a GPU.
    """

    peer: str
    service: str
    layers: int
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
    def compute_intensity(self) -> float:
        """FLOP per byte that the box can do: high suits prefill, low suits decode."""
        return self.compute_tflops * 1e3 / self.memory_gbps

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


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise CapacityError(text)
