"""A client's request and its answer as plain values: parameters in, pieces out, and what a replay repeats. No I/O."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, TypedDict, final

import msgspec

from ..coordinator.names import name_of
from ..node.adverts import find_box_fault, join_faults
from ..node.engine.sampling import TopTokens
from ..node.messages import AnswerUpdate, Generate, RequestFigures, Status
from ..node.models import ModelInfo
from ..node.models.errors import PromptError
from ..node.observing.ages import describe_gone
from ..node.requests.acceptance import check
from ..node.requests.gateway_choice import GatewayCandidate
from .errors import DeadlineExceeded, InvalidRequest, RequestFailed


class GenerateOptions(TypedDict, total=False):
    """Parameters of a request. All may be left out.

    max_tokens: at most this many new tokens; as many as fit, up to 256, when not given.
    temperature: 0 (default) always takes the likeliest token; higher is more varied.
    top_p, top_k: sample only from the likeliest tokens; 1 and 0 switch them off.
    seed: the same seed gives the same answer, wherever it is computed.
    stop: end before this text, or the first of these.
    deadline_s: give up when the answer is not complete after this many seconds (default 300).
    service: which of several models of the network; the name that `status` shows.
    priority: lower is handled earlier: below 0 urgent, above 0 batch (default 0). A busy network chooses by it what
        waits and what it refuses.
    cache_salt: only requests that give the same one share what is cached of their prompts (default: all do).

    The rest is as in vLLM's `SamplingParams`.
    min_p: only tokens that are so likely, as a part of the likeliest one's probability; 0 switches it off.
    min_tokens: no end before so many tokens.
    presence_penalty, frequency_penalty: from -2 to 2, by what the answer has; repetition_penalty: 1 is none.
    stop_token_ids: end with one of these tokens, too. ignore_eos: go on after the model's own.
    logprobs, prompt_logprobs: of so many of the likeliest tokens (0 to 20) beside those of the answer, of the prompt.
    logit_bias: added to the logits of these tokens, from -100 to 100. allowed_token_ids: no others.
    bad_words_token_ids: never these sequences of tokens.
    constraint: what the answer must match, as `{"kind": "json", "text": schema}`; kinds are json, json_object, regex,
        choice (a JSON array of texts), grammar and structural_tag.
    reasoning: where the constraint begins for a model that reasons first, as `{"parser": vLLM's name of it}`.
    detokenize: False asks for tokens alone, without text.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: str | list[str] | None
    deadline_s: float
    service: str | None
    priority: int
    cache_salt: str
    min_p: float
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words_token_ids: Sequence[Sequence[int]]
    constraint: Mapping[str, object] | None
    reasoning: Mapping[str, object] | None
    detokenize: bool
    prompt_token_ids: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs where a token is: the token's own and those of the likeliest, by id. `rank`: the token's own among
    all, from 1."""

    token: int
    rank: int
    logprobs: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer, and the tokens that arrived with it (a token need not complete a character)."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # where they were asked for: one for each of `tokens`


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer. `finish`: stop, or length when `max_tokens` ended it; `stop_reason`: which of `stop_token_ids`
    did. `prompt_logprobs` begin with the prompt's second token."""

    text: str
    tokens: tuple[int, ...]
    finish: str
    figures: RequestFigures | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    stop_reason: int | None = None


def add_attempts(answer: Generation, earlier: list[str]) -> Generation:
    """An answer whose figures count what its client had tried before at other gateways: an attempt at least at each."""
    if answer.figures is None or not earlier:
        return answer
    figures = msgspec.structs.replace(
        answer.figures,
        attempts=answer.figures.attempts + len(earlier),
        recovered=(*earlier, *answer.figures.recovered),
    )
    return replace(answer, figures=figures)


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
        bounds = "above 0 and at most a day" if name == "deadline_s" else "within its bounds"
        return f"{name}: {fields[name]} is out of range; take one {bounds}"
    return f"{name}: {what[:1].lower()}{what[1:]}" if name else what


def read_logprobs(top: TopTokens | None) -> tuple[TokenLogprobs, ...]:
    """As plain values."""
    if top is None:
        return ()
    columns = range(top.width)
    ids, logprobs = struct.iter_unpack("<i", top.ids), struct.iter_unpack("<f", top.logprobs)
    rows = []
    for (rank,) in struct.iter_unpack("<i", top.ranks):
        row = {next(ids)[0]: next(logprobs)[0] for _ in columns}  # the token's own is first, and may come again
        rows.append(TokenLogprobs(next(iter(row)), rank, row))
    return tuple(rows)


class GatewayLost(Exception):
    """This gateway cannot answer, another one may; or it itself, after `retry_after_s`. The text says why."""

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class GatewayRefuses(GatewayLost):
    """It has answered, and has nothing of the request."""


class GatewayLeaves(GatewayRefuses):
    """It does not serve it now. If that is in the catalogue it may do so later, and so may others."""


class GatewayBroken(GatewayLost):
    """The connection to it has ended. It may have been started anew: it is tried once more."""


class GatewayUnreachable(GatewayLost):
    """The request did not get there. A path may be broken for a moment: it is tried once more."""


LEAST_SILENCE_S: Final = 10.0
MISSED_NEWS: Final = 4.0  # times that a gateway may fail to say something
LEAST_WITHOUT_TOKENS_S: Final = 30.0
WITHOUT_TOKENS_SHARE: Final = 0.5  # of the time that a request has at a gateway


