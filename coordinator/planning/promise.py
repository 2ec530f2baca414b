"""About the most that replicas can do together: what they would if links had no limit.

A price for reading a request and a price for writing it, that together are worth no more than a request in time, bound
what any plan can do: every replica earns the most that it can at these prices, less what it loses by its load, and of
the requests that are asked for each is worth what the prices leave of it (Lagrange's dual of the programme in `flow`,
without its links). The least over some prices is near the least over all. Replicas add up, so that a solution's is a
sum of vectors that are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..plan import Phase
from .behaviour import LOADS, Behaviour

__all__ = ["gains", "promised"]

Array = NDArray[np.float64]

_REQUEST: Final = (1.0, 0.98, 0.95, 0.9, 0.8, 0.65, 0.4)
"""What reading and writing a request may be worth together."""

_PARTS: Final = np.linspace(0.0, 1.0, 17)
"""The part of that which is for reading."""

_READ: Final = np.outer(_REQUEST, _PARTS).ravel()
_WRITE: Final = np.outer(_REQUEST, 1.0 - _PARTS).ravel()
_BOTH: Final = _READ + _WRITE


def gains(behaves: Behaviour, phase: Phase, lost: Array) -> Array:
    """[price] requests per second that a replica is worth at the load which suits it best; `lost` [load] to waiting."""
    if phase is Phase.PREFILL:
        rates = _READ * behaves.read
    elif phase is Phase.DECODE:
        rates = _WRITE * behaves.write
    else:
        rates = np.maximum(np.maximum(_READ * behaves.read, _WRITE * behaves.write), _BOTH * behaves.both)
    return np.asarray((rates[:, None] * LOADS - lost).max(axis=1))


def promised(replicas: Sequence[Array], rate: float, worth: float) -> float:
    """Requests in time, of `rate` a second, by the `gains` of all replicas; one may be `worth` so much."""
    return float((rate * np.maximum(worth - _BOTH, 0.0) + sum(replicas)).min())
