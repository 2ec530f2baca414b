"""Who prefills and who decodes a request that has a route."""

from __future__ import annotations

from ..routing.interface import Route
from .values import OpenDecode


def place(route: Route, attempt: int, tokens: int, left: int, *, first_token_at_prefill: bool) -> OpenDecode:
    """Where a request goes that has `tokens` tokens so far, prompt and answer, and wants `left`
    more."""
    prefill = route.prefill
    if prefill is None:
        return OpenDecode(attempt, route.decode)
    whole = first_token_at_prefill and route.split >= tokens
    if whole and left == 1:
        # The prefill replica samples the only token: no KV has to move, and nobody else is needed.
        return OpenDecode(attempt, prefill)
    return OpenDecode(attempt, route.decode, prefill, route.split, whole)
