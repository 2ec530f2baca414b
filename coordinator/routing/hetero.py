"""Requests to replicas of unequal speed and memory, so that the most loaded one has as little as can
be (Xiong et al., High-Throughput LLM Inference on Heterogeneous Clusters, section 4).

What a request r adds to replica s is its time in an ideal batch, one of as many requests like it as
the replica's KV cache holds, times e^(theta * kvusage) (equations 5 to 7). The usage is of the tokens
of all requests that have not ended, prompts and predicted answers, so it may be above 1 (equation
8). When a request ends, what it had added is taken off again (algorithm 2's hooks).

Algorithm 2 as printed starts `minGlobalLoad` at 0, where no instance is ever better than that: it is
infinite here. It takes the first instance that keeps the highest load lowest. Behind one loaded
instance all others are equal by that, and would be filled up one after the other; so where they are
equal, the one with the least load takes the request. Both together mean: the least load, with the
request.

The paper's instances serve requests whole. Of a plan with phases, both sides are chosen, each by
itself: the decode side as above, by equation 4; the prefill side by the seconds until it would have
prefilled what waits there and this prompt, by equation 3. Links are not looked at.

**Who owns the state.** The paper has one dispatcher; here each node has a gateway. A gateway owns
the loads of its own requests, exactly and at once. What others have at a replica belongs to the
replica, which tells how many requests it has, about a second late: those beyond this gateway's own
count as the mean of this gateway's latest, added while the usage rose to what it is. So gateways
need no agreement, and one that is lost takes nothing along. A plan that follows another keeps the
loads of requests that have not ended.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from functools import partial
from math import exp, expm1
from typing import ClassVar, Final, NamedTuple, final

import numpy as np

from ..plan import Plan, Replica
from ..profile import ReplicaProfile
from .estimates.lengths import LengthPredictor, make_predictor
from .interface import NoRoute, ReplicaLoads, RequestFacts, RequestId, Route, RoutingPolicy, RoutingSettings

REMEMBERED: Final = 128
"""About how many of this gateway's latest requests stand for those of others."""

MOST_USED: Final = 100.0
"""KV caches that a replica's requests may count for; the exponent has to stay a number."""


class WorkloadKind(Enum):
    """What a request counts as before its replica's KV cache is looked at."""

    TIME = "time"
    """Its share of an ideal batch's time: the paper's scheduler."""
    ONE = "one"
    """1, whatever it is: the paper's memory-based scheduler."""
    TOKENS = "tokens"
    """Its tokens, however fast the replica is and however full: the fewest tokens outstanding."""


class _Placed(NamedTuple):
    """A request that has not ended, where it decodes, and what it adds to the load there."""

    prompt: int
    replica: str
    workload: float
    tokens: float


class _OwnLoad:
    """Of this gateway's requests at a replica."""

    __slots__ = ("requests", "tokens", "workload")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0.0
        self.workload = 0.0

    def add(self, workload: float, tokens: float) -> None:
        self.requests += 1
        self.workload += workload
        self.tokens += tokens

    def remove(self, workload: float, tokens: float) -> None:
        self.requests -= 1
        self.workload -= workload
        self.tokens -= tokens
        if not self.requests:  # and no rounding is left
            self.workload = self.tokens = 0.0


class _Lengths(NamedTuple):
    prompt: float
    output: float

    @property
    def tokens(self) -> float:
        return self.prompt + self.output


class _WeighedReplica(NamedTuple):
    """A replica, its load with the request, and what of that is the request's."""

    load: float
    replica: str
    workload: float


_NO_LOAD: Final = _OwnLoad()