@final
class GatewayWaitLimits:
    """For how long a gateway that has accepted a request is waited for before another one is asked, where there is one.

    It was to say something every `news_s`; when it does not, it hangs, or has forgotten the request. And when half of
    the time that the request has, and 30 s, are over without a token, whatever it says, it may lie, and there is time
    yet for another one. `left_s`: that time; `news_s` is None of a gateway of an earlier release.

    One that answers no pings may be back in a moment, and another one begins anew: for as long as the first token took,
    or the request has taken so far, it is waited for. So a short silence does not have all of a gateway's prompts
    computed again, and a long one costs at most twice that time.
    """

    def __init__(self, now: float, left_s: float, news_s: float | None) -> None:
        self._silence_s = inf if news_s is None else max(LEAST_SILENCE_S, MISSED_NEWS * news_s)
        self._without_tokens_s = max(LEAST_WITHOUT_TOKENS_S, WITHOUT_TOKENS_SHARE * left_s)
        self._heard_at = self._got_on_at = self._accepted_at = now
        self._first_s: float | None = None  # until the first token
        self._hung_until = inf

    def __repr__(self) -> str:
        return f"GatewayWaitLimits(give_up_at={self.give_up_at:.1f})"

    @property
    def give_up_at(self) -> float:
        """When it has been silent for too long, if nothing comes before."""
        return min(self._heard_at + self._silence_s, self._got_on_at + self._without_tokens_s, self._hung_until)

    def note_hung(self, hung: bool, now: float) -> None:
        """It answers no pings, or does again."""
        so_far_s = now - self._accepted_at if self._first_s is None else self._first_s
        self._hung_until = min(self._hung_until, now + so_far_s) if hung else inf

    def note(self, update: AnswerUpdate, now: float) -> None:
        """It has said something."""
        self._heard_at, self._hung_until = now, inf
        if update.tokens or update.text:
            self._got_on_at = now
            if self._first_s is None:
                self._first_s = now - self._accepted_at

    def explain(self, now: float) -> str:
        """Why it is given up, for people."""
        if now >= self._hung_until:
            return "it did not answer"
        if now >= self._heard_at + self._silence_s:
            return f"it said nothing for {now - self._heard_at:.0f} s"
        return f"it had no token for {now - self._got_on_at:.0f} s"


class Diverged(Exception):
    """A second attempt at a request answers otherwise than the first began."""


@final
class Replay:
    """An answer over several gateways of one `service`: each delta is delivered once."""

    def __init__(self) -> None:
        self.service: str | None = None
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
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
        new = chunk.tokens[again:]
        rated = read_logprobs(chunk.logprobs)
        delta = TextDelta(chunk.text[said:], new, rated[len(rated) - len(new) :] if len(rated) >= len(new) else ())
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or read_logprobs(chunk.prompt_logprobs)
        self._at_token += len(chunk.tokens)
        self._at_text += len(chunk.text)
        self.tokens += delta.tokens
        self.text += delta.text
        return delta if delta.text or delta.tokens else None


def finish_answer(update: AnswerUpdate, replay: Replay) -> Generation:
    """Whole, by its last update. Raises DeadlineExceeded or RequestFailed."""
    if update.finish == "error":
        if update.error.startswith("deadline"):
            raise DeadlineExceeded(update.error)
        raise RequestFailed(update.error or "the network gave the request up without a reason")
    return Generation(
        replay.text,
        tuple(replay.tokens),
        update.finish or "",
        update.figures,
        logprobs=tuple(replay.logprobs),
        prompt_logprobs=replay.prompt_logprobs,
        stop_reason=update.stop_reason,
    )


def check_service(candidates: Sequence[GatewayCandidate], service: str | None) -> None:
    """Raise InvalidRequest where all nodes have told what they offer, and none of it is `service`."""
    models = [each.advert.model for each in candidates if each.advert is not None and each.advert.model is not None]
    if service is None or not models or any(candidate.advert is None for candidate in candidates):
        return
    if not any(service in (model.service, model.name) for model in models):
        served = ", ".join(sorted({_call(model) for model in models}))
        raise InvalidRequest(f"service: nobody serves {service}; this network serves {served}")


def _call(model: ModelInfo) -> str:
    """By its name, and by what tells it from others of that name."""
    return model.service if model.name in model.service else f"{model.name} ({model.service})"


def describe_unserved(status: Status, service: str | None) -> str:
    """Boxes that would serve, if they did not drain, had an engine that is ready, or had not died; "" where there are
    none."""
    offers = [
        (node.peer, node.advert)
        for node in status.nodes
        if node.state == "alive" and node.advert is not None and node.advert.model is not None
        if service in (None, node.advert.model.service, node.advert.model.name)
    ]
    draining = [name_of(peer) for peer, advert in offers if advert.draining]
    engines = join_faults(find_box_fault(peer, advert) for peer, advert in offers if not advert.draining)
    dead = {node.peer: node.gone_s for node in status.nodes if node.state == "dead" and node.gone_s is not None}
    found = [f"{', '.join(draining)} {'is' if len(draining) == 1 else 'are'} draining"] if draining else []
    return ", ".join([*found, *filter(None, [engines, describe_gone(dead)])])
