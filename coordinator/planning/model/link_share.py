"""How much of a link plans may count on.

Transfers come when prompts end, not evenly, and share the link (M/G/1 with processor sharing, as in
`queueing`): at a share r of its rate, one that takes x seconds alone finds others with the chance r
and then takes longer by an exponential time of mean x / (1 - r). What deadlines leave for that
depends on the service: between the first token and the last of a long answer there is time for KV
that waits, of a short one there is not. So a fast link, or one for long answers, may be filled
nearly, and a slow one for short answers must not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .kv_cost import kv_gigabits
from .length_classes import Classes
from .workload import Service

Array = NDArray[np.float64]

LATE: Final = 0.02
"""Requests that may be late because their KV waited for others'."""

SLACK: Final = 0.5
"""Of the deadlines, what KV that waits may take of them."""

LEAST: Final = 0.5
MOST: Final = 0.9
"""Of a link's rate. On links so slow that more are late at LEAST, hardly any KV should go at all,
which is for the orchestration to see; above MOST a link that is a little slower than it was
measured would never empty its queue."""

_SHARES: Final = np.linspace(LEAST, MOST, 21)
_GIGABIT_S: Final = np.logspace(-5.0, 2.0, 71)


class LinkShares:
    """For the traffic of some services, whose strictest counts."""

    def __init__(self, services: Sequence[tuple[Service, Classes]]) -> None:
        self._shares = np.min([_shares(service, classes) for service, classes in services], axis=0)

    def of(self, gbps: Array) -> Array:
        """The share of each of these rates that plans may count on: LEAST to MOST, at 0 Gb/s
        LEAST."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.interp(-np.log(gbps), np.log(_GIGABIT_S), self._shares))


def _shares(service: Service, classes: Classes) -> Array:
    """At each of _GIGABIT_S, seconds that a Gb takes."""
    slo = service.slo
    gaps_s = np.where(classes.output > 1.5, (classes.output - 1.0) * slo.tpot_s, inf)
    first_s = slo.ttft_s if service.first_token_at_decode else inf
    slack_s = SLACK * np.minimum(np.minimum(gaps_s, slo.e2e_s), first_s)
    alone_s = _GIGABIT_S[:, None] * kv_gigabits(service.model, classes.prompt, service.kv_bits)
    late = _SHARES * np.exp(-(slack_s / alone_s)[..., None] * (1.0 - _SHARES))
    within = np.einsum("gcs,c->gs", late, classes.share) <= LATE
    return np.asarray(_SHARES[np.maximum(within.sum(axis=1) - 1, 0)])
