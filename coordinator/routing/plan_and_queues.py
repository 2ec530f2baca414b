"""The network's policy: the plan says how requests are shared in the long run, the queues how it
stands now.

As in Splitwise (Patel et al., ISCA 2024, section IV-A), the prefill and the decode side are chosen
together when the request arrives, each by the shortest queue. Not as there: prefill queues are
counted in prompt tokens that are not prefilled yet and those of a prompt of mean length, and decode
queues in requests; a queue counts for its length over the share of the requests that the plan gives
the replica, so that twice the share may hold twice the queue, and beside the mean of its side. So
ten requests more weigh much where prompts are prefilled one after the other, and little where
hundreds decode together, and the two sides can be added. A prompt of mean length, and not this one:
else long prompts would all go to the replica with the largest share, which the plan gave as many
short ones. Splitwise also has pools that machines move
between; plans have phases. A side whose free KV cannot hold the prompt comes after all others: the
request would wait there.

Other gateways' requests are heard of a second late. Until then each gateway takes the others for as
busy as itself: what it has sent to a replica since that reported counts once for each gateway. Else
all of them send to the replica whose queue was the shortest at the latest report: with four
gateways, 15 prompt and 25 token machines and 180 requests/s, TTFT at p50 was 0.91 s so, and 0.41 s
with it (llama2-70b on DGX-H100, conversations, simulated).

Queues of replicas say nothing of the links between them. Two that are idle may be joined by a thin
one, to which the plan gives a request in a hundred: a pair whose KV leaves its boxes, and that had
more than `free_share` times its share of the latest requests, counts for that much more. At 60 % of
the load that a plan over thin links carries, 99 instead of 93 % were in time by that (LLaMA-30B,
conversations, 10 Gb/s, simulated), and plans carry as much as without.
"""

from __future__ import annotations

from collections import defaultdict
from math import ceil
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..plan import Pairing, Phase, Plan, Replica
from .interface import NoRoute, ReplicaLoads, RequestFacts, Route, RoutingPolicy, RoutingSettings

Indices = NDArray[np.intp]
Floats = NDArray[np.float64]


class _Side(NamedTuple):
    """The prefill or the decode end of all routes. By route: the `replica` there (its index), and
    one over its share of the requests. `everyone`: the index of each replica of the side, once."""

    replica: Indices
    inverse_share: Floats
    everyone: Indices

    def relative_queues(self, queues: Floats) -> Floats:
        """By route: the queue over the share of the requests, 1 for the mean of the side."""
        return self.relative_to(queues, queues)

    def relative_to(self, queues: Floats, tokens: Floats) -> Floats:
        """By route: so many tokens there, on the scale of `relative_queues`."""
        return np.asarray(tokens[self.replica] * self.inverse_share / queues[self.everyone].sum())


class RouteTable(NamedTuple):
    """The routes that may be used, in order of their replicas' ids, after leaving out what is
    excluded.

    By route: how much of the prompt the prefill side computes, its place among the plan's pairs
    (-1: none of them), and one over its share of the requests, 0 where KV stays in its boxes.
    `usable`: indices of the replicas that are not excluded.
    """

    usable: Indices
    prefill: _Side
    decode: _Side
    split_share: list[float]
    pairs: Indices
    inverse_share: Floats

    def split(self, route: int, prompt_tokens: int) -> int:
        """How much of a prompt the prefill replica of a route computes."""
        return split_tokens(prompt_tokens, self.split_share[route])


