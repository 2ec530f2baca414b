"""vLLM's sampling parameters and ours: nothing is lost in silence, and what cannot be carried is named."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from p2pserve.node.engine.sampling import Constraint, Reasoning, Sampling
from p2pserve.node.engine.vllm_program import sampling as module
from p2pserve.node.engine.vllm_program.sampling import (
    RefusedSampling,
    UnknownSamplingFields,
    check_fields,
    from_vllm,
    structured_outputs,
    to_vllm,
)


def test_every_field_of_vllms_has_one_place() -> None:
    check_fields()
    assert not module.CARRIED & module.IN_FRONT
    assert not (module.CARRIED | module.IN_FRONT) & module.REFUSED.keys()


@pytest.mark.parametrize("ours", [module.CARRIED | {"telepathy"}, module.CARRIED - {"min_p"}])
def test_another_vllm_is_refused_with_the_fields_name(monkeypatch: pytest.MonkeyPatch, ours: frozenset[str]) -> None:
    monkeypatch.setattr(module, "CARRIED", ours)
    with pytest.raises(UnknownSamplingFields, match=r"telepathy|min_p"):
        check_fields()


def test_what_is_carried_arrives() -> None:
    asked = SamplingParams(
        max_tokens=20,
        min_tokens=3,
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        ignore_eos=True,
        stop_token_ids=[9, 8],
        logprobs=2,
        prompt_logprobs=1,
        logit_bias={3: 2.5},
        allowed_token_ids=[3, 4],
        structured_outputs=StructuredOutputsParams(json={"type": "integer"}, disable_any_whitespace=True),
    )
    asked._bad_words_token_ids = [[1, 2]]
    carried = from_vllm(asked, reasoning_parser="qwen3", reasoning_ended=False, reasoning_kwargs={"a": 1})
    told = to_vllm(carried, eos=(0,))
    same = ("min_tokens", "temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
    for field in (*same, "repetition_penalty", "ignore_eos", "logprobs", "prompt_logprobs", "logit_bias"):
        assert getattr(told, field) == getattr(asked, field), field
    assert (told.max_tokens, told.top_k, told.stop_token_ids) == (20, 0, [8, 9])
    assert (told.allowed_token_ids, told.bad_words_token_ids) == ([3, 4], [[1, 2]])
    assert told.all_stop_token_ids == {0, 8, 9}
    assert carried.constraint == Constraint(kind="json", text='{"type": "integer"}', disable_any_whitespace=True)
    assert carried.reasoning == Reasoning(parser="qwen3", ended=False, arguments='{"a": 1}')
    assert not told.detokenize


def test_limits_are_counted_from_the_beginning_of_an_answer() -> None:
    told = to_vllm(Sampling(max_tokens=1, min_tokens=5, answered=7), eos=(2, 0))
    assert (told.max_tokens, told.min_tokens, told.stop_token_ids) == (8, 5, [0, 2])


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("extra_args", {"extra_args": {"a": 1}}),
        ("prompt_logprob_token_ids", {"prompt_logprob_token_ids": np.array([[1]])}),
        ("logprob_token_ids", {"logprob_token_ids": [1]}),
        ("thinking_token_budget", {"thinking_token_budget": 5}),
        ("repetition_detection", {"repetition_detection": RepetitionDetectionParams(4, 1, 2)}),
        ("trace_decode_token_ids", {"trace_decode_token_ids": [1]}),
        ("watermarking", {"watermarking": True}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 2**62}),
        ("seed", {"seed": -5}),
        ("stop_token_ids", {"stop_token_ids": list(range(257))}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("regex", {"structured_outputs": StructuredOutputsParams(regex="a" * 70_000)}),
    ],
)
def test_what_cannot_be_carried_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedSampling) as caught:
        from_vllm(SamplingParams(**changes))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_a_choice_is_a_list_of_texts() -> None:
    assert structured_outputs(Constraint(kind="choice", text='["a", "b"]')).choice == ["a", "b"]
    assert structured_outputs(Constraint(kind="json_object")).json_object
    for text in ("", "[1]", '{"a": 1}', "["):
        with pytest.raises(ValueError, match="choice"):
            structured_outputs(Constraint(kind="choice", text=text))
