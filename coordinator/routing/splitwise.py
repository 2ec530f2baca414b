"""Splitwise's pools (Patel et al., ISCA 2024, section IV-A), without one scheduler that owns them.

There are prompt, token and mixed machines. A request gets the prompt machine with the shortest
queue and a token machine with the shortest queue of those that the plan pairs it with. Where all
queues of one kind are beyond a limit, the mixed pool is asked, and then the pool of the other kind,
from which a machine is borrowed.

**Who owns what**, with a gateway on every node:

- The plan says where a machine is at home: phase prefill is the prompt pool, decode the token pool,
  mixed the mixed pool for good. Only the coordinator changes it.
- The machine's own report says whether it is borrowed: a prompt machine that decodes, a token
  machine that has prompts to compute. So it is back in its own pool as soon as nothing of the other
  kind is pending there, for all gateways alike, and no gateway has to tell another. (The public
  simulator waits until the machine is idle: `sims/policies/pools.py`.)
- A gateway owns nothing between two requests. Until a report comes it knows of its own requests
  alone, and takes the other gateways for as busy as itself: what it has sent somewhere since counts
  once for each of them (`ReplicaLoads.gateways`). So N gateways borrow in the first second of a
  burst, as one would; where they guess wrong, up to N borrow a machine each.

Not as in the paper: a machine that does for a request what it is not at home for takes both of its
phases, where the paper leaves the other one where it was. A plan's pairs are those whose links
carry KV; between others there may be none.

Where the length of an answer is not known, as at gateways, `RoutingSettings.answer_tokens` stand for
it. Machines are moved between the pools for good by plans: the coordinator makes new phases when
traffic differs from what the plan was made for, and when machines stay borrowed
(`coordinator/repair/repurposing.py`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..plan import Phase, Plan
from .interface import NoRoute, ReplicaLoads, RequestFacts, Route, RoutingPolicy, RoutingSettings

Indices = NDArray[np.intp]
Floats = NDArray[np.float64]


class _Homes(NamedTuple):
    """The usable replicas by their home pool, as indices into the live state, and the token
    replicas that each prompt replica is paired with."""

    prompt: Indices
    token: Indices
    mixed: Indices
    partners: dict[int, Indices]

    @property
    def everyone(self) -> Indices:
        """All usable replicas."""
        return np.concatenate((self.prompt, self.token, self.mixed))


class _Queues(NamedTuple):
    """By replica: prompt tokens and requests ahead of a new one, KV tokens free, whether it is
    borrowed, and its place among those that are equal otherwise."""

    tokens: Floats
    requests: Floats
    free: Floats
    borrowed: NDArray[np.bool_]
    lot: Indices


@final
class SplitwisePools(RoutingPolicy):
    """See the module. A replica that has reported nothing counts as busy as the busiest that has.
    Ties go to the replica that the plan names first; where there are several gateways, by lot: they
    hear the same reports, and would all send to that one until the next."""

    lends_replicas: ClassVar[bool] = True

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        self._plan = plan
        self._settings = settings
        self._excluded: frozenset[str] = frozenset()
        self._homes = _find_homes(plan, self._excluded)

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`; does not depend on `now`."""
        if request.excluded != self._excluded:
            self._excluded, self._homes = request.excluded, _find_homes(self._plan, request.excluded)
        homes = self._homes
        if not len(homes.everyone):
            raise NoRoute(f"no box can take a request for {self._plan.service}: all replicas are excluded")
        queues = self._read_queues(loads, rng)
        prefill, decode = self._choose_pair(request, queues) or self._choose_one(request, queues)
        return Route.between(loads.ids[prefill], loads.ids[decode], request.prompt_tokens)

    def _choose_pair(self, request: RequestFacts, queues: _Queues) -> tuple[int, int] | None:
        """A prompt and a token machine that are paired and have room; borrowed ones come last."""
        candidates = sorted(
            self._homes.prompt.tolist(),
            key=lambda place: (queues.borrowed[place], queues.tokens[place], queues.lot[place]),
        )
        for prefill in candidates:
            if self._takes_prompt(prefill, request, queues):
                decode = self._least_decodes(self._homes.partners.get(prefill), request, queues)
                if decode is not None:
                    return prefill, decode
        return None

    def _choose_one(self, request: RequestFacts, queues: _Queues) -> tuple[int, int]:
        """One machine for both phases: of the mixed pool, borrowed from the fuller pool's opposite, or
        that with the shortest queue of all."""
        homes, everyone = self._homes, self._homes.everyone
        lent = [place for place in everyone.tolist() if queues.borrowed[place]]
        # Where prompts queue, token machines are asked first, and where KV is full, prompt machines.
        prompts_queue = not any(self._takes_prompt(place, request, queues) for place in homes.prompt.tolist())
        opposite = (homes.token, homes.prompt) if prompts_queue else (homes.prompt, homes.token)
        for pool in ([*homes.mixed.tolist(), *lent], *(side.tolist() for side in opposite)):
            free = [
                place
                for place in pool
                if self._takes_prompt(place, request, queues) and self._takes_answer(place, request, queues)
            ]
            if free:
                chosen = min(free, key=lambda place: (queues.tokens[place] + queues.requests[place], queues.lot[place]))
                return chosen, chosen
        fits = [place for place in everyone.tolist() if self._takes_answer(place, request, queues)]
        chosen = min(
            fits or everyone.tolist(),
            key=lambda place: (queues.tokens[place] + queues.requests[place], queues.lot[place]),
        )
        return chosen, chosen

    def _takes_prompt(self, place: int, request: RequestFacts, queues: _Queues) -> bool:
        """An idle machine takes any; another one while its queue stays within the limit."""
        ahead = queues.tokens[place]
        return bool(ahead <= 0.0 or ahead + request.prompt_tokens <= self._settings.max_pending_tokens)

    def _takes_answer(self, place: int, request: RequestFacts, queues: _Queues) -> bool:
        """Whether there is KV for the prompt and all of the answer."""
        answer = self._settings.answer_tokens if request.output_tokens is None else request.output_tokens
        return bool(queues.free[place] >= request.prompt_tokens + answer)

    def _least_decodes(self, partners: Indices | None, request: RequestFacts, queues: _Queues) -> int | None:
        """Of the partners with room, one at home, with the fewest requests, and then the most KV."""
        fit = [
            place
            for place in (() if partners is None else partners.tolist())
            if self._takes_answer(place, request, queues)
        ]
        return min(
            fit,
            key=lambda place: (
                queues.borrowed[place],
                queues.requests[place],
                -queues.free[place],
                queues.lot[place],
            ),
            default=None,
        )

    def _read_queues(self, loads: ReplicaLoads, rng: np.random.Generator) -> _Queues:
        requests = loads.outstanding
        tokens = loads.prefill_tokens + loads.sent_tokens * (loads.gateways - 1.0)
        borrowed = _mark_borrowed(self._homes.prompt, self._homes.token, loads)
        if loads.is_silent.any():
            heard = self._homes.everyone[~loads.is_silent[self._homes.everyone]]
            tokens = np.where(loads.is_silent, tokens[heard].max(initial=0.0), tokens)
            requests = np.where(loads.is_silent, requests[heard].max(initial=0.0), requests)
        count = len(loads.ids)
        lot = rng.permutation(count) if loads.gateways > 1.0 else np.arange(count)
        return _Queues(tokens, requests, loads.kv_free_tokens, borrowed, lot)


