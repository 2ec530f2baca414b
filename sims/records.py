"""What goes into a simulation and what comes out, as columns: a million requests are six arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TraceError(ValueError):
    """Requests that cannot be; one line that names the row and the field."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Requests in order of arrival, and in words where `lengths` and `arrivals` are from. `prefixes`:
    of each, the names of its prompt's full blocks of `prefix_tokens`; empty where nobody has named them.
    """

    ids: Ints
    arrival_s: Floats
    prompt: Ints
    output: Ints
    lengths: str
    arrivals: str
    prefixes: tuple[tuple[int, ...], ...] = ()
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prefixes and (len(self.prefixes) != len(self.ids) or self.prefix_tokens < 1):
            raise TraceError("the names of a trace's prefixes do not fit its requests")
        if not len(self.ids) == len(self.arrival_s) == len(self.prompt) == len(self.output):
            raise TraceError("the columns of a trace have different lengths")
        if not len(self.ids):
            raise TraceError("a trace without requests")
        for name, bad in (
            ("arrival_s", ~np.isfinite(self.arrival_s) | (self.arrival_s < 0.0)),
            ("prompt", self.prompt < 1),
            ("output", self.output < 1),
        ):
            if bad.any():
                row = int(np.argmax(bad))
                raise TraceError(f"request {self.ids[row]} (row {row + 1}): {name} is {getattr(self, name)[row]}")
        if (np.diff(self.arrival_s) < 0.0).any():
            raise TraceError("the requests are not in order of arrival")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outcomes:
    """Seconds from arrival of each request of a trace; NaN where it never happened."""

    trace: Trace
    ttft_s: Floats
    e2e_s: Floats

    @property
    def completed(self) -> NDArray[np.bool_]:
        """Which requests got their last token."""
        return np.isfinite(self.e2e_s)

    @property
    def tpot_s(self) -> Floats:
        """Mean time between tokens after the first; 0 for a request of one token."""
        gaps = np.maximum(self.trace.output - 1, 1)
        found: Floats = (self.e2e_s - self.ttft_s) / gaps
        return found
