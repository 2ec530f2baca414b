"""The link to an engine process: one that does not start, talks nonsense, or does not read."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLink, EngineLost, EngineRefused, EngineStartError
from p2pserve.node.testing import READY


@asynccontextmanager
async def starting() -> AsyncIterator[tuple[EngineLink, socket.socket]]:
    """A link, and the far end of its messages."""
    ours, theirs = socket.socketpair()
    sockets, far_sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = EngineLink(trio.socket.from_stdlib_socket(ours), sockets, lambda message: None)
    with theirs, far_sockets:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.serve)
            yield link, theirs
            nursery.cancel_scope.cancel()


def test_what_an_engine_says_itself_is_for_its_owner_to_mend() -> None:
    async def main() -> None:
        async with starting() as (link, far):
            far.sendall(protocol.frame(protocol.StartFailed(reason="take --dtype bfloat16")))
            with pytest.raises(EngineRefused, match=r"^take --dtype bfloat16$"):
                await link.wait_started(None)

    trio.run(main)


@pytest.mark.parametrize("said", [b"", b"\xff" * 64])
def test_one_that_dies_or_says_nonsense_is_not(said: bytes) -> None:
    async def main() -> None:
        async with starting() as (link, far):
            far.sendall(said)
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(EngineStartError) as caught:
                await link.wait_started(None)
            assert not isinstance(caught.value, EngineRefused)

    trio.run(main, clock=MockClock(autojump_threshold=0.01))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        protocol.frame(protocol.Cancel(request="x")),
        protocol.frame(protocol.StartFailed(reason="abc")).replace(b"abc", b"\xff\xfe\xfd"),
    ],
    ids=["absurd length", "no message", "wrong direction", "no text"],
)
def test_an_engine_that_talks_nonsense_is_hung_up_on(garbage: bytes) -> None:
    """It must not take its agent with it."""

    async def main() -> None:
        async with starting() as (link, far):
            far.sendall(protocol.frame(READY))
            await link.wait_started(None)
            far.sendall(garbage)
            assert "ended: the engine process sent" in await link.wait_gone()
            assert not link.running
            with pytest.raises(EngineLost):
                link.send(protocol.Stop())

    trio.run(main, clock=MockClock(autojump_threshold=0.01))


def fill(link: EngineLink) -> None:
    with socket.socket() as spare:
        for _ in range(10_000):
            link.attach(b"hello", spare)


def test_connections_that_an_engine_does_not_take_are_refused_at_once() -> None:
    """The event loop waits for no engine."""

    async def main() -> None:
        async with starting() as (link, _):
            with pytest.raises(EngineLost, match="takes no connections"):
                fill(link)

    trio.run(main)
