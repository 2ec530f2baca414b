"""What one gateway knows of prefixes, for its routes: who holds them, and whether that has been true."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, NamedTuple, final

from .index import NamesOf, PrefixIndex
from .trust import HitTrust

MAX_OPEN: Final = 1 << 16
"""Requests whose first tokens are awaited at once; of more nothing is learned."""


class ExpectedPrefill(NamedTuple):
    """A request was routed `at` a moment to a replica that had `queued` tokens to prefill, and was said to hold `named`
    of the `prompt` tokens of this one."""

    at: float
    prompt: int
    queued: int
    named: int


class _Awaited(NamedTuple):
    replica: str
    expected: ExpectedPrefill


@final
class PrefixKnowledge:
    """See the module. Gateways and simulations ask it before each route, and tell it how that went."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.trust = HitTrust()
        self._awaited: dict[Hashable, _Awaited] = {}

    def __repr__(self) -> str:
        return f"<PrefixKnowledge {self.index!r} {self.trust!r}>"

    def find_named(self, names_of: NamesOf, now: float) -> dict[str, int]:
        """By replica: tokens of this prompt that it is said to hold."""
        return self.index.held_tokens(names_of, now)

    def believe(self, named: Mapping[str, int]) -> dict[str, int]:
        """By replica: as many of them as it is believed to hold."""
        return {replica: int(tokens * self.trust.share(replica)) for replica, tokens in named.items()}

    def note_route(self, request: Hashable, replica: str, names_of: NamesOf, expected: ExpectedPrefill) -> None:
        """A request is prefilled by this replica."""
        if len(self._awaited) < MAX_OPEN:
            self._awaited[request] = _Awaited(replica, expected)
        self.index.expect(replica, names_of, expected.at)

    def note_end(self, request: Hashable, first_token_at: float | None) -> None:
        """It has ended; None: it had no first token, or had it from another replica."""
        awaited = self._awaited.pop(request, None)
        if awaited is not None and first_token_at is not None:
            replica, (at, prompt, queued, named) = awaited
            named = min(named, prompt - 1)
            self.trust.observe(replica, tokens=queued + prompt, named=named, seconds=first_token_at - at)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        kept = set(replicas)
        self.index.keep(kept)
        self.trust.keep(kept)
