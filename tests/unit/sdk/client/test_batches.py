"""Batches: order, errors of single items, bounded concurrency, progress, and cancellation."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import trio

from p2pserve.bootstrap import PeerId, RemoteError
from p2pserve.node.messages import Generate, Generating
from p2pserve.sdk import Client
from p2pserve.sdk.batches import Outcome, show_progress
from p2pserve.sdk.errors import ClientError, ConnectionFailed, InvalidRequest, RequestFailed
from p2pserve.sdk.requests import Generation

from ..client_world import COMPLETE, Gateway, Site, silent, whole


async def by_prompt(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
    """The prompt comes back; `fail` is refused, and `a` comes after the others."""
    if body.prompt == "fail":
        raise RemoteError("broken", "a reason")
    if body.prompt == "a":
        with trio.move_on_after(0.2):
            await trio.sleep_forever()
    text = body.prompt or "".join(message.content for message in body.messages or ())
    text = text or f"tokens {body.prompt_token_ids}"
    gateway.say(client, body, text, 1)
    gateway.say(client, body, "", finish="stop")
    return Generating(service="m-1", prompt_tokens=3)


def texts(outcomes: Iterable[Outcome]) -> list[str]:
    return [each.text if isinstance(each, Generation) else f"{type(each).__name__}: {each}" for each in outcomes]


def test_answers_come_in_the_order_of_the_prompts_and_errors_beside_them() -> None:
    calls: list[tuple[int, int]] = []
    with Site(by_prompt).client() as client:
        prompts: list[Any] = ["a", "fail", "b", "", 5, [{"role": "user", "content": "chat"}], [{"role": 1}], (1, 2)]
        found = client.generate_many(prompts, progress=lambda *now: calls.append(now), max_tokens=3)
    said = texts(found)
    assert (said[0], said[2], said[5]) == ("a", "b", "chat")
    assert isinstance(found[1], RequestFailed)
    assert said[3].startswith("InvalidRequest: prompt: it is empty")
    assert said[4] == "InvalidRequest: prompts: '5' is no text, no list of token ids and no conversation"
    assert said[6].startswith("InvalidRequest: messages")
    assert said[7] == "tokens (1, 2)"
    assert calls == [(number, 8) for number in range(1, 9)]


@pytest.mark.parametrize("run", [asyncio.run, trio.run], ids=["asyncio", "trio"])
def test_the_same_awaited(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with Site(by_prompt).async_client() as client:
            assert texts(await client.generate_many(["b", "c"])) == ["b", "c"]
            assert await client.generate_many([]) == []
            assert (await client.chat("hello")).text == "hello"

    run(main() if run is asyncio.run else main)


def test_no_more_are_asked_at_once_than_was_said() -> None:
    now = most = 0

    async def count(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        nonlocal now, most
        now += 1
        most = max(most, now)

        async def answer() -> None:
            nonlocal now
            with trio.move_on_after(0.01):
                await trio.sleep_forever()
            now -= 1
            gateway.say(client, body, "x", 1)
            gateway.say(client, body, "", finish="stop")

        gateway.nursery.start_soon(answer)
        return Generating(service="m-1", prompt_tokens=3)

    with Site(count).client() as client:
        assert len(client.generate_many([f"p{number}" for number in range(20)], concurrency=3)) == 20
    assert most == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompts": "one text"}, r"^prompts: give a list"),
        ({"prompts": None}, r"^prompts: give a list"),
        ({"prompts": {"a": 1}}, r"^prompts: give a list"),
        ({"prompts": ["x"], "concurrency": 0}, r"^concurrency: 0"),
        ({"prompts": ["x"], "concurrency": 1.5}, r"^concurrency: 1\.5"),
        ({"prompts": ["x"], "progress": "yes"}, r"^progress: 'yes'"),
        ({"prompts": ["x"], "temperature": 9}, r"^temperature: 9"),
        ({"prompts": ["x"], "colour": 9}, r"^unknown parameter `colour`"),
    ],
)
def test_what_is_wrong_with_all_is_said_before_anything_is_sent(arguments: dict[str, Any], says: str) -> None:
    def never() -> Any:
        raise AssertionError("a session was opened")

    client = Client(connect=never)
    with pytest.raises(InvalidRequest, match=says):
        client.generate_many(**arguments)


def test_a_network_that_cannot_be_reached_ends_the_batch() -> None:
    with pytest.raises(ConnectionFailed), Client("127.0.0.1:1", token=None, timeout_s=0.5) as client:
        client.generate_many(["x"])


def test_leaving_a_batch_cancels_what_is_left_of_it() -> None:
    site = Site(silent)
    client = site.client()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            client.generate_many(["x", "y"])
        except ClientError as error:
            failures.append(error)

    with client:
        thread = threading.Thread(target=run)
        thread.start()
        assert site.request_seen.wait(20)
    thread.join(20)
    assert [type(error).__name__ for error in failures] == ["ClientClosed"]


def test_the_bar_counts_tokens_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(True, 2) as advance:
        advance(COMPLETE)
        advance(RequestFailed("no"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    assert "1 failed" in shown.err


def test_chat_is_a_conversation() -> None:
    site = Site(whole)
    with site.client() as client:
        assert client.chat("hello", max_tokens=4) == COMPLETE
        turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        with client.chat(turns, stream=True) as stream:
            assert "".join(delta.text for delta in stream) == COMPLETE.text
        first, second = site.gateway.asked
        assert [(turn.role, turn.content) for turn in first.messages or ()] == [("user", "hello")]
        assert len(second.messages or ()) == 2
        wrong: Any
        for wrong in (None, 5, [], [{"role": "user"}], [{"content": "x"}], {"role": "user", "content": "x"}):
            with pytest.raises(InvalidRequest, match=r"^messages"):
                client.chat(wrong)
