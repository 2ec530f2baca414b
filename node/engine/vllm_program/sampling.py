"""vLLM's `SamplingParams` and ours: each field of theirs is carried to the engine, stays in front, or is refused.

A release of vLLM with another field would have it ignored, or an answer made without it: `check_fields` names it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CONSTRAINT_BYTES,
    MAX_STOP_TOKENS,
    MAX_TOP_TOKENS,
    Constraint,
    Reasoning,
    Sampling,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

_SAME: Final = (  # one name and meaning at both ends
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
)
CARRIED: Final = frozenset(
    {*_SAME, "stop_token_ids", "logit_bias", "allowed_token_ids", "_bad_words_token_ids", "structured_outputs"}
)
"""They travel as `Sampling`."""
IN_FRONT: Final = frozenset(
    {
        # Several answers are several requests; text is looked at where it is made; how it is told is the API's choice.
        *("n", "stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "bad_words"),
        *("include_stop_str_in_output", "output_kind", "stream_interval", "flat_logprobs", "output_text_buffer_length"),
        # The engine knows its model's end tokens and sets what follows from the fields that are carried.
        *("_eos_token_id", "_all_stop_token_ids", "skip_reading_prefix_cache", "skip_clone", "_watermarking_skipped"),
    }
)
"""They are the gateway's or the API process's business."""
REFUSED: Final[dict[str, Any]] = {
    # With the value that asks for nothing.
    "extra_args": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "trace_decode_token_ids": None,
    "routed_experts_prompt_start": 0,
    "watermarking": None,
}
"""No engine of this network does them."""
_MOST: Final = {
    "stop_token_ids": MAX_STOP_TOKENS,
    "logit_bias": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "bad_words": MAX_BAD_WORDS,
}
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RefusedSampling(ValueError):
    """A parameter, named `field` as in vLLM's API, that this network cannot serve."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


class UnknownSamplingFields(ImportError):
    """This release of vLLM has other sampling parameters than those that are known here."""


def check_fields() -> None:
    """Raise UnknownSamplingFields, which names what this vLLM has and we do not know, or the other way round."""
    from vllm.sampling_params import SamplingParams

    ours, theirs = CARRIED | IN_FRONT | REFUSED.keys(), {*SamplingParams.__struct_fields__}
    if ours != theirs:
        new, gone = sorted(theirs - ours), sorted(ours - theirs)
        raise UnknownSamplingFields(
            f"vLLM's SamplingParams has other fields than p2pserve knows: new {new}, gone {gone}; classify them in "
            "node/engine/vllm_program/sampling.py"
        )


def from_vllm(
    params: SamplingParams,
    *,
    reasoning_ended: bool | None = None,
    reasoning_kwargs: dict[str, Any] | None = None,
    reasoning_parser: str = "",
) -> Sampling:
    """What of vLLM's parameters goes to an engine. Raises RefusedSampling."""
    for field, nothing in REFUSED.items():
        if not _asks_for_nothing(getattr(params, field), nothing):
            raise RefusedSampling(field, "this network does not support it; leave it out")
    for field in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, field)
        if wanted is not None and not 0 <= wanted <= MAX_TOP_TOKENS:
            raise RefusedSampling(field, f"{wanted} is not between 0 and {MAX_TOP_TOKENS}")
    if params.max_tokens is None:
        raise RefusedSampling("max_tokens", "say how many tokens the answer may have")
    lists: dict[str, Any] = {
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or {},
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": params.bad_words_token_ids or (),
    }
    for field, values in lists.items():
        if len(values) > _MOST[field]:
            raise RefusedSampling(field, f"{len(values)} entries; at most {_MOST[field]}")
    lists["bad_words_token_ids"] = lists.pop("bad_words")
    constraint = _constraint(params.structured_outputs)
    same = {field: getattr(params, field) for field in _SAME}
    fields = {
        **same,
        "top_k": max(0, params.top_k),  # vLLM accepts -1 for "all"
        **lists,
        "constraint": constraint,
        "reasoning": _reasoning(reasoning_parser, reasoning_ended, reasoning_kwargs) if constraint else None,
    }
    try:
        return msgspec.convert(fields, Sampling)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise RefusedSampling(where.rstrip("`") or "sampling", what[:1].lower() + what[1:]) from error


def to_vllm(sampling: Sampling, eos: Sequence[int], extra_args: dict[str, Any] | None = None) -> SamplingParams:
    """What vLLM is told, for tokens in and tokens out; `eos`: the model's own end tokens. vLLM counts both limits from
    the beginning of the answer. Raises its errors, and ValueError, for what contradicts itself."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    same = {field: getattr(sampling, field) for field in _SAME}
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    params = SamplingParams(
        **{**same, "max_tokens": sampling.max_tokens + sampling.answered},
        stop_token_ids=sorted(stops),
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args,
        skip_clone=True,
    )
    params._all_stop_token_ids.update(eos)  # noqa: SLF001 (`min_tokens` and grammars go by it, also with `ignore_eos`)
    if sampling.bad_words_token_ids:
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words_token_ids]  # noqa: SLF001 (as above)
    return params


def structured_outputs(constraint: Constraint) -> StructuredOutputsParams:
    """A constraint as vLLM's engine takes it. Raises ValueError for a choice that is no list of texts."""
    from vllm.sampling_params import StructuredOutputsParams

    value: Any = constraint.text
    if constraint.kind == "json_object":
        value = True
    if constraint.kind == "choice":
        try:
            value = msgspec.json.decode(constraint.text, type=list[str])
        except msgspec.DecodeError as error:
            raise ValueError(f"constraint: `choice` is no JSON array of texts: {error}") from error
    fields: dict[str, Any] = {constraint.kind: value}
    return StructuredOutputsParams(
        **fields,
        disable_any_whitespace=constraint.disable_any_whitespace,
        disable_additional_properties=constraint.disable_additional_properties,
        whitespace_pattern=constraint.whitespace_pattern,
    )


def _asks_for_nothing(value: Any, nothing: Any) -> bool:
    """Whether a refused parameter may as well not be there: vLLM says itself that a request has no watermark, or no
    arguments. An array has no one truth, and is something."""
    return (
        value is None
        or value is False
        or (isinstance(value, dict) and not value)
        or (type(value) is type(nothing) and value == nothing)
    )


def _constraint(structured: StructuredOutputsParams | None) -> Constraint | None:
    if structured is None or structured.all_constraints_none():
        return None
    kind = next(kind for kind in _KINDS if getattr(structured, kind) is not None)
    value = getattr(structured, kind)
    text = "" if kind == "json_object" else value if isinstance(value, str) else json.dumps(value)
    if len(text.encode(errors="replace")) > MAX_CONSTRAINT_BYTES:
        raise RefusedSampling(kind, f"a constraint of {len(text)} characters; at most {MAX_CONSTRAINT_BYTES} bytes")
    return msgspec.convert(
        {
            "kind": kind,
            "text": text,
            "disable_any_whitespace": structured.disable_any_whitespace,
            "disable_additional_properties": structured.disable_additional_properties,
            "whitespace_pattern": structured.whitespace_pattern,
        },
        Constraint,
    )


def _reasoning(parser: str, ended: bool | None, arguments: dict[str, Any] | None) -> Reasoning | None:
    if not parser:
        return None
    return Reasoning(parser=parser, ended=ended, arguments=json.dumps(arguments) if arguments else "")
