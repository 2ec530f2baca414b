"""A live request: tokens and text survive every change of engine."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.requests.values import ShowTokens
from p2pserve.node.engine.sampling import Constraint
from p2pserve.node.messages import Generate
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.errors import PromptError
from p2pserve.node.models.text import TextModel
from p2pserve.node.requests.live_request import LiveRequest

TEXT = TextModel(BUNDLED)


def ask(**settings: Any) -> Generate:
    return Generate(request="r", prompt="def f(", **settings)


ANSWER = TEXT.encode("def add(a, b):\n    # π ≈ 3.14 🙂\n    return a + b\n")


def text_of(tokens: tuple[int, ...]) -> str:
    decoder = TEXT.decoder()
    return decoder.push(tokens) + decoder.finish()


WHOLE = text_of(ANSWER)


def live(max_tokens: int = 500, so_far: tuple[int, ...] = (), **settings: Any) -> LiveRequest:
    return LiveRequest(ask(**settings), (7, 8, 9), max_tokens, TEXT, so_far)


def push(request: LiveRequest, tokens: tuple[int, ...], finish: str | None = None) -> str:
    """The text that these tokens complete."""
    shown = request.take(tokens, finish)
    return shown.text if shown is not None else ""


@given(cuts=st.lists(st.integers(0, 6), max_size=20))
def test_no_token_is_lost_or_repeated_over_engines(cuts: list[int]) -> None:
    """Each engine continues where the last one stopped: what it is asked for is the prompt and all tokens so far."""
    request = live(len(ANSWER))
    text = ""
    for size in [*cuts, len(ANSWER)]:
        if request.finish is not None:
            break
        prompt, sampling = request.replay()
        done = len(request.tokens)
        assert prompt == (7, 8, 9, *ANSWER[:done])
        assert sampling.max_tokens == len(ANSWER) - done
        text += push(request, ANSWER[done : done + size])
    assert tuple(request.tokens) == ANSWER
    assert request.finish == "length"
    assert text == WHOLE


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_engines_finish_is_the_requests(finish: str) -> None:
    request = live()
    text = push(request, ANSWER[:3]) + push(request, ANSWER[3:5], finish)
    assert request.finish == finish
    assert text == text_of(ANSWER[:5])
    assert push(request, ANSWER[5:]) == ""
    assert tuple(request.tokens) == ANSWER[:5]


def test_the_limit_holds_also_for_an_engine_that_does_not_know_it() -> None:
    request = live(4)
    push(request, ANSWER[:2])
    text = push(request, ANSWER[2:9])
    assert tuple(request.tokens) == ANSWER[:4]
    assert request.finish == "length"
    assert text == text_of(ANSWER[2:4])


def test_what_is_half_a_character_is_shown_at_the_end() -> None:
    start = TEXT.encode("🙂")[:2]
    request = live(2)
    text = push(request, start)
    assert request.finish == "length"
    assert text == text_of(start)


@pytest.mark.parametrize("engines", [1, 2, 3, len(ANSWER)])
def test_a_stop_string_is_found_over_engines(engines: int) -> None:
    stop = "3.14 🙂\n   "
    request = live(stop=("nowhere", stop))
    text = ""
    size = -(-len(ANSWER) // engines)
    for at in range(0, len(ANSWER), size):
        text += push(request, ANSWER[at : at + size])
        request.replay()
    assert request.finish == "stop"
    assert text == WHOLE[: WHOLE.index(stop)]


def test_a_stop_string_in_what_was_held_back_ends_the_answer() -> None:
    """The last engine says `length` while the text so far could still become a stop string."""
    request = live(stop=("x + 12", "z"))
    tokens = TEXT.encode("x + 1")
    assert push(request, tokens, "length") == "x + 1"
    assert request.finish == "length"


def test_sampling_is_passed_on_wherever_the_answer_goes_on() -> None:
    request = live(10, temperature=0.7, top_p=0.9, top_k=40, seed=5)
    _, first = request.replay()
    assert (first.temperature, first.top_p, first.top_k, first.seed) == (0.7, 0.9, 40, 5)
    push(request, ANSWER[:3])
    _, second = request.replay()
    assert (second.temperature, second.top_p, second.top_k, second.seed) == (0.7, 0.9, 40, 5)
    assert second.max_tokens == first.max_tokens - 3


@pytest.mark.parametrize("cut", range(len(ANSWER) + 1))
@pytest.mark.parametrize("stop", [(), ("3.14 🙂\n   ",), ("return a + b\nno",)])
def test_an_answer_that_another_gateway_began_has_the_text_of_one_that_was_never_broken(
    cut: int, stop: tuple[str, ...]
) -> None:
    """What its client has of the text is the beginning of it, however the tokens came."""
    request = live(len(ANSWER), stop=stop)
    in_one, one_by_one = live(len(ANSWER), stop=stop), live(len(ANSWER), stop=stop)
    had = {push(in_one, ANSWER[:cut]), "".join(push(one_by_one, (token,)) for token in ANSWER[:cut])}
    whole = "".join(push(request, (token,)) for token in ANSWER)
    again = live(len(ANSWER), tuple(in_one.tokens), stop=stop)
    told = "" if again.finish is not None else push(again, ANSWER[cut:], "length")
    assert told + again.take_rest() == whole
    assert again.finish == request.finish
    assert all(whole.startswith(text) for text in had)


def test_a_continued_request_asks_for_what_is_left() -> None:
    request = live(10, ANSWER[:3])
    prompt, sampling = request.replay()
    assert prompt == (7, 8, 9, *ANSWER[:3])
    assert (sampling.max_tokens, request.count, request.left) == (7, 3, 7)


def test_an_answer_that_was_complete_is_not_continued() -> None:
    assert live(3, ANSWER[:3]).finish == "length"
    (end,) = TEXT.end_tokens
    assert live(9, (*ANSWER[:3], end)).finish == "stop"
    assert live(9, ANSWER[:3]).finish is None


def test_more_of_an_answer_than_is_wanted_is_refused() -> None:
    with pytest.raises(PromptError, match="tokens: 4 of the answer are there already; max_tokens is 3"):
        live(3, ANSWER[:4])


def test_who_goes_on_is_told_how_much_is_answered_where_that_matters() -> None:
    cases: list[tuple[dict[str, Any], int]] = [({}, 0), ({"logprobs": 2}, 0)]
    cases += [({"presence_penalty": 1.0}, 2), ({"min_tokens": 4}, 2)]
    for settings, answered in cases:
        request = live(20, ANSWER[:2], **settings)
        _, sampling = request.replay()
        assert (sampling.answered, sampling.max_tokens) == (answered, 18)


def test_logprobs_of_the_prompt_are_asked_for_once_and_of_one_engine() -> None:
    request = live(20, prompt_logprobs=3)
    assert not request.may_split
    assert request.replay()[1].prompt_logprobs == 3
    push(request, ANSWER[:1])
    assert request.replay()[1].prompt_logprobs is None
    assert live(20, logprobs=3).may_split


def test_an_answer_of_tokens_alone_has_no_text() -> None:
    request = live(4, detokenize=False)
    assert request.take(ANSWER[:4], None) == ShowTokens("", ANSWER[:4])
    assert request.finish == "length"


def test_what_a_request_names_counts_as_memory() -> None:
    plain = live().size
    constraint = Constraint(kind="regex", text="a" * 400)
    settings: dict[str, Any] = {"logit_bias": {1: 1.0, 2: 1.0}, "stop_token_ids": (1, 2, 3), "constraint": constraint}
    assert live(**settings).size == plain + 2 * 2 + 3 + 100
