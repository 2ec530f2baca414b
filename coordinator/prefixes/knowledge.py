"""What one gateway knows of prefixes, for its routes: who holds them, and whether that has been true."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple, final

from .index import NamesOf, PrefixIndex
from .trust import HitTrust

MAX_OPEN: Final = 1 << 16
"""Requests whose first tokens are awaited at once; of more nothing is learned."""


class _Awaited(NamedTuple):
    since: float
    replica: str
    tokens: int
    named: int


@final
class PrefixKnowledge:
    """See the module. Gateways and simulations ask it before each route, and tell it how that went."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.trust = HitTrust()
        self._awaited: dict[Hashable, _Awaited] = {}

    def __repr__(self) -> str:
        return f"<PrefixKnowledge {self.index!r} {self.trust!r}>"

    def count_cached(self, names_of: NamesOf, now: float) -> dict[str, int]:
        """By replica: tokens of this prompt that it is believed to hold."""
        held = self.index.held_tokens(names_of, now)
        return {replica: int(tokens * self.trust.share(replica)) for replica, tokens in held.items()}

    def note_route(
        self, request: Hashable, replica: str, names_of: NamesOf, *, prompt_tokens: int, queued_tokens: int, now: float
    ) -> None:
        """A request is prefilled by this replica, behind so many tokens of others."""
        named = min(prompt_tokens - 1, self.index.held_tokens(names_of, now).get(replica, 0))
        if len(self._awaited) < MAX_OPEN:
            self._awaited[request] = _Awaited(now, replica, queued_tokens + prompt_tokens, named)
        self.index.expect(replica, names_of, now)

    def note_end(self, request: Hashable, first_token_at: float | None) -> None:
        """It has ended; None: it had no first token, or had it from another replica."""
        awaited = self._awaited.pop(request, None)
        if awaited is not None and first_token_at is not None:
            seconds = first_token_at - awaited.since
            self.trust.observe(awaited.replica, tokens=awaited.tokens, named=awaited.named, seconds=seconds)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        kept = set(replicas)
        self.index.keep(kept)
        self.trust.keep(kept)