def find_borrowed(plan: Plan, loads: ReplicaLoads) -> NDArray[np.bool_]:
    """By replica of the plan: whether it reports work of the pool in which it is not at home."""
    places = {phase: [at for at, each in enumerate(plan.replicas) if each.phase is phase] for phase in Phase}
    prompt, token = (np.array(places[phase], dtype=np.intp) for phase in (Phase.PREFILL, Phase.DECODE))
    return _mark_borrowed(prompt, token, loads)


def _mark_borrowed(prompt: Indices, token: Indices, loads: ReplicaLoads) -> NDArray[np.bool_]:
    """Prompt machines that decode, and token machines that have prompts to compute."""
    borrowed = np.zeros(len(loads.ids), dtype=bool)
    borrowed[prompt] = loads.decodes[prompt] > 0
    # A request whose KV comes from elsewhere has one token to compute here, its last.
    borrowed[token] = loads.prefill_tokens[token] > loads.outstanding[token]
    return borrowed


def _find_homes(plan: Plan, excluded: frozenset[str]) -> _Homes:
    index = {item.id: place for place, item in enumerate(plan.replicas)}
    usable = [item for item in plan.replicas if excluded.isdisjoint((item.id, *item.peers))]
    pools = {
        phase: np.array([index[item.id] for item in usable if item.phase is phase], dtype=np.intp) for phase in Phase
    }
    tokens = set(pools[Phase.DECODE].tolist())
    partners: defaultdict[int, list[int]] = defaultdict(list)
    for pair in plan.pairings:
        if pair.weight > 0.0 and index[pair.decode] in tokens:
            partners[index[pair.prefill]].append(index[pair.decode])
    return _Homes(
        prompt=pools[Phase.PREFILL],
        token=pools[Phase.DECODE],
        mixed=pools[Phase.MIXED],
        partners={place: np.array(sorted(found), dtype=np.intp) for place, found in partners.items()},
    )
