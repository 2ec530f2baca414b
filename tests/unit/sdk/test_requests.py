"""Parameters, gateways and replays as plain values."""

from typing import Any

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, AnswerUpdate, EngineAdvert
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.sdk.errors import InvalidRequest
from p2pserve.sdk.requests import Candidate, Diverged, Piece, Replay, build_request, gateways


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


def chunk(text: str, *tokens: int) -> AnswerUpdate:
    return AnswerUpdate(request="r", text=text, tokens=tokens)


def test_a_replay_hands_on_only_what_is_new() -> None:
    replay = Replay()
    assert replay.take(chunk("ab", 1, 2)) == Piece("ab", (1, 2))
    assert replay.take(chunk("", 3)) == Piece("", (3,))  # a token that completes no character yet
    replay.restart()
    assert replay.take(chunk("a", 1)) is None
    assert replay.take(chunk("bcd", 2, 3, 4)) == Piece("cd", (4,))
    assert replay.take(chunk("e", 5)) == Piece("e", (5,))
    assert (replay.text, replay.tokens) == ("abcde", [1, 2, 3, 4, 5])


@pytest.mark.parametrize("again", [chunk("ab", 1, 9), chunk("ax", 1, 2)])
def test_a_replay_that_differs_is_refused(again: AnswerUpdate) -> None:
    replay = Replay()
    replay.take(chunk("ab", 1, 2))
    replay.restart()
    with pytest.raises(Diverged):
        replay.take(again)


def candidate(
    name: str, state: str | None, rtt: float | None, *, draining: bool = False, service: str = "m-1"
) -> Candidate:
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
    return Candidate(peer=PeerId(name), advert=advert, rtt_s=rtt)


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
        Candidate(peer=PeerId("silent"), advert=None, rtt_s=0.0),
    ]
    assert gateways(candidates, "m-1") == ["near", "far", "unmeasured", "starting"]
    assert gateways(candidates, "n-1") == ["other model"]
    assert gateways(candidates, "nobody's") == []
    assert gateways(candidates, None)[0] == "other model"
