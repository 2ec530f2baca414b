"""Whether a gateway accepts a request, and what becomes of it then. No I/O, no clock.

A request is refused with the field and the fix: `check_arrival` by what the gateway is doing, `check` by what the
request itself says, and `tokenize` and `prepare` by what the model and its engines can take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from ...bootstrap import RemoteError
from ...coordinator.services.catalogue import ServiceCatalogue
from ..engine.sampling import MAX_BIAS, MAX_REPETITION_PENALTY, MAX_SEED, MAX_TOP_BYTES, MAX_TOP_TOKENS
from ..messages import MAX_PROMPT_BYTES, Generate
from ..models import ModelInfo
from ..models.errors import PromptError

if TYPE_CHECKING:
    from ..models.text import TextModel
    from .live_request import LiveRequest

DEFAULT_MAX_TOKENS = 256
MAX_STOPS = 16
MAX_TEMPERATURE = 2.0  # vLLM's own bound
_RANGES = (("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0))


def check(body: Generate) -> int:
    """Check all that needs no model; returns the prompt's bytes of text. Raises PromptError naming
    the field and the fix."""
    if sum(form is not None for form in (body.prompt, body.messages, body.prompt_token_ids)) != 1:
        raise PromptError("prompt: give one of `prompt`, `messages` and `prompt_token_ids`")
    if body.prompt is not None and not body.prompt:
        raise PromptError("prompt: it is empty; give at least one character")
    if body.prompt_token_ids is not None and not body.prompt_token_ids:
        raise PromptError("prompt_token_ids: they are empty; give at least one token")
    if body.messages is not None and not any(message.content for message in body.messages):
        raise PromptError("messages: they are empty; give at least one with content")
    field = _field(body)
    if len(body.prompt or "") > MAX_PROMPT_BYTES:  # that many characters: there is no need to look at them
        raise PromptError(f"{field}: {len(body.prompt or '')} characters; at most {MAX_PROMPT_BYTES} bytes can be sent")
    size = _bytes(field, body.prompt or "")
    size += sum(_bytes(field, text) for message in body.messages or () for text in (message.role, message.content))
    if size > MAX_PROMPT_BYTES:
        raise PromptError(f"{field}: {size} bytes of text; at most {MAX_PROMPT_BYTES} can be sent")
    _check_sampling(body)
    for stop in body.stop:
        _bytes("stop", stop)
    return size


def check_length(body: Generate, size: int, so_far: int, text: TextModel, max_model_len: int) -> None:
    """Check what can be known of lengths before `size` bytes of text become tokens, which takes a second for some
    megabytes; `so_far` tokens of the answer are there. Raises PromptError."""
    most = max_model_len * text.most_bytes_per_token
    if size > most:
        raise PromptError(
            f"{_field(body)}: {size} bytes of text are too long; this model holds {max_model_len} tokens, the answer "
            f"included, which are {most} bytes at most"
        )
    if so_far >= max_model_len:
        raise PromptError(f"tokens: {so_far} of the answer; this model holds {max_model_len}, the prompt included")


def _field(body: Generate) -> str:
    """What the client calls its prompt."""
    if body.prompt_token_ids is not None:
        return "prompt_token_ids"
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
    for field, low, high in _RANGES:
        if not low <= getattr(body, field) <= high:
            raise PromptError(f"{field}: {getattr(body, field)} is not a number from {low:g} to {high:g} (0: none)")
    if not 0 < body.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise PromptError(
            f"repetition_penalty: {body.repetition_penalty} is not above 0 and at most {MAX_REPETITION_PENALTY:g} "
            "(1: none)"
        )
    for field in ("logprobs", "prompt_logprobs"):
        wanted = getattr(body, field)
        if wanted is not None and not 0 <= wanted <= MAX_TOP_TOKENS:
            raise PromptError(f"{field}: {wanted} is not between 0 and {MAX_TOP_TOKENS}")
    for token, bias in body.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PromptError(f"logit_bias: {bias} of token {token} is not a number from -{MAX_BIAS:g} to {MAX_BIAS:g}")
    if body.min_tokens < 0 or (body.max_tokens is not None and body.min_tokens > body.max_tokens):
        raise PromptError(f"min_tokens: {body.min_tokens} is not between 0 and max_tokens")
    if body.reasoning is not None and body.constraint is None:
        raise PromptError("reasoning: it says where a constraint begins; give `constraint` too")
    if body.stop and not body.detokenize:
        raise PromptError("stop: an answer of tokens alone has no text to look for it in; use `stop_token_ids`")
    if body.seed is not None and not 0 <= body.seed <= MAX_SEED:
        raise PromptError(f"seed: {body.seed} is not between 0 and 2**63 - 1")
    if len(body.stop) > MAX_STOPS or not all(body.stop):
        raise PromptError(f"stop: give at most {MAX_STOPS} strings, none of them empty")
    if not (math.isfinite(body.deadline_s) and 0 < body.deadline_s <= 86400):
        raise PromptError(f"deadline_s: {body.deadline_s} is not above 0 and at most 86400 seconds")


def tokenize(body: Generate, text: TextModel, max_model_len: int) -> tuple[tuple[int, ...], int]:
    """Return the prompt's tokens and the number of tokens to generate. Raises PromptError."""
    if body.prompt_token_ids is not None:
        prompt = body.prompt_token_ids
    elif body.messages is not None:
        prompt = text.encode_chat([{"role": m.role, "content": m.content} for m in body.messages], max_model_len)
    else:
        prompt = text.encode(body.prompt or "", max_model_len)
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


