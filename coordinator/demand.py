"""What clients ask of a service, as gateways tell it to all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Final

import msgspec

from .bounds import Tokens

CLASSES_PER_SIDE: Final = 8
MAX_LENGTHS: Final = CLASSES_PER_SIDE * CLASSES_PER_SIDE
"""Requests that a demand describes by their lengths, at most: so many classes by prompt, each of so
many by output."""

SLOWEST: Final = 1e-6
"""Requests per second; who is asked less often, once in eleven days, is not asked."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway has seen lately: requests per second (0 while none come), the coefficient of
    variation of the gaps, and equally frequent (prompt, output) lengths."""

    requests_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    arrival_cv: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    lengths: Annotated[tuple[tuple[Tokens, Tokens], ...], msgspec.Meta(min_length=1, max_length=MAX_LENGTHS)]

    def __post_init__(self) -> None:
        if 0.0 < self.requests_s < SLOWEST:
            raise ValueError(f"demand.requests_s is {self.requests_s}; it must be 0 or at least {SLOWEST:g}")


def is_idle(demands: Collection[Demand]) -> bool:
    """Whether gateways that have had requests have none now."""
    return bool(demands) and not any(demand.requests_s for demand in demands)


def mean_lengths(demands: Iterable[Demand]) -> tuple[float, float] | None:
    """Tokens of a prompt and of an answer, on average; gateways that are asked more count for more. None where nobody
    has seen a request."""
    found = [(max(demand.requests_s, SLOWEST) / len(demand.lengths), demand.lengths) for demand in demands]
    total = sum(weight * len(lengths) for weight, lengths in found)
    if not found:
        return None
    prompt = sum(weight * sum(each for each, _ in lengths) for weight, lengths in found)
    return prompt / total, sum(weight * sum(each for _, each in lengths) for weight, lengths in found) / total
