"""Who holds how much of a prompt, as a gateway knows it: what replicas have told, and what it expects of those to which
it has sent prompts since.

A prompt's names are looked up one after the other, for all replicas at once: a name's entry is a set of replicas as
the bits of one integer, and who does not hold a prefix holds no longer one either. So a look-up costs one step for each
block, however many replicas there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

from .held import MAX_NAMES, PrefixNews, PrefixVersion, unpack_names

EXPECTED_S: Final = 30.0
"""For so long a replica is expected to hold what it has been sent, whatever it tells: its prefill may have to wait."""

MAX_SIZES: Final = 4
"""Sizes of blocks that replicas may name prompts in: for each, all names of every prompt are computed."""

NamesOf = Callable[[int], Sequence[int]]
"""The names of a prompt in blocks of so many tokens (`prefix_names`)."""


class _Form(NamedTuple):
    """How a replica names its blocks."""

    block_tokens: int
    stride: int


@dataclass(slots=True)
class _Holder:
    """A replica: its `bit` in the entries, the names that were told of it, and those that are expected, with how many
    expectations each has."""

    bit: int
    form: _Form
    version: PrefixVersion
    told: set[int]
    expected: dict[int, int] = field(default_factory=dict)


class _Expectation(NamedTuple):
    until: float
    replica: str
    life: int
    names: Sequence[int]


@final
class PrefixIndex:
    """See the module. What replicas tell is not trusted beyond its bounds: each may have `MAX_NAMES` told, and as many
    expected, in one of `MAX_SIZES` sizes of blocks that came first."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._entries: dict[_Form, dict[int, int]] = {}  # by name: the bits of who holds it
        self._expectations: deque[_Expectation] = deque()
        self._free_bits: list[int] = []

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._holders)} replicas, {sum(map(len, self._entries.values()))} names>"

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The tokens of a block in which replicas name prompts."""
        return tuple({form.block_tokens for form in self._entries})

    def heard(self, replica: str) -> PrefixVersion | None:
        """How far this replica has told; None: nothing."""
        holder = self._holders.get(replica)
        return holder.version if holder is not None else None

    def take(self, replica: str, news: PrefixNews) -> bool:
        """Take in what a replica tells. False: it does not follow from what was told before, or says more than may be
        told, and the replica is forgotten: it is to tell all."""
        holder, form = self._holders.get(replica), _Form(news.block_tokens, news.stride)
        if holder is not None and (holder.form, holder.version.life) != (form, news.version.life):
            self.forget(replica)
            holder = None
        if form.block_tokens not in self.block_sizes and len(self.block_sizes) >= MAX_SIZES:
            return False
        if news.since is None:
            holder = holder or self._add(replica, form, news.version)
            self._lose(holder, list(holder.told))
        elif holder is None or news.since != holder.version:
            self.forget(replica)
            return False
        self._lose(holder, unpack_names(news.lost))
        self._hold(holder, unpack_names(news.held))
        holder.version = news.version
        if len(holder.told) > MAX_NAMES:
            self.forget(replica)
            return False
        return True

    def expect(self, replica: str, names_of: NamesOf, now: float) -> None:
        """This replica has been sent a prompt, so it will hold its prefixes."""
        holder = self._holders.get(replica)
        if holder is None:
            return
        self._expire(now)
        names = names_of(holder.form.block_tokens)[holder.form.stride - 1 :: holder.form.stride][:MAX_NAMES]
        if not names or len(holder.expected) + len(names) > MAX_NAMES:
            return
        entries = self._entries[holder.form]
        for name in names:
            holder.expected[name] = holder.expected.get(name, 0) + 1
            entries[name] = entries.get(name, 0) | holder.bit
        self._expectations.append(_Expectation(now + EXPECTED_S, replica, holder.version.life, names))

    def held_tokens(self, names_of: NamesOf, now: float) -> dict[str, int]:
        """By replica: tokens from the prompt's beginning whose KV it holds or will hold; who has none is left out."""
        self._expire(now)
        blocks: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for form, entries in self._entries.items():
            names = names_of(form.block_tokens)
            depth, bits = 0, -1
            for name in names[form.stride - 1 :: form.stride]:
                remaining = bits & entries.get(name, 0)
                if bits != -1 and remaining != bits:
                    _note_depth(blocks, sizes, bits & ~remaining, depth, form.block_tokens)
                if not remaining:
                    bits = 0
                    break
                depth, bits = depth + form.stride, remaining
            if bits > 0:
                _note_depth(blocks, sizes, bits, depth, form.block_tokens)
        return {
            replica: blocks[holder.bit] * sizes[holder.bit]
            for replica, holder in self._holders.items()
            if holder.bit in blocks
        }

    def forget(self, replica: str) -> None:
        """Nothing is known of this replica any more."""
        holder = self._holders.pop(replica, None)
        if holder is None:
            return
        entries = self._entries[holder.form]
        for name in (*holder.told, *holder.expected):
            self._clear(entries, name, holder.bit)
        if not any(other.form == holder.form for other in self._holders.values()):
            del self._entries[holder.form]
        self._expectations = deque(each for each in self._expectations if each.replica != replica)
        self._free_bits.append(holder.bit)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all others."""
        for replica in set(self._holders).difference(replicas):
            self.forget(replica)

    def _add(self, replica: str, form: _Form, version: PrefixVersion) -> _Holder:
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._holders)
        holder = self._holders[replica] = _Holder(bit, form, version, set())
        self._entries.setdefault(form, {})
        return holder

    def _hold(self, holder: _Holder, names: Iterable[int]) -> None:
        entries = self._entries[holder.form]
        for name in names:
            holder.told.add(name)
            entries[name] = entries.get(name, 0) | holder.bit

    def _lose(self, holder: _Holder, names: Iterable[int]) -> None:
        entries = self._entries[holder.form]
        for name in names:
            holder.told.discard(name)
            if name not in holder.expected:
                self._clear(entries, name, holder.bit)

    def _expire(self, now: float) -> None:
        """Expectations that have not come true until now are none."""
        while self._expectations and self._expectations[0].until <= now:
            _, replica, life, names = self._expectations.popleft()
            holder = self._holders.get(replica)
            if holder is None or holder.version.life != life:
                continue
            for name in names:
                left = holder.expected.get(name, 0) - 1
                if left > 0:
                    holder.expected[name] = left
                    continue
                holder.expected.pop(name, None)
                if name not in holder.told:
                    self._clear(self._entries[holder.form], name, holder.bit)

    @staticmethod
    def _clear(entries: dict[int, int], name: int, bit: int) -> None:
        left = entries.get(name, 0) & ~bit
        if left:
            entries[name] = left
        else:
            entries.pop(name, None)


def _note_depth(blocks: dict[int, int], sizes: dict[int, int], bits: int, depth: int, block_tokens: int) -> None:
    """Each of these replicas holds so many blocks."""
    while bits:
        lowest = bits & -bits
        blocks[lowest], sizes[lowest] = depth, block_tokens
        bits ^= lowest
