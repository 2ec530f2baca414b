"""What is asked of a service: lengths, arrivals, and how fast the answers have to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from ...costs.model_shape import ModelShape

Lengths = NDArray[np.int64]


class WorkloadError(ValueError):
    """Lengths, rates or deadlines that cannot be; one line that names the field."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Requests as a sample of (prompt, output) tokens, drawn together, and their arrivals.

    `rate` in requests per second; `arrival_cv` is the coefficient of variation of the times between
    arrivals: 1 for Poisson, more where they come in bursts. `name` says where the lengths come
    from, for reports.
    """

    name: str
    prompts: Lengths
    outputs: Lengths
    rate: float
    arrival_cv: float = 1.0

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.outputs) or not len(self.prompts):
            raise WorkloadError(
                f"workload {self.name}: {len(self.prompts)} prompts and {len(self.outputs)} outputs; "
                "as many of each are needed, and at least one"
            )
        if int(self.prompts.min()) < 1 or int(self.outputs.min()) < 1:
            raise WorkloadError(f"workload {self.name}: every prompt and every output has at least one token")
        if not (isfinite(self.rate) and self.rate > 0.0):
            raise WorkloadError(f"workload {self.name}: rate is {self.rate}; it must be above 0 requests per second")
        if not (isfinite(self.arrival_cv) and self.arrival_cv >= 0.0):
            raise WorkloadError(f"workload {self.name}: arrival_cv is {self.arrival_cv}; it must not be negative")

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        return float(self.prompts.mean())

    @property
    def mean_output(self) -> float:
        """Tokens, the first one included."""
        return float(self.outputs.mean())

    @property
    def mean_pairs(self) -> float:
        """Query-key pairs of a prefill."""
        prompts = self.prompts.astype(np.float64)
        return float((prompts * (prompts + 1) / 2).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Deadlines in seconds; a request meets the objective when it meets all of them. `target` is
    the share that should (0.9: ninety of a hundred)."""

    ttft_s: float = inf
    tpot_s: float = inf
    e2e_s: float = inf
    target: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            if not getattr(self, name) > 0.0:
                raise WorkloadError(f"slo.{name} is {getattr(self, name)}; it must be above 0")
        if not 0.0 < self.target < 1.0:
            raise WorkloadError(f"slo.target is {self.target}; it is a share between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """One model with its traffic, its deadlines, and how its KV travels.

    `kv_bits` per element on the wire, all overhead included (kv4: 4.5, raw: 16).
    `first_token_at_decode`: the first token comes from the decode replica once the KV is there; else
    from the prefill replica, and what the KV transfer takes counts between the first token and
    the second. `step_tokens`: what a step of every replica that decodes may take, where that is
    given; 0: as many as the deadline from token to token leaves time for.
    """

    name: str
    model: ModelShape
    workload: Workload
    slo: Slo = field(default_factory=Slo)
    codec: str = "kv4"
    kv_bits: float = 4.5
    first_token_at_decode: bool = False
    step_tokens: int = 0
