"""SeaLLM's doubling budget (Zhao et al., section 4.2 and algorithm 2 of its appendix): who steps next in an engine
process that several services share, so that latency over each service's usual execution time is lowest.

A request begins with a budget of `L_s + sd_s` seconds: mean and standard deviation of what its service's requests take.
Every iteration that it is in is charged to it in full, by the wall. Its priority is `O = Q * L_s` with what is left of
the budget as Q; the lowest goes first. With identical requests that is the c-mu rule for a cost of 1 / L_s for each
second (theorem 2): short services go before long ones, and who is nearly done before who has just begun. A budget that
is used up is doubled, which puts its request behind: it was not what its service's profile says.

What the paper leaves open, and what is done here:

- Algorithm 2 never ends where the next request is another service's: see `TurnQueue`.
- A doubled budget is twice the last one: 2, 4, 8 times the first. The paper prints `2 (L_s + Var_s)` and "repeat to
  double". Var_s is the standard deviation ("standard variance"), since it is added to seconds.
- The starvation threshold "for each service" is `starved_after` times its L_s. A service whose requests have waited so
  long is served first, until the budgets of those are used up: one turn for each threshold would be no service.
- As printed, a new prompt has a full budget, and so waits while anybody of its service decodes within the first: a
  service works batch after batch, and its batches do not grow. `prompts_first`, the default, puts prompts that fit
  before the decodes of their own service; who has the turn is decided by O all the same.
- KV of paused requests goes when memory is short, those of the highest O first, and is computed again. A prompt takes
  none from its own service: what it saves by being early is less than what is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Final, final

from .service_profile import ServiceProfile
from .values import SharedRequest, SharingError

STARVED_AFTER: Final = 10.0
"""Times a service's usual execution. Lower: nearer to first come, first served; higher: long requests wait longer."""


@final
class DoublingBudget:
    """See the module; a `TurnOrder`. The rank is what is left of the budget."""

    def __init__(
        self,
        profiles: Mapping[str, ServiceProfile],
        *,
        starved_after: float = STARVED_AFTER,
        prompts_first: bool = True,
    ) -> None:
        if isnan(starved_after) or starved_after <= 0.0:
            raise SharingError(f"starved_after is {starved_after:g}; it must be above 0")
        self.prompts_first = prompts_first
        self._profiles = profiles
        self._starved_after = starved_after

    def join(self, request: SharedRequest) -> None:
        """See `TurnOrder`."""
        execution = self._profiles[request.service].execution
        request.rank = request.budget = execution.mean + execution.deviation

    def score(self, request: SharedRequest) -> float:
        """O = Q * L_s."""
        return request.rank * self._profiles[request.service].execution.mean

    def charge(self, requests: list[SharedRequest], seconds: float) -> list[SharedRequest]:
        """See `TurnOrder`: those whose budget is used up have it doubled."""
        for request in requests:
            request.rank -= seconds
        spent = [request for request in requests if request.rank <= 0.0]
        for request in spent:
            request.budget *= 2.0
            request.rank = request.budget
        return spent

    def starvation_s(self, service: str) -> float:
        """See `TurnOrder`."""
        return self._starved_after * self._profiles[service].execution.mean

    def may_evict(self, asker: SharedRequest, victim: SharedRequest) -> bool:
        """See `TurnOrder`."""
        is_other = asker.holds_kv or asker.service != victim.service
        return is_other and self.score(asker) < self.score(victim)
