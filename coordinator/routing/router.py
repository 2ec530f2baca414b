"""A gateway's router: the loads that it has heard of, and the policy that chooses by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..plan import Plan
from .interface import (
    Load,
    PolicyError,
    PolicyFactory,
    ReplicaLoads,
    RequestFacts,
    RequestId,
    Route,
    RoutingSettings,
)
from .policies import NETWORK_POLICIES
from .pools import NO_ANSWERS, PoolClaim

DEFAULT_SETTINGS: Final = RoutingSettings()
NOTHING_CACHED: Final[Mapping[str, int]] = MappingProxyType({})


@final
class Router:
    """Made once for a plan, and asked for every request by its `policy`. `loads` is what it has heard
    of the plan's replicas.

    `policies`: those that `settings.policy` may name. `rng`: for policies that draw lots; without
    one, they draw the same lots for each router. `earlier`: the router of the plan before, whose
    place this one takes. Raises PolicyError for a policy that is not known.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RoutingSettings = DEFAULT_SETTINGS,
        *,
        policies: Mapping[str, PolicyFactory] = NETWORK_POLICIES,
        rng: np.random.Generator | None = None,
        earlier: Router | None = None,
    ) -> None:
        make_policy = policies.get(settings.policy)
        if make_policy is None:
            raise PolicyError(f"routing.policy is {settings.policy!r}, none of {', '.join(policies)}")
        self.plan = plan
        self.policy = make_policy(plan, settings)
        if earlier is not None:
            self.policy.take_over(earlier.policy)
        self.loads = ReplicaLoads(replica.id for replica in plan.replicas)
        self._rng = rng if rng is not None else np.random.default_rng(0)

    @property
    def needs_profiles(self) -> bool:
        """Whether `loads.profiles` is to be kept up to date."""
        return self.policy.needs_profiles

    def report(self, loads: Iterable[Load], gateways: float = 1.0) -> None:
        """Take in the latest report of every replica, in place of all earlier ones; one that is not
        in the plan is nobody's business here. `gateways`: see `ReplicaLoads`."""
        self.loads.forget()
        self.loads.gateways = gateways
        for load in loads:
            if load.replica in self.loads.index:
                self.loads.note(
                    load.replica,
                    load.outstanding,
                    load.prefill_tokens,
                    load.kv_free_tokens,
                    decodes=load.decodes,
                    sent_tokens=load.sent_tokens,
                    told=load.told,
                )
                self.loads.note_beside(load.replica, load.beside)

    def route(
        self,
        prompt_tokens: int,
        exclude: frozenset[str] = frozenset(),
        *,
        now: float = 0.0,
        request: RequestId | None = None,
        output_tokens: int | None = None,
        max_output_tokens: int | None = None,
        cached_tokens: Mapping[str, int] = NOTHING_CACHED,
        answers: Mapping[PoolClaim, bool] = NO_ANSWERS,
    ) -> Route:
        """The policy's choice for a request of so many tokens to prefill, without the boxes and
        replicas in `exclude`. Raises NoRoute where none is left. `output_tokens`: of its answer,
        where that is known; `cached_tokens`: of the prompt, by replicas that are believed to hold their
        KV; `answers`: whether replicas have accepted claims of its earlier routes.

        `end_request` is to be called when the `request` of that id has ended.
        """
        if prompt_tokens < 0:
            raise ValueError(f"prompt_tokens is {prompt_tokens}; it must not be negative")
        facts = RequestFacts(
            prompt_tokens,
            exclude,
            output_tokens,
            id=request,
            max_output_tokens=max_output_tokens,
            cached_tokens=self._in_order(cached_tokens, prompt_tokens) if cached_tokens else None,
            answers=answers,
        )
        route = self.policy.choose(facts, self.loads, now=now, rng=self._rng)
        if facts.cached_tokens is None:
            return route
        found = int(facts.cached_tokens[self.loads.index[route.prefill or route.decode]])
        return msgspec.structs.replace(route, found=min(found, (route.split or prompt_tokens) - 1)) if found else route

    def _in_order(self, cached_tokens: Mapping[str, int], prompt_tokens: int) -> NDArray[np.float64]:
        """By replica of the plan, at most all but the last token: that one is always computed."""
        found = np.zeros(len(self.loads.ids))
        for replica, tokens in cached_tokens.items():
            if (at := self.loads.index.get(replica)) is not None:
                found[at] = max(0, min(tokens, prompt_tokens - 1))
        return found

    def end_request(self, request: RequestId, output_tokens: int | None) -> None:
        """A request has ended, with so many tokens of its answer; None: not with all of it."""
        self.policy.on_end(request, output_tokens)
