"""Turn orders that the doubling budget is compared with, as SeaLLM's section 6 has them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Final, final

from .service_profile import ServiceProfile
from .values import SharedRequest, SharingError

QUOTA_S: Final = 0.1
"""Seconds of all services' quotas together. Shorter: services alternate more often; longer: larger batches of
prompts."""

FIRST_QUANTUM_S: Final = 0.05
"""Of the highest level of `SkipJoinMlfq`: a few decode steps."""

LEVELS: Final = 8

MLFQ_STARVED_S: Final = 30.0
"""After which a request of `SkipJoinMlfq` is promoted."""


@final
class FirstComeFirstServed:
    """In order of arrival over all services, with nobody preempted but for lack of memory: AlpaServe's, as SeaLLM
    implements it. The service of the oldest open request has the turn until that request ends, and the requests of that
    service that came since are batched with it; those of other services wait behind."""

    prompts_first = True

    def join(self, request: SharedRequest) -> None:
        """See `TurnOrder`: the rank is equal for all."""

    def score(self, request: SharedRequest) -> float:
        """See `TurnOrder`."""
        return float(request.number)

    def charge(self, requests: list[SharedRequest], seconds: float) -> list[SharedRequest]:
        """See `TurnOrder`: nothing changes."""
        return []

    def starvation_s(self, service: str) -> float:
        """See `TurnOrder`: nobody starves."""
        return inf

    def may_evict(self, asker: SharedRequest, victim: SharedRequest) -> bool:
        """See `TurnOrder`: as in vLLM, a prompt waits for room, and who decodes takes it from who came last."""
        return asker.holds_kv and asker.number < victim.number


@final
class QuotaRoundRobin:
    """Services in turn, each until its quota of seconds is used up or it has nothing to do; first come, first served in
    each: after MuxServe. MuxServe gives each service a fixed part of the GPU's cores at the same time; here quotas are
    of time, and what a service does not use goes to the next, which is kinder to bursts than fixed parts are."""

    prompts_first = True

    def __init__(self, quotas: Mapping[str, float]) -> None:
        if not quotas or not all(isfinite(quota) and quota > 0.0 for quota in quotas.values()):
            raise SharingError(f"quotas must be seconds above 0; they are {dict(quotas)}")
        self._quotas = dict(quotas)
        self._places = {service: place for place, service in enumerate(quotas)}
        self._services = tuple(quotas)
        self._turn = 0  # the place of the service whose turn it is
        self._left_s = self._quotas[self._services[0]]

    def join(self, request: SharedRequest) -> None:
        """See `TurnOrder`: the rank is equal for all."""

    def score(self, request: SharedRequest) -> float:
        """See `TurnOrder`: how many services have their turn before this one."""
        return float((self._places[request.service] - self._turn) % len(self._services))

    def charge(self, requests: list[SharedRequest], seconds: float) -> list[SharedRequest]:
        """See `TurnOrder`: no rank changes; the turn may end."""
        if requests:
            place = self._places[requests[0].service]
            if place != self._turn:  # those before it had nothing to do
                self._turn, self._left_s = place, self._quotas[requests[0].service]
            self._left_s -= seconds
            if self._left_s <= 0.0:
                self._turn = (place + 1) % len(self._services)
                self._left_s = self._quotas[self._services[self._turn]]
        return []

    def starvation_s(self, service: str) -> float:
        """See `TurnOrder`: nobody starves."""
        return inf

    def may_evict(self, asker: SharedRequest, victim: SharedRequest) -> bool:
        """See `TurnOrder`: as in vLLM."""
        return asker.holds_kv and asker.number < victim.number


@final
class SkipJoinMlfq:
    """FastServe's skip-join multi-level feedback queue (Wu et al., 2023): levels whose quanta double. A request joins
    the first level whose quantum its prefill fits into, and falls to the next when it has used the quantum of its own;
    the highest level goes first, in order of arrival. It does not know services but by their times for prefill.
    FastServe swaps the KV of low levels to host memory ahead of time; here it goes when memory is short, and is
    computed again."""

    prompts_first = False

    def __init__(
        self,
        profiles: Mapping[str, ServiceProfile],
        *,
        first_quantum_s: float = FIRST_QUANTUM_S,
        levels: int = LEVELS,
        starved_s: float = MLFQ_STARVED_S,
    ) -> None:
        if not (0.0 < first_quantum_s < inf and levels >= 1 and starved_s > 0.0):
            raise SharingError("the first quantum must be above 0 s, and there must be at least 1 level")
        self._profiles = profiles
        self._quanta = (*(first_quantum_s * 2.0**level for level in range(levels - 1)), inf)
        self._starved_s = starved_s

    def join(self, request: SharedRequest) -> None:
        """See `TurnOrder`: the rank is the level."""
        first_s = request.prompt_tokens * self._profiles[request.service].prefill_token.mean
        request.rank = float(next(level for level, quantum in enumerate(self._quanta) if first_s <= quantum))

    def score(self, request: SharedRequest) -> float:
        """See `TurnOrder`."""
        return request.rank

    def charge(self, requests: list[SharedRequest], seconds: float) -> list[SharedRequest]:
        """See `TurnOrder`: who has used its quantum falls by a level."""
        moved = []
        for request in requests:
            request.used_s += seconds
            if request.used_s >= self._quanta[int(request.rank)]:
                request.used_s = 0.0
                request.rank += 1.0
                moved.append(request)
        return moved

    def starvation_s(self, service: str) -> float:
        """See `TurnOrder`."""
        return self._starved_s

    def may_evict(self, asker: SharedRequest, victim: SharedRequest) -> bool:
        """See `TurnOrder`."""
        return (asker.rank, asker.number) < (victim.rank, victim.number)
