"""A node that cannot be dialled is asked to dial, and the connection is as one that was accepted."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest
import trio

from p2pserve.bootstrap import Address, PeerId, RemoteError, Role, Unreachable
from p2pserve.node.links.call_back import CALL_HELLO_BYTES, CALL_MAGIC, CallBacks
from p2pserve.node.links.messages import CallBack
from p2pserve.node.settings import WAN, NodeTuning
from p2pserve.node.testing import MemoryExchange

pytestmark = pytest.mark.beside

ASKER, INNER = PeerId("asker"), PeerId("inner")
NOWHERE = Address("127.0.0.1", 1)
PATIENT = replace(WAN, ask_s=60.0)
HASTY = replace(WAN, ask_s=0.1)


@dataclass
class Two:
    """A node that listens, and one that nobody can dial."""

    nursery: trio.Nursery
    tuning: NodeTuning = PATIENT
    is_there: bool = True
    passes_on: bool = True
    adopted: list[trio.SocketStream] = field(default_factory=list)
    proved: int = 0
    at: Address = NOWHERE

    async def open(self) -> None:
        self.exchange = MemoryExchange()
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.at = Address("127.0.0.1", listener.socket.getsockname()[1])
        self.asker, self.inner = (self._join(peer) for peer in (ASKER, INNER))
        self.nursery.start_soon(trio.serve_listeners, self._accept, [listener])

    def _join(self, peer: PeerId) -> CallBacks:
        return CallBacks(
            messenger=self.exchange.join(peer),
            where=lambda peer: self.at if self.is_there else None,
            prove=self._prove,
            adopt=self.adopted.append,
            nursery=self.nursery,
            tuning=self.tuning,
        )

    async def _prove(self, peer: PeerId, address: Address) -> Address:
        self.proved += 1
        if peer != ASKER:
            raise Unreachable("somebody else answers there")
        return address

    async def _accept(self, stream: trio.SocketStream) -> None:
        hello = b""
        while len(hello) < CALL_HELLO_BYTES:
            hello += await stream.receive_some(CALL_HELLO_BYTES - len(hello))
        sock = stream.socket
        raw = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())
        raw.setblocking(True)
        if not (self.passes_on and self.asker.take(hello, raw)):
            raw.close()

    async def connect(self) -> socket.socket:
        return await trio.to_thread.run_sync(self.asker.connect, INNER)


def play(scenario: Callable[[Two], Awaitable[None]], tuning: NodeTuning = PATIENT) -> None:
    async def main() -> None:
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:
                two = Two(nursery, tuning)
                await two.open()
                await scenario(two)
                for stream in two.adopted:
                    await stream.aclose()
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_it_dials_and_both_go_on_as_if_it_had_been_dialled() -> None:
    async def scenario(two: Two) -> None:
        for _ in range(3):
            with await two.connect() as near:
                far = two.adopted.pop()
                await trio.to_thread.run_sync(near.sendall, b"a link's hello")
                assert await far.receive_some(100) == b"a link's hello"
                await far.aclose()
        assert two.proved == 1  # for a while it is known where the asker is

    play(scenario)


def test_one_that_is_gone_of_an_earlier_release_or_cannot_reach_us_fails_at_once() -> None:
    async def scenario(two: Two) -> None:
        two.is_there = False
        with pytest.raises(OSError, match="no address of asker"):
            await two.connect()
        two.is_there = True
        two.exchange.lost.add(INNER)
        with pytest.raises(OSError, match="is gone"):
            await two.connect()
        two.exchange.lost.clear()
        two.at = NOWHERE
        with pytest.raises(OSError, match="was not reached"):
            await two.connect()

    play(scenario)


def test_a_connection_that_does_not_come_is_not_waited_for() -> None:
    async def scenario(two: Two) -> None:
        two.passes_on = False
        with pytest.raises(OSError, match="did not dial back in time"):
            await two.connect()

    play(scenario, HASTY)


def test_a_number_that_nobody_has_asked_with_is_refused() -> None:
    async def scenario(two: Two) -> None:
        near, far = socket.socketpair()
        with near, far:
            assert not two.asker.take(CALL_MAGIC + bytes(16), near)

    play(scenario)


async def call(two: Two, peer: PeerId) -> str:
    """Why it was refused."""
    with pytest.raises(RemoteError) as refused:
        await two.inner.on_call(peer, Role.WORKER, CallBack(call=bytes(16)))
    return str(refused.value)


def test_nobody_has_too_many_connections_dialled_nor_to_where_it_is_not() -> None:
    async def scenario(two: Two) -> None:
        two.at = NOWHERE
        reasons = {await call(two, ASKER) for _ in range(2 * WAN.calls_burst)}
        assert any("too many" in reason for reason in reasons)
        assert "was not reached" in await call(two, PeerId("other"))
        assert two.adopted == []

    play(scenario)
