"""Which machines serve one request, by Splitwise's policies (Patel et al., ISCA 2024, section
IV-A).

`SharedPool` gives a request to the machine with the fewest tokens pending. `SplitPools` keeps one
pool of machines for prompts and one for decoding, picked from by shortest queue and by least memory
reserved, and a third, mixed one: a pool that is full borrows a machine from the other, which works
for both until it has drained.

They read the live state as Splitwise's simulator keeps it: `prefill_tokens` of requests whose
prompt a machine has not computed, `outstanding` requests that decode there, and `kv_free_tokens`,
of which each request has its prompt and all of its answer reserved from the moment it is placed.
Ties go to the machine that has been in its pool for longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...coordinator.routing.interface import PolicyError, ReplicaLoads, RequestFacts, Route, RoutingPolicy


class SharedPool(RoutingPolicy):
    """One pool, all machines for both phases: Splitwise's baseline (`token_jsq`)."""

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """The machine with the fewest tokens pending: waiting prompts, one per decode."""
        return Route(prefill=None, decode=loads.ids[int((loads.prefill_tokens + loads.outstanding).argmin())])


class SplitPools(RoutingPolicy):
    """A pool for prompts, one for decoding, and a mixed one of borrowed machines (`mixed_pool`).

    A prompt goes to the machine of the prompt pool with the fewest tokens pending, unless others
    wait there and the queue would pass `max_pending` tokens; decoding to the one with the least
    memory reserved, unless that would take all of it. Then the mixed pool is asked the same, then a
    machine is borrowed; where there is none to borrow, both phases go to the machine with the
    fewest tokens pending of all.

    `prompt` and `decode` are the machines of the two pools, as indices into the live state. Raises
    PolicyError for pools that cannot serve.
    """

    def __init__(self, prompt: Sequence[int], decode: Sequence[int], *, max_pending: int) -> None:
        if not prompt or not decode:
            raise PolicyError(
                f"{len(prompt)} machines for prompts and {len(decode)} for decoding: each needs at least 1"
            )
        self._prompt, self._mixed, self._decode = list(prompt), list[int](), list(decode)
        self._home = dict.fromkeys(prompt, self._prompt) | dict.fromkeys(decode, self._decode)
        if len(self._home) != len(prompt) + len(decode):
            raise PolicyError("a machine is in two pools")
        self._max_pending = max_pending

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """By shortest queue and least memory; a full pool borrows. Needs the answer's length."""
        if request.output_tokens is None:
            raise PolicyError("Splitwise's pools reserve memory for whole answers: output_tokens must be given")
        prompt, size = request.prompt_tokens, request.prompt_tokens + request.output_tokens
        pending = loads.prefill_tokens + loads.outstanding
        prefill = self._shortest_queue(self._prompt, prompt, pending, loads)
        if prefill is None:
            prefill = self._shortest_queue(self._mixed, prompt, pending, loads)
        decode = _most_memory(self._decode, size, loads)
        if decode is None:
            decode = _most_memory(self._mixed, size, loads)
        if prefill is None and self._decode:
            prefill = self._decode[int(pending[self._decode].argmin())]
            self._borrow(prefill, self._decode)
        if decode is None and self._prompt:
            decode = self._prompt[int(loads.kv_free_tokens[self._prompt].argmax())]
            self._borrow(decode, self._prompt)
        if prefill is None or decode is None:
            machines = self._prompt + self._mixed + self._decode
            prefill = decode = machines[int(pending[machines].argmin())]
        return Route.between(loads.ids[prefill], loads.ids[decode], prompt)

    def on_drained(self, replica: int) -> None:
        """A borrowed machine goes back to its own pool, behind the others."""
        if replica in self._mixed:
            self._mixed.remove(replica)
            self._home[replica].append(replica)

    def _shortest_queue(self, pool: list[int], prompt: int, pending: np.ndarray, loads: ReplicaLoads) -> int | None:
        """The machine with the fewest tokens pending; None where its queue would be too long."""
        if not pool:
            return None
        machine = pool[int(pending[pool].argmin())]
        is_long = pending[machine] + prompt > self._max_pending
        return None if is_long and loads.waiting[machine] else machine

    def _borrow(self, machine: int, pool: list[int]) -> None:
        pool.remove(machine)
        self._mixed.append(machine)


def _most_memory(pool: list[int], tokens: int, loads: ReplicaLoads) -> int | None:
    """The machine with the most memory free; None where so many tokens more would fill it."""
    if not pool:
        return None
    machine = pool[int(loads.kv_free_tokens[pool].argmax())]
    return None if loads.kv_free_tokens[machine] <= tokens else machine
