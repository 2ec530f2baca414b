"""Splitwise's pools (Patel et al., ISCA 2024, section IV-A), without one scheduler that owns them.

There are prompt, token and mixed machines. A request gets the prompt machine with the shortest
queue and a token machine with the shortest queue of those that the plan pairs it with. Where all
queues of one kind are beyond a limit, the mixed pool is asked, and then the pool of the other kind,
from which a machine is borrowed.

**Who owns what**, with a gateway on every node:

- The plan says where a machine is at home: phase prefill is the prompt pool, decode the token pool,
  mixed the mixed pool for good. Only the coordinator changes it.
- The machine itself says in which pool it is now, and keeps its limits (`pools`): a gateway asks the
  machines of a route before it sends the request, and where one refuses, takes its next choice. A
  prompt machine that decodes is borrowed, and a token machine that has prompts to compute; so it is
  back in its own pool as soon as nothing of the other kind is pending there, for all gateways alike.
  (The public simulator waits until the machine is idle: `sims/policies/pools.py`.)
- A gateway owns nothing between two requests. Its choice is a guess from reports, which are up to a
  second old, and from what machines have answered since; a wrong guess costs a round trip and is put
  right by the refusal. Until it hears more it takes the other gateways for as busy as itself: what it
  has sent somewhere since counts once for each of them (`ReplicaLoads.gateways`).

After `MOST_REFUSALS`, or where all queues are too long, a request goes to the machine with the
shortest queue of all, which is not asked: it has to be served.

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

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..plan import Phase, Plan
from .interface import NoRoute, ReplicaLoads, RequestFacts, Route, RoutingPolicy, RoutingSettings
from .pools import MOST_REFUSALS, PoolClaim, Work, is_borrowed

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
    """By replica: prompt tokens and requests ahead of a new one, as far as they are known and with
    a guess for other gateways; KV tokens free, whether it is borrowed, and its place among those that
    are equal otherwise."""

    known_tokens: Floats
    tokens: Floats
    requests: Floats
    free: Floats
    borrowed: NDArray[np.bool_]
    lot: Indices


class _Asked(NamedTuple):
    """A request, and what its gateway takes the machines for."""

    ids: tuple[str, ...]
    plan: Plan
    request: RequestFacts
    queues: _Queues

    def claim(self, place: int, work: Work) -> PoolClaim:
        """What the machine is asked."""
        return PoolClaim(
            replica=self.ids[place],
            work=work,
            pool=Phase.MIXED if self.queues.borrowed[place] else self.plan.replicas[place].phase,
            prompt_tokens=self.request.prompt_tokens,
            answer_tokens=self.request.output_tokens,
        )

    def has_accepted(self, place: int, work: Work) -> bool:
        """Whether it has done so: then it keeps the place."""
        answers = self.request.answers
        return bool(answers) and answers.get(self.claim(place, work), False)


@final
class SplitwisePools(RoutingPolicy):
    """See the module. A replica that has reported nothing counts as busy as the busiest that has.
    Ties go to the replica that the plan names first; where there are several gateways, by lot: they
    hear the same reports, and would all send to that one until the next."""

    lends_replicas: ClassVar[bool] = True
    mixes_phases: ClassVar[bool] = True

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
        asked = _Asked(loads.ids, self._plan, request, queues)
        if sum(not accepted for accepted in request.answers.values()) >= MOST_REFUSALS:
            return self._choose_shortest(request, queues, loads)
        prefill, decode = self._choose_pair(asked) or self._choose_one(asked) or (None, None)
        if prefill is None or decode is None:
            return self._choose_shortest(request, queues, loads)
        route = Route.between(loads.ids[prefill], loads.ids[decode], request.prompt_tokens)
        parts = ((decode, Work.BOTH),) if prefill == decode else ((prefill, Work.PROMPT), (decode, Work.TOKEN))
        return msgspec.structs.replace(route, claims=tuple(asked.claim(*part) for part in parts))

    def _choose_pair(self, asked: _Asked) -> tuple[int, int] | None:
        """A prompt and a token machine that are paired and have room; borrowed ones come last."""
        queues = asked.queues
        candidates = sorted(
            self._homes.prompt.tolist(),
            key=lambda place: (
                not asked.has_accepted(place, Work.PROMPT),
                queues.borrowed[place],
                queues.tokens[place],
                queues.lot[place],
            ),
        )
        for prefill in candidates:
            if self._may_ask(prefill, Work.PROMPT, asked):
                decode = self._least_decodes(self._homes.partners.get(prefill), asked)
                if decode is not None:
                    return prefill, decode
        return None

    def _choose_one(self, asked: _Asked) -> tuple[int, int] | None:
        """One machine for both phases: of the mixed pool, or borrowed from the fuller pool's opposite."""
        homes, queues = self._homes, asked.queues
        lent = [place for place in homes.everyone.tolist() if queues.borrowed[place]]
        # Where prompts queue, token machines are asked first, and where KV is full, prompt machines.
        prompts_queue = not any(self._may_ask(place, Work.PROMPT, asked) for place in homes.prompt.tolist())
        opposite = (homes.token, homes.prompt) if prompts_queue else (homes.prompt, homes.token)
        for pool in ([*homes.mixed.tolist(), *lent], *(side.tolist() for side in opposite)):
            free = [place for place in pool if self._may_ask(place, Work.BOTH, asked)]
            if free:
                chosen = min(free, key=lambda place: (queues.tokens[place] + queues.requests[place], queues.lot[place]))
                return chosen, chosen
        return None

    def _choose_shortest(self, request: RequestFacts, queues: _Queues, loads: ReplicaLoads) -> Route:
        """The machine with the shortest queue of all, those without memory last, takes both phases."""
        everyone = self._homes.everyone.tolist()
        fits = [place for place in everyone if self._takes_answer(place, request, queues)]
        chosen = min(
            fits or everyone,
            key=lambda place: (queues.tokens[place] + queues.requests[place], queues.lot[place]),
        )
        return Route(prefill=None, decode=loads.ids[chosen])

    def _may_ask(self, place: int, work: Work, asked: _Asked) -> bool:
        """Whether a machine is taken to be within its limits; what it has answered counts for more."""
        request, queues = asked.request, asked.queues
        if request.answers and (answer := request.answers.get(asked.claim(place, work))) is not None:
            return answer
        takes_prompt = self._settings.pool_limits.take_prompt(queues.known_tokens[place], request.prompt_tokens)
        return (work is Work.TOKEN or takes_prompt) and (
            work is Work.PROMPT or self._takes_answer(place, request, queues)
        )

    def _takes_answer(self, place: int, request: RequestFacts, queues: _Queues) -> bool:
        """Whether there is KV for the prompt and all of the answer."""
        answer = self._settings.answer_tokens if request.output_tokens is None else request.output_tokens
        return bool(queues.free[place] >= request.prompt_tokens + answer)

    def _least_decodes(self, partners: Indices | None, asked: _Asked) -> int | None:
        """Of the partners with room, one at home, with the fewest requests, and then the most KV."""
        queues = asked.queues
        fit = [
            place
            for place in (() if partners is None else partners.tolist())
            if self._may_ask(place, Work.TOKEN, asked)
        ]
        return min(
            fit,
            key=lambda place: (
                not asked.has_accepted(place, Work.TOKEN),
                queues.borrowed[place],
                queues.requests[place],
                -queues.free[place],
                queues.lot[place],
            ),
            default=None,
        )

    def _read_queues(self, loads: ReplicaLoads, rng: np.random.Generator) -> _Queues:
        known, requests = loads.prefill_tokens, loads.outstanding
        borrowed = find_borrowed(self._plan, loads)
        if loads.is_silent.any():
            heard = self._homes.everyone[~loads.is_silent[self._homes.everyone]]
            known = np.where(loads.is_silent, known[heard].max(initial=0.0), known)
            requests = np.where(loads.is_silent, requests[heard].max(initial=0.0), requests)
        guessed = known + loads.sent_tokens * (loads.gateways - 1.0)
        free = loads.kv_free_tokens
        told = [(at, each) for at, each in enumerate(loads.told) if each is not None]
        if told:
            known, free = known.copy(), free.copy()
        for at, each in told:
            known[at], free[at] = each.prefill_tokens, each.kv_free_tokens
            guessed[at] = max(guessed[at], each.prefill_tokens)
        count = len(loads.ids)
        lot = rng.permutation(count) if loads.gateways > 1.0 else np.arange(count)
        return _Queues(known, guessed, requests, free, borrowed, lot)


def find_borrowed(plan: Plan, loads: ReplicaLoads) -> NDArray[np.bool_]:
    """By replica of the plan: whether it says that it has work of the pool in which it is not at home, or reports
    such."""
    return np.array(
        [
            is_borrowed(each.phase, loads.outstanding[at], loads.prefill_tokens[at], loads.decodes[at])
            if (told := loads.told[at]) is None
            else told.pool is not each.phase
            for at, each in enumerate(plan.replicas)
        ],
        dtype=bool,
    )


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