@final
class PlanAndQueues(RoutingPolicy):
    """The route with the least weighted work outstanding, by the latest loads: a few array
    operations over the pairs of the plan.

    In order of preference: the pairs that the plan gives weight; a decode or mixed replica alone; a
    prefill replica alone. A replica that has reported nothing counts as busy as the busiest that
    has: silence is no sign of leisure. Ties go by replica id.
    """

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        self._plan = plan
        self._settings = settings
        self._sent = np.zeros(len(plan.pairings) + 1)  # by pair, and those by no pair
        self._routed, self._mean_prompt = 0, 0.0
        self._excluded: frozenset[str] = frozenset()
        self._table = build_route_table(plan, self._excluded)

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`; depends on neither `now` nor `rng`."""
        table = self.table_without(request.excluded, loads)
        to_prefill, to_decode = self.guess_queues(loads)
        to_prefill = to_prefill + loads.beside_tokens + self._note_prompt(request.prompt_tokens)
        to_decode = to_decode + loads.beside_requests
        cost = table.prefill.relative_queues(to_prefill)
        if request.cached_tokens is not None:
            cost = cost - self._settings.prefix_weight * table.prefill.relative_to(to_prefill, request.cached_tokens)
        cost = cost + table.decode.relative_queues(to_decode + 1.0) + self.beyond_share()
        prefill, decode = table.prefill.replica, table.decode.replica
        full = loads.kv_free_tokens < request.prompt_tokens
        if full.any():
            full_sides = full[prefill].astype(np.int8) + full[decode]
            cost = np.where(full_sides == full_sides.min(), cost, np.inf)
        best = int(cost.argmin())  # the first of the least
        self.note_sent(best)
        return Route.between(
            loads.ids[prefill[best]], loads.ids[decode[best]], table.split(best, request.prompt_tokens)
        )

    def table_without(self, excluded: frozenset[str], loads: ReplicaLoads) -> RouteTable:
        """The routes without these boxes and replicas. Raises NoRoute where none is left."""
        if excluded != self._excluded:
            # exclusions change when boxes come or go, not from request to request: a table serves many
            self._excluded, self._table = excluded, build_route_table(self._plan, excluded)
        if not self._table.split_share:
            raise NoRoute(
                f"no box can take a request for {self._plan.service}: all {len(loads.ids)} replicas of "
                f"plan {self._plan.epoch}.{self._plan.version} are excluded ({', '.join(sorted(excluded))})"
            )
        return self._table

    def note_sent(self, route: int) -> int:
        """A request takes this route of the latest table, or one beyond it, which no pair has. Returns its pair."""
        pair = self._table.pairs[route] if route < len(self._table.pairs) else -1
        self._sent *= 1.0 - 1.0 / self._settings.remembered_requests
        self._sent[pair] += 1.0
        return pair

    def take_back(self, pair: int) -> None:
        """The latest request of this pair has gone elsewhere."""
        self._sent[pair] = max(0.0, self._sent[pair] - 1.0)

    def guess_queues(self, loads: ReplicaLoads) -> tuple[Floats, Floats]:
        """Tokens to prefill and requests, by replica; of those that have reported nothing, as of the busiest. Other
        gateways are taken for as busy as this one until the next report; what a replica has answered is the least."""
        to_prefill, to_decode = loads.prefill_tokens + loads.sent_tokens * (loads.gateways - 1.0), loads.outstanding
        if loads.gateways > 1.0:
            for at, told in enumerate(loads.told):
                if told is not None:
                    to_prefill[at] = max(to_prefill[at], told.prefill_tokens)
        if loads.is_silent.any():
            to_prefill, to_decode = self._with_guesses(to_prefill, loads), self._with_guesses(to_decode, loads)
        return to_prefill, to_decode

    def _note_prompt(self, tokens: int) -> float:
        """The mean prompt of the latest requests, this one included."""
        self._routed = min(self._routed + 1, self._settings.remembered_requests)
        self._mean_prompt += (max(1, tokens) - self._mean_prompt) / self._routed
        return self._mean_prompt

    def beyond_share(self) -> Floats:
        """By route of the latest table: what it had of the latest requests over its share of them, as far as that is
        above `free_share`."""
        sent = self._sent[self._table.pairs]
        # of fewer requests than this, one is a lot: nothing can be said of shares yet
        seen = max(float(sent.sum()), self._settings.remembered_requests / 4)
        return np.asarray(np.maximum(sent * self._table.inverse_share / seen - self._settings.free_share, 0.0))

    def _with_guesses(self, queues: Floats, loads: ReplicaLoads) -> Floats:
        """The queues, with a guess for replicas that have reported nothing."""
        usable = self._table.usable
        heard = usable[~loads.is_silent[usable]]
        return np.where(loads.is_silent, queues[heard].max(initial=0.0), queues)


def split_tokens(prompt_tokens: int, share: float) -> int:
    """The share in whole tokens: at least one, and never more than there are."""
    return min(prompt_tokens, max(1, ceil(prompt_tokens * share)))


def build_route_table(plan: Plan, excluded: frozenset[str]) -> RouteTable:
    index = {item.id: number for number, item in enumerate(plan.replicas)}
    usable = {item.id: item for item in plan.replicas if excluded.isdisjoint((item.id, *item.peers))}
    pairs = _usable_pairs(plan, usable)
    weights = np.array([pair.weight for pair in pairs])
    place = {(pair.prefill, pair.decode): number for number, pair in enumerate(plan.pairings)}
    leaves_boxes = [set(usable[pair.prefill].peers) != set(usable[pair.decode].peers) for pair in pairs]
    return RouteTable(
        usable=np.array([index[name] for name in usable], dtype=np.intp),
        prefill=_build_side([index[pair.prefill] for pair in pairs], weights),
        decode=_build_side([index[pair.decode] for pair in pairs], weights),
        split_share=[pair.prefill_share for pair in pairs],
        pairs=np.array([place.get((pair.prefill, pair.decode), -1) for pair in pairs], dtype=np.intp),
        inverse_share=np.where(leaves_boxes, weights.sum() / weights, 0.0),
    )


def _build_side(replicas: list[int], weights: Floats) -> _Side:
    index = np.array(replicas, dtype=np.intp)
    each, which = np.unique(index, return_inverse=True)
    shares = np.bincount(which, weights, minlength=len(each)) / weights.sum()
    return _Side(replica=index, inverse_share=1.0 / shares[which], everyone=each)


def _usable_pairs(plan: Plan, usable: dict[str, Replica]) -> list[Pairing]:
    """Those of the plan among usable replicas, or if there are none, replicas by themselves."""
    pairs = [pair for pair in plan.pairings if pair.weight > 0.0 and pair.prefill in usable and pair.decode in usable]
    if not pairs:
        pairs = _pair_with_themselves(plan, [item for item in usable.values() if item.decodes])
    if not pairs:
        # an engine can do both phases whatever the plan says: better than to refuse the request
        pairs = _pair_with_themselves(plan, [item for item in usable.values() if item.phase is Phase.PREFILL])
    return sorted(pairs, key=lambda pair: (pair.prefill, pair.decode))


def _pair_with_themselves(plan: Plan, replicas: list[Replica]) -> list[Pairing]:
    """A replica that the plan gives no requests counts for as much as the one that it gives the
    fewest."""
    shares: defaultdict[str, float] = defaultdict(float)
    for pair in plan.pairings:
        for end in {pair.prefill, pair.decode}:
            shares[end] += pair.weight
    smallest = min((share for share in shares.values() if share > 0.0), default=1.0)
    return [Pairing(prefill=item.id, decode=item.id, weight=shares[item.id] or smallest) for item in replicas]
