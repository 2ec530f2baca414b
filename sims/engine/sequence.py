"""A request as one engine sees it, and the batch of those that decode."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import final

__all__ = ["DecodeBatch", "Sequence"]


@final
class Sequence:
    """A request as one engine sees it; the engine changes it.

    `known` tokens are there (the prompt, and what was written so far), KV is there of `computed` of them, and `left`
    are to be written. `fresh`: none has been written anywhere. `hands_over`: this engine reads the known tokens, and
    gives their KV away. `incoming` > 0: somebody else reads the first so many tokens, whose KV is to come.
    """

    __slots__ = (
        "blocks", "computed", "ends_at", "fresh", "hands_over", "incoming", "key", "known", "left", "ticket"
    )  # fmt: skip

    def __init__(
        self, key: int, known: int, left: int, *, fresh: bool = True, hands_over: bool = False, incoming: int = 0
    ) -> None:
        self.key = key
        self.known = known
        self.left = left
        self.fresh = fresh
        self.hands_over = hands_over
        self.incoming = incoming
        self.computed = 0
        self.blocks = 0  # that it holds; of a decoding one, `computed` tells
        self.ends_at = 0  # the batch's step that writes its last token
        self.ticket = -1  # its place in the order of joining the batch; -1: it does not decode

    def __repr__(self) -> str:
        return f"<Sequence {self.key}: {self.computed} of {self.known} tokens read, {self.left} to write>"


@final
class DecodeBatch:
    """The sequences that get a token in every step: what they hold, when they end, and what blocks they will take.

    A step changes every one of them in the same way, so none is touched: only `step` counts on. A sequence's
    `computed` is kept less `step` while it is here.
    """

    def __init__(self, block_tokens: int) -> None:
        self.step = 0
        self.size = 0
        """How many they are."""
        self.context = 0
        """Tokens that all of them hold in their KV caches."""
        self._block = block_tokens
        self._members: dict[int, Sequence] = {}  # by ticket, so in order of joining
        self._tickets = count()
        self._endings: list[tuple[int, int, Sequence]] = []  # heap of (step, ticket); those that left are skipped
        self.fresh: list[Sequence] = []
        """Those that joined without a token written anywhere, and have not taken a step."""
        # At [s % block_tokens]: how many of them take a new block in step s.
        self._takers = [0] * block_tokens

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def join(self, sequence: Sequence) -> None:
        """Let it decode from the next step on. The KV of all its known tokens but the last is there."""
        self.size += 1
        self.context += sequence.computed
        sequence.computed -= self.step
        sequence.ends_at = self.step + sequence.left
        sequence.ticket = next(self._tickets)
        self._takers[-sequence.computed % self._block] += 1
        self._members[sequence.ticket] = sequence
        heappush(self._endings, (sequence.ends_at, sequence.ticket, sequence))
        if sequence.fresh:
            self.fresh.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take it out, with its figures as they are now."""
        del self._members[sequence.ticket]
        self.size -= 1
        self._takers[-sequence.computed % self._block] -= 1
        sequence.ticket = -1
        sequence.computed += self.step
        sequence.known = sequence.computed + 1
        sequence.left = sequence.ends_at - self.step
        self.context -= sequence.computed

    def last_joined(self) -> Sequence:
        """Who goes first when memory runs out."""
        return self._members[next(reversed(self._members))]

    def steps_to_ending(self) -> int:
        """Steps until the next of them has its last token."""
        endings = self._endings
        while endings[0][2].ticket != endings[0][1]:
            heappop(endings)
        return endings[0][0] - self.step

    def blocks_for(self, steps: int) -> int:
        """Blocks that the next so many steps take."""
        first = self.step % self._block
        if steps == 1:
            return self._takers[first]
        rounds, rest = divmod(steps, self._block)
        taken = rounds * self.size
        if rest:
            taken += sum(self._takers[first : first + rest])
            if first + rest > self._block:
                taken += sum(self._takers[: first + rest - self._block])
        return taken

    def steps_within(self, blocks: int) -> int:
        """How many steps so many blocks last."""
        rounds, rest = divmod(blocks, self.size)
        steps = rounds * self._block
        at = self.step % self._block
        while self._takers[at] <= rest:  # ends: a round takes as many blocks as there are members, more than `rest`
            rest -= self._takers[at]
            at = (at + 1) % self._block
            steps += 1
        return steps

    def advance(self, steps: int) -> list[Sequence]:
        """Write so many tokens of each; returns those that have their last, which are not here any more."""
        self.step += steps
        self.context += steps * self.size
        ended: list[Sequence] = []
        endings = self._endings
        while endings and endings[0][0] <= self.step:
            _, ticket, sequence = heappop(endings)
            if sequence.ticket == ticket:
                self.leave(sequence)
                ended.append(sequence)
        return ended
