"""Who prefills and who decodes a request that has a route."""

from __future__ import annotations

from typing import NamedTuple

from ..routing import Route

__all__ = ["Placement", "place"]


class Placement(NamedTuple):
    """One attempt's replicas. `prefill` computes the first `split` tokens of the prompt, `decode` the others; without
    `prefill`, `decode` computes all of it. `first_token`: it is sampled by `prefill`, which has all of the prompt."""

    decode: str
    prefill: str | None = None
    split: int = 0
    first_token: bool = False


def place(route: Route, tokens: int, left: int, *, first_token_at_prefill: bool) -> Placement:
    """Where a request goes that has `tokens` tokens so far, prompt and answer, and wants `left` more."""
    if route.prefill is None:
        return Placement(route.decode)
    whole = first_token_at_prefill and route.split >= tokens
    if whole and left == 1:
        # The prefill replica samples the only token: no KV has to move, and nobody else is needed.
        return Placement(route.prefill)
    return Placement(route.decode, route.prefill, route.split, whole)
