"""Upper bounds of what a solution can serve, by Lagrangian duality.

The programme of `flow` couples replicas by one condition: every request that is prefilled is also
decoded. Give that condition a price: a request in time is worth `total price`, of which a share
goes to whoever prefills it and the rest to whoever decodes it. At any such prices every replica can
be looked at alone: it takes the load at which its income less its losses is largest. The sum over
replicas, and what the requests that are asked for are worth beyond the price, is an upper bound
(weak duality). The least bound over a grid of prices is the one that is used.

Links are bounded the same way. Replicas that share boxes are a *component*: KV between them takes
no link. A component that prefills more than it decodes sends the difference over its links, and one
that decodes more receives it. It may have a price share of its own; then the difference to the
common one, its `link_price`, has to be paid for all that its links can carry. The least over its
own shares bounds the component. Bounds of components add up, so a bound of a solution is the sum of
vectors that are kept, one entry for each price.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from .behaviour import LOADS, Behaviour

Array = NDArray[np.float64]

TOTAL_PRICES: Final = np.array([1.0, 0.98, 0.95, 0.9, 0.8, 0.65, 0.4])
"""Prices of a request: what its prefill and its decode are worth together."""

PREFILL_SHARES: Final = np.linspace(0.0, 1.0, 17)
"""The share of the price that is for prefill."""

_PREFILL_PRICE: Final = np.outer(TOTAL_PRICES, PREFILL_SHARES)
_DECODE_PRICE: Final = np.outer(TOTAL_PRICES, 1.0 - PREFILL_SHARES)
_REQUEST_PRICE: Final = _PREFILL_PRICE + _DECODE_PRICE


def replica_values(behaves: Behaviour, phase: Phase, lost: Array) -> Array:
    """[total price, prefill share]: requests per second that a replica is worth at the load that
    suits it best. `lost` [load]: requests per second that are late there."""
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
    """[component, total price, prefill share]: upper bounds in requests/s. `values`: sum over
    replicas at each price; `out`, `into`: requests/s of KV that links carry."""
    bounds = values.copy()
    for own, part in enumerate(PREFILL_SHARES):
        # KV that leaves is worth less here than elsewhere by the link price, or the other way round
        link_price = (
            np.maximum(PREFILL_SHARES - part, 0.0) * out[:, None]
            + np.maximum(part - PREFILL_SHARES, 0.0) * into[:, None]
        )
        np.minimum(bounds, values[:, :, own, None] + TOTAL_PRICES[:, None] * link_price[:, None], out=bounds)
    return bounds


def bound_served_rate(together: Array, rate: float, worth: float) -> float:
    """Upper bound of the requests in time, of `rate` per second. `together`: the sum of all
    components' bounds. `worth`: the most that one request can be worth."""
    return float((rate * np.maximum(worth - _REQUEST_PRICE, 0.0) + together).min())