@final
class OpenRequests:
    """What a gateway owns: its requests that have not ended, what they add to replicas, and about
    how long its latest ones were."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self.mean: _Lengths | None = None
        self._loads: defaultdict[str, _OwnLoad] = defaultdict(_OwnLoad)
        self._placed: dict[RequestId, _Placed] = {}

    def __repr__(self) -> str:
        loads = (f"{name}: {own.requests} ({own.workload:.3g} s)" for name, own in self._loads.items() if own.requests)
        return f"<OpenRequests {', '.join(loads)}>"

    def at(self, replica: str) -> _OwnLoad:
        """Of this replica."""
        return self._loads.get(replica, _NO_LOAD)

    def remember(self, lengths: _Lengths) -> None:
        """These are the lengths of a request."""
        mean = self.mean if self.mean is not None else lengths
        self.mean = _Lengths(*(old + (new - old) / REMEMBERED for old, new in zip(mean, lengths, strict=True)))

    def add(self, request: RequestId, placed: _Placed) -> None:
        """It has been routed."""
        self._placed[request] = placed
        self._loads[placed.replica].add(placed.workload, placed.tokens)

    def release(self, request: RequestId) -> _Placed | None:
        """It is over, or begins again; what it had added to a load. None: it has no route."""
        placed = self._placed.pop(request, None)
        if placed is not None:
            self._loads[placed.replica].remove(placed.workload, placed.tokens)
        return placed


@final
class MinMaxWorkload(RoutingPolicy):
    """See the module."""

    needs_profiles: ClassVar[bool] = True

    def __init__(self, plan: Plan, settings: RoutingSettings, workload: WorkloadKind = WorkloadKind.TIME) -> None:
        self._plan = plan
        self._workload = workload
        self._theta = settings.kv_pressure if workload is not WorkloadKind.TOKENS else 0.0
        self.open = OpenRequests(make_predictor(settings.length_predictor))

    def __repr__(self) -> str:
        return f"<MinMaxWorkload {self.open!r}>"

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        usable = [item for item in self._plan.replicas if request.excluded.isdisjoint((item.id, *item.peers))]
        if not usable:
            raise NoRoute(f"no box can take a request for {self._plan.service}: all replicas are excluded")
        if request.id is not None:
            self.open.release(request.id)  # it begins again elsewhere
        lengths = self._predict(request, rng)
        self.open.remember(lengths)
        chosen = self._choose_replicas(usable, lengths, loads)
        if request.id is not None:
            _, replica, workload = chosen[-1]
            self.open.add(request.id, _Placed(request.prompt_tokens, replica, workload, lengths.tokens))
        return Route.between(chosen[0].replica, chosen[-1].replica, request.prompt_tokens)

    def on_end(self, request: RequestId, output_tokens: int | None) -> None:
        """Take its workload off again, and learn from its answer."""
        placed = self.open.release(request)
        if placed is not None and output_tokens:
            self.open.predictor.record(placed.prompt, output_tokens)

    def take_over(self, earlier: RoutingPolicy) -> None:
        """Keep the loads of requests that have not ended, and what is known of lengths."""
        if isinstance(earlier, MinMaxWorkload):
            self.open = earlier.open

    def _predict(self, request: RequestFacts, rng: np.random.Generator) -> _Lengths:
        output = self.open.predictor.predict(request.prompt_tokens, rng)
        if request.max_output_tokens is not None:
            output = min(output, float(max(1, request.max_output_tokens)))
        return _Lengths(float(max(1, request.prompt_tokens)), output)

    def _choose_replicas(self, usable: list[Replica], lengths: _Lengths, loads: ReplicaLoads) -> list[_WeighedReplica]:
        """The replica for all of the request, or one for its prefill and one for its decode."""
        prefill = [item.id for item in usable if not item.decodes]
        decode = [item.id for item in usable if not item.prefills]
        mixed = [item.id for item in usable if item.prefills and item.decodes]
        routes: list[list[_WeighedReplica]] = []
        # one that does both stands in for a side that has no other left
        firsts, lasts = prefill or mixed, decode or mixed
        if firsts and lasts and (prefill or decode):
            first = self._pick(firsts, lengths, loads, decodes=False)
            routes.append([first, self._pick(lasts, lengths, loads, prefills=False)])
        whole = mixed if mixed or routes else decode or prefill
        if whole:
            routes.append([self._pick(whole, lengths, loads)])
        return min(routes, key=lambda route: max(choice.load for choice in route))

    def _pick(
        self,
        replicas: list[str],
        lengths: _Lengths,
        loads: ReplicaLoads,
        *,
        prefills: bool = True,
        decodes: bool = True,
    ) -> _WeighedReplica:
        """The one that would have the least load, with what it is to do of this request."""
        at = [loads.index[replica] for replica in replicas]
        profiles = [loads.profiles[place] for place in at]
        make_work = partial(_Work, self._workload, prefills, decodes)
        works = [make_work(profile) for profile in profiles if profile is not None]
        # silence is no sign of speed
        unknown = max(works, key=lambda work: work.seconds(lengths), default=make_work(None))
        # One whose KV cache cannot hold the prompt comes after all others: the request would be refused there.
        fits = [profile is None or not 0 < profile.kv_tokens <= lengths.prompt for profile in profiles]
        choices = (
            self._weigh(replica, make_work(profile) if profile is not None else unknown, lengths, loads)
            for replica, profile, does_fit in zip(replicas, profiles, fits, strict=True)
            if does_fit or not any(fits)
        )
        return min(choices, key=lambda choice: choice.load)  # the first of the least

    def _weigh(self, replica: str, work: _Work, lengths: _Lengths, loads: ReplicaLoads) -> _WeighedReplica:
        """A replica's load with this work."""
        at = loads.index[replica]
        seconds = work.seconds(lengths)
        if not work.decodes:
            return _WeighedReplica(seconds * (1.0 + float(loads.prefill_tokens[at]) / lengths.prompt), replica, seconds)
        own, mean = self.open.at(replica), self.open.mean or lengths
        others = max(0.0, float(loads.outstanding[at]) - own.requests)
        pressure = self._theta * min(MOST_USED, work.kv_usage(own.tokens + others * mean.tokens))
        workload = seconds * exp(pressure)
        risen = expm1(pressure) / pressure if pressure > 0.0 else 1.0
        return _WeighedReplica(own.workload + others * work.seconds(mean) * risen + workload, replica, workload)


class _Work(NamedTuple):
    """What a replica, as fast as `profile` says, is to do of requests. Where nothing is known of
    any replica, tokens stand for seconds."""

    workload: WorkloadKind
    prefills: bool
    decodes: bool
    profile: ReplicaProfile | None

    def seconds(self, lengths: _Lengths) -> float:
        """T of equation 6: of an ideal batch, over its requests."""
        if self.workload is WorkloadKind.ONE:
            return 1.0
        if self.profile is None or self.workload is WorkloadKind.TOKENS:
            return self.prefills * lengths.prompt + self.decodes * lengths.output
        requests = max(1.0, self.profile.kv_tokens / lengths.tokens)  # equation 5
        prefill_s, decode_s = self.profile.batch_s(requests, *lengths)
        return (self.prefills * prefill_s + self.decodes * decode_s) / requests

    def kv_usage(self, tokens: float) -> float:
        """Equation 8."""
        return tokens / self.profile.kv_tokens if self.profile is not None and self.profile.kv_tokens else 0.0
