"""An engine process that does not start: what its owner is told, by what the process said or how it ended."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLink, EngineRefused, EngineStartError


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
