"""Who prefills and who decodes a request that has a route."""

from __future__ import annotations

from ..routing.interface import Route
from .values import OpenDecode, RequestSettings


def place(
    route: Route, attempt: int, tokens: int, left: int, settings: RequestSettings, source: str | None = None
) -> OpenDecode:
    """Where a request goes that has `tokens` tokens so far, prompt and answer, and wants `left` more.
    `source`: the replica that has decoded it so far, if that can still send its KV."""
    if source is not None and settings.may_split:
        # It prefills what is in its cache, which computes nearly nothing.
        first_token = settings.first_token_at_prefill and left > 1
        return OpenDecode(attempt, route.decode, source, tokens, first_token, cached=tokens - 1)
    prefill = route.prefill
    if prefill is None or not settings.may_split:
        return OpenDecode(attempt, route.decode, cached=0 if prefill else route.found)
    whole = settings.first_token_at_prefill and route.split >= tokens
    if whole and left == 1:
        # The prefill replica samples the only token: no KV has to move, and nobody else is needed.
        return OpenDecode(attempt, prefill, cached=route.found)
    cached = min(route.cached or route.found, route.split)  # the prefill replica may have chosen a shorter split
    return OpenDecode(attempt, route.decode, prefill, route.split, whole, cached)
