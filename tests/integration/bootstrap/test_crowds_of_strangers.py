"""Strangers that open sockets and go no further, and a worker that wants to join meanwhile."""

import errno
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import pytest
import trio

from p2pserve.bootstrap import Address
from p2pserve.bootstrap.streams.libp2p_host import Libp2pTransport

from .libp2p_worlds import DATA_HEAD, UNHURRIED, Echo, asking, build, echo_server, run, until

pytestmark = pytest.mark.beside

MULTISTREAM = b"\x13/multistream/1.0.0\n"
NOISE = b"\x07/noise\n"
# Nobody is hung up on because time has passed: what makes room is that others come.
FOR_EVER = replace(UNHURRIED, peek_s=3600.0, upgrade_s=3600)
SILENT, STOPPING = 600, 100


@contextmanager
def many_files(count: int) -> Iterator[None]:
    """Let this process open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"a process may open {hard} files here, and this takes {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count) if soft != resource.RLIM_INFINITY else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def crowd(address: Address, source: str, *says: bytes) -> AsyncIterator[None]:
    """For each of these a socket from that address on which it is said, and no more."""
    streams: list[trio.SocketStream] = []
    try:
        for said in says:
            streams.append(await trio.open_tcp_stream(address.host, address.port, local_address=source))
            with suppress(trio.BrokenResourceError):  # turned away already
                if said:
                    await streams[-1].send_all(said)
        yield
    finally:
        for stream in streams:
            await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"], ids=["from another address", "from its own address"])
def test_a_worker_joins_whoever_else_is_connected(source: str) -> None:
    """Half of those that stop have begun with the handshake proper."""

    async def main() -> None:
        stopping = (MULTISTREAM, MULTISTREAM + NOISE + b"\x00\x20" + bytes(30)) * (STOPPING // 2)
        says = (*(b"" for _ in range(SILENT)), *stopping, *(DATA_HEAD[:4] for _ in range(STOPPING)))
        async with build(None, transport_settings=FOR_EVER) as one, crowd(one.address, source, *says):
            transport = one.transport
            assert isinstance(transport, Libp2pTransport)
            limits = FOR_EVER.strangers
            await until(lambda: transport.strangers == min(limits.each, limits.total - limits.for_members))
            async with build(one, transport_settings=FOR_EVER) as two:
                await until(lambda: two.peer_id in one.connected())
                assert await two.request(one.peer_id, asking("echo"), Echo("let in"), 30) == Echo("let in")
            one.check_integrity()

    with many_files(4 * (SILENT + STOPPING)):
        run(main)


def test_a_member_keeps_its_place_whatever_others_do() -> None:
    """Those that come and go, one after the other, do not get at a connection that was let in."""

    async def main() -> None:
        async with build(None, transport_settings=FOR_EVER) as one, build(one, transport_settings=FOR_EVER) as two:
            for _ in range(3):
                async with crowd(one.address, "127.0.0.3", *([MULTISTREAM] * STOPPING)):
                    assert await two.request(one.peer_id, asking("echo"), Echo("in"), 30) == Echo("in")

    with many_files(8 * STOPPING):
        run(main)


def test_a_process_without_files_left_goes_on_when_it_has_some(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with echo_server() as (address, server, dialling):
            before = await dialling.dial(address, server.peer_id)
            waiting = socket.create_connection((address.host, address.port))  # accepted, and silent
            await trio.testing.wait_all_tasks_blocked()
            taken = list[socket.socket]()
            knocking = [socket.socket() for _ in range(3)]
            with suppress(OSError):
                while True:
                    taken.append(socket.socket())
            with pytest.raises(OSError, match=rf"Errno {errno.EMFILE}"):
                socket.socket()
            for each in knocking:
                each.setblocking(False)
                with suppress(BlockingIOError):
                    each.connect((address.host, address.port))
            await until(lambda: any("ulimit -n" in record.message for record in caplog.records))
            await before.send(b"still here")
            assert await before.receive() == b"still here"
            for each in (*taken, *knocking, waiting):
                each.close()
            after = await dialling.dial(address, server.peer_id)
            await after.send(b"and open to all")
            assert await after.receive() == b"and open to all"

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            run(main)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (complaint,) = [record for record in caplog.records if "nobody can connect" in record.message]
    assert complaint.levelno == logging.WARNING
