"""About the most that replicas can do together.

A price for reading a request and a price for writing it, that together are worth no more than a
request in time, bound what any plan can do: every replica earns the most that it can at these
prices, less what it loses by its load, and of the requests that are asked for each is worth what
the prices leave of it (Lagrange's dual of the programme in `flow`).

Replicas that share boxes are an island: what one reads for another needs no link. What an island
reads and does not write leaves over its links, and what it writes and does not read comes over
them. So it earns no more than its replicas would at prices of its own, and what the difference in
price is worth over all that the links let through (the dual again, with a toll). The least over
some prices of its own is a vector over the common ones; islands add up, and the least of the sum is
near the most that they can do.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from .behaviour import LOADS, Behaviour

__all__ = ["PREFILL_SHARES", "TOTAL_PRICES", "bound_components", "bound_served_rate", "replica_values"]

Array = NDArray[np.float64]

TOTAL_PRICES: Final = np.array([1.0, 0.98, 0.95, 0.9, 0.8, 0.65, 0.4])
"""What reading and writing a request may be worth together."""

PREFILL_SHARES: Final = np.linspace(0.0, 1.0, 17)
"""The part of that which is for reading."""

_PREFILL_PRICE: Final = np.outer(TOTAL_PRICES, PREFILL_SHARES)
_DECODE_PRICE: Final = np.outer(TOTAL_PRICES, 1.0 - PREFILL_SHARES)
_REQUEST_PRICE: Final = _PREFILL_PRICE + _DECODE_PRICE


def replica_values(behaves: Behaviour, phase: Phase, lost: Array) -> Array:
    """[level, part] requests per second that a replica is worth at the load which suits it best;
    `lost` [load] to waiting."""
    if phase is Phase.PREFILL:
        rates = _PREFILL_PRICE * behaves.prefill_rate
    elif phase is Phase.DECODE:
        rates = _DECODE_PRICE * behaves.decode_rate
    else:
        rates = np.maximum(
            np.maximum(_PREFILL_PRICE * behaves.prefill_rate, _DECODE_PRICE * behaves.decode_rate),
            _REQUEST_PRICE * behaves.mixed_rate,
        )
    return np.asarray((rates[..., None] * LOADS - lost).max(axis=-1))


def bound_components(values: Array, out: Array, into: Array) -> Array:
    """[island, level, part] requests per second: `values` by an island's replicas at prices of its
    own, with links that let the KV of so many requests per second `out` and `into` it [island]."""
    bounds = values.copy()
    for own, part in enumerate(PREFILL_SHARES):
        # what is read here and written elsewhere is worth less here than there by the toll, or the other way round
        link_price = (
            np.maximum(PREFILL_SHARES - part, 0.0) * out[:, None]
            + np.maximum(part - PREFILL_SHARES, 0.0) * into[:, None]
        )
        np.minimum(bounds, values[:, :, own, None] + TOTAL_PRICES[:, None] * link_price[:, None], out=bounds)
    return bounds


def bound_served_rate(together: Array, rate: float, worth: float) -> float:
    """Requests in time, of `rate` a second, by what all islands have `bound_components`; one may be
    `worth` so much."""
    return float((rate * np.maximum(worth - _REQUEST_PRICE, 0.0) + together).min())
