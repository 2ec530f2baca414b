"""A client's request between its arrival and its last token: tokens so far, text so far. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from ...coordinator.prefixes.naming import prefix_names
from ...coordinator.requests.values import ShowTokens
from ..engine.sampling import Sampling
from ..messages import Generate
from ..models.errors import PromptError
from ..models.text import StopFinder, TextModel

_CARRIED: Final = tuple(field for field in Sampling.__struct_fields__ if field in Generate.__struct_fields__)


@final
class _NoText:
    """In place of a decoder, for who wants tokens alone."""

    def push(self, tokens: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


@final
class LiveRequest:
    """A request between its arrival and its last token: the `Answer` of its machine, with the text.

    `so_far` are tokens of the answer that the client has from another gateway. Their text is the
    first that is shown: the client has most of it, and knows where it is new. Raises PromptError
    for those that cannot be.
    """

    def __init__(
        self,
        body: Generate,
        prompt: tuple[int, ...],
        max_tokens: int,
        text: TextModel,
        so_far: tuple[int, ...] = (),
    ) -> None:
        self.id = body.request
        self.prompt = prompt
        self.cache_salt = ""
        """Prefix caches are shared by requests of one salt. Set before names of prefixes are asked for."""
        self._prefix_names: dict[int, Sequence[int]] = {}  # by tokens of a block
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._max_tokens = max_tokens
        # Not the body: its text may have megabytes, and is of no use any more.
        carried = {field: getattr(body, field) for field in _CARRIED}
        self._sampling = Sampling(**{**carried, "max_tokens": max_tokens})
        self._decoder = text.decoder() if body.detokenize else _NoText()
        self._stops = StopFinder(body.stop)
        self._rest = ""
        if so_far:
            self._continue(so_far, text)

    def __repr__(self) -> str:
        return f"<LiveRequest {self.id} {len(self.prompt)}+{len(self.tokens)} tokens {self.finish or 'live'}>"

    @property
    def count(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens)

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return self._max_tokens - len(self.tokens)

    @property
    def stopped_by_text(self) -> bool:
        """Whether one of the client's stop texts has ended it."""
        return self._stops.found

    @property
    def size(self) -> int:
        """What it takes while it lives, in tokens."""
        return len(self.prompt) + len(self.tokens) + self._sampling.size

    @property
    def may_split(self) -> bool:
        """Whether one replica may prefill and another decode it. The prompt's logprobs are those of who computes all
        of it."""
        return self._sampling.prompt_logprobs is None

    def prefix_names(self, block_tokens: int) -> Sequence[int]:
        """The names of its prompt's prefixes in blocks of so many tokens; none where all of it has to be computed."""
        if not self.may_split:
            return ()
        names = self._prefix_names.get(block_tokens)
        if names is None:
            names = self._prefix_names[block_tokens] = prefix_names(self.prompt, block_tokens, self.cache_salt)
        return names

    def replay(self) -> tuple[tuple[int, ...], Sampling]:
        """What an engine is asked for now: the prompt with the tokens so far, and how many are
        still wanted. The prompt's logprobs have come with the first of them."""
        sampling, done = self._sampling, len(self.tokens)
        return (*self.prompt, *self.tokens), msgspec.structs.replace(
            sampling,
            max_tokens=self.left,
            prompt_logprobs=None if done else sampling.prompt_logprobs,
            # Engines of the last release do not know it, and need not where it changes nothing.
            answered=done if sampling.looks_back else 0,
        )

    def take(self, tokens: Sequence[int], finish: str | None) -> ShowTokens | None:
        """Take new tokens, none beyond the limit or the end; returns them with the text they
        complete. Sets `finish` at the end."""
        if self.finish is not None:
            return None
        taken = tokens[: self.left]  # with what else they have
        self.tokens += taken
        shown = self.take_rest() + self._stops.push(self._decoder.push(tuple(taken)))
        if not self._stops.found and finish is None and not self.left:
            finish = "length"  # tokens of two engines together reached the limit
        if not self._stops.found and finish is not None:
            shown += self._stops.push(self._decoder.finish()) + self._stops.finish()
        self.finish = "stop" if self._stops.found else finish
        return ShowTokens(shown, taken) if taken or shown else None

    def take_rest(self) -> str:
        """Text of the tokens so far that has not been shown here."""
        rest, self._rest = self._rest, ""
        return rest

    def _continue(self, so_far: tuple[int, ...], text: TextModel) -> None:
        if len(so_far) > self._max_tokens:
            raise PromptError(
                f"tokens: {len(so_far)} of the answer are there already; max_tokens is {self._max_tokens}"
            )
        # One by one, as the finest stream that the client can have seen: what is shown of it is then no less.
        for token in so_far:
            shown = self.take((token,), "stop" if token in text.end_tokens else None)
            self._rest += shown.text if shown is not None else ""
