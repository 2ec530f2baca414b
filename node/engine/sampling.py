"""How the next tokens of a request are chosen, and what is told of the choice: values that cross boxes.

    Sampling(max_tokens=64, temperature=0.7, seed=1, constraint=Constraint(kind="regex", text="[0-9]+"))

vLLM's own `SamplingParams` takes unknown fields, any number, and grammars of any size, so it is not read from peers:
each field here has a bound, and `vllm_program.sampling` says of each field of vLLM's where it goes. What only shapes
text (`n`, stop texts, detokenising) stays with whoever holds the text.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

MAX_SEED: Final = 2**63 - 1
MAX_VOCABULARY: Final = 1 << 20
MAX_TOP_TOKENS: Final = 20  # logprobs of a token, beside its own
MAX_TOP_BYTES: Final = 1 << 20  # of one array of logprobs: what a message has of them is below its frame's bound
MAX_STOP_TOKENS: Final = 256
MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100.0
MAX_ALLOWED_TOKENS: Final = 1 << 18
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 64
MAX_REPETITION_PENALTY: Final = 100.0
MAX_CONSTRAINT_BYTES: Final = 64 << 10
MAX_REASONING_BYTES: Final = 16 << 10
VocabularyId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCABULARY)]
TopCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_TOKENS)]
Bias = Annotated[float, msgspec.Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
BadWord = Annotated[tuple[VocabularyId, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
Biases = Annotated[dict[VocabularyId, Bias], msgspec.Meta(max_length=MAX_BIASES)]
StopTokens = Annotated[tuple[VocabularyId, ...], msgspec.Meta(max_length=MAX_STOP_TOKENS)]
AllowedTokens = Annotated[tuple[VocabularyId, ...], msgspec.Meta(max_length=MAX_ALLOWED_TOKENS)]
BadWords = Annotated[tuple[BadWord, ...], msgspec.Meta(max_length=MAX_BAD_WORDS)]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an answer must match. `text`: a schema, expression, grammar or structural tag as xgrammar understands it; of
    a choice, its texts as a JSON array; of `json_object`, nothing."""

    kind: Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_CONSTRAINT_BYTES)] = ""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a constraint begins for a model that reasons first: after what vLLM's reasoning parser of this name takes
    for the end of it. `ended`: in the prompt already; None: that parser is to look. `arguments`: the parser's, a JSON
    object."""

    parser: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    ended: bool | None = None
    arguments: Annotated[str, msgspec.Meta(max_length=MAX_REASONING_BYTES)] = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the next tokens are chosen, and what is told of them. Each field is vLLM's of that name; `top_k` 0, `top_p` 1
    and `min_p` 0 switch those filters off. The model's own end tokens end an answer, unless `ignore_eos`.

    `answered`: so many tokens at the end of the prompt are the beginning of this answer, by another engine. Penalties
    count them as tokens of the answer, so do `min_tokens` and bad words, and the constraint has accepted them;
    `max_tokens` are those that are still wanted.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    ignore_eos: bool = False
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_REPETITION_PENALTY)] = 1.0
    stop_token_ids: StopTokens = ()
    logprobs: TopCount | None = None
    prompt_logprobs: TopCount | None = None
    logit_bias: Biases = {}
    allowed_token_ids: AllowedTokens = ()
    bad_words_token_ids: BadWords = ()
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    answered: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0

    @property
    def looks_back(self) -> bool:
        """Whether the next token depends on which of those before it are of the answer."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.min_tokens or self.bad_words_token_ids or self.constraint is not None)

    def token_ids(self) -> tuple[int, ...]:
        """All that it names, to be held against a vocabulary."""
        words = (token for word in self.bad_words_token_ids for token in word)
        return (*self.stop_token_ids, *self.logit_bias, *self.allowed_token_ids, *words)

    @property
    def size(self) -> int:
        """What of its lists and texts an engine and a gateway hold, in tokens of a prompt."""
        text = len(self.constraint.text) if self.constraint is not None else 0
        return len(self.token_ids()) + len(self.logit_bias) + text // 4


class TopTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The logprobs of some tokens, a row for each: of the token itself, then of the most likely ones. `ids` (`<i4`) and
    `logprobs` (`<f4`) have `width` columns, `ranks` (`<i4`) says the token's own among all, from 1."""

    width: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOP_TOKENS + 1)]
    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_TOP_BYTES)]
    logprobs: Annotated[bytes, msgspec.Meta(max_length=MAX_TOP_BYTES)]
    ranks: Annotated[bytes, msgspec.Meta(max_length=MAX_TOP_BYTES)]

    def __post_init__(self) -> None:
        if len(self.ranks) % 4 or not len(self.ids) == len(self.logprobs) == self.width * len(self.ranks):
            raise ValueError(
                f"logprobs: {len(self.ids)} bytes of ids, {len(self.logprobs)} of logprobs and {len(self.ranks)} of "
                f"ranks are no rows of {self.width}"
            )

    @property
    def rows(self) -> int:
        """Tokens that it tells of."""
        return len(self.ranks) // 4

    def rows_from(self, first: int, last: int) -> TopTokens:
        """The rows `[first, last)`."""
        of_row, of_rank = slice(4 * self.width * first, 4 * self.width * last), slice(4 * first, 4 * last)
        return TopTokens(
            width=self.width, ids=self.ids[of_row], logprobs=self.logprobs[of_row], ranks=self.ranks[of_rank]
        )
