"""What a replica says to a gateway that asks it before it sends a request: whether there is a place, which is decided
here, where the queue is. ::

    gateway -> replica   PoolClaim(replica, work, pool, prompt_tokens)
    replica -> gateway   accepted or not, and its PoolState

Splitwise's gateways (Patel et al., ISCA 2024, section IV-A) name the pool that they take the machine to be in. The
replica refuses where it is in one that would be asked later, and beyond its limits: prompts queue up to
`max_pending_tokens`, and there must be KV for prompt and answer. Gateways that route by predicted times say how many
tokens of prompts they take to be ahead, and are refused where there are more. Either way the answer corrects what the
gateway knew of the replica.

A claim that was accepted counts against the limits until its request is here, or is given up, or
`lease_s` have passed: so N gateways that ask at the same time do not pass them together. It counts
for nothing else. Which pool a machine is in follows from the plan, by which it is at home, and from
the requests that really are there: a gateway that claims and sends nothing moves no machine, and a
machine is back at home as soon as nothing of the other kind is pending. A request that comes
without a claim, from a gateway with another policy or of an earlier release, is counted when it is
here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar, final

import msgspec

from ..bounds import Count, Name, Tokens
from ..plan import Phase

LEASE_S: Final = 10.0
"""For a request to come that was accepted. Longer: slower gateways keep their places; shorter: those of one that is
gone are free sooner."""

MOST_CLAIMS: Final = 128
"""Of one gateway at one replica; beyond that no claim is accepted, as a member may claim for requests that it does not
have. More than it sends within a round trip."""

MOST_REFUSALS: Final = 4
"""So many replicas may refuse a request before it goes to the shortest queue of all. More: limits hold for more
requests, each a round trip later."""


class Work(StrEnum):
    """What a replica is wanted for: its phase of a request that another one shares, or both."""

    PROMPT = "prompt"
    TOKEN = "token"
    BOTH = "both"


_ORDER: Final = {
    Work.PROMPT: (Phase.PREFILL, Phase.MIXED, Phase.DECODE),
    Work.TOKEN: (Phase.DECODE, Phase.MIXED, Phase.PREFILL),
}
"""Pools as they are asked for a phase. For both phases the mixed pool comes first, and the other two are alike."""


class PoolClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A request with so many prompt tokens wants `work` of a replica, which it takes to be in `pool`; and KV for
    `answer_tokens` beside its prompt's. None: as many as the replica supposes. `most_ahead`: that is all that matters,
    no more tokens of prompts are to be computed there before; None: the limits of the pool hold."""

    replica: Name
    work: Work
    pool: Phase
    prompt_tokens: Tokens
    answer_tokens: Count | None = None
    most_ahead: Count | None = None

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prompt that the replica is to compute."""
        return 0 if self.work is Work.TOKEN else self.prompt_tokens

    def reserved_tokens(self, answer_tokens: int) -> int:
        """KV that it is to find room for, with an answer of so many tokens where it does not say."""
        if self.work is Work.PROMPT:
            return 0  # its KV leaves as it is computed
        return self.prompt_tokens + (answer_tokens if self.answer_tokens is None else self.answer_tokens)

    def finds_place(self, pool: Phase, state: PoolState, limits: PoolLimits) -> bool:
        """Whether a replica in this pool, where it stands like that, has a place for it."""
        if self.most_ahead is not None:
            return state.prefill_tokens <= self.most_ahead
        takes_prompt = self.work is Work.TOKEN or limits.take_prompt(state.prefill_tokens, self.prompt_tokens)
        has_room = self.reserved_tokens(limits.answer_tokens) <= state.kv_free_tokens
        return self.is_suited(pool) and takes_prompt and has_room

    def is_suited(self, pool: Phase) -> bool:
        """Whether a machine of this pool is asked no later than one of the pool that it was taken to be in."""
        if self.work is Work.BOTH:
            return pool is Phase.MIXED or self.pool is not Phase.MIXED
        order = _ORDER[self.work]
        return order.index(pool) <= order.index(self.pool)


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands at a replica: its pool now, `requests` there, tokens of their prompts that it has yet to compute,
    KV tokens that it has room for, and requests whose answers it generates."""

    pool: Phase
    requests: Count
    prefill_tokens: Count
    kv_free_tokens: Count
    decodes: Count


class PoolLimits(NamedTuple):
    """Of `RoutingSettings`: the longest queue of prompt tokens, and the KV of an answer of unknown length."""

    max_pending_tokens: int
    answer_tokens: int

    def take_prompt(self, ahead: float, tokens: int) -> bool:
        """An idle machine takes any; another one while its queue stays within the limit."""
        return ahead <= 0.0 or ahead + tokens <= self.max_pending_tokens


def is_borrowed(home: Phase, requests: float, prefill_tokens: float, decodes: float) -> bool:
    """Whether a machine has work of the pool in which it is not at home: a prompt machine that decodes, or a token
    machine that has prompts to compute. A request whose KV comes from elsewhere has one token to compute there, its
    last."""
    if home is Phase.PREFILL:
        return decodes > 0
    return home is Phase.DECODE and prefill_tokens > requests


NO_ANSWERS: Final[Mapping[PoolClaim, bool]] = MappingProxyType({})
"""Nobody has been asked."""

Key = TypeVar("Key", bound=Hashable)


class _HeldClaim(NamedTuple):
    """That was accepted: until when, and who has made it."""

    until: float
    gateway: Hashable
    claim: PoolClaim


@final
class PoolClaims(Generic[Key]):
    """The claims that a replica has accepted and whose requests have not come. Keys are requests; times are seconds of
    one clock that does not go back."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._held: dict[Key, _HeldClaim] = {}  # in order of their ends

    def __repr__(self) -> str:
        return f"<PoolClaims {len(self._held)}>"

    def __len__(self) -> int:
        return len(self._held)

    def answer(
        self,
        request: Key,
        claim: PoolClaim,
        present: PoolState,
        limits: PoolLimits,
        now: float,
        gateway: Hashable = None,
    ) -> tuple[bool, PoolState]:
        """Whether the claim of a gateway is accepted, and how it stands here afterwards; `present`: the requests that
        are here. Who asks again asks anew."""
        self._forget_expired(now)
        self.leave(request)
        state = self.count_in(present, limits)
        accepted = claim.finds_place(present.pool, state, limits) and self._count_of(gateway) < MOST_CLAIMS
        if accepted:
            self._held[request] = _HeldClaim(now + self._lease_s, gateway, claim)
            state = self.count_in(present, limits)
        return accepted, state

    def count_in(self, present: PoolState, limits: PoolLimits) -> PoolState:
        """With what is about to come; the pool is that of the requests that are here."""
        claims = [held.claim for held in self._held.values()]
        reserved = sum(claim.reserved_tokens(limits.answer_tokens) for claim in claims)
        return PoolState(
            pool=present.pool,
            requests=present.requests + len(claims),
            prefill_tokens=present.prefill_tokens + sum(claim.prefill_tokens for claim in claims),
            kv_free_tokens=max(0, present.kv_free_tokens - reserved),
            decodes=present.decodes + sum(claim.work is not Work.PROMPT for claim in claims),
        )

    def leave(self, request: Key) -> None:
        """It is here, or does not come. One that has not claimed anything is no matter."""
        self._held.pop(request, None)

    def _count_of(self, gateway: Hashable) -> int:
        return sum(held.gateway == gateway for held in self._held.values())

    def _forget_expired(self, now: float) -> None:
        while (first := next(iter(self._held), None)) is not None and now >= self._held[first].until:
            del self._held[first]
