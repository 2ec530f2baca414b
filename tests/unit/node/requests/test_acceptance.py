"""What a gateway accepts: what is refused and how, and what a request's text becomes."""

from typing import Any

import pytest

from p2pserve.bootstrap import RemoteError
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.services.catalogue import EMPTY
from p2pserve.node.engine.sampling import MAX_SEED, Reasoning
from p2pserve.node.messages import MAX_PROMPT_BYTES, ChatMessage, Generate
from p2pserve.node.models import BUNDLED, ModelInfo, WeightSizes
from p2pserve.node.models.errors import PromptError
from p2pserve.node.models.text import TextModel
from p2pserve.node.requests.acceptance import (
    DEFAULT_MAX_TOKENS,
    MAX_STOPS,
    check,
    check_arrival,
    check_length,
    prepare,
    tokenize,
)

TEXT = TextModel(BUNDLED)
NAN, INF = float("nan"), float("inf")
MODEL = ModelInfo(
    service="tiny-1234",
    shape=ModelShape(
        name="tiny", layers=1, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
    ),
    max_model_len=512,
    weights=WeightSizes(layers=(1,), embeddings=1, head=1),
)


def ask(**settings: Any) -> Generate:
    if "messages" not in settings:
        settings.setdefault("prompt", "def f(")
    return Generate(request="r", **settings)


def chat(*contents: str, role: str = "user") -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for content in contents)


def refusal(body: Generate, *, is_draining: bool = False, is_id_in_use: bool = False) -> tuple[str, str]:
    with pytest.raises(RemoteError) as caught:
        check_arrival(body, MODEL, EMPTY, is_draining=is_draining, is_id_in_use=is_id_in_use)
    return caught.value.code, caught.value.message


@pytest.mark.parametrize("service", [None, "tiny", "tiny-1234"])
def test_a_request_for_what_is_served_may_come(service: str | None) -> None:
    check_arrival(ask(service=service), MODEL, EMPTY, is_draining=False, is_id_in_use=False)


def test_another_service_is_refused_with_the_one_that_is_served() -> None:
    assert refusal(ask(service="other")) == ("invalid", "service: other is not served here; tiny-1234 is")


def test_an_id_names_one_request() -> None:
    assert refusal(ask(), is_id_in_use=True) == ("invalid", "request: the id r is in use")


def test_a_node_that_leaves_refuses_everything_so_that_another_is_asked() -> None:
    for body in (ask(), ask(service="other")):
        code, message = refusal(body, is_draining=True, is_id_in_use=True)
        assert code == "draining"
        assert "another one" in message


def test_a_prepared_request_has_its_prompt_and_goes_on_after_the_tokens_so_far() -> None:
    answer = TEXT.encode("return x")
    live = prepare(ask(max_tokens=50), answer, MODEL, TEXT, 512)
    assert live.prompt == TEXT.encode("def f(")
    assert tuple(live.tokens) == answer
    assert live.left == 50 - len(answer)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    prepare(ask(), (4095,), MODEL, TEXT, 512)
    with pytest.raises(PromptError, match="tokens: 4096 is no token of this model, which has 4096"):
        prepare(ask(), (1, 4096, 2), MODEL, TEXT, 512)


def test_the_length_that_the_engines_can_take_bounds_a_prepared_request() -> None:
    with pytest.raises(PromptError, match="this model holds 20"):
        prepare(ask(max_tokens=20), (), MODEL, TEXT, 20)


@pytest.mark.parametrize(("settings", "field"), [({}, "prompt"), ({"messages": chat("a")}, "messages")])
def test_text_that_cannot_be_few_enough_tokens_is_refused_by_its_size(settings: dict[str, Any], field: str) -> None:
    most = 100 * TEXT.most_bytes_per_token
    check_length(ask(**settings), most, 0, TEXT, 100)
    with pytest.raises(PromptError) as caught:
        check_length(ask(**settings), most + 1, 0, TEXT, 100)
    assert str(caught.value) == (
        f"{field}: {most + 1} bytes of text are too long; this model holds 100 tokens, the answer included, which are "
        f"{most} bytes at most"
    )


def test_an_answer_that_fills_the_model_is_not_continued() -> None:
    check_length(ask(), 1, 99, TEXT, 100)
    with pytest.raises(PromptError, match="tokens: 100 of the answer; this model holds 100"):
        check_length(ask(), 1, 100, TEXT, 100)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "messages": chat("a")}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a" * (MAX_PROMPT_BYTES + 1)}, "prompt"),
        ({"prompt": "\u4e16" * (MAX_PROMPT_BYTES // 3 + 1)}, "prompt"),  # the bound is of bytes
        ({"messages": ()}, "messages"),
        ({"messages": chat("", "")}, "messages"),
        ({"messages": chat("a", "\udfff")}, "messages"),
        ({"messages": chat("a", role="\udfff")}, "messages"),
        ({"messages": chat("a", "a" * MAX_PROMPT_BYTES)}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": MAX_SEED + 1}, "seed"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": ("a",) * (MAX_STOPS + 1)}, "stop"),
        ({"stop": ("\ud800",)}, "stop"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"deadline_s": 86401.0}, "deadline_s"),
        ({"deadline_s": NAN}, "deadline_s"),
        ({"deadline_s": INF}, "deadline_s"),
    ],
)
def test_a_bad_parameter_is_named_first(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(PromptError) as caught:
        check(ask(**settings))
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


def test_the_size_of_a_prompt_is_in_bytes_of_all_its_text() -> None:
    assert check(ask(prompt="né")) == 3
    assert check(ask(messages=chat("né", "x"))) == 3 + 1 + 2 * len("user")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"messages": chat("", "a")},
        {"prompt": "a" * MAX_PROMPT_BYTES},
        {"max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "deadline_s": 0.001},
        {"temperature": 2.0, "top_p": 0.01, "top_k": 10_000, "seed": MAX_SEED, "deadline_s": 86400.0},
        {"stop": ("\n",) * MAX_STOPS},
    ],
)
def test_limits_themselves_are_allowed(settings: dict[str, Any]) -> None:
    check(ask(**settings))