def check_arrival(
    body: Generate, model: ModelInfo, catalogue: ServiceCatalogue, *, is_draining: bool, is_id_in_use: bool
) -> None:
    """Raise RemoteError if this gateway must not take the request, whatever its prompt is."""
    if is_draining:
        raise RemoteError("draining", "this node is draining; send the request to another one")
    called = catalogue.model_of(body.service) if body.service is not None else None
    if called is not None and called not in (model.service, model.name):
        raise RemoteError("invalid", f"service: {body.service} is not served here; {model.service} is")
    if is_id_in_use:
        raise RemoteError("invalid", f"request: the id {body.request} is in use")


def check_listed(model: ModelInfo, catalogue: ServiceCatalogue) -> None:
    """Raise RemoteError if an admin has taken the model out of the catalogue."""
    if catalogue.is_removed(model.service, model.name):
        raise RemoteError(
            "invalid", f"service: this network serves {model.name} no more; `p2pserve models list` shows what there is"
        )


def prepare(
    body: Generate, so_far: tuple[int, ...], model: ModelInfo, text: TextModel, max_model_len: int
) -> LiveRequest:
    """A checked request with its prompt's tokens; `so_far` is what the client has of the answer. Takes seconds for
    megabytes of text. Raises PromptError."""
    from .live_request import LiveRequest  # with a tokenizer's library, which clients have not

    vocabulary = model.shape.vocabulary
    named: dict[str, Iterable[int]] = {
        "tokens": so_far,
        "prompt_token_ids": body.prompt_token_ids or (),
        "stop_token_ids": body.stop_token_ids,
        "logit_bias": body.logit_bias,
        "allowed_token_ids": body.allowed_token_ids,
        "bad_words_token_ids": chain(*body.bad_words_token_ids),
    }
    for field, tokens in named.items():
        if (worst := max(tokens, default=0)) >= vocabulary:  # the engine would refuse it
            raise PromptError(f"{field}: {worst} is no token of this model, which has {vocabulary}")
    prompt, max_tokens = tokenize(body, text, max_model_len)
    if body.min_tokens > max_tokens:
        raise PromptError(f"min_tokens: {body.min_tokens} is more than the {max_tokens} tokens that may come")
    if body.prompt_logprobs is not None and len(prompt) > (most := MAX_TOP_BYTES // 4 // (body.prompt_logprobs + 1)):
        raise PromptError(
            f"prompt_logprobs: {body.prompt_logprobs} for each of {len(prompt)} tokens are too many to tell; give a "
            f"prompt of at most {most} tokens"
        )
    return LiveRequest(body, prompt, max_tokens, text, so_far)
