"""What one gateway knows of prefixes, for its routes: who holds them, and whether that has been true."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple, final

from .fetching import KvLinks, OpenFetches, PrefixFetch, choose_fetch
from .index import NamesOf, PrefixIndex
from .trust import HitTrust

MAX_OPEN: Final = 1 << 16
"""Requests whose first tokens, or whose places, are awaited at once; of more nothing is learned."""


class ExpectedPrefill(NamedTuple):
    """A request was routed `at` a moment to a replica that had `queued` tokens to prefill, and was said to hold `named`
    of the `prompt` tokens of this one."""

    at: float
    prompt: int
    queued: int
    named: int


class _Awaited(NamedTuple):
    """`fetch`: what of its prompt comes from another replica."""

    replica: str
    expected: ExpectedPrefill
    fetch: PrefixFetch | None = None


@final
class PrefixKnowledge:
    """See the module. Gateways and simulations ask it before each route, and tell it how that went."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.trust = HitTrust()
        self._fetches = OpenFetches()
        self._awaited: dict[Hashable, _Awaited] = {}
        self._asked: dict[Hashable, Callable[[], None]] = {}  # what is to be noted when a replica accepts them

    def __repr__(self) -> str:
        return f"<PrefixKnowledge {self.index!r} {self.trust!r} {self._fetches!r}>"

    def find_named(self, names_of: NamesOf, now: float) -> dict[str, int]:
        """By replica: tokens of this prompt that it is said to hold."""
        return self.index.held_tokens(names_of, now)

    def believe(self, named: Mapping[str, int]) -> dict[str, int]:
        """By replica: as many of them as it is believed to hold."""
        return {replica: int(tokens * self.trust.share(replica)) for replica, tokens in named.items()}

    def choose_fetch(
        self,
        prompt_tokens: int,
        target: str,
        named: Mapping[str, int],
        *,
        sources: Iterable[str],
        token_s: float,
        links: KvLinks,
        share: float,
        now: float,
    ) -> PrefixFetch | None:
        """What of a prompt comes from one of `sources` to the replica that would compute it; see `fetching`."""
        held = {each: named.get(each, 0) for each in sources if self.trust.is_source(each, now)}
        held[target] = named.get(target, 0)
        held = self.believe(held)
        return choose_fetch(
            prompt_tokens, target, held, token_s=token_s, links=links, under_way=self._fetches, share=share
        )

    def note_route(
        self,
        request: Hashable,
        replica: str,
        names_of: NamesOf,
        expected: ExpectedPrefill,
        fetch: PrefixFetch | None = None,
        *,
        is_asked: bool = False,
    ) -> None:
        """A request is prefilled by this replica, but for what is fetched. `is_asked`: if that accepts it."""
        self._fetches.end(request)
        self._asked.pop(request, None)
        if is_asked:
            if len(self._asked) < MAX_OPEN:
                self._asked[request] = partial(self.note_route, request, replica, names_of, expected, fetch)
            return
        if len(self._awaited) < MAX_OPEN:
            self._awaited[request] = _Awaited(replica, expected, fetch)
            if fetch is not None:
                self._fetches.begin(request, replica, fetch)
        self.index.expect(replica, names_of, expected.at)

    def note_accepted(self, request: Hashable) -> None:
        """Its replica accepts it. Of one that was not asked it is no matter."""
        if (note_route := self._asked.pop(request, None)) is not None:
            note_route()

    def note_first_token(self, request: Hashable, now: float) -> None:
        """Its answer has begun: what was to be fetched for it has been, or was computed. Again is no matter."""
        awaited = self._awaited.get(request)
        if awaited is None or awaited.fetch is None:
            return
        replica, (at, prompt, queued, named), fetch = self._awaited.pop(request)
        assert fetch is not None
        self._fetches.end(request)
        tokens = queued + prompt - min(named, fetch.tokens)
        self.trust.observe_fetch(replica, fetch.holder, tokens=tokens, fetched=fetch.missing, seconds=now - at, now=now)

    def note_end(self, request: Hashable, first_token_at: float | None) -> None:
        """It has ended; None: it had no first token, or had it from another replica."""
        self._fetches.end(request)
        self._asked.pop(request, None)
        awaited = self._awaited.pop(request, None)
        if awaited is not None and awaited.fetch is None and first_token_at is not None:
            replica, (at, prompt, queued, named), _ = awaited
            named = min(named, prompt - 1)
            self.trust.observe(replica, tokens=queued + prompt, named=named, seconds=first_token_at - at)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        kept = set(replicas)
        self.index.keep(kept)
        self.trust.keep(kept)