PROMPT = "def f(x):\n    return x + 1\n"
LENGTH = len(TEXT.encode(PROMPT))


@pytest.mark.parametrize(
    ("max_tokens", "room", "expected"),
    [(None, 5, 5), (None, 1, 1), (None, 5000, DEFAULT_MAX_TOKENS), (5, 5, 5), (1, 5, 1), (5000, 5000, 5000)],
)
def test_tokenize_fits_the_answer_into_the_model(max_tokens: int | None, room: int, expected: int) -> None:
    prompt, count = tokenize(ask(prompt=PROMPT, max_tokens=max_tokens), TEXT, LENGTH + room)
    assert (prompt, count) == (TEXT.encode(PROMPT), expected)


@pytest.mark.parametrize(
    ("settings", "max_model_len", "field"),
    [
        ({"prompt": PROMPT}, LENGTH, "prompt"),
        ({"prompt": PROMPT}, 1, "prompt"),
        ({"messages": chat(PROMPT)}, LENGTH, "messages"),
        ({"prompt": PROMPT, "max_tokens": 6}, LENGTH + 5, "max_tokens"),
    ],
)
def test_tokenize_names_what_does_not_fit(settings: dict[str, Any], max_model_len: int, field: str) -> None:
    with pytest.raises(PromptError) as caught:
        tokenize(ask(**settings), TEXT, max_model_len)
    assert str(caught.value).startswith(f"{field}: ")
    assert str(max_model_len) in str(caught.value)


def test_tokenize_puts_messages_through_the_template() -> None:
    prompt, _ = tokenize(ask(messages=chat("hi")), TEXT, 100)
    assert prompt == TEXT.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": 1.5}, "min_p: 1.5 is not a number from 0 to 1 (0: none)"),
        ({"presence_penalty": NAN}, "presence_penalty: nan is not a number from -2 to 2 (0: none)"),
        ({"frequency_penalty": -3.0}, "frequency_penalty: -3.0 is not a number from -2 to 2 (0: none)"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is not above 0 and at most 100 (1: none)"),
        ({"logprobs": 21}, "logprobs: 21 is not between 0 and 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: -1 is not between 0 and 20"),
        ({"logit_bias": {7: NAN}}, "logit_bias: nan of token 7 is not a number from -100 to 100"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: 5 is not between 0 and max_tokens"),
        ({"reasoning": Reasoning(parser="a")}, "reasoning: it says where a constraint begins; give `constraint` too"),
        ({"stop": ("a",), "detokenize": False}, "stop: an answer of tokens alone has no text to look for it in"),
        ({"prompt_token_ids": ()}, "prompt: give one of `prompt`, `messages` and `prompt_token_ids`"),
        ({"prompt": None, "prompt_token_ids": ()}, "prompt_token_ids: they are empty; give at least one token"),
    ],
)
def test_sampling_that_cannot_be_is_named_with_what_can(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError) as caught:
        check(ask(**settings))
    assert str(caught.value).startswith(message)


def test_tokens_are_a_prompt() -> None:
    body = ask(prompt=None, prompt_token_ids=(5, 6, 7), detokenize=False)
    assert check(body) == 0
    assert prepare(body, (), MODEL, TEXT, 512).prompt == (5, 6, 7)
    with pytest.raises(PromptError, match="prompt_token_ids: 3 tokens are too long"):
        prepare(body, (), MODEL, TEXT, 3)


@pytest.mark.parametrize("field", ["prompt_token_ids", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_named_tokens_are_the_models(field: str) -> None:
    value: Any = {4096: 1.0} if field == "logit_bias" else (4096,)
    settings = {"prompt": None if field == "prompt_token_ids" else "a", field: value}
    with pytest.raises(PromptError, match=f"{field}: 4096 is no token of this model, which has 4096"):
        prepare(ask(**settings), (), MODEL, TEXT, 512)


def test_logprobs_of_a_prompt_fit_into_a_message() -> None:
    body = ask(prompt=None, prompt_token_ids=(1,) * 13_000, prompt_logprobs=20, max_tokens=1)
    with pytest.raises(PromptError, match="prompt_logprobs: 20 for each of 13000 tokens are too many to tell"):
        prepare(body, (), MODEL, TEXT, 20_000)
