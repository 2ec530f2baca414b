"""Parameters, gateways and replays as plain values."""

import struct
from typing import Any

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.sampling import Constraint, TopTokens
from p2pserve.node.messages import Advert, AnswerUpdate, EngineAdvert
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.requests.gateway_choice import GatewayCandidate, gateways
from p2pserve.sdk.errors import InvalidRequest
from p2pserve.sdk.requests import (
    Diverged,
    Replay,
    TextDelta,
    TokenLogprobs,
    build_request,
    check_service,
)


@pytest.mark.parametrize(
    ("prompt", "messages", "options", "named"),
    [
        (None, None, {}, "prompt"),
        ("", None, {}, "prompt"),
        ("a", [{"role": "user", "content": "b"}], {}, "prompt"),
        ("a\udc80", None, {}, "prompt"),
        ("x" * (3 * 2**20 + 1), None, {}, "prompt"),
        (None, [], {}, "messages"),
        (None, [{"role": "user"}], {}, "messages"),
        (None, [{"role": "user", "content": 3}], {}, "messages"),
        ("a", None, {"max_tokens": 0}, "max_tokens"),
        ("a", None, {"max_tokens": -5}, "max_tokens"),
        ("a", None, {"max_tokens": "many"}, "max_tokens"),
        ("a", None, {"priority": 1.5}, "priority"),
        ("a", None, {"priority": "high"}, "priority"),
        ("a", None, {"priority": True}, "priority"),
        ("a", None, {"priority": 2**63}, "priority"),
        ("a", None, {"temperature": float("nan")}, "temperature"),
        ("a", None, {"temperature": -1.0}, "temperature"),
        ("a", None, {"temperature": "hot"}, "temperature"),
        ("a", None, {"top_p": 0.0}, "top_p"),
        ("a", None, {"top_k": -1}, "top_k"),
        ("a", None, {"seed": -1}, "seed"),
        ("a", None, {"stop": [""]}, "stop"),
        ("a", None, {"stop": 3}, "stop"),
        ("a", None, {"deadline_s": 0.0}, "deadline_s"),
        ("a", None, {"deadline_s": float("nan")}, "deadline_s"),
        ("a", None, {"max_token": 3}, "max_token"),
        ("a", None, {"request": "mine"}, "request"),
    ],
)
def test_a_wrong_parameter_is_named_in_one_line(
    prompt: str | None, messages: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(prompt, messages, options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "$" not in str(caught.value)


def test_a_request_has_the_parameters_and_an_id_of_its_own() -> None:
    one = build_request("a", None, {"stop": "b", "max_tokens": 3, "seed": None})
    other = build_request("a", None, {"stop": ["b", "c"]})
    assert (one.prompt, one.stop, one.max_tokens, one.seed) == ("a", ("b",), 3, None)
    assert other.stop == ("b", "c")
    assert one.request != other.request


def update(text: str, *tokens: int) -> AnswerUpdate:
    return AnswerUpdate(request="r", text=text, tokens=tokens)


def test_a_replay_hands_on_only_what_is_new() -> None:
    replay = Replay()
    assert replay.take(update("ab", 1, 2)) == TextDelta("ab", (1, 2))
    assert replay.take(update("", 3)) == TextDelta("", (3,))  # a token that completes no character yet
    replay.restart()
    assert replay.take(update("a", 1)) is None
    assert replay.take(update("bcd", 2, 3, 4)) == TextDelta("cd", (4,))
    assert replay.take(update("e", 5)) == TextDelta("e", (5,))
    assert (replay.text, replay.tokens) == ("abcde", [1, 2, 3, 4, 5])


@pytest.mark.parametrize("again", [update("ab", 1, 9), update("ax", 1, 2)])
def test_a_replay_that_differs_is_refused(again: AnswerUpdate) -> None:
    replay = Replay()
    replay.take(update("ab", 1, 2))
    replay.restart()
    with pytest.raises(Diverged):
        replay.take(again)


def candidate(
    name: str, state: str | None, rtt: float | None, *, draining: bool = False, service: str = "m-1"
) -> GatewayCandidate:
    model = ModelInfo(
        service=service,
        shape=ModelShape(name="m", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocabulary=1),
        max_model_len=1,
        weights=WeightSizes(layers=(1,), embeddings=1, head=1),
    )
    advert = Advert(
        hardware=Hardware(cores=1, memory_gib=1.0, processor="x"),
        draining=draining,
        model=model if state is not None else None,
        engine=EngineAdvert(state=state) if state is not None else None,
    )
    return GatewayCandidate(peer=PeerId(name), advert=advert, rtt_s=rtt)


def test_the_nearest_node_with_a_running_engine_is_the_gateway() -> None:
    candidates = [
        candidate("no model", None, 0.0),
        candidate("leaving", "ready", 0.0, draining=True),
        candidate("failed", "failed", 0.0),
        candidate("other model", "ready", 0.0, service="n-1"),
        candidate("starting", "starting", 0.001),
        candidate("far", "ready", 0.2),
        candidate("unmeasured", "ready", None),
        candidate("near", "ready", 0.01),
        GatewayCandidate(peer=PeerId("silent"), advert=None, rtt_s=0.0),
    ]
    assert gateways(candidates, "m-1") == ["near", "far", "unmeasured", "starting"]
    assert gateways(candidates, "n-1") == ["other model"]
    assert gateways(candidates, "nobody's") == []
    assert gateways(candidates, None)[0] == "other model"


def test_without_a_service_a_request_goes_to_the_one_that_has_a_plan() -> None:
    candidates = [
        candidate("other", "ready", 0.0, service="n-1"),
        candidate("planned", "ready", 0.2),
        candidate("planned too", "starting", 0.1),
    ]
    assert gateways(candidates, None, "m-1") == ["planned", "planned too"]
    assert gateways(candidates, "n-1", "m-1") == ["other"]
    assert gateways(candidates, None, "gone") == gateways(candidates, None) == ["other", "planned", "planned too"]


def test_a_service_is_refused_only_where_all_nodes_have_told_what_they_offer() -> None:
    none = candidate("no model", None, 0.0)
    known = [candidate("one", "ready", 0.0), candidate("two", "ready", 0.0, service="n-1"), none]
    with pytest.raises(InvalidRequest, match=r"^service: nobody serves x-1; this network serves m \(n-1\), m-1$"):
        check_service(known, "x-1")
    silent = GatewayCandidate(peer=PeerId("silent"), advert=None, rtt_s=0.0)
    check_service([*known, silent], "x-1")
    check_service(known[2:], "x-1")  # nothing is served yet
    check_service([], "x-1")
    for service in ("m-1", "n-1", "m", None):
        check_service(known, service)


def test_an_answer_that_goes_on_elsewhere_repeats_its_text_and_not_its_tokens() -> None:
    replay = Replay()
    replay.take(update("ab", 1, 2))
    replay.resume()
    assert replay.take(update("abc", 3)) == TextDelta("c", (3,))
    replay.resume()
    assert replay.take(update("ab")) is None
    assert replay.take(update("cd", 4)) == TextDelta("d", (4,))
    assert (replay.text, replay.tokens) == ("abcd", [1, 2, 3, 4])
    replay.resume()
    with pytest.raises(Diverged):
        replay.take(update("ax"))


def test_a_seed_is_drawn_for_what_is_sampled() -> None:
    drawn = [build_request("a", None, {"temperature": 0.5}).seed for _ in range(2)]
    assert None not in drawn
    assert drawn[0] != drawn[1]
    assert build_request("a", None, {"temperature": 0.5, "seed": 3}).seed == 3
    assert build_request("a", None, {}).seed is None


def test_logprobs_are_plain_values_and_told_once() -> None:
    first = TopTokens(
        width=2,
        ids=struct.pack("<4i", 5, 7, 6, 6),
        logprobs=struct.pack("<4f", -1, -0.5, -2, -2),
        ranks=struct.pack("<2i", 2, 1),
    )
    replay = Replay()
    delta = replay.take(AnswerUpdate(request="r", tokens=(5, 6), logprobs=first, prompt_logprobs=first))
    assert delta is not None
    assert delta.logprobs == (TokenLogprobs(5, 2, {5: -1.0, 7: -0.5}), TokenLogprobs(6, 1, {6: -2.0}))
    replay.restart()
    assert replay.take(AnswerUpdate(request="r", tokens=(5,), logprobs=first.rows_from(0, 1))) is None
    replay.take(AnswerUpdate(request="r", tokens=(6, 6), logprobs=first))
    assert [each.token for each in replay.logprobs] == [5, 6, 6]
    assert replay.prompt_logprobs == delta.logprobs


def test_sampling_is_checked_before_anything_is_sent() -> None:
    body = build_request(None, None, {"prompt_token_ids": [1, 2], "constraint": {"kind": "regex", "text": "a+"}})
    assert (body.prompt_token_ids, body.constraint) == ((1, 2), Constraint(kind="regex", text="a+"))
    for options, named in (({"logprobs": 21}, "logprobs"), ({"constraint": {"kind": "poem"}}, "constraint.kind")):
        with pytest.raises(InvalidRequest, match=named):
            build_request("a", None, options)
