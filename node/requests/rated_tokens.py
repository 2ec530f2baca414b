"""Tokens of an answer with their logprobs: cut together. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsIndex, final, overload

if TYPE_CHECKING:
    from ..engine.sampling import TopTokens


@final
class RatedTokens(tuple[int, ...]):
    """Tokens as a request's machine takes them; equal to any tuple of the same tokens.

    `logprobs` has rows for the last of them: what a decode replica was told of the answer's beginning, it has not
    computed. More rows than tokens are not looked at."""

    logprobs: TopTokens | None

    def __new__(cls, tokens: Iterable[int], logprobs: TopTokens | None = None) -> RatedTokens:
        """See the class."""
        made = super().__new__(cls, tokens)
        made.logprobs = logprobs if logprobs is not None and logprobs.rows <= len(made) else None
        return made

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> int: ...

    @overload
    def __getitem__(self, index: slice, /) -> RatedTokens: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> int | RatedTokens:
        """A slice has the rows of its tokens."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        first, last, _ = index.indices(len(self))
        rows = None
        if self.logprobs is not None:
            unrated = len(self) - self.logprobs.rows
            rows = self.logprobs.rows_from(max(0, first - unrated), max(0, last - unrated))
        return RatedTokens(super().__getitem__(index), rows if rows is not None and rows.rows else None)
