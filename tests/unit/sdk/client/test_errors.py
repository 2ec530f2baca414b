"""Every wrong argument is a typed error of one line, every error is exported, and figures count over gateways."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import trio

import p2pserve
from p2pserve import AsyncClient, Client, ClientError, InvalidAddress, InvalidRequest
from p2pserve.bootstrap import PeerId, RemoteError
from p2pserve.node.messages import AnswerUpdate, Generate, Generating, RequestFigures
from p2pserve.node.methods import ANSWER
from p2pserve.sdk import errors
from p2pserve.sdk.requests import TextDelta

from ..client_world import COMPLETE, WORDS, Death, Gateway, in_virtual_time, request, whole, world

FIGURES = RequestFigures(
    prompt_tokens=3, completion_tokens=4, ttft_s=0.1, tpot_s=0.1, e2e_s=0.4, prefill_node=None, decode_node="d",
    codec="kv4", attempts=2, recovered=("an engine was lost",), cached_tokens=0, transfer=None,
)  # fmt: skip


def test_all_errors_of_a_client_are_exported_and_documented() -> None:
    made = {
        name
        for name, each in vars(errors).items()
        if inspect.isclass(each) and issubclass(each, ClientError) and not name.startswith("_")
    }
    assert made <= set(p2pserve.__all__)
    page = (Path(__file__).resolve().parents[4] / "docs" / "sdk.md").read_text("utf-8")
    assert [name for name in sorted(made) if f"`{name}`" not in page] == []
    assert all(getattr(p2pserve, name).__doc__ for name in made)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({}, InvalidAddress, "bootstrap: give the token"),
        ({"bootstrap": None}, InvalidAddress, "bootstrap: give the token"),
        ({"bootstrap": ""}, InvalidAddress, "bootstrap: give the token"),
        ({"bootstrap": 5}, InvalidAddress, "bootstrap: 5 is no text"),
        ({"bootstrap": b"p2p_client_x"}, InvalidAddress, "is no text"),
        ({"bootstrap": "nonsense"}, InvalidAddress, "nonsense"),
        ({"bootstrap": "p2p_client_x"}, InvalidAddress, "malformed"),
        ({"bootstrap": "127.0.0.1:1", "token": 5}, InvalidAddress, "token: 5 is no text"),
        ({"bootstrap": "127.0.0.1:1", "timeout_s": 0}, InvalidRequest, "timeout_s: 0"),
        ({"bootstrap": "127.0.0.1:1", "timeout_s": "5"}, InvalidRequest, "timeout_s: '5'"),
        ({"bootstrap": "127.0.0.1:1", "timeout_s": None}, InvalidRequest, "timeout_s: None"),
        ({"bootstrap": "127.0.0.1:1", "timeout_s": float("nan")}, InvalidRequest, "timeout_s: nan"),
        ({"connect": "somebody"}, InvalidRequest, "connect: 'somebody'"),
    ],
)
def test_what_a_client_cannot_be_made_of(
    kind: Any, arguments: dict[str, Any], error: type[ClientError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("P2PSERVE_BOOTSTRAP", raising=False)
    monkeypatch.delenv("P2PSERVE_TOKEN", raising=False)
    with pytest.raises(error, match=says) as caught:
        kind(**arguments)
    assert "\n" not in str(caught.value)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", "p2p_client_mistyped")
    for arguments in ((), (None,)):
        with pytest.raises(InvalidAddress, match="malformed"):
            Client(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt: expected"),
        ({"prompt": ""}, "prompt: it is empty"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt: give"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"prompt": "x", "stream": "yes"}, "stream: 'yes'"),
        ({"prompt": "x", "stream": None}, "stream: None"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens: expected"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: 0"),
        ({"prompt": "x", "max_tokens": 2**70}, "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature: nan"),
        ({"prompt": "x", "temperature": None}, "temperature"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "deadline_s": -1}, "deadline_s"),
        ({"prompt": "x", "service": 5}, "service"),
        ({"prompt": "x", "request": "mine"}, "request: unknown parameter"),
        ({"prompt": "x", "max_token": 5}, "unknown parameter `max_token`"),
        ({"prompt": "\ud800"}, "prompt: this is not valid Unicode"),
    ],
)
def test_what_cannot_be_asked(arguments: dict[str, Any], says: str) -> None:
    def never() -> Any:
        raise AssertionError("a session was opened")

    client = Client(connect=never)
    with pytest.raises(InvalidRequest, match=says) as caught:
        client.generate(**arguments)
    assert "\n" not in str(caught.value)


async def whole_with_figures(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
    await whole_answer(gateway, client, body)
    return Generating(service="m-1", prompt_tokens=3)


async def whole_answer(gateway: Gateway, client: PeerId, body: Generate) -> None:
    for number, word in enumerate(WORDS, start=1):
        gateway.say(client, body, word, number)
    gateway.network.notify(client, ANSWER, AnswerUpdate(request=body.request, finish="length", figures=FIGURES))


def test_figures_count_the_attempts_at_all_gateways() -> None:
    async def main() -> None:
        death = Death(0)

        async def refuse(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
            raise RemoteError("busy", "a reason")  # no attempt: it has done nothing

        async with world(death.script, refuse, whole_with_figures) as (made, session):
            death.world = made
            answer = await session.generate(request(), death.deliver)
            assert answer.text == COMPLETE.text
            assert answer.figures is not None
            assert answer.figures.attempts == 3
            assert len(answer.figures.recovered) == 2
            assert re.match("gateway [a-z]+-[a-z]+ was lost", answer.figures.recovered[0])
            assert "was lost" in answer.figures.recovered[0]
            assert answer.figures.recovered[1] == "an engine was lost"

    in_virtual_time(main)


def test_a_session_outlives_the_member_that_it_came_in_by() -> None:
    async def main() -> None:
        async with world(whole, whole) as (made, joined):
            pieces: list[TextDelta] = []
            made.memory.kill(made._identity.peer_id)
            with trio.move_on_after(20):
                await trio.sleep_forever()
            assert await joined.generate(request(), pieces.append) == COMPLETE
            made.memory.kill(made.gateways[0].network.peer_id)
            assert await joined.generate(request(), pieces.append) == COMPLETE
            assert (await joined.status()).answered_by == made.gateways[1].network.peer_id

    in_virtual_time(main)
