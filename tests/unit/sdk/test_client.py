"""Clients that block and clients that await: real threads around a network of scripted gateways."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from p2pserve.bootstrap import PeerId
from p2pserve.node.messages import (
    Generate,
    Generating,
)
from p2pserve.sdk import Client
from p2pserve.sdk.errors import ClientClosed, ConnectionFailed, InvalidRequest, RequestFailed
from p2pserve.sdk.requests import Generation, TextDelta
from p2pserve.sdk.session import Session

from .client_world import (
    COMPLETE,
    WORDS,
    Gateway,
    Site,
    silent,
    whole,
)


def client_threads() -> int:
    return sum(thread.name == "p2pserve-client" for thread in threading.enumerate())


def test_a_client_answers_whole_and_in_pieces_and_leaves_no_thread() -> None:
    with Site(whole).client() as client:
        assert client.generate("a prompt") == COMPLETE
        with client.generate("a prompt", stream=True) as stream:
            with pytest.raises(RequestFailed, match="not complete"):
                _ = stream.result
            assert [delta.text for delta in stream] == list(WORDS)
            assert stream.result == COMPLETE
            assert list(stream) == []
        assert client.status().epoch == 0
        assert "connected" in repr(client)
    assert client_threads() == 0
    with pytest.raises(ClientClosed):
        client.generate("a prompt")
    client.close()


def test_a_client_may_be_used_from_many_threads() -> None:
    answers: list[Generation] = []
    with Site(whole).client() as client:
        threads = [threading.Thread(target=lambda: answers.append(client.generate("a prompt"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [COMPLETE] * 8


@pytest.mark.parametrize("run", [trio.run, lambda function: asyncio.run(function())], ids=["trio", "asyncio"])
def test_an_async_client_under_both_libraries(run: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
    async def main() -> None:
        async with Site(whole).async_client() as client:
            assert await client.generate("a prompt") == COMPLETE
            async with client.generate("a prompt", stream=True) as stream:
                assert [delta.text async for delta in stream] == list(WORDS)
            assert stream.result == COMPLETE
            assert (await client.status()).epoch == 0
        with pytest.raises(ClientClosed):
            await client.status()

    run(main)
    assert client_threads() == 0


def test_closing_a_stream_stops_the_request() -> None:
    async def endless(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        gateway.say(client, body, "one ", 1)
        return Generating(service="m-1", prompt_tokens=3)

    site = Site(endless)
    with site.client() as client:
        with client.generate("a prompt", stream=True) as stream:
            assert next(stream) == TextDelta("one ", (1,))
        assert site.gateway.stop_seen.wait(5)
        assert list(stream) == []
    assert site.gateway.stopped == [site.gateway.asked[0].request]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as in a program; a worker of pytest-xdist ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_waiting_stops_the_request() -> None:
    site = Site(silent)

    def interrupt() -> None:
        assert site.request_seen.wait(5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with site.client() as client:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(client.generate("a prompt", stream=True))
        thread.join()
        assert site.gateway.stop_seen.wait(5)
    assert len(site.gateway.stopped) == len(site.gateway.asked) == 1


def test_cancelling_a_task_stops_its_request() -> None:
    site = Site(silent)

    async def main() -> None:
        async with site.async_client() as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.generate, "a prompt")
                assert await trio.to_thread.run_sync(site.request_seen.wait, 5)
                nursery.cancel_scope.cancel()
            assert await trio.to_thread.run_sync(site.gateway.stop_seen.wait, 5)

    trio.run(main)
    assert len(site.gateway.stopped) == len(site.gateway.asked) == 1


def test_closing_a_client_ends_a_request_of_another_thread() -> None:
    site = Site(silent)
    client = site.client()
    failures: list[Exception] = []

    def ask() -> None:
        try:
            client.generate("a prompt")
        except ClientClosed as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert site.request_seen.wait(5)
    client.close()
    thread.join(5)
    assert len(failures) == 1
    assert client_threads() == 0


def test_a_failed_connection_is_told_to_everyone_and_tried_anew() -> None:
    attempts: list[int] = []

    @asynccontextmanager
    async def refuse() -> AsyncIterator[Session]:
        attempts.append(1)
        if attempts:
            raise ConnectionFailed("nobody there")
        yield Session(None, 1.0)  # type: ignore[arg-type]

    client = Client(connect=refuse)
    for _ in range(2):
        with pytest.raises(ConnectionFailed, match="nobody there"):
            client.status()
    with pytest.raises(ConnectionFailed):
        client.__enter__()
    assert len(attempts) == 3
    assert client_threads() == 0


def test_parameters_are_checked_before_anything_is_started() -> None:
    client = Client("10.0.0.1:4001")
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate("a", temperature=float("nan"))
    with pytest.raises(InvalidRequest, match="timeout_s"):
        Client("10.0.0.1:4001", timeout_s=float("nan"))
    assert client_threads() == 0
    client.close()


def test_a_forgotten_client_ends_its_thread() -> None:
    client = Site(whole).client()
    client.connect()
    assert client_threads() == 1
    del client
    assert client_threads() == 0
