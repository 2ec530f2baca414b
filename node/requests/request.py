"""One client request as its gateway holds it: checked parameters, tokens so far, text so far. No
I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from ...coordinator.requests import ShowTokens
from ..engine.protocol import Sampling
from ..messages import MAX_PROMPT_BYTES, Generate
from ..models.text import PromptError, StopFinder, TextModel

DEFAULT_MAX_TOKENS = 256
MAX_STOPS = 16
MAX_TEMPERATURE = 2.0  # vLLM's own bound
MAX_SEED = (1 << 63) - 1


def check(body: Generate) -> int:
    """Check all that needs no model; returns the prompt's bytes of text. Raises PromptError naming
    the field and the fix."""
    if (body.prompt is None) == (body.messages is None):
        raise PromptError("prompt: give either `prompt` or `messages`, and not both")
    if body.prompt is not None and not body.prompt:
        raise PromptError("prompt: it is empty; give at least one character")
    if body.messages is not None and not any(message.content for message in body.messages):
        raise PromptError("messages: they are empty; give at least one with content")
    field = _field(body)
    size = _bytes(field, body.prompt or "")
    size += sum(_bytes(field, text) for message in body.messages or () for text in (message.role, message.content))
    if size > MAX_PROMPT_BYTES:
        raise PromptError(f"{field}: {size} bytes of text; at most {MAX_PROMPT_BYTES} can be sent")
    _check_sampling(body)
    for stop in body.stop:
        _bytes("stop", stop)
    return size


def _field(body: Generate) -> str:
    """What the client calls its prompt."""
    return "prompt" if body.messages is None else "messages"


def _bytes(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise PromptError(f"{field}: this is not valid Unicode text (lone surrogate); send UTF-8") from None


def _check_sampling(body: Generate) -> None:
    if body.max_tokens is not None and body.max_tokens < 1:
        raise PromptError(f"max_tokens: {body.max_tokens} is less than 1")
    if not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise PromptError(f"temperature: {body.temperature} is not a number from 0 (greedy) to {MAX_TEMPERATURE:g}")
    if not 0 < body.top_p <= 1:
        raise PromptError(f"top_p: {body.top_p} is not above 0 and at most 1 (1 switches it off)")
    if body.top_k < 0:
        raise PromptError(f"top_k: {body.top_k} is negative (0 switches it off)")
    if body.seed is not None and not 0 <= body.seed <= MAX_SEED:
        raise PromptError(f"seed: {body.seed} is not between 0 and 2**63 - 1")
    if len(body.stop) > MAX_STOPS or not all(body.stop):
        raise PromptError(f"stop: give at most {MAX_STOPS} strings, none of them empty")
    if not (math.isfinite(body.deadline_s) and 0 < body.deadline_s <= 86400):
        raise PromptError(f"deadline_s: {body.deadline_s} is not above 0 and at most 86400 seconds")


def tokenize(body: Generate, text: TextModel, max_model_len: int) -> tuple[tuple[int, ...], int]:
    """Return the prompt's tokens and the number of tokens to generate. Raises PromptError."""
    if body.messages is not None:
        prompt = text.encode_chat([{"role": m.role, "content": m.content} for m in body.messages])
    else:
        prompt = text.encode(body.prompt or "")
    room = max_model_len - len(prompt)
    if not prompt:
        raise PromptError(f"{_field(body)}: there are no tokens in this")
    if room < 1:
        raise PromptError(
            f"{_field(body)}: {len(prompt)} tokens are too long; this model holds {max_model_len}, the answer included"
        )
    if body.max_tokens is None:
        return prompt, min(DEFAULT_MAX_TOKENS, room)
    if body.max_tokens > room:
        raise PromptError(
            f"max_tokens: {body.max_tokens} after a prompt of {len(prompt)} tokens is too much; "
            f"this model holds {max_model_len}, so at most {room}"
        )
    return prompt, body.max_tokens


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
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._body = body
        self._max_tokens = max_tokens
        self._decoder = text.decoder()
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

    def replay(self) -> tuple[tuple[int, ...], Sampling]:
        """What an engine is asked for now: the prompt with the tokens so far, and how many are
        still wanted."""
        body = self._body
        sampling = Sampling(
            max_tokens=self.left,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
        )
        return (*self.prompt, *self.tokens), sampling

    def take(self, tokens: Sequence[int], finish: str | None) -> ShowTokens | None:
        """Take new tokens, none beyond the limit or the end; returns them with the text they
        complete. Sets `finish` at the end."""
        if self.finish is not None:
            return None
        taken = tuple(tokens[: self.left])
        self.tokens += taken
        shown = self.take_rest() + self._stops.push(self._decoder.push(taken))
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
