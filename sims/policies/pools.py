"""Which machines serve one request, by Splitwise's policies (Patel et al., ISCA 2024, section IV-A).

`SharedPool` gives a request to the machine with the fewest tokens pending. `SplitPools` keeps one pool of machines
for prompts and one for decoding, picked from by shortest queue and by least memory reserved, and a third, mixed one:
a pool that is full borrows a machine from the other, which works for both until it has drained.

The policies keep their own book of what they have given out; whoever runs the machines tells them what came back.
Machines are numbers from 0. Memory is counted in KV tokens, beyond the weights. Ties go to the machine that has been
in its pool for longest.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

__all__ = ["PoolError", "PoolPlacement", "Pools", "SharedPool", "SplitPools"]


class PoolError(ValueError):
    """Pools that cannot serve; one line that says what is missing."""


class PoolPlacement(NamedTuple):
    """The machines for one request; where they differ, its KV cache moves from the first to the second."""

    prefill: int
    decode: int


class Pools(Protocol):
    """A policy and its book. Each request is placed once, prefilled once and finished once."""

    def place(self, prompt: int, output: int, waits: Callable[[int], bool]) -> PoolPlacement:
        """The machines for a request of so many tokens. `waits`: whether anything queues at a machine."""
        ...

    def prefilled(self, machine: int, prompt: int) -> None:
        """The machine has computed a prompt of so many tokens."""
        ...

    def finished(self, machine: int) -> None:
        """The machine has sent the last token of a request."""
        ...

    def released(self, machine: int, kv_tokens: int) -> None:
        """The machine has given back memory of a request."""
        ...

    def drained(self, machine: int) -> None:
        """The machine has nothing left to do."""
        ...


class SharedPool:
    """One pool, every machine for both phases: the baseline that Splitwise is compared with (`token_jsq`)."""

    def __init__(self, machines: int) -> None:
        if machines < 1:
            raise PoolError(f"a pool of {machines} machines serves nobody")
        self._pending = [0] * machines

    def place(self, prompt: int, output: int, waits: Callable[[int], bool]) -> PoolPlacement:
        """The machine with the fewest tokens pending: waiting prompt tokens, and one for each request it decodes."""
        machine = self._pending.index(min(self._pending))
        self._pending[machine] += prompt + 1
        return PoolPlacement(machine, machine)

    def prefilled(self, machine: int, prompt: int) -> None:
        """The prompt is pending no longer."""
        self._pending[machine] -= prompt

    def finished(self, machine: int) -> None:
        """The request is pending no longer."""
        self._pending[machine] -= 1

    def released(self, machine: int, kv_tokens: int) -> None:
        """Memory plays no part here."""

    def drained(self, machine: int) -> None:
        """No machine is anywhere but in the one pool."""


class SplitPools:
    """A pool for prompts, one for decoding, and a mixed one of borrowed machines (`mixed_pool`).

    A prompt goes to the machine of the prompt pool with the fewest tokens pending, unless others wait there and the
    queue would pass `max_pending` tokens; decoding to the one with the least memory reserved, unless that would take
    all of its `kv_tokens`. Then the mixed pool is asked the same, then a machine is borrowed; where there is none to
    borrow, both phases go to the machine with the fewest tokens pending of all.
    """

    def __init__(self, prompt: Sequence[int], decode: Sequence[int], *, kv_tokens: float, max_pending: int) -> None:
        if not prompt or not decode:
            raise PoolError(f"{len(prompt)} machines for prompts and {len(decode)} for decoding: each needs at least 1")
        self._prompt, self._mixed, self._decode = list(prompt), list[int](), list(decode)
        self._home = dict.fromkeys(prompt, self._prompt) | dict.fromkeys(decode, self._decode)
        if len(self._home) != len(prompt) + len(decode):
            raise PoolError("a machine is in two pools")
        self._kv_tokens, self._max_pending = kv_tokens, max_pending
        self._pending = dict.fromkeys(self._home, 0)
        self._reserved = dict.fromkeys(self._home, 0)

    def place(self, prompt: int, output: int, waits: Callable[[int], bool]) -> PoolPlacement:
        """By shortest queue and least memory; borrows where a pool is full."""
        prefill = self._shortest_queue(self._prompt, prompt, waits)
        if prefill is None:
            prefill = self._shortest_queue(self._mixed, prompt, waits)
        decode = self._most_room(self._decode, prompt + output)
        if decode is None:
            decode = self._most_room(self._mixed, prompt + output)
        if prefill is None and self._decode:
            prefill = min(self._decode, key=self._pending.__getitem__)
            self._borrow(prefill, self._decode)
        if decode is None and self._prompt:
            decode = min(self._prompt, key=self._reserved.__getitem__)
            self._borrow(decode, self._prompt)
        if prefill is None or decode is None:
            prefill = decode = min(self._prompt + self._mixed + self._decode, key=self._pending.__getitem__)
        self._pending[prefill] += prompt
        self._pending[decode] += 1
        self._reserved[decode] += prompt + output
        if prefill != decode:
            self._reserved[prefill] += prompt + 1
        return PoolPlacement(prefill, decode)

    def prefilled(self, machine: int, prompt: int) -> None:
        """The prompt is pending no longer."""
        self._pending[machine] -= prompt

    def finished(self, machine: int) -> None:
        """The request is pending no longer."""
        self._pending[machine] -= 1

    def released(self, machine: int, kv_tokens: int) -> None:
        """The memory may be reserved again."""
        self._reserved[machine] -= kv_tokens

    def drained(self, machine: int) -> None:
        """A borrowed machine goes back to its own pool, behind the others."""
        if machine in self._mixed:
            self._mixed.remove(machine)
            self._home[machine].append(machine)

    def _shortest_queue(self, pool: list[int], prompt: int, waits: Callable[[int], bool]) -> int | None:
        """The machine with the fewest tokens pending; None where its queue would be too long."""
        if not pool:
            return None
        machine = min(pool, key=self._pending.__getitem__)
        return None if self._pending[machine] + prompt > self._max_pending and waits(machine) else machine

    def _most_room(self, pool: list[int], tokens: int) -> int | None:
        """The machine with the least memory reserved; None where so many tokens more would fill it."""
        if not pool:
            return None
        machine = min(pool, key=self._reserved.__getitem__)
        return None if self._reserved[machine] + tokens >= self._kv_tokens else machine

    def _borrow(self, machine: int, pool: list[int]) -> None:
        pool.remove(machine)
        self._mixed.append(machine)
