"""Starting the process that forks a node's engines, and connecting to it or to one that several nodes share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import trio

from ...box.hardware import cuda_environment
from ..api.protocol import WITH_API
from ..backends import find_backend
from .engine_link import EngineStarter, ForkServerClient

_END_S = 5.0  # for a fork server whose engines have all ended

OpenForkServer = Callable[..., AbstractAsyncContextManager[EngineStarter]]


@asynccontextmanager
async def open_fork_server(
    *,
    log: Path | None,
    threads: int,
    channel: int | None = None,
    at: Path | None = None,
    listener: socket.socket | None = None,
    backend: str = "vllm",
    serves_api: bool = False,
) -> AsyncIterator[ForkServerClient]:
    """A fork server for the body: `channel` of a shared one that has preloaded this backend, the one that listens `at`
    a socket's path, or a new one, which other nodes of this box dial by `listener`. `serves_api`: an API process is to
    be forked of it, too. Leaving ends every engine started through it."""
    if at is not None or channel is not None:
        shared = socket.socket(fileno=channel) if at is None else await _dial(at)
        async with _connect(shared, log) as server:
            yield server
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ends = [theirs] if listener is None else [theirs, listener]
        command, environment = fork_server_command(
            ends, log=log, threads=threads, backend=backend, serves_api=serves_api
        )
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[end.fileno() for end in ends],
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is for the agent, which hangs up when it is done
        )
    try:
        async with _connect(ours, log) as server:
            yield server
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(_END_S):
            await process.wait()
        if process.returncode is None:
            process.kill()


def fork_server_command(
    channels: list[socket.socket],
    *,
    log: Path | None,
    threads: int,
    backend: str = "vllm",
    serves_api: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a fork server on the far ends of `channels`, which it must inherit."""
    environment = {**os.environ, **find_backend(backend).environment, **cuda_environment()}
    environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    # Weight files are mapped and read once: nothing is gained from more allocator arenas than threads.
    environment.setdefault("MALLOC_ARENA_MAX", "4")
    if log is not None:
        environment["P2PSERVE_ENGINE_LOG"] = str(log)
    descriptors = [str(channel.fileno()) for channel in channels]
    what = [backend, WITH_API] if serves_api else [backend]
    return [sys.executable, "-m", "p2pserve.node.engine.forkserver", *what, *descriptors], environment


async def _dial(at: Path) -> socket.socket:
    """Whoever keeps the server that listens there keeps its socket, too, while it starts another. Raises OSError."""
    dialled = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    await dialled.connect(str(at))
    return socket.socket(fileno=dialled.detach())


@asynccontextmanager
async def _connect(channel: socket.socket, log: Path | None) -> AsyncIterator[ForkServerClient]:
    async with trio.open_nursery() as nursery:
        server = ForkServerClient(trio.socket.from_stdlib_socket(channel), nursery, log)
        nursery.start_soon(server.serve)
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel()
            channel.close()
