"""A request as one engine sees it, and the batch of those that decode."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import final


@final
class Sequence:
    """A request as one engine sees it; the engine changes it.

    It has `known` tokens (the prompt, and those generated so far), the KV of `computed` of them,
    and `left` tokens to generate. `fresh`: none has been generated anywhere. `sends_kv`: this
    engine only prefills, and the KV is transferred to another one. `external` > 0: another engine
    prefills the first so many tokens, whose KV is transferred to here. `prefix`: the names of its
    prompt's blocks, for a prefix cache.
    """

    __slots__ = (
        "blocks", "cached", "computed", "ends_at", "external", "fresh", "key", "known", "left", "prefix", "sends_kv",
        "shared", "turn", "uncached"
    )  # fmt: skip

    def __init__(
        self,
        key: int,
        known: int,
        left: int,
        *,
        fresh: bool = True,
        sends_kv: bool = False,
        external: int = 0,
        prefix: tuple[int, ...] = (),
    ) -> None:
        self.key = key
        self.known = known
        self.left = left
        self.fresh = fresh
        self.sends_kv = sends_kv
        self.external = external
        self.prefix = prefix
        self.computed = 0
        self.cached = 0  # tokens of the prompt that were in the prefix cache
        self.uncached = known  # tokens to prefill, as its replica counts them in its load
        self.shared: list[int] = []  # blocks of the prefix cache that it uses
        self.blocks = 0  # held beside those; those of a decoding one follow from `computed`
        self.ends_at = 0  # the batch's step that generates its last token
        self.turn = -1  # its place in the order of joining the batch; -1: not in it

    def __repr__(self) -> str:
        return f"<Sequence {self.key}: {self.computed} of {self.known} tokens computed, {self.left} to generate>"


@final
class DecodeBatch:
    """The sequences that decode in every step: what they hold, when they end, and which blocks they
    will take.

    A step changes all of them in the same way, so none is touched: only `step` is increased. While
    a sequence is here, its `computed` is kept less `step`.
    """

    def __init__(self, block_tokens: int) -> None:
        self.step = 0
        self.size = 0
        """Number of sequences."""
        self.context = 0
        """Tokens in all of their KV caches together."""
        self._block = block_tokens
        self._members: dict[int, Sequence] = {}  # by turn, so in order of joining
        self._turns = count()
        self._endings: list[tuple[int, int, Sequence]] = []  # heap of (step, turn); those that left are skipped
        self.fresh: list[Sequence] = []
        """Those that joined without a token generated anywhere, and have not taken a step."""
        # At [s % block_tokens]: how many of them take a new block in step s.
        self._block_takers = [0] * block_tokens

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def join(self, sequence: Sequence) -> None:
        """Let it decode from the next step on; only its last token may lack KV."""
        self.size += 1
        self.context += sequence.computed
        sequence.computed -= self.step
        sequence.ends_at = self.step + sequence.left
        sequence.turn = next(self._turns)
        self._block_takers[-sequence.computed % self._block] += 1
        self._members[sequence.turn] = sequence
        heappush(self._endings, (sequence.ends_at, sequence.turn, sequence))
        if sequence.fresh:
            self.fresh.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take it out, and bring its figures up to date."""
        del self._members[sequence.turn]
        self.size -= 1
        self._block_takers[-sequence.computed % self._block] -= 1
        sequence.turn = -1
        sequence.computed += self.step
        sequence.known = sequence.computed + 1
        sequence.left = sequence.ends_at - self.step
        self.context -= sequence.computed

    def last_joined(self) -> Sequence:
        """The first to be preempted when memory runs out."""
        return self._members[next(reversed(self._members))]

    def steps_to_ending(self) -> int:
        """Steps until the next sequence has its last token."""
        endings = self._endings
        while endings[0][2].turn != endings[0][1]:
            heappop(endings)
        return endings[0][0] - self.step

    def blocks_for(self, steps: int) -> int:
        """Blocks that the next `steps` steps take."""
        first = self.step % self._block
        if steps == 1:
            return self._block_takers[first]
        rounds, rest = divmod(steps, self._block)
        taken = rounds * self.size
        if rest:
            taken += sum(self._block_takers[first : first + rest])
            if first + rest > self._block:
                taken += sum(self._block_takers[: first + rest - self._block])
        return taken

    def steps_within(self, blocks: int) -> int:
        """For how many steps so many blocks last."""
        rounds, rest = divmod(blocks, self.size)
        steps = rounds * self._block
        at = self.step % self._block
        while (
            self._block_takers[at] <= rest
        ):  # ends: a round takes as many blocks as there are members, more than `rest`
            rest -= self._block_takers[at]
            at = (at + 1) % self._block
            steps += 1
        return steps

    def advance(self, steps: int) -> list[Sequence]:
        """Take `steps` steps; returns the sequences that end, which leave the batch."""
        self.step += steps
        self.context += steps * self.size
        ended: list[Sequence] = []
        endings = self._endings
        while endings and endings[0][0] <= self.step:
            _, turn, sequence = heappop(endings)
            if sequence.turn == turn:
                self.leave(sequence)
                ended.append(sequence)
        return ended
