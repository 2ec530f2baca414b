"""A client's request and its answer as plain values: parameters in, pieces out, and what a replay repeats. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, final

import msgspec

from ..node.messages import AnswerUpdate, Generate, RequestFigures
from ..node.models.errors import PromptError
from ..node.requests.acceptance import check
from ..node.requests.gateway_choice import GatewayCandidate
from .errors import InvalidRequest


class GenerateOptions(TypedDict, total=False):
    """Parameters of a request. All may be left out.

    max_tokens: at most this many new tokens; as many as fit, up to 256, when not given.
    temperature: 0 (default) always takes the likeliest token; higher is more varied.
    top_p, top_k: sample only from the likeliest tokens; 1 and 0 switch them off.
    seed: the same seed gives the same answer, wherever it is computed.
    stop: end before this text, or the first of these.
    deadline_s: give up when the answer is not complete after this many seconds (default 300).
    service: which of several models of the network; the name that `status` shows.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: str | list[str] | None
    deadline_s: float
    service: str | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer, and the tokens that arrived with it (a token need not complete a character)."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer. `finish`: stop, or length when `max_tokens` ended it."""

    text: str
    tokens: tuple[int, ...]
    finish: str
    figures: RequestFigures | None


def build_request(prompt: str | None, messages: list[dict[str, str]] | None, options: Mapping[str, object]) -> Generate:
    """A checked request. Raises InvalidRequest naming the parameter."""
    fields: dict[str, object] = {**options, "prompt": prompt, "messages": messages, "request": new_request_id()}
    if "request" in options:
        raise InvalidRequest("request: unknown parameter")
    stop = options.get("stop")
    fields["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else stop
    try:
        body = msgspec.convert(fields, Generate)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_explain(str(error), fields)) from error
    try:
        check(body)
    except PromptError as error:
        raise InvalidRequest(str(error)) from error
    if body.temperature > 0 and body.seed is None:
        # Drawn here and not by an engine, so that the answer can go on elsewhere as it would have gone on.
        body = msgspec.structs.replace(body, seed=secrets.randbits(63))
    return body


def new_request_id() -> str:
    """An id that no other request has."""
    return secrets.token_hex(12)


def _explain(text: str, fields: Mapping[str, object]) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`" with the parameter in front."""
    what, at, where = text.partition(" - at `$")
    name = where.rstrip("`").removeprefix(".") if at else ""
    what = what.replace("Object contains unknown field", "unknown parameter")
    if isinstance(fields.get(name), float | int) and "got" not in what:
        return f"{name}: {fields[name]} is out of range"
    return f"{name}: {what[:1].lower()}{what[1:]}" if name else what


class Diverged(Exception):
    """A second attempt at a request answers otherwise than the first began."""


@final
class Replay:
    """An answer over several gateways of one `service`: each delta is delivered once."""

    def __init__(self) -> None:
        self.service: str | None = None
        self.tokens: list[int] = []
        self.text = ""
        self._at_token = 0
        self._at_text = 0

    def restart(self) -> None:
        """The next gateway begins anew, and says everything from the start."""
        self._at_token = self._at_text = 0

    def resume(self) -> None:
        """The next gateway goes on after the tokens, and says the text from the start."""
        self._at_token, self._at_text = len(self.tokens), 0

    def take(self, chunk: AnswerUpdate) -> TextDelta | None:
        """What is new in an update of the current gateway. Raises Diverged."""
        again = min(len(chunk.tokens), len(self.tokens) - self._at_token)
        if list(chunk.tokens[:again]) != self.tokens[self._at_token : self._at_token + again]:
            raise Diverged
        said = min(len(chunk.text), len(self.text) - self._at_text)
        if chunk.text[:said] != self.text[self._at_text : self._at_text + said]:
            raise Diverged
        delta = TextDelta(chunk.text[said:], chunk.tokens[again:])
        self._at_token += len(chunk.tokens)
        self._at_text += len(chunk.text)
        self.tokens += delta.tokens
        self.text += delta.text
        return delta if delta.text or delta.tokens else None


def check_service(candidates: Sequence[GatewayCandidate], service: str | None) -> None:
    """Raise InvalidRequest where all nodes have told what they offer, and none of it is `service`."""
    models = [each.advert.model for each in candidates if each.advert is not None and each.advert.model is not None]
    if service is None or not models or any(candidate.advert is None for candidate in candidates):
        return
    if not any(service in (model.service, model.name) for model in models):
        served = ", ".join(sorted({model.service for model in models}))
        raise InvalidRequest(f"service: nobody serves {service}; this network serves {served}")
